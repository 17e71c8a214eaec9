"""Data: sources of images and other inputs, their partition over clients, and the federation as device arrays."""

from fedjax_ssl.data.federated import FederatedData, federate, stack_seeds
from fedjax_ssl.data.labels import LABELS, check_labels, clients_may_have_labels, server_has_labels
from fedjax_ssl.data.owners import Partition, class_counts
from fedjax_ssl.data.partition import make_partition, make_partition_of
from fedjax_ssl.data.partition_file import load_partition, save_partition
from fedjax_ssl.data.partition_schemes import PARTITIONS
from fedjax_ssl.data.sources import SOURCES, Dataset, dataset_facts, feature_statistics, load_dataset
