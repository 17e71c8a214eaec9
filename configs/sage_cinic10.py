"""SAGE on CINIC-10, clients with labels for a tenth of the images (CVPR 2025, arXiv 2503.13227), or another method.

    python launch.py --config=configs/sage_cinic10.py --config.data.path=cinic10.npz
    python launch.py --config=configs/sage_cinic10.py:proxyfl,alpha=0.5 --config.data.path=cinic10.npz

TensorFlow Datasets does not have CINIC-10. Make an npz of its folders train and test, 90,000 images of 32 x 32 pixels
each (docs/tutorials/your_data.md).
ResNet-8 of width 64, 20 clients, 8 a round, 400 rounds, 5 local epochs. 9,000 images have labels, 900 of each class
(the papers' 10 %). They are divided over the clients separately from the unlabelled images. Pairs of clients share
near-IID parts (`dirichlet_pairs`): alpha = 0.1 is far milder here than in the other configs.
Test accuracy as ProxyFL's paper prints it (CVPR 2026, arXiv 2602.21078; it does not say of which round):
    alpha                         0.1    0.5      1
    FedAvg, labels alone       57.17  60.09  61.54
    FedAvg, all labels         77.82  80.42  81.29
    FixMatch-LPL               68.02  70.67  72.69
    FixMatch-GPL               71.67  73.26  74.80
    FedMatch                   51.94  56.27  70.22
    FedLabel                   67.64  70.56  72.80
    SAGE                       74.59  75.74  76.68
    ProxyFL                    77.98  78.96  79.59
    SAGE, 18,000 labels        77.51  78.23  78.77
    ProxyFL, 18,000 labels     80.80  81.02  81.46
At our scale SAGE minus the labels alone is +0.26 ± 2.38 (board leaderboard/mnist_clients).
Arguments: alpha=, stratified (alpha = 0 of the code), a backbone, other methods (supervised; fixmatch for FixMatch-LPL,
fixmatch,gpl for FixMatch-GPL; proxyfl and its variants), recipes.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "sage,paper")
    config.data.source = "npz"
    config.data.path = "cinic10.npz"
    config.data.flip = True
    config.data.num_labelled = 9000
    config.num_rounds = 400
    return apply_arguments(config, arguments)
