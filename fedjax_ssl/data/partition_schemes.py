"""The partition schemes of published work: one function for each, and their registry.

Each function is a `PartitionFn`; its docstring says which fields of the configuration it reads. Classes are those that
occur in the labels. Every example goes to exactly one client, unless the docstring says otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError

# The smallest number of a client's examples in SemiFL and RSCFed, and the largest number of draws to reach it.
MIN_EXAMPLES = 10
MAX_DRAWS = 1000

Shares = list[np.ndarray]
# (labels, num_clients, config, rng) -> shares: labels of the examples to split, int [n]; number of clients K; the
# section `data`; source of randomness -> K arrays of positions in `labels`. `examples_per_client`, where it is read,
# limits the size of every share (0: no limit).
PartitionFn = Callable[[np.ndarray, int, Any, np.random.Generator], Shares]


def iid(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Splits at random into shares of floor(n / num_clients), at most `examples_per_client`; the rest is left out."""
    size = _equal_size(len(labels), num_clients, config)
    return list(rng.permutation(len(labels))[: num_clients * size].reshape(num_clients, size))


def stratified(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Deals out each class in turn, so that clients' class counts and sizes differ by at most one.

    Images are dealt one by one; the dealing of each class starts at the client after the last one that got an image.

    Reads `examples_per_client`; classes keep their proportions.

    Source: Jeong et al., FedMatch, ICLR 2021, "batch-IID" of its public code, which leaves out remainders.
    """
    rows = _rows_by_class(labels, rng)
    limit = config.examples_per_client * num_clients
    if limit and limit < len(labels):
        sizes = np.array(list(map(len, rows)))
        rows = [of_class[:count] for of_class, count in zip(rows, _round_to_counts(sizes, limit, rng))]
    dealt, order = np.concatenate(rows), rng.permutation(num_clients)
    return [dealt[first::num_clients] for first in order]


def lda(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Latent Dirichlet allocation with equal shares: each client has its own class distribution, Dir(alpha).

    A client draws a class from its distribution, then an example of that class without replacement, until it has
    floor(n / num_clients) examples; the rest is left out. If a class has run out, it is dropped from the distribution,
    which is renormalised.

    Reads `alpha` and `examples_per_client`; class draws follow Dir(alpha) for the smaller set.

    Source: Hsu et al., arXiv 1909.06335, 2019; Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    size = _equal_size(len(labels), num_clients, config)
    rows = _rows_by_class(labels, rng)
    stock = np.array([len(class_rows) for class_rows in rows])  # [C], examples that are left
    shares = []
    for _ in range(num_clients):
        taken = _draw_class_counts(stock, size, config.alpha, rng)
        # Each class was shuffled once: successive slices are draws without replacement.
        shares.append(np.concatenate([own[end - n : end] for own, end, n in zip(rows, stock, taken)]))
        stock -= taken
    return shares


def _draw_class_counts(stock: np.ndarray, size: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draws one client's number of examples of each class, [C], at most `stock` [C] and `size` in total.

    Draws of a class that has run out are rejected and repeated, which is the same as renormalising the distribution
    when the class runs out.
    """
    proportions = rng.dirichlet(np.full(len(stock), alpha))
    taken = np.zeros_like(stock)
    while taken.sum() < size:
        left = taken < stock
        proportions = np.where(left, proportions, 0)
        if proportions.sum() < 1e-200:
            # A small alpha may put all probability, up to rounding, on classes that have run out. A Dirichlet
            # distribution restricted to some classes and renormalised is again Dirichlet, independent of the rest.
            proportions[left] = rng.dirichlet(np.full(left.sum(), alpha))
        counts = rng.multinomial(size - int(taken.sum()), proportions / proportions.sum())
        taken += np.minimum(counts, stock - taken)
    return taken


def dirichlet_clients(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Splits each class over the clients in proportions from Dir(alpha), with a capacity limit and a smallest size.

    Class by class: a client with n / num_clients examples or more gets none, and the proportions of the others are
    renormalised. All is drawn again until every client has at least `MIN_EXAMPLES`.

    Reads `alpha`. Raises a UserError if no draw gave every client enough examples.

    Source: Diao et al., SemiFL, NeurIPS 2022; Liang et al., RSCFed, CVPR 2022.
    """
    rows = _rows_by_class(labels, rng)
    return _deal(rows, _counts_of_at_least(MIN_EXAMPLES, rows, num_clients, config, rng))


def _counts_of_at_least(
    least: int, rows: Shares, num_clients: int, config: Any, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draws `_draw_with_capacity` again until every client has `least` examples."""
    number = sum(map(len, rows))
    if number < least * num_clients:
        why = f"{number} examples are not {least} for each of {num_clients} clients"
        raise UserError(f"data.partition={config.partition!r}: {why}; lower num_clients")
    for _ in range(MAX_DRAWS):
        counts = _draw_with_capacity(rows, num_clients, config.alpha, rng)
        if np.sum(counts, axis=0).min() >= least:
            return counts
    raise UserError(
        f"data.partition={config.partition!r}: none of {MAX_DRAWS} draws of {number} examples for {num_clients} "
        f"clients with data.alpha={config.alpha:g} gave each of them {least}; raise data.alpha or lower num_clients"
    )


def _draw_with_capacity(rows: Shares, num_clients: int, alpha: float, rng: np.random.Generator) -> Shares:
    """Splits each class in proportions from Dir(alpha) over the clients that so far hold less than an equal share.

    The result has, for each class, the number of its examples for each client, [K].
    """
    capacity = sum(map(len, rows)) / num_clients
    held = np.zeros(num_clients, int)
    counts = []
    for class_rows in rows:
        is_open = held < capacity
        proportions = np.where(is_open, rng.dirichlet(np.full(num_clients, alpha)), 0)
        if proportions.sum() < 1e-200:  # All probability is on full clients; see _draw_class_counts.
            proportions[is_open] = rng.dirichlet(np.full(is_open.sum(), alpha))
        counts.append(_round_to_counts(proportions, len(class_rows), rng))
        held += counts[-1]
    return counts


def dirichlet_pairs(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Splits the examples at random over pairs of clients, and each pair's examples by Dir(alpha) between both.

    A pair gets 2 / num_clients of all examples; the last chunk takes the remainder, and for an odd number of clients
    the last one has no partner. Within a pair, classes are split as in `dirichlet_clients`: a member with half of the
    pair's examples gets no more, and all is drawn again until the smaller member has half of its equal share. Then the
    shares are concatenated, ordered by class within each, and cut again into num_clients equal parts (the first ones
    have one example more if needed).

    A pair's examples have the overall class distribution, so a client lacks few classes: alpha = 0.1 is far milder
    than in the other schemes.

    Reads `alpha`. Raises a UserError if no draw gave the smaller member enough examples.

    Source: Liu et al., SAGE, CVPR 2025, its public code.
    """
    chunk = 2 * len(labels) // num_clients
    members = [2] * (num_clients // 2) + [1] * (num_clients % 2)
    laid_out = []
    for size, positions in zip(members, np.split(rng.permutation(len(labels)), chunk * np.arange(1, len(members)))):
        rows = [positions[places] for places in _rows_by_class(labels[positions], rng)]
        laid_out += _deal(rows, _counts_of_at_least(len(positions) // (2 * size), rows, size, config, rng))
    return np.array_split(np.concatenate(laid_out), num_clients)


def dirichlet_classes(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Splits each class over the clients in proportion to the class probabilities of each client's own Dir(alpha).

    Client k draws p_k ~ Dir(alpha) over the classes and gets the share p_k[c] / sum_j p_j[c] of class c. Sizes differ,
    and a client may get no example.

    Reads `alpha`.

    Source: Cho et al., FedLabel, ICCV 2023.
    """
    rows = _rows_by_class(labels, rng)
    proportions = rng.dirichlet(np.full(len(rows), config.alpha), size=num_clients)  # [K, C]
    counts = []
    for c, class_rows in enumerate(rows):
        column = proportions[:, c]
        if column.sum() < 1e-200:
            # With a very small alpha all clients' probability may lie on other classes. Then one client gets the whole
            # class, the limit as alpha goes to 0.
            column = np.arange(num_clients) == rng.integers(num_clients)
        counts.append(_round_to_counts(column, len(class_rows), rng))
    return _deal(rows, counts)


def shards(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Cuts each class into shards and deals `classes_per_client` of them to every client.

    There are num_clients * classes_per_client shards; each class is cut into the same number of them (to within one).
    They are dealt at random, so that a client may hold a class twice and never has more than classes_per_client
    different classes.

    Reads `classes_per_client`. Raises a UserError if there are fewer shards than classes, or more shards of a class
    than examples.

    Source: Diao et al., SemiFL, NeurIPS 2022; Yang et al., FedIL, 2023.
    """
    per_client = config.classes_per_client
    rows = _rows_by_class(labels, rng)
    num_shards = num_clients * per_client
    setting = f"data.classes_per_client={per_client} with {num_clients} clients"
    if num_shards < len(rows):
        least = -(-len(rows) // num_clients)
        raise UserError(f"{setting} makes {num_shards} shards for {len(rows)} classes; it must be at least {least}")
    shards_per_class = np.full(len(rows), num_shards // len(rows))
    shards_per_class[rng.permutation(len(rows))[: num_shards % len(rows)]] += 1
    pieces = []
    for class_rows, count in zip(rows, shards_per_class):
        if count > len(class_rows):
            has = f"class {labels[class_rows[0]]} has {len(class_rows)} examples"
            raise UserError(f"{setting} cuts each class into {count} shards, but {has}; lower one")
        pieces += np.array_split(class_rows, count)
    dealt = rng.permutation(num_shards).reshape(num_clients, per_client)
    return [np.concatenate([pieces[shard] for shard in hand]) for hand in dealt]


# FedMatch's profile of client 0 for ten classes; client k's is shifted by k classes.
TEN_CLASSES = (0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)


def profiles(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Gives each client half of its examples from one class, some from its two neighbours and few from the others.

    Client k draws a class for each of its floor(n / num_clients) examples from profile k mod C: 0.5 for class k mod C
    and 0.15 for each of its neighbours in the cycle of classes. With ten classes it is 0.02 for the opposite class and
    0.03 for each other one; with another number of classes the others share 0.2 equally. Clients take examples in
    order, without replacement. If a class has run out they get fewer of it, and fewer in total. The rest is left out.

    If clients have `labels_per_class` labels, each client first gets this number of examples of each class, and draws
    only the rest from its profile. Labelled examples are therefore balanced, whatever the profile.

    Reads `labels`, `labels_per_class` and `examples_per_client`. Raises a UserError if a share has no room for its
    labelled examples, or a class has too few for all clients.

    Source: Jeong et al., FedMatch, ICLR 2021, "batch-non-IID" of its public code.
    """
    rows = _rows_by_class(labels, rng)
    size = _equal_size(len(labels), num_clients, config)
    labelled = config.labels_per_class if config.labels == "clients" else 0
    setting, fewest = f"data.labels_per_class={labelled}", min(rows, key=len)
    if labelled * len(rows) > size:
        what = f"is more than the {size} examples of a client; lower it or num_clients"
        raise UserError(f"{setting} of {len(rows)} classes {what}")
    if labelled * num_clients > len(fewest):
        has = f"class {labels[fewest[0]]} has {len(fewest)} examples"
        raise UserError(f"{setting} for each of {num_clients} clients, but {has}; lower one")
    profile = _profile(len(rows))
    next_row = np.full(len(rows), labelled * num_clients)  # [C], the first row that nobody has taken
    shares = []
    for client in range(num_clients):
        taken = rng.multinomial(size - labelled * len(rows), np.roll(profile, client))
        known = [own[labelled * client : labelled * (client + 1)] for own in rows]
        others = [own[first : first + number] for own, first, number in zip(rows, next_row, taken)]
        shares.append(np.concatenate(known + others))
        next_row += taken
    return shares


def _profile(num_classes: int) -> np.ndarray:
    """The probability of each class for client 0 of `profiles`, [C]."""
    if num_classes == len(TEN_CLASSES):
        return np.array(TEN_CLASSES)
    profile = np.full(num_classes, 0.2 / max(1, num_classes - 3))
    profile[[1 % num_classes, -1]] = 0.15
    profile[0] = 0.5
    return profile / profile.sum()


def main_class(labels: np.ndarray, num_clients: int, config: Any, rng: np.random.Generator) -> Shares:
    """Gives each client a share R of images from one class, and the others at random.

    Client k gets int(R size) images of class k mod C, or all that are left in the class, where size is
    floor(n / num_clients). The remaining images of all classes fill every client up to that size; the rest is left out.
    R = 0 is IID; R = 1 is one class for each client.

    Reads `main_share`, R, and `examples_per_client`.

    Source: Zhang et al., FedRGD, IEEE Big Data 2021, its public code. With as many clients as classes, R is the mean
    distance between the clients' class distributions, which the paper calls the metric of non-IID.
    """
    rows, size = _rows_by_class(labels, rng), _equal_size(len(labels), num_clients, config)
    mains = []
    for client in range(num_clients):
        of_class = rows[client % len(rows)]
        mains.append(of_class[: int(config.main_share * size)])
        rows[client % len(rows)] = of_class[len(mains[-1]) :]
    left, shares = rng.permutation(np.concatenate(rows)), []
    for main in mains:
        shares.append(np.concatenate([main, left[: size - len(main)]]))
        left = left[size - len(main) :]
    return shares


def by_domain(domains: np.ndarray, names: list[str], num_clients: int, rng: np.random.Generator) -> Shares:
    """Client k gets a random part of domain k mod D of the D `names`; a domain's clients have equal parts, within one.

    `domains`, str [n], are the names of the examples' domains. It reads no labels, and is the partition 'domains'.
    """
    shares: Shares = [np.zeros(0, int)] * num_clients
    for first, name in enumerate(names):
        clients = range(first, num_clients, len(names))
        rows = rng.permutation(np.flatnonzero(domains == name))
        for client, part in zip(clients, np.array_split(rows, len(clients))):
            shares[client] = part
    return shares


_SCHEMES = iid, stratified, lda, dirichlet_clients, dirichlet_pairs, dirichlet_classes, shards, profiles, main_class
PARTITIONS: dict[str, PartitionFn] = {scheme.__name__: scheme for scheme in _SCHEMES}


def _equal_size(num_examples: int, num_clients: int, config: Any) -> int:
    """The size of every client's share in schemes with equal shares."""
    size = num_examples // num_clients
    return min(size, config.examples_per_client) if config.examples_per_client else size


def _rows_by_class(labels: np.ndarray, rng: np.random.Generator) -> Shares:
    """Positions of each class that occurs, in ascending order of classes, each shuffled."""
    order = np.argsort(labels, kind="stable")
    starts = np.unique(labels[order], return_index=True)[1]
    return [rng.permutation(rows) for rows in np.split(order, starts[1:])]


def _round_to_counts(proportions: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Rounds proportions [K] to counts [K] that sum to `total`, each within one of its exact value."""
    # The order of clients is drawn anew; otherwise the same clients would gain from rounding in every class.
    order = rng.permutation(len(proportions))
    cumulative = np.cumsum(proportions[order])
    # Dividing by the last sum makes it exactly 1, so that rounding gives no example to a client of proportion 0.
    bounds = (total * (cumulative / cumulative[-1])).astype(int)
    counts = np.empty(len(proportions), int)
    counts[order] = np.diff(bounds, prepend=0)
    return counts


def _deal(rows: Shares, counts: list[np.ndarray]) -> Shares:
    """Turns each class's rows and each client's count of them, [K], into one array for each client."""
    splits = [np.split(class_rows, np.cumsum(sizes)[:-1]) for class_rows, sizes in zip(rows, counts)]
    return [np.concatenate(pieces) for pieces in zip(*splits)]
