"""Delivers a cohort's messages: clients that do not answer, attacks, compression, late uploads.

With the default configuration nothing changes. Client and group are folded into PRNG keys, as in training. In all
functions `options` is the configuration, `broadcast` is that of this round, and `key` is the round's for clients.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import is_on
from fedjax_ssl.engine.cohort import CohortResult
from fedjax_ssl.engine.interface import Broadcast, Metrics, Received, Selection, Upload, job_keys
from fedjax_ssl.engine.untrusted.attacks import attacked
from fedjax_ssl.engine.untrusted.compression import COMPRESSIONS, compressed, remembers
from fedjax_ssl.engine.untrusted.updates import changed_by, leaves_by_path, moved_by
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import clip_update, with_rows

LOST = "compression"  # entry of the clients' memory: the compression errors by path, leaves [K, ...]
LATE = "late"  # entry of the server's memory: a `Late` with the uploads that arrive in the next round
_ABSENT, _ATTACK, _COMPRESSION, _LATE = range(4)  # purposes of PRNG keys


class Late(NamedTuple):
    """Uploads of a round that arrive in the next round, in the rows of the `Selection`.

    Statistics and metadata arrive unchanged.
    """

    # Changes of the parameters by path, leaves [M, ...]. They are added to the model of the round in which they arrive.
    changes: dict[str, jax.Array]
    received: Received  # `Received` without parameters
    waiting: jax.Array  # bool [M], the rows that hold an upload


def present_jobs(options: Any, selection: Selection, key: jax.Array) -> jax.Array | None:
    """The jobs of a selection that are run: bool [M]; None: all. Absent rows stay absent."""
    never = options.availability.never
    if not is_on(never):
        return selection.present
    answers = jax.vmap(lambda own: jax.random.bernoulli(own, 1 - never))(
        _keys(selection.clients, selection.group, key, _ABSENT)
    )
    return answers if selection.present is None else answers & selection.present


def has_memory(options: Any) -> bool:
    """Whether any part of an upload is kept for a later round."""
    return remembers(options.compression) or _joins_later(options)


def first_memory(
    options: Any, upload: Upload, selection: Selection, num_clients: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The initial entries of `State.clients` and `State.server` for compression and late uploads.

    One client's upload and a round's selection of M rows are given as shapes; `num_clients` is K.
    """

    def zeros(tree: Any, number: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros((number, *leaf.shape), leaf.dtype), tree)

    num_jobs, params = len(selection.clients), leaves_by_path(upload.model.params)
    clients, server = {}, {}
    if remembers(options.compression):
        clients[LOST] = zeros(params, num_clients)
    if _joins_later(options):
        none, nobody = jnp.zeros(num_jobs, jnp.int32), jnp.zeros(num_jobs, bool)
        group = none if selection.turns > 1 or selection.group is not None else None
        held = zeros(_without_params(upload), num_jobs)
        server[LATE] = Late(zeros(params, num_jobs), Received(held, nobody, none, group, none, none), nobody)
    return clients, server


def _joins_later(options: Any) -> bool:
    """Whether late uploads are aggregated with those of the round in which they arrive."""
    return is_on(options.availability.late) and options.availability.late_weight > 0


def transmitted(
    options: Any, result: CohortResult, broadcast: Broadcast, data: Any, memory: Mapping[str, Any], key: jax.Array
) -> CohortResult:
    """A cohort's result with its uploads as the network delivers them.

    `memory` is that of the clients `data.ids`, leaves [K', ...]. The result's `memory_of_steps`, which is kept if the
    upload is accepted, also has the compression errors.
    """
    uploads = result.upload
    if is_on(options.aggregation.clip_norm):
        uploads = uploads._replace(model=clipped(uploads.model, broadcast.model, options.aggregation.clip_norm))
    if options.attack.kind != "none":
        lies = result.took_part & data.attackers.clients[result.clients]
        keys = _keys(result.clients, result.group, key, _ATTACK)
        uploads = attacked(options.attack, uploads, broadcast, lies, result.took_part & ~lies, keys)
    memory_of_steps = result.memory_of_steps
    if options.compression.kind in COMPRESSIONS:
        params = uploads.model.params
        lost = jax.tree.map(lambda leaf: leaf[data.place(result.clients)], memory[LOST]) if LOST in memory else None
        keys = _keys(result.clients, result.group, key, _COMPRESSION)
        arrived, lost = compressed(options.compression, changed_by(params, broadcast), lost, keys)
        model = uploads.model._replace(params=moved_by(arrived, params, broadcast))
        uploads = uploads._replace(model=model)
        memory_of_steps = memory_of_steps if lost is None else {**memory_of_steps, LOST: lost}
    return result._replace(upload=uploads, memory_of_steps=memory_of_steps)


def clipped(uploads: Model, sent: Model, clip_norm: float) -> Model:
    """The uploads, leaves [R, ...], whose clients have shortened their updates to a norm of at most `clip_norm`.

    A part that was not broadcast is its own update.
    """
    nothing = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), uploads.params)
    old = {name: sent.params.get(name, zeros) for name, zeros in nothing.items()}
    return uploads._replace(params=jax.vmap(lambda new: clip_update(new, old, clip_norm))(uploads.params))


def delivered(
    options: Any,
    received: Received,
    job: jax.Array,
    num_jobs: int,
    broadcast: Broadcast,
    server: Mapping[str, Any],
    key: jax.Array,
) -> tuple[Received, dict[str, Any], Metrics]:
    """What arrives in a round: its uploads that are not late, and the late uploads of the previous round.

    `job` is each upload's row in the `Selection` of `num_jobs` rows, int32 [R], any number for padding. Returns what
    arrives; the server's memory entry; and the metric `late_uploads`, the late uploads of this round.
    """
    late = options.availability.late
    if not is_on(late):
        return received, {}, {}
    is_late = jax.vmap(lambda own: jax.random.bernoulli(own, late))(_keys(received.clients, received.group, key, _LATE))
    is_late &= received.accepted
    metrics = {"late_uploads": jnp.sum(is_late)}
    now = _without(received, is_late)
    if not _joins_later(options):
        return now, {}, metrics
    before: Late = server[LATE]
    held = received._replace(uploads=_without_params(received.uploads))
    changes = changed_by(received.uploads.model.params, broadcast)
    after = with_rows(jax.tree.map(jnp.zeros_like, before), job, Late(changes, held, is_late), is_late)
    params = moved_by(before.changes, received.uploads.model.params, broadcast)
    uploads = before.received.uploads
    # If a client has uploads from both rounds, the newer one counts.
    again = jnp.any((before.received.clients[:, None] == now.clients) & now.accepted, axis=1)
    arriving = _without(before.received, ~before.waiting | again)._replace(
        uploads=uploads._replace(model=uploads.model._replace(params=params)),
        discount=options.availability.late_weight * jnp.ones(num_jobs),
    )
    now = now._replace(discount=jnp.ones(len(job)))
    both = jax.tree.map(lambda *rows: jnp.concatenate(rows), arriving, now)
    return both, {LATE: after}, metrics


def _without(received: Received, gone: jax.Array) -> Received:
    """Turns the rows `gone`, bool [R], into padding."""
    here = lambda counts: jnp.where(gone, 0, counts)  # noqa: E731
    return received._replace(
        accepted=received.accepted & ~gone, sizes=here(received.sizes), num_qualified=here(received.num_qualified)
    )


def _without_params(uploads: Upload) -> Upload:
    return uploads._replace(model=uploads.model._replace(params={}))


def _keys(clients: jax.Array, group: jax.Array | None, key: jax.Array, purpose: int) -> jax.Array:
    """A PRNG key for each row, different from the client's training keys."""
    return job_keys(jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), purpose), clients, group)
