"""Converts pytrees to Flower's records and back. Each leaf is sent with its name."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.flower import flower

app = flower("flwr.app")


def to_record(tree: Any) -> Any:
    """Converts a pytree of arrays to an ArrayRecord, with an array for each leaf, by the leaf's path."""
    leaves = jax.tree.leaves_with_path(jax.device_get(tree))
    return app.ArrayRecord({jax.tree_util.keystr(path): app.Array(np.asarray(leaf)) for path, leaf in leaves})


def from_record(record: Mapping[str, Any], like: Any, what: str, shapes: bool = False) -> Any:
    """Converts an ArrayRecord, or whatever else was received, to a pytree of the structure and dtypes of `like`.

    Raises a UserError about `what` if the record does not fit: the other side has another version or another
    configuration. With `shapes`, shapes are also checked.
    """
    paths, structure = jax.tree.flatten_with_path(like)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    if odd := sorted(set(record) ^ set(leaves)):
        side = "has no" if odd[0] in leaves else "has an unknown"
        raise UserError(f"{what} {side} {odd[0]:.60}; are both sides of the same version and configuration?")
    arrays = []
    for name, leaf in leaves.items():
        try:
            array = record[name].numpy()
            if array.dtype.kind == "V":  # a dtype that NumPy does not know, such as bfloat16
                array = array.view(leaf.dtype)
            fits = array.dtype == leaf.dtype and (not shapes or array.shape == leaf.shape)
            found = f"{array.dtype} {list(array.shape)}"
        except Exception as error:  # bytes from elsewhere may raise anything
            fits, found = False, f"no array that can be read ({first_line(error)})"
        if not fits:
            raise UserError(f"{what} has {found} for {name}, which is {leaf.dtype} {list(leaf.shape)}")
        arrays.append(array)
    return jax.tree.unflatten(structure, arrays)


def array_bytes(content: Mapping[str, Any]) -> int:
    """Bytes of all arrays in a message that the server sends, as `bytes_down` counts them.

    They exclude Flower's overhead: the arrays' names and headers, ConfigRecord and MetricRecord, metadata.
    """
    records = [record for record in content.values() if isinstance(record, app.ArrayRecord)]
    return sum(array.numpy().nbytes for record in records for array in record.values())
