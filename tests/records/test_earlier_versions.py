"""A run's folder of an earlier version, with its names in all files, can be resumed, loaded and reported."""

import hashlib
import json

import numpy as np
import pytest

from fedjax_ssl import UserError, load, train
from fedjax_ssl.config import flatten
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import write_report
from tests.helpers.runs import SMALL, make_fedanchor_config

pytestmark = pytest.mark.usefixtures("quick_runs")

# One field for each kind of translation that changes what is trained.
FIELDS = {
    **SMALL,
    "method": "fixmatch",
    "confidence.kind": "share",
    "confidence.share": 0.3,
    "aggregation.mean": "trimmed_mean",
    "aggregation.byzantine_share": 0.3,
}
MOVED = ("warm_up", "fairness_weight", "quantile", "level_cap", "clamp_least", "clamp_most", "uniform_alignment")


def earlier_config(config):
    """Today's configuration as versions until November 24th, 2026, wrote it."""
    old = json.loads(json.dumps(config))
    confidence = old.pop("confidence")
    old["threshold"] = {name: confidence[name] for name in ("kind", "share", "debias")} | {"momentum": 0.9}
    old["trainer"] |= {"name": "flexmatch", "counters": "per_round", "histogram": "counts", "momentum": 0.999}
    old["trainer"] |= {name: confidence[name] for name in (*MOVED, "n_sigma")}
    old["data"]["num_anchors"] = old["data"].pop("server_labels")
    old["data"]["anchors"] = old["data"].pop("server_draw")
    old["aggregation"]["malicious_share"] = old["aggregation"].pop("byzantine_share")
    for section, switches in {
        "fedcon": {"consistency_with": "student", "student": "renewed"},
        "fedlabel": {"accumulate_gradients": False},
        "fedu": {"alias_first_target": False},
        "fedema": {"alias_first_target": False},
        "twin_sight": {"divisor": "square"},
    }.items():
        assert old[section].pop("replica") is False
        old[section] |= switches
    return old


def with_earlier_names(path, today, then):
    """Renames an array of an npz file; returns the file's arrays."""
    with np.load(path) as file:
        arrays = {then if name == today else name: file[name] for name in file}
    np.savez(path, **arrays)
    assert then in arrays
    return arrays


def earlier_checksum(arrays):
    """The checksum of a partition in that version's checkpoints."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        if arrays[name].size:
            digest.update(f"{name} {arrays[name].shape} ".encode() + arrays[name].astype("<i8").tobytes())
    return digest.hexdigest()


def make_earlier(run):
    """Gives the files of a run's folder that version's names."""
    config = earlier_config(json.loads((run / "config.json").read_text()))
    (run / "config.json").write_text(json.dumps(config))
    partition = earlier_checksum(with_earlier_names(run / "partition.npz", "server_index", "anchor_index"))
    with_earlier_names(run / "class_counts.npz", "server", "anchors")
    for sums in (run / "checkpoints").glob("*/SHA256SUMS"):
        manifest = sums.with_name("run.json")
        before = manifest.read_bytes()
        manifest.write_text(json.dumps({**json.loads(before), "config": config, "partition": partition}))
        digests = [hashlib.sha256(content).hexdigest() for content in (before, manifest.read_bytes())]
        assert digests[0] in sums.read_text()
        sums.write_text(sums.read_text().replace(*digests))


@pytest.fixture
def earlier(tmp_path):
    """The folder of a run of two rounds with earlier names, and its model's outputs before the renaming."""
    run = tmp_path / "earlier"
    train(make_fedanchor_config(**FIELDS, num_rounds=2), run)
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    expected = load(run, allow_code=True)(images).probabilities
    make_earlier(run)
    return run, images, expected


def test_it_resumes_loads_and_is_reported(earlier, tmp_path):
    run, images, expected = earlier
    np.testing.assert_array_equal(load(run, allow_code=True)(images).probabilities, expected)
    records = read_run(run)
    assert not records.damages and not records.unreadable()
    assert records.config["confidence"]["kind"] == "share" and records.class_counts()["server"].sum() == 40
    assert "threshold" not in flatten(records.config) and len(records.metrics) == 2
    write_report(run)
    assert (run / "report.html").exists()
    train(make_fedanchor_config(**FIELDS), run)
    train(make_fedanchor_config(**FIELDS), tmp_path / "whole")
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"confidence\.share: 0\.3 there, 0\.4 here"):
        train(make_fedanchor_config(**{**FIELDS, "confidence.share": 0.4}), run)


def test_a_partition_of_another_run_is_noticed(earlier):
    run, _, _ = earlier
    with np.load(run / "partition.npz") as file:
        arrays = {name: file[name] for name in file}
    arrays["anchor_index"] = arrays["anchor_index"][::-1]
    np.savez(run / "partition.npz", **arrays)
    with pytest.raises(UserError, match=r"partition\.npz is not what the checkpoint .* was trained with"):
        load(run, allow_code=True)
