"""What a client is, and the engine's one entrance: `train_cohort`. It knows no method.

A client is a pure function (broadcast, its data, its own state, key) -> (upload, its own state, metrics), given
as a tuple of phases. A phase `prepare`s every job of the cohort in one large batch with shared weights (that is
where pseudo-labels are made), and then each job runs `start`, `step`, ..., `step`, `finish` in a lane; how, is the
subject of `lanes.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Cohort, Finished, Jobs, Phase
from fedjax_ssl.engine.lanes import JobTable, Source, deal, num_devices, run_in_a_python_loop, run_in_lanes


class CohortResult(NamedTuple):
    """What a cohort sends back, stacked over R rows, one a job.

    On one device the rows are the cohort's jobs in their order. On several, jobs are dealt out so that every device
    has about as much to do, and each row stays on its device; R is M rounded up to a multiple of the devices.

    Attributes:
        finished: Finished with leaves [R, ...]; rows without a step are zeros.
        clients: int32 [R], the client of each row.
        there: bool [R], False for a row that only fills a device up.
        took_part: bool [R], whether the job had any step in its last phase.
        num_steps: int32 [R], of the last phase.
        reports: one report a phase, leaves [R, ...].
        kept: of all phases' `Jobs`, leaves [R, ...].
        lane_steps: int32 [], steps of all lanes over all phases, those of idle lanes included.
    """

    finished: Finished
    clients: jax.Array
    there: jax.Array
    took_part: jax.Array
    num_steps: jax.Array
    reports: tuple[Any, ...]
    kept: dict[str, Any]
    lane_steps: jax.Array


def train_cohort(
    phases: tuple[Phase, ...],
    broadcast: Any,
    data: FederatedData,
    cohort: Cohort,
    lanes: int,
    debug: bool = False,
) -> CohortResult:
    """Runs every phase of every client of the cohort.

    Under `jax.set_mesh` of several devices each device has lanes of its own, and its share of the jobs. Under
    `jax.vmap` over seeds the jobs of all seeds go through the same lanes: one longer queue (a loop that is mapped over
    seeds would select over everything that it carries, in every step).

    Args:
        phases: what a client does, in order.
        broadcast: what the server sent down.
        data: the federation's data.
        cohort: the clients of this round.
        lanes: L, how many jobs train side by side on each device; changes no result beyond rounding.
        debug: a plain Python loop instead of lanes (not under jit): the reference in tests, and the way to find
            the client at fault, whose id is attached to whatever it raises.

    Returns:
        The stacked results.
    """

    def train_one(broadcast, data, cohort):
        result = _train(phases, Source(broadcast, data, None), jax.tree.map(_with_axis, cohort), lanes, debug)
        return jax.tree.map(lambda leaf: leaf[0], result)

    if debug:
        return train_one(broadcast, data, cohort)
    train = jax.custom_batching.custom_vmap(train_one)

    @train.def_vmap
    def train_seeds(num_seeds, mapped, broadcast, data, cohort):
        everyone = jax.tree.map(
            lambda leaf, is_mapped: leaf if is_mapped else jnp.broadcast_to(leaf, (num_seeds, *leaf.shape)),
            cohort,
            mapped[2],
        )
        result = _train(phases, Source(broadcast, data, (mapped[0], mapped[1])), everyone, lanes, debug)
        return result, jax.tree.map(lambda _: True, result)

    return train(broadcast, data, cohort)


def _train(phases, source, cohort, lanes, debug) -> CohortResult:
    """`train_cohort` for G seeds at once: cohort and result have leaves [G, ...]."""
    num_seeds, num_jobs = cohort.clients.shape
    there, finished, reports, kept, lane_steps = jnp.ones(cohort.clients.shape, bool), None, [], {}, jnp.int32(0)
    for number, phase in enumerate(phases):
        phase_cohort = cohort._replace(key=jax.vmap(lambda key, n=number: jax.random.fold_in(key, n))(cohort.key))
        with jax.named_scope("label"):
            jobs = _prepare(phase, source, phase_cohort, finished)
        if number == 0 and num_devices() > 1:  # Later phases find each job's model where the first one left it.
            dealt = deal(jobs.num_steps, num_devices())
            there, rows = dealt < num_jobs, jnp.minimum(dealt, num_jobs - 1)
            jobs, clients, states = jax.tree.map(
                lambda leaf, rows=rows: jax.vmap(lambda one, r: one[r])(leaf, rows),
                (jobs, cohort.clients, cohort.states),
            )
            cohort = cohort._replace(clients=clients, states=states)
        num_steps = jnp.where(there, jobs.num_steps, 0)
        keys = jax.vmap(Cohort.keys)(phase_cohort._replace(clients=cohort.clients, states=()))
        table = JobTable(keys, num_steps, jobs.work, cohort.states)
        with jax.named_scope("train"):
            finished, steps = (
                run_in_a_python_loop(phase, source, table, cohort.clients)
                if debug
                else run_in_lanes(phase, source, table, lanes)
            )
        reports.append(jobs.report)
        kept |= jobs.kept
        lane_steps += steps
    return CohortResult(
        finished,
        cohort.clients,
        there,
        num_steps > 0,
        num_steps,
        tuple(reports),
        kept,
        jnp.broadcast_to(lane_steps, (num_seeds,)),
    )


def _prepare(phase, source, cohort, previous) -> Jobs:
    """Each seed's cohort in one large batch, seed after seed: large batches gain nothing from sharing a call."""
    num_seeds = len(cohort.clients)

    def prepare(argument):
        seed, *rest = argument
        return phase.prepare(*source.of(seed), *rest)

    if num_seeds == 1:
        only = jax.tree.map(lambda leaf: leaf[0], (cohort, previous))
        return jax.tree.map(_with_axis, prepare((0, *only)))
    return jax.lax.map(prepare, (jnp.arange(num_seeds), cohort, previous))


def _with_axis(leaf):
    return leaf[None]
