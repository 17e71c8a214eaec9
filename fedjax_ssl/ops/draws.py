"""Sampling without replacement at a cost that does not grow with the population."""

import jax
import jax.numpy as jnp

SORTED = 2**14  # up to this size all numbers are sorted by random keys, which is as fast
_ROUNDS = 8


def draw_distinct(key: jax.Array, size: int, count: int) -> jax.Array:
    """Draws `count` different numbers from 0 to size - 1 uniformly: int32 [count].

    For a large size it takes the first `count` values of a keyed permutation: a Feistel network over the next power of
    4, repeated until the value is below `size` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
    2002).
    """
    if size <= SORTED:
        return jax.random.choice(key, size, (count,), replace=False).astype(jnp.int32)
    bits = -(-(size - 1).bit_length() // 2)
    mask = jnp.uint32(2**bits - 1)
    keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)

    def permuted(number: jax.Array) -> jax.Array:
        left, right = number >> bits, number & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        return left << bits | right

    def walk(number: jax.Array) -> jax.Array:
        return jnp.where(number < size, number, permuted(number))

    first = permuted(jnp.arange(count, dtype=jnp.uint32))
    return jax.lax.while_loop(lambda found: jnp.any(found >= size), walk, first).astype(jnp.int32)


def _mixed(number: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every bit of the result depends on every bit of a uint32."""
    number = (number ^ number >> 16) * jnp.uint32(0x85EBCA6B)
    number = (number ^ number >> 13) * jnp.uint32(0xC2B2AE35)
    return number ^ number >> 16
