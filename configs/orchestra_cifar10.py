"""Orchestra on CIFAR-10, clients without labels (ICML 2022, arXiv 2205.11506), or another method in this setting.

    python launch.py --config=configs/orchestra_cifar10.py
    python launch.py --config=configs/orchestra_cifar10.py --config.probe.epochs=50

ResNet-18, 100 clients with Dirichlet alpha 0.1, 50 a round: one round that only clusters, then 100 rounds of ten local
epochs without labels. Test accuracy is that of a probe: a classifier fitted to the server's 500 labelled images, which
no client holds. The paper's figures, which could not be read, are of a linear classifier trained on the labels of all
images, and of the whole network fine-tuned on 1 % and 10 % of them.
At our scale Orchestra minus the labels alone is -8.01 ± 2.93 (board leaderboard/digits_server).
Arguments: server_labels=, alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/orchestra/.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "orchestra,paper")
    config.data.source = "cifar10"
    return apply_arguments(config, arguments)
