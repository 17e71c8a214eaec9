"""Cross-entropy on a client's labelled images: supervised training, alone or as one phase of several."""

from collections.abc import Callable
from typing import NamedTuple

from fedjax_ssl.client.deck import Batch, Deck
from fedjax_ssl.client.local_sgd import Loss
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.learning.losses import cross_entropy


class OnLabels(NamedTuple):
    """What one client trains on: its labelled examples."""

    deck: Deck


def loss_on_labels(problem: Problem, metric: str = "client_loss", view: Callable | None = None) -> Callable:
    """l(f(alpha(x)), y), a loss for `local_sgd`; the deck has examples with a visible label.

    Args:
        problem: the run.
        metric: name of the loss.
        view: (data, rows [B], key) -> images [B, H, W, C]; None: the weak augmentation.
    """
    view = view or (lambda data, rows, key: problem.weak(key, data.images[rows]))

    def loss(received, data, work, batch: Batch, own, key):
        del received, work, own
        images = view(data, batch.rows, key)

        def of(model) -> Loss:
            (outputs,), batch_stats = problem.network.train(model, (images,), batch.mask)
            value = cross_entropy(outputs.logits, data.visible_labels[batch.rows], batch.mask)
            return Loss(value, batch_stats, {metric: value})

        return of

    return loss
