#!/usr/bin/env bash
# augmax: with p=0.5 `Rotate` turns images one way only, and with p=0.25 never by less than half.
#
# `Rotate(angle_range, p)` turns an image by a random angle, with probability p. One would expect
# the angles of the turned images to fill the range, whatever p is. But the same random key decides
# whether to turn and by how much. An image is turned if a number u is below p, and its angle is the
# lower end of the range plus u times its width. So only the lower share p of the range is used:
# with (-30, 30) and p=0.5 all turned images turn the same way. All images of a data set then lean
# to one side, and the mean angle is not 0. With p=1, the default, all is well. The docstring says
# "p (float): Probability of applying the transformation".
#
# Source: augmax/geometric.py, `Rotate.transform_coordinates`, uses `rng` for both draws. Other
# transformations, such as `RandomBrightness`, split it first.
# Seen with augmax 0.4.1 with jax 0.10.2, numpy 2.4.6. Output (2,000 keys, a range of -30 to 30):
#
#     augmax 0.4.1
#     p=1.00: 100% turned, by -30.0 to 30.0 degrees, 49% to the left, mean 0.2
#     p=0.75: 75% turned, by -30.0 to 15.0 degrees, 32% to the left, mean -7.2
#     p=0.50: 51% turned, by -30.0 to -0.0 degrees, 0% to the left, mean -14.3
#     p=0.25: 24% turned, by -30.0 to -15.0 degrees, 0% to the left, mean -22.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet augmax==0.4.1 jax==0.10.2 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import augmax
import jax
import jax.numpy as jnp
import numpy as np

print("augmax", version("augmax"))
keys = jax.random.split(jax.random.key(0), 2000)
image, centre = jnp.zeros((65, 65, 1)), 32.0
point = jnp.array([[centre, centre + 20]])  # row and column, right of the centre


def angles(p):
    """Degrees by which the point went round the centre, to the left if positive."""
    kinds = [augmax.InputType.IMAGE, augmax.InputType.KEYPOINTS]
    turn = augmax.Chain(augmax.Rotate((-30, 30), p=p), input_types=kinds)
    moved = np.asarray(jax.vmap(lambda key: turn(key, [image, point])[1])(keys))[:, 0] - centre
    return np.degrees(np.arctan2(-moved[:, 0], moved[:, 1]))


left = {}
for p in (1.0, 0.75, 0.5, 0.25):
    found = angles(p)
    turned = found[abs(found) > 0.01]
    left[p] = (turned > 0).mean()
    print(f"p={p:.2f}: {len(turned) / len(found):.0%} turned, by {turned.min():.1f} to "
          f"{turned.max():.1f} degrees, {left[p]:.0%} to the left, mean {turned.mean():.1f}")
    assert abs(len(turned) / len(found) - p) < 0.05
    assert turned.max() - turned.min() < 60 * p + 0.1
assert 0.45 < left[1.0] < 0.55 and left[0.5] in (0, 1) and left[0.25] in (0, 1)
PYTHON
