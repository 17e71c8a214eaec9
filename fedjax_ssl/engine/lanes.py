"""Lanes: run the jobs of a phase side by side, on one or several devices. Independent of methods and federations.

A job is one client's training. Clients with more pseudo-labels train for more steps, so jobs differ in length by
large factors. A `vmap` over all jobs would run until the longest job is done, and mostly compute padding. Instead L
lanes, a `vmap` of size L, take the jobs from a queue, longest first. When a job ends, its result is written into
the stacked results and its lane takes the next job.

With several devices each device has its own lanes and queue, to which jobs are distributed beforehand by their
work. With a shared queue the devices would wait for each other in every step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_ssl.base.devices import AXIS, num_devices
from fedjax_ssl.ops.trees import row, where_rows

ON_ALL_DEVICES = PartitionSpec()
BY_DEVICE = PartitionSpec(None, AXIS)


class Source(NamedTuple):
    """What all jobs of a seed read. G seeds of a run may train together; each has its own broadcast and data."""

    broadcast: Any  # what the server sent; leaves that differ between seeds are [G, ...]
    data: Any  # the federation's data; leaves that differ between seeds are [G, ...]
    stacked: Any  # for each leaf of broadcast and data, whether it differs between seeds; None: a single seed

    def of(self, seed: jax.Array | int) -> tuple[Any, Any]:
        """(broadcast, data) of one seed, by its index."""
        both = (self.broadcast, self.data)
        if self.stacked is None:
            return both
        return jax.tree.map(lambda leaf, stacked: leaf[seed] if stacked else leaf, both, self.stacked)


# data -> the phase whose start, step and finish are run, see `fedjax_ssl.engine.interface.Phase`. Each seed's data may
# bring other numbers.
PhaseOf = Callable[[Any], Any]


class JobTable(NamedTuple):
    """The jobs of a phase: R rows for each of G seeds."""

    keys: jax.Array  # [G, R], a PRNG key for each job, into which the step's number is folded
    num_steps: jax.Array  # int32 [G, R], 0 for a job that takes no part
    takes_part: jax.Array  # bool [G, R], the jobs that are run; a job without steps ends right after its start
    # work and own: what the jobs read, leaves [G, R, ...].
    work: Any
    own: Any


def deal(num_steps: jax.Array, devices: int) -> jax.Array:
    """Distributes each seed's jobs to D devices: longest first, each to the device with the least work so far.

    `num_steps` is int32 [G, M]. Returns int32 [G, R], R = D ceil(M / D): the job in each row, M for an empty row.
    Device d has the R / D rows that begin at row d R / D, and gets at most that many jobs of a seed, so that every
    result has a row.
    """
    num_seeds, num_jobs = num_steps.shape
    room = -(-num_jobs // devices)

    def place(taken, job):
        load, used = taken  # [D] steps, [G, D] rows
        seed = job // num_jobs
        device = jnp.argmin(jnp.where(used[seed] < room, load, jnp.iinfo(jnp.int32).max))
        row = device * room + used[seed, device]
        taken = load.at[device].add(num_steps[seed, job % num_jobs]), used.at[seed, device].add(1)
        return taken, row

    order = jnp.argsort(-num_steps.reshape(-1), stable=True)
    nothing = jnp.zeros(devices, jnp.int32), jnp.zeros((num_seeds, devices), jnp.int32)
    rows = jax.lax.scan(place, nothing, order)[1]
    empty = jnp.full((num_seeds, devices * room), num_jobs)
    return empty.at[order // num_jobs, rows].set(order % num_jobs)


def run_in_lanes(phase_of: PhaseOf, source: Source, table: JobTable, lanes: int) -> tuple[Any, jax.Array]:
    """Runs every job of a table, whose R is a multiple of the number of devices.

    `lanes` is L, the number of lanes on each device; 0: no job runs, and all results are zeros. Returns the result of
    each job's `finish`, leaves [G, R, ...], each row on the device that ran it; zeros for a job that takes no part. And
    the steps of all lanes, including idle ones, int32 [].
    """
    if num_devices() == 1:
        return _run_on_one_device(phase_of, source, table, lanes)

    def of_device(broadcast: Any, data: Any, table: JobTable):
        own = source._replace(broadcast=broadcast, data=data)
        phase_of(own.of(0)[1])  # Made here, it can be used in all traces below; made in one of them, only there.
        results, lane_steps = _run_on_one_device(phase_of, own, table, lanes)
        return results, lane_steps[None, None]

    split = jax.shard_map(
        of_device,
        in_specs=(ON_ALL_DEVICES, ON_ALL_DEVICES, BY_DEVICE),
        out_specs=(BY_DEVICE, BY_DEVICE),
        check_vma=False,
    )
    results, lane_steps = split(source.broadcast, source.data, table)
    return results, jnp.sum(lane_steps)


class _Lanes(NamedTuple):
    """The state of L lanes: each lane's job and its progress."""

    job: jax.Array  # int32 [L]
    busy: jax.Array  # bool [L]
    done: jax.Array  # int32 [L], steps of the job so far
    work: Any  # [L, ...]
    carry: Any  # [L, ...]


def _run_on_one_device(phase_of, source, table, num_lanes):
    num_seeds, num_rows = table.num_steps.shape
    num_jobs = num_seeds * num_rows
    keys, num_steps, takes_part, all_work, all_own = jax.tree.map(lambda x: x.reshape(num_jobs, *x.shape[2:]), table)
    num_lanes = min(num_lanes, num_jobs)
    queue = jnp.argsort(-2 * num_steps - takes_part, stable=True)  # longest first; jobs that take no part come last
    queue_length = jnp.sum(takes_part)
    over_lanes = jax.vmap if num_lanes > 1 else over_one

    def start(job):
        work, (broadcast, data) = row(all_work, job), source.of(job // num_rows)
        return work, phase_of(data).start(broadcast, data, work, row(all_own, job))

    def step(job, index, work, carry):
        broadcast, data = source.of(job // num_rows)
        return phase_of(data).step(broadcast, data, work, carry, index, jax.random.fold_in(keys[job], index))

    def finish(job, work, carry):
        broadcast, data = source.of(job // num_rows)
        return phase_of(data).finish(broadcast, work, carry, num_steps[job])

    def job_is_over(lanes):
        return lanes.busy & (lanes.done >= num_steps[lanes.job])

    def take_jobs(lanes, next_place):
        """Idle lanes take the next jobs of the queue, in lane order."""
        place = next_place + jnp.cumsum(~lanes.busy) - 1
        takes = ~lanes.busy & (place < queue_length)
        job = jnp.where(takes, queue[jnp.minimum(place, num_jobs - 1)], lanes.job)
        fresh = _Lanes(job, lanes.busy | takes, jnp.zeros_like(lanes.done), *over_lanes(start)(job))
        return where_rows(takes, fresh, lanes), next_place + jnp.sum(takes)

    def step_until_one_is_over(lanes, iterations):
        # An idle lane repeats its last job, whose result is not written again; a branch would cost more.
        def body(loop):
            lanes, iterations = loop
            carry = over_lanes(step)(lanes.job, lanes.done, lanes.work, lanes.carry)
            return lanes._replace(carry=carry, done=lanes.done + 1), iterations + 1

        return jax.lax.while_loop(lambda loop: ~jnp.any(job_is_over(loop[0])), body, (lanes, iterations))

    def write_results(lanes, results):
        over = job_is_over(lanes)
        # A lane whose job is not over writes out of bounds, which is dropped. The index is unsigned, because a signed
        # one might be negative, and to handle this costs three operations per leaf.
        place = jnp.where(over, lanes.job, num_jobs).astype(jnp.uint32)
        finished = over_lanes(finish)(lanes.job, lanes.work, lanes.carry)
        write = lambda all_jobs, rows: all_jobs.at[place].set(rows, mode="drop")  # noqa: E731
        return lanes._replace(busy=lanes.busy & ~over), jax.tree.map(write, results, finished)

    def body(loop):
        lanes, next_place, iterations, results = loop
        lanes, next_place = take_jobs(lanes, next_place)
        lanes, iterations = step_until_one_is_over(lanes, iterations)
        lanes, results = write_results(lanes, results)
        return lanes, next_place, iterations, results

    def unfinished(loop):
        lanes, next_place, _, _ = loop
        return (next_place < queue_length) | jnp.any(lanes.busy)

    iterations, none = jnp.int32(0), jnp.zeros(num_lanes, jnp.int32)
    one_result = jax.eval_shape(lambda: finish(jnp.int32(0), *start(jnp.int32(0))))
    results = jax.tree.map(lambda leaf: jnp.zeros((num_jobs, *leaf.shape), leaf.dtype), one_result)
    if num_lanes:
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(over_lanes(start), none))
        lanes = _Lanes(none, none > 0, none, *nothing)
        *_, iterations, results = jax.lax.while_loop(unfinished, body, (lanes, jnp.int32(0), iterations, results))
    results = jax.tree.map(lambda leaf: leaf.reshape(num_seeds, num_rows, *leaf.shape[1:]), results)
    return results, iterations * num_lanes


def over_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """`vmap` over an axis of length 1 without batching, so that convolutions stay ungrouped."""

    def mapped(*arguments):
        result = function(*(row(argument, 0) for argument in arguments))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return mapped
