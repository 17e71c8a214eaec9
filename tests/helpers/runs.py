"""Tiny runs, and the repository's folder."""

import contextlib
import json
import pathlib
import resource

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY_BACKBONE = f"{ROOT / 'tests' / 'helpers' / 'tiny_backbone.py'}:TinyBackbone"


def make_fedanchor_config(**overrides):
    """FedAnchor on 8x8 digits with a few clients; a round takes well under a second."""
    from fedjax_ssl import base_config

    config = base_config()
    config.num_rounds = 4
    config.num_clients = 8
    config.clients_per_round = 4
    config.checkpoint_every = 2
    config.data.source = "digits"
    config.data.server_labels = 40
    config.data.examples_per_client = 33
    config.model.name = "cnn"
    config.augment.padding = 1
    config.augment.num_ops = 1
    config.client.epochs = 2
    config.server.pretrain_epochs = 2
    config.model.normalisation = "static"  # running averages need more steps than a tiny run has
    config.server.augmentation = "weak"
    if overrides.get("method", "fedanchor") == "fedanchor":
        config.confidence.threshold = 0.5
    config.log.report = False  # pictures take longer than such a run
    config.update_from_flattened_dict(overrides)
    return config


# Makes programs small: no RandAugment, one hidden layer. Without the crop, the steps' random keys would change nothing.
SMALL = {"augment.flavour": "none", "model.name": TINY_BACKBONE}


def make_tiny_config(**overrides):
    """The cheapest run in which clients and server train, for tests about no particular method."""
    return make_fedanchor_config(**{**SMALL, "method": "supervised", "data.reveal_labels": True, **overrides})


def forget_manifests(run):
    """Lets checkpoints forget what they were trained with, so that files of the run may be exchanged."""
    from fedjax_ssl.records.manifest import read_manifest, write_manifest

    for path in (run / "checkpoints").glob("[0-9]*.json"):
        write_manifest(path.with_suffix(""), read_manifest(path.with_suffix(""))._replace(run=None, records=""))


def everything_in(folder):
    """All files of a folder except the lock, with their contents."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@contextlib.contextmanager
def files_of_at_most(length):
    """Imitates a full disk: this process cannot write a file beyond `length` bytes. Python ignores SIGXFSZ."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def pretended(folder, config, seed, accuracy=0.5):
    """Writes the records of a finished run without training."""
    from fedjax_ssl.config import for_seed
    from fedjax_ssl.records.lines import METRICS_SUM, checksum_of_records
    from fedjax_ssl.run.about import about

    run = folder / f"seed_{seed}"
    run.mkdir(parents=True)
    line = {"round": 1, "bytes_down": 1, "bytes_up": 1, "test_accuracy": accuracy, "validation_accuracy": accuracy}
    (run / "config.json").write_text(json.dumps(for_seed(config, seed).to_dict()))
    (run / "about.json").write_text(json.dumps(about(for_seed(config, seed))))
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "summary.json").write_text(json.dumps({"rounds": 1, METRICS_SUM: checksum_of_records(run, 1)}))
