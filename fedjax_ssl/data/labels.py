"""What a label is, the same in all sources; who holds labels, and which: draws and checks of the fields."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from fedjax_ssl.base.errors import UserError, known_are, say
from fedjax_ssl.data.long_tail import draw_of_each_class
from fedjax_ssl.data.values import DATE, LIST, in_order, is_missing, is_number, same, text_of

LABELS = ("server", "clients", "some_clients", "profile")  # who holds labels
NO_LABEL = ("-1", "unlabelled", "unlabeled")  # besides missing values
AMBIGUOUS = ("na", "n/a", "null", "none")  # missing values that may also name a class
MOST_FRACTIONS = 100  # different labels with decimals; more, and more than a tenth of the labels, are measurements
TEST_EVERY = 5  # without a test set, every fifth labelled example of a class is for testing
_say_once = functools.cache(say)
_BETA = re.compile(r"\s*beta\(([^(),]+),([^(),]+)\)\s*")


class Labels(NamedTuple):
    """Labels as they are stored."""

    codes: np.ndarray  # int32 [N], each example's class; -1: it has no label
    names: tuple[str, ...]  # the classes' names, in the order of their codes


def has_no_label(name: str) -> bool:
    """Whether a text marks an example without a label, in any source."""
    text = same(name.strip()).lower()
    return text in NO_LABEL or (is_missing(text) and text not in AMBIGUOUS)


def read_labels(values: Any, where: str, names: Sequence[str] | None = None) -> Labels:
    """Reads the labels of any source by one rule.

    * No label: -1 as a number or a text, a missing value (None, NaN, an empty text, '?', 'nan'), and the words
      'unlabelled' and 'unlabeled'. 'NA', 'N/A', 'null' and 'none' are refused, since they may name a class.
    * Classes are numbers, texts or booleans. Equal numbers are one class: 0, 0.0, '0' and '0.0'. A text such as '01' is
      no number. Negative numbers are refused, since -1 marks no label.
    * Order: that of numbers if all classes are numbers, else of the letters' code points; or that of `names`.

    Prints a line with the number of rows that have -1.

    Args:
        values: [N] or, with one column, [N, 1].
        where: the file and the array or column, for messages.
        names: the classes' names, if the source or the training data give them; None: the classes are the values.

    Raises:
        UserError: a value is a list, a date or no class, or there are fewer than two classes.
    """
    texts, places = _distinct(values, where)
    known = {same(name.strip()): name for name in names or ()}
    why = ""
    for number, text in enumerate(texts):
        if text in known or has_no_label(text):
            if text == "-1" and text not in known:
                count = np.count_nonzero(places == number)
                line = f"-1 in {count:,} of {len(places):,} rows marks no label; if it is a class, give it another name"
                say(f"{where}: {line}")
        elif text.lower() in AMBIGUOUS:
            why = "may be a class or a missing label; leave the field empty if the row has no label, or give the class "
            why += "another name"
        elif known:
            why = f"is no class of the training data{known_are(text, known.values())}"
        elif re.fullmatch(f"{DATE}|{LIST}", text):
            why = "is a date or a list; a label is one number, text or boolean, and an example has one label"
        elif is_number(text) and text.startswith("-"):
            why = "is negative, and so is -1, which marks no label; give the classes other numbers"
        if why:
            raise UserError(f"{where}: {text!r:.60} in row {np.argmax(places == number) + 1} {why}")
    present = [text for text in texts if text in known or not has_no_label(text)]
    classes = tuple(known) or in_order(present)
    if len(classes) < 2:
        has = f"the only class is {classes[0]!r}" if classes else "all labels are empty"
        raise UserError(f"{where}: {has}, where -1 marks no label; a classifier needs at least 2 classes")
    fractions = [text for text in present if is_number(text) and not text.isdecimal()]
    if not known and fractions and len(present) > max(MOST_FRACTIONS, len(places) // 10):
        raise UserError(
            f"{where} has {len(present)} different numbers, such as {fractions[0]!r}, in {len(places)} rows; classes "
            "are texts or whole numbers: divide the numbers into ranges"
        )
    codes = {text: code for code, text in enumerate(classes)}
    found = np.array([codes.get(text, -1) for text in texts], np.int32)
    return Labels(found[places], tuple(known.values()) or classes)


def _distinct(values: Any, where: str) -> tuple[list[str], np.ndarray]:
    """The different labels, as `same` spells them, and each row's position among them: int [N]."""
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]  # a column for each task, as in MedMNIST; several tasks are not supported
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufSU":
        values, at = np.unique(values, return_inverse=True)
    else:
        at = np.arange(len(values))
    found: dict[str, int] = {}
    places = np.empty(len(values), int)
    for number, value in enumerate(values):
        text = text_of(value)
        if text is None:
            kind = "list" if isinstance(value, np.ndarray) else type(value).__name__
            raise UserError(
                f"{where}: {' '.join(str(value).split())!r:.60} in row {np.argmax(at == number) + 1} is a {kind}; a "
                "label is one number, text or boolean, and an example has one label"
            )
        places[number] = found.setdefault(same(text), len(found))
    return list(found), places[at]


def divide(labels: np.ndarray, names: Sequence[str], where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows for training and for testing of data without a test set, int [n] and [T], ascending.

    Every fifth labelled row of each class is for testing, from the first on. A class's only labelled row is for
    training, which is said in a line that begins with `where`. Raises a UserError if no class has two labelled rows.
    """
    order = np.argsort(labels, kind="stable")
    order = order[labels[order] >= 0]
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    place, size = np.arange(len(order)) - np.repeat(starts, sizes), np.repeat(sizes, sizes)
    test = np.sort(order[(place % TEST_EVERY == 0) & (size > 1)])
    if not len(test):
        raise UserError(f"{where} has no class with two labelled examples, so none is for testing; give a test set")
    if len(single := order[size == 1]):
        some = ", ".join([f"{names[label]!r:.60}" for label in labels[single[:3]]] + ["..."] * (len(single) > 3))
        say(f"{where}: no test example is of {some}: a class's only labelled example is for training")
    return np.setdiff1d(np.arange(len(labels)), test), test


def server_has_labels(config: Mapping[str, Any]) -> bool:
    """Whether the section `data`, a dict or a ConfigDict, gives the server labelled images."""
    return config["labels"] in ("server", "profile") and config["server_labels"] > 0


def clients_may_have_labels(config: Mapping[str, Any]) -> bool:
    """Whether the section `data` may give clients labels. Compiled programs depend on it, so it involves no draw."""
    if config["labels"] == "profile":
        return bool(config["partition_file"]) or any(share != 0 for share in config["label_profile"])
    return config["labels"] != "server"


def check_labels(config: Any, num_clients: int | None) -> None:
    """Raises a UserError if fields of the `data` section that say who holds labels exclude each other.

    The number of clients is None if the data decide it.
    """
    number, each, imbalance = config.num_labelled, config.labels_per_class, config.imbalance
    if number and each:
        raise UserError(f"data.num_labelled={number} and data.labels_per_class={each} exclude each other; set one to 0")
    if config.labels == "clients" and num_clients and 0 < number < num_clients:
        raise UserError(f"data.num_labelled={number} is fewer than num_clients={num_clients}; raise it")
    if not 1 <= abs(imbalance) < math.inf:
        raise UserError(f"data.imbalance must be a number from 1 on, or from -1 down (reversed), not {imbalance}")
    if config.labels == "profile":
        _check_profile(config, num_clients)


def _check_profile(config: Any, num_clients: int | None) -> None:
    """Raises a UserError unless `label_profile` is a share for each client or 'beta(a,b)', and somebody has a label."""
    profile = config.label_profile
    drawn = len(profile) == 1 and isinstance(profile[0], str)
    for share in profile:
        if not (_beta_of(share) if drawn else isinstance(share, int | float) and 0 <= share <= 1):
            word = "a word such as beta(0.3,0.3) with two numbers from 0.001 to 1000"
            line = f"must be a share from 0 to 1 for each client, or {word}; it has {share!r}"
            raise UserError(f"data.label_profile {line}")
    if not drawn and not config.partition_file and num_clients and len(profile) != num_clients:
        raise UserError(f"data.label_profile has {len(profile)} shares, but num_clients={num_clients}")
    if not server_has_labels(config) and not clients_may_have_labels(config):
        raise UserError("nobody has a label: every share of data.label_profile is 0, and so is data.server_labels")


def _beta_of(word: str) -> tuple[float, float] | None:
    """Both parameters of 'beta(a,b)', from 0.001 to 1000; None if the word is different."""
    match = _BETA.fullmatch(word)
    try:
        first, second = map(float, match.groups() if match else ())
    except ValueError:
        return None
    return (first, second) if all(1e-3 <= number <= 1e3 for number in (first, second)) else None


def profile_of(config: Any, num_clients: int, rng: Generator) -> np.ndarray:
    """The labelled share of each client's images, float64 [K]: given by `label_profile`, or drawn from its Beta."""
    if isinstance(config.label_profile[0], str):
        return rng.beta(*_beta_of(config.label_profile[0]), num_clients)
    return np.asarray(config.label_profile, np.float64)


def draw_server_labels(
    labels: np.ndarray, server_labels: int, num_classes: int, rng: Generator, balanced: bool
) -> np.ndarray:
    """Draws the server's labelled examples among n, whose labels are int [n]: int32 [S], positions in random order.

    With `balanced` S / C of each class, or as equal numbers as possible, which is said in a line. Raises a UserError if
    S is more than n.
    """
    if server_labels > len(labels):
        raise UserError(f"data.server_labels={server_labels} is more than the {len(labels)} training examples left")
    if not balanced:
        return rng.permutation(len(labels))[:server_labels].astype(np.int32)
    counts = _as_equal(np.bincount(labels, minlength=num_classes), server_labels, rng)
    if np.ptp(counts):
        numbers = f"{counts.min()} to {counts.max()} of each class, as equal as possible"
        _say_once(f"data.server_labels={server_labels}: {numbers}")  # not for each seed
    drawn = draw_of_each_class(labels, counts, rng, f"data.server_labels={server_labels}")
    return rng.permutation(drawn).astype(np.int32)


def _as_equal(available: np.ndarray, number: int, rng: Generator) -> np.ndarray:
    """Numbers of examples of each class, int [C], `number` in total, as equal as the `available` ones allow."""
    counts = np.zeros_like(available)
    while rest := number - counts.sum():
        has_more = np.flatnonzero(counts < available)
        if rest < len(has_more):
            counts[rng.permutation(has_more)[:rest]] += 1
        else:
            counts[has_more] = np.minimum(counts[has_more] + rest // len(has_more), available[has_more])
    return counts


def draw_balanced(labels: np.ndarray, number: int, num_classes: int, rng: Generator, field: str) -> np.ndarray:
    """Draws positions of the same number of examples of each class, `number` in total, in random order.

    Raises a UserError if this is impossible, which names the `field` with the number.
    """
    per_class, remainder = divmod(number, num_classes)
    if remainder:
        below, above = per_class * num_classes, (per_class + 1) * num_classes
        fitting = f"{below} or {above}" if below else above
        raise UserError(f"{field}={number} cannot be the same for each of {num_classes} classes; {fitting} would do")
    drawn = draw_of_each_class(labels, np.full(num_classes, per_class), rng, f"{field}={number}")
    # Shuffled, so that a batch does not consist of a single class.
    return rng.permutation(drawn).astype(np.int32)


def draw_labelled_rows(
    labels: np.ndarray, client_rows: list[np.ndarray], config: Any, rng: Generator, profile_rng: Generator
) -> np.ndarray:
    """Draws the clients' examples whose labels are visible.

    With the same state of `rng`, a larger share (or number per class, or number of clients) contains a smaller one.

    `config.labels` decides what is labelled:

    * 'clients': the share `labelled_share` of each client's examples. If `labels_per_class` is above 0, instead up to
      that many examples of each class of each client.
    * 'some_clients': all examples of `labelled_clients` clients that hold examples. They are drawn at random, or, with
      `labelled_rule` 'most_classes', are those with the most classes; ties go to the size closest to the clients' mean.
    * 'profile': each client's own share of its examples, see `profile_of`.

    Shares are rounded to the nearest whole number of examples, halves up.

    Args:
        labels: int [N], labels of the training set.
        client_rows: K arrays int32 [n_k], rows of each client.
        config: the `data` section.
        rng, profile_rng: the second is for a profile's shares.

    Returns:
        int32 [L], rows of the training set, client by client. Clients with all labels keep their order of rows.

    Raises:
        UserError: nobody would have a label, or too few clients hold examples.
    """
    if config.labels == "profile":
        shares = profile_of(config, len(client_rows), profile_rng)
    elif config.labels == "some_clients":
        holders = np.flatnonzero([len(rows) for rows in client_rows])
        if config.labelled_clients > len(holders):
            has = f"only {len(holders)} of {len(client_rows)} clients hold any images"
            raise UserError(f"data.labelled_clients={config.labelled_clients}, but {has}")
        order = rng.permutation(holders)
        if config.labelled_rule == "most_classes":
            order = _by_most_classes(labels, client_rows)
        shares = np.zeros(len(client_rows))
        shares[order[: config.labelled_clients]] = 1
    else:
        shares = np.full(len(client_rows), config.labelled_share)
    drawn = []
    for own, share in zip(client_rows, shares):
        rows = rng.permutation(own)
        if config.labels == "clients" and config.labels_per_class:
            classes = labels[rows]
            drawn += [rows[classes == c][: config.labels_per_class] for c in np.unique(classes)]
        else:
            drawn.append(share_of(own, rows, share))
    labelled_rows = np.concatenate(drawn).astype(np.int32)
    if not len(labelled_rows) and not server_has_labels(config):
        field, otherwise = f"labelled_share={config.labelled_share:g}", "use data.labels_per_class"
        if config.labels == "profile":
            field, otherwise = "label_profile", "set data.server_labels"
        everywhere = f"is not one image at any of the {len(client_rows)} clients"
        raise UserError(f"data.{field} of a client's images {everywhere}; raise it, or {otherwise}")
    return labelled_rows


def share_of(rows: np.ndarray, shuffled: np.ndarray, share: float) -> np.ndarray:
    """A client's labelled rows: the first of `shuffled`, to the nearest whole number (halves up); all if share is 1."""
    return rows if share == 1 else shuffled[: math.floor(share * len(rows) + 0.5)]


def _by_most_classes(labels: np.ndarray, client_rows: list[np.ndarray]) -> np.ndarray:
    """The clients, int [K], ordered by their number of classes, then by how close their size is to the mean.

    Source: according to RSCFed's authors, their labelled client has all classes and about 1 / K of the images. Here a
    client that lacks a class is chosen only if all clients lack some.
    """
    num_classes = np.array([len(np.unique(labels[rows])) for rows in client_rows])
    sizes = np.array([len(rows) for rows in client_rows])
    return np.lexsort((np.abs(sizes - sizes.mean()), -num_classes))
