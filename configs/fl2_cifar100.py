"""(FL)^2 on CIFAR-100 with 100 or 400 labels at the server, its Table 1 (NeurIPS 2024, arXiv 2410.23227).

    python launch.py --config=configs/fl2_cifar100.py
    python launch.py --config=configs/fl2_cifar100.py:server_labels=100,alpha=0.1

Like configs/fl2_cifar10.py, with Wide-ResNet-28-8 and a perturbation of radius 1. The paper's test accuracy (three
seeds), (FL)^2 / SemiFL:
                 labels           100                   400
    IID                14.4 ± 2.3 / 13.9    28.1 ± 2.2 / 27.9
    Dir 0.3            12.1 ± 1.1 / 12.4    25.4 ± 1.0 / 18.9
    Dir 0.1            10.4 ± 1.3 /  9.8    23.5 ± 1.2 / 13.5
On CIFAR-100 the public code stops, because it has no rule for the server's training before the first round. This config
uses CIFAR-10's rule.
At our scale (FL)^2 minus the labels alone is +3.60 ± 0.28 (board leaderboard/mnist_server).
Arguments: server_labels=, alpha=, a backbone, the variants of fedjax_ssl/methods/fl2.py, other methods and recipes.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fl2,strong,paper,cifar100,wrn28_8")
    config.data.source = "cifar100"
    config.data.server_labels, config.data.alpha = 400, 0.3
    return apply_arguments(config, arguments)
