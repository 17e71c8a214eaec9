"""All methods for clients that each have a few labels, on MNIST: ten at each of 20 clients.

    python launch.py sweep configs/sweeps/mnist_few_labels.py --workdir=runs/mnist_few_labels

The small CNN, 20 clients of 100 images, 8 a round, labels for 10 of each client's images, LDA 0.1, 40 rounds, 3 seeds.
Five local epochs of the 90 unlabelled images are 45 steps: methods that count steps, or go through the labels alone,
take as many. FedTriNet's schedule, which is of 100 rounds, is shortened to 40.
"""

from fedjax_ssl.sweep import Sweep

STEPS = 45
SHORTENED = {
    "fedtrinet.warm_up_rounds": 16,
    "fedtrinet.full_rounds": 4,
    "fedtrinet.decay_rounds": 20,
    "fedtrinet.protected_from": 14,
    "fedtrinet.ramp_from": 20,
    "fedtrinet.ramp_epochs": 40,
}


def get_sweep():
    labels_alone, in_steps = (
        {"client.epochs": STEPS},
        {"fedlabel.labelled_steps": STEPS, "fedlabel.unlabelled_steps": STEPS},
    )
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 40,
            "num_clients": 20,
            "clients_per_round": 8,
            "data.labels": "clients",
            "data.labelled_share": 0.1,
            "data.alpha": 0.1,
            "data.examples_per_client": 100,
        },
        methods={
            "All labels": "supervised,all_labels",
            "FedAvg": ("supervised", labels_alone),
            "FedProx": ("supervised,fedprox", labels_alone),
            "FedAvg+UDA": "uda",
            "FedProx+UDA": "uda,fedprox",
            "FixMatch, local labels": "fixmatch,lpl",
            "FixMatch, global labels": "fixmatch,gpl",
            "FedProx+FixMatch": "fixmatch,fedprox",
            "FedTriNet": ("fedtrinet", SHORTENED),
            "FedMatch": "fedmatch",
            "FedLabel": ("fedlabel", in_steps),
            "FedLabel, the code's": ("fedlabel,code", {**in_steps, "fedlabel.unlabelled_from": 0}),
            "SAGE": "sage",
            "ProxyFL": "proxyfl",
        },
        target_accuracy=0.7,
    )
