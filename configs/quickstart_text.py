"""FixMatch on texts, labels at the server: paragraphs of SciPy's documentation on four topics, no download.

    python launch.py --config=configs/quickstart_text.py

20 clients, non-IID (Dirichlet alpha 0.5), 160 labelled texts at the server, 5 clients a round; a small Transformer.
Training on the server's labels alone: --config=configs/quickstart_text.py:server_only.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = apply_arguments(base_config(), "fixmatch")
    config.num_rounds = 10
    config.num_clients = 20
    config.clients_per_round = 5
    config.data.source = "scipy_docs"
    config.data.text_length = 48
    config.data.vocabulary = 2000
    config.data.server_labels = 160
    config.data.alpha = 0.5
    config.model.name = "transformer"
    config.model.normalisation = "group"
    config.client.learning_rate = config.server.learning_rate = 0.1
    config.server.augmentation = "weak"
    config.server.epochs = 5
    return apply_arguments(config, arguments)
