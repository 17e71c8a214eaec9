#!/usr/bin/env bash
# Flax: `flax.serialization` drops the byte order of NumPy arrays, and other numbers come back.
#
# Files in the IDX format (MNIST) hold big-endian numbers, and so do FITS and netCDF-3 files;
# NumPy keeps that order in the dtype (">i4"). `to_bytes` and `msgpack_serialize` store the dtype's name, "int32",
# which has no order, beside the bytes as they are. Reading takes them for the machine's own order: 1 is 16,777,216,
# and 1.0 is 4.6e-41. Nothing is raised. On the same arrays `jax.numpy.asarray` raises a TypeError, and NumPy's `save`,
# safetensors 0.8.0 and Orbax 0.12.8 keep the numbers.
#
# Seen with flax 0.12.8 with numpy 2.4.6, on a little-endian machine. Output:
#
#     flax 0.12.8
#     int32: [1, 2, 3] -> [16777216, 33554432, 50331648]
#     float32: [1.0, 2.0, 3.0] -> [4.600602988224807e-41, 8.96831017167883e-44, 2.304855714121459e-41]
#     jax.numpy.asarray: TypeError
#     safetensors: [1, 2, 3] -> [1, 2, 3]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 numpy==2.4.6 safetensors==0.8.0
cd "$folder"
env/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import serialization

assert sys.byteorder == "little"
print("flax", version("flax"))
for dtype in (">i4", ">f4"):
    array = np.array([1, 2, 3], dtype)
    target = {"x": np.zeros(3, array.dtype.newbyteorder("="))}
    found = serialization.from_bytes(target, serialization.to_bytes({"x": array}))["x"]
    assert np.array_equal(found, serialization.msgpack_restore(serialization.msgpack_serialize({"x": array}))["x"])
    print(f"{found.dtype}: {array.tolist()} -> {found.tolist()}")
    assert np.array_equal(found, array.view(found.dtype)) and not np.allclose(found, array)
array = np.array([1, 2, 3], ">i4")
try:
    jnp.asarray(array)
except TypeError:
    print("jax.numpy.asarray: TypeError")
else:
    raise AssertionError("jax.numpy.asarray took another byte order")
found = safetensors.numpy.load(safetensors.numpy.save({"x": array}))["x"]
print(f"safetensors: {array.tolist()} -> {found.tolist()}")
assert np.array_equal(found, array)
PYTHON
