"""The devices that a program is compiled for: their platform, their number, and how rows are split over them."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

AXIS = "lanes"  # of the device mesh
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def platform() -> str:
    """'cpu', 'gpu' or 'tpu': what programs that are traced here will run on; JAX's default without `use_platform`."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def use_platform(name: str) -> Iterator[None]:
    """Code that is traced inside is for this platform, which need not be here.

    As `jax.jit` does not trace a function again that it has traced for another platform, jit inside.
    """
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def num_devices() -> int:
    """Devices that share the work: those of the mesh under `jax.set_mesh`, else one; in work that is split already,
    one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if AXIS in mesh.manual_axes else dict(mesh.shape).get(AXIS, 1)


def on_each_device(function: Callable[[Any], Any], rows: Any) -> Any:
    """A function on every device's share of rows.

    Args:
        function: leaves [n, ...] to leaves [n, ...] or [1, ...]. It may read arrays from around it; all devices get
            those whole.
        rows: leaves [D n, ...], D devices, all of them on each; device d takes the rows from d n on.

    Returns:
        The results one after the other, on all devices.
    """
    devices = num_devices()
    if devices == 1:
        return function(rows)
    size = len(jax.tree.leaves(rows)[0]) // devices
    share = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), rows)
    # An array that a function under shard_map reads must be an argument of it.
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(share)

    def with_arguments(around, rows):
        # Rows that came in already split would have XLA split what makes them, and send parts of them about.
        first = jax.lax.axis_index(AXIS) * size
        share = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), rows)
        results = jax.core.eval_jaxpr(traced.jaxpr, around, *jax.tree.leaves(share))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    split = jax.shard_map(
        with_arguments,
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )
    # Seeds in one program come one after the other: a large batch gains nothing from a second beside it.
    results = jax.custom_batching.sequential_vmap(split)(traced.consts, rows)
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, PartitionSpec()), results)
