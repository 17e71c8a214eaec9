"""A folder for the Hugging Face Hub: README.md with a machine-readable header, and the model."""

import json
import pathlib
from typing import Any

from fedjax_ssl.base.errors import UserError, printable
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.data.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.report.model_card import describe_run

CARD, CONFIG, TENSORS, PROGRAM = "README.md", "config.json", "model.safetensors", "model.stablehlo"
TOKENIZER = "tokenizer.json"  # of texts
_MARK = '\nlibrary_name: "fedjax_ssl"\n'  # identifies a card that this module has written
_TASKS = {"image": "image", "features": "tabular", "table": "tabular", "text": "text"}  # -classification
# Our names of data sets -> names on the Hub.
_DATASETS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "svhn_cropped": "ufldl-stanford/svhn",
}


def check_folder(path: pathlib.Path) -> None:
    """Raises a UserError if the folder has one of the files but no README.md of an export."""
    card = path / CARD
    if card.exists() and _MARK in card.read_text(errors="replace"):
        return
    for name in (CARD, CONFIG, TENSORS, PROGRAM, TOKENIZER):
        if (path / name).exists():
            raise UserError(f"{path / name} is not from an export for the Hub; choose another folder")


def contents(folder: pathlib.Path, facts: dict[str, Any], files: dict[str, bytes], license: str) -> dict[str, bytes]:
    """The files of the folder, by name. Raises a UserError if the run has not finished a round.

    `facts` are about the model, see docs/how_to/export.md; `files` are 'safetensors' and 'stablehlo' -> content.
    """
    run, tokenizer = read_run(folder), facts.get("tokenizer")
    config = {name: value for name, value in facts.items() if name != "tokenizer"}
    if facts["round"] < len(run.metrics):  # the card is of the exported model
        rounds = max(facts["round"], 1)
        summary = run.summary and {"rounds": rounds, "versions": run.summary["versions"]}  # its figures are of the last
        metrics = run.metrics[:rounds]
        if "epsilon" in run.metrics[-1]:  # this round was chosen after all rounds, so the guarantee is that of all
            metrics = [*metrics[:-1], {**metrics[-1], "epsilon": run.metrics[-1]["epsilon"]}]
        run = run._replace(metrics=metrics, summary=summary)
    return {
        CARD: f"{header(run, license)}\n{describe_run(run)}\n{_use(facts)}".encode(),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        TENSORS: files["safetensors"],
        PROGRAM: files["stablehlo"],
        **({TOKENIZER: tokenizer.encode()} if tokenizer else {}),
    }


def header(run: RunRecords, license: str) -> str:
    """The card's header, YAML between two lines of hyphens: licence, data, metrics, tags, results."""
    method, dataset = name_of(run.config["method"]), run.dataset()
    name = dataset.get("name", run.config["data"]["source"])
    source, tested = run.config["data"]["source"], run.tested("test_accuracy")
    task = f"{_TASKS.get(kind_name(dataset), 'tabular')}-classification"
    result = {
        "task": {"type": task},
        "dataset": {"type": _DATASETS.get(source, name), "name": name, "split": "test"},
        "metrics": [{"type": "accuracy", "name": "test accuracy", "value": tested}],
    }
    fields: dict[str, Any] = {
        "license": license,
        "library_name": "fedjax_ssl",
        "pipeline_tag": task,
        "tags": ["federated-learning", "semi-supervised-learning", "jax", "safetensors", method],
        "datasets": [_DATASETS[source]] if source in _DATASETS else [],
        "metrics": ["accuracy"],
        "model-index": [] if tested is None else [{"name": f"{method} on {name}", "results": [result]}],
    }
    # JSON is valid YAML, whatever a name contains.
    lines = (f"{field}: {printable(json.dumps(value, ensure_ascii=False))}" for field, value in fields.items() if value)
    return "\n".join(["---", *lines, "---", ""])


def _use(facts: dict[str, Any]) -> str:
    kind = kind_of(facts)
    stored = kind.inputs(facts).shape
    shape = ", ".join(map(str, (1, *(stored[-1:] if "weak_views" in facts else stored))))
    pixels = "  # pixels from 0 to 255" if kind_name(facts) == IMAGE else ""
    texts = f"\nA text's inputs are its first ids by `{TOKENIZER}`, plus 1, then 0." if "tokenizer" in facts else ""
    return f"""## Use

The model is that of round {facts["round"]}.

`{PROGRAM}` is the whole program, from {kind.noun} to probabilities. It needs JAX and flatbuffers:

```python
import jax.export
import numpy as np

model = jax.export.deserialize(open("{PROGRAM}", "rb").read())
inputs = np.zeros(({shape}), np.{kind.stored.__name__}){pixels}
probabilities = model.call(inputs)
```

`{TENSORS}` has the parameters, `{CONFIG}` the names of the classes and what the model takes.{texts}
"""
