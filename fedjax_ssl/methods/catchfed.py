"""CATCHFed: Efficient Unlabeled Data Utilization for Semi-Supervised Federated Learning in Limited Labels Environments.

Park, Porto Buarque de Gusmao, Ji and Kim, 2025 (arXiv 2511.11778). The server has few labels. What differs from SemiFL,
by the abstract and a public summary:
  1. client-aware adaptive warm-up thresholds: each client has a threshold for each class, by how difficult it is there;
  2. hybrid thresholds: a pseudo-label counts only if its confidence and the image's energy reach their thresholds;
  3. images without a pseudo-label are trained on too: predictions of weak and strong views should be consistent.

**All else is inferred**, since no equation could be read and no code is public: the thresholds are FlexMatch's with
warm-up, the energy is that of Liu et al. (NeurIPS 2020), the consistency is UDA's divergence, and there is no mixup.
docs/methods/catchfed.md says more.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Examples,
    Loss,
    local_training,
    make_confidence,
    score_cohort,
    threshold_of,
    unlabelled_plan,
)
from fedjax_ssl.client.deck import split_keys
from fedjax_ssl.client.labels import as_told, label_by_scores
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Label, Labels, Method, Phase, Previous, Problem
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy, soft_label_loss
from fedjax_ssl.ops.sgd import Model

FIELDS = {"confidence.kind": "flexmatch"}  # another rule may be set instead
VARIANTS: Variants = {  # without one of its three parts
    "no_adaptive": {"confidence.kind": "fixed"},
    "no_hybrid": {"catchfed.hybrid": False},
    "no_consistency": {"catchfed.consistency_weight": 0.0},
}


def defaults() -> Section:
    section = Section()
    section.hybrid = True  # whether a pseudo-label also needs a low energy
    section.energy = real(-4.0)  # the largest energy of an image whose pseudo-label counts, see `energies`
    section.consistency_weight = real(1.0, least=0)  # weight of the loss of images without a pseudo-label
    return section


def catchfed(problem: Problem) -> Method:
    """Its three parts within alternate training as a Method."""
    rule = make_confidence(problem, threshold_of(problem))
    return alternating(problem, (on_all_images(problem),), label=hybrid_labels(problem, rule), rule=rule)


def energies(logits: jax.Array) -> jax.Array:
    """E(x) = -log sum_c exp f_c(x), float32 [...]; low for an image that is like those that the model knows."""
    return -jax.nn.logsumexp(logits, axis=-1)


def hybrid_labels(problem: Problem, rule: Confidence) -> Label:
    """The received model labels a weak view of each image; the client's rule and the energy decide which count.

    `Labels.more` is its predictions, float32 [M, n_max, C].
    """
    options = problem.config.catchfed

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort, split_keys(cohort)[0])

        def of_images(images: jax.Array) -> jax.Array:
            return problem.network.predict(received.model, images).logits

        logits = score_cohort(problem, of_images, data.inputs, examples, num_views=1)
        scores = as_told(data, examples.rows, jax.nn.softmax(logits))
        made = label_by_scores(problem, scores, examples, rule)._replace(more=scores)
        if not options.hybrid:
            return made
        known = energies(logits) <= options.energy
        report = made.report._replace(qualified=made.report.qualified & known)
        return made._replace(report=report, weights=made.weights * known)

    return label


def on_all_images(problem: Problem) -> Phase:
    """A client's epochs over all its images, with and without a pseudo-label that counts.

    The loss is mean_i w_i l(f(A(x_i)), y_i) + lambda mean_i 1[w_i = 0] KL(p_i || f(A(x_i))), p the received model's
    prediction for the weak view.
    """
    network, options, size = problem.network, problem.config.catchfed, problem.config.client.batch_size

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, positions = batch.unlabelled.inputs, batch.unlabelled.mask, batch.unlabelled.positions
        weights, labels = at.labels.weights[positions], at.labels.report.labels[positions]
        (strong,), batch_stats = network.train(model, (problem.strong(at.key, images),), mask)
        pseudo_loss = cross_entropy(strong.logits, labels, mask, weights)
        others = (weights == 0).astype(jnp.float32)
        consistency_loss = soft_label_loss(strong.logits, at.labels.more[positions], others, mask)
        value = pseudo_loss + options.consistency_weight * consistency_loss
        metrics = {"client_loss": value, "pseudo_loss": pseudo_loss, "consistency_loss": consistency_loss}
        return Loss(value, batch_stats, metrics)

    return local_training(problem, unlabelled_plan(problem), loss, {"unlabelled": size})


ENTRY = Entry(
    catchfed,
    title="CATCHFed",
    paper="https://arxiv.org/abs/2511.11778",
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    mislabels=True,
    tiny={"confidence.threshold": 0.2, "catchfed.energy": 0.0},
)
