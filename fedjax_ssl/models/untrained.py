"""An untrained network that is the same for all clients with the seed: SemiAnAgg's anchor."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models.network import Network


def kaiming_model(network: Network, key: jax.Array) -> Model:
    """An untrained network whose convolutions are normal with variance 2 / fan-out (He et al., 2015).

    Other parameters, linear layers of a backbone among them, and the statistics of its normalisation are as they begin;
    where a model is given (`init_from`) this one is untrained all the same.
    """
    model = (network if network.given is None else network._replace(given=None)).init(key)
    leaves, treedef = jax.tree.flatten(model.params["backbone"])

    def drawn(key: jax.Array, leaf: jax.Array) -> Any:
        if leaf.ndim != 4:  # no kernel [height, width, in, out] of a convolution
            return leaf
        fan_out = leaf.shape[0] * leaf.shape[1] * leaf.shape[3]
        return jnp.sqrt(2.0 / fan_out) * jax.random.normal(key, leaf.shape, leaf.dtype)

    keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
    backbone = jax.tree.unflatten(treedef, [drawn(key, leaf) for key, leaf in zip(keys, leaves)])
    return model.with_parts(backbone=backbone)
