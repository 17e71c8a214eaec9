"""FedLabel's Tables 3 and 4: all methods with few labels at every client (ICCV 2023, arXiv 2307.08809).

    python launch.py sweep configs/sweeps/fedlabel_table3.py --workdir=runs/fedlabel_table3
    python launch.py sweep configs/sweeps/fedlabel_table3.py:cifar10_steps --workdir=runs/fedlabel_table3_steps
    python launch.py sweep configs/sweeps/fedlabel_table3.py:cifar100_steps --workdir=runs/fedlabel_cifar100_steps
    python launch.py sweep configs/sweeps/fedlabel_table3.py:organmnist --workdir=runs/fedlabel_table3_organmnist
    python launch.py sweep configs/sweeps/fedlabel_table3.py:cifar100 --workdir=runs/fedlabel_table3_cifar100
    python launch.py sweep configs/sweeps/fedlabel_table3.py:emnist --workdir=runs/fedlabel_table3_emnist
    python launch.py sweep configs/sweeps/fedlabel_table3.py:bloodmnist --workdir=runs/fedlabel_table3_bloodmnist

CIFAR-10 and OrganAMNIST have Dir 0.1 and, for Table 4, Dir 1; the others have Dir 0.1. The paper's accuracies are in
configs/fedlabel_DATASET.py. The paper does not give the baselines' hyper-parameters. Here they have FedLabel's learning
rate, batch size and augmentation, and five local epochs, while FedLabel counts steps. A client with 500 images, 100 of
them labelled, takes 10 steps on labels alone or 40 on all images; with FedLabel it takes 30 labelled and 10 unlabelled
steps. With `cifar10_steps` and `cifar100_steps` the rows that would take fewer take about 40 as well.
"""

from fedjax_ssl.sweep import Sweep, by_argument

# Values of Dirichlet's alpha; target accuracy to which the table counts rounds.
DATASETS = {
    "cifar10": ((0.1, 1.0), 0.3),
    "organmnist": ((0.1, 1.0), 0.5),
    "cifar100": ((0.1,), 0.1),
    "emnist": ((0.1,), 0.6),
    "bloodmnist": ((0.1,), 0.5),
    "cifar10_steps": ((0.1, 1.0), 0.3),
    "cifar100_steps": ((0.1,), 0.1),
}
# Local epochs of 40 steps: 2 labelled batches in an epoch, or 7 unlabelled ones.
EPOCHS = {
    **dict.fromkeys(("FedAvg", "FedProx", "FedMatch"), 20),
    **dict.fromkeys(("FedAvg+UDA", "FedAvg+FixMatch", "FedProx+UDA", "FedProx+FixMatch"), 6),
}
METHODS = {
    "FedAvg (100 %)": "supervised,all_labels",
    "FedProx (100 %)": "supervised,all_labels,fedprox",
    "FedAvg": "supervised",
    "FedProx": "supervised,fedprox",
    "FedAvg+UDA": "uda",
    "FedAvg+FixMatch": "fixmatch",
    "FedProx+UDA": "uda,fedprox",
    "FedProx+FixMatch": "fixmatch,fedprox",
    "FedTriNet": "fedtrinet",
    "FedMatch": "fedmatch",
    "FedLabel": "fedlabel",
}


def get_sweep(dataset="cifar10"):
    alphas, target_accuracy = by_argument(DATASETS, dataset)
    dataset, _, equal_steps = dataset.partition("_")
    epochs = {name: {"client.epochs": number} for name, number in EPOCHS.items()} if equal_steps else {}
    return Sweep(
        config=f"configs/fedlabel_{dataset}.py",
        methods={name: (words, epochs.get(name, {})) for name, words in METHODS.items()},
        fields={"data.alpha": alphas},
        target_accuracy=target_accuracy,
    )
