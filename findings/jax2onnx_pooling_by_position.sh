#!/usr/bin/env bash
# jax2onnx cannot export a Flax pooling whose window is given by position.
#
# Flax takes the window as second argument: `nn.max_pool(x, (2, 2))`. While it exports, jax2onnx replaces
# `nn.max_pool` and `nn.avg_pool` by functions that take the window by keyword alone, so a network that runs fails
# with a TypeError. With `window_shape=(2, 2)` it exports, and ONNX Runtime gives equal outputs.
#
# Seen with jax2onnx 0.17.0, flax 0.12.8, jax 0.10.2, onnxruntime 1.32.0. Output:
#
#     jax2onnx 0.17.0, flax 0.12.8
#     max_pool by position: TypeError, by keyword: equal
#     avg_pool by position: TypeError, by keyword: equal
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax2onnx==0.17.0 flax==0.12.8 jax==0.10.2 onnxruntime==1.32.0
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import flax.linen as nn
import numpy as np
import onnxruntime
from jax2onnx import to_onnx

print(f"jax2onnx {version('jax2onnx')}, flax {version('flax')}")
images = np.random.default_rng(0).normal(size=(1, 4, 4, 3)).astype(np.float32)


def exported(function):
    session = onnxruntime.InferenceSession(to_onnx(function, [images.shape]).SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: images})[0]


for name in ("max_pool", "avg_pool"):
    try:
        exported(lambda x: getattr(nn, name)(x, (2, 2), strides=(2, 2)))
    except TypeError:
        by_position = "TypeError"
    else:
        by_position = "exported"
    by_keyword = exported(lambda x: getattr(nn, name)(x, window_shape=(2, 2), strides=(2, 2)))
    expected = getattr(nn, name)(images, (2, 2), strides=(2, 2))
    np.testing.assert_allclose(by_keyword, expected, rtol=1e-6)
    print(f"{name} by position: {by_position}, by keyword: equal")
    assert by_position == "TypeError"
PYTHON
