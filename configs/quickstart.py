"""The quickstart: FedAnchor on scikit-learn's digits (1,797 8x8 images, no download), labels at the server.

    python launch.py

20 clients of 69 images each, non-IID (Dirichlet alpha 0.5), 50 labelled images (anchors) at the server, 5 clients a
round, 40 rounds.
At our scale FedAnchor minus the labels alone is +8.39 ± 4.45 (board leaderboard/digits_server).
Arguments: iid, server_labels=, alpha=, images= (per client), and the variants of fedjax_ssl/methods/fedanchor/.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    config.num_rounds = 40
    config.num_clients = 20
    config.clients_per_round = 5
    config.data.source = "digits"
    config.data.server_labels = 50
    config.data.alpha = 0.5
    config.model.name = "cnn"
    config.server.augmentation = "weak"  # the paper's 'strong' was worse in our first runs
    config.augment.padding = 1
    return apply_arguments(config, arguments)
