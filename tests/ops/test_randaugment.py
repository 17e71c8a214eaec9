"""RandAugment: what is drawn, for whom, and that the drawing works inside compiled loops and lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.ops.augment import FLAVOURS, Operation, rand_augment, randaugment, strong_augment, weak_augment
from fedjax_ssl.ops.augment.randaugment import draw_operations

IMAGES = np.random.default_rng(0).integers(1, 256, (6, 32, 32, 3)).astype(np.uint8)


@functools.cache
def draw(flavour, magnitude, shape=(20000, 32, 32, 3)):
    """Two operations for each of many images."""
    return drawn(3, flavour, shape, 2, magnitude)


def drawn(seed, flavour, *arguments):
    """The draws of a seed, in NumPy, by one program."""
    draws = jax.jit(lambda key: draw_operations(key, FLAVOURS[flavour], *arguments))(jax.random.key(seed))
    return jax.tree.map(np.asarray, draws)


def strengths_of(flavour, magnitude, operation):
    draws = draw(flavour, magnitude)
    return draws.strength[draws.operation == operation]


@pytest.mark.parametrize("flavour", sorted(name for name, flavour in FLAVOURS.items() if flavour.pool))
def test_every_operation_of_the_pool_is_drawn_equally_often(flavour):
    chosen = FLAVOURS[flavour]
    operations = draw(flavour, 10).operation
    assert set(np.unique(operations)) <= {entry.operation for entry in chosen.pool} | {Operation.IDENTITY}
    for entry in chosen.pool:
        if entry.operation != Operation.IDENTITY:
            expected = chosen.probability / len(chosen.pool)
            deviation = np.sqrt(expected * (1 - expected) / operations.size)
            assert abs(np.mean(operations == entry.operation) - expected) < 5 * deviation


def test_pool_sizes_and_colour_only_operations():
    sizes = {"semifl": 15, "usb": 14, "fl2": 14, "fixmatch": 14, "fedlabel": 16, "fedmatch": 13, "none": 0}
    assert {name: len(flavour.pool) for name, flavour in FLAVOURS.items()} == sizes
    assert (draw("fedlabel", 10).operation == Operation.CUTOUT).any()
    assert not (draw("fedlabel", 10, (20000, 28, 28, 1)).operation == Operation.CUTOUT).any()


ENHANCE = (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS)
SHEAR, TRANSLATE = (Operation.SHEAR_X, Operation.SHEAR_Y), (Operation.TRANSLATE_X, Operation.TRANSLATE_Y)
# By the public codes: the largest magnitude, the probability of an operation, the fill of a cutout, whether the weak
# geometry comes first; and the smallest and the largest strength at this magnitude, for images of 32 pixels.
UDA = {ENHANCE: (1.9, 1.9), SHEAR: (-0.3, 0.3), TRANSLATE: (-100, 100), (Operation.ROTATE,): (-30, 30),
       (Operation.POSTERIZE,): (4, 4), (Operation.CUTOUT,): (40, 40)}  # fmt: skip
EXTREMES = {
    "semifl": (10, 0.5, (127, 127, 127), True, UDA | {(Operation.SOLARIZE,): (0, 0)}),
    "fedlabel": (30, 1.0, (125, 123, 114), False, UDA | {
        (Operation.SOLARIZE,): (256, 256), (Operation.SOLARIZE_ADD,): (110, 110),
    }),
    "fixmatch": (10, 0.5, (127, 127, 127), True, {
        ENHANCE: (0.14, 0.95), SHEAR: (-0.3, 0.3), TRANSLATE: (-9, 9), (Operation.ROTATE,): (-30, 30),
        (Operation.POSTERIZE,): (4, 8), (Operation.SOLARIZE,): (0, 230.4),
    }),
    "usb": (10, 1.0, (125, 123, 114), False, {
        ENHANCE: (0.05, 0.95), SHEAR: (-0.3, 0.3), TRANSLATE: (-9.6, 9.6), (Operation.ROTATE,): (-30, 30),
        (Operation.POSTERIZE,): (4, 7), (Operation.SOLARIZE,): (0, 256),
    }),
}  # fmt: skip


@pytest.mark.parametrize("flavour", EXTREMES)
def test_a_flavour_is_that_of_the_public_code(flavour):
    magnitude, *facts, ranges = EXTREMES[flavour]
    chosen = FLAVOURS[flavour]
    assert [chosen.probability, chosen.fill, chosen.geometry_first] == facts
    with_strength = {entry.operation for entry in chosen.pool if (entry.low, entry.high) != (0, 0)}
    assert with_strength == {operation for operations in ranges for operation in operations}
    for operations, (low, high) in ranges.items():
        for operation in operations:
            strengths = strengths_of(flavour, magnitude, operation)
            reach = [strengths.min(), strengths.max()]
            np.testing.assert_allclose(reach, [low, high], rtol=1e-6, atol=0.01 * (high - low), err_msg=operation.name)


def test_fixmatch_draws_a_magnitude_up_to_m():
    levels = (strengths_of("fixmatch", 10, Operation.BRIGHTNESS) - 0.05) / 0.09
    np.testing.assert_allclose(np.unique(np.round(levels, 3)), np.arange(1, 11))
    turns = np.unique(strengths_of("fixmatch", 4, Operation.ROTATE))
    np.testing.assert_allclose(turns, [-12, -9, -6, -3, 3, 6, 9, 12])
    # int(0.3 * m / 10 * 32): whole pixels, and none at magnitude 1.
    assert set(np.abs(strengths_of("fixmatch", 4, Operation.TRANSLATE_Y))) == {0.0, 1.0, 2.0, 3.0}
    assert set(strengths_of("fixmatch", 10, Operation.POSTERIZE)) == {4.0, 5.0, 6.0, 7.0, 8.0}
    assert (draw("fixmatch", 10).cutout_size == 16).all()


def test_usb_draws_uniform_magnitudes_and_cutouts():
    rotations = strengths_of("usb", 5, Operation.ROTATE)
    sizes = draw("usb", 5).cutout_size
    translations = strengths_of("usb", 5, Operation.TRANSLATE_X)
    for values, low, high in [(rotations, -30, 30), (sizes, 0, 16), (translations, -9.6, 9.6)]:
        assert low <= values.min() < low + (high - low) / 100
        assert high - (high - low) / 100 < values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / np.sqrt(12 * values.size)
    assert set(strengths_of("usb", 5, Operation.POSTERIZE)) == {4.0, 5.0, 6.0, 7.0}


@pytest.mark.parametrize(("flavour", "magnitude", "operation", "expected"), [
    ("semifl", 5, Operation.ROTATE, [-15, 15]),
    ("semifl", 10, Operation.TRANSLATE_X, [-100, 100]),
    ("fedlabel", 10, Operation.COLOR, [0.7]),
    ("fedlabel", 10, Operation.SHEAR_X, [-0.1, 0.1]),
    ("fedlabel", 10, Operation.SOLARIZE, [256 / 3]),
    ("fedlabel", 10, Operation.POSTERIZE, [1]),
])  # fmt: skip
def test_semifl_and_fedlabel_take_a_share_of_the_maximum(flavour, magnitude, operation, expected):
    np.testing.assert_allclose(np.unique(strengths_of(flavour, magnitude, operation)), expected, rtol=1e-6)
    assert (draw(flavour, magnitude).cutout_size < 0).all()


def test_fedmatch_draws_levels_below_a_ceiling_of_each_image():
    """Against NumPy's tables of ten levels, of which the first five are ever reached."""

    def levels(low, high):
        return np.linspace(low, high, 10)[:5]

    def both_sides(high):
        return np.unique(np.concatenate([1 - levels(0, high), 1 + levels(0, high)]))

    for operation, expected in (
        (Operation.ROTATE_ON_GREY, levels(0, 360)),
        (Operation.SOLARIZE, np.sort(levels(256, 231))),
        (Operation.POSTERIZE, np.unique(np.round(levels(8, 4)))),
        (Operation.COLOR, both_sides(0.9)),
        (Operation.SHARPNESS, both_sides(0.9)),
        (Operation.CONTRAST, both_sides(0.5)),
        (Operation.BRIGHTNESS, both_sides(0.3)),
        (Operation.SHEAR_Y, both_sides(0.3) - 1),
        (Operation.TRANSLATE_X, 32 * (both_sides(0.2) - 1)),
    ):
        values = np.unique(np.round(strengths_of("fedmatch", 0, operation), 4))
        np.testing.assert_allclose(values, expected, atol=1e-3, err_msg=operation.name)
    # Levels 0 and 1 both leave all 8 bits, with a share of (1/2 + 1/3 + 1/4 + 1/5) / 4 each.
    bits = strengths_of("fedmatch", 0, Operation.POSTERIZE)
    assert abs(np.mean(bits == 8) - (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 2) < 0.05
    # Of many operations of one image the largest level is its ceiling less 1: uniform over 1 to 4, one for an image.
    draws = drawn(0, "fedmatch", (1000, 8, 8, 3), 400, 0)
    strengths = np.where(draws.operation == Operation.ROTATE_ON_GREY, draws.strength, -1)
    shares = np.bincount(np.round(strengths.max(axis=0) / 40).astype(int), minlength=5) / 1000
    assert shares[0] == 0 and np.abs(shares[1:] - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 1000)
    # Levels below a ceiling M are uniform: 0 has the share (1/2 + 1/3 + 1/4 + 1/5) / 4.
    none = np.mean(np.round(strengths[strengths >= 0]) == 0)
    assert abs(none - (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4) < 0.01
    assert (draws.cutout_size < 0).all()
    # Both sides equally often.
    colours = strengths_of("fedmatch", 0, Operation.COLOR)
    assert abs(np.mean(colours[np.abs(colours - 1) > 1e-3] > 1) - 0.5) < 0.05


@functools.cache
def compiled(flavour, num_ops=1):
    return jax.jit(lambda key, images: rand_augment(key, images, flavour, num_ops, 10))


weak_jitted = jax.jit(weak_augment, static_argnames=("flip", "padding", "border"))


def test_lanes_and_loops_equal_single_calls():
    """Under vmap over lanes, inside a while loop, as in the training step."""

    def step(key, images):
        return strong_augment(key, images, True, 4, "semifl", 1, 10)

    keys = jax.random.split(jax.random.key(5), 6).reshape(3, 2)
    lanes = jnp.asarray(IMAGES).reshape(3, 2, 32, 32, 3)

    @jax.jit
    def looped(keys, lanes):
        return jax.lax.fori_loop(0, 2, lambda i, images: jax.vmap(step)(keys[:, i], images), lanes)

    same = jnp.asarray(np.repeat(IMAGES[:1], 2, axis=0))
    single = jax.jit(step)
    one, other = np.asarray(single(keys[0, 0], same))  # each image has its own draws
    assert one.dtype == np.uint8 and (one != other).any()
    expected = [single(keys[lane, 1], single(keys[lane, 0], lanes[lane])) for lane in range(3)]
    np.testing.assert_array_equal(looped(keys, lanes), np.stack(expected))


@pytest.mark.parametrize(("flavour", "weak_first"), [("usb", False), ("fl2", True)])
def test_strong_augmentation_is_both_in_the_order_of_the_flavour(flavour, weak_first, monkeypatch):
    """Whether the black borders of the weak augmentation go through RandAugment, for which a cheap one stands in."""

    def rand(key, images, *given):
        assert given == (flavour, 1, 10)
        return images // 2 + jax.random.randint(key, (), 1, 100, jnp.uint8)

    key, images = jax.random.key(2), jnp.asarray(IMAGES)
    weak_key, rand_key = jax.random.split(key)
    weak = functools.partial(weak_jitted, weak_key, flip=True, padding=4, border="zeros")
    given = flavour, 1, 10
    orders = [rand(rand_key, weak(images=images), *given), np.asarray(weak(images=rand(rand_key, images, *given)))]
    assert (orders[0] != orders[1]).any()
    monkeypatch.setattr(randaugment, "rand_augment", rand)
    strong = jax.jit(lambda key, images: strong_augment(key, images, True, 4, *given, "zeros"))(key, images)
    np.testing.assert_array_equal(strong, orders[0 if weak_first else 1])


def test_the_flavour_none_leaves_the_weak_view_with_black_borders_too():
    key, images = jax.random.key(4), jnp.asarray(IMAGES)  # which has no black pixel
    strong = jax.jit(lambda border: strong_augment(key, images, False, 4, "none", 0, 0, border), static_argnums=0)
    black, reflected = np.asarray(strong("zeros")), np.asarray(strong("reflect"))
    for border, view in (("zeros", black), ("reflect", reflected)):  # the weak view, drawn anew
        np.testing.assert_array_equal(view, weak_jitted(jax.random.split(key)[0], images, False, 4, border))
    assert (black == 0).any(axis=(1, 2, 3)).sum() >= 5 and not (reflected == 0).any()


def test_without_operations_only_the_final_cutout_is_left():
    augmented = np.asarray(compiled("fixmatch", 0)(jax.random.key(0), IMAGES))
    changed = (augmented != IMAGES).any(axis=-1)
    assert changed.any(axis=(1, 2)).all()
    assert (augmented[changed] == 127).all()
    # Pillow's rectangles include their last row and column: up to 17 by 17 pixels.
    assert changed.sum(axis=(1, 2)).max() <= 17 * 17


def test_the_flavour_none_without_padding_and_flip_compiles_nothing():
    view = jax.make_jaxpr(lambda key, images: strong_augment(key, images, False, 0, "none", 2, 10))
    traced = view(jax.random.key(0), jnp.asarray(IMAGES))
    assert traced.jaxpr.outvars == [traced.jaxpr.invars[1]]  # the images themselves
    assert "gather" not in str(traced)


@pytest.mark.parametrize(("flavour", "most"), [("semifl", 10), ("fedlabel", 30)])
def test_a_larger_magnitude_than_the_flavour_s_is_refused(flavour, most):
    with pytest.raises(UserError, match=f"from 0 to {most}"):
        rand_augment(jax.random.key(0), IMAGES, flavour, 1, most + 1)
