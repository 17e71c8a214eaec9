"""FedU: Collaborative Unsupervised Visual Representation Learning from Decentralized Data.

Zhuang et al., ICCV 2021; public code EasyFL, `applications/fedssl`. Clients have no labels at all. What differs from
FedAvg:
  1. every client trains by BYOL: an online network (backbone, projector, predictor) and a target of its own;
  2. only online networks are averaged, by the clients' sizes; a client's online encoder starts from the global one, and
     its target from the target of its last visit;
  3. divergence-aware predictor update: a client takes the global predictor if its last training moved its encoder by
     less than a threshold; otherwise it keeps its own.

The classifier is a probe at the server (`config.probe`).
"""

from typing import Any

import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, word
from fedjax_ssl.client import byol
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants, unlabelled_backbone
from fedjax_ssl.methods.frames import self_supervised
from fedjax_ssl.models.projectors import BYOL_HEADS
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated, where

DIVERGENCE = "divergence"  # the entry of a client's memory with the divergence of its last training
FIELDS = {"views": "simclr"}  # of FedU and FedEMA
EXPERIMENT = {  # the CIFAR-10 setting of FedU's and FedEMA's papers
    "num_rounds": 100,
    "schedule": "cosine",
    "num_clients": 5,
    "clients_per_round": 5,
    "data.partition": "shards",
    "data.classes_per_client": 2,
    "data.normalisation": "none",
    "model.classifier_init": "torch_linear",
    "model.projector_hidden": 4096,
    "model.projector_dim": 2048,
    "client.epochs": 5,
    "client.batch_size": 128,
    "client.learning_rate": 0.032,
    "client.clip_norm": 0.0,
}
VARIANTS: Variants = {"paper": EXPERIMENT, "code": {"fedu.replica": True}, "both": {"fedu.update_encoder": "both"}}


def defaults() -> Section:
    section = Section()
    section.threshold = real(0.4, least=0)  # a client whose divergence reaches this keeps its own predictor
    section.update_encoder = word("online", "both")  # the networks that start from the global encoder in each round
    section.replica = False  # a bug of the code: at its first visit a client's target is its online encoder itself
    return section


def fedu(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method."""
    options = problem.config.fedu

    def begin(received: Broadcast, own):
        is_near = own[DIVERGENCE] < options.threshold
        predictor = where(is_near, received.model.params[byol.PREDICTOR], own[byol.PREDICTOR])
        return received.model.with_parts(**{byol.PREDICTOR: predictor})

    def leave(received: Broadcast, own, before, after):
        moved = byol.divergence(before.params["backbone"], after.params["backbone"])
        return {byol.PREDICTOR: after.params[byol.PREDICTOR], DIVERGENCE: moved}, {"divergence": moved}

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        memory = {byol.PREDICTOR: model.params[byol.PREDICTOR], DIVERGENCE: jnp.zeros(())}
        return {**byol.own_targets(data, model), **repeated(memory, len(data.ids))}

    phase = byol.byol_phase(
        problem,
        byol.OnlineRule(begin, leave),
        new_target="received" if options.update_encoder == "both" else "kept",
        alias_first_target=options.replica,
    )
    return self_supervised(problem, (phase,), own, parts=byol.ONLINE)


ENTRY = Entry(
    fedu,
    title="FedU",
    paper="https://arxiv.org/abs/2108.06492",
    settings=("server",),
    needs_labels=False,
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    heads=BYOL_HEADS,
    confidence=(),
    advice=unlabelled_backbone,
    tiny={"model.projector_hidden": 8, "model.projector_dim": 4, "fedu.threshold": 0.01},
)
