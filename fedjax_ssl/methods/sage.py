"""SAGE: Mind the Gap: Confidence Discrepancy Can Guide Federated Semi-Supervised Learning Across Pseudo-Mismatch.

Liu et al., CVPR 2025 (arXiv 2503.13227). What differs from FedAvg+FixMatch with a few labels at every client:
  1. a weak view is labelled twice, by the model in training and by the received global model;
  2. if the local label is confident, the target is a mixture of both labels. The global label's share grows with the
     gap between both confidences, because under heterogeneity the local model is often confident and wrong;
  3. if the local label is not confident, the global one is the target, and an image counts if one of the two models is
     confident.
docs/methods/sage.md has the differences to the public code.
"""

import math

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real
from fedjax_ssl.client import At, Batches, Loss, make_confidence, passes, threshold_of, total
from fedjax_ssl.client.passes import check_both_label
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.ops.losses import soft_label_loss
from fedjax_ssl.ops.sgd import Model

VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on CIFAR-10, and of ProxyFL's
        "num_rounds": 300,
        "num_clients": 20,
        "clients_per_round": 8,
        "data.labels": "clients",
        "data.partition": "dirichlet_pairs",
        "data.num_labelled": 5000,
        "model.name": "resnet8",
        "model.width": 64,
        "model.classifier_init": "torch_linear",
        "augment.flavour": "fixmatch",
        "augment.magnitude": 9,  # the code's 10 is never drawn
        "client.learning_rate": 0.1,
        "client.weight_decay": 1e-4,
        "client.clip_norm": 0.0,
        "client.batch_size": 128,
        "consistency.unlabelled_ratio": 2,
        "consistency.include_labelled": True,
        "consistency.epoch_length": "unlabelled",
    }
}


def defaults() -> Section:
    section = Section()
    # The gap of confidences at which both labels weigh the same: kappa = ln 2 / half_gap.
    section.half_gap = real(0.05, above=0)
    return section


def sage(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method."""
    options = problem.config.sage
    rule = make_confidence(problem, threshold_of(problem))
    check_both_label(problem, "sage")

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        seen = passes(problem, model, batch, at)
        local, received = jax.nn.softmax(seen.by_local), jax.nn.softmax(seen.by_received)
        both = rule.label(at.labels, local), rule.label(at.labels, received)
        targets, weights = mixed_labels(local, received, *both, half_gap=options.half_gap)
        soft_loss = soft_label_loss(seen.strong.logits, targets, weights, batch.unlabelled.mask)
        return total(problem, batch, seen, soft_loss, weights)

    return on_both_kinds(problem, loss, rule)


def mixed_labels(local: jax.Array, received: jax.Array, local_labels, global_labels, *, half_gap: float):
    """The mixture of both models' labels: lambda y_l + (1 - lambda) y_g, lambda = exp(-kappa |c_l - c_g|).

    Both models have probabilities, float32 [B, C], whose largest is c, and labels y, int32 [B], with weights, float32
    [B]; lambda is 0 if the local label has no weight. kappa = ln 2 / half_gap. Returns the targets, float32 [B, C], and
    the larger one of both weights.
    """
    (local_labels, local_weights), (global_labels, global_weights) = local_labels, global_labels
    gap = jnp.clip(jnp.abs(jnp.max(local, axis=-1) - jnp.max(received, axis=-1)), 1e-6, 1.0)
    share = jnp.where(local_weights > 0, jnp.exp(-math.log(2) / half_gap * gap), 0.0)[:, None]
    local_labels, global_labels = (jax.nn.one_hot(y, local.shape[-1]) for y in (local_labels, global_labels))
    return share * local_labels + (1 - share) * global_labels, jnp.maximum(local_weights, global_weights)


ENTRY = Entry(
    sage,
    title="SAGE",
    paper="https://arxiv.org/abs/2503.13227",
    settings=("clients", "some_clients", "server", "profile"),
    defaults=defaults,
    variants=VARIANTS,
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "consistency.include_labelled": True, "consistency.epoch_length": "unlabelled"},
)
