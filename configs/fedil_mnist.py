"""FedIL on MNIST, labels at the server: its Table I (arXiv 2302.11823), with ResNet-9.

    python launch.py --config=configs/fedil_mnist.py
    python launch.py --config=configs/fedil_mnist.py:two_classes

Label rate 0.01: 600 labelled images at the server, 594 unlabelled ones at each of 100 clients, 5 clients a round, 5
local epochs, 2,000 rounds; IID, or 2 of the 10 classes for each client. The paper's test accuracy: 98.30 and 98.46. The
paper gives no learning rate, batch size or optimizer; here they are the library's defaults.
At our scale FedIL minus the labels alone is +5.99 ± 1.18 (board fedil_mnist).
Arguments: two_classes, a backbone (cnn), server_labels=, images= (per client), the variants of
fedjax_ssl/methods/fedil/ (Table II), other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedil,paper,resnet9")
    config.data.source = "mnist"
    config.data.server_labels = 600
    return apply_arguments(config, arguments)
