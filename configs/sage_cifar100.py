"""SAGE on CIFAR-100, clients with labels for a tenth of the images (CVPR 2025, arXiv 2503.13227), or another method.

    python launch.py --config=configs/sage_cifar100.py
    python launch.py --config=configs/sage_cifar100.py:proxyfl,alpha=0.5
    python launch.py --config=configs/sage_cifar100.py:fixmatch,gpl --config.data.num_labelled=10000

ResNet-8 of width 64, 20 clients, 8 a round, 500 rounds, 5 local epochs. 5,000 images have labels, 50 of each class (10
%). They are divided over the clients separately from the unlabelled images, so the classes of a client's labels have
other proportions than the classes of its images. Pairs of clients share near-IID parts (`dirichlet_pairs`): alpha = 0.1
is far milder here than in the other configs.
Test accuracy as ProxyFL's paper prints it (CVPR 2026, arXiv 2602.21078; it does not say of which round):
    alpha                         0.1    0.5      1
    FedAvg, labels alone       34.08  33.21  35.31
    FedAvg, all labels         67.98  68.83  69.10
    FixMatch-LPL               49.32  49.67  49.55
    FixMatch-GPL               48.96  51.80  52.19
    FedMatch                   32.23  31.49  35.75
    FedLabel                   50.88  52.21  52.38
    SAGE                       54.18  55.82  56.06
    ProxyFL                    57.50  58.75  58.24
    SAGE, 10,000 labels        60.86  61.49  62.01
    ProxyFL, 10,000 labels     62.57  63.09  63.19
ProxyFL's server tunes for 10 epochs, because it overfits with more.
At our scale SAGE minus the labels alone is +0.26 ± 2.38 (board leaderboard/mnist_clients).
Arguments: alpha=, stratified (alpha = 0 of the code), a backbone, other methods (supervised; fixmatch for FixMatch-LPL,
fixmatch,gpl for FixMatch-GPL; proxyfl and its variants), recipes.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "sage,paper")
    config.data.source = "cifar100"
    config.num_rounds = 500
    config.proxyfl.tuning_epochs = 10
    return apply_arguments(config, arguments)
