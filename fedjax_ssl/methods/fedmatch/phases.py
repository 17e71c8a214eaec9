"""Disjoint learning (FedMatch): parameters theta = sigma + psi, each as large as the model, trained alternately.

Learning rates are reduced on a plateau of the loss (Serra et al., 2018). Messages are sparse: only entries that differ
between two versions by more than a bound are sent.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Metrics, Phase, Previous, Upload
from fedjax_ssl.ops.losses import proximal_term
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import add_up, select

SIGMA, PSI = "sigma", "psi"  # the two parts of `params`, trained on labelled and on unlabelled images
DIVISOR = 3.0  # divides the learning rate
LEAST = 1e-17  # the smallest factor: a rate of 1e-20 for FedMatch's 1e-3
PLATEAU = "plateau"  # the entry of a client's memory for its learning rate


def merged(model: Model) -> Model:
    """The model theta = sigma + psi from both parts; leaves may have leading axes."""
    return Model(jax.tree.map(jnp.add, model.params[SIGMA], model.params[PSI]), model.batch_stats)


def divided(params: Any, is_sum: bool) -> dict[str, Any]:
    """The two initial parts: psi is a fifth of sigma. New weights are sigma; given weights are the sum."""
    sigma = jax.tree.map(lambda leaf: leaf / 1.2, params) if is_sum else params
    return {SIGMA: sigma, PSI: jax.tree.map(lambda leaf: 0.2 * leaf, sigma)}


def distances(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """|psi|_1 and |sigma - psi|_2^2 over all entries: float32 [] each."""
    l1 = add_up(jnp.sum(jnp.abs(psi)) for psi in jax.tree.leaves(params[PSI]))
    return l1, 2 * proximal_term(params[SIGMA], params[PSI])


def cut(tree: Any, smallest: float) -> Any:
    """Sets every entry of magnitude up to `smallest` to 0."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.abs(leaf) <= smallest, 0, leaf), tree)


def cut_psi(params: Mapping[str, Any], smallest: float) -> dict[str, Any]:
    """The parts, with psi cut."""
    return {**params, PSI: cut(params[PSI], smallest)}


def differs(new: Any, old: Any, least_change: float) -> Any:
    """Whether each entry is sent, leaves bool: whether it differs by more than `least_change`."""
    return jax.tree.map(lambda a, b: jnp.abs(a - b) > least_change, new, old)


def count(tree: Any) -> jax.Array:
    """The number of True entries in a tree of bool: float32 [], exact up to 16 million."""
    return add_up(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree))


class Plateau(NamedTuple):
    """The state of the rule that reduces the learning rate."""

    factor: jax.Array  # float32 [], of the learning rate
    lowest: jax.Array  # float32 [], the lowest loss so far; initially the largest finite number
    waited: jax.Array  # int32 [], epochs since the lowest loss or the last reduction


def fresh_plateau(shape: tuple[int, ...] = ()) -> Plateau:
    """The state before the first epoch; leaves of this shape."""
    return Plateau(jnp.ones(shape), jnp.full(shape, jnp.finfo(jnp.float32).max), jnp.zeros(shape, jnp.int32))


def after_epoch(plateau: Plateau, loss: jax.Array, patience: int) -> Plateau:
    """The state after an epoch with this loss: `patience` epochs without a new minimum divide the rate by 3."""
    waited = jnp.where(loss < plateau.lowest, 0, plateau.waited + 1)
    falls = waited >= patience
    factor = jnp.where(falls, jnp.maximum(plateau.factor / DIVISOR, LEAST), plateau.factor)
    return Plateau(factor, jnp.minimum(plateau.lowest, loss), jnp.where(falls, 0, waited))


def in_turn(*phases: Phase) -> Phase:
    """A phase in whose steps several phases take one step each, in order, on the same model.

    The phases are of `local_training`; each trains other `parts` and has its own `memory`, and names of metrics, memory
    and metadata differ. The first one's `prepare` is used.
    """

    def without_model(training):
        return training._replace(learner=training.learner._replace(model=()))

    def with_model(training, model: Model):
        return training._replace(learner=training.learner._replace(model=model))

    def start(received: Broadcast, data: FederatedData, work, own):
        carries = [phase.start(received, data, work, own) for phase in phases]
        return carries[0].learner.model, tuple(map(without_model, carries))

    def step(received: Broadcast, data: FederatedData, work, carry, index: jax.Array, key: jax.Array):
        model, carries = carry
        after = []
        for number, (phase, training) in enumerate(zip(phases, carries)):
            own_key = jax.random.fold_in(key, number)
            training = phase.step(received, data, work, with_model(training, model), index, own_key)
            model = training.learner.model
            after.append(without_model(training))
        return model, tuple(after)

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        model, carries = carry
        each = [
            phase.finish(received, work, with_model(training, model), num_steps)
            for phase, training in zip(phases, carries)
        ]
        joined = lambda mappings: {name: value for each in mappings for name, value in each.items()}  # noqa: E731
        params = joined(finished.upload.model.params for finished in each)
        metadata = joined(finished.upload.metadata for finished in each)
        upload = Upload(Model(params, each[-1].upload.model.batch_stats), metadata)
        return Finished(upload, joined(done.own for done in each), joined(done.metrics for done in each))

    return Phase(phases[0].prepare, start, step, finish)


def with_plateau(phase: Phase, watched: Callable[[Any, Metrics], jax.Array], patience: int) -> Phase:
    """A phase with a learning rate for each client, divided by 3 after `patience` visits without a new lowest loss.

    `watched` is a function (work, metrics) -> float32 [], the loss of a visit, which is a round in which the client
    trains. The clients' memory has an entry `PLATEAU`.
    """

    def at_own_rate(received: Broadcast, plateau):
        return received._replace(learning_rate=received.learning_rate * plateau.factor)

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None):
        jobs = phase.prepare(received, data, cohort, previous)
        return jobs._replace(work=(jobs.work, cohort.own[PLATEAU]))

    def start(received: Broadcast, data: FederatedData, work, own):
        return phase.start(at_own_rate(received, work[1]), data, work[0], own)

    def step(received: Broadcast, data: FederatedData, work, carry, index: jax.Array, key: jax.Array):
        return phase.step(at_own_rate(received, work[1]), data, work[0], carry, index, key)

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        finished = phase.finish(at_own_rate(received, work[1]), work[0], carry, num_steps)
        plateau = after_epoch(work[1], watched(work[0], finished.metrics), patience)
        return finished._replace(own={**finished.own, PLATEAU: plateau})

    return Phase(prepare, start, step, finish)


def sparse_upload(phase: Phase, least_change: float, smallest: float) -> Phase:
    """A phase whose upload keeps the received model's entries wherever training changed them by at most `least_change`.

    Other entries are sent, uncut; entries of psi up to the magnitude `smallest` count as 0 in this comparison. Uploads
    have the metadata `entries`, the number of entries sent, float32 [].
    """

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        finished = phase.finish(received, work, carry, num_steps)
        new, metadata = finished.upload.model.params, finished.upload.metadata
        old = select(received.model.params, tuple(new))
        travels = differs(cut_psi(new, smallest), old, least_change)
        model = finished.upload.model._replace(params=jax.tree.map(jnp.where, travels, new, old))
        return finished._replace(upload=Upload(model, {**metadata, "entries": count(travels)}))

    return phase._replace(finish=finish)
