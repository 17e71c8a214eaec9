"""Global, fine-tuned and personal models on MNIST: each client's accuracy on its own test images.

    python launch.py sweep configs/sweeps/personal.py --workdir=runs/personal

The small CNN, 20 clients of 200 images, LDA 0.1, all in every round, 20 rounds, 3 seeds. A quarter of each client's
images are its own test images; a tenth of the others have labels. Labels alone and FixMatch, each with one model for
all and with a classifier that each client keeps. A client trains for 2 epochs a round with FixMatch and for 15 on
labels alone, so that both take about as many steps.
"""

from fedjax_ssl.sweep import Sweep

PERSONAL = {"personal_parts": ("classifier",)}
ALONE = {"client.epochs": 15}


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 20,
            "num_clients": 20,
            "clients_per_round": 20,
            "data.labels": "clients",
            "data.labelled_share": 0.1,
            "data.alpha": 0.1,
            "data.examples_per_client": 200,
            "data.client_test_share": 0.25,
            "client.epochs": 2,
        },
        methods={
            "Labels alone": ("supervised", ALONE),
            "Labels alone, own classifier": ("supervised", {**ALONE, **PERSONAL}),
            "FixMatch": "fixmatch",
            "FixMatch, own classifier": ("fixmatch", PERSONAL),
        },
    )
