"""Runs a cohort of clients through its phases: `train_cohort`. Contains no method.

A phase first calls `prepare` once for the whole cohort; labels are made in large batches with the weights that all
clients share. Then each job runs `start`, `step`, ..., `step`, `finish` in a lane, see `lanes.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import num_devices
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    Broadcast,
    Cohort,
    Jobs,
    Label,
    Labels,
    Method,
    Metrics,
    Phase,
    Previous,
    Report,
    State,
    checked_entries,
    job_keys,
)
from fedjax_ssl.engine.lanes import JobTable, PhaseOf, Source, deal, run_in_lanes
from fedjax_ssl.ops.trees import row, where_rows

MEMORY = "a client's memory"  # for messages


class CohortResult(NamedTuple):
    """The results of a cohort, stacked over R rows, one row for each job.

    On one device the rows are the cohort's M jobs in order. With several devices each row stays on the device that
    trained it, and R is M rounded up to a multiple of the number of devices.
    """

    upload: Any  # from the last phase, leaves [R, ...]; zeros for rows that did not take part
    job: jax.Array  # int32 [R], the job's row in the `Selection`, or in its turn
    clients: jax.Array  # int32 [R], the client of each row
    group: jax.Array | None  # int32 [R], or None
    present: jax.Array  # bool [R], False for padding and for jobs that were not run
    took_part: jax.Array  # bool [R], whether the job took part in the last phase, which makes the upload
    num_steps: jax.Array  # int32 [R], summed over all phases
    report: Report | None  # the pseudo-labels, leaves [R, ...]; None if the method makes none
    # For each phase: its metrics, leaves [R], and the jobs that took a step in it, bool [R].
    metrics: tuple[tuple[Metrics, jax.Array], ...]
    memory_of_labels: dict[str, Any]  # entries of the clients' memory that labelling updated, leaves [R, ...]
    memory_of_steps: dict[str, Any]  # entries of the clients' memory that the steps updated, leaves [R, ...]
    lane_steps: jax.Array  # int32 [], steps of all lanes over all phases, including idle lanes


def cohort_of(
    state: State, data: FederatedData, clients: jax.Array, group: jax.Array | None, personal: Any, key: jax.Array
) -> Cohort:
    """The cohort of the jobs of some clients, int32 [M]: reads their memory before the round's training.

    `personal` is the message to each client, leaves [M, ...], () for none; `key` is the round's for the clients.
    """
    own = jax.tree.map(lambda leaf: leaf[data.place(clients)], state.clients)
    return Cohort(clients, own, key, group, personal, jnp.broadcast_to(state.round, clients.shape))


def train_cohort(
    phases: tuple[Phase, ...],
    broadcast: Broadcast,
    data: FederatedData,
    cohort: Cohort,
    lanes: int,
    present: jax.Array | None = None,
    label: Label | None = None,
    of_data: Callable[[FederatedData], Method] | None = None,
) -> CohortResult:
    """Runs every phase of every client of the cohort; `label` makes pseudo-labels before the last one.

    Under `jax.set_mesh` with several devices each device has its own lanes and its share of the jobs. Under `jax.vmap`
    over seeds, the jobs of all seeds share the lanes in one longer queue. (A `vmap` of the loop itself would select
    over its whole carry in every step.) Raises a UserError if `phases` is not a tuple, or a phase changes the shape or
    type of a client's memory.

    Args:
        phases, broadcast, data, cohort: local training, in order; what the server sent; the federation; the clients.
        lanes: L, the number of jobs that train side by side on each device; it changes results only by rounding. 0: no
            training, and results are zeros, to trace the messages alone.
        present: bool [M], the jobs that are run; None: all.
        label: the method's; None: no pseudo-labels are made.
        of_data: see `Method.of_data`; what it returns then stands for `phases` and `label`, so that runs with other
            numbers may share the lanes.
    """
    if isinstance(phases, Phase):
        raise UserError("a method's phases must be a tuple, also of a single phase: (phase,)")
    present = jnp.ones(cohort.clients.shape, bool) if present is None else present

    def phase(number: int, data: FederatedData) -> Phase:
        return (of_data(data).phases if of_data else phases)[number]

    def label_of(data: FederatedData) -> Label | None:
        return of_data(data).label if of_data and label else label

    phases_of = [functools.partial(phase, number) for number in range(len(phases))]

    def train_one(broadcast, data: FederatedData, cohort: Cohort, present):
        source, (of_one, one_present) = Source(broadcast, data, None), jax.tree.map(_with_axis, (cohort, present))
        result = _train(phases_of, label_of, source, of_one, one_present, lanes)
        return jax.tree.map(lambda leaf: leaf[0], result)

    train = jax.custom_batching.custom_vmap(train_one)

    @train.def_vmap
    def train_seeds(num_seeds, mapped, broadcast, data: FederatedData, cohort: Cohort, present):
        everyone, all_present = jax.tree.map(
            lambda leaf, is_mapped: leaf if is_mapped else jnp.broadcast_to(leaf, (num_seeds, *leaf.shape)),
            (cohort, present),
            tuple(mapped[2:]),
        )
        source = Source(broadcast, data, tuple(mapped[:2]))
        result = _train(phases_of, label_of, source, everyone, all_present, lanes)
        return result, jax.tree.map(lambda _: True, result)

    return train(broadcast, data, cohort, present)


def _train(
    phases_of: Sequence[PhaseOf],
    label_of: Callable[[FederatedData], Label | None],
    source: Source,
    cohort: Cohort,
    present: jax.Array,
    lanes: int,
) -> CohortResult:
    """`train_cohort` for G seeds at once; cohort, `present` and result have leaves [G, ...]."""
    num_seeds, num_jobs = cohort.clients.shape
    job = jnp.broadcast_to(jnp.arange(num_jobs), cohort.clients.shape)
    round_keys, previous = cohort.key, None
    metrics: list[tuple[Metrics, jax.Array]] = []
    memory_of_labels: dict[str, Any] = {}
    memory_of_steps: dict[str, Any] = {}
    all_steps: Any = 0
    lane_steps = jnp.int32(0)
    for number, phase_of in enumerate(phases_of):
        # Each phase has one key for `prepare`, which may split it, and another one that the steps fold.
        prepare_keys, step_keys = (
            jax.vmap(lambda key, n=2 * number + part: jax.random.fold_in(key, n))(round_keys) for part in range(2)
        )
        cohort = cohort._replace(key=prepare_keys, step_key=step_keys)
        with jax.named_scope("label"):
            is_last = number == len(phases_of) - 1
            jobs, labels = _prepare(phase_of, label_of if is_last else lambda data: None, source, cohort, previous)
            cohort = cohort._replace(labels=labels)
        takes_part = jobs.num_steps > 0 if jobs.takes_part is None else jobs.takes_part
        jobs = jobs._replace(num_steps=jnp.where(takes_part, jobs.num_steps, 0), takes_part=takes_part)
        if number == 0 and num_devices() > 1:  # In later phases each job stays on the device that has its model.
            job, jobs, cohort, present = _dealt(jobs, cohort, present)
        num_steps = jnp.where(present, jobs.num_steps, 0)
        takes_part = jobs.takes_part & present
        prepared = {**({} if cohort.labels is None else cohort.labels.own), **jobs.own}
        own = {**cohort.own, **checked_entries(prepared, cohort.own, MEMORY, axes=2)}
        keys = jax.vmap(job_keys)(step_keys, cohort.clients, cohort.group)
        table = JobTable(keys, num_steps, takes_part, jobs.work, own)
        with jax.named_scope("train"):
            finished, steps = run_in_lanes(phase_of, source, table, lanes)
        # The next phase starts with the memory after this phase.
        learned = checked_entries(finished.own, own, MEMORY, axes=2)
        learned = {name: where_rows(takes_part, new, own[name]) for name, new in learned.items()}
        cohort = cohort._replace(own={**own, **learned})
        previous = Previous(finished.upload, takes_part)
        metrics.append((finished.metrics, num_steps > 0))
        memory_of_labels |= prepared
        memory_of_steps |= learned
        all_steps += num_steps
        lane_steps += steps
    return CohortResult(
        upload=previous.upload,
        job=job,
        clients=cohort.clients,
        group=cohort.group,
        present=present,
        took_part=previous.took_part,
        num_steps=all_steps,
        report=None if cohort.labels is None else cohort.labels.report,
        metrics=tuple(metrics),
        memory_of_labels=memory_of_labels,
        memory_of_steps={name: cohort.own[name] for name in memory_of_steps},
        lane_steps=jnp.broadcast_to(lane_steps, (num_seeds,)),
    )


def _prepare(
    phase_of: PhaseOf,
    label_of: Callable[[FederatedData], Label | None],
    source: Source,
    cohort: Cohort,
    previous: Previous | None,
) -> tuple[Jobs, Labels | None]:
    """Calls label and `prepare` for each seed's cohort, seed by seed; one call for all would not be faster."""
    num_seeds = len(cohort.clients)

    def prepare(argument):
        seed, cohort, previous = argument
        received, data = source.of(seed)
        label = label_of(data)
        if label is not None:
            cohort = cohort._replace(labels=label(received, data, cohort, previous))
        return phase_of(data).prepare(received, data, cohort, previous), cohort.labels

    if num_seeds == 1:
        only = jax.tree.map(lambda leaf: leaf[0], (cohort, previous))
        return jax.tree.map(_with_axis, prepare((0, *only)))
    return jax.lax.map(prepare, (jnp.arange(num_seeds), cohort, previous))


def _dealt(jobs: Jobs, cohort: Cohort, present: jax.Array) -> tuple[jax.Array, Jobs, Cohort, jax.Array]:
    """Distributes jobs to devices, see `deal`: each row's job, and jobs, cohort and `present` in these rows."""
    num_jobs = cohort.clients.shape[1]
    dealt = deal(jnp.where(present, jobs.num_steps, 0), num_devices())
    job = jnp.minimum(dealt, num_jobs - 1)
    jobs, moved, present = jax.vmap(row)((jobs, cohort._replace(key=None, step_key=None), present), job)
    cohort = moved._replace(key=cohort.key, step_key=cohort.step_key)  # keys are one for each seed
    return job, jobs, cohort, present & (dealt < num_jobs)


def _with_axis(leaf):
    return leaf[None]
