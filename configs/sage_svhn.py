"""SAGE on SVHN, clients with labels for a tenth of the images (CVPR 2025, arXiv 2503.13227), or another method.

    python launch.py --config=configs/sage_svhn.py
    python launch.py --config=configs/sage_svhn.py:proxyfl,alpha=0.5
    python launch.py --config=configs/sage_svhn.py:fixmatch,gpl --config.data.num_labelled=9200

ResNet-8 of width 64, 20 clients, 8 a round, 150 rounds, 5 local epochs. 4,600 images have labels, 460 of each class
(the papers' 10 %). They are divided over the clients separately from the unlabelled images, so the classes of a
client's labels have other proportions than the classes of its images. Pairs of clients share near-IID parts
(`dirichlet_pairs`): alpha = 0.1 is far milder here than in the other configs. Digits are flipped, as in the code
(`augment.flip`) and unlike in this library's other SVHN configs.
Test accuracy as ProxyFL's paper prints it (CVPR 2026, arXiv 2602.21078; it does not say of which round):
    alpha                         0.1    0.5      1
    FedAvg, labels alone       82.40  83.40  78.60
    FedAvg, all labels         94.11  94.41  94.40
    FixMatch-LPL               89.68  91.33  91.91
    FixMatch-GPL               90.50  91.94  92.31
    FedMatch                   88.63  89.20  89.23
    FedLabel                   89.31  91.51  91.16
    SAGE                       93.85  94.27  94.65
    ProxyFL                    95.09  95.18  95.26
    SAGE, 9,200 labels         94.31  94.56  94.68
    ProxyFL, 9,200 labels      95.03  95.40  95.34
At our scale SAGE minus the labels alone is +0.26 ± 2.38 (board leaderboard/mnist_clients).
Arguments: alpha=, stratified (alpha = 0 of the code), a backbone, other methods (supervised; fixmatch for FixMatch-LPL,
fixmatch,gpl for FixMatch-GPL; proxyfl and its variants), recipes.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "sage,paper")
    config.data.source = "svhn_cropped"
    config.data.num_labelled = 4600
    config.num_rounds = 150
    config.augment.flip = "always"
    return apply_arguments(config, arguments)
