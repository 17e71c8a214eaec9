"""Checks a configuration before anything is read or written."""

import functools
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError, errors_of
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.config import add_section, flatten, ranges
from fedjax_ssl.data import check_labels, server_has_labels
from fedjax_ssl.data.unknown import check_unknown
from fedjax_ssl.methods import METHODS, find_method
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.ops.augment import check_magnitude
from fedjax_ssl.run.decided import names_clients


def validate(config: ConfigDict) -> None:
    """Checks the range of every field, and fields that depend on each other; a run's parts check what needs the data.

    The configuration gets what it lacks of its method's section. Raises a UserError, one line with all that is wrong:
    the field, its value and what it may be.
    """
    ranges()["method"].check("method", config.method)
    values = flatten(add_section(config))
    of_fields = [
        functools.partial(its_range.check, field, values[field])
        for field, its_range in ranges(config.method).items()
        if field in values
    ]
    num_clients = None if names_clients(config.data) else config.num_clients
    lines = errors_of(*of_fields) or [
        *errors_of(
            functools.partial(check_labels, config.data, num_clients),
            functools.partial(check_unknown, config.data),
            functools.partial(check_magnitude, config.augment.flavour, config.augment.magnitude),
        ),
        *_misfits(config, find_method(config.method)),
    ]
    if lines:
        raise UserError("; ".join(lines))


def _misfits(config: Any, method: Entry) -> Iterator[str]:
    """A line for each field that does not fit another one, or the method."""
    name, data, attack, stop = name_of(config.method), config.data, config.attack, config.stop
    if data.labels not in method.settings:
        known = ", ".join(map(repr, method.settings))
        others = ", ".join(other for other, entry in METHODS.items() if data.labels in entry.settings)
        yield f"data.labels is {data.labels!r}; known to the method {name}: {known}; methods that take it: {others}"
    for field, default in {"kind": "fixed", "debias": "none"}.items():
        if field not in method.confidence and config.confidence[field] != default:
            value = config.confidence[field]
            yield f"confidence.{field}={value!r} is not for the method {name}, which does not read it"
    if attack.kind == "labels" and not method.mislabels:
        yield f"attack.kind='labels' is not for the method {name}, whose clients label in their own way"
    if attack.kind == "poison" and not method.unlabelled:
        yield f"attack.kind='poison' is not for the method {name}, which uses no unlabelled image"
    if data.labels == "server" and data.server_labels < 1 and method.needs_labels:
        yield f"data.server_labels must be at least 1, not {data.server_labels}"
    if stop.patience and not data.validation:
        yield f"stop.patience={stop.patience} needs validation images; set data.validation, as in 500"
    if stop.patience and config.personal_parts and not server_has_labels(data):
        yield (
            f"stop.patience={stop.patience} looks at the global model, whose {config.personal_parts[0]} nobody trains "
            "with personal_parts; set it to 0"
        )
    if config.eval_clients_every and not data.client_test_share:
        yield f"eval_clients_every={config.eval_clients_every} needs test images of clients; set data.client_test_share"
    rule = config.confidence
    if rule.clamp_least > rule.clamp_most:
        yield f"confidence.clamp_least is {rule.clamp_least:g}, above confidence.clamp_most, {rule.clamp_most:g}"
    if "knn" in config.eval_measures and not server_has_labels(data):
        yield f"eval_measures has 'knn', which needs labelled images at the server, but data.labels is {data.labels!r}"
    if config.clients_per_round > config.num_clients and not names_clients(data):
        yield f"clients_per_round is {config.clients_per_round}, but there are num_clients = {config.num_clients}"
    if config.log.wandb_project and not _has_wandb():
        yield "log.wandb_project needs the package wandb: pip install 'fedjax_ssl[wandb]'"


def _has_wandb() -> bool:
    try:
        import wandb
    except ImportError:
        return False
    return hasattr(wandb, "init")  # W&B's runs leave a folder with this name, which can be imported
