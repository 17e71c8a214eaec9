#!/usr/bin/env bash
# Orbax: a NumPy array as restore target gives its dtype, but its shape is ignored.
#
# `StandardCheckpointer.restore(path, target)` takes a tree of arrays or of jax.ShapeDtypeStruct. With the latter,
# another shape is refused. With a NumPy array of another shape the stored array comes back in its own shape, and
# only the dtype is the target's. Numbers are cast to that dtype without a check, so 300.0 as int8 is 44.
#
# Seen with orbax-checkpoint 0.12.8 with jax 0.10.2. Output:
#
#     orbax-checkpoint 0.12.8
#     ShapeDtypeStruct (2,): ValueError
#     NumPy array (2,), int8: shape (3,), int8, [0, 1, 44]
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2
cd "$folder"
env/bin/python - <<'PYTHON'
import pathlib
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

print("orbax-checkpoint", version("orbax-checkpoint"))
path = pathlib.Path("checkpoint").absolute()
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(path, {"w": jnp.array([0.5, 1.7, 300.0])})
checkpointer.wait_until_finished()
try:
    checkpointer.restore(path, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
except ValueError:
    print("ShapeDtypeStruct (2,): ValueError")
else:
    raise AssertionError("another shape was restored")
found = checkpointer.restore(path, {"w": np.zeros(2, np.int8)})["w"]
print(f"NumPy array (2,), int8: shape {found.shape}, {found.dtype}, {found.tolist()}")
assert found.shape == (3,) and found.dtype == np.int8 and found.tolist() == [0, 1, 44]
checkpointer.close()
PYTHON
