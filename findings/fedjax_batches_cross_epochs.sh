#!/usr/bin/env bash
# FedJAX: batches cross the ends of epochs, so E epochs are not E times the batches of one epoch.
#
# `ClientDataset.shuffle_repeat_batch` fills the last batch of an epoch with examples of the next one, so a batch may
# hold an example twice, and the last batch is filled from an epoch more. Ten examples in batches of four for three
# epochs are 8 full batches, 32 examples, where a loop over epochs, as in PyTorch, takes 9 batches, three of them of
# two examples. With drop_remainder=True they are 7 batches, and PyTorch's drop_last takes 6. The difference grows with
# the number of epochs, and is zero where the batch size divides every client's examples.
#
# Seen with fedjax 0.0.17 with jax 0.5.3. Output:
#
#     fedjax 0.0.17
#     drop_remainder=False: 8 batches of [4] examples, 32 in all; a loop over epochs: 9 batches, 30 examples
#     drop_remainder=True: 7 batches of [4] examples, 28 in all; a loop over epochs: 6 batches, 24 examples
#     of 1,000 seeds 607 have an example twice in a batch
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from importlib.metadata import version

import fedjax
import numpy as np

print("fedjax", version("fedjax"))
client = fedjax.ClientDataset({"x": np.arange(10)})


def batches(seed, drop):
    options = {"batch_size": 4, "num_epochs": 3, "seed": seed, "drop_remainder": drop}
    return [batch["x"].tolist() for batch in client.shuffle_repeat_batch(**options)]


for drop, expected, by_epochs in ((False, 8, "9 batches, 30 examples"), (True, 7, "6 batches, 24 examples")):
    found = batches(0, drop)
    sizes, examples = sorted(set(map(len, found))), sum(map(len, found))
    print(f"drop_remainder={drop}: {len(found)} batches of {sizes} examples, {examples} in all; "
          f"a loop over epochs: {by_epochs}")
    assert len(found) == expected and sizes == [4]
twice = sum(any(len(set(batch)) < 4 for batch in batches(seed, False)) for seed in range(1000))
print(f"of 1,000 seeds {twice} have an example twice in a batch")
assert twice > 0
PYTHON
