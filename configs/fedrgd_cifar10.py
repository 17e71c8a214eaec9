"""FedRGD on CIFAR-10, labels at the server: its public code's setting (IEEE Big Data 2021, arXiv 2008.11364).

    python launch.py --config=configs/fedrgd_cifar10.py
    python launch.py --config=configs/fedrgd_cifar10.py:no_groups
    python launch.py --config=configs/fedrgd_cifar10.py --config.data.main_share=0

ResNet-18 with group normalisation, 10 users in two groups that all take part, 1,000 labels at the server. Models are
averaged every 16 steps, which is a round; the code's 300 epochs of 1,024 steps are 19,200 rounds. Two fifths of a
user's images are of one class (data.main_share; 0 is IID).
The paper's own figures could not be read. Its claims: groups and group normalisation help, and a long time between
averagings hurts. SemiFL's re-run has 33.2 with 250 labels and 47.8 with 4,000; it forgets the groups after each
averaging. A user of the code reports 42 with a newer PyTorch than the code's.
In addition to its 16 steps a round spends three quarters of their cost on the report, which labels all images of the
users, and a sixth on testing the model.
At our scale FedRGD minus the labels alone is +3.55 ± 1.17 (board leaderboard/mnist_server).
Arguments: server_labels=, a backbone (its comparison with FedMatch has resnet9), the variants of
fedjax_ssl/methods/fedrgd.py, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedrgd,paper,resnet18")
    return apply_arguments(config, arguments)
