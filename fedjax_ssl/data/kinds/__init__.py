"""Kinds of inputs: images, features, tables and texts.

Each kind has its own file and an entry in `KINDS`. Kinds use augmentation, but know nothing about networks and
federations. The data of a run determine its kind: `facts["kind"]` names it; without this entry the kind is images.
"""

from collections.abc import Mapping
from typing import Any

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.data.kinds import features, images, table, text
from fedjax_ssl.data.kinds.images import Images
from fedjax_ssl.data.kinds.kind import Inputs, Kind

IMAGE = "image"
KINDS: dict[str, Kind] = {IMAGE: images.KIND, "features": features.KIND, "table": table.KIND, "text": text.KIND}


def kind_name(facts: Mapping[str, Any]) -> str:
    """The name of the kind of a data set's inputs."""
    return facts.get("kind", IMAGE)


def kind_of(facts: Mapping[str, Any]) -> Kind:
    """The kind of a data set's inputs; raises a UserError if this library has no such kind."""
    name = kind_name(facts)
    if name not in KINDS:
        raise UserError(f"the data are of the kind {name!r}{known_are(name, KINDS)}")
    return KINDS[name]
