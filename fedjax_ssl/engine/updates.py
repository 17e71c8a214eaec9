"""Updates: the difference between an upload and the broadcast, leaf by leaf, by path."""

from typing import Any

import jax

from fedjax_ssl.learning.sgd import Model


def changed_by(sent: Any, broadcast: Any, part: str = "params") -> dict[str, jax.Array]:
    """What an upload changes, leaf by leaf; a leaf that did not go down counts from 0.

    Args:
        sent: parameters or statistics of uploads, leaves [R, ...].
        broadcast: what went down.
        part: which of the two, a field of `Model`.

    Returns:
        By path, leaves [R, ...].
    """
    known = received_by_path(broadcast, part)
    return {
        path: leaf - known[path] if _fits(known, path, leaf) else leaf for path, leaf in leaves_by_path(sent).items()
    }


def moved_by(changes: dict[str, jax.Array], like: Any, broadcast: Any, part: str = "params") -> Any:
    """The other way round: the uploads, in the form of `like`, that make these changes."""
    known = received_by_path(broadcast, part)
    leaves = [leaf + known[path] if _fits(known, path, leaf) else leaf for path, leaf in changes.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def leaves_by_path(tree: Any) -> dict[str, jax.Array]:
    """A pytree's leaves, in their order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def received_by_path(broadcast: Any, part: str) -> dict[str, jax.Array]:
    """The parameters or the statistics that went down, by path; {} where no model did."""
    model = getattr(broadcast, "model", None)
    return leaves_by_path(getattr(model, part)) if isinstance(model, Model) else {}


def _fits(known: dict[str, jax.Array], path: str, leaf: jax.Array) -> bool:
    return path in known and known[path].shape == leaf.shape[1:]
