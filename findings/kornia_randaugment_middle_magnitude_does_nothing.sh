#!/usr/bin/env bash
# kornia: RandAugment's magnitude 15 of 30 leaves colour, contrast, brightness and sharpness alone.
#
# In RandAugment, and in torchvision's and timm's, a larger magnitude changes an image more, and
# small ones hardly change it. kornia maps `m` from 0 to 30 to factors from 0.1 to 1.9 for these four
# of its 15 operations, and 1 is the image itself. So m=15 does nothing in them, m=1 is as strong as
# m=29, and with every m below 15 brightness makes images darker and never brighter. Rotations,
# shears and shifts grow with m as elsewhere. A search over m compares other things than the paper's.
# TrivialAugment draws its factors from the whole range and is not concerned.
#
# Source: kornia/augmentation/auto/rand_augment/rand_augment.py: `default_policy`, and
# `mag = m * (maxval - minval) + minval` in `forward_parameters`.
# Seen with kornia 0.9.0 with torch 2.13.0. Output (largest change of a pixel from 0 to 1, and the
# change of the mean, of one random image of 32x32):
#
#     kornia 0.9.0
#     color: m=1 0.84, +0.21; m=10 0.30, +0.07; m=15 0.00, +0.00; m=20 0.23, -0.05; m=29 0.45, -0.09
#     contrast: m=1 0.84, -0.42; m=10 0.30, -0.15; m=15 0.00, +0.00; m=20 0.23, +0.12; m=29 0.46, +0.23
#     brightness: m=1 0.84, -0.49; m=10 0.30, -0.26; m=15 0.00, +0.00; m=20 0.30, +0.26; m=29 0.84, +0.49
#     sharpness: m=1 0.39, -0.00; m=10 0.14, -0.00; m=15 0.00, +0.00; m=20 0.11, +0.00; m=29 0.27, +0.00
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet kornia==0.9.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from importlib.metadata import version

import torch
from kornia.augmentation.auto import RandAugment
from kornia.augmentation.auto.rand_augment.rand_augment import default_policy

print("kornia", version("kornia"))
image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ranges = {name: (low, high) for ((name, low, high),) in default_policy}
for name in ("color", "contrast", "brightness", "sharpness"):
    figures = {}
    for m in (1, 10, 15, 20, 29):
        changed = RandAugment(n=1, m=m, policy=[[(name, *ranges[name])]])(image)
        figures[m] = float((changed - image).abs().max()), float(changed.mean() - image.mean())
    print(f"{name}:", "; ".join(f"m={m} {most:.2f}, {mean:+.2f}" for m, (most, mean) in figures.items()))
    assert figures[15][0] < 1e-6 and figures[1][0] > figures[10][0] > 0.1 and figures[29][0] > figures[20][0] > 0.1
    if name in ("contrast", "brightness"):
        assert figures[1][1] < figures[10][1] < 0 < figures[20][1]
PYTHON
