"""The description of a method in the registry: one entry, in the method's file."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, shared_fields
from fedjax_ssl.data.labels import LABELS as LABELS_AT
from fedjax_ssl.engine import Method, Problem

Factory = Callable[..., Any]  # makes a head's module
Variants = Mapping[str, Mapping[str, Any]]  # name -> the variant's values of fields


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method in the registry."""

    factory: Callable[[Problem], Method]  # problem -> Method
    title: str = ""  # its name in prose
    paper: str = ""  # the paper's address; '' for none
    settings: tuple[str, ...] = ("server",)  # the values of `data.labels` that it accepts
    # Makes the method's section of the configuration, with the ranges of its fields. None: no section.
    defaults: Callable[[], Section] | None = None
    # Values of shared fields that are set when the method is named in a config's arguments.
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Name -> values of fields, for variants such as the systems in its paper's tables.
    variants: Variants = dataclasses.field(default_factory=dict)
    # The model's heads besides the classifier, see `fedjax_ssl.models.heads`. Name -> function of `config.model` that
    # returns the head's factory, or None for a second classifier.
    heads: Mapping[str, Callable[[ConfigDict], Factory | None]] = dataclasses.field(default_factory=dict)
    # Head -> function of the configuration that says whether a run has it. Heads not named here are always present.
    heads_if: Mapping[str, Callable[[ConfigDict], bool]] = dataclasses.field(default_factory=dict)
    # Companions, further networks whose models are sent with the main one, see `fedjax_ssl.models.network`. Name ->
    # function of the configuration that returns the companion's heads.
    companions: Mapping[str, Callable[[ConfigDict], Mapping[str, Factory]]] = dataclasses.field(default_factory=dict)
    # The head whose outputs represent images in figures and predictions; '': the backbone's features.
    embedding: str = ""
    # Which of the fields 'kind', 'threshold' and 'debias' of `config.confidence` it uses. It refuses another 'kind' or
    # 'debias'; another 'threshold', as all rows of a sweep may have it, is only told.
    confidence: tuple[str, ...] = ("kind", "threshold", "debias")
    # Whether `attack.kind='labels'` changes all labels that its clients train on, see
    # `fedjax_ssl.client.labels.as_told`.
    mislabels: bool = False
    needs_labels: bool = True  # False: it also runs where nobody has labels, with `data.server_labels=0`
    unlabelled: bool = True  # whether its clients train on unlabelled images, as `attack.kind='poison'` needs
    images_alone: str = ""  # why it refuses other inputs, as in 'turns images by quarters'; '': it accepts all
    # Configuration -> a warning before the first round that names the risk of these settings and a remedy; '': no
    # warning.
    advice: Callable[[ConfigDict], str] = lambda config: ""
    # For tests: fields for a run of a few seconds in which every part of the method is active.
    tiny: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # For tests: the rounds of the tiny run, 1 or 2, that lack metrics because a part of the method is inactive.
    rests: tuple[int, ...] = ()
    not_with_flower: str = ""  # for tests: the error with which Flower refuses the tiny run; '': no error
    # The section of the configuration that the method's code reads; '': the one with the method's own name. A changed
    # copy of a method of the library, `dataclasses.replace(METHODS["fixmatch"], ...)`, thus reads that method's.
    reads: str = ""

    def section(self) -> Section | None:
        """The fields of the method's section, with their ranges; None without a section."""
        return None if self.defaults is None else self.defaults()

    def heads_of(self, config: ConfigDict) -> dict[str, Callable[[ConfigDict], Factory | None]]:
        """The heads that a run's model has besides the classifier."""
        return {name: make for name, make in self.heads.items() if self.heads_if.get(name, lambda _: True)(config)}


def labels_alone(config: ConfigDict, field: str) -> str:
    """Advice if the run ends before the round, `field` of the configuration, from which unlabelled images are used."""
    section, name = field.split(".")
    if config[section][name] < config.num_rounds:
        return ""
    return f"all {config.num_rounds} rounds train on labels alone, since {field} is {config[section][name]}; lower it"


def few_labels(config: ConfigDict) -> str:
    """Advice if clients have labels for a few of their images, and most steps are on pseudo-labels."""
    data = config.data
    are_few = data.labelled_share < 1 or data.num_labelled or data.labels_per_class
    if data.labels != "clients" or data.reveal_labels or not are_few:
        return ""
    return (
        f"{config.method} is made for clients that have labels for all of their images or for none; with a tenth at "
        "each client it ended below the labels alone on digits and MNIST; fixmatch has a labelled batch in every step"
    )


def one_mean(config: ConfigDict) -> str:
    """Advice if clients with labels for all images and clients without any count alike in the mean."""
    told = (
        f"{config.method} counts clients with and without labels alike; with 3 of 20 labelled it ended below labels "
        "alone on digits and MNIST; fedavg_semi trains as fixmatch does, and labelled clients have half of the weight"
    )
    return told if config.data.labels == "some_clients" else ""


def unlabelled_backbone(config: ConfigDict) -> str:
    """Advice if a method that trains its backbone without labels has fewer rounds than its paper."""
    told = f"{config.method} trains its backbone without labels, in its paper for 100 rounds; 40 were too few"
    return f"{told} on digits and MNIST" if config.num_rounds < 100 else ""


def check_entry(name: str, entry: Entry, where: str = "") -> None:
    """Checks a method's entry before it is used in a configuration; `where` is a prefix of the error's message.

    Raises a UserError if the entry names an unknown field, head or place of labels, or sets a field to a value of
    another type or out of its range.
    """
    fields = shared_fields()
    if entry.defaults is not None:
        setattr(fields, entry.reads or name, entry.section())
    config, ranges = fields.config().lock(), fields.ranges()
    for what, words, known in (
        ("settings", entry.settings, LABELS_AT),
        ("confidence", entry.confidence, ("kind", "threshold", "debias")),
        ("embedding", filter(None, [entry.embedding]), entry.heads),
        ("heads_if", entry.heads_if, entry.heads),
    ):
        for word in words:
            if word not in known:
                raise UserError(f"{where}{what} of {name} names {word!r}; known: {', '.join(known) or 'none'}")
    for what, values in {**entry.variants, "fields": entry.fields, "tiny": entry.tiny}.items():
        for field, value in values.items():
            try:
                config.update_from_flattened_dict({field: value})
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{where}{what} of {name} sets {field} to {value!r}: no such field, or one of another type"
                ) from error
            ranges[field].check(f"{where}{what} of {name}: {field}", value)
