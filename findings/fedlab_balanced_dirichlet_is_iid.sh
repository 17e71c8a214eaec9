#!/usr/bin/env bash
# FedLab: clients of given sizes with Dirichlet class shares have the classes of IID clients.
#
# `client_inner_dirichlet_partition` is to give each client the classes of its own Dirichlet draw,
# as in FedDyn's paper; a small alpha means one or two classes. It is what
# `CIFAR10Partitioner(balance=True, partition="dirichlet", dir_alpha=...)` calls. The class shares
# of its clients do not depend on alpha: at 0.1 the largest class of a client of 100 images has
# about 15 of them, as after a random draw. `hetero_dir_partition`, which `balance=None` calls,
# works. A method that was tested on clients of this function was tested on IID ones.
#
# Source: fedlab/utils/dataset/functional.py, `client_inner_dirichlet_partition`: it permutes the
# targets, draws places of the permuted targets class by class, and returns these places as rows
# of the data set. The permutation is never applied to them.
# Seen with fedlab 1.3.0 with numpy 2.4.6. Output (5,000 rows of 10 classes, 10 clients of 100):
#
#     fedlab 1.3.0
#     largest class of a client, iid: 0.143
#     clients of 100 images, alpha 0.1: 0.155
#     clients of 100 images, alpha 1: 0.159
#     clients of 100 images, alpha 100: 0.158
#     clients of any size, alpha 0.1: 0.595
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet numpy==2.4.6 pandas==2.3.3 setuptools==80.9.0
"$folder/env/bin/pip" install --quiet --no-deps fedlab==1.3.0 # without PyTorch, which these files do not use
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
import importlib.util
from importlib.metadata import version
from pathlib import Path

import numpy as np

# The package's own __init__ files import PyTorch; this module is loaded without them.
here = Path(importlib.util.find_spec("numpy").origin).parents[1] / "fedlab" / "utils" / "dataset"
spec = importlib.util.spec_from_file_location("fedlab.utils.dataset.functional", here / "functional.py")
functional = importlib.util.module_from_spec(spec)
spec.loader.exec_module(functional)

print("fedlab", version("fedlab"))
labels = np.random.default_rng(0).integers(0, 10, 5000)


def largest(clients):
    """The mean share of a client's largest class."""
    return np.mean([np.bincount(labels[rows]).max() / len(rows) for rows in clients.values()])


np.random.seed(0)
iid = largest(functional.homo_partition(np.full(10, 100), 5000))
print(f"largest class of a client, iid: {iid:.3f}")
for alpha in (0.1, 1.0, 100.0):
    share = largest(functional.client_inner_dirichlet_partition(labels, 10, 10, alpha, np.full(10, 100), verbose=False))
    print(f"clients of 100 images, alpha {alpha:g}: {share:.3f}")
    assert abs(share - iid) < 0.03
free = largest(functional.hetero_dir_partition(labels, 10, 10, 0.1, min_require_size=10))
print(f"clients of any size, alpha 0.1: {free:.3f}")
assert free > 0.4
PYTHON
