"""The RandAugments of published systems, as data: pools, ranges, magnitudes, probabilities, cutouts.

An entry's strength is low + (high - low) * fraction. The flavours differ in how they draw the fraction:

  flavour    operations  fraction              applied with  cutout afterwards     place
  semifl     15          m / 10                1/2           none (in the pool)    after the weak geometry
  fixmatch   14          {1, ..., m} / 10      1/2           1/2 of the side       after the weak geometry
  usb        14          uniform in [0, 1)     1             0 to 1/2 of the side  before the weak geometry
  fl2        14          uniform in [0, 1)     1             0 to 1/2 of the side  after the weak geometry
  fedlabel   16          m / 30                1             none (in the pool)    before the weak geometry
  fedmatch   13          {0, ..., M - 1} / 9   1             none                  after the weak geometry
  none       0           -                     -             none                  (the weak geometry alone)

The user chooses the number of operations and m; usb, fl2 and fedmatch ignore m. FedMatch draws M from {2, ..., 5}
for each image. The methods' variants have the settings of their papers.

SemiFL's magnitude of 10 is always the maximum: a translation by 100 pixels then blanks a 32x32 image, solarize is a
full inversion and a cutout of 40 pixels covers most of the image. All geometric operations use the nearest
neighbour; SemiFL's code shears bilinearly, FedMatch's bicubically.
"""

import math
from typing import Literal, NamedTuple

from fedjax_ssl.ops.augment.operations import Operation


class PoolEntry(NamedTuple):
    """One operation of a pool and the range of its strength."""

    operation: Operation
    low: float = 0.0  # strength at magnitude zero, in the unit of the operation
    high: float = 0.0  # strength at the maximal magnitude
    signed: bool = False  # the strength is negated with probability 1/2
    around: float = 0.0  # added to the strength after that
    of_side: bool = False  # the range is a share of the width (translate y: of the height) instead of pixels
    whole: bool = False  # the strength is rounded towards zero
    least: float = -math.inf  # smallest strength; smaller ones are raised to it
    colour_only: bool = False  # not in the pool of images with one channel


class Flavour(NamedTuple):
    """A published variant of RandAugment."""

    pool: tuple[PoolEntry, ...]  # empty: images stay as they are, whatever the number of operations and magnitude
    # Fraction: m / max, {1, ..., m} / max, U(0, 1), {0, ..., ceiling - 1} / (max - 1).
    magnitude: Literal["fixed", "up_to", "uniform", "below_ceiling"] = "fixed"
    max_magnitude: int = 10
    probability: float = 1.0  # probability that a drawn operation is applied
    # Smallest and largest final cutout, as a share of the side; None: no cutout.
    cutout: tuple[float, float] | None = None
    fill: tuple[int, int, int] = (127, 127, 127)  # red, green and blue level of a cutout
    geometry_first: bool = True  # whether the weak flip and crop come before the operations
    ceilings: tuple[int, int] = (1, 1)  # smallest and largest ceiling of an image, for 'below_ceiling'


# UDA's pool (Xie et al., 2020) as SemiFL (Diao et al., 2022) uses it. SemiFL draws the probability of every operation
# anew, uniformly from [0.2, 0.8], which amounts to a probability of exactly 1/2.
_SEMIFL = Flavour(
    pool=(
        PoolEntry(Operation.AUTO_CONTRAST),
        PoolEntry(Operation.BRIGHTNESS, 0.1, 1.9),
        PoolEntry(Operation.COLOR, 0.1, 1.9),
        PoolEntry(Operation.CONTRAST, 0.1, 1.9),
        PoolEntry(Operation.CUTOUT, 0, 40, whole=True),
        PoolEntry(Operation.EQUALIZE),
        PoolEntry(Operation.INVERT),
        PoolEntry(Operation.POSTERIZE, 0, 4, whole=True, least=1),
        PoolEntry(Operation.ROTATE, 0, 30, signed=True),
        PoolEntry(Operation.SHARPNESS, 0.1, 1.9),
        PoolEntry(Operation.SHEAR_X, 0, 0.3, signed=True),
        PoolEntry(Operation.SHEAR_Y, 0, 0.3, signed=True),
        PoolEntry(Operation.SOLARIZE, 256, 0),
        PoolEntry(Operation.TRANSLATE_X, 0, 100, signed=True),
        PoolEntry(Operation.TRANSLATE_Y, 0, 100, signed=True),
    ),
    probability=0.5,
)

# FixMatch (Sohn et al., 2020) as in its public PyTorch version, which FedRGD copied. That version never draws m itself
# (its integer range excludes the end); here m can be drawn.
_FIXMATCH = Flavour(
    pool=(
        PoolEntry(Operation.AUTO_CONTRAST),
        PoolEntry(Operation.BRIGHTNESS, 0.05, 0.95),
        PoolEntry(Operation.COLOR, 0.05, 0.95),
        PoolEntry(Operation.CONTRAST, 0.05, 0.95),
        PoolEntry(Operation.EQUALIZE),
        PoolEntry(Operation.IDENTITY),
        PoolEntry(Operation.POSTERIZE, 4, 8, whole=True),
        PoolEntry(Operation.ROTATE, 0, 30, signed=True, whole=True),
        PoolEntry(Operation.SHARPNESS, 0.05, 0.95),
        PoolEntry(Operation.SHEAR_X, 0, 0.3, signed=True),
        PoolEntry(Operation.SHEAR_Y, 0, 0.3, signed=True),
        PoolEntry(Operation.SOLARIZE, 256, 0),
        PoolEntry(Operation.TRANSLATE_X, 0, 0.3, signed=True, of_side=True, whole=True),
        PoolEntry(Operation.TRANSLATE_Y, 0, 0.3, signed=True, of_side=True, whole=True),
    ),
    magnitude="up_to",
    probability=0.5,
    cutout=(0.5, 0.5),
)

# USB (Wang et al., 2022), as in the code of SemiAnAgg (2024) and Twin-sight. The magnitude m has no effect.
_USB = Flavour(
    pool=(
        PoolEntry(Operation.AUTO_CONTRAST),
        PoolEntry(Operation.BRIGHTNESS, 0.05, 0.95),
        PoolEntry(Operation.COLOR, 0.05, 0.95),
        PoolEntry(Operation.CONTRAST, 0.05, 0.95),
        PoolEntry(Operation.EQUALIZE),
        PoolEntry(Operation.IDENTITY),
        PoolEntry(Operation.POSTERIZE, 4, 8, whole=True),
        PoolEntry(Operation.ROTATE, -30, 30),
        PoolEntry(Operation.SHARPNESS, 0.05, 0.95),
        PoolEntry(Operation.SHEAR_X, -0.3, 0.3),
        PoolEntry(Operation.SHEAR_Y, -0.3, 0.3),
        PoolEntry(Operation.SOLARIZE, 0, 256),
        PoolEntry(Operation.TRANSLATE_X, -0.3, 0.3, of_side=True),
        PoolEntry(Operation.TRANSLATE_Y, -0.3, 0.3, of_side=True),
    ),
    magnitude="uniform",
    cutout=(0.0, 0.5),
    fill=(125, 123, 114),
    geometry_first=False,
)

# FedLabel's public code (msrflute, after the EfficientNet pool); the method uses one operation, m = 10.
# The ranges are those of that code: with a larger m, posterize and solarize become weaker.
_FEDLABEL = Flavour(
    pool=(
        PoolEntry(Operation.AUTO_CONTRAST),
        PoolEntry(Operation.EQUALIZE),
        PoolEntry(Operation.INVERT),
        PoolEntry(Operation.ROTATE, 0, 30, signed=True),
        PoolEntry(Operation.POSTERIZE, 0, 4, whole=True, least=1),
        PoolEntry(Operation.SOLARIZE, 0, 256),
        PoolEntry(Operation.SOLARIZE_ADD, 0, 110),
        PoolEntry(Operation.COLOR, 0.1, 1.9),
        PoolEntry(Operation.CONTRAST, 0.1, 1.9),
        PoolEntry(Operation.BRIGHTNESS, 0.1, 1.9),
        PoolEntry(Operation.SHARPNESS, 0.1, 1.9),
        PoolEntry(Operation.SHEAR_X, 0, 0.3, signed=True),
        PoolEntry(Operation.SHEAR_Y, 0, 0.3, signed=True),
        PoolEntry(Operation.CUTOUT, 0, 40, colour_only=True),
        PoolEntry(Operation.TRANSLATE_X, 0, 100, signed=True),
        PoolEntry(Operation.TRANSLATE_Y, 0, 100, signed=True),
    ),
    max_magnitude=30,
    fill=(125, 123, 114),
    geometry_first=False,
)

# FedMatch's public code (Jeong et al., ICLR 2021). Its "equalize" does nothing, so it is the identity here.
_FEDMATCH = Flavour(
    pool=(
        PoolEntry(Operation.AUTO_CONTRAST),
        PoolEntry(Operation.IDENTITY),
        PoolEntry(Operation.ROTATE_ON_GREY, 0, 360),
        PoolEntry(Operation.SOLARIZE, 256, 231),
        PoolEntry(Operation.COLOR, 0, 0.9, signed=True, around=1),
        PoolEntry(Operation.POSTERIZE, 8.5, 4.5, whole=True),  # 8 to 4 bits, rounded to the nearest
        PoolEntry(Operation.CONTRAST, 0, 0.5, signed=True, around=1),
        PoolEntry(Operation.BRIGHTNESS, 0, 0.3, signed=True, around=1),
        PoolEntry(Operation.SHARPNESS, 0, 0.9, signed=True, around=1),
        PoolEntry(Operation.SHEAR_X, 0, 0.3, signed=True),
        PoolEntry(Operation.SHEAR_Y, 0, 0.3, signed=True),
        PoolEntry(Operation.TRANSLATE_X, 0, 0.2, signed=True, of_side=True),
        PoolEntry(Operation.TRANSLATE_Y, 0, 0.2, signed=True, of_side=True),
    ),
    magnitude="below_ceiling",
    fill=(0, 0, 0),
    ceilings=(2, 5),
)

FLAVOURS = {
    "semifl": _SEMIFL,
    "usb": _USB,
    "fl2": _USB._replace(geometry_first=True),  # (FL)^2's code (2024)
    "fixmatch": _FIXMATCH,
    "fedlabel": _FEDLABEL,
    "fedmatch": _FEDMATCH,
    "none": Flavour(pool=()),  # no RandAugment: strong augmentation is a second draw of the weak one
}
