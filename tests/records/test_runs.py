"""Reading a run's records."""

import json
import math
import shutil

import pytest

from fedjax_ssl import base_config
from fedjax_ssl.records.groups import name_data_sets, read_groups
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.records.sealed import read_dataset, write_dataset


def test_what_could_not_be_measured_is_neither_the_best_nor_a_second():
    lines = [{"round": number, "test_accuracy": value} for number, value in ((1, 0.5), (2, None), (3, 0.6))]
    timings = [{"round": 1, "seconds": 2.0}, {"round": 2, "seconds": None}]
    run = RunRecords(None, {"data": {"validation": 0}}, lines, timings, None)
    assert run.best() == (0.6, 3) and run.seconds() == 2.0
    (nothing, first) = run._replace(metrics=lines[1:2]).best()
    assert math.isnan(nothing) and first == 2


def test_runs_on_other_examples_are_another_version_of_the_data(stub_run, tmp_path):
    for seed, content in enumerate("aab"):
        run = tmp_path / f"seed_{seed}"
        shutil.copytree(stub_run[0], run)
        saved = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**saved, "seed": seed}))
        write_dataset(run, {**read_dataset(run), "content": {"train_inputs": content}})
    groups = read_groups([tmp_path])[0]
    assert [[run.config["seed"] for run in group.runs] for group in groups] == [[0, 1], [2]]
    first, second = name_data_sets(groups)
    assert first.endswith(", version 1") and second.endswith(", version 2")


@pytest.mark.parametrize("fields", [{"unknown_classes": [7, 8]}, {"image_size": 16}])
def test_runs_on_other_test_images_are_not_compared(fields):
    known, other = base_config().to_dict(), base_config().to_dict()
    other["data"].update(fields)
    one, two = (RunRecords(None, config, [{"round": 1}], [], None).data_fields for config in (known, other))
    assert len({one, two}) == 2
