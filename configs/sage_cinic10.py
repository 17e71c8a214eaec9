"""SAGE on CINIC-10 (CVPR 2025, arXiv 2503.13227), and other methods in the same setting.

    python launch.py --config=configs/sage_cinic10.py --config.data.path=cinic10.npz
    python launch.py --config=configs/sage_cinic10.py:proxyfl,alpha=0.5 --config.data.path=cinic10.npz

TensorFlow Datasets does not have the data set: make an npz of its folders train and test, 90,000 images of 32 x 32
pixels each, see docs/tutorials/your_data.md. ResNet-8 of width 64, 20 clients of which 8 train in a round, 400 rounds,
5 local epochs. 9,000 images have labels, 900 of each class (the papers' 10 %). They are divided over the clients apart
from the others. Pairs of clients share near-IID parts (`dirichlet_pairs`): alpha = 0.1 is far milder here than in the
other configs. Test accuracy as ProxyFL prints it (CVPR 2026, arXiv 2602.21078); of which round is not said:
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
Arguments: alpha=, stratified (the code's alpha = 0), a backbone, other methods (supervised; fixmatch is FixMatch-LPL,
with gpl FixMatch-GPL; proxyfl and its variants), recipes.
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
