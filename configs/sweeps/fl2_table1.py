"""(FL)^2's Table 1: very few labels at the server, IID and Dirichlet (NeurIPS 2024, arXiv 2410.23227).

    python launch.py sweep configs/sweeps/fl2_table1.py --workdir=runs/fl2_table1
    python launch.py sweep configs/sweeps/fl2_table1.py:svhn --workdir=runs/fl2_table1_svhn
    python launch.py sweep configs/sweeps/fl2_table1.py:cifar100 --workdir=runs/fl2_table1_cifar100

The paper's accuracies:
                       CIFAR-10           SVHN      CIFAR-100
    labels             10     40      40    250     100    400
    FedCon, IID      16.7   23.3    20.3   71.6     5.7   12.4
    FedCon, Dir 0.3  16.9   26.5    21.6   68.7     5.8   13.3
    FedCon, Dir 0.1  16.6   25.4    20.5   73.1     4.0    8.2
    SemiFL, IID      10.0   75.3    53.4   43.3    13.9   27.9
    SemiFL, Dir 0.3  10.0   38.0    26.3   42.7    12.4   18.9
    SemiFL, Dir 0.1  10.0   19.9    18.0   82.3     9.8   13.5
    (FL)^2, IID      38.9   81.5    75.3   94.6    14.4   28.1
    (FL)^2, Dir 0.3  24.3   43.5    31.0   92.6    12.1   25.4
    (FL)^2, Dir 0.1  19.2   36.4    21.5   88.0    10.4   23.5
The paper's spreads over three seeds go up to 41 points; table_runs.csv has each seed. As in the paper's re-runs, SemiFL
is its public code's version with (FL)^2's augmentation, and FedCon has its public code's optimizers, epochs and uniform
mean. All have 800 rounds.
"""

from fedjax_ssl.sweep import Sweep, by_argument

# Numbers of labels; target accuracy to which the table counts rounds.
DATASETS = {
    "cifar10": ((10, 40), 0.4),
    "svhn": ((40, 250), 0.7),
    "cifar100": ((100, 400), 0.2),
}
PARTITIONS = {
    "IID": {"data.partition": "iid"},
    "Dir 0.3": {"data.alpha": 0.3},
    "Dir 0.1": {"data.alpha": 0.1},
}
# Replaces settings of (FL)^2 in the config file.
AS_PUBLISHED = {"client.batch_size": 10, "server.pretrain_epochs": 0, "model.statistics_weights": "batches"}


def get_sweep(dataset="cifar10"):
    labels, target_accuracy = by_argument(DATASETS, dataset)
    fedcon = {
        "client.batch_size": 50,
        "client.epochs": 1,
        "server.epochs": 1,
        "server.pretrain_epochs": 1,
    }
    methods = {}
    for name, partition in PARTITIONS.items():
        methods |= {
            f"FedCon, {name}": ("plain,fedcon,own_optimisers", {**fedcon, **partition}),
            f"SemiFL, {name}": ("semifl,code", {**AS_PUBLISHED, **partition}),
            f"(FL)^2, {name}": ("", partition),
        }
    return Sweep(
        config=f"configs/fl2_{dataset}.py",
        methods=methods,
        fields={"data.server_labels": labels},
        target_accuracy=target_accuracy,
    )
