"""Shared by methods with labels at the server: static statistics, a mean with momentum, then the server's epochs.

diaoenmao/SemiFL...@4ec3663: src/data.py:238-250; seungjoo-ai/FLFL-NeurIPS24@decdf7d: src/data.py:190-213. PyTorch's
normalisation with `momentum=None` keeps the plain mean over batches of any size, and stores nothing in training.
"""

import autograd.numpy as np
import jax

from tests.official.harness import mirrored
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, weighted_mean

SETTING = {
    "model.normalisation": "static", "model.statistics": "all_mixed", "client.batch_size": 4, "server.batch_size": 5,
    "server.epochs": 2, "server.pretrain_epochs": 0, "server.augmentation": "weak",
}  # fmt: skip
BATCH = 8  # images; the tests set `fedjax_ssl.server.statistics.BATCH_SIZE` to it, to get several batches


def statistics_of(params, images):
    """The statistics of images [N, H, W, 1] in their order, in batches; the last one may be short."""
    zeros = {"mean": 0.0, "var": 0.0}
    nothing = {"backbone": {name: zeros for name in params["backbone"] if name.endswith("_norm")}}
    seen = [classify(params, nothing, images[i : i + BATCH], train=True)[1] for i in range(0, len(images), BATCH)]
    # A running average takes a tenth of a batch's statistics.
    return jax.tree.map(lambda leaf: 10 * leaf, weighted_mean(seen, [1] * len(seen)))


class Mean:
    """The server's mean: a step of SGD with rate 1 from the model towards the weighted mean of the uploads."""

    def __init__(self, momentum):
        self.momentum, self.velocity = momentum, None

    def step(self, params, uploads, weights):
        if not uploads:
            return params
        change = jax.tree.map(np.subtract, params, weighted_mean(uploads, weights))
        if self.velocity is not None:
            change = jax.tree.map(lambda c, v: c + self.momentum * v, change, self.velocity)
        self.velocity = change
        return jax.tree.map(np.subtract, params, change)


def anchor_batches(seen, anchors, size, epochs):
    """The rows of each of the server's steps; the library repeats rows in a short last batch.

    Args:
        seen: of a `Round` or of the initialisation.
        anchors: number of server images, which are the first rows.
        size: of a batch.
        epochs: number of epochs trained.
    """
    found = [rows for _, rows in seen if len(rows) == size and np.all((rows >= 0) & (rows < anchors))]
    a_pass = -(-anchors // size)
    assert len(found) == a_pass * epochs
    batches = [rows[: anchors - step % a_pass * size] for step, rows in enumerate(found)]
    for first in range(0, len(batches), a_pass):
        assert sorted(np.concatenate(batches[first : first + a_pass])) == list(range(anchors))
    return batches


def classified(sgd, params, statistics, batches):
    """The parameters after steps of cross-entropy; batches are pairs of images and labels."""
    for x, y in batches:
        loss = lambda p, x=x, y=y: (np.mean(cross_entropy(classify(p, statistics, x, True)[0], y)), None)  # noqa: E731
        params = sgd.step(params, gradient(loss, params)[0])
    return params


def rounds_of(run, train_client):
    """The model after all rounds of `SETTING` with the recipe `strong`.

    `train_client(factor, params, statistics, job)` returns the parameters of a job's upload, None if it takes no step;
    rates are multiplied by the schedule's factor.
    """
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), run.problem.config
    params, anchors, rounds = in_float64(run.fresh)["params"], len(run.data.server_index), config.num_rounds
    statistics, mean, of_server = statistics_of(params, images), Mean(0.5), SGD.of(config.server)
    for number, of_round in enumerate(run.rounds):
        factor = (1 + np.cos(np.pi * number / rounds)) / 2
        uploads = [train_client(factor, params, statistics, job) for job in of_round.jobs[0]]
        uploads = [upload for upload in uploads if upload is not None]
        params, of_server.rate = mean.step(params, uploads, [1] * len(uploads)), config.server.learning_rate * factor
        batches = anchor_batches(of_round.seen, anchors, 5, config.server.epochs)
        params = classified(of_server, params, statistics, [(mirrored(images[rows]), labels[rows]) for rows in batches])
        statistics = statistics_of(params, images)
    return {"params": params, "batch_stats": statistics}
