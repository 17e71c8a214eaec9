#!/usr/bin/env bash
# sslearn: the pick of the most confident rows of each class takes rows of other classes.
#
# Co-training by committee gives labels to the rows that the committee is most sure of, for each
# class as many as its share among the labelled rows. `choice_with_proportion` is to pick them. It
# sorts all rows by confidence and then takes, for a class, those places of the sorted list whose
# numbers are rows of the class. So the rows that it picks have nothing to do with the class. If
# the committee is surer of one class, only this class is picked, whatever the shares. If rows are
# stored class by class, the first class gets rows of middling confidence. Picked rows get the
# class that the committee predicts for them, so labels do not change, but the classes' shares do.
#
# Source: sslearn/utils.py: np.argsort(predictions)[instances], where the places of `instances` are
# those of rows, not of ranks. `CoTrainingByCommittee` in sslearn/wrapper/_co.py calls it for its
# pool of 100 rows. There the shares add up to 1 and three rows of each class are added first, so
# that most of the pool is picked anyway, and the harm is less than in a call with smaller shares.
# Seen with sslearn 1.1.0 with numpy 2.4.6, scikit-learn 1.9.1. Output:
#
#     sslearn 1.1.0
#     8 rows, a quarter of them for each of 2 classes
#       class 0: the surest rows are [3, 1], picked are [4, 2], of classes [1, 0]
#       class 1: the surest rows are [6, 7], picked are [6, 3], of classes [1, 0]
#     1000 rows, 100 wanted of each class, surer of class 0: picked 200 of class 0, 0 of class 1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet sslearn==1.1.0 scikit-learn==1.9.1 numpy==2.4.6 \
    scipy==1.17.1 pandas==3.1.1 statsmodels==0.15.0
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from sslearn.utils import choice_with_proportion

print("sslearn", version("sslearn"))


def surest(confidence, classes, wanted):
    rows = {one: np.flatnonzero(classes == one) for one in wanted}
    return {one: rows[one][np.argsort(-confidence[rows[one]], kind="stable")][:number].tolist()
            for one, number in wanted.items()}


confidence = np.array([0.50, 0.90, 0.60, 0.95, 0.70, 0.55, 0.99, 0.80])
classes = np.array([0, 0, 0, 0, 1, 1, 1, 1])
picked = choice_with_proportion(confidence, classes, {0: 0.25, 1: 0.25}).reshape(2, 2).tolist()
print("8 rows, a quarter of them for each of 2 classes")
for one, rows in surest(confidence, classes, {0: 2, 1: 2}).items():
    print(f"  class {one}: the surest rows are {rows}, picked are {picked[one]}, "
          f"of classes {classes[picked[one]].tolist()}")
assert picked == [[4, 2], [6, 3]]

draw = np.random.default_rng(0)
classes = draw.permutation(np.repeat([0, 1], 500))
confidence = np.where(classes == 0, draw.uniform(0.9, 1, 1000), draw.uniform(0.5, 0.9, 1000))
picked = choice_with_proportion(confidence, classes, {0: 0.1, 1: 0.1})
counts = np.bincount(classes[picked], minlength=2)
print("1000 rows, 100 wanted of each class, surer of class 0: "
      f"picked {counts[0]} of class 0, {counts[1]} of class 1")
assert counts.tolist() == [200, 0]
PYTHON
