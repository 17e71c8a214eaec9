"""Whose images the statistics of `strong` are from, and whether their variance between clients is kept: MNIST, LDA 0.1.

    python launch.py sweep configs/sweeps/mnist_moments.py --workdir=runs/mnist_moments

The setting of mnist_methods.py. 'moments' with one, two and three passes a round; the small CNN has three layers of
normalisation, so with three its statistics are those of all images. 'all_mixed' is what no federation could do.
"""

from fedjax_ssl.sweep import Sweep

SOURCES = {
    "all": {"model.statistics": "all"},
    "all_mixed": {"model.statistics": "all_mixed"},
    **{
        f"moments, {passes} passes": {"model.statistics": "moments", "model.statistics_passes": passes}
        for passes in (2, 1, 3)
    },
}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.examples_per_client": 100},
        methods={
            f"{method}, {name}": (recipe, fields)
            for method, recipe in (("SemiFL", "semifl,strong"), ("FedAnchor", "strong"))
            for name, fields in SOURCES.items()
        },
        fields={"data.alpha": (0.1,)},
        seeds=(0, 1, 2),
    )
