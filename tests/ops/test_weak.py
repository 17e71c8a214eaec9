"""Weak augmentation against NumPy, and who is flipped and shifted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.ops.augment import image_views, weak

# Jitted: each operation of its own would be a program of its own.
flip_and_crop = jax.jit(weak.flip_and_crop, static_argnames=("padding", "border"))
weak_augment = jax.jit(weak.weak_augment, static_argnames=("flip", "padding", "border"))
NUMPY_MODES = {"reflect": "reflect", "zeros": "constant"}


def reference(images, flipped, offsets, padding, border="reflect"):
    """Flip, pad, crop, one image after the other."""
    _, height, width, _ = images.shape
    results = []
    for image, mirror, (top, left) in zip(images, flipped, offsets):
        image = image[:, ::-1] if mirror else image
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode=NUMPY_MODES[border])
        results.append(padded[top : top + height, left : left + width])
    return np.stack(results)


@pytest.mark.parametrize(("shape", "padding", "dtype", "border"), [
    ((2, 5, 7, 3), 4, np.uint8, "reflect"),
    ((2, 5, 7, 3), 6, np.uint8, "zeros"),  # more than the image's side
    ((2, 9, 8, 1), 2, np.float32, "zeros"),
])  # fmt: skip
def test_flip_and_crop_equals_numpy(shape, padding, dtype, border):
    """Every offset, with and without a flip; of grey levels by a TPU's products, too."""
    draws = [
        (mirror, top, left)
        for mirror in (False, True)
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]
    flipped, offsets = np.array([d[0] for d in draws]), np.array([d[1:] for d in draws])
    images = np.random.default_rng(0).integers(0, 256, (len(draws), *shape[1:])).astype(dtype)
    for platform in ("cpu", "tpu")[: 1 + (dtype == np.uint8)]:
        with use_platform(platform):
            ours = jax.jit(lambda *arrays: weak.flip_and_crop(*arrays, padding, border))(images, flipped, offsets)
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, reference(images, flipped, offsets, padding, border))


def recover_draws(augmented, image, padding, may_flip, border="reflect"):
    """Which (flip, top, left) made each augmented image out of one image without symmetries."""
    candidates = {}
    for flipped in (False, True) if may_flip else (False,):
        for top in range(2 * padding + 1):
            for left in range(2 * padding + 1):
                made = reference(image[None], [flipped], [(top, left)], padding, border)
                candidates[made.tobytes()] = (flipped, top, left)
    return np.array([candidates[one.tobytes()] for one in augmented])


@pytest.mark.parametrize(("flip", "border"), [(True, "reflect"), (False, "reflect"), (True, "zeros")])
def test_flips_and_offsets_are_uniform_and_each_image_has_its_own(flip, border):
    image = np.random.default_rng(1).integers(0, 256, (8, 8, 1)).astype(np.uint8)
    batch = jnp.asarray(np.repeat(image[None], 3000, axis=0))
    augmented = np.asarray(weak_augment(jax.random.key(0), batch, flip, padding=2, border=border))
    draws = recover_draws(augmented, image, 2, may_flip=flip, border=border)
    if flip:
        assert abs(draws[:, 0].mean() - 0.5) < 5 * 0.5 / np.sqrt(3000)
    for axis in (1, 2):
        shares = np.bincount(draws[:, axis], minlength=5) / 3000
        assert np.abs(shares - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 3000)
    assert abs(np.corrcoef(draws[:, 1], draws[:, 2])[0, 1]) < 5 / np.sqrt(3000)


def test_padding_is_limited_by_the_image():
    image = np.arange(3 * 4, dtype=np.uint8).reshape(3, 4, 1)
    batch = jnp.asarray(np.repeat(image[None], 200, axis=0))
    augmented = np.asarray(weak_augment(jax.random.key(0), batch, True, padding=4))
    assert len(np.unique(recover_draws(augmented, image, 2, may_flip=True), axis=0)) > 10


@pytest.mark.parametrize("shape", [(5, 8, 8, 1), (5, 1, 6, 3)])
def test_without_padding_and_flip_images_stay_and_nothing_is_gathered(shape):
    images = np.random.default_rng(3).integers(0, 256, shape).astype(np.uint8)
    padding = 0 if shape[1] > 1 else 4  # one row cannot be reflected
    np.testing.assert_array_equal(weak_augment(jax.random.key(0), jnp.asarray(images), False, padding), images)
    traced = jax.make_jaxpr(lambda key, images: weak_augment(key, images, False, padding))(jax.random.key(0), images)
    assert "gather" not in str(traced)
    flipped = np.asarray(weak_augment(jax.random.key(0), jnp.asarray(images), True, padding))  # the flip alone
    both = np.stack([images, images[:, :, ::-1]])
    which = (flipped == both).all(axis=(2, 3, 4))
    assert which.any(axis=0).all() and which[1].any() and not which[1].all()


@pytest.mark.parametrize(("flip", "mirrored", "expected"), [
    ("dataset", True, True), ("dataset", False, False), ("always", False, True), ("never", True, False),
])  # fmt: skip
def test_views_of_images_are_made_as_configured(flip, mirrored, expected):
    config, fields = base_config(), {"padding": 2, "border": "zeros", "resized": 0}
    colours = {"flavour": "usb", "num_ops": 3, "magnitude": 7}
    config.augment.update({"flip": flip, **fields, **colours})
    views = image_views(config, (8, 8, 3), mirrored)
    assert views.weak.keywords == {"flip": expected, **fields}
    assert views.strong.keywords == {"flip": expected, **fields, **colours}
    assert {view.keywords["flip"] for view in views.pair} == {expected}
