"""FedIL on CIFAR-100, labels at the server: its Table I (arXiv 2302.11823), with ResNet-9.

    python launch.py --config=configs/fedil_cifar100.py
    python launch.py --config=configs/fedil_cifar100.py --config.data.partition=shards

Label rate 0.1: 5,000 labelled images at the server, 450 unlabelled ones at each of 100 clients, 5 clients a round, 5
local epochs, 2,000 rounds; IID, or 20 of the 100 classes for each client (the second command). The paper's test
accuracy: 48.25 and 46.39.
At our scale FedIL minus the labels alone is +5.99 ± 1.18 (board fedil_mnist).
Arguments: a backbone, server_labels=, images= (per client), the variants of fedjax_ssl/methods/fedil/ (Table
II), other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedil,paper,resnet9")
    config.data.source = "cifar100"
    config.data.server_labels = 5000
    config.data.classes_per_client = 20
    return apply_arguments(config, arguments)
