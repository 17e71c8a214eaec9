"""Supervised federated learning, the upper bound: FedAvg and FedProx on clients whose labels are revealed.

FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017
(arXiv 1602.05629). FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020
(arXiv 1812.06127), whose term mu/2 |w - w_t|^2 is `client.proximal`, a field that every method has.

FedAnchor's "Supervised" rows pre-train on the anchors and alternate with the server's training (its longer version) or
do not pre-train (the earlier one): `server.pretrain_epochs` and `server.epochs`. There is no strong augmentation.
That labels are revealed is a property of the data (`data.reveal_labels`), and every table marks it.
"""

from fedjax_ssl.client.fix_mix import Labelled, fix_mix_phase
from fedjax_ssl.client.labels import CohortExamples
from fedjax_ssl.engine.interface import CLASSIFIER, Method, Problem, Report
from fedjax_ssl.errors import UserError
from fedjax_ssl.methods.frames import alternating

FIELDS = {"data.reveal_labels": True, "server.augmentation": "weak"}  # no strong augmentation anywhere
VARIANTS = {
    "fedprox": {"client.proximal": 0.01},
    "no_server": {"server.epochs": 0},  # FedAvg alone: no alternate training
    "no_pretraining": {"server.pretrain_epochs": 0},
}


def supervised(problem: Problem) -> Method:
    """FedAvg (or FedProx) with every label known, as a Method."""
    if not problem.config.data.reveal_labels:
        raise UserError("supervised trains on the clients' labels: data.reveal_labels must be true")

    def label(received, data, examples: CohortExamples) -> Labelled:
        del received
        return Labelled(Report({"given": data.visible_labels[examples.rows]}, examples.there), {})

    return alternating(problem, (fix_mix_phase(problem, label, parts=CLASSIFIER, view=problem.weak),))
