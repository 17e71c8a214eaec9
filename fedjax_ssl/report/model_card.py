"""The model card of a run: what the model is, what it was trained on, how good it is, how to use it."""

import html
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from fedjax_ssl.base.errors import printable
from fedjax_ssl.base.files import replace_file
from fedjax_ssl.data import server_has_labels
from fedjax_ssl.records.origin import read_starts
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.records.words import describe_model
from fedjax_ssl.records.workdir import MODEL_CARD
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
    "shards": "classes_per_client",
    "main_class": "main_share",
}


def write_model_card(run: RunRecords) -> None:
    """Writes WORKDIR/MODEL_CARD.md.

    Raises:
        OSError: the folder cannot be written to.
    """
    replace_file(run.folder / MODEL_CARD, model_card(run))


def model_card(run: RunRecords) -> str:
    """The card, as Markdown."""
    return f"{describe_run(run)}\n{_use(run)}"


def describe_run(run: RunRecords) -> str:
    """What the model is, what it was trained on and how good it is, as Markdown, without paths."""
    config, noun = run.config, run.noun
    name, labels = _plain(_name(run)), _plain(run.who_has_labels())
    method, source = _plain(run.about["title"]), _plain(run.about["paper"])
    trained = f"by federated semi-supervised learning over {config['num_clients']} clients"
    if run.is_of_server_alone:
        trained = "at the server alone"
    what = "An image classifier" if run.kind == "image" else f"A classifier of {noun}"
    chosen = "The test set also decided nothing in this run: no round was picked by it."
    if run.measured == "validation":
        chosen = f"The test set decided nothing in this run: rounds were measured on validation {noun}."
    return f"""# {_plain(describe_model(config))} trained with {method} on {name}

{"".join(note + chr(10) for note in _notes(run))}{what} trained {trained}. Labels: {labels}.
Method: {method}{f" ({source})" if source else ""}, with fedjax_ssl.

## Data

{_table(_data(run))}
## Figures

{_table(_figures(run))}
The accuracy is that of one seed on {noun} like those of training. {chosen}
Nothing is known about {noun} from elsewhere; look at the accuracy by class in the run's report.
"""


def _name(run: RunRecords) -> str:
    return str(run.dataset().get("name", run.config["data"]["source"]))


def _table(rows: Mapping[str, str]) -> str:
    """A Markdown table of two columns without headings, whose cells are escaped."""
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {cell} |\n" for name, cell in rows.items())


def _notes(run: RunRecords) -> list[str]:
    """What a reader must know before the figures."""
    notes = [f"**Damaged:** {_plain(line.replace(f'{run.folder}/', ''))}.\n" for line in run.damages]
    if not run.is_finished:
        notes.append(f"**Unfinished:** the run stands at {run.standing()}.\n")
    if run.labels_revealed:
        notes.append(f"**An upper bound:** the labels of the clients' {run.noun} were revealed to the method.\n")
    if run.config["init_from"]:
        began = _plain(_last_part(run.config["init_from"]))
        notes.append(f"It began with the model of another run, {began} (init_from.json).\n")
    return notes + [f"{_plain(sentence)}\n" for sentence in conditions(run)]


def _data(run: RunRecords) -> dict[str, str]:
    """What the model was trained on."""
    config, dataset, noun = run.config, run.dataset(), run.noun
    data = config["data"]
    if run.kind == "image":
        height, width, channels = dataset.get("image_shape", ("?", "?", "?"))
        shape = f"{height} x {width} pixels, {channels} channel(s)"
    else:
        shape = " x ".join(map(str, run.input_shape)) + _PARTS[run.kind]
    held_out = f", {data['validation']:,} of them held out for validation" if run.measured == "validation" else ""
    drawn = f" ({data['server_draw']})" if server_has_labels(data) else ""
    rows = {
        "data set": _plain(_name(run)),
        noun: f"{shape}, {dataset.get('num_classes', '?')} classes",
        "training set": f"{dataset.get('num_train', '?')} {noun}{held_out}",
        "labels": f"{_plain(run.who_has_labels())}{drawn}",
        "division": f"{_division(data)}, seed {config['seed']}",
        "test set": f"{dataset.get('num_test', '?')} {noun}",
    }
    if "weights" in dataset:
        rows["encoder"] = f"{_plain(dataset['encoder'])}, its weights' SHA-256 {_plain(dataset['weights'])}"
    return rows


def _figures(run: RunRecords) -> dict[str, str]:
    """How good the model is, and what it cost."""
    last, (best, best_round) = run.metrics[-1], run.best()
    tested, loss = run.tested("test_accuracy"), run.tested("test_loss")
    best_of = f"(best {100 * best:.2f} %, round {best_round})"
    cohort = "" if run.is_of_server_alone else f", {run.config['clients_per_round']} clients each"
    down, up = (f"{run.values(f'bytes_{way}').sum() / 1e6:,.1f} MB {way}" for way in ("down", "up"))
    held_out = run.measured == "validation"
    rows = {
        "rounds": f"{last['round']}{cohort}",
        "test accuracy": f"{'-' if tested is None else f'{100 * tested:.2f} %'} "
        f"{'of the last model' if held_out else best_of}",
        **{f"test {words}": share for words, share in run.tested_measures().items()},
        "test loss": "-" if loss is None else format(loss, ".3f"),
        **({"validation accuracy": f"{100 * run.accuracy()[-1]:.2f} % {best_of}"} if held_out else {}),
        **{words: f"{share:.2f} %" for words, share in run.client_figures().items()},
        "communication": f"{down}, {up}",
    }
    versions = (run.summary or {}).get("versions", {})
    rows["made with"] = _plain(", ".join(f"{package} {version}" for package, version in versions.items()) or "-")
    for start in read_starts(run.folder)[-1:]:
        rows |= {name: _plain(start.facts()[name]) for name in ("code", "command")}
    return rows


def _use(run: RunRecords) -> str:
    """How to use the model in its folder, and how to train it again."""
    folder = printable(str(run.folder))
    height, width, channels = run.dataset().get("image_shape", ("?", "?", "?"))
    given, flag = f"images)  # uint8 [B, {height}, {width}, {channels}], 0 to 255; pixels are normalised inside", "npz"
    if run.kind != "image":
        given, flag = _GIVEN[run.kind], "csv" if run.kind == "table" or "text_column" in run.dataset() else "npz"
    return f"""## Use

```python
import fedjax_ssl

predict = fedjax_ssl.load({json.dumps(folder, ensure_ascii=False)})
prediction = predict({given}
prediction.labels, prediction.probabilities
```

```
python launch.py predict --workdir={shlex.quote(folder)} --{flag}=FILE --out=predictions.npz
```

## Train it again

The configuration is `config.json`, the clients' {run.noun} are `partition.npz`:

```python
import json
import fedjax_ssl
from fedjax_ssl.config import typed

config = typed(json.load(open({json.dumps(folder + "/config.json", ensure_ascii=False)})), "config.json")
fedjax_ssl.train(config, "runs/again")
```
"""


def _last_part(path: str) -> str:
    """The last part of a path, since a card is read elsewhere."""
    return path.rstrip("/").rpartition("/")[2]


def _plain(text: object) -> str:
    """Escapes a text from elsewhere, such as a data set's name, so that it is no markup and ends no table cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(printable(str(text)), quote=False))


def _division(data: dict[str, Any]) -> str:
    """How the images were divided among the clients, in a few words."""
    if data["partition_file"]:
        return f"as saved in {_plain(_last_part(data['partition_file']))}"
    scheme = data["partition"]
    field = _FIELD_OF_SCHEME.get(scheme)
    text = scheme if field is None else f"{scheme} ({field} {data[field]:g})"
    if abs(data["imbalance"]) == 1:
        return text
    return f"{text}, of a long tail (imbalance {data['imbalance']:g})"
