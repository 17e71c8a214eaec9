#!/usr/bin/env bash
# Grain: each worker batches its own records, so more workers give other batches, or none at all.
#
# `DataLoader(worker_count=W)` hands record i to worker i mod W, and each worker makes batches of
# what it has. A good guess is that workers only make the same batches faster. But the records of a
# batch change with W, and so does the number of batches: each worker has a short last batch. With
# drop_remainder=True each worker drops its own. A client with 20 examples and batches of 8 trains
# on 2 batches with up to 2 workers, and on none with 4, without an error or a warning.
# `mp_prefetch` does the same if `batch` comes after `to_iter_dataset`, and not if before.
#
# Source: grain/_src/python/data_loader.py, `DataLoader`; grain.transforms.Batch has no docstring.
# Seen with grain 0.2.18 with numpy 2.4.6. Output:
#
#     grain 0.2.18
#     drop_remainder=False, 0 workers: 3 batches, 20 records, first [0, 1, 2, 3, 4, 5, 6, 7]
#     drop_remainder=False, 2 workers: 4 batches, 20 records, first [0, 2, 4, 6, 8, 10, 12, 14]
#     drop_remainder=False, 4 workers: 4 batches, 20 records, first [0, 4, 8, 12, 16]
#     drop_remainder=True, 0 workers: 2 batches, 16 records, first [0, 1, 2, 3, 4, 5, 6, 7]
#     drop_remainder=True, 2 workers: 2 batches, 16 records, first [0, 2, 4, 6, 8, 10, 12, 14]
#     drop_remainder=True, 4 workers: 0 batches, 0 records, first none
#     mp_prefetch, 4 workers: batch before to_iter_dataset 2 batches, after 0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
cd "$folder"
cat > batches.py <<'PYTHON'
from importlib.metadata import version

import grain

RECORDS = list(range(20))


def loader(workers, drop):
    sampler = grain.samplers.IndexSampler(len(RECORDS), shuffle=False, num_epochs=1, seed=0)
    batch = grain.transforms.Batch(8, drop_remainder=drop)
    return grain.DataLoader(
        data_source=RECORDS, sampler=sampler, operations=[batch], worker_count=workers
    )


def main():
    print("grain", version("grain"))
    numbers = {}
    for drop in (False, True):
        for workers in (0, 2, 4):
            batches = [batch.tolist() for batch in loader(workers, drop)]
            numbers[drop, workers] = len(batches)
            first = batches[0] if batches else "none"
            print(f"drop_remainder={drop}, {workers} workers: {len(batches)} batches, "
                  f"{sum(map(len, batches))} records, first {first}")
    assert numbers == {(False, 0): 3, (False, 2): 4, (False, 4): 4,
                       (True, 0): 2, (True, 2): 2, (True, 4): 0}
    four, source = grain.MultiprocessingOptions(num_workers=4), grain.MapDataset.source(RECORDS)
    before = source.batch(8, drop_remainder=True).to_iter_dataset().mp_prefetch(four)
    after = source.to_iter_dataset().batch(8, drop_remainder=True).mp_prefetch(four)
    before, after = len(list(before)), len(list(after))
    print(f"mp_prefetch, 4 workers: batch before to_iter_dataset {before} batches, after {after}")
    assert (before, after) == (2, 0)


if __name__ == "__main__":  # workers import this file
    main()
PYTHON
env/bin/python batches.py 2> messages || { cat messages; exit 1; }
