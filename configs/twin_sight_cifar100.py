"""Twin-sight on CIFAR-100, four clients of ten have labels (ICLR 2024, arXiv 2402.14430), or another method.

    python launch.py --config=configs/twin_sight_cifar100.py
    python launch.py --config=configs/twin_sight_cifar100.py:code
    python launch.py --config=configs/twin_sight_cifar100.py:supervised,labelled_cohorts

ResNet-18, ten clients: four have labels for all their images, six have none. Dirichlet alpha 0.1, five clients a round,
500 rounds of one local epoch.
Published test accuracy (the paper does not say of which round):
    FedAvg, all labels          64.45
    FedAvg, labelled clients    48.36
    FedProx, labelled clients   44.64
    FedAvg+FixMatch             48.73
    FedAvg+FreeMatch            48.67
    Fed-Consist                 47.31
    RSCFed                      43.48
    Twin-sight                  49.98
Twin-sight takes 400 rounds to the paper's target accuracy.
At our scale Twin-sight minus the labels alone is -5.12 ± 29.00 (board leaderboard/digits_some_clients).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/twin_sight.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "twin_sight,paper")
    config.data.source = "cifar100"
    return apply_arguments(config, arguments)
