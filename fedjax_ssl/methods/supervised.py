"""Supervised federated learning on the visible labels: FedAvg and FedProx.

FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017
(arXiv 1602.05629). FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020
(arXiv 1812.06127), whose term mu/2 |w - w_t|^2 is `client.proximal`, a field that every method has.

Clients train on their labelled images; a client without labels takes no part. A server with labels trains after each
round. The variant `all_labels` reveals every label and is the upper bound, which every table marks. Without it, only
labelled clients train, which is the lower bound if some clients have labels and the others none.
"""

from fedjax_ssl.base.fields import Section, word
from fedjax_ssl.client import labelled_phase, loss_on_labels
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import LABELS_AT, Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.server import labelled_clients, only_eligible

FIELDS = {"server.augmentation": "weak"}
VARIANTS: Variants = {
    "all_labels": {"data.reveal_labels": True},
    "fedprox": {"client.proximal": 0.01},
    "no_server": {"server.epochs": 0},  # FedAvg alone: no alternate training
    "no_pretraining": {"server.pretrain_epochs": 0},
    "labelled_cohorts": {"supervised.cohort": "labelled"},
}


def defaults() -> Section:
    section = Section()
    section.cohort = word("all", "labelled")  # who is drawn: 'all' clients, or those with 'labelled' images
    return section


def supervised(problem: Problem) -> Method:
    """FedAvg (or FedProx) on the visible labels, as a Method."""
    method = alternating(problem, (labelled_phase(problem, loss_on_labels(problem)),))
    if problem.config.supervised.cohort == "all":
        return method
    return only_eligible(problem, method, lambda state, data: labelled_clients(data))


ENTRY = Entry(
    supervised,
    title="supervised FedAvg",
    paper="https://arxiv.org/abs/1602.05629",
    settings=LABELS_AT,
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    mislabels=True,
    unlabelled=False,
    tiny={
        "data.reveal_labels": True,
        "client.proximal": 0.1,
        "aggregation.optimizer": "fedadam",
        "aggregation.learning_rate": 0.01,
    },
)
