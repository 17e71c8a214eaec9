"""Disjoint learning (FedMatch): parameters theta = sigma + psi, two parts as large as the model, trained in turn.

A rate falls where its loss has stopped falling (Serra et al., 2018). An upload is sparse.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Metrics, Phase, Previous, Upload
from fedjax_ssl.learning.losses import proximal_term
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import add_up, select
from fedjax_ssl.methods.fedmatch import sparse

SIGMA, PSI = "sigma", "psi"  # the entries of `params`: what labelled images train, and what unlabelled ones train
DIVISOR = 3.0  # of the learning rate
LEAST = 1e-17  # the factor does not fall below it: 1e-20 of FedMatch's learning rate
PLATEAU = "plateau"  # the entry of a client's learning rate in its memory


def merged(model: Model) -> Model:
    """The model of theta = sigma + psi, from one of the two parts; leaves may have further axes in front."""
    return Model(jax.tree.map(jnp.add, model.params[SIGMA], model.params[PSI]), model.batch_stats)


def divided(params: Any, is_sum: bool) -> dict[str, Any]:
    """Two parts to begin with: psi is a fifth of sigma. Fresh weights are sigma; given ones are the sum."""
    sigma = jax.tree.map(lambda leaf: leaf / 1.2, params) if is_sum else params
    return {SIGMA: sigma, PSI: jax.tree.map(lambda leaf: 0.2 * leaf, sigma)}


def distances(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """|psi|_1 and |sigma - psi|_2^2, sums over all entries: float32 [] each."""
    l1 = add_up(jnp.sum(jnp.abs(psi)) for psi in jax.tree.leaves(params[PSI]))
    return l1, 2 * proximal_term(params[SIGMA], params[PSI])


class Plateau(NamedTuple):
    """What the rule remembers."""

    factor: jax.Array  # float32 [], of the learning rate
    lowest: jax.Array  # float32 [], the lowest loss so far; before the first one the largest finite number
    waited: jax.Array  # int32 [], epochs since the lowest loss, or since the last fall of the rate


def fresh_plateau(shape: tuple[int, ...] = ()) -> Plateau:
    """Before the first epoch; leaves of this shape."""
    return Plateau(jnp.ones(shape), jnp.full(shape, jnp.finfo(jnp.float32).max), jnp.zeros(shape, jnp.int32))


def after_epoch(plateau: Plateau, loss: jax.Array, patience: int) -> Plateau:
    """The rule after an epoch with this loss: a third of the rate after `patience` epochs without a new minimum."""
    waited = jnp.where(loss < plateau.lowest, 0, plateau.waited + 1)
    falls = waited >= patience
    factor = jnp.where(falls, jnp.maximum(plateau.factor / DIVISOR, LEAST), plateau.factor)
    return Plateau(factor, jnp.minimum(plateau.lowest, loss), jnp.where(falls, 0, waited))


def in_turn(*phases: Phase) -> Phase:
    """A phase in whose steps several phases take a step each, one after the other, on one model.

    Args:
        phases: of `local_sgd`, with one `prepare`, which the first one's is; each trains other `parts` and has a
            `memory` of its own. Their metrics, and what they remember and tell, have different names.
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
        params = disjoint(finished.upload.model.params for finished in each)
        metadata = disjoint(finished.upload.metadata for finished in each)
        own = disjoint(finished.own for finished in each)
        upload = Upload(Model(params, each[-1].upload.model.batch_stats), metadata)
        return Finished(upload, own, disjoint(finished.metrics for finished in each))

    return Phase(phases[0].prepare, start, step, finish)


def disjoint(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all of them.

    Raises:
        ValueError: two have an entry of the same name.
    """
    union: dict[str, Any] = {}
    for mapping in mappings:
        twice = sorted(union.keys() & mapping.keys())
        if twice:
            raise ValueError(f"two phases in turn have an entry {twice[0]!r}; give each a name of its own")
        union |= mapping
    return union


def with_plateau(phase: Phase, watched: Callable[[Any, Metrics], jax.Array], patience: int) -> Phase:
    """A phase at each client's own learning rate: a third of it after `patience` visits without a new lowest loss.

    Args:
        phase: reads its learning rate from the broadcast, as `local_sgd` does.
        watched: (work, metrics) -> float32 [], the loss of a visit.
        patience: in visits of the client.

    Returns:
        The Phase; the clients' memory has an entry `PLATEAU`, see `learning.plateau`.
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


def sparse_upload(phase: Phase, least_change: float, smallest: Mapping[str, float]) -> Phase:
    """A phase whose upload has the received model's entries wherever training has changed them too little to travel.

    Args:
        phase: of `local_sgd`, or made of such.
        least_change: an entry travels, as it is, if it differs from the received one by more than this.
        smallest: by part, entries of this magnitude or less are taken for 0 in that comparison.

    Returns:
        The Phase; it tells how many `entries` travel, float32 [].
    """

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        finished = phase.finish(received, work, carry, num_steps)
        new, metadata = finished.upload.model.params, finished.upload.metadata
        old = select(received.model.params, tuple(new))
        travels = sparse.differs(sparse.cut_parts(new, smallest), old, least_change)
        model = finished.upload.model._replace(params=jax.tree.map(jnp.where, travels, new, old))
        return finished._replace(upload=Upload(model, {**metadata, "entries": sparse.count(travels)}))

    return phase._replace(finish=finish)
