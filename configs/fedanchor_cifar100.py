"""FedAnchor on CIFAR-100, labels at the server: the paper's experiment (arXiv 2402.10191, Tables 1 and 2).

    python launch.py --config=configs/fedanchor_cifar100.py
    python launch.py --config=configs/fedanchor_cifar100.py:wrn28_2,server_labels=2500,iid

100 clients of 400 images, Dirichlet alpha 0.1, 10,000 labelled images (anchors) at the server, 10
clients a round, 500 rounds.
The recipe is that of configs/fedanchor_cifar10.py: with `paper` FedAnchor ended 15 points below the labels alone on
CIFAR-10 (small CNN, 25 rounds, one seed).
At our scale FedAnchor minus the labels alone is +1.66 ± 0.90 (board fedanchor_cifar10).
Arguments: paper, wrn28_2 (default resnet18), iid, server_labels=, alpha=, images= (per client), and the variants of
fedjax_ssl/methods/fedanchor/.

The paper's test accuracy (three seeds) by backbone and partition (Dirichlet 0.1, IID), FedAnchor / FedAnchor (mix):
                     anchors 2500             10000
    ResNet-18  0.1   43.50 / 46.39            59.96 / 61.01
               IID   50.79 / 51.34            62.02 / 63.99
    WRN-28-2   0.1   40.89 / 42.25            52.85 / 55.26
               IID   44.98 / 46.79            53.56 / 56.40
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    config.data.source = "cifar100"
    config.data.server_labels = 10000
    config.fedanchor.contrastive_batch_size = 250  # examples per class as in a batch of 25 with 10 classes
    apply_arguments(config, "strong,natural_images")
    return apply_arguments(config, arguments)
