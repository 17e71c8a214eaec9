"""Phases of local training made of others: in turn, at a rate of their own, with a sparse upload (FedMatch)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Metrics, Phase, Previous, Upload
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import select
from fedjax_ssl.methods.fedmatch import sparse
from fedjax_ssl.methods.fedmatch.plateau import after_epoch

PLATEAU = "plateau"  # the entry of a client's learning rate in its memory


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
