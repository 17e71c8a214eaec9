"""Where the labels are: 100 labels at the server, at all clients, or at one, on MNIST.

    python launch.py sweep configs/sweeps/mnist_labels.py --workdir=runs/mnist_labels

The small CNN, 20 clients of 100 images, LDA 0.1, all in every round, 30 rounds, 2 seeds. The rows are supervised
training on the visible labels, FixMatch, and the upper bound, FedAvg with every label. The bound has one row with
labels at the server and one without them. A client with five labels trains on them for 50 epochs a round, so that
supervised training takes as many labelled steps as FixMatch.
"""

from fedjax_ssl.sweep import Sweep

SETTINGS = {
    "100 at the server": {"data.labels": "server", "data.server_labels": 100},
    "5 at each client": {"data.labels": "clients", "data.labelled_share": 0.05},
    "100 at one client": {"data.labels": "some_clients", "data.labelled_clients": 1},
}


def get_sweep():
    rows = {}
    for name, setting in SETTINGS.items():
        epochs = {"client.epochs": 50} if setting["data.labels"] == "clients" else {}
        rows[f"Supervised, {name}"] = ("supervised", {**setting, **epochs})
        rows[f"FixMatch, {name}"] = ("fixmatch", setting)
    rows["All labels, with a server"] = ("supervised,all_labels", SETTINGS["100 at the server"])
    rows["All labels, without"] = ("supervised,all_labels", SETTINGS["5 at each client"])
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={
            "num_rounds": 30,
            "num_clients": 20,
            "clients_per_round": 20,
            "data.alpha": 0.1,
            "data.examples_per_client": 100,
        },
        methods=rows,
        seeds=(0, 1),
    )
