"""Which images should give the normalisation statistics of the recipe `strong`? MNIST or CIFAR-10, LDA 0.1.

    python launch.py sweep configs/sweeps/moments.py:mnist --workdir=runs/moments_mnist
    python launch.py sweep configs/sweeps/moments.py:cifar10 --workdir=runs/moments_cifar10

`all` loses the variance between clients, `all_mixed` and `moments` keep it (docs/concepts/statistics.md). `mnist` is
the setting of mnist_methods.py. `cifar10` has the small CNN, 100 clients of 100 images, 500 anchors, 30 rounds.
`moments` has two passes a round, on MNIST also one and three. The small CNN has three normalisation layers, so three
passes give the exact statistics of all images. Real clients could not use `all_mixed` without sharing images.
"""

from fedjax_ssl.sweep import Sweep, by_argument


def passes(number):
    return {"model.statistics": "moments", "model.statistics_passes": number}


SOURCES = {
    "all": {"model.statistics": "all"},
    "all_mixed": {"model.statistics": "all_mixed"},
    "moments, 2 passes": passes(2),
}
DATASETS = {
    "mnist": (
        "configs/fedanchor_mnist.py",
        {"num_rounds": 40},
        {**SOURCES, "moments, 1 pass": passes(1), "moments, 3 passes": passes(3)},
    ),
    "cifar10": ("configs/fedanchor_cifar10.py", {"num_rounds": 30, "model.name": "cnn"}, SOURCES),
}


def get_sweep(dataset="mnist"):
    config, common, sources = by_argument(DATASETS, dataset)
    return Sweep(
        config=config,
        common={"data.examples_per_client": 100, **common},
        methods={
            f"{method}, {name}": (recipe, fields)
            for method, recipe in (("SemiFL", "semifl,strong"), ("FedAnchor", "strong"))
            for name, fields in sources.items()
        },
        fields={"data.alpha": (0.1,)},
        seeds=(0, 1, 2),
    )
