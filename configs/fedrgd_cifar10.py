"""FedRGD on CIFAR-10 in the setting of its public code (IEEE Big Data 2021, arXiv 2008.11364).

    python launch.py --config=configs/fedrgd_cifar10.py
    python launch.py --config=configs/fedrgd_cifar10.py:no_groups
    python launch.py --config=configs/fedrgd_cifar10.py:slow --config.data.main_share=0

ResNet-18 with group normalisation, 10 users that all take part in two groups, 1,000 labels at the server, 16 steps
between two averagings, 300 epochs of 1,024 steps: 19,200 rounds. Two fifths of a user's images are of one class; 0 is
IID. The paper's own figures could not be read; its claims are that groups and group normalisation help and that a long
time between averagings hurts. SemiFL's re-run, whose groups are forgotten behind each averaging (mean_of_means): 33.2
with 250 labels and 47.8 with 4,000. A user of the code reports 42 with a newer PyTorch than its own.
Beside the work of its 16 steps a round has three quarters more for the report, which labels all images of the users,
and a sixth for the test of the model.
Arguments: server_labels=, a backbone (its comparison with FedMatch has resnet9), the variants of
fedjax_ssl/methods/fedrgd/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedrgd,paper,resnet18")
    return apply_arguments(config, arguments)
