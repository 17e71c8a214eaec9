"""Shared by FixMatch, UDA, SAGE and ProxyFL: a client's steps on labelled and unlabelled batches.

One forward pass for the labelled images and both views of the unlabelled images, with joint batch statistics, as the
official codes interleave them (kekmodel/FixMatch-pytorch@040be3b: train.py:324-333; Jay-Codeman/SAGE@e90fa96:
SAGE.py:130-139).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import autograd.numpy as np

from tests.official.harness import Job, Run, mirrored, rolled
from tests.official.reference import (
    SGD,
    backbone,
    classify,
    cross_entropy,
    detached,
    in_float64,
    linear,
    trained,
    weighted_mean,
)

CLIENTS = [[0, 1, -1, 2, 0, -1, -1, 2, -1, -1, 1], [2, -1, 0, -1, -1, 1, -1], [1, -1, 0, -1, 2, -1, -1, -1, -1]]


class Step(NamedTuple):
    """The input of a loss; logits are [B, C], features [B, F].

    Attributes:
        params: in training.
        labels: int [B'], of the labelled images.
        labelled, weak, strong: (logits, features) of these images' views, by the model in training.
        received, labelled_received: logits of weak views by the received model in evaluation mode, of unlabelled and
            labelled images.
        index: of the local step.
    """

    params: Any
    labels: Any
    labelled: tuple[Any, Any]
    weak: tuple[Any, Any]
    strong: tuple[Any, Any]
    received: Any
    labelled_received: Any
    index: int


def train_client(run: Run, model: Any, job: Job, loss: Callable[[Step], Any], unlabelled_size: int) -> Any:
    """One client's model after its steps; `loss` is added to the labelled images' mean cross-entropy."""
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    config = run.problem.config.client
    unlabelled, labelled = job.batches(unlabelled_size), job.batches(config.batch_size, job.work.decks["labelled"])

    def loss_of_step(params, statistics, batch):
        # The shorter list of batches starts again.
        rows, known = unlabelled[batch % len(unlabelled)], labelled[batch % len(labelled)]
        weak, of_known = mirrored(images[rows]), mirrored(images[known])
        views, ends = np.concatenate([of_known, weak, rolled(images[rows])]), [len(known), len(known) + len(rows)]
        by_received = [classify(model["params"], model["batch_stats"], x, train=False)[0] for x in (weak, of_known)]
        features, new = backbone(params["backbone"], statistics["backbone"], views, train=True)
        logits = linear(params["classifier"], features)
        of_views = zip(np.split(logits, ends), np.split(features, ends))
        step = Step(params, labels[known], *of_views, *by_received, batch)
        value = np.mean(cross_entropy(step.labelled[0], step.labels)) + loss(step)
        return value, {**statistics, "backbone": new}

    return trained(model, SGD.of(config), range(job.num_steps), loss_of_step)


def averaged(run: Run, loss: Callable[[Step], Any], unlabelled_size: int) -> Any:
    """The model after all rounds, averaged by the clients' sizes."""
    model = in_float64(run.states[0].model)
    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        uploads = [train_client(run, model, job, loss, unlabelled_size) for job in jobs]
        model = weighted_mean(uploads, [len(CLIENTS[job.client]) for job in jobs])
    return model


def weak_logits(step: Step) -> Any:
    """Logits of the weak views by the model in training, without gradient."""
    return detached(step.weak[0])
