"""What the data decide of a run: fields that follow from its clients and labels, and who gets which rows."""

import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import flatten
from fedjax_ssl.data import Dataset, Partition, load_partition, make_partition_of, server_has_labels
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.data.owners import NO_ROWS
from fedjax_ssl.data.partition_file import check_data
from fedjax_ssl.data.unknown import check_unknown
from fedjax_ssl.run import hosts
from fedjax_ssl.run.observe.log import say

# The fields that data may decide.
FIELDS = ("num_clients", "clients_per_round", "data.partition", "data.labelled_clients", "data.server_labels")


def names_clients(data: Any) -> bool:
    """Whether the section `data` names what may decide the number of clients: a column, or a partition file."""
    return bool(data.client_column or data.partition_file)


def decisions(config: ConfigDict, dataset: Dataset, partition_file: str = "") -> dict[str, Any]:
    """The fields, by dotted names, that the data decide otherwise than a configuration.

    * If the data name each example's client, the partition is 'natural' and these are the clients. A partition file
      has a number of clients, too.
    * A cohort has at most all clients.
    * If the data say who has labels for all examples, these are the labelled clients of 'some_clients'.
    * If the data lack labels, the server has at most the labels that there are.

    The partition file is that of a run that is resumed; '': that of the configuration, if there is one. Raises a
    UserError if it cannot be read.
    """
    data = config.data
    found: dict[str, Any] = {}
    if data.partition_file:
        sizes = read_arrays(partition_file or data.partition_file, ("client_size",), "data.partition_file")
        found["num_clients"] = sizes["client_size"].size
    elif dataset.owners is not None:
        found |= {"data.partition": "natural", "num_clients": int(dataset.owners.max()) + 1}
    if dataset.owners is not None and dataset.lacks_labels and data.labels == "some_clients":
        without = np.unique(dataset.owners[dataset.y_train < 0])
        found["data.labelled_clients"] = max(1, len(np.unique(dataset.owners)) - len(without))
    if "num_clients" in found:
        found["clients_per_round"] = max(1, min(config.clients_per_round, found["num_clients"]))
    if server_has_labels(data) and dataset.lacks_labels and not data.partition_file:
        known = int(np.count_nonzero(dataset.y_train >= 0)) - data.validation
        found["data.server_labels"] = max(1, min(data.server_labels, known))
    asked = flatten(config)
    return {name: value for name, value in found.items() if asked[name] != value}


def decide(configs: list[ConfigDict], dataset: Dataset, partition_file: str = "") -> list[ConfigDict]:
    """Configurations of runs together, with the `decisions`, which are said in a line.

    Raises a UserError as `decisions` does, or if unknown images exclude a natural partition.
    """
    found = hosts.from_first(lambda: decisions(configs[0], dataset, partition_file))
    if not found:
        return configs
    asked = flatten(configs[0])
    say("the data decide: " + ", ".join(f"{name}={value} (not {asked[name]})" for name, value in found.items()))
    decided = [one.copy_and_resolve_references() for one in configs]
    for one in decided:
        one.update_from_flattened_dict(found)
        check_unknown(one.data)
    return decided


def find_partitions(
    configs: list[ConfigDict], partition_files: list[pathlib.Path | None], dataset: Dataset
) -> list[Partition]:
    """The partition of each run, on all hosts; see `build_experiments`."""
    config = configs[0]

    def found() -> list[Partition]:
        if config.data.partition_file and not all(file and file.exists() for file in partition_files):
            check_data(config.data.partition_file, dataset)
        return [
            load_partition(file, len(dataset.y_train), config.num_clients)
            if file is not None and file.exists()
            else make_partition_of(dataset, config.data, config.num_clients, c.seed)
            for c, file in zip(configs, partition_files)
        ]

    of_all = [NO_ROWS] * config.num_clients
    like = Partition(NO_ROWS, of_all, client_test_rows=tuple(of_all) if config.data.client_test_share else ())
    partitions = hosts.tree_from_first(found, [like] * len(configs))
    if config.data.client_test_share and not all(any(map(len, each.client_test_rows)) for each in partitions):
        raise UserError(
            f"data.client_test_share={config.data.client_test_share} gives no client a test image; raise it"
        )
    return partitions
