"""FedLabel on CIFAR-10, a few labels at every client: its Tables 1, 3 and 4 (ICCV 2023, arXiv 2307.08809).

    python launch.py --config=configs/fedlabel_cifar10.py
    python launch.py --config=configs/fedlabel_cifar10.py:alpha=1,fixmatch,fedprox

ResNet-34, 100 clients, 10 a round, Dirichlet alpha 0.1, labels for 20 % of each client's images, plain SGD. The paper
gives no learning rate, steps or rounds for this data set; here they are those of its code for CIFAR-100. The paper
tests on 15 % of the pooled images (three seeds), this config on the test set. The paper's test accuracy:
                          Dir 0.1        Dir 1
    labels              20 %   50 %       20 %
    FedAvg, all labels  44.67            57.17
    FedProx, all labels 44.72            57.45
    FedAvg              28.83            40.11
    FedProx             31.09            41.45
    FedAvg + UDA        31.32            42.07
    FedAvg + FixMatch   23.99            38.51
    FedProx + UDA       31.99            42.08
    FedProx + FixMatch  22.38            42.94
    FedTriNet           29.56            42.67
    FedMatch            31.94            44.23
    FedLabel            46.05            48.89
    Table 1: both       44.51  50.53
      only local        32.57  41.21
      only global       37.51  38.43
At our scale FedLabel minus the labels alone is -8.92 ± 3.45 (board fedlabel_digits).
Arguments: alpha=, a backbone, the variants of fedjax_ssl/methods/fedlabel/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedlabel,paper")
    config.model.name = "resnet34"
    return apply_arguments(config, arguments)
