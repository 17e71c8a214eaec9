"""Each client with its own share of labels, from none to all, on MNIST: labels alone and five methods.

    python launch.py sweep configs/sweeps/profile.py --workdir=runs/profile

The shares are drawn from beta(0.3, 0.3) by the seed, so several of the 20 clients have almost no labels and several
almost all. The server has none. LeNet, 100 images a client, LDA 0.1, all in every round, 20 rounds, 3 seeds; rows with
the same seed have the same images and labels. Every method has five epochs of its own local training, except FedDB and
FedDure, which count steps: five on all images and ten on batches.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 20,
            "num_clients": 20,
            "clients_per_round": 20,
            "model.name": "lenet",
            "model.normalisation": "none",
            "data.alpha": 0.1,
            "data.examples_per_client": 100,
            "data.labels": "profile",
            "data.label_profile": ("beta(0.3,0.3)",),
            "data.server_labels": 0,
        },
        methods={
            "labels alone": "supervised",
            "FixMatch": "fixmatch",
            "SAGE": "sage",
            "SemiAnAgg": "semianagg,flexmatch",
            "FedDure": "feddure",
            "FedDB": "feddb",
        },
        seeds=(0, 1, 2),
    )
