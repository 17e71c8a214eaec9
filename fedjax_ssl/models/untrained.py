"""SemiAnAgg's anchor: an untrained network that depends on the seed alone and is the same for all clients."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import Model


def kaiming_model(network: Network, key: jax.Array) -> Model:
    """Draws an untrained model whose convolution kernels are normal with variance 2 / fan-out (He et al., 2015).

    Other parameters (including linear layers of the backbone) and normalisation statistics have their usual initial
    values. A model given by `init_from` is ignored.
    """
    model = (network if network.given is None else network._replace(given=None)).init(key)
    leaves, treedef = jax.tree.flatten(model.params["backbone"])

    def drawn(key: jax.Array, leaf: jax.Array) -> Any:
        if leaf.ndim != 4:  # not a convolution kernel [height, width, in, out]
            return leaf
        fan_out = leaf.shape[0] * leaf.shape[1] * leaf.shape[3]
        return jnp.sqrt(2.0 / fan_out) * jax.random.normal(key, leaf.shape, leaf.dtype)

    keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
    backbone = jax.tree.unflatten(treedef, [drawn(key, leaf) for key, leaf in zip(keys, leaves)])
    return model.with_parts(backbone=backbone)
