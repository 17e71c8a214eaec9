"""RandAugment (Cubuk et al., 2020) on the device, in the flavours of published systems."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.ops.augment import operations
from fedjax_ssl.ops.augment.flavours import FLAVOURS, Flavour, PoolEntry
from fedjax_ssl.ops.augment.operations import Operation
from fedjax_ssl.ops.augment.resize import resize
from fedjax_ssl.ops.augment.weak import crop_at_random, weak_augment


class Draws(NamedTuple):
    """The random draws for one batch: S operations and a final cutout for each image."""

    operation: jax.Array  # int32 [S, B], values of Operation; the identity if none is applied
    strength: jax.Array  # float32 [S, B], in the unit of the operation
    centre: jax.Array  # float32 [S, B, 2], centre of a cutout among the operations, as a share of the sides
    cutout_size: jax.Array  # float32 [B], side of the final cutout in pixels, negative for none
    cutout_centre: jax.Array  # float32 [B, 2], centre of the final cutout, as a share of the sides


def rand_augment(key: jax.Array, images: jax.Array, flavour: str, num_ops: int, magnitude: int) -> jax.Array:
    """Applies `num_ops` random operations, drawn with replacement, to every image, uint8 [B, H, W, C] with C = 1 or 3.

    The magnitude is from 0 to the flavour's maximum (fedlabel: 30, the others: 10), else there is a UserError; usb,
    fl2, fedmatch and none ignore it.

    Source: RandAugment (Cubuk et al., 2020); `flavours` has the sources of the flavours.
    """
    check_magnitude(flavour, magnitude)
    chosen = FLAVOURS[flavour]
    if not chosen.pool:
        return images
    draws = draw_operations(key, chosen, images.shape, num_ops, magnitude)
    return apply_draws(images, draws, chosen.fill)


def check_magnitude(flavour: str, magnitude: int) -> None:
    """Raises a UserError if RandAugment's magnitude is more than the flavour's maximum."""
    most = FLAVOURS[flavour].max_magnitude
    if FLAVOURS[flavour].pool and magnitude > most:
        raise UserError(
            f"augment.magnitude of RandAugment's flavour {flavour!r} goes from 0 to {most}, not {magnitude}"
        )


def strong_augment(
    key: jax.Array,
    images: jax.Array,
    flip: bool,
    padding: int,
    flavour: str,
    num_ops: int,
    magnitude: int,
    border: str = "reflect",
    resized: int = 0,
) -> jax.Array:
    """Strong augmentation: RandAugment and a weak augmentation with its own draw. Images are resized before both.

    For flavour, num_ops and magnitude see `rand_augment`, for the others `weak.weak_augment`. Images are uint8 [B, H,
    W, C], grey levels, C is 1 or 3.
    """
    weak_key, rand_key = jax.random.split(key)
    if FLAVOURS[flavour].geometry_first:
        images = weak_augment(weak_key, images, flip, padding, border, resized)
        return rand_augment(rand_key, images, flavour, num_ops, magnitude)
    height, width = images.shape[1:3]
    if resized:
        images = rand_augment(rand_key, resize(images, resized), flavour, num_ops, magnitude)
        return crop_at_random(weak_key, images, flip, height, width)
    images = rand_augment(rand_key, images, flavour, num_ops, magnitude)
    return weak_augment(weak_key, images, flip, padding, border)


def draw_operations(key: jax.Array, flavour: Flavour, shape: tuple[int, ...], num_ops: int, magnitude: int) -> Draws:
    """Draws everything that is random in one call of `rand_augment`, for each image separately.

    `shape` is the images' (B, H, W, C).
    """
    batch, height, width, channels = shape
    pool = [entry for entry in flavour.pool if channels == 3 or not entry.colour_only]
    operation_key, cutout_key = jax.random.split(key)
    which, applied, sign, level, x, y = jax.random.uniform(operation_key, (6, num_ops, batch))

    # Rounding can turn the product with the largest float below one into the end of the range.
    index = jnp.minimum((which * len(pool)).astype(jnp.int32), len(pool) - 1)
    table = np.array([_strength_range(entry, height, width) for entry in pool], np.float32)
    low, high = jnp.asarray(table[:, 0])[index], jnp.asarray(table[:, 1])[index]
    strength = low + (high - low) * _fraction(flavour, magnitude, level, key)
    # The margin keeps products that are whole in theory, such as 0.3 * 10 / 10 * 40, from being rounded down.
    whole = jnp.asarray([entry.whole for entry in pool])[index]
    strength = jnp.where(whole, jnp.floor(strength + 1e-4), strength)
    strength = jnp.maximum(strength, jnp.asarray([entry.least for entry in pool])[index])
    signed = jnp.asarray([entry.signed for entry in pool])[index]
    strength = jnp.where(signed & (sign < 0.5), -strength, strength)
    strength = strength + jnp.asarray([entry.around for entry in pool], jnp.float32)[index]
    operation = jnp.asarray([int(entry.operation) for entry in pool], jnp.int32)[index]
    operation = jnp.where(applied < flavour.probability, operation, int(Operation.IDENTITY))

    size, cutout_x, cutout_y = jax.random.uniform(cutout_key, (3, batch))
    if flavour.cutout is None:
        cutout_size = jnp.full(batch, -1.0)
    else:
        smallest, largest = flavour.cutout
        cutout_size = (smallest + (largest - smallest) * size) * min(height, width)
    cutout_centre = jnp.stack([cutout_x, cutout_y], axis=-1)
    return Draws(operation, strength, jnp.stack([x, y], axis=-1), cutout_size, cutout_centre)


def apply_draws(images: jax.Array, draws: Draws, fill: tuple[int, int, int]) -> jax.Array:
    """Applies the drawn operations in their order, then the final cutout, to uint8 [B, H, W, C], C is 1 or 3.

    `fill` is the red, green and blue level of a cutout.
    """
    _, height, width, _ = images.shape
    planes, size = operations.to_planes(images), (height, width)
    for operation, strength, centre in zip(draws.operation, draws.strength, draws.centre):
        planes = operations.apply_operation(planes, operation, strength, centre, fill, size)
    planes = operations.cutout(planes, draws.cutout_size, draws.cutout_centre, fill, size)
    return operations.from_planes(planes, size)


def _strength_range(entry: PoolEntry, height: int, width: int) -> tuple[float, float]:
    """The range of an entry's strength, in the unit of its operation."""
    if not entry.of_side:
        return entry.low, entry.high
    side = height if entry.operation == Operation.TRANSLATE_Y else width
    return entry.low * side, entry.high * side


def _fraction(flavour: Flavour, magnitude: int, level: jax.Array, key: jax.Array) -> jax.Array:
    """The position of each strength in its range, in [0, 1], from a uniform draw `level` [S, B]."""
    if flavour.magnitude == "uniform":
        return level
    if flavour.magnitude == "below_ceiling":
        smallest, largest = flavour.ceilings
        ceiling = jax.random.randint(jax.random.fold_in(key, 0), level.shape[1:], smallest, largest + 1)
        return jnp.minimum(jnp.floor(level * ceiling), ceiling - 1) / (flavour.max_magnitude - 1)
    if flavour.magnitude == "up_to":
        return jnp.minimum(jnp.floor(level * magnitude) + 1, magnitude) / flavour.max_magnitude
    return jnp.full_like(level, magnitude / flavour.max_magnitude)
