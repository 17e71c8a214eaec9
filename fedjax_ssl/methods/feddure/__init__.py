"""FedDure: Combating Data Imbalances in Federated Semi-supervised Learning with Dual Regulators.

Bai et al., AAAI 2024 (arXiv 2307.05358). For clients with labels for a few of their images, whose labelled and
unlabelled images have different class shares. What differs from FedAvg+FixMatch: a client has three models,
  1. the coarse regulator (C-reg), which makes the labels; it is the model that is sent, averaged and tested;
  2. the local model, which starts each round as a copy of C-reg, learns from C-reg's labels only, and is then dropped;
  3. the fine regulator (F-reg), a small network that maps C-reg's probabilities of an image to the image's weight in
     the local model's loss; it starts afresh each round.
F-reg minimises the labelled loss that the local model would have after a step with F-reg's weights. Then the local
model takes the step. C-reg learns from labels, from its own confident labels, and from the learning effect d, by which
the step changed the local model's labelled loss (as in Meta Pseudo Labels, Pham et al., CVPR 2021).

The paper's text was not available: this follows its abstract and its public code (White1973/FedDure, commit 50ecb77).
docs/methods/feddure.md has the differences, and their lines.
"""

import functools

from fedjax_ssl.base.fields import Section, whole
from fedjax_ssl.client import labels_for_report, own_optimizers, threshold_of
from fedjax_ssl.engine import CLASSIFIER, Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.feddure.client import TAU, local_training, rising
from fedjax_ssl.methods.frames import alternating

FIELDS = {"data.labels": "clients"}
VARIANTS: Variants = {
    "paper": {  # its public code's file for CIFAR-10, which deals labels IID instead
        "num_rounds": 200,
        "clients_per_round": 5,
        "data.labels_per_class": 5,
        "data.partition": "dirichlet_clients",
        "data.alpha": 0.5,
        "model.name": "resnet9",
        "model.classifier_init": "torch_linear",
        "augment.flavour": "fixmatch",
        "augment.magnitude": 9,  # the code's 10 is never drawn
        "client.batch_size": 10,
        "client.optimizer": "adam",
        "client.learning_rate": 6e-4,
        "client.weight_decay": 0.0,
        "client.clip_norm": 0.0,
        "feddure.warm_up_steps": 10,
        "feddure.wait_steps": 2,
    },
    "code": {"feddure.fine": False},
    "no_coarse": {"feddure.coarse": False},
}


def defaults() -> Section:
    section = Section()
    section.tuning_steps = whole(5, least=0)  # first steps of a round: C-reg trains on labelled images alone
    section.steps = whole(5, least=1)  # steps after these, in which all three models train
    section.unlabelled_batch = whole(64, least=1)  # unlabelled images per step, besides client.batch_size labelled ones
    section.warm_up_steps = whole(0, least=0)  # steps of a round over which learning rates rise from 0
    section.wait_steps = whole(0, least=0)  # first steps in which the local model's rate is 0
    section.coarse = True  # whether C-reg learns from d
    section.fine = True  # whether F-reg weights images
    return section


def feddure(problem: Problem) -> Method:
    """FedDure as a Method."""
    own = functools.partial(own_optimizers, problem, parts=CLASSIFIER, optimizer=rising(problem))
    label = labels_for_report(problem, threshold_of(problem, TAU))
    return alternating(problem, (local_training(problem),), own, label=label)


ENTRY = Entry(
    feddure,
    title="FedDure",
    paper="https://arxiv.org/abs/2307.05358",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("threshold",),
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "feddure.tuning_steps": 1, "feddure.steps": 2},
)
