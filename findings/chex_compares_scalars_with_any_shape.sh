#!/usr/bin/env bash
# Chex: two trees are equal if one has a number where the other has an array of any shape.
#
# `assert_trees_all_equal` and `assert_trees_all_close` compare leaves by NumPy's testing functions, which broadcast a
# scalar. A test that compares a vector of losses with a mean, or weights of shape (3,) with one weight, passes. Other
# different shapes are refused. With `strict=True`, which is not the default, shapes and dtypes are compared, too.
#
# Seen with chex 0.1.92 with jax 0.10.2, numpy 2.4.6. Output:
#
#     chex 0.1.92
#     assert_trees_all_equal: (3,) and () equal, (3,) and (1,) AssertionError; strict, (3,) and () AssertionError
#     assert_trees_all_close: (3,) and () equal, (3,) and (1,) AssertionError; strict, (3,) and () AssertionError
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet chex==0.1.92 jax==0.10.2 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import chex
import numpy as np


def outcome(check, shape, **options):
    try:
        check({"w": np.ones(3)}, {"w": np.ones(shape)}, **options)
    except AssertionError as error:
        return type(error).__name__
    return "equal"


print("chex", version("chex"))
for check in (chex.assert_trees_all_equal, chex.assert_trees_all_close):
    scalar, vector, strict = outcome(check, ()), outcome(check, (1,)), outcome(check, (), strict=True)
    print(f"{check.__name__}: (3,) and () {scalar}, (3,) and (1,) {vector}; strict, (3,) and () {strict}")
    assert scalar == "equal" and vector == strict == "AssertionError"
PYTHON
