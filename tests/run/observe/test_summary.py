"""A round's line: bytes of clients that are absent or do not answer, epsilon. A made-up run's summary, by NumPy."""

import contextlib

import jax
import numpy as np
import pytest

from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.records.lines import METRICS, TIMINGS
from fedjax_ssl.records.snapshots import save_snapshot
from fedjax_ssl.records.workdir import CLASS_COUNTS, SNAPSHOTS, Workdir
from fedjax_ssl.run.about import about
from fedjax_ssl.run.observe.summary import summarise, to_record
from fedjax_ssl.run.privacy import Accountant
from fedjax_ssl.run.wire import Traffic
from tests.helpers.runs import make_tiny_config


@pytest.mark.parametrize(("turns", "counts", "down", "up"), [
    (1, {}, 4 * 100 + 5 * 7, 2 * 10 + 5 * 3),
    (1, {"cohort_size": 3}, 3 * 100 + 4 * 7, 2 * 10 + 4 * 3),  # one of four rows has no client
    (1, {"answers": 2}, 4 * 100 + 5 * 7, 2 * 10 + 3 * 3),  # two of four clients hear, but send nothing
    (1, {"cohort_size": 3, "answers": 2}, 3 * 100 + 4 * 7, 2 * 10 + 3 * 3),
    (2, {"answers": 2}, 4 * 100 + 5 * 7, 2 * 10 + 5 * 3),  # they may have answered in another turn
])  # fmt: skip
def test_who_is_not_asked_or_does_not_answer_sends_no_statistics(turns, counts, down, up):
    """Four jobs of 100 bytes down and 10 up; five clients exchange statistics, each of 7 bytes down and 3 up."""
    traffic = Traffic(jobs=4, down=100, up=10, statistics_down=35, statistics_up=15, asked=5, turns=turns)
    metrics = {name: np.array(value) for name, value in {"round": 1, "uploads": 2, **counts}.items()}
    accountant = Accountant(make_tiny_config(**{"privacy.noise": 4.0, "aggregation.clip_norm": 0.5}))
    line = to_record(metrics | {"round": np.array(2)}, traffic, accountant)
    assert (line["bytes_down"], line["bytes_up"]) == (down, up)
    assert line["epsilon"] == accountant.epsilon(2) > accountant.epsilon(1)


def test_a_summary_has_sums_of_all_rounds_and_figures_of_the_last_and_the_first_best(tmp_path, monkeypatch):
    config = make_tiny_config(num_rounds=4)
    accuracies, numbers = [0.2, 0.6, 0.6, 0.5], np.array([1, 2, 4, 8])
    sums = {"bytes_down": 100 * numbers, "bytes_up": 10 * numbers, "dropped_uploads": numbers - 1}
    last = {"epsilon": numbers / 2, "pseudo_label_accuracy": numbers / 10, "qualified_per_client": numbers / 5}
    columns = {"test_accuracy": accuracies, **sums, **last}
    lines = [{"round": n, **{name: float(of[n - 1]) for name, of in columns.items()}} for n in (1, 2, 3, 4)]
    with contextlib.closing(Workdir(tmp_path / "run", config.to_dict())) as folder:
        folder.decide(config.to_dict(), about(config))
        folder.begin(0)
        folder.append(METRICS, lines)
        folder.append(TIMINGS, [{"round": 0, "compile_seconds": 3.0, "init_seconds": 2.0}])
        folder.append(TIMINGS, [{"round": n, "seconds": 0.5 * n} for n in (1, 2, 3, 4)])
        folder.append(TIMINGS, [{"round": n, "checkpoint_seconds": 0.25} for n in (2, 4)])
        monkeypatch.setattr(jax, "device_count", lambda: 8)  # without a mesh only one of them trains
        summary = summarise(config, folder, "rounds")
    assert summary["device"].endswith(" x 1")
    expected = {name: values.sum() for name, values in sums.items()} | {name: of[-1] for name, of in last.items()}
    expected |= {"rounds": 4, "test_accuracy": 0.5, "best_test_accuracy": 0.6, "best_round": 2, "seconds": 5.0}
    expected |= {"compile_seconds": 3.0, "init_seconds": 2.0, "checkpoint_seconds": 0.5, "delta": config.privacy.delta}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


def test_test_figures_beside_validation_count_the_training_images_of_server_and_clients(tmp_path):
    """Recalls of classes with few and with many images, and the snapshot's loss and area, which no matrix has."""
    measures = {"data.validation": 10, "eval_measures": ("shots", "auc")}
    config = make_tiny_config(num_rounds=1, **measures)
    labels, predictions = np.array([0, 0, 1, 1, 1, 2, 2]), np.array([0, 1, 1, 1, 2, 0, 2])
    counts = {"clients": np.array([[4, 20, 60], [4, 10, 40]]), "server": np.array([2, 20, 10])}  # 10, 50, 110
    with contextlib.closing(Workdir(tmp_path / "run", config.to_dict())) as folder:
        folder.decide(config.to_dict(), about(config))
        folder.begin(0)
        line = {"round": 1, "validation_accuracy": 0.9, "bytes_down": 0, "bytes_up": 0, "dropped_uploads": 0}
        shots = ("many_accuracy", "medium_accuracy", "few_accuracy")
        folder.append(METRICS, [line | {f"validation_{name}": 0.9 for name in (*shots, "auc")}])
        unlabelled = {"labelled": np.zeros((2, 3), int), "validation": np.zeros(3, int)}
        replace_arrays(folder.path / CLASS_COUNTS, **counts, **unlabelled, train=np.array([9, 9, 9]))
        taken = {"labels": labels, "predictions": predictions, "loss": np.float32(1.5), "auc": np.float32(0.75)}
        taken |= {"embeddings": np.zeros((1, 2), np.float32), "embedding_labels": np.zeros(1, int)}
        save_snapshot(folder.path / SNAPSHOTS, 1, "test", taken)
        summary = summarise(config, folder, "rounds")
    expected = {"accuracy": 4 / 7, "loss": 1.5, "auc": 0.75, **dict(zip(shots, (1 / 2, 2 / 3, 1 / 2)))}
    assert {name: summary[f"test_{name}"] for name in expected} == pytest.approx(expected)
