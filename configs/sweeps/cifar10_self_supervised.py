"""What do clients without labels add on CIFAR-10? FedEMA and Orchestra against the server's labels alone.

    python launch.py sweep configs/sweeps/cifar10_self_supervised.py --workdir=runs/cifar10_self_supervised

ResNet-8 of width 8, 10 clients of 500 images, 5 a round, five local epochs, 40 rounds, 250 labels at the server, IID
and two classes for each client, seed 0. FedEMA's heads are narrow, too: 512 and 128 numbers instead of 4,096 and
2,048. FedEMA and Orchestra are tested by a probe on the server's labels. `Untrained` is the probe on the features after
Orchestra's first round, which clusters and does not train. Its normalisation has initial statistics, mean 0 and
variance 1; the row after it has the statistics of the labelled images. `Labels alone` trains the whole network on the
250 labels for five epochs a round.
"""

from fedjax_ssl.sweep import Sweep

WITHOUT_CLIENTS = {"data.partition": "iid"}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_cifar10.py:paper",
        common={
            "model.name": "resnet8",
            "model.width": 8,
            "num_rounds": 40,
            "num_clients": 10,
            "clients_per_round": 5,
            "data.server_labels": 250,
            "data.examples_per_client": 500,
            "data.validation": 2000,
            "client.batch_size": 50,
            "client.epochs": 5,
            "schedule": "cosine",
        },
        methods={
            "Untrained": ("orchestra", {"num_rounds": 1, **WITHOUT_CLIENTS}),
            "Untrained, with statistics": (
                "orchestra",
                {"num_rounds": 1, "model.normalisation": "static", **WITHOUT_CLIENTS},
            ),
            "Labels alone": (
                "server_only,strong",
                {"server.epochs": 5, "server.augmentation": "weak", **WITHOUT_CLIENTS},
            ),
            "FedEMA": ("fedema", {"model.projector_hidden": 512, "model.projector_dim": 128}),
            "Orchestra": "orchestra",
        },
        fields={"data.partition": ("iid", "shards")},
        seeds=(0,),
        target_accuracy=0.35,
    )
