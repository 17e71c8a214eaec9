"""A run's configuration in words. Functions take nested dicts or a ConfigDict, with all fields."""

from typing import Any

from fedjax_ssl.data import server_has_labels
from fedjax_ssl.data.federated import num_attackers


def labels_revealed(config: Any) -> bool:
    """Whether a configuration (nested dicts or a ConfigDict) is an upper bound that sees the clients' labels."""
    return bool(config["data"]["reveal_labels"] or config["data"]["centralised"])


def number_of(number: int, noun: str) -> str:
    """A number of things, such as '1 label' or '1,000 labels'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def num_byzantine(config: Any) -> int:
    """How many clients of a run attack. The configuration is nested dicts or a ConfigDict."""
    return num_attackers(config["attack"]["share"], config["num_clients"]) if config["attack"]["kind"] != "none" else 0


def measured_each_round(config: Any) -> str:
    """The set on which each round's model is measured: 'validation' if images are held out for it, else 'test'."""
    return "validation" if config["data"]["validation"] else "test"


def describe_model(config: Any) -> str:
    """What a run's model is called, with its encoder; `config` is nested dicts or a ConfigDict, complete."""
    encoder, model = config["encoder"], config["model"]["name"].rstrip("/").rpartition("/")[2]  # without a folder
    if encoder["name"] == "none":
        return model
    rank = encoder["adapters"]["rank"]
    return f"{encoder['name']}, adapters of rank {rank}" if rank else f"{model} on features of {encoder['name']}"


def who_has_labels(config: Any, noun: str = "images", labelled: int | None = None) -> str:
    """Who holds labels, in words.

    `noun` is what examples are called, and `labelled` how many of the clients' have labels, None if unknown.
    """
    data = config["data"]
    if data["centralised"]:
        return f"the server has all {noun}, with their labels"
    at_server = f"{number_of(data['server_labels'], 'label')} at the server" if server_has_labels(data) else ""
    if data["reveal_labels"]:
        return f"{at_server}{', and ' if at_server else ''}every client has labels for all its {noun}"
    if data["labels"] == "server":
        return at_server or "nobody has labels"
    if data["labels"] == "profile" and not data["partition_file"]:
        profile = data["label_profile"]
        drawn = isinstance(profile[0], str)
        which = f"drawn by {profile[0]}" if drawn else f"{100 * min(profile):.4g} to {100 * max(profile):.4g} %"
        text = f"each client has labels for a share of its own of its {noun}, {which}"
    elif data["labels"] == "some_clients":
        number, one = data["labelled_clients"], data["labelled_clients"] == 1
        text = f"{number:,} of {config['num_clients']:,} clients {'has' if one else 'have'} labels for all "
        text += f"{'its' if one else 'their'} {noun}"
    elif data["partition_file"]:
        text = f"clients have labels for the {noun} that {data['partition_file']} names"
    elif data["num_labelled"]:
        text = f"clients have labels for {data['num_labelled']:,} {noun}, divided separately"
    elif data["labels_per_class"]:
        number = number_of(data["labels_per_class"], noun.removesuffix("s"))
        text = f"every client has labels for {number} of each of its classes"
    else:
        text = f"every client has labels for {100 * data['labelled_share']:.4g} % of its {noun}"
    text = text if labelled is None else f"{text}: {labelled:,} in all"
    return f"{at_server}, and {text}" if at_server else text


def is_private(config: Any) -> bool:
    """Whether a run promises differential privacy: with noise that does not follow from the seed."""
    privacy = config["privacy"]
    return bool(privacy["noise"]) and not privacy["reproducible"]


def unknown_images(config: Any) -> str:
    """Which of the clients' images are of no class of the model, in words; '' if there are none."""
    data = config["data"]
    if not data["unknown_classes"]:
        return ""
    classes = ", ".join(map(str, data["unknown_classes"]))
    which = f"the class{'es' if ',' in classes else ''} {classes}"
    return f"{100 * data['unknown_share']:.4g} % of the clients' images are unknown to the model, of {which}"
