"""Twin-sight on SVHN, four clients of ten have labels (ICLR 2024, arXiv 2402.14430), or another method.

    python launch.py --config=configs/twin_sight_svhn.py
    python launch.py --config=configs/twin_sight_svhn.py:code
    python launch.py --config=configs/twin_sight_svhn.py:supervised,labelled_cohorts

ResNet-18, ten clients: four have labels for all their images, six have none. Dirichlet alpha 0.1, five clients a round,
500 rounds of one local epoch. There is no RandAugment, and pixels are not standardised
(data_preprocessing/loader.py:569-575 of the code). Twin-sight's two views are those of `config.views`; the views of
other methods are weak ones.
Published test accuracy (the paper does not say of which round):
    FedAvg, all labels          87.34
    FedAvg, labelled clients    51.10
    FedProx, labelled clients   49.22
    FedAvg+FixMatch             58.68
    FedAvg+FreeMatch            59.74
    Fed-Consist                 56.87
    RSCFed                      54.50
    Twin-sight                  62.94
Twin-sight takes 125 rounds to the paper's target accuracy.
At our scale Twin-sight minus the labels alone is -5.12 ± 29.00 (board leaderboard/digits_some_clients).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/twin_sight.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "twin_sight,paper")
    config.data.source = "svhn_cropped"
    config.data.normalisation = "none"
    config.augment.flavour, config.augment.flip = "none", "always"
    config.twin_sight.second_view = "views"
    config.confidence.clamp_least, config.confidence.clamp_most = 0.9, 0.95  # FreeMatch's thresholds
    return apply_arguments(config, arguments)
