"""A backbone with a linear classifier, and the heads that a method adds."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_ssl.base.devices import platform
from fedjax_ssl.models import substitution


class Outputs(NamedTuple):
    """Outputs of a model for a batch of B images, in float32."""

    logits: jax.Array  # [B, C], from the classifier; [B, 0] without a classifier
    heads: Mapping[str, jax.Array]  # name -> outputs [B, D] of the other heads
    features: Any  # [B, F], from the backbone; () if nothing reads them


class Linear(nn.Dense):
    """A linear head in float32. Its bias starts at 0, its kernel by default LeCun normal (variance 1 / fan-in).

    Attributes:
        reads: name of the head whose outputs are its input; '': its input is the features.
    """

    reads: str = ""

    def __call__(self, features, train=False, mask=None, num_views=1):
        """Maps features [V*B, F] to [V*B, D]; the other arguments are for heads that normalise."""
        return super().__call__(features)


_LIKE_TORCH = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
# `model.classifier_init` -> initialiser of the classifier's kernel. 'torch_linear' also changes biases and heads, see
# `heads_drawn`.
CLASSIFIER_INITS = {"lecun": nn.initializers.lecun_normal(), "torch": _LIKE_TORCH, "torch_linear": _LIKE_TORCH}


class Heads(nn.Module):
    """Backbone, linear classifier, and further heads on the features or on the outputs of another head.

    The top-level keys of the parameters are 'backbone', 'classifier', and the names of the heads.
    """

    # Module from (images, train, mask, num_views) to features [B, F]. The classifier has no bias if its attribute
    # `classifier_bias` is False.
    backbone: nn.Module
    num_classes: int  # C
    # Name -> factory of a module from (features, train, mask, num_views) to [B, D]. The factory takes the keyword
    # `name`, as classes of modules do. None: a linear classifier. If a module's attribute `reads` names another head,
    # the module gets the outputs of that head instead of the features.
    heads: Mapping[str, Callable[..., nn.Module] | None]
    classifier_init: str = "lecun"  # one of `CLASSIFIER_INITS`
    classifies: bool = True  # whether there is a classifier; a companion (a method's second network) has none

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1) -> Outputs:
        """Computes logits, heads and features.

        Args:
            images: float32 [V*B, H, W, C], normalised, view-major: the first B rows are view 0, and so on.
            train: whether batch normalisation uses the statistics of the batch.
            mask: bool or float [V*B]; rows with 0 are padding. Batch statistics exclude them, and their outputs are
              meaningless.
            num_views: V. The views share every convolution call, but each view has its own batch statistics, as if
              the views were passed one after the other.
        """
        features = substitution.apply(self.backbone, images, train, mask, num_views).astype(jnp.float32)
        if platform() == "tpu":  # libtpu 0.0.42.1 crashes if SAGE's float32 heads fuse with the backbone's end
            features = jax.lax.optimization_barrier(features)
        bias = getattr(self.backbone, "classifier_bias", True)
        first = CLASSIFIER_INITS[self.classifier_init]
        classifier = functools.partial(Linear, self.num_classes, use_bias=bias, kernel_init=first)
        logits = classifier(name="classifier")(features) if self.classifies else features[:, :0]
        modules = {name: (head or classifier)(name=name) for name, head in self.heads.items()}
        heads: dict[str, jax.Array] = {}
        for name, module in sorted(modules.items(), key=lambda entry: bool(_reads(entry[1]))):  # stable
            heads[name] = module(heads[_reads(module)] if _reads(module) else features, train, mask, num_views)
        return Outputs(logits, {name: heads[name] for name in modules}, features)


def heads_drawn(classifier_init: str, params: Mapping[str, Any], key: jax.Array) -> Mapping[str, Any]:
    """Draws classifier and heads anew as `torch.nn.Linear` does if `classifier_init` is 'torch_linear'.

    Each kernel and bias of the fresh parameters, of a `Heads` or of one head, but for those of 'backbone', is then
    uniform in +-1 / sqrt(fan-in).
    """
    if classifier_init != "torch_linear":
        return params
    flat = flatten_dict({name: part for name, part in params.items() if name != "backbone"})
    for number, path in enumerate(sorted(flat)):
        kernel = flat.get((*path[:-1], "kernel"))
        if path[-1] in ("kernel", "bias") and kernel is not None:
            bound = math.prod(kernel.shape[:-1]) ** -0.5
            own = jax.random.fold_in(key, number)
            flat[path] = jax.random.uniform(own, flat[path].shape, minval=-bound, maxval=bound)
    return {**params, **unflatten_dict(flat)}


def _reads(module: nn.Module) -> str:
    return getattr(module, "reads", "")
