"""Texts as token ids, 0 = padding; or V versions of each text, such as back-translations, with the original first.

Weak views delete a few tokens; strong views also mask some. The first W (`data.weak_views`) of V versions are weak, the
others strong. If there are several weak versions, a weak view is one of them, drawn for each text without further
changes; likewise a strong view if there are strong versions.

Source: back-translations as strong views are from UDA (Xie et al., NeurIPS 2020), deletion from EDA (Wei and Zou, EMNLP
2019), masking from BERT (Devlin et al., NAACL 2019). Mixup is wordMixup (Guo et al., "Augmenting Data with Mixup for
Sentence Classification", 2019).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.kinds.features import MASKED, first, views_of
from fedjax_ssl.data.kinds.kind import Facts, Kind
from fedjax_ssl.data.kinds.tokenizer import PADDING, tokenise
from fedjax_ssl.data.values import is_missing
from fedjax_ssl.ops.augment import Views

DELETED = 0.1  # both views: the share of tokens deleted


class Text(NamedTuple):
    """Token ids, stored as int32."""

    shape: tuple[int, ...]  # (L,) or (V, L)
    num_tokens: int  # ids are below num_tokens; num_tokens itself is the id of the mask
    mix_order: str = "augment_then_mix"  # tokens of a mixture cannot be deleted

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Keywords for a backbone's factory: the number of ids to embed, including the mask."""
        return {"num_tokens": self.num_tokens + 1}

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Converts texts [B, L] or [B, V, L] and views [B, L] to int32 [B, L], mixtures [B, 3 L] to [B, 3, L]."""
        inputs = first(inputs)
        if inputs.shape[1] == 3 * self.shape[-1]:
            return inputs.reshape(len(inputs), 3, -1)
        return inputs.astype(jnp.int32)

    def mix(self, a: jax.Array, b: jax.Array, lam: jax.Array) -> jax.Array:
        """Prepares mixup of embeddings by the backbone: ids of a, ids of b, weight of a, float32 [B, 3 L]."""
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.concatenate([a, b, jnp.full_like(a, lam)], axis=1)

    def together(self, views: Sequence[jax.Array]) -> jax.Array:
        """Concatenates views and examples; if any is a mixture, the others become mixtures with themselves."""
        views = [first(view).astype(jnp.float32) for view in views]
        longest = max(view.shape[1] for view in views)
        return jnp.concatenate([v if v.shape[1] == longest else self.mix(v, v, jnp.float32(1.0)) for v in views])


def deleted(key: jax.Array, tokens: jax.Array, share: float) -> jax.Array:
    """Replaces a share of the tokens by padding, which attention ignores; other tokens keep their positions."""
    return jnp.where(jax.random.bernoulli(key, share, tokens.shape), jnp.zeros((), tokens.dtype), tokens)


def _views(config: Any, facts: Facts) -> Views:
    def masked(key: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden = jax.random.bernoulli(key, MASKED, tokens.shape) & (tokens != PADDING)
        return jnp.where(hidden, jnp.asarray(facts["num_tokens"], tokens.dtype), tokens)

    return views_of(facts["weak_views"], functools.partial(deleted, share=DELETED), masked)


def _given(texts: Any, facts: Facts) -> np.ndarray:
    """Tokenises texts [B] if the data set has a tokenizer, None and NaN as ''; or checks token ids [B, L]."""
    length, found = facts["shape"][-1], np.asarray(texts)
    if not found.size:
        raise UserError("there are no texts")
    if found.ndim == 1 and found.dtype.kind in "UO" and facts.get("tokenizer"):
        # `texts`, not `found`, in which a NaN may be the text 'nan'.
        known = ("" if not isinstance(text, str) and is_missing(str(text)) else str(text) for text in texts)
        return tokenise(known, facts["tokenizer"], length, "predict")
    if found.dtype.kind not in "iu" or found.shape[1:] != (length,):
        wanted = "a list of texts, or token ids" if facts.get("tokenizer") else "token ids"
        raise UserError(f"texts are {found.dtype} {found.shape}; the model takes {wanted} [B, {length}]")
    if found.min() < 0 or found.max() >= facts["num_tokens"]:
        raise UserError(f"token ids are {found.min()} to {found.max()}; the model's are 0 to {facts['num_tokens'] - 1}")
    return found.astype(np.int32)


def _inputs(facts: Facts) -> Text:
    return Text(tuple(facts["shape"]), facts["num_tokens"])


KIND = Kind(noun="texts", stored=np.int32, inputs=_inputs, views=_views, given=_given)
