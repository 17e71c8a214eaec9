#!/usr/bin/env bash
# OpenFL: the geometric median moves on towards one collaborator's tensor.
#
# `GeometricMedian` is to find the point with the least weighted sum of distances to the tensors,
# by Weiszfeld's algorithm, whose step is a mean with weights w_i / distance_i. OpenFL divides the
# weights of the step before once more, so that distances count again and again and the nearest
# tensor takes all the weight. After its default of four steps the sum of distances is larger than
# that of the plain mean; with more steps the result is one of the tensors. Compared with
# Weiszfeld's steps in NumPy. Weiszfeld's algorithm has the given weights in every step.
#
# Source: openfl/interface/aggregation_functions/geometric_median.py, `geometric_median`: `weights`
# is overwritten in the loop.
# Seen with openfl 1.9 with numpy 2.4.6. Output (tensors (0, 0), (4, 0), (0, 3), (5, 5); weights 1):
#
#     openfl 1.9
#     mean: sum of distances 12.200
#     4 steps: [0.91 1.56], sum 12.313; Weiszfeld [1.77 1.71], sum 12.072
#     12 steps: [0. 3.], sum 13.385; Weiszfeld [1.72 1.71], sum 12.071
#     50 steps: [0. 3.], sum 13.385; Weiszfeld [1.71 1.71], sum 12.071
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet openfl==1.9 numpy==2.4.6
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from importlib.metadata import version

import numpy as np
from openfl.interface.aggregation_functions.geometric_median import geometric_median

print("openfl", version("openfl"))
tensors, ones = np.array([[0.0, 0], [4, 0], [0, 3], [5, 5]]), np.ones(4)


def distances(point):
    return np.linalg.norm(tensors - point, axis=1)


def weiszfeld(steps):
    point = tensors.mean(axis=0)
    for _ in range(steps):
        weights = 1 / distances(point)
        point = weights @ tensors / weights.sum()
    return point


print(f"mean: sum of distances {distances(tensors.mean(axis=0)).sum():.3f}")
for steps in (4, 12, 50):
    theirs, ours = geometric_median(tensors, ones, maxiter=steps, ftol=0.0), weiszfeld(steps)
    print(f"{steps} steps: {np.round(theirs, 2)}, sum {distances(theirs).sum():.3f}; "
          f"Weiszfeld {np.round(ours, 2)}, sum {distances(ours).sum():.3f}")
    assert distances(theirs).sum() > distances(ours).sum() + 0.01
assert distances(theirs).min() < 1e-3
PYTHON
