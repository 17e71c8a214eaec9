"""The engine: a cohort of clients trained as lanes of one compiled program. It knows no method.

A client is a pure function (broadcast, its data, its own state, key) -> (upload, its own state, metrics), given
as a tuple of phases. A phase `prepare`s every job of the cohort in one large batch with shared weights (that is
where pseudo-labels are made), and then each job runs `start`, `step`, ..., `step`, `finish` in a lane.

Pseudo-label sets make jobs differ in length several times over, and anew in every round. Stacking all M jobs and
stepping until the longest is done would mostly compute padding. So L lanes take the jobs from one queue, longest
first: whenever a job ends, its result is written to its place among the stacked results and its lane takes the
next one. L = 1 is a plain sequence, L = M the plain `vmap`; the loop is the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData

Broadcast = Any
Work = Any
Carry = Any


class Cohort(NamedTuple):
    """The clients of one round.

    Attributes:
        clients: int32 [M], one client id a job (a client may appear in several jobs).
        states: the clients' own states, every leaf [M, ...]; () for a method whose clients keep nothing.
        key: the round's key. A client's randomness is folded from it by client id, never by lane or device.
    """

    clients: jax.Array
    states: Any
    key: jax.Array

    def keys(self) -> jax.Array:
        """A key for each job, [M]."""
        return jax.vmap(lambda client: jax.random.fold_in(self.key, client))(self.clients)


class Jobs(NamedTuple):
    """What a phase's `prepare` lays out for its cohort.

    Attributes:
        num_steps: int32 [M], local steps of each job; 0 means that the client does not take part.
        work: whatever a job's steps read, every leaf [M, ...].
        report: what the client tells about its data (pseudo-labels and masks), for scoring; never uploaded.
    """

    num_steps: jax.Array
    work: Work
    report: Any


class Finished(NamedTuple):
    """What a job leaves behind.

    Attributes:
        upload: exactly what a network would carry up.
        state: the client's own state after the round.
        metrics: scalars by name, averages over the job's steps.
    """

    upload: Any
    state: Any
    metrics: dict[str, jax.Array]


class Phase(NamedTuple):
    """One stretch of a client's local work.

    Attributes:
        prepare: (broadcast, data, cohort, previous) -> Jobs, for the whole cohort at once; `previous` is the
            stacked Finished of the phase before, None in the first.
        start: (broadcast, work, state) -> carry: the job's model and optimiser, before its first step.
        step: (broadcast, data, work, carry, index, key) -> carry: local step number `index` with a key of its own.
        finish: (broadcast, work, carry, num_steps) -> Finished.
    """

    prepare: Callable[..., Jobs]
    start: Callable[..., Carry]
    step: Callable[..., Carry]
    finish: Callable[..., Finished]


class CohortResult(NamedTuple):
    """What a cohort sends back, stacked over its M jobs.

    Attributes:
        finished: Finished with leaves [M, ...]; rows of jobs without a step are zeros.
        took_part: bool [M], whether the job had any step in its last phase.
        num_steps: int32 [M], of the last phase.
        reports: one report a phase.
    """

    finished: Finished
    took_part: jax.Array
    num_steps: jax.Array
    reports: tuple[Any, ...]


def train_cohort(
    phases: tuple[Phase, ...],
    broadcast: Broadcast,
    data: FederatedData,
    cohort: Cohort,
    lanes: int,
    debug: bool = False,
) -> CohortResult:
    """Runs every phase of every client of the cohort.

    Args:
        phases: what a client does, in order.
        broadcast: what the server sent down.
        data: the federation's data.
        cohort: the clients of this round.
        lanes: L, how many jobs train side by side; changes no result beyond rounding.
        debug: a plain Python loop instead of lanes (not under jit): the reference in tests, and the way to find
            the client at fault, whose id is attached to whatever it raises.

    Returns:
        The stacked results.
    """
    run = _run_in_a_python_loop if debug else _run_in_lanes
    finished, jobs, reports = None, None, []
    for number, phase in enumerate(phases):
        phase_cohort = cohort._replace(key=jax.random.fold_in(cohort.key, number))
        jobs = phase.prepare(broadcast, data, phase_cohort, finished)
        finished = run(phase, broadcast, data, phase_cohort, jobs, lanes)
        reports.append(jobs.report)
    return CohortResult(finished, jobs.num_steps > 0, jobs.num_steps, tuple(reports))


class _Lanes(NamedTuple):
    """The state of L lanes: which job each one holds, and how far it is."""

    job: jax.Array  # int32 [L]
    busy: jax.Array  # bool [L]
    index: jax.Array  # int32 [L], the job's next step
    work: Work  # [L, ...]
    carry: Carry  # [L, ...]


def _run_in_lanes(phase, broadcast, data, cohort, jobs, num_lanes) -> Finished:
    num_jobs = len(cohort.clients)
    num_lanes = min(num_lanes, num_jobs)
    queue = jnp.argsort(-jobs.num_steps, stable=True)  # longest first
    queue_length = jnp.sum(jobs.num_steps > 0)
    keys = cohort.keys()
    over_lanes = jax.vmap if num_lanes > 1 else _over_one_lane

    def start(job):
        work, state = _row(jobs.work, job), _row(cohort.states, job)
        return work, phase.start(broadcast, work, state)

    def step(job, index, work, carry):
        key = jax.random.fold_in(keys[job], index)
        return phase.step(broadcast, data, work, carry, index, key)

    def finish(job, work, carry):
        return phase.finish(broadcast, work, carry, jobs.num_steps[job])

    def job_is_over(lanes):
        return lanes.busy & (lanes.index >= jobs.num_steps[lanes.job])

    def take_jobs(lanes, next_place):
        """Idle lanes take the next jobs of the queue, in the order of the lanes."""
        place = next_place + jnp.cumsum(~lanes.busy) - 1
        takes = ~lanes.busy & (place < queue_length)
        job = jnp.where(takes, queue[jnp.minimum(place, num_jobs - 1)], lanes.job)
        fresh = _Lanes(job, lanes.busy | takes, jnp.zeros_like(lanes.index), *over_lanes(start)(job))
        return _where_rows(takes, fresh, lanes), next_place + jnp.sum(takes)

    def step_until_one_is_over(lanes):
        # An idle lane steps along on its last job: its result is written nowhere, and a branch would cost more.
        def body(lanes):
            carry = over_lanes(step)(lanes.job, lanes.index, lanes.work, lanes.carry)
            return lanes._replace(carry=carry, index=lanes.index + 1)

        return jax.lax.while_loop(lambda lanes: ~jnp.any(job_is_over(lanes)), body, lanes)

    def write_results(lanes, results):
        over = job_is_over(lanes)
        place = jnp.where(over, lanes.job, num_jobs)  # out of bounds: dropped
        finished = over_lanes(finish)(lanes.job, lanes.work, lanes.carry)
        write = lambda all_jobs, rows: all_jobs.at[place].set(rows, mode="drop")  # noqa: E731
        return lanes._replace(busy=lanes.busy & ~over), jax.tree.map(write, results, finished)

    def body(loop):
        lanes, next_place, results = loop
        lanes, next_place = take_jobs(lanes, next_place)
        lanes = step_until_one_is_over(lanes)
        lanes, results = write_results(lanes, results)
        return lanes, next_place, results

    def unfinished(loop):
        lanes, next_place, _ = loop
        return (next_place < queue_length) | jnp.any(lanes.busy)

    none = jnp.zeros(num_lanes, jnp.int32)
    lanes = _Lanes(none, none > 0, none, *_zeros(over_lanes(start), none))
    one_result = jax.eval_shape(lambda: finish(0, *start(0)))
    results = jax.tree.map(lambda leaf: jnp.zeros((num_jobs, *leaf.shape), leaf.dtype), one_result)
    _, _, results = jax.lax.while_loop(unfinished, body, (lanes, jnp.int32(0), results))
    return results


def _run_in_a_python_loop(phase, broadcast, data, cohort, jobs, num_lanes) -> Finished:
    del num_lanes
    keys = cohort.keys()
    step = jax.jit(lambda work, carry, index, key: phase.step(broadcast, data, work, carry, index, key))
    finished = []
    for job, client in enumerate(cohort.clients):
        work = _row(jobs.work, job)
        try:
            carry = phase.start(broadcast, work, _row(cohort.states, job))
            for index in range(int(jobs.num_steps[job])):
                carry = step(work, carry, jnp.int32(index), jax.random.fold_in(keys[job], index))
            result = phase.finish(broadcast, work, carry, jobs.num_steps[job])
        except Exception as error:
            error.add_note(f"while training client {int(client)}")
            raise
        # As in lanes: who takes no step leaves zeros, so that nothing reads a result that was never made.
        trained = jobs.num_steps[job] > 0
        finished.append(jax.tree.map(lambda leaf, t=trained: jnp.where(t, leaf, 0).astype(leaf.dtype), result))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *finished)


def _over_one_lane(function: Callable) -> Callable:
    """`vmap` over an axis of one, without the batching: convolutions stay plain ones."""

    def mapped(*arguments):
        result = function(*(_row(argument, 0) for argument in arguments))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return mapped


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _zeros(function: Callable, *arguments: Any) -> Any:
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _where_rows(chosen: jax.Array, new: Any, old: Any) -> Any:
    """Leaf by leaf and row by row: `new` where chosen [L], `old` elsewhere."""

    def pick(new_leaf, old_leaf):
        return jnp.where(chosen.reshape(chosen.shape + (1,) * (new_leaf.ndim - 1)), new_leaf, old_leaf)

    return jax.tree.map(pick, new, old)
