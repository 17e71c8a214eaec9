"""FedEMA on CIFAR-10, clients without labels (ICLR 2022, arXiv 2204.04385), or another method in this setting.

    python launch.py --config=configs/fedema_cifar10.py
    python launch.py --config=configs/fedema_cifar10.py:code
    python launch.py --config=configs/fedema_cifar10.py --config.fedema.tau=0.8

ResNet-18, five clients of two classes each, all in every round, 100 rounds of five local epochs without labels. Test
accuracy is that of a probe: a classifier fitted to the server's 500 labelled images, which no client holds. The
published figures are of a linear classifier trained on the labels of all images (200 epochs of Adam):
    FedEMA                      83.34
    FedEMA, a user's re-run     82.1
To start another method from this model: --config.init_from=RUN, with the same data and normalisation.
At our scale FedEMA minus the labels alone is -16.39 ± 3.98 (board leaderboard/digits_server).
Arguments: server_labels=, --config.data.partition=iid, a backbone, other methods, the variants of
fedjax_ssl/methods/fedema.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedema,paper")
    config.data.source = "cifar10"
    return apply_arguments(config, arguments)
