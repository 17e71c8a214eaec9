#!/usr/bin/env bash
# NVFlare: the global standard deviation of small numbers is 0, and more clients make it so sooner.
#
# Federated statistics compute means and standard deviations of table columns over all clients, for
# example to standardise inputs. `precision=4` is "number of precision digits". A good guess is that
# results are shown with 4 digits after the point. But each client rounds its part of the variance
# to 4 digits, and the server rounds each sum. The variance of numbers with a deviation of 0.02 is
# 0.0004. One client gets it right; with 10 clients each part is 0.00004 and rounds to 0, so that
# the deviation is 0, although all clients have the same spread. Dividing by it gives inf or nan.
# Weights, learning rates, concentrations and pixels of little contrast are such numbers.
#
# Source: nvflare/app_common/executors/statistics/statistics_task_handler.py,
# `get_variance_with_mean`, and nvflare/app_common/statistics/numeric_stats.py.
# Seen with nvflare 2.9.0 with numpy 2.4.6, pandas 3.1.1. Output (10,000 rows in all):
#
#     nvflare 2.9.0
#     deviation 0.9981; by number of clients: 1 0.9981, 10 0.9981, 100 0.9982
#     deviation 0.0200; by number of clients: 1 0.02, 10 0.0, 100 0.0
#     deviation 0.0050; by number of clients: 1 0.0, 10 0.0, 100 0.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet nvflare==2.9.0 numpy==2.4.6 pandas==3.1.1
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from importlib.metadata import version

import numpy as np
import pandas as pd
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.statistics_spec import StatisticConfig
from nvflare.app_common.app_constant import StatisticsConstants as Names
from nvflare.app_common.executors.statistics.statistics_task_handler import StatisticsTaskHandler
from nvflare.app_common.statistics.numeric_stats import get_global_stats
from nvflare.app_opt.statistics.df.df_core_statistics import DFStatisticsCore

print("nvflare", version("nvflare"))


class Table(DFStatisticsCore):
    def __init__(self, values):
        super().__init__()
        self.data = {"train": pd.DataFrame({"x": values})}


def handler(values):
    made = StatisticsTaskHandler("table")  # with its default precision, as the server
    made.stats_generator = Table(values)
    return made


def asked(clients, step, names, found):
    """What the server knows after it asked all clients for the named statistics."""
    inputs = Shareable()
    inputs[Names.STATS_GLOBAL_MEAN] = found.get(Names.STATS_MEAN)
    inputs[Names.STATS_GLOBAL_COUNT] = found.get(Names.STATS_COUNT)
    answers = {}
    for name in names:
        config = StatisticConfig(name, {})
        for number, client in enumerate(clients):
            answer = client.statistic_functions()[name]("train", "x", config, inputs, FLContext())
            answers.setdefault(name, {})[f"site-{number}"] = {"train": {"x": answer}}
    return get_global_stats(found, answers, step, {})


def statistics(values, number):
    clients = [handler(part) for part in np.split(values, number)]
    first = Names.STATS_COUNT, Names.STATS_SUM, Names.STATS_MEAN
    found = asked(clients, Names.STATS_1st_STATISTICS, first, {})
    return asked(clients, Names.STATS_2nd_STATISTICS, (Names.STATS_VAR, Names.STATS_STDDEV), found)


draws = np.random.default_rng(0).normal(size=10_000)
for spread in (1, 0.02, 0.005):
    values = spread * draws
    results = {}
    for number in (1, 10, 100):
        results[number] = statistics(values, number)[Names.STATS_STDDEV]["train"]["x"]
    shown = ", ".join(f"{number} {result}" for number, result in results.items())
    print(f"deviation {values.std(ddof=1):.4f}; by number of clients: {shown}")
    if spread == 0.02:
        assert results[1] == 0.02 and results[10] == results[100] == 0
PYTHON
