"""A client's local training on weak and strong views in NumPy, as a loop over unpadded batches."""

import itertools

import numpy as np

from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    loss_and_gradient,
    mirrored,
    negative,
    pixels_of,
    probabilities,
    running_mean,
    statistics_of,
)


def hard_labels(threshold):
    """FixMatch's rule: probabilities [n, C] -> targets, and which of them count."""
    return lambda p: (np.eye(CLASSES)[p.argmax(axis=1)], p.max(axis=1) >= threshold)


def batches(order, size, batch_size):
    """The positions in each batch of all epochs; an epoch's last batch may be short."""
    return [epoch[first : min(first + batch_size, size)] for epoch in order for first in range(0, size, batch_size)]


def train_by_hand(problem, data, received, work, rule, label_mode="train", together=False):
    """The expected result of `on_both_kinds` with the views `mirrored` and `negative`.

    Args:
        problem, data, received: those of the phase.
        work: the client's; only its orders are read.
        rule: p [n, C] -> targets [n, C], and which of the images count, bool [n].
        label_mode, together: the phase's, with the value that 'auto' means for together.

    Returns:
        The parameters and the statistics; each metric's mean over steps.
    """
    config, options = problem.config.client, problem.config.consistency
    first = in_numpy(received.model.params)
    model, statistics, velocity = dict(first), statistics_of(received.model), at_rest(first)
    start = statistics
    deck, known_deck = work.decks["unlabelled"], work.decks.get("labelled")
    unlabelled = batches(np.asarray(deck.order), int(deck.size), options.unlabelled_ratio * config.batch_size)
    labelled = []
    if known_deck is not None:
        labelled = batches(np.asarray(known_deck.order), int(known_deck.size), config.batch_size)
    steps = max(len(unlabelled), len(labelled))
    pairs = itertools.islice(zip(itertools.cycle(unlabelled or [[]]), itertools.cycle(labelled or [[]])), steps)
    rows, history = np.asarray(deck.rows), []
    for of_unlabelled, of_labelled in pairs:
        of_unlabelled, of_labelled = rows[np.array(of_unlabelled, int)], rows[np.array(of_labelled, int)]
        given = pixels_of(data, of_labelled, mirrored)
        weak, strong = pixels_of(data, of_unlabelled, mirrored), pixels_of(data, of_unlabelled, negative)
        frozen = problem.config.confidence.labels_from == "received"
        in_pass = [weak] if label_mode == "train" and (together or not frozen) else []
        pool = np.concatenate([given, *in_pass, strong]).mean(axis=0) if together else None

        def centre(x, pool=pool):
            return pool if together else x.sum(axis=0) / max(len(x), 1)

        if frozen:
            p = probabilities(first, weak, start)
        else:
            p = probabilities(model, weak, centre(weak) if label_mode == "train" else statistics)
        targets, counted = rule(p)
        share = np.sum(counted) / max(len(weak), 1)
        scale = counted[:, None] / max(len(strong), 1)
        of_strong, gradient = loss_and_gradient(model, strong, centre(strong), scale * targets)
        known = np.eye(CLASSES)[np.asarray(data.visible_labels)[of_labelled]] / max(len(given), 1)
        of_given, given_gradient = loss_and_gradient(model, given, centre(given), known)
        value = of_given + options.unlabelled_weight * of_strong
        history.append([value, share, of_given, of_strong])
        gradient = {name: given_gradient[name] + options.unlabelled_weight * gradient[name] for name in model}
        gradient = {name: leaf + config.proximal * (model[name] - first[name]) for name, leaf in gradient.items()}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        views = [np.concatenate([given, *in_pass, strong])] if together else [given, *in_pass, strong]
        statistics = running_mean(statistics, *views)
    names = ("client_loss", "confident_share", "labelled_loss", "unlabelled_loss")
    return model, statistics, dict(zip(names, np.mean(history, axis=0)))


def assert_as_by_hand(finished, by_hand):
    """Compares a phase's model, statistics and metrics with NumPy's."""
    model, statistics, metrics = by_hand
    assert_model(finished.upload.model, model, statistics)
    for name, value in finished.metrics.items():
        np.testing.assert_allclose(value, metrics[name], atol=1e-5, err_msg=name)
