"""Several seeds in one program against the same seeds alone: test accuracies after some rounds, seed by seed.

    python benchmarks/seeds_together.py --seeds=0,1,2 --rounds=20 --out=seeds_together.json

The first round agrees to rounding (a test asserts it); then training is chaotic, and what can be compared is accuracy.
Each figure is the mean over the last five rounds, in percent. Prints `seeds together-alone X`, the largest difference
of a seed's two figures, beside `seeds spread X`, the standard deviation over the seeds that run alone.
"""

import argparse
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from harness import describe, write

from fedjax_ssl.config import for_seed, load_config_file
from fedjax_ssl.data import stack_seeds
from fedjax_ssl.engine.dispatch import make_dispatch, over_seeds
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.run.experiment import build_experiments, initialise

CONFIG = pathlib.Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"
OF_LAST_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--out", default="seeds_together.json")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    config = load_config_file(options.config)
    experiments = build_experiments([for_seed(config, seed) for seed in seeds], [None] * len(seeds))
    first = experiments[0]
    start = jax.jit(lambda data: initialise(first, data))
    states = [start(experiment.data) for experiment in experiments]
    round_fn = make_round(first.problem, first.method, options.lanes)

    alone_fn = jax.jit(make_dispatch(round_fn, options.rounds))
    alone = []
    for state, experiment in zip(states, experiments):
        result = alone_fn(state, experiment.data, first.hidden_labels, jnp.int32(options.rounds))
        alone.append(np.asarray(result.results.metrics["test_accuracy"]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    data = stack_seeds([experiment.data for experiment in experiments])
    together_fn = jax.jit(make_dispatch(over_seeds(round_fn), options.rounds))
    result = together_fn(stacked, data, first.hidden_labels, jnp.int32(options.rounds))
    together = np.asarray(result.results.metrics["test_accuracy"]).T

    rows = []
    for seed, own, shared in zip(seeds, alone, together):
        figures = [100 * float(accuracies[-OF_LAST_ROUNDS:].mean()) for accuracies in (own, shared)]
        rows.append(
            {"seed": seed, "alone": figures[0], "together": figures[1], "first round apart": own[0] - shared[0]}
        )
        rows[-1]["first round apart"] = abs(float(rows[-1]["first round apart"]))
    print(f"seeds together-alone {max(abs(row['alone'] - row['together']) for row in rows):.2f}")
    print(f"seeds spread {statistics.stdev(row['alone'] for row in rows):.2f}")
    write(options.out, describe(), rows)


if __name__ == "__main__":
    main()
