"""Data: sources of images, their partition over clients, and the federation as device arrays."""

from fedjax_ssl.data.federated import FederatedData, federate
from fedjax_ssl.data.partition import PARTITIONS, Partition, load_partition, make_partition, save_partition
from fedjax_ssl.data.sources import SOURCES, Dataset, load_dataset

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Dataset",
    "FederatedData",
    "Partition",
    "federate",
    "load_dataset",
    "load_partition",
    "make_partition",
    "save_partition",
]
