"""Long tails: training images are removed so that class sizes decrease exponentially."""

import numpy as np

from fedjax_ssl.base.errors import UserError


def tail_counts(largest: int, imbalance: float, num_classes: int) -> np.ndarray:
    """Number of images of each class c in a long tail: floor(n_max IF^(-c / (C - 1))), int64 [C].

    Args:
        largest: n_max, number of images of the largest class.
        imbalance: IF, the ratio of n_max to the size of the smallest class, at least 1; negative reverses the order, so
            that the last class is the largest.
        num_classes: number of classes C, at least 2.

    Source: Cui et al., "Class-Balanced Loss", CVPR 2019; the reversed order as in Wei and Gan, ACR, CVPR 2023.
    """
    exponents = np.arange(num_classes) / (num_classes - 1)
    exact = largest * abs(float(imbalance)) ** -exponents
    # Powers are inexact; without the factor 500 / 100 could become 4.
    counts = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    return counts if imbalance > 0 else counts[::-1]


def cut_to_tail(labels: np.ndarray, num_classes: int, imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Draws the examples that remain of labels int [n]: positions, ascending; all if the imbalance is 1 or -1.

    The largest class of the tail gets the size of the smallest one, see `tail_counts`. With the same state of `rng`, a
    longer tail is a subset of a shorter one. Raises a UserError if a class would have no image.
    """
    if abs(imbalance) == 1:
        return np.arange(len(labels))
    counts = tail_counts(int(np.bincount(labels, minlength=num_classes).min()), imbalance, num_classes)
    field = f"data.imbalance={imbalance:g}"
    if not counts.all():
        none = f"no image of class {np.argmin(counts)}, for the largest class has {counts.max()}"
        raise UserError(f"{field} leaves {none}; bring it nearer to 1")
    return np.sort(draw_of_each_class(labels, counts, rng, field))


def may_be_tail(kept: np.ndarray, labels: np.ndarray, num_classes: int, imbalance: float) -> bool:
    """Whether examples with the labels `kept` may be what `cut_to_tail` leaves of `labels`, or a part of it."""
    if abs(imbalance) == 1 or (labels < 0).any():
        return True
    most = tail_counts(int(np.bincount(labels, minlength=num_classes).min()), imbalance, num_classes)
    return bool((np.bincount(kept, minlength=num_classes) <= most).all())


def draw_of_each_class(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator, source: str) -> np.ndarray:
    """Draws positions of `counts` [C] examples of each class, class by class, from labels int [n].

    Raises a UserError if a class has fewer examples, which names `source`, FIELD=VALUE.
    """
    drawn = []
    for c, count in enumerate(counts):
        rows = np.flatnonzero(labels == c)
        if count > len(rows):
            of = "each class" if np.ptp(counts) == 0 else f"class {c}"
            has, field = f"class {c} has {len(rows)} left", source.partition("=")[0]
            raise UserError(f"{source} takes {count} examples of {of}, but {has}; lower {field}")
        drawn.append(rng.permutation(rows)[:count])
    return np.concatenate(drawn)
