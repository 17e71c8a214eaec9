"""Twin-sight on Fashion-MNIST, four clients of ten have labels (ICLR 2024, arXiv 2402.14430), or another method.

    python launch.py --config=configs/twin_sight_fmnist.py
    python launch.py --config=configs/twin_sight_fmnist.py:code
    python launch.py --config=configs/twin_sight_fmnist.py:supervised,labelled_cohorts

ResNet-18, ten clients: four have labels for all their images, six have none. Dirichlet alpha 0.1, five clients a round,
500 rounds of one local epoch. There is no RandAugment: strong views equal weak ones. Images stay 28x28 with one
channel; pixels are not standardised.
Published test accuracy (the paper does not say of which round):
    FedAvg, all labels          88.98
    FedAvg, labelled clients    72.46
    FedProx, labelled clients   70.71
    FedAvg+FixMatch             67.52
    FedAvg+FreeMatch            63.10
    Fed-Consist                 68.51
    RSCFed                      76.58
    Twin-sight                  79.95
Twin-sight takes 140 rounds to the paper's target accuracy.
At our scale Twin-sight minus the labels alone is -5.12 ± 29.00 (board leaderboard/digits_some_clients).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/twin_sight.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "twin_sight,paper")
    config.data.source = "fashion_mnist"
    config.data.normalisation = "none"
    config.augment.flavour = "none"
    return apply_arguments(config, arguments)
