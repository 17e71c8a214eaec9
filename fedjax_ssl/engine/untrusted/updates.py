"""Updates: the difference between upload and broadcast, leaf by leaf."""

from typing import Any

import jax

from fedjax_ssl.ops.sgd import Model


def changed_by(sent: Any, broadcast: Any, part: str = "params") -> dict[str, jax.Array]:
    """The change of each leaf in the uploads, [R, ...] by path; for a leaf that was not broadcast, the leaf itself.

    `sent` is the field `part` of the uploads' models.
    """
    known = received_by_path(broadcast, part)
    return {
        path: leaf - known[path] if _fits(known, path, leaf) else leaf for path, leaf in leaves_by_path(sent).items()
    }


def moved_by(changes: dict[str, jax.Array], like: Any, broadcast: Any) -> Any:
    """The inverse of `changed_by`: uploaded parameters with these changes, with the structure of `like`."""
    known = received_by_path(broadcast, "params")
    found = ((path, changes[path]) for path in leaves_by_path(like))  # JAX sorts a dict's keys, also of `changes`
    leaves = [leaf + known[path] if _fits(known, path, leaf) else leaf for path, leaf in found]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def leaves_by_path(tree: Any) -> dict[str, jax.Array]:
    """The leaves of a pytree by path, in order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def received_by_path(broadcast: Any, part: str) -> dict[str, jax.Array]:
    """The parameters or the statistics that were sent, by path; {} if the broadcast has no model."""
    model = getattr(broadcast, "model", None)
    return leaves_by_path(getattr(model, part)) if isinstance(model, Model) else {}


def _fits(known: dict[str, jax.Array], path: str, leaf: jax.Array) -> bool:
    return path in known and known[path].shape == leaf.shape[1:]
