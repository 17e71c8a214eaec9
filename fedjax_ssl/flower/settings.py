"""Settings of a Flower run: the configuration, in Flower's run config, and a node's clients, in its node config."""

import hashlib
import json
import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.base.fields import CHANGES_NO_RESULT
from fedjax_ssl.base.files import expanded
from fedjax_ssl.config import OVERRIDE, flatten, parse_config
from fedjax_ssl.run.validation import validate

# Flower's run config, `[tool.flwr.app.config]` of the project, with defaults.
RUN = {"config": "configs/quickstart.py", "overrides": "", "workdir": "", "wait": 600, "timeout": 3600}
# Field -> the only value that Flower accepts. Attacks, failures and compression are of simulated clients; the server
# does all rounds, and clients have no file of the server's.
ONLY = {
    "attack.kind": "none",
    "availability.never": 0.0,
    "availability.late": 0.0,
    "compression.kind": "none",
    "data.client_test_share": 0.0,
    "privacy.noise": 0.0,
    "stop.patience": 0,
    "stop.bytes": 0.0,
    "stop.seconds": 0.0,
    "seeds": (),
    "init_from": "",
}
NODE = ("partition-id", "num-partitions", "clients", "data")


def run_config(given: Mapping[str, Any]) -> ConfigDict:
    """The configuration that a run's config names: a config file with its arguments, and overrides.

    `config` is as for --config, or a file in the project's folder; `overrides` are words as on the command line,
    --config.FIELD=VALUE, separated by spaces. Raises a UserError if there is no such file or field, a value is wrong,
    or a field is not for Flower runs.
    """
    file, words = str(given.get("config", RUN["config"])), shlex.split(str(given.get("overrides", "")))
    for word in words:
        if not word.startswith(OVERRIDE):
            raise UserError(f"overrides of the run's config are --config.FIELD=VALUE, not {word!r}")
    config = parse_config(in_project(file), words)
    validate(config)
    values = flatten(config)
    for field, only in ONLY.items():
        if values[field] != only:
            raise UserError(f"{field}={values[field]!r} is not for a Flower run, which takes {only!r}")
    return config


def in_project(config_file: str) -> str:
    """A config file's path: in the project's folder, which Flower puts on Python's path, if it lies there."""
    path, colon, arguments = config_file.partition(":")
    for folder in sys.path:
        if folder and (found := pathlib.Path(folder) / path).is_file():
            return f"{found}{colon}{arguments}"
    return config_file


def digest(config: ConfigDict) -> str:
    """A hash of all fields that change a result; equal on machines whose runs do the same.

    `data.path` does not count, and a partition file counts by its bytes. Raises a UserError if that cannot be read.
    """
    fields = {name: value for name, value in flatten(config).items() if name not in (*CHANGES_NO_RESULT, "data.path")}
    if file := config.data.partition_file:
        try:
            fields["data.partition_file"] = hashlib.sha256(expanded(file).read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"data.partition_file={file}: {error.strerror}") from error
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def node_settings(given: Mapping[str, Any], num_clients: int) -> tuple[tuple[int, ...], str]:
    """Reads `flower-supernode --node-config`: `partition-id`, a client's id, or `clients`, such as '0,1,2'; `data`.

    Returns the ids of the node's clients, below num_clients, and an npz file with its images; '': it has those of the
    configured partition. Raises a UserError if no id is given, an id is not valid, or a name is unknown.
    """
    for name in given:
        if name not in NODE:
            raise UserError(f"--node-config has {name!r}{known_are(name, NODE)}")
    words, data = given.get("clients", given.get("partition-id")), str(given.get("data", ""))
    ids = str(words).split(",")
    clients = tuple(int(word) for word in ids if word.isdecimal() and int(word) < num_clients)
    if len(set(clients)) < len(ids) or (data and len(ids) > 1):
        raise UserError(
            f"--node-config has clients={words!r}; give different ids below num_clients = {num_clients}, as in "
            "clients='0,1,2', or partition-id=0; a node with data has one client"
        )
    return clients, data
