"""A run's configuration: its fields with their defaults, checks, and loading. Imports methods, but not `run/`.

`base_config()` has every field. `load_config_file` reads a config file, `parse_config` also words of a command line.
"""

from fedjax_ssl.config.base import (
    ARGUMENTS,
    add_section,
    apply_arguments,
    base_config,
    complete,
    describe_method,
    describe_model,
    differences,
    flatten,
    for_seed,
    labels_revealed,
    measured_each_round,
    measures_of,
    num_byzantine,
    other_sections,
    ranges,
    unknown_images,
    validate,
    who_has_labels,
)
from fedjax_ssl.config.load import (
    OVERRIDE,
    call_in_file,
    find_config_file,
    load_config_file,
    overlooked,
    overridden_fields,
    override,
    parse_config,
)
from fedjax_ssl.data import server_has_labels
from fedjax_ssl.methods import name_of

__all__ = [
    "ARGUMENTS",
    "OVERRIDE",
    "add_section",
    "apply_arguments",
    "base_config",
    "call_in_file",
    "complete",
    "describe_method",
    "describe_model",
    "differences",
    "find_config_file",
    "flatten",
    "for_seed",
    "labels_revealed",
    "load_config_file",
    "measured_each_round",
    "measures_of",
    "name_of",
    "num_byzantine",
    "other_sections",
    "overlooked",
    "overridden_fields",
    "override",
    "parse_config",
    "ranges",
    "server_has_labels",
    "unknown_images",
    "validate",
    "who_has_labels",
]
