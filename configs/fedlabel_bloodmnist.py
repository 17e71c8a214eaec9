"""FedLabel on BloodMNIST, a few labels at every client: its Table 3 (ICCV 2023, arXiv 2307.08809).

    python launch.py --config=configs/fedlabel_bloodmnist.py --config.data.path=bloodmnist.npz

The file is MedMNIST's: 28 x 28 pixels, 8 classes. ResNet-18, 5 clients, all in every round, Dirichlet alpha 0.1, labels
for 5 % of each client's images. The paper gives no learning rate, steps, rounds or augmentation for this data set; here
they are those of its code for CIFAR-100. The paper tests on 15 % of the pooled images, this config on the file's test
images; the file's validation images are not used. The paper's test accuracy:
    FedAvg, all labels  70.53      FedProx + UDA       59.48
    FedProx, all labels 74.53      FedProx + FixMatch  50.88
    FedAvg              53.18      FedTriNet           59.38
    FedProx             56.53      FedMatch            58.89
    FedAvg + UDA        53.18      FedLabel            71.46
    FedAvg + FixMatch   47.92
At our scale FedLabel minus the labels alone is -8.92 ± 3.45 (board fedlabel_digits).
Arguments: alpha=, a backbone, the variants of fedjax_ssl/methods/fedlabel/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedlabel,paper,resnet18")
    config.data.source = "npz"
    config.data.path = "bloodmnist.npz"
    config.data.flip = True  # a cell has no left and right
    config.data.labelled_share = 0.05
    config.num_clients, config.clients_per_round = 5, 5
    return apply_arguments(config, arguments)
