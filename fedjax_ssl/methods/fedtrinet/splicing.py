"""Networks spliced of two models: the head part of one, the first blocks of a backbone, and the rest of another."""

from collections.abc import Callable

import jax
import optax

from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models.network import Network


def head_part(network: Network, blocks: int = 1) -> tuple[str, ...]:
    """The names of the head part's entries among the backbone's parameters, for any backbone.

    In the order in which the backbone makes its parameters, a block is an entry with a kernel (an array of two or more
    axes) and what follows it until the next one, such as its normalisation.

    Args:
        network: the architecture.
        blocks: in the head part.
    """
    order = []

    def note_order():  # JAX sorts the entries of a dict on their way out
        for name, entry in network.init(jax.random.key(0)).params["backbone"].items():
            order.append((name, any(leaf.ndim > 1 for leaf in jax.tree.leaves(entry))))

    jax.eval_shape(note_order)
    begun, names = 0, []
    for name, has_kernel in order:
        begun += has_kernel
        names += [name] if begun <= blocks else []
    return tuple(names)


def splice(head: tuple[str, ...], one: Model, other: Model) -> Model:
    """The `head` of `one` and the rest of `other`, parameters and statistics."""

    def with_head(rest, theirs):
        if "backbone" not in rest:
            return rest
        taken = {name: theirs["backbone"][name] for name in head if name in rest["backbone"]}
        return {**rest, "backbone": {**rest["backbone"], **taken}}

    return Model(with_head(other.params, one.params), with_head(other.batch_stats, one.batch_stats))


def freezing(head: tuple[str, ...]) -> Callable[[optax.GradientTransformation], optax.GradientTransformation]:
    """For `local_sgd`'s `adapt`: the head has no gradient, not in a gradient's norm either, and does not decay."""

    def is_head(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[0].key == "backbone" and path[1].key in head, params
        )

    # Before the optimiser, so that no norm or momentum has the head's gradient; and after it, for what decay adds.
    frozen = optax.masked(optax.set_to_zero(), is_head)
    return lambda optimizer: optax.chain(frozen, optimizer, frozen)
