"""Reading a run's records."""

import math

import pytest

from fedjax_ssl import base_config
from fedjax_ssl.records.runs import RunRecords


@pytest.mark.parametrize(
    "names, rules",
    [
        (["test_accuracy"], {}),
        (["pseudo_label_accuracy", "qualified_accuracy"], {"pseudo_label_accuracy": "all"}),
        (
            ["pseudo_label_accuracy", "pseudo_label_accuracy_anchor_head", "pseudo_label_accuracy_other"],
            {"pseudo_label_accuracy_anchor_head": "anchor head", "pseudo_label_accuracy_other": "other"},
        ),
    ],
)
def test_labelling_rules(names, rules):
    run = RunRecords(None, {}, [dict.fromkeys(names, 0.5)], [], None)
    assert run.labelling_rules() == rules


def test_what_could_not_be_measured_is_neither_the_best_nor_a_second():
    lines = [{"round": number, "test_accuracy": value} for number, value in ((1, 0.5), (2, None), (3, 0.6))]
    timings = [{"round": 1, "seconds": 2.0}, {"round": 2, "seconds": None}]
    run = RunRecords(None, {"data": {"validation": 0}}, lines, timings, None)
    assert run.best() == (0.6, 3) and run.seconds() == 2.0
    (nothing, first) = run._replace(metrics=lines[1:2]).best()
    assert math.isnan(nothing) and first == 2


@pytest.mark.parametrize("fields", [{"unknown_classes": [7, 8]}, {"image_size": 16}])
def test_runs_on_other_test_images_are_not_compared(fields):
    known, other = base_config().to_dict(), base_config().to_dict()
    other["data"].update(fields)
    one, two = (RunRecords(None, config, [{"round": 1}], [], None).data_fields for config in (known, other))
    assert len({one, two}) == 2
