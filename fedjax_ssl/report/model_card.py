"""The model card of a run: what the model is, what it was trained on, how good it is, how to use it."""

import html
import re
import shlex
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fedjax_ssl.base.errors import printable
from fedjax_ssl.records.origin import read_starts
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.records.words import describe_model, is_private, who_has_labels
from fedjax_ssl.report import page
from fedjax_ssl.report.conditions import conditions

_GIVEN = {  # code for the inputs of other kinds than images
    "features": "features)  # numbers [B, D]",
    "table": "columns)  # a DataFrame, or a dict of the training table's columns",
    "text": "texts)  # a list of str, or token ids [B, L]",
}
_PARTS = {"features": " features", "table": " columns", "text": " tokens"}  # of an example
_FIELD_OF_SCHEME = {  # partition scheme -> the field that sets how uneven it is
    "lda": "alpha",
    "dirichlet_classes": "alpha",
    "dirichlet_clients": "alpha",
    "dirichlet_pairs": "alpha",
    "shards": "classes_per_client",
    "main_class": "main_share",
}


def model_card(run: RunRecords) -> str:
    """The card, as Markdown, with the code and the command for using the model."""
    return describe_run(run, _use(run))


def _use(run: RunRecords) -> dict[str, str]:
    folder = printable(str(run.folder))
    height, width, channels = run.dataset().get("image_shape", ("?", "?", "?"))
    given, flag = f"images)  # uint8 [B, {height}, {width}, {channels}], 0 to 255; pixels are normalised inside", "npz"
    if run.kind != "image":
        given = _GIVEN.get(run.kind, f"{run.kind})  # numbers [B, ...]")
        flag = "csv" if run.kind == "table" or "text_column" in run.dataset() else "npz"
    return {"folder": folder, "quoted": shlex.quote(folder), "given": given, "flag": flag}


def describe_run(run: RunRecords, use: Mapping[str, str] | None = None) -> str:
    """What the model is, what it was trained on and how good it is, as Markdown; without `use` it has no paths."""
    return page.render(
        "model_card.md.jinja",
        _escaped,
        run=run,
        model=describe_model(run.config),
        name=str(run.dataset().get("name", run.config["data"]["source"])),
        began=_last_part(run.config["init_from"]),
        conditions=conditions(run),
        data=_data(run),
        figures=_figures(run),
        labels=_labels(run),
        use=use,
    )


def _escaped(text: str) -> Markup:
    """A text from elsewhere, such as a data set's name, that is no markup and ends no table cell."""
    return Markup(re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(text, quote=False)))


def _data(run: RunRecords) -> dict[str, str]:
    """What the model was trained on. For a private run numbers of the clients' images and labels are left out."""
    config, dataset, noun = run.config, run.dataset(), run.noun
    data = config["data"]
    if run.kind == "image":
        height, width, channels = dataset.get("image_shape", ("?", "?", "?"))
        shape = f"{height} x {width} pixels, {channels} channel(s)"
    else:
        shape = " x ".join(map(str, run.input_shape)) + _PARTS.get(run.kind, "")
    held_out = f", {data['validation']:,} of them held out for validation" if run.measured == "validation" else ""
    rows = {
        "data set": str(dataset.get("name", data["source"])),
        noun: f"{shape}, {dataset.get('num_classes', '?')} classes",
        "training set": f"{dataset.get('num_train', '?')} {noun}{held_out}",
        "labels": _labels(run),
        "division": f"{_division(data)}, seed {config['seed']}",
        "test set": f"{dataset.get('num_test', '?')} {noun}",
    }
    if is_private(config):
        del rows["training set"]
        rows["division"] = _division(data)
    if "weights" in dataset:
        rows["encoder"] = f"{dataset['encoder']}, its weights' SHA-256 {dataset['weights']}"
    return rows


def _figures(run: RunRecords) -> dict[str, str]:
    """How good the model is, and what it cost. Of a private run only what its guarantee covers."""
    last, (best, best_round) = run.metrics[-1], run.best()
    tested, loss = run.tested("test_accuracy"), run.tested("test_loss")
    cohort = "" if run.is_of_server_alone else f", {run.config['clients_per_round']} clients each"
    down, up = (f"{run.values(f'bytes_{way}').sum() / 1e6:,.1f} MB {way}" for way in ("down", "up"))
    held_out = run.measured == "validation"
    rows = {
        "rounds": f"{last['round']}{cohort}",
        "test accuracy": f"{'-' if tested is None else f'{100 * tested:.2f} %'} of the last model",
        **{f"test {words}": share for words, share in run.tested_measures().items()},
        "test loss": "-" if loss is None else format(loss, ".3f"),
    }
    if held_out:
        measured = f"{100 * run.accuracy()[-1]:.2f} % (best {100 * best:.2f} %, round {best_round})"
        rows["validation accuracy"] = measured
    if not is_private(run.config):
        rows |= {words: f"{share:.2f} %" for words, share in run.client_figures().items()}
        rows["communication"] = f"{down}, {up}"
    versions = (run.summary or {}).get("versions", {})
    rows["made with"] = ", ".join(f"{package} {version}" for package, version in versions.items()) or "-"
    for start in read_starts(run.folder)[-1:]:
        rows |= {name: start.facts()[name] for name in (("code",) if is_private(run.config) else ("code", "command"))}
    return rows


def _labels(run: RunRecords) -> str:
    """Who has labels, in words."""
    return who_has_labels(run.config, run.noun) if is_private(run.config) else run.who_has_labels()


def _last_part(path: str) -> str:
    """The last part of a path, since a card is read elsewhere."""
    return path.rstrip("/").rpartition("/")[2]


def _division(data: dict[str, Any]) -> str:
    """How the images were divided among the clients, in a few words."""
    if data["partition_file"]:
        return f"as saved in {_last_part(data['partition_file'])}"
    scheme = data["partition"]
    field = _FIELD_OF_SCHEME.get(scheme)
    text = scheme if field is None else f"{scheme} ({field} {data[field]:g})"
    if abs(data["imbalance"]) == 1:
        return text
    return f"{text}, of a long tail (imbalance {data['imbalance']:g})"
