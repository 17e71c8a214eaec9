"""FedMatch's small problem, and a client's training in NumPy."""

import jax
import numpy as np

from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedmatch.phases import PSI, SIGMA
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    PIXELS,
    loss_and_gradient,
    mirrored,
    pixels_of,
    probabilities,
    running_mean,
    small_problem,
    statistics_of,
)

KEY = jax.random.key(0)
WEIGHTS = {"labelled_weight": 1.3, "helper_weight": 0.7, "pseudo_weight": 0.9, "l1_weight": 0.02, "l2_weight": 0.03}
ENTRIES = 2 * (CLASSES + PIXELS * CLASSES)  # of sigma and psi


def build(labels, weak=mirrored, threshold=None, **fields):
    """A problem with labels at 'clients' or at the 'server', and its method."""
    fields = {f"fedmatch.{name}": value for name, value in {**WEIGHTS, **fields}.items()}
    fields["confidence.threshold"] = threshold
    size = 2 if labels == "clients" else 4
    problem = small_problem("fedmatch", weak=weak, **{"data.labels": labels, "client.batch_size": size, **fields})
    return problem, METHODS["fedmatch"].factory(problem)


def random_params(problem, seed):
    return problem.network.init(jax.random.key(seed)).params


def numbers(tree):
    """A pytree as one vector; `jax.vmap` gives rows of leaves [R, ...] as a table."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def cut(x, smallest):
    return {name: np.where(np.abs(leaf) <= smallest, 0, leaf) for name, leaf in x.items()}


def train_by_hand(problem, data, received, work, rate, helpers):
    """The client's epochs on unpadded batches: each step trains sigma on L_s, if the client has labels, then psi on
    L_u.

    Args:
        problem, data, received: those of the phase.
        work: the client's; its orders are read.
        rate: the client's learning rate.
        helpers: their psi.

    Returns:
        sigma, psi, the statistics; each step's (L_u, helper loss, pseudo loss, CE of labelled images), batch sizes, and
        number of confident images.
    """
    config, options, decks = problem.config.client, problem.config.fedmatch, work.work.decks
    sigma, psi = (in_numpy(received.model.params[name]) for name in (SIGMA, PSI))
    helper_models = [{name: sigma[name] + one[name] for name in sigma} for one in map(in_numpy, helpers)]
    received_statistics = statistics = statistics_of(received.model)
    velocities, rows, one_hot = [at_rest(sigma), at_rest(psi)], np.asarray(decks.deck.rows), np.eye(CLASSES)
    weak, strong = pixels_of(data, rows, problem.weak), pixels_of(data, rows, problem.strong)
    truth, unlabelled = np.asarray(data.visible_labels)[rows], int(decks.deck.size)
    labelled = 0 if decks.labelled is None else int(decks.labelled.size)
    per_epoch = round((labelled or unlabelled) / config.batch_size)
    size = -(-unlabelled // per_epoch) if labelled else config.batch_size
    steps, sizes, confident_images = [], [], []
    for epoch in range(config.epochs):
        for number in range(per_epoch):
            supervised, added = 0.0, []
            if labelled:
                batch = np.asarray(decks.labelled.order)[epoch][:labelled]
                batch = batch[number * config.batch_size : (number + 1) * config.batch_size]
                theta, x = {name: sigma[name] + psi[name] for name in psi}, weak[batch]
                targets = one_hot[truth[batch]] / len(batch)
                supervised, gradient = loss_and_gradient(theta, x, x.mean(axis=0), targets)
                gradient = {name: options.labelled_weight * leaf for name, leaf in gradient.items()}
                sigma, velocities[0] = sgd_step(sigma, gradient, velocities[0], config, rate)
                added, sizes = [x], [*sizes, len(batch)]
            batch = np.asarray(decks.deck.order)[epoch][:unlabelled][number * size : (number + 1) * size]
            theta = {name: sigma[name] + psi[name] for name in psi}
            x, x_strong = weak[batch], strong[batch]
            p = probabilities(theta, x, x.mean(axis=0))
            confident = p.max(axis=1) >= problem.config.confidence.threshold
            share = confident[:, None] / max(confident.sum(), 1)
            of_helpers = [probabilities(model, x, received_statistics) for model in helper_models]
            votes = one_hot[p.argmax(axis=1)] + sum(one_hot[q.argmax(axis=1)] for q in of_helpers)
            gradient = {name: np.zeros_like(leaf) for name, leaf in psi.items()}
            helper_loss = 0.0
            for q in of_helpers:
                loss, by_helper = loss_and_gradient(theta, x, x.mean(axis=0), q * share / len(of_helpers))
                helper_loss += loss + np.sum(q * np.log(q) * share) / len(of_helpers)
                for name in psi:
                    gradient[name] += options.helper_weight * by_helper[name]
            pseudo_loss, by_vote = loss_and_gradient(
                theta, x_strong, x_strong.mean(axis=0), one_hot[votes.argmax(axis=1)] * share
            )
            value = options.helper_weight * helper_loss + options.pseudo_weight * pseudo_loss
            for name in psi:
                gradient[name] += options.pseudo_weight * by_vote[name]
                gradient[name] += options.l1_weight * np.sign(psi[name])
                gradient[name] += 2 * options.l2_weight * (psi[name] - sigma[name])
                value += options.l1_weight * np.abs(psi[name]).sum()
                value += options.l2_weight * np.sum((sigma[name] - psi[name]) ** 2)
            psi, velocities[1] = sgd_step(psi, gradient, velocities[1], config, rate)
            statistics = running_mean(statistics, *added, x, x_strong)
            steps.append((value, helper_loss, pseudo_loss, supervised))
            sizes, confident_images = [*sizes, len(batch)], [*confident_images, int(confident.sum())]
    return sigma, psi, statistics, np.array(steps), sizes, confident_images
