"""FedAnchor on scikit-learn's handwritten digits (1,797 real 8x8 images, no download): the quickstart.

    python launch.py

20 clients of 69 images each, non-IID (Dir 0.5), 50 labelled anchors at the server, 5 clients a round.
Arguments: iid, server_labels=, alpha=, images= (for each client), and the variants of fedjax_ssl/methods/fedanchor/.
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
    config.server.augmentation = "weak"  # strong, as in the paper, costs points here: docs/results/fedanchor.md
    config.augment.padding = 1
    return apply_arguments(config, arguments)
