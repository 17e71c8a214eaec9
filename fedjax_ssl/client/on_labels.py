"""Cross-entropy on a client's labelled images: supervised training, alone or as one of several phases."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import is_on
from fedjax_ssl.client.deck import Deck, Examples
from fedjax_ssl.client.steps import At, Batches, Loss, LossFunction, MakePlan, Plan
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Previous, Problem
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import add_up


def labelled_plan(problem: Problem, epochs: int | None = None) -> MakePlan:
    """Passes (None: `client.epochs`) over the labelled images, the batch `labelled`; the work is `adjustment_of`."""
    config = problem.config.client

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.labelled, examples.keys, epochs or config.epochs)
        return Plan({"labelled": deck}, deck.num_steps(config.batch_size), adjustment_of(problem, examples))

    return plan


def adjustment_of(problem: Problem, examples: Examples) -> jax.Array | None:
    """The logit adjustment of `config.client` for each client, float32 [M, C], see `class_shares`; None: none."""
    config = problem.config.client
    if not is_on(config.logit_adjustment):
        return None
    return config.logit_adjustment * jnp.log(class_shares(class_counts(examples.labels, problem.num_classes), config))


def class_counts(labels: jax.Array, num_classes: int) -> jax.Array:
    """The number of examples of each class, float32 [..., C]; labels are int32 [..., n], -1 for none."""
    return jnp.sum(jax.nn.one_hot(labels, num_classes), axis=-2)


def class_shares(counts: jax.Array, config) -> jax.Array:
    """Class shares pi_c, float32 [..., C]; tau times their logarithm is added to the logits of a loss.

    The loss l(z + tau log pi, y) trains the logits z to classify as if all classes were equally frequent; predictions
    use z itself. With tau = 1 this is the balanced softmax (Ren et al., NeurIPS 2020, arXiv 2007.10740), for other tau
    the logit-adjusted loss (Menon et al., ICLR 2021, arXiv 2007.07314).

    The counts n_c of labelled examples are float32 [..., C]; a class without examples counts as half a one. With a
    `share_offset` e of the section `client`, pi_c = n_c / sum_c n_c + e instead; for e near 0 a class without examples
    adds nothing to the loss, so nothing limits its logit.
    """
    if is_on(config.share_offset):
        return counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1) + config.share_offset
    counts = jnp.where(counts > 0, counts, 0.5)
    return counts / jnp.sum(counts, axis=-1, keepdims=True)


def loss_on_labels(problem: Problem, metric: str = "client_loss") -> LossFunction:
    """The loss l(f(alpha(x)), y) of the batch `labelled`, named `metric`; the work of its plan is the logit adjustment.

    With `client.labelled_views='both'` it is the mean over the weak and the strong view, each with its own batch
    statistics.
    """

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        known = batch.labelled
        if problem.config.client.labelled_views == "both":
            weak_key, strong_key = jax.random.split(at.key)
            views = problem.weak(weak_key, known.inputs), problem.strong(strong_key, known.inputs)
        else:
            views = (problem.weak(at.key, known.inputs),)
        outputs, batch_stats = problem.network.train(model, views, known.mask)
        value = adjusted_cross_entropy(outputs, known.labels, known.mask, at.work)
        return Loss(value, batch_stats, {metric: value})

    return loss


def adjusted_cross_entropy(
    outputs: Sequence[Outputs], labels: jax.Array, mask: jax.Array, adjustment: jax.Array | None
) -> jax.Array:
    """The mean over views of l(z + adjustment, y), float32 []; the adjustment is float32 [C], see `class_shares`."""
    added = 0.0 if adjustment is None else adjustment
    losses = [cross_entropy(each.logits + added, labels, mask) for each in outputs]
    return add_up(losses) / len(losses)
