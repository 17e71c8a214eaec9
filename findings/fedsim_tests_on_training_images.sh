#!/usr/bin/env bash
# FedSim: the global test split holds training images, which clients have too.
#
# `BasicDataManager` is to split a data set's training part among clients and to keep its test part
# for the server, whose accuracy on the global split "test" a run reports. But that split takes its
# images from the clients' data set: for CIFAR-10 these are the first 10,000 training images. For
# MNIST, the default of `fedsim-cli fed-learn`, the test part is loaded as a second copy of the
# training part anyway. So clients train on the very images that test the model, and a method that
# only remembers images is right on all of them. Validation images from `global_valid_portion` are
# training images, too. FedSim 0.2.0 gave CIFAR-10's test images; 0.4.1 and later do not.
#
# Source: fedsim/distributed/data_management/data_manager.py, `get_global_dataset`, whose Subset is
# of `self.local_data`; basic_data_manager.py, `make_datasets`, has train=True twice for MNIST. A
# DataManager of one's own has the same `get_global_dataset`.
# Seen with fedsim 0.9.0 with torch 2.13.0, numpy 2.4.6. Output (small data sets take the place of
# torchvision's: 1,000 training and 200 test images with random labels, 10 clients):
#
#     fedsim 0.9.0
#     mnist, global test: 800 images, all training images, 800 at clients, remembering is right 100%
#     mnist, global valid: 200 images, all training images, 200 at clients, remembering is right 100%
#     cifar10, global test: 160 images, all training images, 160 at clients, remembering is right 100%
#     cifar10, global valid: 40 images, all training images, 40 at clients, remembering is right 100%
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 scikit-learn==1.9.1 tqdm==4.67.1
"$folder/env/bin/pip" install --quiet --no-deps fedsim==0.9.0
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
import sys
from importlib.metadata import version
from unittest.mock import MagicMock

import numpy as np


class Images:
    """A small data set with the interface of torchvision's; an image is its part's name and place."""

    def __init__(self, root, train, download, transform):
        self.part, self.transform = "training" if train else "test", transform
        self.targets = np.random.default_rng(train).integers(0, 10, 1000 if train else 200)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, place):
        return (self.part, int(place)), int(self.targets[place])


for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
    sys.modules[name] = MagicMock()
sys.modules["torchvision"].transforms.Compose = lambda steps: lambda image: image
for name in ("MNIST", "CIFAR10", "CIFAR100"):
    setattr(sys.modules["torchvision.datasets"], name, Images)

from fedsim.distributed.data_management import BasicDataManager

print("fedsim", version("fedsim"))
for name in ("mnist", "cifar10"):
    data = BasicDataManager(dataset=name, num_partitions=10, global_valid_portion=0.2, save_dir=f"{name}-splits")
    remembered = dict(pair for client in range(10) for pair in data.get_local_dataset(client)["train"])
    for split, pairs in data.get_global_dataset().items():
        pairs = list(pairs)
        parts = {part for (part, _), _ in pairs}
        right = np.mean([remembered.get(image) == label for image, label in pairs])
        print(f"{name}, global {split}: {len(pairs)} images, all {' and '.join(parts)} images, "
              f"{sum(image in remembered for image, _ in pairs)} at clients, remembering is right {right:.0%}")
        assert parts == {"training"} and right == 1
    held_out = [data.global_data[place] for place in range(len(data.global_data))]
    assert ({part for (part, _), _ in held_out} == {"test"}) == (name != "mnist")
PYTHON
