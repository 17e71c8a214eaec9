#!/usr/bin/env bash
# Keras: RandAugment only turns left, by up to 180 degrees, and only shifts down and to the right.
#
# FixMatch's RandAugment turns by -30 to 30 degrees and shifts by -30% to 30%, and others have a
# random sign, too. Keras passes `factor=0.5`, its default, as the range (0, 0.5) to its own
# layers. For RandomRotation this is a share of a full turn: 0 to 180 degrees, never to the other
# side. 6 and 9 become alike. RandomTranslation shifts by up to half the image, always down and to
# the right; RandomBrightness only makes brighter. RandomRotation(0.5) itself would turn both ways,
# and RandomShear here does. A model that trains on such images sees them all lean one way.
#
# Source: keras/src/layers/preprocessing/image_preprocessing/rand_augment.py, `__init__`. The
# docstring says that factor is "the strength of the augmentation", from 0 to 1.
# Seen with keras 3.15.1 with jax 0.10.2, numpy 2.4.6. Output (2,000 images of one point each):
#
#     keras 3.15.1
#     RandomRotation(0.5): -180 to 180 degrees to the left, 50% to the left
#     RandAugment's rotation: 0 to 180 degrees to the left, 100% to the left, mean 89
#     RandAugment's translation: down 0% to 50% of the height, right 0% to 50% of the width
#     RandAugment's brightness: 0.00 to 0.50 are added, of a range of 1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
cd "$folder"
KERAS_BACKEND=jax env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
import keras
import numpy as np

print("keras", keras.__version__)
SIZE, ARM, NUMBER = 65, 12, 2000
CENTRE = SIZE // 2


def points(row, column):
    images = np.zeros((NUMBER, SIZE, SIZE, 1), np.float32)
    images[:, row - 1 : row + 2, column - 1 : column + 2] = 1
    return images


def moved(layer, images):
    """Rows and columns of the point's centre after the layer."""
    drawn = layer.get_random_transformation(images, training=True)
    found = np.asarray(layer.transform_images(images, drawn))[..., 0]
    weights = found / found.sum(axis=(1, 2), keepdims=True)
    grid = np.arange(SIZE)
    return (weights * grid[:, None]).sum((1, 2)), (weights * grid).sum((1, 2))


def angles(layer):
    """Degrees to the left by which a point right of the centre goes round it."""
    rows, columns = moved(layer, points(CENTRE, CENTRE + ARM))
    return np.degrees(np.arctan2(CENTRE - rows, columns - CENTRE))


augment = keras.layers.RandAugment(value_range=(0, 1), seed=0)
both = angles(keras.layers.RandomRotation(0.5, fill_mode="constant", seed=0))
augment.random_rotation.fill_mode = "constant"  # so that no second, mirrored point appears
turned = angles(augment.random_rotation)
for name, found in (("RandomRotation(0.5)", both), ("RandAugment's rotation", turned)):
    left = (found > -1).mean()
    mean = f", mean {found.mean():.0f}" if found is turned else ""
    print(f"{name}: {found.min():.0f} to {found.max():.0f} degrees to the left, "
          f"{left:.0%} to the left{mean}")
assert both.min() < -150 and both.max() > 150 and turned.min() > -1 and turned.max() > 150
augment.random_translation.fill_mode = "constant"
rows, columns = moved(augment.random_translation, points(10, 10))
down, right = (rows - 10) / SIZE, (columns - 10) / SIZE
print(f"RandAugment's translation: down {abs(down.min()):.0%} to {down.max():.0%} of the height, "
      f"right {abs(right.min()):.0%} to {right.max():.0%} of the width")
assert min(down.min(), right.min()) > -0.01 and min(down.max(), right.max()) > 0.45
grey = np.full((NUMBER, 2, 2, 3), 0.25, np.float32)
drawn = augment.random_brightness.get_random_transformation(grey, training=True)
added = np.asarray(augment.random_brightness.transform_images(grey, drawn)) - grey
print(f"RandAugment's brightness: {added.min():.2f} to {added.max():.2f} are added, "
      "of a range of 1")
assert added.min() >= 0 and added.max() > 0.45
PYTHON
