"""What the library knows about a method besides its code: one entry, in the method's file."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.data.labels import LABELS as LABELS_AT
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.fields import Section, shared_fields

Factory = Callable[..., Any]  # of a head's module
Variants = Mapping[str, Mapping[str, Any]]  # name -> fields in which a variant differs


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method, as the registry has it."""

    factory: Callable[[Problem], Method]  # problem -> Method
    title: str = ""  # what it is called in a sentence
    paper: str = ""  # the paper's address; '' for none
    settings: tuple[str, ...] = ("server",)  # where labels may be for it, see `data.labels`
    # Makes the section of the configuration that bears the method's name, with the ranges of its fields; a ConfigDict
    # has none but its defaults' kinds. None: there is no such section.
    defaults: Callable[[], Section | ConfigDict] | None = None
    # Shared fields that it needs at other values, set by naming it in a config's arguments.
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Name -> fields in which a variant differs, such as the systems of its paper's tables.
    variants: Variants = dataclasses.field(default_factory=dict)
    # Name -> function of `config.model` that gives the head's factory: the heads that its model has besides the
    # classifier, see `fedjax_ssl.models.heads`; None for a second classifier.
    heads: Mapping[str, Callable[[ConfigDict], Factory | None]] = dataclasses.field(default_factory=dict)
    # Head -> whether a run has it, by its configuration; a head that is not named is always there.
    heads_if: Mapping[str, Callable[[ConfigDict], bool]] = dataclasses.field(default_factory=dict)
    # Name -> function of the configuration that gives the heads of a second network, whose model travels with the first
    # one's: see `fedjax_ssl.models.network`.
    companions: Mapping[str, Callable[[ConfigDict], Mapping[str, Factory]]] = dataclasses.field(default_factory=dict)
    # The head whose outputs represent an image in pictures and predictions; '': the backbone's features.
    embedding: str = ""
    # The fields of `config.confidence`, of 'kind' and 'debias', that it reads; it refuses the others.
    confidence: tuple[str, ...] = ("kind", "debias")
    # Whether `attack.kind` 'labels' reaches all the labels that its clients train on, see
    # `fedjax_ssl.client.labels.as_told`.
    mislabels: bool = False
    unlabelled: bool = True  # whether its clients train on images without labels, which `attack.kind` 'poison' crafts
    images_alone: str = ""  # why other inputs are refused, as in 'turns images by quarters'; '': it takes every kind
    # Function of the configuration: a warning before the first round, what may go wrong with these settings and what
    # helps; '' for none.
    advice: Callable[[ConfigDict], str] = lambda config: ""
    # Fields for a run of a few seconds, in which every part of the method has something to do; tests.
    tiny: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The rounds of the tiny run, 1 or 2, in which a part of the method has nothing to do, so that metrics are missing;
    # tests.
    rests: tuple[int, ...] = ()
    not_with_flower: str = ""  # what the error says with which Flower refuses the tiny run; '' if it takes it; tests
    # The name under which the method's code, `fields`, `variants` and `tiny` know its section; '': that of the factory.
    # It matters where a user's file gives a method of the library another name, see `named`.
    reads: str = ""

    def derived(
        self, factory: Callable[[Problem], Method] | None = None, *, defaults: Mapping[str, Any] = {}, **changes: Any
    ) -> "Entry":
        """A changed version of this method, for a user's file. It has the section of this one, under its own name.

        Args:
            factory: problem -> Method, which may call this entry's and replace stages of the result; None: this one's.
            defaults: other values of fields of the section; a new field is declared, as in `real(0.5, above=0)`.
            changes: other attributes; `fields` and `variants` are added to this entry's, the rest replaces it.

        Raises:
            UserError: when its section is made: a default is out of the field's range, or of no field.
        """
        for added in {"fields", "variants"} & set(changes):
            changes[added] = {**getattr(self, added), **changes[added]}
        if defaults:
            changes["defaults"] = lambda: Section.of(self.defaults() if self.defaults else Section()).changed(defaults)
        return dataclasses.replace(self, factory=factory or self.factory, reads=self.known_as, **changes)

    @property
    def known_as(self) -> str:
        """The name of its section in its code."""
        return self.reads or getattr(self.factory, "__name__", "")

    def section(self) -> Section | None:
        """The fields of its section, with their ranges."""
        return None if self.defaults is None else Section.of(self.defaults())

    def heads_of(self, config: ConfigDict) -> dict[str, Callable[[ConfigDict], Factory | None]]:
        """The heads that a run's model has besides the classifier."""
        return {name: make for name, make in self.heads.items() if self.heads_if.get(name, lambda _: True)(config)}


def named(name: str, entry: Entry) -> Entry:
    """The entry under another name: its section is `config.{name}`, which its code finds as `config.{entry.known_as}`.

    So a changed copy of a method, or what `Entry.derived` gives, has fields of its own and leaves the library's alone.
    """
    known = entry.known_as

    def seen(config: ConfigDict) -> ConfigDict:
        config = config.copy_and_resolve_references()
        with config.unlocked():
            config[known] = config[name]
        return config

    def of_seen(functions: Mapping[str, Callable[[ConfigDict], Any]]) -> dict[str, Any]:
        return {key: lambda config, function=function: function(seen(config)) for key, function in functions.items()}

    def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {re.sub(rf"^{re.escape(known)}\.", f"{name}.", field): value for field, value in fields.items()}

    return dataclasses.replace(
        entry,
        factory=lambda problem: entry.factory(problem._replace(config=seen(problem.config))),
        fields=renamed(entry.fields),
        variants={variant: renamed(fields) for variant, fields in entry.variants.items()},
        heads_if=of_seen(entry.heads_if),
        companions=of_seen(entry.companions),
        advice=lambda config: entry.advice(seen(config)),
        tiny=renamed(entry.tiny),
        reads=name,
    )


def check_entry(name: str, entry: Entry, where: str = "") -> None:
    """Checks an entry before a configuration relies on it.

    Args:
        name: of the method.
        entry: its entry.
        where: begins the message.

    Raises:
        UserError: it names an unknown field, head or place of labels, or gives a field a value of another type or out
            of its range.
    """
    fields = shared_fields()
    if entry.defaults is not None:
        setattr(fields, name, entry.section())
    config, ranges = fields.config().lock(), fields.ranges()
    for what, words, known in (
        ("settings", entry.settings, LABELS_AT),
        ("confidence", entry.confidence, ("kind", "debias")),
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
            except (AttributeError, KeyError):
                raise UserError(f"{where}{what} of {name} sets {field}, which is not a field") from None
            except (TypeError, ValueError):
                raise UserError(f"{where}{what} of {name} sets {field} to {value!r}, of another type") from None
            ranges[field].check(f"{where}{what} of {name}: {field}", value)
