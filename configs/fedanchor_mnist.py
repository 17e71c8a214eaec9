"""FedAnchor on MNIST with the small CNN: an experiment that a laptop finishes.

    python launch.py --config=configs/fedanchor_mnist.py
    python launch.py --config=configs/fedanchor_mnist.py:no_contrastive --config.data.source=npz --config.data.path=FILE

100 clients of 500 images, Dir 0.1, 100 labelled anchors at the server, 10 clients a round, 5 local epochs, 60 rounds.
MNIST is not among the paper's data sets; what this gives is in docs/results/fedanchor.md.
Arguments: iid, server_labels=, alpha=, images= (for each client), and the variants of fedjax_ssl/methods/fedanchor/.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    config.num_rounds = 60
    config.data.source = "mnist"
    config.data.server_labels = 100
    config.data.examples_per_client = 500
    config.model.name = "cnn"
    config.augment.padding = 1  # chosen on validation images, configs/sweeps/mnist_crop.py; 4 costs up to 13 points
    config.server.augmentation = "weak"  # strong, as in the paper, costs points here: docs/results/fedanchor.md
    return apply_arguments(config, arguments)
