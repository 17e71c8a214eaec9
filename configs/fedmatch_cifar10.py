"""FedMatch on CIFAR-10 with its ResNet-9, in both of its settings (arXiv 2006.12097).

    python launch.py --config=configs/fedmatch_cifar10.py
    python launch.py --config=configs/fedmatch_cifar10.py:non_iid
    python launch.py --config=configs/fedmatch_cifar10.py:labels_at_server
    python launch.py --config=configs/fedmatch_cifar10.py:labels_at_server,non_iid

Labels at the clients: each of 100 has 5 labels a class; or 100 a class at the server and none at the clients. 5 clients
a round, 1 local epoch, 200 rounds. The paper divides CIFAR-10's 60,000 images as 56,000 / 2,000 / 2,000 for training,
validation and test; this config takes the 50,000 and 10,000 of the data set, so a client has 500 images and not 560.
IID, or 'non_iid': half of a client's unlabelled images are of one class. The paper's own figures could not be read.
ProtoFSSL's runs of the public code, labels at the clients: 57.7 IID, 59.1 non-IID, and 62.2 for FedAvg on the labels
alone. SAGE's protocol (ResNet-8, 10 % labels, Dirichlet 0.1 / 0.5 / 1, see docs/data.md): 75.35 / 77.86 / 78.00.
The server remembers two models for each client: 5.3 GB for this one (--config.fedmatch.sparse_down=False: 2.6 GB).
Arguments: the variants of fedjax_ssl/methods/fedmatch/, a backbone, server_labels=, images= (for each client), other
methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedmatch,labels_at_client")
    return apply_arguments(config, arguments)
