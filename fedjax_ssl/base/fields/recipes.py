"""Names for several fields at once: recipes, and the other words after a config file's colon."""

IID_ALPHA = 1000.0  # FedAnchor's "IID" is Dir(1000) ("Federated datasets" of its experiments)

# Words that every config file accepts after its colon, besides methods, their variants, recipes and backbones.
WORDS = {
    "iid": {"data.alpha": IID_ALPHA},
    "stratified": {"data.partition": "stratified"},  # FedMatch's batch-IID
    "two_classes": {"data.partition": "shards", "data.classes_per_client": 2},  # FedIL's non-IID
    "centralised": {"method": "server_only", "data.centralised": True},
}

# The same with a value: name=value.
ARGUMENT_FIELDS = {"server_labels": "data.server_labels", "alpha": "data.alpha", "images": "data.examples_per_client"}

# Recipes: settings that apply to any method, so that methods can be compared under the same ones. Published systems
# differ in their recipes as much as in their ideas, which changes accuracies by tens of points. `plain` is most likely
# what FedAnchor's tables used for all rows, see docs/concepts/recipes.md; `strong` is SemiFL's.
RECIPES = {
    "plain": {
        "schedule": "constant",
        "client.nesterov": False,
        "client.clip_norm": 0.0,
        "client.persistent": False,
        "server.nesterov": False,
        "server.clip_norm": 0.0,
        "server.persistent": False,
        "model.normalisation": "running",
        "aggregation.weights": "size",
        "aggregation.optimizer": "fedavg",
    },
    "strong": {
        "schedule": "cosine",
        "client.nesterov": True,
        "client.clip_norm": 1.0,
        "client.persistent": True,
        "server.nesterov": True,
        "server.clip_norm": 1.0,
        "server.persistent": True,
        "model.normalisation": "static",
        "model.statistics": "all",
        "aggregation.weights": "uniform",
        "aggregation.optimizer": "fedavgm",
        "aggregation.learning_rate": 1.0,
        "aggregation.momentum": 0.5,
    },
}
