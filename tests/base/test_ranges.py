"""The range of every field, declared beside its default, checked with values inside and outside."""

import functools
import math

import pytest

from fedjax_ssl import base_config
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import shared_fields
from fedjax_ssl.client.confidence import KINDS
from fedjax_ssl.config import apply_arguments, flatten, ranges
from fedjax_ssl.data.labels import LABELS
from fedjax_ssl.data.partition_schemes import PARTITIONS
from fedjax_ssl.engine.measures import MEASURES
from fedjax_ssl.engine.untrusted.attacks import ATTACKS
from fedjax_ssl.engine.untrusted.attacks import LABELS as FALSE_LABELS
from fedjax_ssl.engine.untrusted.compression import COMPRESSIONS
from fedjax_ssl.methods import METHODS, Section, real, several, share, whole, word
from fedjax_ssl.models import CLASSIFIER_INITS
from fedjax_ssl.models.normalisation import POLICIES
from fedjax_ssl.ops.augment.flavours import FLAVOURS
from fedjax_ssl.run.validation import validate
from fedjax_ssl.server.aggregation import MEANS, OPTIMIZERS, WEIGHTS
from fedjax_ssl.server.statistics import SOURCES
from fedjax_ssl.server.statistics import WEIGHTS as BATCH_WEIGHTS

# --- The whole table. ------------------------------------------------------------------------------------------------


def named(*lines):
    """Dotted names from lines such as 'client: epochs batch_size'; ': seed' is a field without a section."""
    names = set()
    for line in lines:
        section, _, fields = line.partition(":")
        names |= {".".join(filter(None, (section, field))) for field in fields.split()}
    assert names <= set(FIELDS)
    return names


FIELDS = flatten(base_config())
RANGES = ranges()
NUMBERS = {field for field, its_range in RANGES.items() if its_range.kind in (int, float)}
FREE_TEXTS = named(
    ": init_from",
    "data: source path partition_file",
    "encoder: weights",
    "data: test_path label_column client_column domain_column server_domain ignore_columns text_column tokenizer",
    "model: name",
)
NEGATIVE = named(
    "data: imbalance",  # reversed
    "confidence: threshold",  # in FedAnchor of a cosine
    "catchfed: energy",
)


@functools.cache
def config_of(section):
    """A configuration with this section, a method's or a shared one."""
    return apply_arguments(base_config(), section if section in METHODS else "fedanchor")


def answer(field, value):
    """The error of `validate` for a value of any type, or None."""
    section, _, name = field.rpartition(".")
    try:
        RANGES[field].check(field, value)
    except UserError as error:  # `validate` begins with these checks, but of all fields
        return of_one_line(field, value, error)
    config = config_of(section).copy_and_resolve_references()
    part = config[section] if section else config
    with part.ignore_type():
        part[name] = value
    try:
        validate(config)
    except UserError as error:
        return of_one_line(field, value, error)
    return None


def of_one_line(field, value, error):
    assert "\n" not in str(error) and field in str(error), f"{field}={value!r}: {error}"
    return str(error)


@pytest.mark.parametrize(
    ("value", "meaningful"),
    [
        (-1, NEGATIVE),
        (math.nan, set()),
        (math.inf, set()),
        ("word", FREE_TEXTS),
        ("", FREE_TEXTS | {"log.wandb_project"}),
    ],
    ids=lambda value: f"{value!r:.6}" if not isinstance(value, set) else "",
)
def test_every_field_refuses_in_one_line_what_means_nothing(value, meaningful):
    assert {field for field in FIELDS if answer(field, value) is None} == meaningful


def test_every_number_takes_zero_or_refuses_it_in_one_line():
    accepted = {field for field in NUMBERS if answer(field, 0) is None}
    assert not accepted & named(": num_rounds", "client: batch_size", "data: alpha") and "client.momentum" in accepted


def test_the_words_of_shared_fields_are_those_of_the_modules_that_read_them():
    """base/fields/ may import no other module, so it repeats these names."""
    declared = {field: set(its_range.choices) for field, its_range in ranges().items() if its_range.choices}
    for field, known in {
        "data.labels": LABELS,
        "data.partition": {*PARTITIONS, "natural", "domains"},
        "model.normalisation": POLICIES,
        "model.statistics": SOURCES,
        "model.statistics_weights": BATCH_WEIGHTS,
        "model.classifier_init": CLASSIFIER_INITS,
        "augment.flavour": FLAVOURS,
        "aggregation.weights": WEIGHTS,
        "aggregation.optimizer": OPTIMIZERS,
        "aggregation.mean": MEANS,
        "attack.kind": {"none", *ATTACKS, FALSE_LABELS, "poison"},
        "compression.kind": {"none", *COMPRESSIONS},
        "confidence.kind": {"acr", *KINDS},
    }.items():
        assert declared[field] == set(known), field
    assert set(ranges()["eval_measures"].each.choices) == set(MEASURES)
    assert shared_fields().ranges()["augment.magnitude"].most == max(f.max_magnitude for f in FLAVOURS.values())


# --- Seeds. ----------------------------------------------------------------------------------------------------------


def test_seeds_reach_to_32_bits():
    most = 2**32 - 1
    for field, value in (("seed", most), ("seeds", (0, most)), ("semianagg.anchor_seed", most)):
        assert answer(field, value) is None
    assert answer("seed", most + 1) == f"seed must be at least 0 and at most {most}, not {most + 1}"
    assert "each at least 0" in answer("seeds", (0, most + 1))


# --- Declarers, by hand. ---------------------------------------------------------------------------------------------


def section_of_all():
    section = Section()
    section.views = whole(2, least=2)
    section.lanes = whole(None, least=1)
    section.weight = real(0.5, least=0, below=1)
    section.temperature = real(0.5, above=0)
    section.part = share(0.5)
    section.order = word("first", "last")
    section.seeds = several((), whole(least=0), distinct=True)
    section.mix = True
    section.path = ""
    section.scale = 1.0
    section.inner = Section()
    section.inner.count = 3
    return section


def test_what_a_range_takes():
    for field, values in {
        "views": (2, 2**31 - 1),
        "lanes": (None, 1),
        "weight": (0, 0.999),
        "temperature": (1e-37, 3e38),
        "part": (0, 1),
        "seeds": ((), (0, 3), [1]),
        "scale": (-1e30, 0, 5),
        "inner.count": (-5, 0),
    }.items():
        for value in values:
            section_of_all().ranges()[field].check(field, value)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("views", 1, "must be at least 2, not 1"),
        ("views", 2**31, "must be at most 2147483647 in size, not 2147483648"),
        ("views", 2.0, "must be a whole number, not 2.0"),
        ("views", True, "must be a whole number, not True"),
        ("weight", 1, "must be at least 0 and below 1, not 1"),
        ("weight", 1 - 1e-12, "must be at least 0 and below 1, not 0.999999999999, which is 1 in computations"),
        ("weight", math.nan, "must be a finite number, not nan"),
        ("temperature", 1e-40, "must be above 0, not 1e-40, which is 0 in computations"),
        ("temperature", 3.5e38, "must be at most 3.4e+38 in size, not 3.5e+38"),
        ("part", 1.1, "must be at least 0 and at most 1, not 1.1"),
        ("order", "lats", "is 'lats'; the nearest is last; known: first, last"),
        ("seeds", (1, 1), "must be different whole numbers, each at least 0, not (1, 1)"),
        ("seeds", (0, "a"), "must be different whole numbers, each at least 0, not (0, 'a')"),
        ("seeds", 3, "must be a tuple, not 3"),
        ("mix", 1, "must be True or False, not 1"),
        ("path", 3, "must be a text, not 3"),
        ("scale", 10**400, f"must be at most 3.4e+38 in size, not {10**400}"),
    ],
)
def test_what_a_range_refuses(field, value, line):
    with pytest.raises(UserError) as refused:
        section_of_all().ranges()[field].check(field, value)
    assert str(refused.value) == f"{field} {line}"


def test_a_section_gives_its_defaults_and_types():
    section = section_of_all()
    config = section.config()
    assert config.to_dict() == {
        "views": 2, "lanes": None, "weight": 0.5, "temperature": 0.5, "part": 0.5, "order": "first", "seeds": (),
        "mix": True, "path": "", "scale": 1.0, "inner": {"count": 3},
    }  # fmt: skip
    assert config.get_type("lanes") is int and section.views == 2 and section.inner.count == 3
    with pytest.raises(AttributeError, match="no field nothing"):
        section.nothing  # noqa: B018
    with pytest.raises(UserError, match="the default of views must be at least 2, not 1"):
        section.views = whole(1, least=2)
