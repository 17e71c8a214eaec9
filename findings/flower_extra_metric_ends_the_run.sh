#!/usr/bin/env bash
# Flower: a metric that only some clients report ends the run, although the line says "Skipping aggregation".
#
# In a semi-supervised federation only clients with labels have a supervised loss. If they report it beside the metrics
# of all, `FedAvg.aggregate_train` raises InconsistentMessageReplies. It says that it skips the aggregation, but
# `Strategy.start` does not catch the error: the run ends, and the round's models are lost. FedMedian does the same.
# Clients without the metric must report a number for it, and it is averaged with the others.
#
# Seen with flwr 1.42.0. Output:
#
#     flwr 1.42.0
#     equal metrics: FedAvg [2.0, 2.0], FedMedian [2.0, 2.0]
#     one more at one client: FedAvg InconsistentMessageReplies, FedMedian InconsistentMessageReplies
#     All MetricRecords must have the same keys for aggregation. This condition wasn't met. Skipping aggregation.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flwr==1.42.0
cd "$folder"
env/bin/python - <<'PYTHON'
import logging
from importlib.metadata import version

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, FedMedian
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.INFO)
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # set by Flower itself in a run


def reply(weight, **metrics):
    content = RecordDict({
        "arrays": ArrayRecord([np.full(2, weight)]),
        "metrics": MetricRecord({"num-examples": 10, **metrics}),
    })
    return Message(content, reply_to=Message(RecordDict(), dst_node_id=1, message_type="train"))


def outcome(strategy, replies):
    try:
        return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0].tolist(), ""
    except InconsistentMessageReplies as error:
        return type(error).__name__, str(error)


print("flwr", version("flwr"))
equal = [reply(1.0, loss=1.0), reply(3.0, loss=1.0)]
unequal = [reply(1.0, loss=1.0, supervised_loss=2.0), reply(3.0, loss=1.0)]
for words, replies in (("equal metrics", equal), ("one more at one client", unequal)):
    found = {strategy.__name__: outcome(strategy(), replies) for strategy in (FedAvg, FedMedian)}
    print(f"{words}: {', '.join(f'{name} {result}' for name, (result, _) in found.items())}")
    expected = [2.0, 2.0] if replies is equal else "InconsistentMessageReplies"
    assert all(result == expected for result, _ in found.values())
print(found["FedAvg"][1])
assert "Skipping aggregation" in found["FedAvg"][1]
PYTHON
