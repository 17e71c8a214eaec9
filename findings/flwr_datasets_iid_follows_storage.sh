#!/usr/bin/env bash
# Flower Datasets: IidPartitioner and DirichletPartitioner hand out rows in storage order, so clients differ by it.
#
# `IidPartitioner` gives each client a block of neighbouring rows. `DirichletPartitioner` cuts each class into such
# blocks; its `shuffle=True` only shuffles the rows of one client. A data set that is stored writer by writer, or by
# hospital or day, is then split by writer, although the class shares are as asked for, even with a large alpha.
# `FederatedDataset(shuffle=True)`, the default, shuffles before; a partitioner with a `dataset` of its own does not.
#
# Seen with flwr-datasets 0.6.1 with datasets 4.0.0, numpy 2.4.6. Output (rows of writers 0 to 3 at each of 4 clients):
#
#     flwr-datasets 0.6.1
#     IidPartitioner: [500, 0, 0, 0] [0, 500, 0, 0] [0, 0, 500, 0] [0, 0, 0, 500]
#     DirichletPartitioner, alpha 1e6: [494, 0, 0, 0] [6, 498, 0, 0] [0, 2, 493, 0] [0, 0, 7, 500]
#     the same, shuffled before: 100 to 145
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flwr-datasets==0.6.1 datasets==4.0.0 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import datasets
import numpy as np
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

print("flwr-datasets", version("flwr-datasets"))
WRITERS = 4
data = datasets.Dataset.from_dict({"writer": np.repeat(np.arange(WRITERS), 500), "label": np.tile(np.arange(10), 200)})


def of_writers(partitioner, data):
    """Rows of each writer at each client."""
    partitioner.dataset = data
    rows = [partitioner.load_partition(client)["writer"] for client in range(WRITERS)]
    return np.stack([np.bincount(row, minlength=WRITERS) for row in rows])


iid = of_writers(IidPartitioner(WRITERS), data)
dirichlet = of_writers(DirichletPartitioner(WRITERS, partition_by="label", alpha=1e6), data)
shuffled = of_writers(DirichletPartitioner(WRITERS, partition_by="label", alpha=1e6), data.shuffle(seed=0))
print("IidPartitioner:", *iid.tolist())
print("DirichletPartitioner, alpha 1e6:", *dirichlet.tolist())
print(f"the same, shuffled before: {shuffled.min()} to {shuffled.max()}")
assert np.array_equal(iid, 500 * np.eye(WRITERS)) and np.diag(dirichlet).min() > 450 and shuffled.max() < 200
PYTHON
