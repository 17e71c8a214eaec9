"""SemiAnAgg with its own local training: balanced softmax on both views, FlexMatch, a spare classifier, the anchor.

xmed-lab/SemiAnAgg@7b972a8: local_ssl.py (clients with labels), local_flex.py (clients without), train.py and FedAvg.py
(the mean), loss/loss.py. The code skips a labelled client's last batch of one image, which no client has here. No
client has a batch of two either: its statistics amplify float32's rounding, and the models then differ by 4e-4 after
the third round, compared with 2e-7 after the first.
"""

import autograd.numpy as np
import jax
import pytest

from fedjax_ssl.models.untrained import kaiming_model
from tests.helpers.trainers_by_hand import FlexMatch
from tests.official.harness import CLASSES, agree, federation, itself, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, backbone, classify, cross_entropy, in_float64, softmax, trained, weighted_mean

LABELLED = 0
CLIENTS = [[0, 1, 2, 2, 0, 1, 1, 2, 0, 1, 0], [-1] * 15, [-1] * 8]
FIELDS = {
    "data.labelled_clients": 1, "client.nesterov": False, "client.batch_size": 4, "client.epochs": 1,
    "client.learning_rate": 0.1, "client.unlabelled_learning_rate": 0.06, "client.unlabelled_clip_norm": 0.5,
    "confidence.threshold": 0.4, "augment.resized": 0,
}  # fmt: skip
CODE = "xmed-lab/SemiAnAgg@7b972a8: train.py, local_ssl.py, local_flex.py, FedAvg.py, loss/loss.py"


class SpareSGD:
    """One optimizer for the groups of backbone and classifier; the classifier has neither weight decay nor clipping."""

    def __init__(self, rate, section, clip_norm=0.0):
        self.backbone = SGD(rate, section.momentum, section.weight_decay, section.nesterov, clip_norm)
        self.classifier = SGD(rate, section.momentum, 0.0, section.nesterov)

    def step(self, params, gradient):
        params = self.backbone.step(params, {"backbone": gradient["backbone"]})
        return self.classifier.step(params, {"classifier": gradient["classifier"]})


def in_turn(params, statistics, *views):
    """The logits of views that pass in turn, each with its own batch statistics."""
    outputs = []
    for view in views:
        logits, statistics = classify(params, statistics, view, train=True)
        outputs.append(logits)
    return outputs, statistics


@pytest.mark.parametrize("warm_up", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rounds_of_semianagg(warm_up):
    """With the warm-up, as in the code's command, passes over few images accept all of them."""
    problem = make_problem("semianagg,paper,code", **FIELDS, **{"confidence.warm_up": warm_up})
    run = train(problem, federation(CLIENTS, seed=2), rounds=3)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    config, options = problem.config.client, problem.config.confidence
    sgds = [SpareSGD(config.learning_rate, config)]
    sgds += [SpareSGD(config.unlabelled_learning_rate, config, config.unlabelled_clip_norm) for _ in CLIENTS[1:]]
    anchor = in_float64(kaiming_model(problem.network, jax.random.key(problem.config.semianagg.anchor_seed)))
    shares = np.bincount(CLIENTS[LABELLED], minlength=CLASSES) / len(CLIENTS[LABELLED])
    model, accepted, weights = in_float64(run.states[0].model), [], []

    def features(model, view):
        return backbone(model["params"]["backbone"], model["batch_stats"]["backbone"], view, train=False)[0]

    def after_steps(job, sgd, loss_of):
        def loss(params, statistics, batch):
            outputs, after = in_turn(params, statistics, mirrored(images[batch]), rolled(images[batch]))
            return loss_of(outputs, batch), after

        return trained(model, sgd, job.batches(config.batch_size), loss)

    def on_labels(outputs, rows):
        return sum(np.mean(cross_entropy(z + np.log(shares + 1e-12), labels[rows])) for z in outputs) / 2

    for of_round in run.rounds:
        labelled = next(job for job in of_round.jobs[0] if job.client == LABELLED)
        of_labelled = after_steps(labelled, sgds[LABELLED], on_labels)
        uploads, cosines = [], []
        for job in (job for job in of_round.jobs[1] if job.client != LABELLED):
            rule = FlexMatch(options.threshold, len(CLIENTS[job.client]), CLASSES, options.warm_up)
            by_global = softmax(classify(model["params"], model["batch_stats"], mirrored(images), train=False)[0])

            def on_pseudo_labels(outputs, rows, rule=rule, p=by_global):
                mask = rule.weigh(p[rows], rows)
                accepted.extend(mask)
                return np.mean(cross_entropy(outputs[1], p[rows].argmax(axis=1)) * mask)

            uploads.append(after_steps(job, sgds[job.client], on_pseudo_labels))
            of_client = np.ones(CLASSES)
            ours, theirs = features(model, mirrored(images)), features(anchor, itself(images))
            similar = np.sum(ours * theirs, axis=1)
            similar = similar / np.sqrt(np.sum(ours**2, axis=1) * np.sum(theirs**2, axis=1))
            for c in set(rule.stored.values()):
                of_client[c] = similar[[row for row, label in rule.stored.items() if label == c]].mean()
            cosines.append(of_client)
        shares_of = np.array(cosines) / np.sum(cosines, axis=0)
        weights.append(np.sum(1 - shares_of, axis=1) / np.sum(1 - shares_of))
        model = weighted_mean([of_labelled, weighted_mean(uploads, weights[-1])], [0.5, 0.5])
    assert np.mean(accepted) > 0 and (warm_up or np.mean(accepted) < 1) and np.ptp(weights) > 0.01
    agree("semianagg", "its own local training" + ", no warm-up" * (not warm_up), run, model, code=CODE)
