#!/usr/bin/env bash
# TensorFlow Datasets: row numbers mean different rows in `as_dataset` and in `as_data_source`.
#
# A split with several files is read by `as_dataset` in turns of 16 rows from each file, also without shuffling.
# `as_data_source` and slices such as train[:100] count rows as they are stored. So train[:100] is not the first 100
# rows that as_dataset("train") gives, and an index made with one reader names other rows for the other. With
# ReadConfig(interleave_cycle_length=1) both agree. A small test split has one file and shows no difference.
#
# Seen with tensorflow-datasets 4.9.10, tensorflow 2.21.0, array-record 0.8.6. Output:
#
#     tensorflow-datasets 4.9.10
#     as_dataset and as_data_source agree on the first 16 of 200 rows
#     train[:100]: 100 rows of the first 100 of as_data_source, 60 of the first 100 of as_dataset
#     interleave_cycle_length=1: same order
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tensorflow-datasets==4.9.10 tensorflow==2.21.0 array-record==0.8.6
cd "$folder"
cat > order.py <<'PYTHON'
from importlib.metadata import version

import numpy as np
import tensorflow_datasets as tfds

print("tensorflow-datasets", version("tensorflow-datasets"))


class Numbers(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"n": np.int64}))

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from ((n, {"n": n}) for n in range(200))


def builder(file_format):
    made = Numbers(data_dir=file_format, file_format=file_format)
    made.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    return made


def rows(source):
    return [int(row["n"]) for row in source]


files = builder("tfrecord")
stored = rows(builder("array_record").as_data_source("train"))
read = rows(tfds.as_numpy(files.as_dataset("train")))
part = set(rows(tfds.as_numpy(files.as_dataset("train[:100]"))))
one_by_one = tfds.ReadConfig(interleave_cycle_length=1)
alike = next(i for i in range(200) if stored[i] != read[i])
same = len(part & set(stored[:100])), len(part & set(read[:100]))
print(f"as_dataset and as_data_source agree on the first {alike} of 200 rows")
print(f"train[:100]: {same[0]} rows of the first 100 of as_data_source, {same[1]} of the first 100 of as_dataset")
assert sorted(stored) == sorted(read) and alike == 16 and same[0] == 100 and same[1] < 100
assert rows(tfds.as_numpy(files.as_dataset("train", read_config=one_by_one))) == stored
print("interleave_cycle_length=1: same order")
PYTHON
TF_CPP_MIN_LOG_LEVEL=3 env/bin/python order.py 2> messages || { cat messages; exit 1; }
