"""Confidence: which pseudo-labels count, and how much. Each rule is one function; the library's are in `KINDS`.

A rule has a state for each client that follows the scores of its images. Methods use it in two ways: once a round over
all of a client's images, or in each step over a batch. Nothing of it travels. `config.confidence` names the rule.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.imports import import_own, is_own, one_line
from fedjax_ssl.learning.trees import repeated

FIELD = "confidence.kind"
MEMORY = "trainer"  # the entry of the state in a client's memory, as checkpoints of earlier versions name it


class Confidence(NamedTuple):
    """A rule. Scores are the larger the surer: probabilities, or FedAnchor's cosines."""

    # N_max, the examples of the largest client -> the state of a client that has seen nothing.
    init: Callable[[int], Any]
    # (state, scores [B, C], present bool [B], positions int32 [B] among the client's examples) -> the state after these
    # images.
    update: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]
    # (state, scores [..., C], size int32 [], the images of the client that may get a label) -> float32 [...], how much
    # the label of the largest score counts, from 0 to 1.
    weigh: Callable[[Any, jax.Array, jax.Array], jax.Array]
    # (state, logits [B, C] of the strong views, weights [B]) -> float32 [], a term of the loss; None: there is none.
    regulariser: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None
    before: bool = False  # whether a step weighs its batch by the state before the batch, and not after it
    averages: bool = False  # whether the state is a moving average, which needs many updates
    soft: bool = False  # whether weights lie between 0 and 1, too

    def label(self, state: Any, scores: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The class of the largest score, int32 [...], and its weight, float32 [...]."""
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), self.weigh(state, scores, size)

    def step(self, state: Any, scores: jax.Array, present: jax.Array, positions: jax.Array, size: jax.Array):
        """The weights of a batch, float32 [B], 0 for padding, and the state after it."""
        after = self.update(state, scores, present, positions)
        weights = self.weigh(state if self.before else after, scores, size)
        return jnp.where(present, weights, 0.0), after


def make_confidence(
    problem: Problem, threshold: float | jax.Array, strictly: bool = False, hard: bool = False
) -> Confidence:
    """The rule that `confidence.kind` names.

    Args:
        problem: the run.
        threshold: the method's tau, in the scores' unit.
        strictly: whether a score at a threshold falls short (FedAnchor, eq. 5) or counts (SemiFL, FixMatch).
        hard: whether the method counts an image or not, and has no weights.

    Raises:
        UserError: the method cannot use the rule, or a user's rule cannot be built.
    """
    options = problem.config.confidence
    rule = (problem.own_rule or KINDS[options.kind])(options, problem.num_classes, threshold, strictly)
    if hard and rule.soft:
        raise UserError(f"confidence.kind={options.kind!r} gives weights, but {problem.config.method} has none")
    return rule


def own_confidence(problem: Problem, data: FederatedData) -> dict[str, Any]:
    """The rule's entry of `State.clients`, every leaf [K, ...]; {} where a state lasts for one round."""
    if problem.config.confidence.memory == "round":
        return {}
    return {MEMORY: repeated(make_confidence(problem, 0.0).init(data.width), len(data.ids))}


def once_a_round(
    problem: Problem, rule: Confidence, scores: jax.Array, present: jax.Array, own: dict[str, Any]
) -> tuple[Any, jax.Array, dict[str, Any]]:
    """A rule over all images of each client of a cohort.

    Args:
        problem: the run.
        rule: from `make_confidence`.
        scores: float32 [M, n_max, C].
        present: bool [M, n_max], the images that may get a label.
        own: the clients' memory, leaves [M, ...].

    Returns:
        The states, leaves [M, ...]; the weights, float32 [M, n_max], 0 for images that are not present; and the entry
        of the clients' memory for the next round.

    Raises:
        UserError: the rule averages over many updates, and its state begins anew in each round.
    """
    options, (number, n_max) = problem.config.confidence, present.shape
    lasts = options.memory == "run"
    if rule.averages and options.momentum and not lasts:
        raise UserError(
            f"confidence.kind={options.kind!r} averages over updates, and {problem.config.method} has one in a round: "
            "set confidence.memory='run', with a confidence.momentum of about 0.9"
        )
    before = own[MEMORY] if lasts else repeated(rule.init(n_max), number)
    positions = jnp.broadcast_to(jnp.arange(n_max, dtype=jnp.int32), present.shape)
    states = jax.vmap(rule.update)(before, scores, present, positions)
    weights = jax.vmap(rule.weigh)(states, scores, jnp.sum(present, axis=1))
    return states, jnp.where(present, weights, 0.0), {MEMORY: states} if lasts else {}


def qualify(scores: jax.Array, thresholds: jax.Array | float, strictly: bool) -> tuple[jax.Array, jax.Array]:
    """Hard pseudo-labels, the class of the largest score, and whether each one reaches the threshold of its class.

    Args:
        scores: float32 [..., C].
        thresholds: float32 [..., C] or a number, in the scores' unit.
        strictly: whether a score at the threshold falls short.

    Returns:
        labels int32 [...], qualified bool [...].
    """
    labels = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    thresholds = jnp.broadcast_to(jnp.asarray(thresholds, jnp.float32), scores.shape)
    needed = jnp.take_along_axis(thresholds, labels[..., None], axis=-1)[..., 0]
    best = jnp.max(scores, axis=-1)
    return labels, best > needed if strictly else best >= needed


def _reached(scores: jax.Array, thresholds: jax.Array | float, strictly: bool) -> jax.Array:
    """1 where the largest score reaches the threshold of its class, else 0: float32 [...]."""
    return qualify(scores, thresholds, strictly)[1].astype(jnp.float32)


def mean_present(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the examples of a batch that are present: [B, ...] to [...]; 0 without one."""
    mask = mask.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.sum(jnp.where(mask, values, 0.0), axis=0) / jnp.maximum(jnp.sum(mask), 1)


def quantile_present(values: jax.Array, mask: jax.Array, quantile: float) -> jax.Array:
    """The quantile of a batch's examples that are present, between two of them linearly: [B] to []; 0 without one."""
    return jnp.nan_to_num(jnp.nanquantile(jnp.where(mask, values, jnp.nan), quantile))


def moved(old: Any, found: Any, momentum: float | jax.Array, counts: jax.Array) -> Any:
    """m old + (1 - m) found, leaf by leaf; the old where the batch is empty (`counts`, bool [])."""
    return jax.tree.map(lambda a, b: jnp.where(counts, momentum * a + (1 - momentum) * b, a), old, found)


# --- The rules: (config.confidence, C, the method's threshold, strictly) -> Confidence. -------------------------------


def fixed(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1[max p >= tau] (FixMatch, Sohn et al., NeurIPS 2020, arXiv 2001.07685)."""
    return Confidence(
        lambda n_max: (),
        lambda state, scores, present, positions: state,
        lambda state, scores, size: _reached(scores, threshold, strictly),
    )


def client_mean(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1[max p >= mean of max p over the images]."""

    def update(state, scores, present, positions):
        return mean_present(jnp.max(scores, axis=-1), present)

    return Confidence(lambda n_max: jnp.zeros(()), update, lambda tau, scores, size: _reached(scores, tau, strictly))


def share(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """The `confidence.share` of the images with the largest scores, to the nearest whole number.

    The threshold lies halfway between the last score that counts and the next one.
    """

    def update(state, scores, present, positions):
        ranked = jnp.sort(jnp.where(present, jnp.max(scores, axis=-1), -jnp.inf), descending=True)
        ranked = jnp.concatenate([jnp.array([jnp.inf]), ranked, jnp.array([-jnp.inf])])
        k = jnp.round(options.share * jnp.sum(present)).astype(jnp.int32)
        return (ranked[k] + ranked[k + 1]) / 2

    return Confidence(lambda n_max: jnp.zeros(()), update, lambda tau, scores, size: _reached(scores, tau, strictly))


def flexmatch(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """1[max p >= tau beta_c / (2 - beta_c)], c the largest class (Zhang et al., NeurIPS 2021, arXiv 2110.08263).

        beta_c = n_c / max(max_c n_c, n_none)

    n_c counts the client's images whose stored label is c, n_none those without one. An image stores its label, over an
    older one, whenever max p reaches tau. A step weighs its batch by the counts before it. Without
    `confidence.warm_up` n_none is left out. With no stored label every threshold is 0.

    The state: int32 [n_max], the stored labels, -1 for none.
    """

    def update(stored, scores, present, positions):
        labels, sure = qualify(scores, threshold, strictly)
        places = jnp.where(present & sure, positions, len(stored))  # out of bounds: dropped
        return stored.at[places].set(labels.astype(stored.dtype), mode="drop")

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

    level: jax.Array  # float32 [], tau_t, of the largest scores
    by_class: jax.Array  # float32 [C], p_t, of the scores
    histogram: jax.Array  # float32 [C], h_t, of the labels


def freematch(options, num_classes: int, threshold, strictly: bool, momentum: float | None = None) -> Confidence:
    """1[max p >= tau_t p_t(c) / max p_t] (Wang et al., ICLR 2023, arXiv 2205.07246, eq. 5 to 8), and its fairness term.

    All three averages start at 1/C. The term is `fairness`, times `confidence.fairness_weight`. Further choices of the
    reference code: tau_t averages a quantile of the largest probabilities in place of their mean
    (`confidence.quantile`), it stays at or below `confidence.level_cap`, and thresholds of classes stay between
    `confidence.clamp_least` and `confidence.clamp_most`. Where scores are cosines, negative ones count as 0.

    Raises:
        UserError: the last two exclude each other.
    """
    if options.clamp_least > options.clamp_most:
        raise UserError(
            f"confidence.clamp_least is {options.clamp_least:g}, above confidence.clamp_most, {options.clamp_most:g}"
        )
    momentum = options.momentum if momentum is None else momentum

    def update(old: Averages, scores, present, positions):
        labels, best = jnp.argmax(scores, axis=-1), jnp.max(scores, axis=-1)
        found = Averages(
            quantile_present(best, present, options.quantile) if options.quantile else mean_present(best, present),
            mean_present(jnp.maximum(scores, 0.0), present),
            mean_present(jax.nn.one_hot(labels, num_classes), present),
        )
        new = moved(old, found, momentum, jnp.any(present))
        return new._replace(level=jnp.minimum(new.level, options.level_cap))

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
    further = regulariser if options.fairness_weight else None
    return Confidence(lambda n_max: start, update, weigh, further, averages=momentum > 0)


def sat(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """FreeMatch's thresholds of these images alone, without averages and without its term (as (FL)^2 has it)."""
    return freematch(options, num_classes, threshold, strictly, momentum=0.0)._replace(regulariser=None)


def fairness(state: Averages, logits: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_c a_c log b_c, FreeMatch's self-adaptive fairness as it is minimised (eq. 9 to 11).

    a is p_t / h_t and b the mean softmax of the accepted strong views over the histogram of their largest classes, both
    made to sum to 1; a class with a histogram of 0 has 0. Its minimum drives predictions away from few classes.

    Args:
        state: after the batch; no gradient.
        logits: float32 [B, C], of the strong views.
        weights: float32 [B], above 0 for accepted images.

    Returns:
        float32 []; 0 if no image is accepted.
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

    # mean and variance: float32 [], of the largest probabilities.
    mean: jax.Array
    variance: jax.Array
    by_class: jax.Array  # float32 [C], of the probabilities, for the alignment
    seen: jax.Array  # bool [], whether a batch has come by


def softmatch(options, num_classes: int, threshold, strictly: bool) -> Confidence:
    """exp(-min(max p' - mu, 0)^2 / (2 sigma^2 / n^2)), a weight in place of a threshold (Chen et al., ICLR 2023).

    arXiv 2301.10921, eq. 6 to 9. mu and sigma^2 are averages of the mean and of the unbiased variance of max p' over
    batches, from 1/C and 1 on; n is `confidence.n_sigma`. p' is p (1/C) / E[p], made to sum to 1, where E[p] is an
    average that starts with the first batch (`confidence.uniform_alignment`; without it p' = p). Labels are those of p.
    """

    def aligned_best(by_class, p):
        if options.uniform_alignment:
            p = p / num_classes / jnp.maximum(by_class, 1e-6)
            p = p / jnp.sum(p, axis=-1, keepdims=True)
        return jnp.max(p, axis=-1)

    def update(old: Gaussian, p, present, positions):
        count = jnp.sum(present)
        by_class = moved(old.by_class, mean_present(p, present), jnp.where(old.seen, options.momentum, 0.0), count > 0)
        best = aligned_best(by_class, p)
        mean = mean_present(best, present)
        variance = mean_present(jnp.square(best - mean), present) * count / jnp.maximum(count - 1, 1)
        return Gaussian(
            moved(old.mean, mean, options.momentum, count > 0),
            moved(old.variance, variance, options.momentum, count > 1),  # one image has no variance
            by_class,
            old.seen | (count > 0),
        )

    def weigh(state: Gaussian, p, size):
        below = jnp.minimum(aligned_best(state.by_class, p) - state.mean, 0.0)
        bounded = jnp.maximum(state.variance, 1e-8)  # equal scores have none
        return jnp.exp(-jnp.square(below) * options.n_sigma**2 / (2 * bounded))

    equal = 1.0 / num_classes
    start = Gaussian(jnp.float32(equal), jnp.float32(1.0), jnp.full(num_classes, equal), jnp.bool_(False))
    return Confidence(lambda n_max: start, update, weigh, averages=options.momentum > 0, soft=True)


KINDS: dict[str, Callable[[Any, int, float | jax.Array, bool], Confidence]] = {
    "fixed": fixed,
    "share": share,
    "client_mean": client_mean,
    "sat": sat,
    "flexmatch": flexmatch,
    "freematch": freematch,
    "softmatch": softmatch,
}


def import_rule(kind: str) -> Callable[..., Confidence] | None:
    """The function of a user's rule that `confidence.kind` names by its import path; None for one of `KINDS`.

    Raises:
        UserError: it cannot be imported; and when it is called, it fails, or gives no Confidence.
    """
    if not is_own(kind):
        return None
    make, file = import_own(FIELD, kind, ("RULE", "my_rules.py:margin"))
    if not callable(make):
        raise UserError(f"{FIELD}={kind} is no function that gives a Confidence")

    def checked(*arguments: Any) -> Confidence:
        with one_line(FIELD, kind, "cannot be built", file):
            rule = make(*arguments)
        if not isinstance(rule, Confidence):
            raise UserError(f"{FIELD}={kind} gives a {type(rule).__name__}; it must give a Confidence")
        return rule

    return checked
