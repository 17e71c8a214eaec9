"""SemiAnAgg's main table: one client of ten has labels, and methods start from its model (arXiv 2407.10327).

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
All labels, and the labelled client alone, start from fresh weights and have as many rounds as a method and its warm-up
together. So does CBAFed, because its own warm-up has a residual connection. After the warm-up IsoFed has twice the
rounds, because each role trains in every second one; the clients without labels train last. RSCFed has its own learning
rates, and on ISIC its own batches of 12. RSCFed, IsoFed and CBAFed train on one weak view of a labelled image, the
others on both views; all have the config file's balanced softmax, if it sets one. FedAvg-Semi, and the uniform mean
over clients without labels, are not in the paper's table: they show what SemiAnAgg's weights add.
"""

from fedjax_ssl.sweep import Sweep, by_argument

RSCFED = {"client.clip_norm": 5.0, "client.unlabelled_learning_rate": 0.021}
# Rounds of the warm-up and after it, CBAFed's variant, RSCFed, target accuracy to which the table counts rounds.
DATASETS = {
    "svhn": (250, 500, ",svhn", ("rscfed", RSCFED), 0.8),
    "cifar100": (500, 1000, "", ("rscfed", RSCFED), 0.3),
    "cifar100_lt": (500, 1000, "", ("rscfed", RSCFED), 0.15),
    "isic": (250, 500, ",isic", ("rscfed,isic", {"client.clip_norm": 5.0, "num_rounds": 500}), 0.65),
}


def get_sweep(dataset="svhn"):
    warm_up, rounds, of_cbafed, rscfed, target_accuracy = by_argument(DATASETS, dataset)
    fresh = {"init_from": "", "num_rounds": warm_up + rounds}
    return Sweep(
        config=f"configs/semianagg_{dataset}.py",
        methods={
            "FedAvg, all labels": ("supervised,all_labels", fresh),
            "the labelled client": ("supervised", fresh),
            "RSCFed": rscfed,
            "IsoFed": ("isofed", {"num_rounds": 2 * rounds}),
            "CBAFed": (f"cbafed{of_cbafed}", {**fresh, "cbafed.warm_up_rounds": warm_up, "client.clip_norm": 5.0}),
            "FedAvg-Semi": "fedavg_semi,flexmatch",
            "FedAvg-Semi, uniform": "fedavg_semi,uniform,flexmatch",
            "SemiAnAgg": "semianagg,flexmatch",
        },
        warm_up=("supervised", {"num_rounds": warm_up}),
        seeds=(0,),
        target_accuracy=target_accuracy,
    )
