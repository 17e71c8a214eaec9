"""SemiFL on CIFAR-100, labels at the server: its Table 1 (NeurIPS 2022, arXiv 2106.01432).

    python launch.py --config=configs/semifl_cifar100.py
    python launch.py --config=configs/semifl_cifar100.py:iid,server_labels=2500

Wide-ResNet-28-8, 100 clients, 10 a round, 800 rounds, 5 local epochs, 5 epochs at the server, the recipe `strong`. The
optimizers of all clients take 9.4 GB. The paper's best test accuracy of 800 rounds (four seeds):
                 labels 2500  10000
    IID                 61.3   72.1
    Dir 0.3             54.9   70.0
    Dir 0.1             49.0   68.0
    2 classes           35.2   62.1
These figures most likely come from its public code, which differs from its text: variant `code`.
At our scale SemiFL minus the labels alone is +5.90 ± 0.98 (board leaderboard/mnist_server).
Arguments: iid, two_classes, server_labels=, alpha=, images=, a backbone, the variants of fedjax_ssl/methods/semifl.py,
other methods and recipes. If the argument server_labels= is 1,000 or less, the server's batches have 10 images, as in
the code.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "semifl,strong,paper,wrn28_8")
    config.data.source = "cifar100"
    config.data.server_labels = 10000
    apply_arguments(config, arguments)
    if config.data.server_labels <= 1000:
        config.server.batch_size = 10
    return config
