"""SAGE (Jay-Codeman/SAGE@e90fa96: SAGE.py:113-189): labels mixed from the local and the received model's.

The library averages by the clients' numbers of images and starts each client without momentum, see
docs/methods/sage.md. The order of batches in the reference is the run's.
"""

import autograd.numpy as np

from tests.official.consistency import CLIENTS, averaged, weak_logits
from tests.official.harness import agree, federation, make_problem, train
from tests.official.reference import softmax

THRESHOLD = 0.5
FIELDS = {
    "data.labels": "clients", "client.batch_size": 2, "consistency.unlabelled_ratio": 2,
    "consistency.include_labelled": True, "consistency.epoch_length": "unlabelled",
}  # fmt: skip


def test_rounds_of_sage():
    problem = make_problem("sage", **{"confidence.threshold": THRESHOLD, **FIELDS})
    run = train(problem, federation(CLIENTS), rounds=3)
    kinds = []

    def loss(step):
        of_local, of_global = softmax(weak_logits(step)), softmax(step.received)
        one_hot = [np.eye(p.shape[1])[np.argmax(p, axis=1)] for p in (of_local, of_global)]
        local_sure, global_sure = (np.max(p, axis=1) >= THRESHOLD for p in (of_local, of_global))
        gap = np.clip(np.abs(np.max(of_local, axis=1) - np.max(of_global, axis=1)) + 1e-6, 1e-6, 1)
        share = np.clip(np.exp(-np.log(2) / 0.05 * gap), 1e-6, 1)[:, None]
        targets = np.where(local_sure[:, None], share * one_hot[0] + (1 - share) * one_hot[1], one_hot[1]) + 1e-10
        kinds.extend(zip(local_sure, global_sure))
        divergence = np.sum(targets * (np.log(targets) - np.log(softmax(step.strong[0]) + 1e-10)), axis=1)
        return np.mean(divergence * (local_sure | global_sure))

    jobs = [job for of_round in run.rounds for job in of_round.jobs[0]]
    assert all(job.num_steps == 2 * (len(CLIENTS[job.client]) // 2) for job in jobs)
    model = averaged(run, loss, unlabelled_size=4)
    assert len(set(kinds)) == 4  # both sure, one of them, none
    agree("sage", "three rounds", run, model, code="Jay-Codeman/SAGE@e90fa96: SAGE.py:113-189")
