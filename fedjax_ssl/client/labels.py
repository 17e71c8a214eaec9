"""Pseudo-labels of a whole cohort, made once a round: the class of the largest score, and which labels count."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import Confidence, once_a_round, qualify
from fedjax_ssl.client.debias import debiased, mean_prediction
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.client.scores import score_cohort
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem, Report
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import Outputs


class Labelled(NamedTuple):
    """The labels of a cohort.

    Attributes:
        report: the labels, which of them count, and those of other rules; leaves [M, n_max].
        own: entries of the clients' memory that the rule updated, leaves [M, ...].
        weights: float32 [M, n_max], of each image in the loss; None: 1 if it counts, else 0.
        confidence: the states of the rule after these labels, leaves [M, ...], see `Confidence`.
        prior: float32 [M, C], by which the client's probabilities are divided, see `debiased`; None: by nothing.
        largest: float32 [M, n_max], each image's largest score; None where there are no scores.
    """

    report: Report
    own: Mapping[str, Any] = {}
    weights: jax.Array | None = None
    confidence: Any = ()
    prior: jax.Array | None = None
    largest: jax.Array | None = None


def label_cohort(
    problem: Problem,
    scores: Callable[[jax.Array], Any],
    data: FederatedData,
    examples: Examples,
    *,
    confidence: Confidence,
    num_views: int = 0,
    used: str | None = None,
    facts: tuple[str, ...] = (),
) -> Labelled:
    """Labels every example with the class of its largest score; a rule says which labels count.

    Args:
        problem: the run.
        scores: images [B, H, W, C] -> float32 [B, C], the larger the surer; or with `used` a dict of such, by
            rule.
        data: the federation's.
        examples: of the cohort.
        confidence: the rule, from `make_confidence`.
        num_views: see `score_cohort`.
        used: name of the rule in use; all rules are reported.
        facts: names in the dict that are no rules but numbers of each image, float32 [B], to be reported.

    Raises:
        UserError: `confidence.debias` for scores of several rules, which need be no probabilities.
    """
    debias = problem.config.confidence.debias != "none"
    if debias and used is not None:
        raise UserError(
            f"confidence.debias={problem.config.confidence.debias!r} is for labels by a softmax, not {used!r}"
        )
    scored = score_cohort(problem, scores, data.inputs, examples, num_views)
    known = {name: scored.pop(name) for name in facts}
    scored = jax.tree.map(lambda leaf: as_told(data, examples.rows, leaf), scored)
    rules = {} if used is None else scored
    scores_used, prior = scored if used is None else scored[used], None
    if debias:
        prior = mean_prediction(scores_used, examples.present)
        scores_used = jax.nn.softmax(debiased(jnp.log(scores_used), prior[..., None, :]))
    states, weights, own = once_a_round(problem, confidence, scores_used, examples.present, examples.own)
    labels = jnp.argmax(scores_used, axis=-1).astype(jnp.int32)
    others = {name: jnp.argmax(of_rule, axis=-1).astype(jnp.int32) for name, of_rule in rules.items()}
    best, second = jnp.moveaxis(jax.lax.top_k(scores_used, 2)[0], -1, 0)
    report = Report(labels, weights > 0, others, {"score_gap": best - second, **known})
    return Labelled(report, own, weights, states, prior, best)


def as_told(data: FederatedData, rows: jax.Array, scores: jax.Array) -> jax.Array:
    """Scores by which a client labels: where it tells false labels, each class has those of the class before.

    Args:
        data: the federation's.
        rows: int32 [...], of the image table.
        scores: [..., C], of these images, in any unit.
    """
    if data.mislabelled is None:
        return scores
    return jnp.where(data.mislabelled[rows][..., None], jnp.roll(scores, 1, axis=-1), scores)


def told_outputs(data: FederatedData, rows: jax.Array, outputs: Outputs, heads: tuple[str, ...]) -> Outputs:
    """`as_told` of the logits of the classifier and of other classifiers, by the names of their heads."""
    false = {name: as_told(data, rows, outputs.heads[name]) for name in heads}
    return outputs._replace(logits=as_told(data, rows, outputs.logits), heads={**outputs.heads, **false})


def label_for_steps(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, included: jax.Array, confidence: Confidence
) -> Labelled:
    """What a method needs that makes its labels step by step: the rule's states by the received model, and a report.

    Args:
        problem: the run.
        model: as received; it labels in evaluation mode.
        data: the federation's.
        examples: of the cohort.
        included: bool [M, n_max], which of them get pseudo-labels.
        confidence: the rule.

    Returns:
        The Labelled; in its report visible labels count, too.
    """
    made = label_cohort(
        problem,
        lambda images: problem.network.probabilities(model, images),
        data,
        examples._replace(present=included),
        confidence=confidence,
        num_views=int(problem.config.confidence.debias != "none"),  # APP-U is of weak views
    )
    return made._replace(report=made.report._replace(qualified=made.report.qualified | examples.labelled))


def label_for_report(
    problem: Problem, model: Model, data: FederatedData, examples: Examples, threshold: float
) -> Report:
    """The same for a method of a fixed threshold, which reads nothing of it: the report alone."""
    scores = score_cohort(problem, lambda images: problem.network.probabilities(model, images), data.inputs, examples)
    labels, confident = qualify(scores, threshold, strictly=False)
    return Report(labels, (confident & examples.present) | examples.labelled)
