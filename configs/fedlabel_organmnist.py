"""FedLabel on OrganAMNIST, a few labels at every client: its Tables 3 and 4 (ICCV 2023, arXiv 2307.08809).

    python launch.py --config=configs/fedlabel_organmnist.py --config.data.path=organamnist.npz

The file is MedMNIST's: 28 x 28 pixels, 11 classes. ResNet-18, 10 clients, 3 a round, Dirichlet alpha 0.1, labels for 5
% of each client's images. The paper gives no learning rate, steps, rounds or augmentation for this data set; here they
are those of its code for CIFAR-100. The paper tests on 15 % of the pooled images, this config on the file's test
images; the file's validation images are not used. The paper's test accuracy:
                        Dir 0.1   Dir 1                            Dir 0.1   Dir 1
    FedAvg, all labels    71.09   81.49      FedProx + UDA           54.15   65.12
    FedProx, all labels   73.34   82.07      FedProx + FixMatch      55.49   70.58
    FedAvg                41.90   59.74      FedTriNet               50.82   74.16
    FedProx               48.28   61.86      FedMatch                48.99   72.57
    FedAvg + UDA          55.14   63.05      FedLabel                69.43   79.76
    FedAvg + FixMatch     52.76   70.14
At our scale FedLabel minus the labels alone is -8.92 ± 3.45 (board fedlabel_digits).
Arguments: alpha=, a backbone, the variants of fedjax_ssl/methods/fedlabel/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedlabel,paper,resnet18")
    config.data.source = "npz"
    config.data.path = "organamnist.npz"
    config.data.flip = False  # the body has a left and a right
    config.data.labelled_share = 0.05
    config.num_clients, config.clients_per_round = 10, 3
    return apply_arguments(config, arguments)
