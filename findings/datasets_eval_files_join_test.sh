#!/usr/bin/env bash
# Hugging Face datasets adds files named "eval" to the split "test".
#
# A folder has train-, test- and eval- files of parquet. A good guess is three splits, with "eval" as validation.
# The package makes two: rows of "eval" and "test" are one split, "test". So validation rows are counted as test
# rows, and no line says so. A file named "dev" does make a split "validation".
#
# Seen with datasets 5.2.0. Output:
#
#     datasets 5.2.0: train 6, test 7
#     with dev: train 6, validation 5, test 7
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet datasets==5.2.0
cd "$folder"
env/bin/python - <<'PYTHON'
import pathlib

import datasets

datasets.disable_progress_bars()


def splits(**rows):
    folder = pathlib.Path("-".join(rows))
    folder.mkdir()
    for name, number in rows.items():
        datasets.Dataset.from_dict({"value": list(range(number))}).to_parquet(str(folder / f"{name}-00000.parquet"))
    return {name: len(rows) for name, rows in datasets.load_dataset(str(folder), cache_dir="cache").items()}


found = splits(train=6, test=3, eval=4)
print(f"datasets {datasets.__version__}:", ", ".join(f"{name} {number}" for name, number in found.items()))
assert found == {"train": 6, "test": 7}, found
found = splits(train=6, test=3, eval=4, dev=5)
print("with dev:", ", ".join(f"{name} {number}" for name, number in found.items()))
assert found == {"train": 6, "validation": 5, "test": 7}, found
PYTHON
