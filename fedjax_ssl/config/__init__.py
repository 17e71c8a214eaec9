"""A run's configuration: its fields with their defaults, and loading. Imports methods, but nothing that runs.

`base_config()` has every field. `load_config_file` reads a config file, `parse_config` also words of a command line.
"""

from fedjax_ssl.base.fields import differences, flatten
from fedjax_ssl.config.base import (
    ARGUMENTS,
    add_section,
    apply_arguments,
    base_config,
    for_seed,
    numbers_of,
    ranges,
    replace_numbers,
    typed,
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
