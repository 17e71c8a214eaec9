"""FedAnchor on scikit-learn's handwritten digits (1,797 real 8x8 images, no download): the quickstart.

python launch.py

20 clients of 66 images each, non-IID (Dir 0.1), 50 labelled anchors at the server, 5 clients a round.
"""

from fedjax_ssl.config import base_config


def get_config():
    config = base_config()
    config.num_rounds = 40
    config.num_clients = 20
    config.clients_per_round = 5
    config.data.source = "digits"
    config.data.num_anchors = 50
    config.model.name = "cnn"
    config.augment.padding = 1
    return config
