"""All methods for labels at the server, on MNIST, with the same partitions, labels, model and seeds.

    python launch.py sweep configs/sweeps/mnist_methods.py --workdir=runs/methods

The small CNN, 100 clients of 100 images, 10 a round, 100 labelled images (anchors) at the server, 40 rounds, 3 seeds;
LDA 0.1 and IID. All methods have the recipe `plain`; FedAnchor, SemiFL, (FL)^2 and FixMatch also `strong`; FedAnchor
also an adaptive threshold. All start from five epochs on the anchors, even if their papers have no pre-training. Three
rows do not depend on the clients' partition and run once. In a round FedRGD's clients take 50 steps, as many as five
epochs of the other methods. Its two servers also take 50 each; those of other methods take 10. It has group
normalisation. FedCon's projector is three times as wide as the features. FedU, FedEMA and Orchestra learn without
labels, with heads and a probe of their own; FedU's and FedEMA's heads are narrower than in their papers.
"""

from fedjax_ssl.sweep import Sweep

WITHOUT_CLIENTS = {"data.alpha": 1000.0}
# Every client keeps a target network; with the paper's heads, 100 clients would need ten gigabytes.
NARROW = {"model.projector_hidden": 512, "model.projector_dim": 128}
START = {"server.pretrain_epochs": 5}  # for methods that set another number


def get_sweep():
    return Sweep(
        config="configs/fedanchor_mnist.py",
        common={"num_rounds": 40, "data.examples_per_client": 100},
        methods={
            "Centralised supervised": ("centralised,plain", WITHOUT_CLIENTS),
            "Supervised FedAvg": "supervised,all_labels,plain",
            "Anchors only": ("server_only,plain", WITHOUT_CLIENTS),
            "FixMatch": "fixmatch,plain",
            "FixMatch (strong)": "fixmatch,strong",
            "SemiFL": "semifl,plain",
            "SemiFL (strong)": "semifl,strong",
            "FedIL": ("fedil,plain", START),
            "FedMatch": ("fedmatch,at_server,plain", START),
            "FedCon": "plain,fedcon",
            "FedRGD": ("plain,fedrgd", {**START, "fedrgd.steps": 50, "model.normalisation": "group"}),
            "(FL)^2": "fl2,plain",
            "(FL)^2 (strong)": "fl2,strong",
            "FedU": ("fedu,plain", NARROW),
            "FedEMA": ("fedema,plain", NARROW),
            "Orchestra": "orchestra,plain",
            "FedAnchor": "plain",
            "FedAnchor, its server alone": ("plain,no_clients", WITHOUT_CLIENTS),
            "FedAnchor (strong)": "strong",
        },
        fields={"data.alpha": (0.1, 1000.0)},
        seeds=(0, 1, 2),
    )
