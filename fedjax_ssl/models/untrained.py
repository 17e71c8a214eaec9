"""SemiAnAgg's anchor: an untrained network that depends on the seed alone and is the same for all clients."""

import jax

from fedjax_ssl.models.layers import convolution_init
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import Model


def kaiming_model(network: Network, key: jax.Array) -> Model:
    """Draws an untrained model whose convolution kernels are normal with variance 2 / fan-out (He et al., 2015).

    Other parameters (including linear layers of the backbone) and normalisation statistics have their usual initial
    values. A model given by `init_from` is ignored.
    """
    model = (network if network.given is None else network._replace(given=None)).init(key)
    leaves, treedef = jax.tree.flatten(model.params["backbone"])
    keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
    drawn = [  # a convolution kernel is [height, width, in, out]
        convolution_init(own, leaf.shape, leaf.dtype) if leaf.ndim == 4 else leaf for own, leaf in zip(keys, leaves)
    ]
    return model.with_parts(backbone=jax.tree.unflatten(treedef, drawn))
