#!/usr/bin/env bash
# Flower: FedAdam steps batch normalisation's variances as it steps weights, and they go below 0.
#
# A PyTorch state_dict has running means and variances among its weights. FedAvg takes their mean.
# FedAdam, FedYogi and FedAdagrad take an optimizer's step for them, as for weights, with momentum
# in the first two. With FedAdam's defaults a variance of 1 at the server, where all clients
# measure 0.05, is below zero from round 12 to round 29: a model in evaluation mode takes the root
# of it and gives nan, although all weights are finite. The counter of batches,
# `num_batches_tracked`, becomes a fraction. Keep such arrays out of what the strategy gets.
#
# Source: flwr/serverapp/strategy/fedadam.py and fedopt.py, which treat all arrays alike. Flower's
# issue 1060 of 2022 had nan from it; NVFlare averages these arrays since its pull request 1851.
# Seen with flwr 1.42.0, NumPy 2.4.6. Output (the clients' variance is 0.05 in all rounds):
#
#     flwr 1.42.0
#     FedAvg: variance 0.050 at round 1, 0.050 at 20, below 0 at none; 10 batches are 10
#     FedAdam: variance 0.927 at round 1, -0.227 at 20, below 0 at 12 to 29; 10 batches are 0.0742
#     FedYogi: variance 0.990 at round 1, 0.635 at 20, below 0 at none; 10 batches are 0.00999
#     FedAdagrad: variance 0.900 at round 1, 0.385 at 20, below 0 at none; 10 batches are 0.1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flwr==1.42.0 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
import logging
from importlib.metadata import version

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.INFO)
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # set by Flower in a run


class Grid:
    def get_node_ids(self):
        return [1, 2]


def record(arrays):
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def reply(arrays):
    content = {"arrays": record(arrays), "metrics": MetricRecord({"num-examples": 10})}
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    return Message(RecordDict(content), reply_to=question)


print("flwr", version("flwr"))
negative = {}
for name in ("FedAvg", "FedAdam", "FedYogi", "FedAdagrad"):
    strategy, negative[name] = getattr(strategies, name)(), []
    model = {"running_var": np.ones(1, np.float32), "num_batches_tracked": np.array(0)}
    shown = {}
    for number in range(1, 41):
        strategy.configure_train(number, record(model), ConfigRecord(), Grid())
        sent = {"running_var": np.full(1, 0.05, np.float32)}
        sent["num_batches_tracked"] = np.array(10 * number)
        arrays, _ = strategy.aggregate_train(number, [reply(sent), reply(sent)])
        model = {key: array.numpy() for key, array in arrays.items()}
        variance = model["running_var"][0]
        negative[name] += [number] * bool(variance < 0)
        shown[number] = f"{variance:.3f}"
        if number == 1:
            counted = model["num_batches_tracked"]
    below = f"{negative[name][0]} to {negative[name][-1]}" if negative[name] else "none"
    assert len(negative[name]) == np.ptp(negative[name] or [1]) + bool(negative[name])
    print(f"{name}: variance {shown[1]} at round 1, {shown[20]} at 20, below 0 at {below}; "
          f"10 batches are {counted:.3g}")
assert negative["FedAvg"] == [] and len(negative["FedAdam"]) > 10
PYTHON
