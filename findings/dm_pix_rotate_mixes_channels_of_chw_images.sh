#!/usr/bin/env bash
# dm-pix: `rotate` of a CHW image turns channels into rows.
#
# The docstrings of `rotate` and `affine_transform` say that an image is "either HWC or CHW". Other
# functions of PIX have `channel_axis` to tell which. These two have not: `rotate` always turns the
# first two axes, which are the channels and the rows of a CHW image, as PyTorch has it. No error
# or warning: shape and dtype stay. A red image comes back with red, green and blue in it; a turn by
# half a circle swaps red and blue and turns the picture upside down, but not left to right. An
# augmentation that a data set of CHW arrays gets destroys colours and does not turn anything.
#
# Source: dm_pix/_src/augment.py, `rotate`: matrix [[c, s, 0], [-s, c, 0], [0, 0, 1]] for the axes
# in their order.
# Seen with dm-pix 0.4.5 with jax 0.10.2, numpy 2.4.6. Output:
#
#     dm-pix 0.4.5
#     HWC, a quarter turn: as numpy.rot90
#     CHW, a quarter turn: other numbers than numpy.rot90
#     red, green, blue of a red CHW image after a quarter turn: 0.44, 0.44, 0.44
#     CHW, half a turn: channels and rows reversed, columns as they were
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet dm-pix==0.4.5 jax==0.10.2 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import dm_pix as pix
import numpy as np

print("dm-pix", version("dm-pix"))
image = np.random.default_rng(0).random((3, 9, 9)).astype(np.float32)


def alike(one, other):
    return np.allclose(one, other, atol=1e-4)


quarter, last = np.rot90(image, axes=(1, 2)), image.transpose(1, 2, 0)
for layout, given, back in (("HWC", last, (2, 0, 1)), ("CHW", image, (0, 1, 2))):
    found = np.asarray(pix.rotate(given, np.pi / 2)).transpose(back)
    words = "as numpy.rot90" if alike(found, quarter) else "other numbers than numpy.rot90"
    print(f"{layout}, a quarter turn: {words}")
    assert alike(found, quarter) == (layout == "HWC")
red = np.stack([np.ones((9, 9)), np.zeros((9, 9)), np.zeros((9, 9))]).astype(np.float32)
colours = np.asarray(pix.rotate(red, np.pi / 2)).mean(axis=(1, 2))
print("red, green, blue of a red CHW image after a quarter turn:",
      ", ".join(f"{colour:.2f}" for colour in colours))
assert colours.min() > 0.4
half = np.asarray(pix.rotate(image, np.pi))
assert alike(half, image[::-1, ::-1]) and not alike(half, image[:, ::-1, ::-1])
print("CHW, half a turn: channels and rows reversed, columns as they were")
PYTHON
