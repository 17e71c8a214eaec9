#!/usr/bin/env bash
# Optax: the label -1, which marks an image without a label, is trained as the last class.
#
# Semi-supervised data sets mark unlabelled examples with -1. `softmax_cross_entropy_with_integer_labels` reads a
# label as a NumPy index: -1 is the last class, -2 the one before, without an error. The model learns to predict the
# last class for all unlabelled examples. A label of C or more gives NaN. PyTorch refuses -1, and
# `jax.nn.one_hot(-1)` is a row of zeros, so the same code with one-hot labels has a loss and a gradient of 0.
#
# Seen with optax 0.2.8 with jax 0.10.2. Output:
#
#     optax 0.2.8
#     label  2: loss 3.1698, gradient 0.844, 0.114, -0.958
#     label -1: loss 3.1698, gradient 0.844, 0.114, -0.958
#     label  3: loss nan
#     one_hot(-1): loss 0.0000
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet optax==0.2.8 jax==0.10.2
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax

print("optax", version("optax"))
logits = jnp.array([2.0, 0.0, -1.0])
losses = {label: optax.softmax_cross_entropy_with_integer_labels(logits, label) for label in (2, -1, 3)}
slopes = {label: jax.grad(optax.softmax_cross_entropy_with_integer_labels)(logits, label) for label in (2, -1)}
for label, slope in slopes.items():
    gradient = ", ".join(f"{number:.3f}" for number in slope.tolist())
    print(f"label {label:2}: loss {losses[label]:.4f}, gradient {gradient}")
print(f"label  3: loss {losses[3]:.4f}")
of_zeros = optax.softmax_cross_entropy(logits, jax.nn.one_hot(-1, 3))
print(f"one_hot(-1): loss {abs(of_zeros):.4f}")
assert losses[2] == losses[-1] and np.array_equal(slopes[2], slopes[-1])
assert np.isnan(losses[3]) and of_zeros == 0
PYTHON
