"""UDA at clients with a few labels (google-research/uda@960684e: image/main.py:305-386), averaged by size.

KL between the sharpened prediction of the weak view and the strong view's, over the images whose unsharpened prediction
is above the threshold, divided by the number of all images. The library also counts predictions equal to the threshold.
The code is not federated, its original view is the image itself, and its flag of training-signal annealing is off.
"""

import autograd.numpy as np

from tests.official.consistency import CLIENTS, averaged, weak_logits
from tests.official.harness import agree, federation, make_problem, train
from tests.official.reference import log_softmax, softmax

THRESHOLD, TEMPERATURE = 0.5, 0.4


def test_rounds_of_uda():
    fields = {"confidence.threshold": THRESHOLD, "uda.temperature": TEMPERATURE, "consistency.unlabelled_ratio": 2,
              "client.batch_size": 2, "data.labels": "clients"}  # fmt: skip
    problem = make_problem("uda", **fields)
    run = train(problem, federation(CLIENTS), rounds=3)
    accepted = []

    def loss(step):
        weak = weak_logits(step)
        mask = np.max(softmax(weak), axis=1) > THRESHOLD
        accepted.append(np.mean(mask))
        of_target = log_softmax(weak / TEMPERATURE)
        divergence = np.sum(np.exp(of_target) * (of_target - log_softmax(step.strong[0])), axis=1)
        return np.mean(divergence * mask)

    model = averaged(run, loss, unlabelled_size=4)
    assert 0.1 < np.mean(accepted) < 0.9
    agree("uda", "labels at clients", run, model, code="google-research/uda@960684e: image/main.py:305-386")
