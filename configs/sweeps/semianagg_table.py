"""SemiAnAgg's main table: one client of ten has labels, and all methods begin with its model (arXiv 2407.10327).

    python launch.py sweep configs/sweeps/semianagg_table.py --workdir=runs/semianagg_svhn
    python launch.py sweep configs/sweeps/semianagg_table.py:cifar100 --workdir=runs/semianagg_cifar100
    python launch.py sweep configs/sweeps/semianagg_table.py:cifar100_lt --workdir=runs/semianagg_cifar100_lt
    python launch.py sweep configs/sweeps/semianagg_table.py:isic --workdir=runs/semianagg_isic

The paper's accuracies, on SVHN / CIFAR-100 / CIFAR-100-LT / ISIC 2018:
    FedAvg, all labels                 94.77  64.75  38.40  80.78
    the labelled client                75.86  29.51  14.38  66.25
    RSCFed                             81.84  31.98  15.13  69.85
    IsoFed                             82.48  32.49  16.98  68.49
    CBAFed                             91.57  40.20  14.29  69.99
    SemiAnAgg                          91.69  49.23  23.81  72.24
The bounds begin with fresh weights and have as many rounds as a method with its warm-up. FedAvg-Semi, and the uniform
mean over clients without labels, are not in the paper's table: they say what SemiAnAgg's own weights are worth.
"""

from fedjax_ssl.sweep import Sweep, of_dataset

# Rounds of the warm-up and of all rounds, the variant of CBAFed, the accuracy to which rounds are counted.
DATASETS = {
    "svhn": (250, 750, ",svhn", 0.8),
    "cifar100": (500, 1500, "", 0.3),
    "cifar100_lt": (500, 1500, "", 0.15),
    "isic": (250, 750, ",isic", 0.65),
}
RSCFED = {"client.unlabelled_learning_rate": 0.021, "client.clip_norm": 5.0}
CBAFED = {"client.clip_norm": 5.0}


def get_sweep(dataset="svhn"):
    warm_up, rounds, of_cbafed, target_accuracy = of_dataset(DATASETS, dataset)
    fresh = {"init_from": "", "num_rounds": rounds}
    return Sweep(
        config=f"configs/semianagg_{dataset}.py",
        methods={
            "FedAvg, all labels": ("supervised,all_labels", fresh),
            "the labelled client": ("supervised", fresh),
            "RSCFed": ("rscfed", RSCFED),
            "CBAFed": (f"cbafed{of_cbafed}", CBAFED),
            "FedAvg-Semi": "fedavg_semi",
            "FedAvg-Semi, uniform": "fedavg_semi,uniform",
            "SemiAnAgg": "semianagg",
        },
        warm_up=("supervised", {"num_rounds": warm_up}),
        seeds=(0,),
        target_accuracy=target_accuracy,
    )
