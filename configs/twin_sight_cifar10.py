"""Twin-sight on CIFAR-10, four clients of ten have labels (ICLR 2024, arXiv 2402.14430), or another method.

    python launch.py --config=configs/twin_sight_cifar10.py
    python launch.py --config=configs/twin_sight_cifar10.py:code
    python launch.py --config=configs/twin_sight_cifar10.py:supervised,labelled_cohorts

ResNet-18, ten clients: four have labels for all their images, six have none. Dirichlet alpha 0.1, five clients a round,
500 rounds of one local epoch.
Published test accuracy (the paper does not say of which round):
    FedAvg, all labels          82.78
    FedAvg, labelled clients    61.58
    FedProx, labelled clients   63.66
    FedAvg+FixMatch             63.58
    FedAvg+FreeMatch            58.47
    Fed-Consist                 62.42
    RSCFed                      60.78
    Twin-sight                  70.06
Twin-sight takes 115 rounds to the paper's target accuracy.
At our scale Twin-sight minus the labels alone is -5.12 ± 29.00 (board leaderboard/digits_some_clients).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/twin_sight.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "twin_sight,paper")
    config.data.source = "cifar10"
    return apply_arguments(config, arguments)
