"""SemiFL's Table 1: numbers of labels and partitions, labels at the server (NeurIPS 2022, arXiv 2106.01432).

    python launch.py sweep configs/sweeps/semifl_table1.py --workdir=runs/semifl_table1
    python launch.py sweep configs/sweeps/semifl_table1.py:svhn --workdir=runs/semifl_table1_svhn
    python launch.py sweep configs/sweeps/semifl_table1.py:cifar100 --workdir=runs/semifl_table1_cifar100

The paper's accuracies, the best of all rounds:
                                             CIFAR-10           SVHN      CIFAR-100
    labels                                 250   4000     250   1000    2500  10000
    Partially supervised                  42.4   76.9    77.1   90.4    27.2   59.3
    Fully supervised                             95.3           97.3           79.3
    SemiFL, IID                           88.2   93.1    96.8   96.9    61.3   72.1
    SemiFL, Dir 0.3                       71.9   88.9    94.0   95.2    54.9   70.0
    SemiFL, Dir 0.1                       63.0   84.5    91.2   93.0    49.0   68.0
    SemiFL, 2 classes                     60.0   85.3    87.5   92.2    35.2   62.1
    FedAvg with all labels, IID                  94.3           97.5           77.8
    FedAvg with all labels, Dir 0.3              91.6           96.8           76.9
    FedAvg with all labels, Dir 0.1              85.0           95.8           74.0
    FedAvg with all labels, 2 classes            51.5           72.3            3.1
The paper's FedMatch and FedRGD leave out most of these methods, so they are not here; its FedAvg+FixMatch is in Table
4. The rows follow the paper's text. Its figures most likely come from its public code, which differs: variant `code`
(docs/methods/semifl.md).
"""

from fedjax_ssl.sweep import Sweep, by_argument

# Numbers of labels; classes; target accuracy to which the table counts rounds.
DATASETS = {
    "cifar10": ((250, 4000), 10, 0.8),
    "svhn": ((250, 1000), 10, 0.9),
    "cifar100": ((2500, 10000), 100, 0.5),
}
PARTITIONS = {
    "IID": {"data.partition": "iid"},
    "Dir 0.3": {"data.alpha": 0.3},
    "Dir 0.1": {"data.alpha": 0.1},
    "2 classes": {"data.partition": "shards", "data.classes_per_client": 2},
}
# Centralised: 400 epochs, one a round, with statistics from the training images.
CENTRAL = {"num_rounds": 400, "server.epochs": 1, "server.learning_rate": 0.1, "model.statistics": "server"}


def get_sweep(dataset="cifar10"):
    labels, num_classes, target_accuracy = by_argument(DATASETS, dataset)
    methods = {f"Partially supervised, {few} labels": (f"server_only,server_labels={few}", CENTRAL) for few in labels}
    methods["Fully supervised"] = ("centralised", {**CENTRAL, "server.batch_size": 250})
    for few in labels:
        methods |= {
            f"SemiFL, {few} labels, {name}": (f"server_labels={few}", partition)
            for name, partition in PARTITIONS.items()
        }
    # The server does not train; the partition still needs one labelled image of each class.
    methods |= {
        f"FedAvg with all labels, {name}": (f"supervised,all_labels,no_server,server_labels={num_classes}", partition)
        for name, partition in PARTITIONS.items()
    }
    return Sweep(
        config=f"configs/semifl_{dataset}.py", methods=methods, seeds=(0, 1, 2, 3), target_accuracy=target_accuracy
    )
