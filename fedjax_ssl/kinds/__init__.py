"""Kinds of inputs: a file each, one line here. They know augmentation, and nothing of networks and federations.

The kind of a run's inputs follows from its data; `facts["kind"]` names it, and facts without it are of images.
"""

from collections.abc import Mapping
from typing import Any

from fedjax_ssl.errors import known_are
from fedjax_ssl.kinds import features, images, table, text
from fedjax_ssl.kinds.images import Images
from fedjax_ssl.kinds.kind import Inputs, Kind

__all__ = ["IMAGE", "KINDS", "Images", "Inputs", "Kind", "kind_name", "kind_of", "wrong_facts"]

IMAGE = "image"
KINDS: dict[str, Kind] = {IMAGE: images.KIND, "features": features.KIND, "table": table.KIND, "text": text.KIND}


def kind_name(facts: Mapping[str, Any]) -> str:
    """The name of the kind of a data set's inputs."""
    return facts.get("kind", IMAGE)


def kind_of(facts: Mapping[str, Any]) -> Kind:
    """The kind of a data set's inputs."""
    return KINDS[kind_name(facts)]


def wrong_facts(facts: Mapping[str, Any]) -> str:
    """Why facts that were read from a file describe no inputs, or ''."""
    name = kind_name(facts)
    return kind_of(facts).wrong(facts) if name in KINDS else f"kind is {name!r}{known_are(name, KINDS)}"
