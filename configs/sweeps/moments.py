"""Whose images the statistics of `strong` are from, and whether their variance between clients is kept: LDA 0.1.

    python launch.py sweep configs/sweeps/moments.py:mnist --workdir=runs/moments_mnist
    python launch.py sweep configs/sweeps/moments.py:cifar10 --workdir=runs/moments_cifar10

`mnist` is the setting of mnist_methods.py; `cifar10` the small CNN, 100 clients of 100 images, 500 anchors, 30 rounds.
'moments' with two passes a round, and on MNIST with one and three. The small CNN has three layers of normalisation, so
with three passes its statistics are those of all images. 'all_mixed' is what no federation could do.
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
