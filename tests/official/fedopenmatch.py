"""FedOpenMatch by its abstract, as no code is public. The one-vs-all losses are those of
VisionLearningGroup/OP_Match@3366d79 (trainer.py:131-170, utils/misc.py: ova_loss, ova_ent), whose two logits of a class
are 0 and z here.
"""

import autograd.numpy as np

from tests.official.consistency import CLIENTS, train_client, weak_logits
from tests.official.harness import agree, federation, make_problem, train
from tests.official.reference import cross_entropy, detached, in_float64, linear, softmax, weighted_mean

THRESHOLD, INLIER = 0.45, 0.4


def both(z):
    """The probabilities that an image is of each class, and that it is not: [B, 2, C]."""
    pairs = np.stack([z, np.zeros_like(detached(z))], axis=1)
    powers = np.exp(pairs - np.max(pairs, axis=1, keepdims=True))
    return powers / np.sum(powers, axis=1, keepdims=True)


def of_labels(z, labels):
    p, is_label = both(z), np.eye(z.shape[1])[labels]
    return np.mean(np.sum(-np.log(p[:, 0]) * is_label, axis=1) + np.max(-np.log(p[:, 1]) * (1 - is_label), axis=1))


def entropy(z):
    p = both(z)
    return np.mean(np.mean(np.sum(-p * np.log(p), axis=1), axis=1))


def test_rounds_of_fedopenmatch():
    problem = make_problem("fedopenmatch", **{
        "fedopenmatch.inlier": INLIER, "data.labels": "clients", "client.batch_size": 2,
        "consistency.unlabelled_ratio": 2, "confidence.threshold": THRESHOLD,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS), rounds=3)
    model, seen = in_float64(run.states[0].model), set()

    def loss(step):
        of_known, weak, strong = (
            linear(step.params["one_vs_all"], detached(view[1])) for view in (step.labelled, step.weak, step.strong)
        )
        p = softmax(weak_logits(step))
        labels = np.argmax(p, axis=1)
        sure = np.max(p, axis=1) >= THRESHOLD
        inlier = both(detached(weak))[np.arange(len(labels)), 0, labels] >= INLIER
        seen.update(zip(sure.tolist(), inlier.tolist()))
        value = np.mean(cross_entropy(step.strong[0], labels) * (sure & inlier)) + of_labels(of_known, step.labels)
        return value + 0.1 * (entropy(weak) + entropy(strong)) / 2 + 0.5 * np.mean((weak - strong) ** 2)

    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        uploads = [train_client(run, model, job, loss, unlabelled_size=4) for job in jobs]
        model = weighted_mean(uploads, [len(CLIENTS[job.client]) for job in jobs])
    assert len(seen) == 4  # confident or not, known or not
    code = "no code: by the abstract; VisionLearningGroup/OP_Match@3366d79"
    agree("fedopenmatch", "three rounds", run, model, code=code)
