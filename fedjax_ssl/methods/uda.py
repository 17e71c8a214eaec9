"""FedAvg+UDA: consistency with sharpened soft labels at each client, wherever labels are.

Xie et al., "Unsupervised Data Augmentation for Consistency Training", NeurIPS 2020 (arXiv 1904.12848), as the
baseline of FedLabel (Tables 1 and 3). What differs from FedAvg+FixMatch: the target is soft, the weak view's
prediction sharpened by a temperature, softmax(z / T); and the loss is the divergence KL(target || p) for images
with a confident unsharpened prediction. There is no training-signal annealing.
"""

import jax

from fedjax_ssl.base.fields import Section, real
from fedjax_ssl.client import At, Batches, Loss, make_confidence, passes, threshold_of, total
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import LABELS_AT, Entry, Variants, one_mean
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.ops.losses import soft_label_loss
from fedjax_ssl.ops.sgd import Model

VARIANTS: Variants = {
    "fedprox": {"client.proximal": 0.01},  # FedLabel's FedProx+UDA; no paper gives mu
    "lpl": {"confidence.labels_from": "local"},
    "gpl": {"confidence.labels_from": "received"},
}


def defaults() -> Section:
    section = Section()
    section.temperature = real(0.4, above=0)  # T of the sharpened target
    return section


def uda(problem: Problem) -> Method:
    """FedAvg+UDA as a Method."""
    options = problem.config.uda
    rule = make_confidence(problem, threshold_of(problem, 0.8))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        """Cross-entropy of labelled images, and the divergence of strong views from sharpened soft labels."""
        seen = passes(problem, model, batch, at)
        _, weights = rule.label(at.labels, jax.nn.softmax(seen.scores))
        targets = jax.nn.softmax(seen.scores / options.temperature)
        soft_loss = soft_label_loss(seen.strong.logits, targets, weights, batch.unlabelled.mask)
        return total(problem, batch, seen, soft_loss, weights)

    return on_both_kinds(problem, loss, rule)


ENTRY = Entry(
    uda,
    title="FedAvg with UDA",
    paper="https://arxiv.org/abs/1904.12848",
    settings=LABELS_AT,
    defaults=defaults,
    variants=VARIANTS,
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2},
)
