"""FedU on CIFAR-10, clients without labels (ICCV 2021, arXiv 2108.06492), or another method in this setting.

    python launch.py --config=configs/fedu_cifar10.py
    python launch.py --config=configs/fedu_cifar10.py:code
    python launch.py --config=configs/fedu_cifar10.py --config.eval_measures="('knn',)"

ResNet-18, five clients of two classes each, all in every round, 100 rounds of five local epochs without labels. Test
accuracy is that of a probe: a classifier fitted to the server's 500 labelled images, which no client holds. Published
figures are of a linear classifier trained on the labels of all images. FedU's could not be read; FedEMA's are in
configs/fedema_cifar10.py.
At our scale FedU minus the labels alone is -14.00 ± 3.08 (board leaderboard/digits_server).
Arguments: server_labels=, --config.data.partition=iid, a backbone, other methods, the variants of
fedjax_ssl/methods/fedu.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedu,paper")
    config.data.source = "cifar10"
    return apply_arguments(config, arguments)
