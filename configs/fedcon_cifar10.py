"""FedCon on CIFAR-10 in the setting of its public code (arXiv 2109.04533), on ResNet-18 instead of its own CNN.

    python launch.py --config=configs/fedcon_cifar10.py
    python launch.py --config=configs/fedcon_cifar10.py:two_classes,server_labels=5000
    python launch.py --config=configs/fedcon_cifar10.py:code

A hundredth of the training set at the server, drawn at random, or a tenth; 100 clients, 10 a round, 200 rounds, one
local epoch by LARS, one epoch at the server; IID, or 2 classes for each client. Its own table could not be read. What
others report of its code, with networks and numbers of labels of their own: FedAnchor, ResNet-18, 250 / 500 / 5,000
labels, 34.94 / 50.81 / 74.95 IID and 38.46 / 51.57 / 76.38 at Dir 0.1; (FL)^2, Wide-ResNet-28-2, 10 / 40 labels, 16.7 /
23.3 IID. Each client has a backbone and a projector of its own: 5.1 GB on the device for this config, and as much in
every checkpoint.
Arguments: two_classes, server_labels=, a backbone (then set fedcon.projector_hidden, three times the features is its
code's), the variants of fedjax_ssl/methods/fedcon.py, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedcon,paper,resnet18")
    config.data.server_labels = 500
    config.fedcon.projector_hidden = 3 * 512
    return apply_arguments(config, arguments)
