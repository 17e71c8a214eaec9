"""FedAvg+UDA: consistency with sharpened soft labels at each client, wherever labels are.

Xie et al., "Unsupervised Data Augmentation for Consistency Training", NeurIPS 2020 (arXiv 1904.12848), as the baseline
of FedLabel (Tables 1 and 3). What differs from FedAvg+FixMatch:
  1. the target is soft, the weak view's prediction sharpened by a temperature: softmax(z / T);
  2. the loss is the divergence KL(target || p) for images with a confident unsharpened prediction.
Defaults are those of the common library of semi-supervised methods, without training-signal annealing.
"""

import jax

from fedjax_ssl.client import Rule, Views, Weigh, consistency_phase, make_confidence, own_confidence
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.fields import Section, real, share, word
from fedjax_ssl.learning.losses import soft_label_loss
from fedjax_ssl.methods.entry import LABELS_AT, Entry, Variants
from fedjax_ssl.methods.frames import alternating

VARIANTS: Variants = {
    "fedprox": {"client.proximal": 0.01},  # FedLabel's FedProx+UDA; no paper gives mu
    "lpl": {"consistency.labels_from": "local"},
    "gpl": {"consistency.labels_from": "received"},
}


def defaults() -> Section:
    """The section `config.uda`."""
    section = Section()
    section.threshold = share(0.8)  # an image counts if its largest probability reaches it
    section.temperature = real(0.4, above=0)  # T of the sharpened target
    section.label_mode = word("train", "eval")  # statistics for labels: 'train', the weak batch's; 'eval', the model's
    return section


def uda(problem: Problem) -> Method:
    """FedAvg+UDA as a Method."""
    options = problem.config.uda
    confidence = make_confidence(problem, options.threshold)

    def target(images: Views, weigh: Weigh):
        _, weights = weigh(jax.nn.softmax(images.logits))
        return jax.nn.softmax(images.logits / options.temperature), weights

    def loss(images: Views, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return soft_label_loss(images.strong.logits, targets, weights, images.mask)

    phase = consistency_phase(problem, Rule(target, loss), confidence, options.label_mode)
    return alternating(problem, (phase,), own=lambda data, model: own_confidence(problem, data, confidence))


ENTRY = Entry(
    uda,
    title="FedAvg with UDA",
    paper="https://arxiv.org/abs/1904.12848",
    settings=LABELS_AT,
    defaults=defaults,
    variants=VARIANTS,
    mislabels=True,
    tiny={"uda.threshold": 0.2},
)
