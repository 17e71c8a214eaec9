"""A client's steps on its fix and mix set, in SemiFL and FedAnchor."""

import autograd.numpy as np

from tests.official.reference import cross_entropy

LAMBDA = 0.3  # of every mixture; the tests replace the draws by it


def dimmed(images):
    """The weak view: mirrors and darkens dark pixels. It is not linear, so the order of view and mixture matters."""
    images = images[:, :, ::-1] * 1.0
    return images**2 / 255


def steps(job, size):
    """For each step of all epochs: positions of its images among the client's, and of their partners."""
    deck, mix = job.work.decks["fix"], job.work.decks["mix"].order
    for epoch, order in enumerate(deck.order):
        for first in range(0, int(deck.size), size):
            places = np.arange(first, min(first + size, int(deck.size)))
            yield order[places], mix[epoch % len(mix)][places]


def mixed_loss(of_fix, of_mix, y_fix, y_mix):
    """l(strong, y) + lambda l(mixture, y) + (1 - lambda) l(mixture, y').

    Args:
        of_fix, of_mix: logits [B, C], of strong views of the fix set's images and of the mixtures.
        y_fix, y_mix: labels of these images and of their partners.
    """
    of_both = LAMBDA * np.mean(cross_entropy(of_mix, y_fix)) + (1 - LAMBDA) * np.mean(cross_entropy(of_mix, y_mix))
    return np.mean(cross_entropy(of_fix, y_fix)) + of_both
