"""For tests of reports: pages without pictures, and changed records."""

import contextlib
import json
from unittest import mock

import numpy as np

from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import style

PICTURES = {
    "test_accuracy", "losses", "pseudo_labels", "qualified", "scores", "who_holds_what", "latent_space", "confusion",
    "class_accuracy", "client_accuracy", "bytes", "accuracy_over_bytes", "time",
}  # fmt: skip


@contextlib.contextmanager
def not_drawn(but=()):
    """Draws no pictures but some, since it takes seconds; yields name -> width in inches, and whether it has a PDF."""
    given, real = {}, style.save

    def save(figure, folder, name, pdf=False):
        given[name] = figure.get_size_inches()[0], pdf
        return real(figure, folder, name, pdf) if name in but else "<svg ></svg>"

    with mock.patch.object(style, "save", save):
        yield given


def changed(folder, **fields):
    """Changes fields of the configuration in a run's folder; those of `data` are added to the others."""
    config = json.loads((folder / "config.json").read_text())
    config["data"].update(fields.pop("data", {}))
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


COUNTS = {  # 3 clients, 2 classes
    "train": np.array([9, 8]), "server": np.array([0, 0]), "clients": np.array([[5, 2], [0, 4], [4, 1]]),
    "labelled": np.array([[1, 1], [0, 2], [0, 0]]), "validation": np.array([0, 0]),
}  # fmt: skip


def relabelled(folder, fields, counts):
    """Changes the data fields and the class counts of a run's folder."""
    changed(folder, data=fields)
    classes = json.loads((folder / "dataset.json").read_text())["num_classes"]
    of_clients = {name: counts[name] for name in ("unlabelled", "unknown") if name in counts}
    wide = {name: np.pad(of, [(0, 0)] * (of.ndim - 1) + [(0, classes - of.shape[-1])]) for name, of in counts.items()}
    np.savez(folder / "class_counts.npz", **{**wide, **of_clients})
    return read_run(folder)
