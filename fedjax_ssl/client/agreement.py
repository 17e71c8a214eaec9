"""What several models say of the same images: their divergence from one's own, and the class that most vote for."""

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.losses import kl_divergence


def inter_client_consistency(
    helpers: jax.Array, present: jax.Array, logits: jax.Array, confident: jax.Array
) -> jax.Array:
    """1/H sum_j KL(p_j || p), the mean over confident images (FedMatch): float32 [].

    Args:
        helpers: float32 [H, B, C], logits of other clients' models, without gradient.
        present: bool [H]; the mean is over these, and 0 without any.
        logits: float32 [B, C], of the client's model.
        confident: bool [B].
    """
    each = [kl_divergence(of_helper, logits, confident) * here for of_helper, here in zip(helpers, present)]
    return sum(each, start=jnp.float32(0.0)) / jnp.maximum(jnp.sum(present), 1)


def agreed_labels(guess: jax.Array, helpers: jax.Array, present: jax.Array) -> jax.Array:
    """The class with the most votes, of the client's model and of its helpers; of equal ones the first.

    Args:
        guess: int32 [B], the classes of the client's model.
        helpers, present: as in `inter_client_consistency`; without any the labels are the guess.

    Returns:
        int32 [B].
    """
    votes = jax.nn.one_hot(jnp.argmax(helpers, axis=-1), helpers.shape[-1]) * present[:, None, None]
    return jnp.argmax(jax.nn.one_hot(guess, helpers.shape[-1]) + jnp.sum(votes, axis=0), axis=-1).astype(jnp.int32)
