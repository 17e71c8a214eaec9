"""FedEMA: Divergence-aware Federated Self-Supervised Learning.

Zhuang et al., ICLR 2022 (arXiv 2204.04385); public code EasyFL, `applications/fedssl`. Clients have no labels at
all. What differs from FedU:
  1. a client's online network starts as an average of its own last one and the global one, mu w_k + (1 - mu) w,
     including the predictor; normalisation statistics are the global ones;
  2. mu = min(1, lambda_k d_k) grows with the divergence d_k of the client's encoder: how far the client's own last
     training moved it, as in the public code;
  3. autoscaler: lambda_k = tau / d_k from the client's first visit, then constant.
"""

from typing import Any

import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, share
from fedjax_ssl.client import byol
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants, unlabelled_backbone
from fedjax_ssl.methods.fedu import EXPERIMENT, FIELDS
from fedjax_ssl.methods.frames import self_supervised
from fedjax_ssl.models.projectors import BYOL_HEADS
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import moving_average, repeated, select

ONLINE, DIVERGENCE, SCALE = "online", "divergence", "scale"  # a client's memory; a scale of 0 means none yet
VARIANTS: Variants = {"paper": EXPERIMENT, "code": {"fedema.replica": True}, "constant": {"fedema.scale": 1.0}}


def defaults() -> Section:
    section = Section()
    # tau of the autoscaler: mu at a client's second visit; the code's script has 0.8 by default.
    section.tau = share(0.7)
    section.scale = real(None, above=0)  # one lambda for all clients instead of the autoscaler
    # With partial participation: clients that did not train in the round before start from the global networks.
    section.selective = False
    section.replica = False  # a bug of the code: at its first visit a client's target is its online encoder itself
    return section


def fedema(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method."""
    options = problem.config.fedema

    def autoscaled(scale, distance):
        if options.scale is not None:
            return jnp.float32(options.scale)
        return jnp.where(scale > 0, scale, options.tau / jnp.maximum(distance, jnp.finfo(jnp.float32).tiny))

    def begin(received: Broadcast, own):
        mu = jnp.minimum(1.0, own[SCALE] * own[DIVERGENCE])
        online = moving_average(own[ONLINE], select(received.model.params, byol.ONLINE), mu)
        return received.model.with_parts(**online)

    def leave(received: Broadcast, own, before, after):
        distance = byol.divergence(before.params["backbone"], after.params["backbone"])
        scale = autoscaled(own[SCALE], distance)
        memory = {ONLINE: select(after.params, byol.ONLINE), DIVERGENCE: distance, SCALE: scale}
        return memory, {"divergence": distance}

    def is_new(received: Broadcast, own):
        is_first = own[byol.LAST_ROUND] < 0
        return is_first | (own[byol.LAST_ROUND] != received.extra - 1) if options.selective else is_first

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        memory = {ONLINE: select(model.params, byol.ONLINE), DIVERGENCE: jnp.zeros(()), SCALE: jnp.zeros(())}
        return {**byol.own_targets(data, model), **repeated(memory, len(data.ids))}

    phase = byol.byol_phase(problem, byol.OnlineRule(begin, leave, is_new), alias_first_target=options.replica)
    return self_supervised(problem, (phase,), own, parts=byol.ONLINE)


ENTRY = Entry(
    fedema,
    title="FedEMA",
    paper="https://arxiv.org/abs/2204.04385",
    settings=("server",),
    needs_labels=False,
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    heads=BYOL_HEADS,
    confidence=(),
    advice=unlabelled_backbone,
    tiny={"model.projector_hidden": 8, "model.projector_dim": 4},
)
