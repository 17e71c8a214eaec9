"""FedLabel on EMNIST (62 classes), a few labels at every client: its Table 3 (ICCV 2023, arXiv 2307.08809).

    python launch.py --config=configs/fedlabel_emnist.py

ResNet-18, 100 clients, 10 a round, Dirichlet alpha 0.1, labels for 20 % of each client's images. The paper gives no
learning rate, steps, rounds or augmentation of grey images for this data set; here they are those of its code for
CIFAR-100. The paper tests on 15 % of the pooled images, this config on the test set. The paper's test accuracy:
    FedAvg, all labels  78.36      FedProx + UDA       71.93
    FedProx, all labels 78.60      FedProx + FixMatch  70.56
    FedAvg              63.05      FedTriNet           60.31
    FedProx             63.31      FedMatch            63.48
    FedAvg + UDA        68.98      FedLabel            79.33
    FedAvg + FixMatch   67.98
At our scale FedLabel minus the labels alone is -8.92 ± 3.45 (board fedlabel_digits).
Arguments: alpha=, a backbone, the variants of fedjax_ssl/methods/fedlabel/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedlabel,paper,resnet18")
    config.data.source = "emnist/byclass"
    return apply_arguments(config, arguments)
