#!/usr/bin/env bash
# Hugging Face datasets casts a column to ClassLabel without checking its numbers.
#
# A ClassLabel of two names may hold 0, 1 and, for "no label", -1. `Dataset.from_dict` with this feature refuses other
# numbers. `cast_column` to the same feature takes them: the column then holds a class 5 of 2, which fails only when its
# name is asked for, or where a network's output is indexed.
#
# Seen with datasets 5.2.0. Output:
#
#     datasets 5.2.0
#     from_dict: ValueError: Class label 5 greater than configured num_classes 2
#     cast_column: [0, 1, 5] with 2 names
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0
cd "$folder"
env/bin/python - <<'PYTHON'
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
label = datasets.ClassLabel(names=["no", "yes"])
try:
    datasets.Dataset.from_dict({"label": [0, 1, 5]}, features=datasets.Features({"label": label}))
except ValueError as error:
    print(f"from_dict: ValueError: {error}")
else:
    raise AssertionError("from_dict took a class 5 of 2")
cast = datasets.Dataset.from_dict({"label": [0, 1, 5]}).cast_column("label", label)
print("cast_column:", list(cast["label"]), "with", cast.features["label"].num_classes, "names")
assert list(cast["label"]) == [0, 1, 5] and cast.features["label"].num_classes == 2
PYTHON
