"""Prints as JSON what several devices did; a separate process, because JAX fixes the number of devices when it starts.

python -m tests.helpers.devices_process DEVICES
"""

import json
import re
import sys

import jax

from fedjax_ssl.run.wire import bytes_per_client

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fedjax_ssl.base.devices import AXIS  # noqa: E402
from fedjax_ssl.engine.round import make_round  # noqa: E402
from fedjax_ssl.ops.batches import map_batches  # noqa: E402
from fedjax_ssl.run.experiment import build_experiment  # noqa: E402
from fedjax_ssl.run.machine import use_machine  # noqa: E402
from tests.helpers.runs import SMALL, make_fedanchor_config  # noqa: E402


def results_of(program: str, operation: str) -> list[list[int]]:
    """The result shapes of a program's collective operations of one kind."""
    found = re.findall(rf"= (.*?) {operation}(?:-start)?\(", program)
    shapes = [dimensions for shapes in found for dimensions in re.findall(r"\w+\[([\d,]*)\]", shapes)]
    return [[int(n) for n in dimensions.split(",") if n] for dimensions in shapes]


def rows_of_seeds(num_rows: int) -> dict[str, list]:
    """Maps over rows of two seeds' tables at once, three at a time per device; also returns the rows per device."""
    tables = jnp.arange(2.0 * 50 * 3).reshape(2, 50, 3)
    rows, seen = jnp.arange(num_rows)[::-1], []

    def described(table, rows):
        def describe(batch):
            seen.append(len(batch))
            return 2 * table[batch]

        return map_batches(describe, rows, 3)

    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))):
        found = jax.jit(jax.vmap(described, in_axes=(0, None)))(tables, rows)
    return {
        "found": found.tolist(),
        "expected": (2 * np.asarray(tables)[:, ::-1][:, -num_rows:]).tolist(),
        "seen": seen,
    }


def main() -> None:
    # 16 clients with 33 examples each, all of which qualify: jobs of equal length.
    overrides = {
        **SMALL,
        "num_clients": 20,
        "clients_per_round": 16,
        "client.epochs": 1,
        "confidence.threshold": -2.0,
        # This is about lanes; everything else would only take time to compile.
        "fedanchor.contrastive": False,
        "fedanchor.client_mixup": False,
        "server.epochs": 0,
    }
    config = make_fedanchor_config(**overrides)
    experiment = build_experiment(config)
    start = jax.device_get(experiment.init(experiment.data))
    hidden, found, traffics = experiment.hidden_labels, {}, []
    for name, devices, lanes in (("one", 1, int(sys.argv[1])), ("several", None, 1)):
        config.devices = devices
        with use_machine(config) as machine:
            arguments = machine.put((start, experiment.data, hidden))
            round_fn = machine.jit(make_round(experiment.problem, experiment.method, lanes))
            program = round_fn.lower(*arguments).compile()
            state, result = jax.device_get(program(*arguments))
            traffic = bytes_per_client(experiment.problem, experiment.method, start, experiment.data)
        found[name] = state, result, program.as_text()
        traffics.append(list(traffic))
    (one, result, _), (several, result_several, program) = found["one"], found["several"]
    apart = [
        float(np.max(np.abs(a - b)))
        for a, b in zip(jax.tree.leaves(one.model.params), jax.tree.leaves(several.model.params))
    ]
    report = {
        "apart": max(apart),
        "moved": max(
            float(jnp.max(jnp.abs(a - b)))
            for a, b in zip(*map(jax.tree.leaves, (one.model.params, start.model.params)))
        ),
        "lane_steps": [result.lane_steps.item(), result_several.lane_steps.item()],
        "local_steps": result_several.metrics["local_steps"].item(),
        "qualified_accuracy": [one.metrics["qualified_accuracy"].item() for one in (result, result_several)],
        "metrics_apart": {
            name: abs(value.item() - result_several.metrics[name].item()) for name, value in result.metrics.items()
        },
        "gathered": results_of(program, "all-gather"),
        "weights": [leaf.shape for leaf in jax.tree.leaves(start.model.params) if leaf.ndim > 1],
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", program)),
        "traffic": traffics,
        "rows": rows_of_seeds(37),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
