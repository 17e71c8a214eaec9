"""RandAugment's operations against Pillow, through the fused program that training runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.ops.augment.operations import Operation
from fedjax_ssl.ops.augment.randaugment import Draws, apply_draws
from tests.helpers.pictures import NUM_IMAGES, agreement, make_images

FILL = (125, 123, 114)
# Mild and extreme strengths of every operation, on both sides of its identity where it has two.
STRENGTHS = {
    Operation.IDENTITY: [0.0],
    Operation.ROTATE: [30.0, -30.0, 7.3, -18.6],
    Operation.SHEAR_X: [0.3, -0.3, 0.12],
    Operation.SHEAR_Y: [0.3, -0.3, 0.12],
    Operation.TRANSLATE_X: [4.0, -4.0, 7.37, -2.81, 100.0],
    Operation.TRANSLATE_Y: [4.0, -4.0, 7.37, -2.81, 100.0],
    Operation.AUTO_CONTRAST: [0.0],
    Operation.EQUALIZE: [0.0],
    Operation.INVERT: [0.0],
    Operation.POSTERIZE: [1.0, 4.0, 6.0, 8.0],
    Operation.SOLARIZE: [0.0, 76.8, 128.0, 256.0],
    Operation.SOLARIZE_ADD: [0.0, 36.67, 110.0],
    Operation.BRIGHTNESS: [0.05, 0.37, 1.0, 1.9],
    Operation.COLOR: [0.05, 0.37, 1.0, 1.9],
    Operation.CONTRAST: [0.05, 0.37, 1.0, 1.9],
    Operation.SHARPNESS: [0.05, 0.37, 1.0, 1.9],
    Operation.CUTOUT: [4.0, 13.33, 16.0, 40.0],
    Operation.ROTATE_ON_GREY: [0.0, 40.0, 80.0, 120.0, 160.0],
}
apply_draws_jitted = jax.jit(apply_draws, static_argnames="fill")


def pillow_operation(image, operation, strength, centre):
    """One operation by Pillow: a PIL image to a PIL image."""
    width, height = image.size
    match operation:
        case Operation.IDENTITY:
            return image
        case Operation.ROTATE:
            return image.rotate(strength)
        case Operation.ROTATE_ON_GREY:
            rotated = image.convert("RGBA").rotate(strength)
            grey = Image.new("RGBA", image.size, (128, 128, 128, 255))
            return Image.composite(rotated, grey, rotated).convert(image.mode)
        case Operation.SHEAR_X:
            return image.transform(image.size, Image.AFFINE, (1, strength, 0, 0, 1, 0))
        case Operation.SHEAR_Y:
            return image.transform(image.size, Image.AFFINE, (1, 0, 0, strength, 1, 0))
        case Operation.TRANSLATE_X:
            return image.transform(image.size, Image.AFFINE, (1, 0, strength, 0, 1, 0))
        case Operation.TRANSLATE_Y:
            return image.transform(image.size, Image.AFFINE, (1, 0, 0, 0, 1, strength))
        case Operation.AUTO_CONTRAST:
            return ImageOps.autocontrast(image)
        case Operation.EQUALIZE:
            return ImageOps.equalize(image)
        case Operation.INVERT:
            return ImageOps.invert(image)
        case Operation.POSTERIZE:
            return ImageOps.posterize(image, int(strength))
        case Operation.SOLARIZE:
            return ImageOps.solarize(image, strength)
        case Operation.SOLARIZE_ADD:
            added = np.clip(np.asarray(image).astype(np.float32) + strength, 0, 255).astype(np.uint8)
            return ImageOps.solarize(Image.fromarray(added), 128)
        case Operation.BRIGHTNESS:
            return ImageEnhance.Brightness(image).enhance(strength)
        case Operation.COLOR:
            return ImageEnhance.Color(image).enhance(strength)
        case Operation.CONTRAST:
            return ImageEnhance.Contrast(image).enhance(strength)
        case Operation.SHARPNESS:
            return ImageEnhance.Sharpness(image).enhance(strength)
        case Operation.CUTOUT:
            x, y = centre[0] * width, centre[1] * height
            left, top = int(max(0, x - strength / 2)), int(max(0, y - strength / 2))
            right, bottom = min(width, left + strength), min(height, top + strength)
            image = image.copy()
            fill = Image.new("RGB", (1, 1), FILL).convert(image.mode).getpixel((0, 0))
            ImageDraw.Draw(image).rectangle((left, top, right, bottom), fill)
            return image
    raise AssertionError(operation)


def pillow_operations(image, operations, strengths, centres):
    """Operations in their order on uint8 [H, W, C]."""
    result = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    for operation, strength, centre in zip(operations, strengths, centres):
        result = pillow_operation(result, Operation(int(operation)), float(strength), centre)
    return np.asarray(result).reshape(image.shape)


def both_ways(images, operations, strengths, centres, by_products=False):
    """What the library and Pillow make of images [B, ...] with operations [S, B]: two [B, H, W, C].

    With `by_products` the library's numbers are also those of its form for TPUs.
    """
    batch = len(images)
    draws = Draws(
        jnp.asarray(operations, jnp.int32),
        jnp.asarray(strengths, jnp.float32),
        jnp.asarray(centres, jnp.float32),
        jnp.full(batch, -1.0),
        jnp.zeros((batch, 2)),
    )
    ours = np.asarray(apply_draws_jitted(jnp.asarray(images), draws, fill=FILL))
    assert ours.dtype == np.uint8
    if by_products:
        with use_platform("tpu"):  # products in place of gathers
            again = jax.jit(lambda *arrays: apply_draws(*arrays, fill=FILL))(images, draws)
        np.testing.assert_array_equal(again, ours)
    columns = zip(images, np.transpose(operations), np.transpose(strengths), np.swapaxes(centres, 0, 1))
    return ours, np.stack([pillow_operations(*column) for column in columns])


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 20, 32)])
def test_every_operation_equals_pillow(channels, height, width):
    cases = [(operation, strength) for operation, values in STRENGTHS.items() for strength in values]
    images = np.concatenate([make_images(channels, width)[:, :height]] * len(cases))
    operations = np.repeat([case[0] for case in cases], NUM_IMAGES)[None]
    strengths = np.repeat([case[1] for case in cases], NUM_IMAGES)[None]
    centres = np.random.default_rng(0).uniform(size=(1, len(images), 2))
    ours, pillows = both_ways(images, operations, strengths, centres, by_products=True)
    shares = agreement(ours, pillows)
    failures = [
        (Operation(operations[0, i]).name, strengths[0, i], i % NUM_IMAGES, shares[i])
        for i in np.flatnonzero(shares < 0.99)
    ]
    assert not failures
    changed = (pillows != images).reshape(len(cases), -1).any(axis=1)
    changed = {operation for (operation, _), moved in zip(cases, changed) if moved}
    unchanged = {Operation.IDENTITY} | ({Operation.COLOR} if channels == 1 else set())
    assert changed == set(Operation) - unchanged


def test_every_pair_of_operations_equals_pillow():
    rng = np.random.default_rng(1)
    pairs = [(first, second) for first in Operation for second in Operation]
    operations = np.array(pairs, int).T
    strengths = np.vectorize(lambda operation: rng.choice(STRENGTHS[Operation(operation)]))(operations)
    batch = operations.shape[1]
    images = make_images(3, 32)[rng.integers(0, NUM_IMAGES, batch)]
    ours, pillows = both_ways(images, operations, strengths, rng.uniform(size=(2, batch, 2)))
    shares = agreement(ours, pillows)
    failures = [
        (Operation(operations[0, i]).name, Operation(operations[1, i]).name, strengths[:, i], shares[i])
        for i in np.flatnonzero(shares < 0.99)
    ]
    assert not failures


def test_a_constant_image_equals_pillow():
    images = np.tile(np.repeat(np.uint8([0, 77, 255]), len(Operation))[:, None, None, None], (1, 8, 8, 3))
    strengths = np.array([[STRENGTHS[operation][-1] for operation in Operation] * 3])
    ours, pillows = both_ways(images, np.array([list(Operation) * 3]), strengths, np.full((1, len(images), 2), 0.4))
    np.testing.assert_allclose(ours.astype(int), pillows.astype(int), atol=1)
