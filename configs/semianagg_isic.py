"""SemiAnAgg on ISIC 2018's skin lesions, one client of ten has labels (TMLR 2024, arXiv 2407.10327).

    python launch.py --config=configs/semianagg_isic.py:supervised --config.num_rounds=250 --workdir=runs/warm_up
    python launch.py --config=configs/semianagg_isic.py --config.init_from=runs/warm_up

Seven classes, 224 pixels, 8,012 images of HAM10000 for training and 2,003 for testing; examples/ham10000.py makes
ham10000.npz of them. The setting of configs/semianagg_svhn.py with the ImageNet stem; the labelled client uses the
balanced softmax with every method. The test set is imbalanced.
Published accuracy (the paper does not say of which round):
    FedAvg, all labels     80.78
    the labelled client    66.25
    RSCFed                 69.85
    IsoFed                 68.49
    CBAFed                 69.99
    SemiAnAgg              72.24   balanced 48.77, AUC 86.98
SemiAnAgg with 5, 10, 25 and 50 clients: balanced accuracy 39.90, 46.06, 48.77 and 48.86, AUC 65.36, 86.38, 86.98 and
88.63. The available text does not show which value belongs to which number of clients.
configs/sweeps/semianagg_clients.py has these runs.
At our scale SemiAnAgg minus the labels alone is +2.94 ± 4.07 (board semianagg_mnist).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/semianagg.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "semianagg,paper,balanced")
    config.data.source = "npz"
    config.data.path = "ham10000.npz"
    config.data.flip = True
    config.augment.resized = 250
    config.model.name = "resnet18_imagenet"
    config.eval_batch_size = 64
    config.eval_measures = ("balanced_accuracy", "precision", "auc")
    return apply_arguments(config, arguments)
