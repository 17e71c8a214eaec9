"""Resizing against Pillow, and crops from enlarged images against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedjax_ssl import UserError, base_config
from fedjax_ssl.ops import augment
from fedjax_ssl.ops.augment import check_resized, rand_augment, strong_augment

# Jitted: each operation of its own would be a program of its own.
resize = jax.jit(augment.resize, static_argnames="side")
weak_augment = jax.jit(augment.weak_augment, static_argnames=("flip", "padding", "resized"))


def images_of(batch, side, channels, seed=0):
    """Noise, with black and white areas: the extremes of every sum."""
    images = np.random.default_rng(seed).integers(0, 256, (batch, side, side, channels)).astype(np.uint8)
    images[0, : side // 2] = 255
    images[0, side // 2 :, : side // 2] = 0
    return images


def by_pillow(image, side):
    pillow = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    return np.asarray(pillow.resize((side, side), Image.Resampling.BILINEAR)).reshape(side, side, -1)


@pytest.mark.parametrize(("before", "after", "channels"), [
    (32, 40, 3), (5, 13, 3), (7, 7, 1), (31, 8, 1),
])  # fmt: skip
def test_resizing_is_pillows_to_the_last_bit(before, after, channels):
    images = images_of(3, before, channels)
    ours = np.asarray(resize(jnp.asarray(images), after))
    assert ours.dtype == np.uint8
    np.testing.assert_array_equal(ours, np.stack([by_pillow(image, after) for image in images]))


def test_other_numbers_are_not_rounded():
    images = images_of(2, 8, 1)
    ours = np.asarray(resize(jnp.asarray(images, jnp.float32), 10))
    expected = [
        Image.fromarray(i[..., 0].astype(np.float32)).resize((10, 10), Image.Resampling.BILINEAR) for i in images
    ]
    np.testing.assert_allclose(ours[..., 0], np.stack(expected), atol=1e-4)
    assert (ours != np.round(ours)).any()


def crops(image, side):
    """Every crop of one image -> (mirrored, top, left)."""
    made = {}
    for top in range(len(image) - side + 1):
        for left in range(len(image) - side + 1):
            cut = image[top : top + side, left : left + side]
            made[cut.tobytes()], made[cut[:, ::-1].tobytes()] = (0, top, left), (1, top, left)
    return made


@pytest.mark.parametrize("flip", [False, True])
def test_weak_views_are_uniform_crops_of_the_enlarged_image(flip):
    image = images_of(2, 8, 3)[1]
    batch = jnp.asarray(np.repeat(image[None], 2000, axis=0))
    views = np.asarray(weak_augment(jax.random.key(0), batch, flip, padding=0, resized=10))
    assert views.shape == batch.shape and views.dtype == np.uint8
    known = crops(by_pillow(image, 10), 8)
    draws = np.array([known[view.tobytes()] for view in views])
    assert abs(draws[:, 0].mean() - 0.5 * flip) < 5 * 0.5 / np.sqrt(2000)
    for axis in (1, 2):
        shares = np.bincount(draws[:, axis], minlength=3) / 2000
        assert np.abs(shares - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 2000)


def test_strong_views_where_randaugment_comes_first():
    """It sees the enlarged image; the view is a crop of what it makes of it."""
    key, images = jax.random.key(3), jnp.asarray(images_of(4, 8, 3))

    @jax.jit
    def both(key, images):
        _, rand_key = jax.random.split(key)
        strong = strong_augment(key, images, True, 0, "usb", 1, 5, resized=10)
        return strong, rand_augment(rand_key, resize(images, 10), "usb", 1, 5)

    strong, expected = map(np.asarray, both(key, images))
    assert strong.shape == images.shape
    for view, image in zip(strong, expected):
        assert view.tobytes() in crops(image, 8)


def test_sizes_that_do_not_fit():
    assert base_config().augment.resized == 0
    check_resized(0, 4, (20, 30, 1))
    check_resized(20, 0, (20, 20, 1))
    for arguments, words in (
        ((40, 4, (32, 32, 3)), "augment.resized=40 needs augment.padding=0, which is 4"),
        ((40, 0, (32, 30, 3)), "square images .* 30 x 32"),
        ((31, 0, (32, 32, 3)), "augment.resized=31 needs .* square images of at most this"),
    ):
        with pytest.raises(UserError, match=words):
            check_resized(*arguments)
