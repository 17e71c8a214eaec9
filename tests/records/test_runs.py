"""What is read from a run's records."""

import pytest

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
