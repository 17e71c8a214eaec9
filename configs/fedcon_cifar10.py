"""FedCon on CIFAR-10, labels at the server: its public code's setting, with ResNet-18 (arXiv 2109.04533).

    python launch.py --config=configs/fedcon_cifar10.py
    python launch.py --config=configs/fedcon_cifar10.py:two_classes,server_labels=5000
    python launch.py --config=configs/fedcon_cifar10.py:code

The server has a hundredth of the training set, drawn at random (500 images; the second command: a tenth). 100 clients,
IID or 2 classes for each, 10 a round, 200 rounds, one local epoch with LARS, one epoch at the server. The backbone is
ResNet-18 instead of the code's own CNN.
The table in FedCon's paper could not be read. Other papers report figures of its code, with their own networks and
numbers of labels. FedAnchor's paper: ResNet-18, 250 / 500 / 5,000 labels, 34.94 / 50.81 / 74.95 under IID and 38.46 /
51.57 / 76.38 at Dirichlet alpha 0.1. (FL)^2's paper: Wide-ResNet-28-2, 10 / 40 labels, 16.7 / 23.3 under IID.
Each client has its own backbone and projector: 5.1 GB on the device for this config, and the same in every checkpoint.
At our scale FedCon minus the labels alone is -0.57 ± 1.47 (board leaderboard/mnist_server).
Arguments: two_classes, server_labels=, a backbone, the variants of fedjax_ssl/methods/fedcon.py, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedcon,paper,resnet18")
    config.data.server_labels = 500
    return apply_arguments(config, arguments)
