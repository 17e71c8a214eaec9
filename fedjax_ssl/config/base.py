"""Every field with its default, checks, comparison, and the arguments of config files."""

import json
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.augment import check_rand_augment
from fedjax_ssl.config.renamed import translated
from fedjax_ssl.data import check_labels, server_has_labels
from fedjax_ssl.data.federated import num_attackers
from fedjax_ssl.data.unknown import check_unknown, has_unknown
from fedjax_ssl.engine.measures import OPEN_SET, words_of
from fedjax_ssl.errors import UserError, nearest
from fedjax_ssl.fields import ARGUMENT_FIELDS, RECIPES, WORDS, Range, Section, shared_fields
from fedjax_ssl.imports import forget_changed, is_own
from fedjax_ssl.methods import METHODS, find_method, known_method, registered, section_of
from fedjax_ssl.models import BACKBONES

# Arguments after the colon of any config file, besides methods and their variants.
ARGUMENTS = {**RECIPES, **{name: {"model.name": name} for name in BACKBONES}, **WORDS}


def base_config() -> ConfigDict:
    """All fields with their defaults, locked: FedAnchor as in its paper on CIFAR-10; `data` sets whether it is IID."""
    return _all_fields().config().lock()


def ranges(method: str = "") -> dict[str, Range]:
    """The range of every field, by dotted names, as `validate` reads it.

    Args:
        method: a method from a file, whose section is included.
    """
    return _all_fields(method).ranges()


def _all_fields(method: str = "") -> Section:
    fields, entries = shared_fields(), dict(METHODS)
    if method:
        entries[section_of(method)] = find_method(method)
    for name, entry in entries.items():
        if entry.defaults is not None:
            setattr(fields, name, entry.section())
    return fields


def add_section(config: ConfigDict) -> ConfigDict:
    """The configuration with the section of its own method. What it lacks of it is added, as for a method from a file.

    From here on a file that was imported and has changed since is imported again.

    Raises:
        UserError: there is no such method.
    """
    forget_changed()
    name, section = section_of(config.method), find_method(config.method).section()
    if section is not None and flatten(section.config()).keys() - flatten(config.get(name, {})).keys():
        with config.unlocked():  # which a frozen one refuses
            config[name] = section.config(config.get(name))
    return config


def validate(config: ConfigDict) -> None:
    """Checks the range of every field, and fields that depend on each other; a run's parts check what needs the data.

    Args:
        config: gets what it lacks of its method's section, and Python's numbers in place of NumPy's in tuples.

    Raises:
        UserError: one line that names the field, its value and what it may be.
    """
    shared_fields().ranges()["method"].check("method", config.method)
    method = find_method(add_section(config).method)
    section = section_of(config.method)
    for field, value in flatten(config).items():
        if isinstance(value, tuple) and any(isinstance(entry, np.generic) for entry in value):
            plain = tuple(entry.item() if isinstance(entry, np.generic) else entry for entry in value)
            config.update_from_flattened_dict({field: plain})
    values = flatten(config)
    for field, its_range in ranges(config.method).items():
        if field in values:
            its_range.check(field, values[field])
    check_labels(config.data, config.num_clients)
    check_unknown(config.data, len(config.seeds))
    if config.data.labels not in method.settings:
        known = ", ".join(map(repr, method.settings))
        raise UserError(f"data.labels is {config.data.labels!r}; known to the method {section}: {known}")
    for field, default in {"kind": "fixed", "debias": "none"}.items():
        if field not in method.confidence and config.confidence[field] != default:
            value = config.confidence[field]
            raise UserError(f"confidence.{field}={value!r} is not for the method {section}, which does not read it")
    if config.attack.kind == "labels" and not method.mislabels:
        raise UserError(f"attack.kind='labels' is not for the method {section}, whose clients label in their own way")
    if config.attack.kind == "poison":
        if not method.unlabelled:
            raise UserError(f"attack.kind='poison' is not for the method {section}, which uses no unlabelled image")
        if config.attack.from_class == config.attack.to_class:
            raise UserError(f"attack.from_class and attack.to_class are both {config.attack.to_class}")
    if config.data.labels == "server" and config.data.server_labels < 1:
        raise UserError(f"data.server_labels must be at least 1, not {config.data.server_labels}")
    if config.stop.patience and not config.data.validation:
        raise UserError(f"stop.patience={config.stop.patience} needs validation images; set data.validation, as in 500")
    if config.eval_clients_every and not config.data.client_test_share:
        raise UserError(
            f"eval_clients_every={config.eval_clients_every} needs test images of clients; set data.client_test_share, "
            "as in 0.2"
        )
    if config.stop.patience and config.personal_parts and not server_has_labels(config.data):
        raise UserError(
            f"stop.patience={config.stop.patience} looks at the global model, whose {config.personal_parts[0]} nobody "
            "trains with personal_parts; set it to 0"
        )
    if config.personal_first and not config.personal_parts:
        raise UserError(
            f"personal_first={config.personal_first:g} is of steps for personal_parts; set these, as in ('classifier',)"
        )
    check_rand_augment(config.augment.flavour, config.augment.num_ops, config.augment.magnitude)
    if "knn" in config.eval_measures and not server_has_labels(config.data):
        raise UserError(
            f"eval_measures has 'knn', which needs labelled images at the server, but data.labels is "
            f"{config.data.labels!r}{' and data.server_labels 0' if config.data.labels == 'profile' else ''}"
        )
    if config.clients_per_round > config.num_clients:
        raise UserError(
            f"clients_per_round is {config.clients_per_round}, but the federation has num_clients = "
            f"{config.num_clients}"
        )
    if config.log.wandb_project:
        _check_wandb()


def _check_wandb() -> None:
    try:
        import wandb
    except ImportError:
        wandb = None
    if not hasattr(wandb, "init"):  # W&B's runs leave a folder with this name, which can be imported
        raise UserError("log.wandb_project needs the package wandb: pip install 'fedjax_ssl[wandb]'")


def for_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """The configuration of one of the runs in `config.seeds`, as if it were run alone."""
    config = config.copy_and_resolve_references()
    config.seed, config.seeds = seed, ()
    with config.unlocked():
        for name in _foreign_sections(config.method):
            if name in config:
                del config[name]
    return config


def _foreign_sections(method: str) -> set[str]:
    """Sections of registered methods other than the run's, which are not saved with a run.

    Otherwise runs could not be resumed if these methods are missing or have changed.
    """
    return registered() - {section_of(method)}


def labels_revealed(config: Any) -> bool:
    """Whether a configuration (nested dicts or a ConfigDict) is an upper bound that sees the clients' labels."""
    return bool(config["data"]["reveal_labels"] or config["data"]["centralised"])


def num_byzantine(config: Any) -> int:
    """How many clients of a run attack. The configuration is nested dicts or a ConfigDict."""
    return num_attackers(config["attack"]["share"], config["num_clients"]) if config["attack"]["kind"] != "none" else 0


def measured_each_round(config: Any) -> str:
    """The set on which a model's accuracy and loss are measured after each round.

    Args:
        config: nested dicts or a ConfigDict, complete.

    Returns:
        'validation' if images are held out for it, else 'test'. Names of metrics, summaries and curves contain it.
    """
    return "validation" if config["data"]["validation"] else "test"


def measures_of(config: Any) -> dict[str, str]:
    """What is measured besides accuracy and loss: names of metrics, without that of the set, -> words."""
    return {**words_of(config["eval_measures"]), **(OPEN_SET if has_unknown(config["data"]) else {})}


def describe_method(name: str) -> tuple[str, str]:
    """A method's title, and its paper's address; its name and '' if this process does not know the method."""
    method = known_method(name)
    return (section_of(name), "") if method is None else (method.title or section_of(name), method.paper)


def describe_model(config: Any) -> str:
    """What a run's model is called, with its encoder; `config` is nested dicts or a ConfigDict, complete."""
    encoder, model = config["encoder"], config["model"]["name"].rstrip("/").rpartition("/")[2]  # without a folder
    if encoder["name"] == "none":
        return model
    rank = encoder["adapters"]["rank"]
    return f"{encoder['name']}, adapters of rank {rank}" if rank else f"{model} on features of {encoder['name']}"


def other_sections(method: str) -> set[str]:
    """The sections of a configuration that belong to other methods."""
    return set(METHODS) - {section_of(method)}


def who_has_labels(config: Any, labelled: int | None = None) -> str:
    """Who holds labels, in words, as in '500 labels at the server'.

    Args:
        config: nested dicts or a ConfigDict, complete.
        labelled: how many of the clients' images have labels, for the text; None: unknown.
    """
    data = config["data"]
    if data["centralised"]:
        return "the server has all images, with their labels"
    at_server = ""
    if server_has_labels(data):
        at_server = f"{data['server_labels']:,} label{'s' if data['server_labels'] != 1 else ''} at the server"
    if data["reveal_labels"]:
        return f"{at_server}{', and ' if at_server else ''}every client has labels for all its images"
    if data["labels"] == "server":
        return at_server
    if data["labels"] == "profile" and not data["partition_file"]:
        profile = data["label_profile"]
        drawn = isinstance(profile[0], str)
        which = f"drawn by {profile[0]}" if drawn else f"{100 * min(profile):.4g} to {100 * max(profile):.4g} %"
        text = f"each client has labels for a share of its own of its images, {which}"
    elif data["labels"] == "some_clients":
        number, one = data["labelled_clients"], data["labelled_clients"] == 1
        text = f"{number:,} of {config['num_clients']:,} clients {'has' if one else 'have'} labels for all "
        text += f"{'its' if one else 'their'} images"
    elif data["partition_file"]:
        text = f"clients have labels for the images that {data['partition_file']} names"
    elif data["num_labelled"]:
        text = f"clients have labels for {data['num_labelled']:,} images, divided apart from the others"
    elif data["labels_per_class"]:
        number = data["labels_per_class"]
        text = f"every client has labels for {number:,} image{'s' if number != 1 else ''} of each of its classes"
    else:
        text = f"every client has labels for {100 * data['labelled_share']:.4g} % of its images"
    text = text if labelled is None else f"{text}: {labelled:,} in all"
    return f"{at_server}, and {text}" if at_server else text


def unknown_images(config: Any) -> str:
    """Which of the clients' images are of no class of the model, in words; '' if there are none."""
    data = config["data"]
    if not has_unknown(data):
        return ""
    classes = ", ".join(map(str, data["unknown_classes"]))
    of = [
        f"the class{'es' if ',' in classes else ''} {classes}" if classes else "",
        f"{data['unknown_drawn']} classes drawn by the seed" if data["unknown_drawn"] else "",
        data["unknown_source"].rpartition("/")[2],
    ]
    which = " and ".join(filter(None, of))
    return f"{100 * data['unknown_share']:.4g} % of the clients' images are unknown to the model, of {which}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The fields in which two configurations (as nested dicts) differ: name -> (old value, new value)."""
    flat_old, flat_new = flatten(old), flatten(new)
    missing = "(no such field)"
    pairs = {name: (flat_old.get(name, missing), flat_new.get(name, missing)) for name in {**flat_old, **flat_new}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def complete(old: dict[str, Any]) -> dict[str, Any]:
    """Completes a configuration that an earlier version wrote, with the defaults of newer fields.

    The default of a new field is what the library did before it had the field, so that runs can be resumed. Code that
    the configuration names is not run: defaults of a method from a file are added only if it is already imported.

    Raises:
        UserError: it is not a configuration: a section or a field has the wrong type.
    """
    if not isinstance(old, dict):
        raise UserError(f"it is not a configuration, but {type(old).__name__}")
    if not isinstance(old.get("method", ""), str):
        raise UserError(f"method is {old['method']!r}, which is not a name")
    old = translated(old)
    filled = json.loads(json.dumps(base_config().to_dict()))
    name = old.get("method", filled["method"])
    for section in _foreign_sections(name):
        filled.pop(section, None)
    method = known_method(name)
    if method is not None and method.defaults is not None:
        filled.setdefault(section_of(name), json.loads(json.dumps(method.section().config().to_dict())))
    _check_kinds(old, filled)
    for section, value in old.items():
        if isinstance(value, dict) and isinstance(filled.get(section), dict):
            filled[section].update(value)
        else:
            filled[section] = value
    return filled


def _check_kinds(old: dict[str, Any], known: dict[str, Any], prefix: str = "") -> None:
    """Raises a UserError for a value of another type than the default's, since a file may contain anything."""
    for name, default in known.items():
        value = old.get(name, default)
        if isinstance(default, dict) and isinstance(value, dict):
            _check_kinds(value, default, f"{prefix}{name}.")
        elif isinstance(default, dict):
            raise UserError(f"{prefix}{name} is {value!r}, but must be a section of fields")
        elif default is not None and value is not None and not isinstance(value, _alike(default)):
            raise UserError(f"{prefix}{name} is {value!r}, but must be of the kind of {default!r}")


def _alike(default: Any) -> type | tuple[type, ...]:
    return (int, float) if isinstance(default, int | float) else type(default)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested dict to dotted names."""
    flat = {}
    for name, value in nested.items():
        if isinstance(value, dict | ConfigDict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def apply_arguments(config: ConfigDict, arguments: str) -> ConfigDict:
    """Applies the part of `--config=FILE:ARGUMENTS` after the colon: 'semifl,strong,wrn28_2,server_labels=500'.

    Args:
        config: is changed in place.
        arguments: separated by commas and applied in order: name=value pairs of `ARGUMENT_FIELDS`; the name of a
            method, which replaces the file's, or method=FILE.py:NAME (both reset `confidence`); a variant of the
            method; a recipe; a backbone or its import path; 'iid'; 'two_classes', for each client; 'centralised', the
            fully supervised upper bound without a federation.

    Returns:
        The configuration.

    Raises:
        UserError: for an unknown name, or a value that is not of the field's type.
    """
    fields = ARGUMENT_FIELDS
    for argument in filter(None, arguments.split(",")):
        variants = {**ARGUMENTS, **find_method(config.method).variants}
        name, equals, text = argument.partition("=")
        if argument in METHODS or (equals and name == "method"):
            config.method = text if equals else name
            config.confidence.update(shared_fields().config().confidence)  # its rule was chosen for the file's method
            add_section(config).update_from_flattened_dict(find_method(config.method).fields)
        elif equals and name in fields:
            kind = type(_get(config, fields[name]))
            try:
                config.update_from_flattened_dict({fields[name]: kind(text)})
            except ValueError:
                raise UserError(f"config argument {name} takes a value of type {kind.__name__}, not {text!r}") from None
        elif not equals and name in variants:
            config.update_from_flattened_dict(variants[name])
        elif is_own(argument):
            config.model.name = argument
        else:
            words = [*METHODS, *variants]
            known = [*words, "method=FILE.py:NAME", *(f"{field}=..." for field in fields)]
            hint = nearest(name, [*words, *fields])
            raise UserError(f"unknown config argument {argument!r}{hint}; known: {', '.join(known)}")
    return config


def _get(config: ConfigDict, dotted: str):
    for name in dotted.split("."):
        config = config[name]
    return config
