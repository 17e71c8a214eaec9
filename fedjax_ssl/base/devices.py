"""The devices that a program is compiled for: their platform and number, and how rows are split over them."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

AXIS = "lanes"  # name of the mesh axis
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def platform() -> str:
    """'cpu', 'gpu' or 'tpu': the platform that code is traced for; JAX's default outside of `use_platform`."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def use_platform(name: str) -> Iterator[None]:
    """A context in which code is traced for this platform, which this machine need not have.

    `jax.jit` does not trace a function again for another platform, so create the jitted function inside.
    """
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def num_devices() -> int:
    """The number of devices that share the work: those of the mesh under `jax.set_mesh`, else one.

    In code that is already split over devices (`shard_map`) it is one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if AXIS in mesh.manual_axes else dict(mesh.shape).get(AXIS, 1)


def on_each_device(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to every device's share of rows; returns the concatenated results, replicated.

    Args:
        function: leaves [n, ...] to leaves [n, ...] or [1, ...]. Every device gets all arrays that it closes over.
        rows: leaves [D n, ...] for D devices, replicated; device d takes n rows, from row d n.
    """
    devices = num_devices()
    if devices == 1:
        return function(rows)
    size = len(jax.tree.leaves(rows)[0]) // devices
    share = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), rows)
    # Arrays that a function under shard_map reads must be its arguments.
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(share)

    def with_arguments(around, rows):
        # If the rows were split before, XLA would also split their computation, and devices would exchange parts of it.
        first = jax.lax.axis_index(AXIS) * size
        share = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), rows)
        results = jax.core.eval_jaxpr(traced.jaxpr, around, *jax.tree.leaves(share))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    whole = PartitionSpec()
    split = jax.shard_map(with_arguments, in_specs=(whole, whole), out_specs=PartitionSpec(AXIS), check_vma=False)
    # Seeds in one program run one after the other: large batches gain nothing from running side by side.
    results = jax.custom_batching.sequential_vmap(split)(traced.consts, rows)
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, whole), results)
