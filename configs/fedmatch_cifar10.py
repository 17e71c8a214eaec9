"""FedMatch on CIFAR-10 with its ResNet-9, labels at the clients or at the server (arXiv 2006.12097).

    python launch.py --config=configs/fedmatch_cifar10.py
    python launch.py --config=configs/fedmatch_cifar10.py:non_iid
    python launch.py --config=configs/fedmatch_cifar10.py:labels_at_server
    python launch.py --config=configs/fedmatch_cifar10.py:labels_at_server,non_iid

Each of 100 clients has 5 labels a class; with labels_at_server the server has 100 a class and the clients none. 5
clients a round, 1 local epoch, 200 rounds. IID, or non_iid: half of a client's unlabelled images are of one class.
The paper divides CIFAR-10's 60,000 images as 56,000 / 2,000 / 2,000 for training, validation and test. This config
keeps the data set's 50,000 and 10,000, so a client has 500 images instead of 560.
The paper's own figures could not be read. ProtoFSSL's runs of the public code, labels at the clients: 57.7 IID, 59.1
non-IID, and 62.2 for FedAvg on the labels alone. In SAGE's protocol (ResNet-8, 10 % labels, Dirichlet 0.1 / 0.5 / 1,
see docs/data.md): 75.35 / 77.86 / 78.00.
The server remembers two models for each client, 5.3 GB; with --config.fedmatch.sparse_down=False one, 2.6 GB.
At our scale FedMatch minus the labels alone is -2.50 ± 2.34 (board leaderboard/mnist_clients).
Arguments: the variants of fedjax_ssl/methods/fedmatch/, a backbone, server_labels=, images= (per client), other
methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedmatch,labels_at_client")
    return apply_arguments(config, arguments)
