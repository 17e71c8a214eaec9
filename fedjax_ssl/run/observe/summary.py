"""The records of a run: a line for each round, and the summary."""

import math
import pathlib
import platform
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base import devices
from fedjax_ssl.engine.measures import OF_OUTPUTS, accuracy_by_domain, measure_outputs, measure_predictions
from fedjax_ssl.engine.round import RoundResult
from fedjax_ssl.records.clients import over_clients, test_figures
from fedjax_ssl.records.lines import METRICS_SUM
from fedjax_ssl.records.origin import packages, read_starts
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run.privacy import Accountant
from fedjax_ssl.run.wire import Traffic

# The times in timings.jsonl: rounds, compilation, initialisation with pre-training, writing checkpoints.
SECONDS = ("seconds", "compile_seconds", "init_seconds", "checkpoint_seconds")


def to_record(metrics: dict[str, np.ndarray], traffic: Traffic, accountant: Accountant | None = None) -> dict[str, Any]:
    """The line of metrics.jsonl for one round. With noise on the uploads it contains `epsilon` so far."""
    record = {name: value.tolist() for name, value in metrics.items()}
    present = record.get("cohort_size", traffic.jobs)
    # A method with `wire_bytes` has its bytes among its metrics.
    down = round(record.pop("bytes_down", traffic.down * present))
    up = round(record.pop("bytes_up", traffic.up * record["uploads"]))
    # Clients that only fill up the selection are not asked for statistics, and those that do not answer send none.
    asked = traffic.asked - (traffic.jobs - present)
    answering = asked - (present - record.get("answers", present)) * (traffic.turns == 1)  # one job's answer suffices
    return {
        "round": record.pop("round"),
        **record,
        **({} if accountant is None else {"epsilon": accountant.epsilon(metrics["round"].item())}),
        "bytes_down": down + traffic.statistics_down * asked // traffic.asked,
        "bytes_up": up + traffic.statistics_up * answering // traffic.asked,
    }


def to_timing(result: RoundResult, seconds: float, seeds: int) -> dict[str, Any]:
    """The line of timings.jsonl for one round, with the lane steps, which depend on the machine as seconds do.

    `seconds` are of all seeds that train in one program; the line has a seed's share.
    """
    number, lane_steps = result.metrics["round"].item(), result.lane_steps.item()
    return {"round": number, "seconds": seconds / seeds, "seeds": seeds, "lane_steps": lane_steps}


def what_went_wrong(line: dict[str, Any]) -> str:
    """Why a run must stop after the round of this line."""
    losses = ", ".join(f"{name} {line[name]}" for name in line if name.endswith("_loss"))
    if line["dropped_uploads"] and line["dropped_uploads"] == line["uploads"]:
        return f"round {line['round']}: none of the {line['uploads']} uploads is usable ({losses})"
    return f"round {line['round']}: the global state is not finite ({losses})"


def summarise(config: ConfigDict, folder: Workdir, ended_by: str) -> dict[str, Any]:
    """The contents of summary.json, from the records in the folder; `ended_by`: see `fedjax_ssl.records.ending`."""
    run = read_run(folder.path)
    last, tested, (best, best_round) = run.metrics[-1], run.tests()[-1], run.best()
    measured = [f"{run.measured}_{name}" for name in ("accuracy", *run.measures())]
    labels = {name: last[name] for name in last if name.startswith(("pseudo_label", "qualified"))}
    return {
        "method": config.method,
        "seed": config.seed,
        "labels_revealed": run.labels_revealed,
        "rounds": last["round"],
        "ended_by": ended_by,
        METRICS_SUM: folder.checksum(last["round"]),
        **{name: tested[name] for name in measured if name in tested},
        **{name: figure for name, figure in _tested(config, run).items() if name not in last},
        f"best_{measured[0]}": best,
        "best_round": best_round,
        **_over_clients(run),
        **labels,
        **{name: run.seconds(name) for name in SECONDS},
        **{name: sum(line[name] for line in run.metrics) for name in ("bytes_down", "bytes_up", "dropped_uploads")},
        **({"epsilon": last["epsilon"], "delta": config.privacy.delta} if "epsilon" in last else {}),
        "device": f"{jax.devices()[0].device_kind} x {devices.num_devices()}",
        "backend": devices.platform(),
        "versions": {
            "python": platform.python_version(),
            **{name: packages().get(name, "unknown") for name in ("fedjax_ssl", "jax", "flax", "optax")},
        },
        **_came_from(folder.path),
    }


def _over_clients(run: RunRecords) -> dict[str, float | None]:
    """Accuracy over clients: of the last model, and on clients' own test images."""
    found = run.client_accuracy()
    of_mixes = {} if found is None else {f"client_accuracy_{name}": each for name, each in over_clients(found).items()}
    return {**of_mixes, **test_figures(run.client_tests())}


def _came_from(folder: pathlib.Path) -> dict[str, Any]:
    """Code, command and machine of the newest start; origin.json lists all starts."""
    starts = read_starts(folder)
    names = ("command", "commit", "dirty", "start", "end", "host", "processor", "packages")
    return {name: getattr(starts[-1], name) if starts else None for name in names}


def _tested(config: ConfigDict, run: RunRecords) -> dict[str, float | None]:
    """The last model's test figures from the last snapshot: those that a last round with a test on this set lacks."""
    names = ["accuracy", "loss", *run.measures()]
    counts, taken = run.class_counts(), run.last_test_outputs()
    if not counts or not taken:  # deleted or damaged
        return {f"test_{name}": None for name in names}
    num_training = counts["server"] + counts["clients"].sum(axis=0)
    num_classes = len(num_training)
    shape = (num_classes, num_classes)
    pairs = np.ravel_multi_index((taken["labels"], taken["predictions"]), shape)
    matrix = jax.device_put(np.bincount(pairs, minlength=math.prod(shape)).reshape(shape))  # compiles no program
    right, domains = taken["predictions"] == taken["labels"], taken.get("domains", np.empty(0, str))
    figures = {"accuracy": np.mean(right), "loss": taken.get("loss", np.nan)}
    figures |= accuracy_by_domain(right, {str(name): domains == name for name in np.unique(domains)})
    figures |= measure_predictions(config.eval_measures, matrix, num_training)
    if set(config.eval_measures) & set(OF_OUTPUTS):  # scikit-learn takes a second to import
        scores = [taken.get(name) for name in ("confidences", "ranks")]
        figures |= measure_outputs(taken["labels"], taken["predictions"], num_classes, *scores)
    if "auc" in config.eval_measures:
        figures["auc"] = taken.get("auc", np.nan)
    # A snapshot has no features of labelled images, which kNN accuracy needs.
    figures = {name: float(figures.get(name, math.nan)) for name in names}
    return {f"test_{name}": value if math.isfinite(value) else None for name, value in figures.items()}
