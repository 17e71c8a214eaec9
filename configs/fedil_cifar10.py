"""FedIL on CIFAR-10, labels at the server: its Tables I to III, Figures 5 and 6 (arXiv 2302.11823), ResNet-9.

    python launch.py --config=configs/fedil_cifar10.py

Label rate 0.01: 500 labelled images at the server, 495 unlabelled ones at each of 100 clients, 5 clients a round, 5
local epochs, 2,000 rounds; IID, or 2 of the 10 classes for each client (argument two_classes). The paper's test
accuracy: 61.31 and 58.98.
At our scale FedIL minus the labels alone is +5.99 ± 1.18 (board fedil_mnist).
Arguments: two_classes, a backbone, server_labels=, images=, the variants of fedjax_ssl/methods/fedil/ (Table II),
other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedil,paper,resnet9")
    config.data.server_labels = 500
    return apply_arguments(config, arguments)
