"""Pytrees as Flower's records, and back: what travels is the leaves of the messages, each with its name."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_ssl.errors import UserError
from fedjax_ssl.flower import flower

app = flower("flwr.app")


def to_record(tree: Any) -> Any:
    """A pytree of arrays as an ArrayRecord, an array for each leaf, by the leaf's path."""
    leaves = jax.tree.leaves_with_path(jax.device_get(tree))
    return app.ArrayRecord({jax.tree_util.keystr(path): app.Array(np.asarray(leaf)) for path, leaf in leaves})


def from_record(record: Mapping[str, Any], like: Any, what: str) -> Any:
    """The pytree of an ArrayRecord.

    Args:
        record: of `to_record`.
        like: a pytree of the same structure and dtypes; its shapes are not read.
        what: it is, for messages.

    Raises:
        UserError: the other side sent something else: it is of another version, or has another configuration.
    """
    paths, structure = jax.tree.flatten_with_path(like)
    names = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in paths}
    if set(record) != set(names):
        odd = sorted(set(record) ^ set(names))[0]
        side = "has no" if odd in names else "has an unknown"
        raise UserError(f"{what} {side} {odd}; are both sides of the same version and configuration?")
    arrays = []
    for name, dtype in names.items():
        array = record[name].numpy()
        if array.dtype.kind == "V":  # a dtype that NumPy does not know, such as bfloat16
            array = array.view(dtype)
        if array.dtype != dtype:
            raise UserError(f"{what} has {array.dtype} for {name}, which is {dtype}")
        arrays.append(array)
    return jax.tree.unflatten(structure, arrays)


def array_bytes(content: Mapping[str, Any]) -> int:
    """Bytes of all arrays of a message: what `bytes_down` and `bytes_up` count.

    Flower's envelope comes on top: the arrays' names and headers, ConfigRecord and MetricRecord, metadata.
    """
    records = [record for record in content.values() if isinstance(record, app.ArrayRecord)]
    return sum(array.numpy().nbytes for record in records for array in record.values())
