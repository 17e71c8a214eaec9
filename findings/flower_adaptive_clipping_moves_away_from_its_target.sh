#!/usr/bin/env bash
# Flower: the norm of adaptive clipping moves away from its target: to 0, or up without end.
#
# Adaptive clipping is to find a norm that a given share of the updates does not exceed, such as
# half of them. Andrew et al. count the updates that are at most as long as the norm C, a share b,
# and set C to C exp(-0.2 (b - 0.5)). Flower counts those that are longer, which were clipped, and
# puts their share into the same formula, so that the sign is wrong. If all updates are clipped, C
# becomes smaller, and all are clipped again: from the default, 0.1, it falls to 0.0018 in 40 rounds
# of updates of length 1, and the model hardly moves any more. From 2 it grows without end, and
# nothing is clipped. The variant that clips at the clients has the same rule. Nothing is said.
#
# Source: flwr/serverapp/strategy/dp_adaptive_clipping.py, `_geometric_update`, gets the share of
# updates for which `adaptive_clip_inputs_inplace`, flwr/supercore/differential_privacy.py, says
# `scaling_factor < 1`. The rule: Andrew et al., "Differentially Private Learning with Adaptive
# Clipping", NeurIPS 2021, algorithm 1.
# Seen with flwr 1.42.0, NumPy 2.4.6. Output (ten updates of lengths 0.55 to 1.45 in each round, no
# noise; the norm after 0, 10, 20 and 40 rounds):
#
#     flwr 1.42.0
#     from 0.1, Flower: 0.1000 0.0368 0.0135 0.0018
#     from 0.1, Andrew et al.: 0.1000 0.2718 0.6959 0.9583
#     from 2.0, Flower: 2.0000 5.4366 14.7781 109.1963
#     from 2.0, Andrew et al.: 2.0000 1.0759 1.0337 1.0337
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet flwr==1.42.0 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
import logging
import math
from importlib.metadata import version

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.WARNING)
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # set by Flower in a run
LENGTHS = np.linspace(0.55, 1.45, 10)
SHOWN = 0, 10, 20, 40


class Grid:
    def get_node_ids(self):
        return [1, 2]


def record(array):
    return ArrayRecord({"w": Array(array)})


def reply(array):
    content = {"arrays": record(array), "metrics": MetricRecord({"num-examples": 10})}
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    return Message(RecordDict(content), reply_to=question)


def flowers(start):
    """The norm after each round."""
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.0, 10, start)
    model, norms = np.zeros(1), [start]
    for number in range(1, 41):
        strategy.configure_train(number, record(model), ConfigRecord(), Grid())
        arrays, _ = strategy.aggregate_train(number, [reply(model + own) for own in LENGTHS])
        model = arrays["w"].numpy()
        norms.append(strategy.clipping_norm)
    return norms


def andrews(start):
    norms = [start]
    for _ in range(40):
        norms.append(norms[-1] * math.exp(-0.2 * (np.mean(LENGTHS <= norms[-1]) - 0.5)))
    return norms


print("flwr", version("flwr"))
for start in (0.1, 2.0):
    for name, rule in (("Flower", flowers), ("Andrew et al.", andrews)):
        norms = rule(start)
        print(f"from {start}, {name}:", *(f"{norms[number]:.4f}" for number in SHOWN))
        below = np.mean(LENGTHS <= norms[-1])
        assert below == (start > 1) if rule is flowers else 0.4 <= below <= 0.6
PYTHON
