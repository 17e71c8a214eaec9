"""Training recipes: fragments of a configuration that any method takes, so that methods are compared under the same.

The published systems differ in their recipes as much as in their ideas, and accuracies move by tens of points with
them. `plain` is what FedAnchor's tables must have used for all their rows (see `docs/methods.md`), `strong` is
SemiFL's own.
"""

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
