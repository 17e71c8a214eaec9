"""Confidence: which pseudo-labels count, and how much. Each rule is a function; the library's rules are in `KINDS`.

A rule keeps a state for each client, computed from the scores of its images. The state never leaves the client. Methods
apply the rule to all of a client's images once a round, or to a batch in each step. `config.confidence` names the rule.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.base.imports import import_own, is_own, one_line
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Labels, Problem
from fedjax_ssl.ops.losses import mean_present
from fedjax_ssl.ops.trees import moving_average, repeated, where, with_rows

FIELD = "confidence.kind"
MEMORY = "confidence"  # the state's entry in a client's memory
N_SIGMA = 2.0  # n of SoftMatch: with a larger n weights fall faster below the mean


class Confidence(NamedTuple):
    """A rule of confidence. Scores are probabilities, or FedAnchor's cosines; larger means more confident."""

    init: Callable[[int], Any]  # n_max, the examples of the largest client -> the initial state of a client
    # (state, scores [B, C], present bool [B], positions int32 [B] among the client's examples) -> the next state.
    update: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]
    # (state, scores [..., C], size int32 [], the number of the client's images that may get a label) -> float32 [...],
    # the weight of the label with the largest score, from 0 to 1.
    weigh: Callable[[Any, jax.Array, jax.Array], jax.Array]
    # (state, logits [B, C] of the strong views, weights [B]) -> float32 [], an additional loss; None: there is none.
    regulariser: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None
    # (state, round int32 [], from 0) -> the state at the beginning of the round; None: unchanged.
    begin: Callable[[Any, jax.Array], Any] | None = None
    before: bool = False  # whether a step weighs its batch with the state before the batch, not after it
    averages: bool = False  # whether the state is a moving average, which needs many updates
    soft: bool = False  # whether weights can lie between 0 and 1

    def label(self, made: Labels, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The class with the largest score, int32 [...], and its weight by this round's state, float32 [...]."""
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), self.weigh(made.state, scores, made.size)

    def step(self, state: Any, scores: jax.Array, present: jax.Array, positions: jax.Array, size: jax.Array):
        """The weights of a batch, float32 [B], 0 for padding, and the state after it."""
        after = self.update(state, scores, present, positions)
        weights = self.weigh(state if self.before else after, scores, size)
        return jnp.where(present, weights, 0.0), after


def threshold_of(problem: Problem, default: float = 0.95) -> float:
    """tau, the field `confidence.threshold`; None stands for the method's `default`."""
    given = problem.config.confidence.threshold
    return default if given is None else given


def make_confidence(
    problem: Problem, threshold: float | jax.Array, strictly: bool = False, hard: bool = False
) -> Confidence:
    """The rule that `confidence.kind` names, except 'acr', which `acr.py` has.

    The threshold tau is in the unit of the scores; with `strictly` a score must exceed it (FedAnchor, eq. 5), else it
    may equal it (SemiFL, FixMatch). `hard` takes weights of 0 or 1 alone. Raises a UserError if the rule has others.
    """
    options, name = problem.config.confidence, problem.config.method
    make = problem.own_rule or KINDS.get(options.kind)
    if make is None:
        raise UserError(f"confidence.kind={options.kind!r} trains a second classifier, which {name} does not have")
    rule = make(options, problem.num_classes, threshold, strictly)
    if hard and rule.soft:
        raise UserError(f"confidence.kind={options.kind!r} gives weights, but {name} has none: they must be 0 or 1")
    return rule


def own_confidence(problem: Problem, data: FederatedData, rule: Confidence) -> dict[str, Any]:
    """The rule's entry of `State.clients`, every leaf [K, ...]; {} if the state lasts only for one round."""
    if problem.config.confidence.memory == "round":
        return {}
    return {MEMORY: repeated(rule.init(data.width), len(data.ids))}


def states_at_start(problem: Problem, rule: Confidence, examples: Examples) -> Any:
    """The states of a cohort's clients at the beginning of a round, leaves [M, ...]."""
    number, n_max = examples.present.shape
    lasts = problem.config.confidence.memory == "run"
    states = examples.own[MEMORY] if lasts else repeated(rule.init(n_max), number)
    return states if rule.begin is None else jax.vmap(rule.begin)(states, examples.round)


def once_a_round(
    problem: Problem, rule: Confidence, scores: jax.Array, examples: Examples
) -> tuple[Any, jax.Array, dict[str, Any]]:
    """Applies a rule to the scores, float32 [M, n_max, C], of each client's present images.

    Returns the states, leaves [M, ...]; the weights, float32 [M, n_max], 0 for absent images; and the entry for the
    clients' memory. Raises a UserError if the rule averages over many updates, but its state is reset in each round.
    """
    options, present = problem.config.confidence, examples.present
    lasts = options.memory == "run"
    if rule.averages and is_on(options.momentum) and not lasts:
        raise UserError(
            f"confidence.kind={options.kind!r} averages over updates, and {problem.config.method} has one in a round: "
            "set confidence.memory='run', with a confidence.momentum of about 0.9"
        )
    before = states_at_start(problem, rule, examples)
    positions = jnp.broadcast_to(jnp.arange(present.shape[1], dtype=jnp.int32), present.shape)
    states = jax.vmap(rule.update)(before, scores, present, positions)
    weights = jax.vmap(rule.weigh)(states, scores, jnp.sum(present, axis=1))
    return states, jnp.where(present, weights, 0.0), {MEMORY: states} if lasts else {}


def qualify(scores: jax.Array, thresholds: jax.Array | float, strictly: bool) -> tuple[jax.Array, jax.Array]:
    """Hard pseudo-labels, int32 [...], the class of the largest score; and whether each reaches its class's threshold.

    Scores are float32 [..., C]; thresholds, in their unit, have the same shape or are a number. With `strictly` a score
    must exceed the threshold.
    """
    labels = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    thresholds = jnp.broadcast_to(jnp.asarray(thresholds, jnp.float32), scores.shape)
    needed = jnp.take_along_axis(thresholds, labels[..., None], axis=-1)[..., 0]
    best = jnp.max(scores, axis=-1)
    return labels, best > needed if strictly else best >= needed


def _reached(scores: jax.Array, thresholds: jax.Array | float, strictly: bool) -> jax.Array:
    """1 where the largest score reaches the threshold of its class, else 0: float32 [...]."""
    return qualify(scores, thresholds, strictly)[1].astype(jnp.float32)


def moved(old: Any, found: Any, momentum: float | jax.Array, counts: jax.Array) -> Any:
    """m old + (1 - m) found for each leaf; the old value if the batch is empty (`counts`, bool [], is False)."""
    return where(counts, moving_average(old, found, momentum), old)


# --- The rules: (config.confidence, C, the method's threshold, strictly) -> Confidence. -------------------------------


def fixed(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1[max p >= tau] (FixMatch, Sohn et al., NeurIPS 2020, arXiv 2001.07685)."""
    return Confidence(
        lambda n_max: (),
        lambda state, scores, present, positions: state,
        lambda state, scores, size: _reached(scores, threshold, strictly),
    )


def share(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1 for the share `confidence.share` of the images, those with the largest scores; rounded to whole images.

    The threshold lies halfway between the smallest score that counts and the next smaller one. If they are equal, all
    images with this score count, as when a model is sure of many images; so `strictly` has no effect.
    """

    def update(state, scores, present, positions):
        ranked = jnp.sort(jnp.where(present, jnp.max(scores, axis=-1), -jnp.inf), descending=True)
        ranked = jnp.concatenate([jnp.array([jnp.inf]), ranked, jnp.array([-jnp.inf])])
        k = jnp.round(options.share * jnp.sum(present)).astype(jnp.int32)
        return (ranked[k] + ranked[k + 1]) / 2

    del strictly
    return Confidence(lambda n_max: jnp.zeros(()), update, lambda tau, scores, size: _reached(scores, tau, False))


def flexmatch(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1[max p >= tau beta_c / (2 - beta_c)], c = argmax p (Zhang et al., NeurIPS 2021, arXiv 2110.08263).

        beta_c = n_c / max(max_c n_c, n_none)

    n_c is the number of the client's images with the stored label c, n_none the number without a stored label. An image
    stores its label, replacing an older one, whenever max p reaches tau. A step uses the counts before its batch. With
    `confidence.warm_up=False` n_none is left out. Without stored labels every threshold is 0.

    The state is int32 [n_max], the stored labels, -1 for none.
    """

    def update(stored, scores, present, positions):
        labels, sure = qualify(scores, threshold, strictly)
        return with_rows(stored, positions, labels, present & sure)

    def weigh(stored, scores, size):
        counts = jnp.sum(jax.nn.one_hot(stored, num_classes), axis=0)
        largest = jnp.max(counts)
        if options.warm_up:
            largest = jnp.maximum(largest, size - jnp.sum(counts))
        beta = counts / jnp.maximum(largest, 1)
        return _reached(scores, threshold * beta / (2 - beta), strictly)

    return Confidence(lambda n_max: jnp.full(n_max, -1, jnp.int32), update, weigh, before=True)


class Averages(NamedTuple):
    """FreeMatch's state."""

    level: jax.Array  # float32 [], tau_t, moving average of the largest scores
    by_class: jax.Array  # float32 [C], p_t, moving average of the scores
    histogram: jax.Array  # float32 [C], h_t, moving average of the labels' histogram


def freematch(options, num_classes: int, threshold, strictly: bool, momentum: float | None = None) -> Confidence:
    """1[max p >= tau_t p_t(c) / max p_t] (Wang et al., ICLR 2023, arXiv 2205.07246, eq. 5 to 8), and the fairness term.

    All three averages start at 1/C. The additional loss is `fairness`, times `confidence.fairness_weight`. As in the
    reference code, thresholds of classes are clamped between `confidence.clamp_least` and `confidence.clamp_most`. In
    p_t negative scores (cosines) count as 0.
    """
    momentum = options.momentum if momentum is None else momentum

    def update(old: Averages, scores, present, positions):
        labels, best = jnp.argmax(scores, axis=-1), jnp.max(scores, axis=-1)
        found = Averages(
            mean_present(best, present),
            mean_present(jnp.maximum(scores, 0.0), present),
            mean_present(jax.nn.one_hot(labels, num_classes), present),
        )
        return moved(old, found, momentum, jnp.any(present))

    def weigh(state: Averages, scores, size):
        largest = jnp.max(state.by_class)
        needed = jnp.where(
            largest > 0, state.level * state.by_class / jnp.where(largest > 0, largest, 1.0), state.level
        )
        return _reached(scores, jnp.clip(needed, options.clamp_least, options.clamp_most), strictly)

    def regulariser(state, logits, weights):
        return options.fairness_weight * fairness(state, logits, weights)

    equal = 1.0 / num_classes
    start = Averages(jnp.float32(equal), jnp.full(num_classes, equal), jnp.full(num_classes, equal))
    further = regulariser if is_on(options.fairness_weight) else None
    return Confidence(lambda n_max: start, update, weigh, further, averages=is_on(momentum))


def sat(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """FreeMatch's thresholds from the current images, without moving averages and fairness term, as in (FL)^2."""
    return freematch(options, num_classes, threshold, strictly, momentum=0.0)._replace(regulariser=None)


def fairness(state: Averages, logits: jax.Array, weights: jax.Array) -> jax.Array:
    """FreeMatch's self-adaptive fairness, sum_c a_c log b_c, which is minimised (eq. 9 to 11): float32 [].

    a is p_t / h_t of the state after the batch, without gradient. b is the mean softmax of the accepted strong views'
    logits, float32 [B, C], divided by the histogram of their predicted classes; weights, float32 [B], are above 0 for
    accepted images. Both are normalised to sum 1; a class with a histogram of 0 gets 0. The term keeps predictions from
    collapsing to a few classes. It is 0 if no image is accepted.
    """
    accepted, p = weights > 0, jax.nn.softmax(logits)
    histogram = mean_present(jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]), accepted)

    def over(values, histogram):
        ratio = jnp.where(histogram > 0, values / jnp.where(histogram > 0, histogram, 1.0), 0.0)
        return ratio / jnp.maximum(jnp.sum(ratio), jnp.finfo(jnp.float32).tiny)

    a = jax.lax.stop_gradient(over(state.by_class, state.histogram))
    b = over(mean_present(p, accepted), histogram)
    return jnp.where(jnp.any(accepted), jnp.sum(a * jnp.log(b + 1e-12)), 0.0)


class Gaussian(NamedTuple):
    """SoftMatch's state."""

    # mean and variance: float32 [], moving averages of the mean and variance of the largest probabilities.
    mean: jax.Array
    variance: jax.Array
    by_class: jax.Array  # float32 [C], moving average of the probabilities, for the alignment
    seen: jax.Array  # bool [], whether any batch has been seen


def softmatch(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """The weight exp(-min(max p' - mu, 0)^2 / (2 sigma^2 / n^2)) instead of a threshold (Chen et al., ICLR 2023).

    Source: arXiv 2301.10921, eq. 6 to 9. mu and sigma^2 are moving averages, over batches, of the mean and the unbiased
    variance of max p'; they start at 1/C and 1. n is `N_SIGMA`. p' is p (1/C) / E[p], normalised to sum 1, where E[p]
    is a moving average that starts with the first batch. Labels come from p.
    """

    def aligned_best(by_class, p):
        p = p / num_classes / jnp.maximum(by_class, 1e-6)
        return jnp.max(p / jnp.sum(p, axis=-1, keepdims=True), axis=-1)

    def update(old: Gaussian, p, present, positions):
        count = jnp.sum(present)
        by_class = moved(old.by_class, mean_present(p, present), jnp.where(old.seen, options.momentum, 0.0), count > 0)
        best = aligned_best(by_class, p)
        mean = mean_present(best, present)
        variance = mean_present(jnp.square(best - mean), present) * count / jnp.maximum(count - 1, 1)
        return Gaussian(
            moved(old.mean, mean, options.momentum, count > 0),
            moved(old.variance, variance, options.momentum, count > 1),  # the variance of one image is undefined
            by_class,
            old.seen | (count > 0),
        )

    def weigh(state: Gaussian, p, size):
        below = jnp.minimum(aligned_best(state.by_class, p) - state.mean, 0.0)
        bounded = jnp.maximum(state.variance, 1e-8)  # equal scores have no variance
        return jnp.exp(-jnp.square(below) * N_SIGMA**2 / (2 * bounded))

    equal = 1.0 / num_classes
    start = Gaussian(jnp.float32(equal), jnp.float32(1.0), jnp.full(num_classes, equal), jnp.bool_(False))
    return Confidence(lambda n_max: start, update, weigh, averages=is_on(options.momentum), soft=True)


KINDS: dict[str, Callable[[Any, int, float | jax.Array, bool], Confidence]] = {
    "fixed": fixed,
    "share": share,
    "sat": sat,
    "flexmatch": flexmatch,
    "freematch": freematch,
    "softmatch": softmatch,
}


def import_rule(options: Any, num_classes: int) -> Callable[..., Confidence] | None:
    """The user's function that `confidence.kind` of the section `options` names by its import path; None: no such path.

    Raises a UserError if it cannot be imported, or if it or a function of its rule fails or returns something else.
    """
    kind = options.kind
    if not is_own(kind):
        return None
    make, file = import_own(FIELD, kind)
    with one_line(FIELD, kind, "cannot be built", file):
        rule = make(options, num_classes, 0.5, False)
    if not isinstance(rule, Confidence):
        raise UserError(f"{FIELD}={kind} returns a {type(rule).__name__}; it must return a Confidence")
    # Tried on random scores before a program is traced; a rule that gives weights in between need not say so.
    scores = jax.nn.softmax(4 * jax.random.normal(jax.random.key(0), (256, num_classes)))
    positions = jnp.arange(len(scores))
    with one_line(FIELD, kind, "fails", file):
        first = rule.init(len(scores))
        begun = first if rule.begin is None else rule.begin(first, jnp.int32(0))
        state = rule.update(begun, scores, positions >= 0, positions)
        weights = rule.weigh(state, scores, jnp.int32(len(scores)))
    form = lambda leaf: f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}"  # noqa: E731
    for name, found, wanted in (("begin", begun, first), ("update", state, first), ("weigh", weights, scores[:, 0])):
        forms = [jax.tree.map(form, each) for each in (found, wanted)]
        if forms[0] != forms[1]:
            raise UserError(f"{FIELD}={kind}: its {name} returns {forms[0]}; it must return {forms[1]}")
    is_soft = rule.soft or bool(jnp.any((weights > 0) & (weights < 1)))
    return lambda *arguments: make(*arguments)._replace(soft=is_soft)
