"""Crafts unlabelled images, with which attackers make a model label images of one class as another.

Carlini, Poisoning the Unlabeled Dataset of Semi-Supervised Learning, USENIX Security 2021 (arXiv 2105.01622).
A model that makes its own labels passes a label on between images that look alike. To have the image b labelled as
class y, an attacker takes a labelled image a of y and adds unlabelled images on the line from a to b. More of them are
near a: their positions have the density 1.5 - x on [0, 1].

Checked against the paper's abstract: crafted images have no labels, and 0.1 % of the data suffice there. Not checked:
the density and the rest of the attack, which are from memory; therefore no section of the paper is named. A public
reproduction, github.com/annafabris/Poisoning-unlabeled-Dataset-for-Semi-Supervised-Learning, also mixes the pixels of
two images, but spaces the positions evenly.

In a federation the attackers are clients that cooperate. The images b are their own images of the attacked class. The
images a are labelled images of the server, which the paper assumes to be public. If the server has none, they are the
attackers' own, whose classes the attackers know. Crafted images replace other unlabelled images of the attackers.
"""

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.owners import Partition
from fedjax_ssl.data.sources import Dataset

DRAWS = 101  # folded into the seed for the draws of this attack
PER_MILLE = 5.0  # used when `attack.strength` is 0


def places(number: int) -> np.ndarray:
    """Positions on the line between both ends: float64 [number], from 0 to 1, quantiles of the density 1.5 - x."""
    levels = np.linspace(0.0, 1.0, number)
    return 1.5 - np.sqrt(2.25 - 2 * levels)  # the inverse of 1.5 x - x^2 / 2


def between(start: np.ndarray, end: np.ndarray, number: int) -> np.ndarray:
    """Images on the line between two images, each uint8 [H, W, C]: uint8 [number, H, W, C], including both ends."""
    share = places(number)[:, None, None, None]
    return np.round((1 - share) * start + share * end).astype(np.uint8)


def poison(
    dataset: Dataset, partition: Partition, attackers: np.ndarray, visible: np.ndarray, attack, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the attackers' crafted images, drawn by the seed, among the training images.

    Args:
        dataset, partition: the training images, on the host, and their owners.
        attackers: int [A], ids of the attacking clients.
        visible: bool [N], the training images with a visible label.
        attack: `config.attack`; `from_class`, `to_class`, `targets` and `strength` are read. `strength` crafted images
            per thousand images of all clients are distributed over one line for each target.

    Returns:
        The training images with the crafted ones, uint8 [N, H, W, C]; and the rows of the images to be labelled as
        `attack.to_class`, which are unchanged, int32 [T].

    Raises:
        UserError: there is no such class, or there are too few images.
    """
    for field in ("from_class", "to_class"):
        if attack[field] >= dataset.num_classes:
            raise UserError(f"attack.{field} is {attack[field]}, but the data have {dataset.num_classes} classes")
    rng = np.random.default_rng([seed, DRAWS])
    labels = np.asarray(dataset.y_train)
    own = np.concatenate([np.zeros(0, int), *(partition.client_rows[client] for client in attackers)])
    hidden = rng.permutation(own[~visible[own]])
    targets = hidden[labels[hidden] == attack.from_class][: attack.targets]
    known = partition.server_index if len(partition.server_index) else own
    starts = rng.permutation(known[labels[known] == attack.to_class])
    rest = hidden[~np.isin(hidden, np.concatenate([targets, starts]))]
    in_all = sum(len(rows) for rows in partition.client_rows)
    number = round((attack.strength or PER_MILLE) / 1000 * in_all / attack.targets)  # on each line
    if len(targets) < attack.targets or not len(starts) or number < 2 or len(rest) < number * attack.targets:
        raise UserError(
            f"attack.kind='poison' needs {attack.targets} unlabelled images of class {attack.from_class} at the "
            f"attackers, one of class {attack.to_class} to begin with, and {attack.targets} x {number} other "
            "unlabelled images to replace, at least 2 for each; there are "
            f"{len(targets)}, {len(starts)} and {len(rest)}"
        )
    images = np.array(dataset.x_train)
    lines = [between(images[starts[line % len(starts)]], images[target], number) for line, target in enumerate(targets)]
    images[rest[: number * attack.targets]] = np.concatenate(lines)
    return images, targets.astype(np.int32)
