"""What a run's folder says of its method, so that reports need no methods; and what a run measures."""

import json
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.imports import name_of
from fedjax_ssl.config import add_section, base_config, for_seed
from fedjax_ssl.engine.measures import OPEN_SET, of_domains, words_of
from fedjax_ssl.methods import METHODS, find_method


def about(config: ConfigDict, domains: Iterable[str] = ()) -> dict[str, Any]:
    """The contents of about.json, see `fedjax_ssl.records.workdir.read_about`, for the configuration of one run.

    `domains` are those of the test examples, `Dataset.tested_domains`.
    """
    name, method = name_of(config.method), find_method(config.method)
    fields = base_config()
    fields.method = config.method
    found = {
        "title": method.title or name,
        "paper": method.paper,
        "methods": sorted(METHODS),
        "defaults": for_seed(add_section(fields), 0).to_dict(),
        "measures": of_domains(domains)
        | words_of(config.eval_measures)
        | (OPEN_SET if config.data.unknown_classes else {}),
    }
    return json.loads(json.dumps(found))  # JSON turns tuples into lists
