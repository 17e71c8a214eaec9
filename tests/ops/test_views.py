"""The views of self-supervised methods: each operation against Pillow or SciPy, draws against their distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import convolve1d

from fedjax_ssl.ops.augment import colour, make_views, resized_crop
from fedjax_ssl.ops.augment import views as module
from fedjax_ssl.ops.augment.operations import from_planes, to_planes
from fedjax_ssl.ops.augment.resized_crop import draw_boxes
from fedjax_ssl.ops.augment.views import PAIRS
from tests.helpers.pictures import agreement, make_images

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def as_pillow(image):
    return Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])


def by_pillow(images, change):
    """What a function of a PIL image and its number makes of each image."""
    return np.stack([
        np.asarray(change(as_pillow(image), number)).reshape(image.shape) for number, image in enumerate(images)
    ])  # fmt: skip


def on_planes(change, images):
    return np.asarray(jax.jit(lambda images: from_planes(change(to_planes(images)), images.shape[1:3]))(images))


def many_images(channels, height=32, width=32):
    images = make_images(channels, width)[:, :height]
    noise = np.random.default_rng(0).integers(0, 256, images.shape).astype(np.uint8)
    return np.concatenate([images, noise])


# --- Crops. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "height", "width", "interpolation"), [(3, 32, 32, "bilinear"), (1, 20, 28, "bicubic")]
)
def test_a_resized_crop_is_pillow_s(channels, height, width, interpolation):
    images, rng = many_images(channels, height, width), np.random.default_rng(1)
    sides = np.stack([rng.integers(1, height + 1, len(images)), rng.integers(1, width + 1, len(images))], axis=1)
    sides[:3] = (height, width), (1, 1), (height, 3)
    corners = rng.integers(0, np.array([height, width]) - sides + 1)
    flipped = np.arange(len(images)) % 2 == 1

    def change(image, number):
        (top, left), (rows, columns) = corners[number], sides[number]
        image = image.crop((left, top, left + columns, top + rows)).resize((width, height), FILTERS[interpolation])
        return ImageOps.mirror(image) if flipped[number] else image

    boxes = np.concatenate([corners, sides], axis=1).astype(np.int32)
    ours = np.asarray(jax.jit(resized_crop, static_argnums=3)(images, boxes, flipped, interpolation))
    expected = by_pillow(images, change)
    np.testing.assert_array_equal(ours[0], images[0])
    assert agreement(ours, expected).min() > 0.99
    assert np.mean(ours == expected) > 0.98  # where a mean is half way, Pillow's rounded weights decide


def test_boxes_have_the_area_and_the_ratio_that_were_asked_for():
    number, side, smallest = 4000, 100, 0.25
    boxes = np.asarray(jax.jit(lambda key: draw_boxes(key, number, side, side, smallest))(jax.random.key(0)))
    top, left, rows, columns = boxes.T
    assert min(top.min(), left.min()) >= 0 and (top + rows).max() <= side and (left + columns).max() <= side
    area, ratio = rows * columns / side**2, columns / rows
    assert 0.24 < area.min() < 0.27 and area.max() <= 1
    assert 0.74 < ratio.min() < 0.78 and 1.29 < ratio.max() < 1.35
    # Where every ratio fits, an area is as likely as another: below 3/4 of the image.
    fits = area[area < 0.75]
    assert abs(np.mean(fits < 0.5) - 0.5) < 5 * 0.5 / np.sqrt(len(fits))
    assert abs(np.mean(np.log(ratio))) < 5 * np.log(4 / 3) / np.sqrt(3 * number)
    for offset, room in ((top, side - rows), (left, side - columns)):  # uniformly among all places
        assert abs(np.mean((offset + 0.5) / (room + 1)) - 0.5) < 5 * np.sqrt(1 / 12 / number)


@pytest.mark.parametrize(
    ("height", "width", "box"), [(20, 20, (0, 0, 20, 20)), (40, 15, (10, 0, 20, 15)), (15, 40, (0, 10, 15, 20))]
)
def test_without_a_draw_that_fits_it_is_the_middle(height, width, box):
    """Areas of more than the image's, so to say, fit never."""
    boxes = jax.jit(lambda key: draw_boxes(key, 3, height, width, 4.0))(jax.random.key(0))
    np.testing.assert_array_equal(boxes, [box] * 3)


# --- Colours. --------------------------------------------------------------------------------------------------------


def turned(image, turn):
    """torchvision's adjust_hue of a PIL image."""
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    levels = (np.asarray(hue).astype(int) + int(turn * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(levels.astype(np.uint8)), saturation, value)).convert("RGB")


CHANGES = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    turned,
)
FACTORS = ((0.2, 1.0, 1.8), (0.2, 1.0, 1.8), (0.0, 1.0, 1.8), (-0.5, -0.13, 0.0, 0.2))


def test_hsv_is_pillow_s_for_all_kinds_of_colours():
    """Random colours, and all of few levels, where shares are whole."""
    rng = np.random.default_rng(0)
    few = np.stack(np.meshgrid(*[[0, 1, 3, 15, 51, 85, 170, 254, 255]] * 3), axis=-1).reshape(-1, 3)
    image = np.concatenate([rng.integers(0, 256, (40000 - len(few), 3)), few]).astype(np.uint8).reshape(200, 200, 3)
    expected = np.asarray(Image.fromarray(image).convert("HSV"))
    ours = np.stack(jax.jit(lambda images: colour.to_hsv(to_planes(images)))(image[None]), axis=-1).reshape(image.shape)
    assert np.mean(ours == expected) > 0.999 and np.abs(ours.astype(int) - expected).max() <= 1
    hsv = expected.reshape(1, -1, 3).astype(np.int32)
    back = jax.jit(lambda hsv: from_planes(colour.from_hsv(*jnp.moveaxis(hsv, -1, 0)), (200, 200)))(hsv)
    np.testing.assert_array_equal(back[0], Image.fromarray(expected, "HSV").convert("RGB"))


@pytest.mark.parametrize("channels", [3, 1])
def test_each_adjustment_and_their_orders_are_pillow_s(channels):
    images = many_images(channels)
    cases = [(place, factor) for place, factors in enumerate(FACTORS) for factor in factors]
    batch = np.concatenate([images] * len(cases))
    rng = np.random.default_rng(2)
    # First each alone, the other factors doing nothing; then all in random orders.
    factors = np.tile([[1.0], [1.0], [1.0], [0.0]], len(batch))
    for number, (place, factor) in enumerate(cases):
        factors[place, number * len(images) : (number + 1) * len(images)] = factor
    drawn = np.stack([rng.choice(choices, len(batch)) for choices in FACTORS])
    orders = np.stack([rng.permutation(4) for _ in batch], axis=1)

    def change(image, number, factors):
        for place in orders[:, number]:
            image = CHANGES[place](image, factors[place, number])
        return image

    jitter = jax.jit(lambda images, *draws: from_planes(colour.jitter(to_planes(images), *draws), images.shape[1:3]))
    for each in (factors, drawn):
        ours = np.asarray(jitter(batch, orders.astype(np.int32), each.astype(np.float32)))
        shares = agreement(ours, by_pillow(batch, lambda image, n, each=each: change(image, n, each)))
        assert shares.min() > 0.99, np.flatnonzero(shares < 0.99)


def test_without_a_turn_of_the_hue_nothing_goes_through_its_space():
    images = many_images(3)
    nothing = np.ones((4, len(images)), np.float32)
    orders = np.arange(4, dtype=np.int32)[:, None].repeat(len(images), axis=1)
    same = jax.jit(lambda images: from_planes(colour.jitter(to_planes(images), orders, nothing, False), (32, 32)))
    np.testing.assert_array_equal(same(images), images)


def test_factors_and_orders_are_drawn_uniformly():
    strengths, number = (0.8, 1.5, 0.0, 0.2), 4000
    factors = np.asarray(jax.jit(lambda key: colour.draw_factors(key, number, strengths))(jax.random.key(0)))
    for values, least, most in zip(factors, (0.2, 0.0, 1.0, -0.2), (1.8, 2.5, 1.0, 0.2)):
        assert values.min() >= least - 1e-6 and values.max() <= most + 1e-6
        assert abs(values.mean() - (least + most) / 2) <= 5 * (most - least) / np.sqrt(12 * number)
    orders = np.asarray(jax.jit(lambda key: colour.draw_order(key, number))(jax.random.key(1)))
    np.testing.assert_array_equal(np.sort(orders, axis=0), np.arange(4)[:, None].repeat(number, axis=1))
    assert all(abs(np.mean(row == place) - 0.25) < 5 * np.sqrt(3 / 16 / number) for row in orders for place in range(4))


@pytest.mark.parametrize("channels", [3, 1])
def test_grey_and_solarise_are_pillow_s(channels):
    images = many_images(channels)
    grey = by_pillow(images, lambda image, _: image.convert("L").convert(image.mode))
    np.testing.assert_array_equal(on_planes(colour.to_grey, images), grey)
    solarised = by_pillow(images, lambda image, _: ImageOps.solarize(image, 128))
    np.testing.assert_array_equal(on_planes(colour.solarise, images), solarised)


@pytest.mark.parametrize("radius", [1, 3])
def test_the_blur_is_a_gaussian_with_a_reflected_border(radius):
    images = many_images(3, 20, 32)
    sigmas = np.linspace(0.1, 2.0, len(images)).astype(np.float32)
    ours = on_planes(lambda planes: colour.blur(planes, sigmas, radius, images.shape[1:3]), images)
    for image, sigma, blurred in zip(images, sigmas, ours):
        kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / np.float64(sigma)) ** 2)
        expected = image.astype(np.float64)
        for axis in (0, 1):
            expected = convolve1d(expected, kernel / kernel.sum(), axis=axis, mode="mirror")
        assert np.abs(blurred - expected).max() < 0.501
    np.testing.assert_array_equal(ours[0], images[0])  # a deviation of a tenth of a pixel


# --- Whole views. ----------------------------------------------------------------------------------------------------


def options_of(**fields):
    return PAIRS["simclr"]._replace(**{"smallest_crop": 1.0, "jitter": 0.0, "grey": 0.0, **fields})


def views_of(images, flip=False, which=(0, 1), **fields):
    pair = make_views(options_of(**fields), flip)
    return [np.asarray(jax.jit(pair[number])(jax.random.key(number), images)) for number in which]


# Fields of views, whether images may be mirrored, and the shares of images that the two views change.
OF_VIEWS = [
    ({"jitter": 0.4}, False, (0.4,)),  # of the first view, as the second
    ({"grey": 0.4}, False, (0.4,)),
    ({"blur": (0.2, 0.6)}, False, (0.2, 0.6)),
    ({"solarise": 0.4}, False, (0.0, 0.4)),
    ({}, True, (0.5,)),
]


def test_each_change_has_its_probability_in_each_view():
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    images = np.repeat(image[None], 1000, axis=0)
    pairs = [make_views(options_of(**fields), flip)[: len(shares)] for fields, flip, shares in OF_VIEWS]
    keys = jax.random.split(jax.random.key(0), (len(pairs), 2))

    @jax.jit  # one program of all
    def seen(keys):
        return [[view(key, images) for key, view in zip(own, pair)] for own, pair in zip(keys, pairs)]

    for views, (_, _, expected) in zip(seen(keys), OF_VIEWS):
        for view, probability in zip(views, expected):
            changed = np.mean(np.any(np.asarray(view) != image, axis=(1, 2, 3)))
            spread = np.sqrt(probability * (1 - probability) / 1000)
            assert abs(changed - probability) <= 5 * spread + 0.02  # some blurs are not to be seen


def test_a_view_s_blur_reaches_as_far_as_its_radius(monkeypatch):
    monkeypatch.setattr(module, "BLUR_RADIUS", 2)
    points = np.zeros((40, 9, 9, 1), np.uint8)
    points[:, 4, 4] = 255
    (view,) = views_of(points, which=(0,), blur=(1.0, 0.0))
    assert np.abs(np.argwhere(view.max(axis=(0, 3))) - 4).max() == 2


def test_a_view_has_the_configured_crop_and_strengths():
    """Of images that are not square: by Pillow with the draws of the view's keys."""
    images, strengths = many_images(3, 20, 28), (0.4, 0.3, 0.2, 0.1)

    @jax.jit
    def draws(key):
        box_key, _, jitter_key, order_key, *_ = jax.random.split(key, 6)
        factors = colour.draw_factors(jitter_key, len(images), strengths)
        return draw_boxes(box_key, len(images), 20, 28, 0.3), factors, colour.draw_order(order_key, len(images))

    boxes, factors, order = map(np.asarray, draws(jax.random.key(0)))

    def change(image, number):
        top, left, rows, columns = boxes[number].tolist()
        image = image.crop((left, top, left + columns, top + rows)).resize((28, 20), FILTERS["bilinear"])
        for place in order[:, number]:
            image = CHANGES[place](image, float(factors[place, number]))
        return image

    fields = {"jitter": 1.0, "smallest_crop": 0.3, "interpolation": "bilinear", "strengths": strengths}
    (view,) = views_of(images, which=(0,), **fields)
    assert agreement(view, by_pillow(images, change)).min() > 0.97


def test_grey_comes_before_solarising():
    """So that an image of one colour is inverted where its luma is light."""
    images = many_images(3)
    (view,) = views_of(images, which=(1,), grey=1.0, solarise=1.0)
    expected = by_pillow(images, lambda image, _: ImageOps.solarize(image.convert("L").convert("RGB"), 128))
    np.testing.assert_array_equal(view, expected)
