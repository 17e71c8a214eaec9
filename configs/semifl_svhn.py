"""SemiFL on SVHN without its extra images, labels at the server: its Table 1 (NeurIPS 2022, arXiv 2106.01432).

    python launch.py --config=configs/semifl_svhn.py
    python launch.py --config=configs/semifl_svhn.py:iid,server_labels=250

Wide-ResNet-28-2, 100 clients, 10 a round, 800 rounds, 5 local epochs, 5 epochs at the server, the recipe `strong`.
Images are never flipped. The paper's best test accuracy of 800 rounds (four seeds):
                 labels 250   1000
    IID                 96.8   96.9
    Dir 0.3             94.0   95.2
    Dir 0.1             91.2   93.0
    2 classes           87.5   92.2
These figures most likely come from its public code, which differs from its text: variant `code`.
At our scale SemiFL minus the labels alone is +5.90 ± 0.98 (board leaderboard/mnist_server).
Arguments: iid, two_classes, server_labels=, alpha=, images=, a backbone, the variants of fedjax_ssl/methods/semifl.py,
other methods and recipes. If the argument server_labels= is 1,000 or less, the server's batches have 10 images, as in
the code.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "semifl,strong,paper,wrn28_2")
    config.data.source = "svhn_cropped"
    config.data.server_labels = 1000
    apply_arguments(config, arguments)
    if config.data.server_labels <= 1000:
        config.server.batch_size = 10
    return config
