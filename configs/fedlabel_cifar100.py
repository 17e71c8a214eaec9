"""FedLabel on CIFAR-100, a few labels at every client: its Table 3 (ICCV 2023, arXiv 2307.08809).

    python launch.py --config=configs/fedlabel_cifar100.py
    python launch.py --config=configs/fedlabel_cifar100.py:code

ResNet-50, 100 clients, 10 a round, Dirichlet alpha 0.1, labels for 20 % of each client's images. This is the only
configuration of the public code: 30 labelled and 10 unlabelled steps of 64 images, plain SGD at 0.003, threshold 0.3,
lambda_0 = 0.05, 2,000 rounds, and unlabelled images from round 50 on (only with the variant `code`). Two more choices
of the code are fields: it standardises by CIFAR-10's pixel means (--config.data.normalisation=cifar10), and it never
clears the gradients of the unlabelled steps, so that ten steps go as far as 55 (--config.fedlabel.replica=true). The
paper tests on 15 % of the pooled images, this config on the test set. The paper's test accuracy:
    FedAvg, all labels  24.67      FedProx + UDA       10.57
    FedProx, all labels 24.87      FedProx + FixMatch  10.02
    FedAvg              11.33      FedTriNet           10.53
    FedProx             11.37      FedMatch            10.86
    FedAvg + UDA        10.80      FedLabel            18.42
    FedAvg + FixMatch   10.16
At our scale FedLabel minus the labels alone is -8.92 ± 3.45 (board fedlabel_digits).
Arguments: alpha=, a backbone, the variants of fedjax_ssl/methods/fedlabel/, other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedlabel,paper")
    config.data.source = "cifar100"
    config.model.name = "resnet50"
    return apply_arguments(config, arguments)
