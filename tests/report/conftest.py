"""Records of runs, made from a finished run's."""

import json
import shutil

import pytest

from fedjax_ssl.records.lines import METRICS_SUM, checksum_of_records
from tests.helpers.reports import changed, not_drawn


@pytest.fixture
def undrawn():
    with not_drawn() as given:
        yield given


@pytest.fixture(scope="module")
def three_runs(stub_run, tmp_path_factory):
    """Two seeds of one configuration and one seed of another, made from a finished run's records."""
    folder = tmp_path_factory.mktemp("three")
    for name, fields, better in (("a/seed_0", {"seed": 0}, 0.0), ("a/seed_1", {"seed": 1}, 0.1),
                                  ("b/seed_0", {"seed": 0, "method": "semifl"}, -0.1)):  # fmt: skip
        shutil.copytree(stub_run[0], folder / name, ignore=shutil.ignore_patterns("checkpoints"))
        changed(folder / name, **fields)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["test_accuracy"] = 0.5 + 0.1 * line["round"] + better
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = json.loads((folder / name / "summary.json").read_text())
        summary[METRICS_SUM] = checksum_of_records(folder / name, summary["rounds"])
        (folder / name / "summary.json").write_text(json.dumps(summary))
    return folder
