"""SAGE on CIFAR-10, clients with labels for a tenth of the images (CVPR 2025, arXiv 2503.13227), or another method.

    python launch.py --config=configs/sage_cifar10.py
    python launch.py --config=configs/sage_cifar10.py:proxyfl,alpha=0.5
    python launch.py --config=configs/sage_cifar10.py:fixmatch,gpl --config.data.num_labelled=10000

ResNet-8 of width 64, 20 clients, 8 a round, 300 rounds, 5 local epochs. 5,000 images have labels, 500 of each class (10
%). They are divided over the clients separately from the unlabelled images, so the classes of a client's labels have
other proportions than the classes of its images. Pairs of clients share near-IID parts (`dirichlet_pairs`): alpha = 0.1
is far milder here than in the other configs.
Test accuracy as ProxyFL's paper prints it (CVPR 2026, arXiv 2602.21078; it does not say of which round):
    alpha                         0.1    0.5      1
    FedAvg, labels alone       69.60  68.88  69.39
    FedAvg, all labels         90.46  91.24  91.32
    FixMatch-LPL               82.98  84.36  84.69
    FixMatch-GPL               84.56  86.05  86.66
    FedMatch                   75.35  77.86  78.00
    FedLabel                   62.85  79.46  79.17
    SAGE                       87.05  88.05  89.08
    ProxyFL                    88.56  90.00  89.96
    SAGE, 10,000 labels        89.87  90.53  90.54
    ProxyFL, 10,000 labels     90.97  91.22  91.51
At our scale SAGE minus the labels alone is +0.26 ± 2.38 (board leaderboard/mnist_clients).
Arguments: alpha=, stratified (alpha = 0 of the code), a backbone, other methods (supervised; fixmatch for FixMatch-LPL,
fixmatch,gpl for FixMatch-GPL; proxyfl and its variants), recipes.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "sage,paper")
    return apply_arguments(config, arguments)
