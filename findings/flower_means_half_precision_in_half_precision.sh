#!/usr/bin/env bash
# Flower: the mean of arrays in half precision is summed in half precision, and bfloat16 arrays lose their type.
#
# `aggregate_arrayrecords`, which FedAvg and its relatives call, multiplies each node's array by the node's share and
# adds the products in the array's own dtype. With 5,000 nodes a share of 0.0002 is less than half a step of float16
# above 0.5, so the mean of 5,000 ones is 0.5. Integer arrays, such as counters of batches, become float64. An array of
# ml_dtypes.bfloat16 is sent without an error and comes back as the void type V2, in which nothing can be computed.
#
# Seen with flwr 1.42.0, NumPy 2.4.6, ml_dtypes 0.6.0. Output:
#
#     flwr 1.42.0
#     mean of 100 ones: float16 0.9883, float32 1.0000
#     mean of 5000 ones: float16 0.5000, float32 0.9999
#     mean of 3 integers 7: float64 6.999999999999999
#     bfloat16: sent as bfloat16, read as |V2
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flwr==1.42.0 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import ml_dtypes
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

print("flwr", version("flwr"))


def mean(array, nodes):
    message = RecordDict({"arrays": ArrayRecord({"w": Array(array)}), "metrics": MetricRecord({"num-examples": 10})})
    return aggregate_arrayrecords([message] * nodes, "num-examples")["w"].numpy()


for nodes in (100, 5000):
    half, single = (mean(np.ones(1, dtype), nodes)[0] for dtype in (np.float16, np.float32))
    print(f"mean of {nodes} ones: float16 {half:.4f}, float32 {single:.4f}")
    assert abs(single - 1) < 1e-4 and half < 0.99
assert half == 0.5
counted = mean(np.array([7]), 3)
print(f"mean of 3 integers 7: {counted.dtype} {counted[0]}")
sent = Array(np.ones(2, ml_dtypes.bfloat16))
print(f"bfloat16: sent as {sent.dtype}, read as {sent.numpy().dtype.str}")
assert counted.dtype == np.float64 and sent.dtype == "bfloat16" and sent.numpy().dtype.str == "|V2"
PYTHON
