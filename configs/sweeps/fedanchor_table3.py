"""FedAnchor's Table 3, upper part: where mixup is used, on Wide-ResNet-28-2, CIFAR-10, Dir 0.1, 500 anchors.

    python launch.py sweep configs/sweeps/fedanchor_table3.py --workdir=runs/table3
    python launch.py sweep configs/sweeps/fedanchor_table3.py --workdir=runs/table3_resnet --config.model.name=resnet18

The second command has the lower part's rows, SemiFL, FedAnchor without the contrastive loss, and FedAnchor on
ResNet-18. The paper's accuracies: FedAvg+FixMatch 53.29, SemiFL 56.99, SemiFL + no mixup 62.93, FedAnchor
(client mixup) 63.38, no mixup 63.15; on ResNet-18 SemiFL 68.96, without the contrastive loss 70.90, FedAnchor 72.75.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedanchor_cifar10.py",
        methods={
            "FedAvg+FixMatch": "fixmatch,plain",
            "SemiFL": "semifl,plain",
            "SemiFL, no mixup": "semifl,plain,no_mixup",
            "FedAnchor, no mixup": "plain,no_mixup",
            "FedAnchor, client mixup": "plain",
            "FedAnchor, server mixup": "plain,server_mixup",
            "FedAnchor, client and server mixup": "plain,mix",
            "FedAnchor without the contrastive loss": "plain,no_contrastive",
        },
        common={"model.name": "wrn28_2", "data.alpha": 0.1, "data.num_anchors": 500},
        target_accuracy=0.5,
    )
