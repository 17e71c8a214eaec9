"""FedAvg-Semi with each of the local trainers.

The mean is that of xmed-lab/SemiAnAgg@7b972a8 (train.py, FedAvg.py), in which a client without labels is weighted by
the number of pseudo-labels that it trained on (the paper's eq. 2; the released code uses SemiAnAgg's weights). Each
trainer's own code defines a pseudo-label's weight. None of these codes is federated: labelled and unlabelled images
pass together there, but a client here has one kind. FlexMatch is SemiAnAgg's; an epoch of ACR is a client's round.
"""

import autograd.numpy as np
import pytest

from fedjax_ssl.client import acr
from tests.helpers.trainers_by_hand import FixMatch, FlexMatch, FreeMatch, SoftMatch
from tests.official.harness import CLASSES, agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    backbone,
    cross_entropy,
    fairness,
    gradient,
    in_float64,
    linear,
    softmax,
    weighted_mean,
)

LABELLED = 0
CLIENTS = [[0, 1, 0, 2, 0, 1, 1, 2, 0, 0, 0], [-1] * 15, [-1] * 8]
TAU, MOMENTUM = 0.42, 0.6
USB = "microsoft/Semi-supervised-learning@1ef4cbe: semilearn/algorithms/"


class OfOneClassifier:
    """A trainer of the classifier alone, by a rule of `weigh(p, rows)` for each batch's weights."""

    strong_views, heads = 1, ("classifier",)

    def __init__(self, options, rule):
        self.options, self.rule = options, rule

    def begin(self, first):
        """Called at the start of a round."""

    def on_labels(self, logits, labels):
        return np.mean(cross_entropy(logits["classifier"], labels))

    def targets(self, logits, rows):
        p = softmax(logits["classifier"])
        return {"classifier": (p.argmax(axis=1), self.rule.weigh(p, rows))}

    def further(self, logits, predicted, weights):
        """FreeMatch's loss on the strong views' logits; `predicted` are their largest classes."""
        if not isinstance(self.rule, FreeMatch):
            return 0.0
        return self.options.fairness_weight * fairness(self.rule, logits, predicted, weights)


class ACR(OfOneClassifier):
    """Two classifiers. Its histogram counts labels; the code's index keeps only one image of each class."""

    strong_views, heads = 2, ("classifier", "standard")

    def __init__(self, options, rule):
        self.options, self.epoch, self.share = options, -1, np.full(CLASSES, 1 / CLASSES)
        self.tau, self.distances, self.steps = options.strength, np.zeros(3), 0
        prior = np.bincount(CLIENTS[LABELLED], minlength=CLASSES) / len(CLIENTS[LABELLED])
        order = np.argsort(prior)
        flipped = np.empty(CLASSES)
        flipped[order] = prior[order[::-1]]
        self.anchors = [prior, np.full(CLASSES, 1 / CLASSES), flipped]

    def further(self, logits, predicted, weights):
        return 0.0

    def adjustment(self, tau):
        return np.log(self.anchors[0] ** tau + 1e-12)

    def estimates(self):
        return self.epoch > acr.ESTIMATE_FROM - 1  # the code's est_epoch

    def begin(self, first):
        self.epoch += 1
        if self.estimates():
            powers = np.exp(self.distances / max(self.steps, 1))
            self.tau = self.options.strength * powers[0] / powers.sum()
        self.distances, self.steps = np.zeros(3), 0

    def on_labels(self, logits, labels):
        adjusted = logits["classifier"] + self.adjustment(self.options.strength)
        return np.mean(cross_entropy(logits["standard"], labels)) + np.mean(cross_entropy(adjusted, labels))

    def targets(self, logits, rows):
        h, threshold = logits["standard"], self.options.threshold
        label, label_h2 = softmax(h - self.adjustment(self.tau)), softmax(h - self.adjustment(self.options.strength))
        label_b, label_t = softmax(logits["classifier"]), softmax(h)
        sure, sure_h2, sure_b, sure_t = (p.max(axis=1) >= threshold for p in (label, label_h2, label_b, label_t))
        self.steps += 1
        if self.estimates() and sure_b.any():
            counts = np.bincount(label_b.argmax(axis=1)[sure_b], minlength=CLASSES)
            m = acr.ESTIMATE_MOMENTUM
            u = self.share = m * self.share + (1 - m) * counts / counts.sum()
            self.distances = self.distances + [
                0.5 * np.sum(u * np.log(u / a)) + 0.5 * np.sum(a * np.log(a / u)) for a in self.anchors
            ]
        return {
            "standard": (label.argmax(axis=1), (sure | sure_t) * 1.0),
            "classifier": (label_h2.argmax(axis=1), (sure_b | sure_h2) * 1.0),
        }


CASES = {
    "FixMatch": ("fixed", lambda size: FixMatch(TAU), {}, f"{USB}fixmatch"),
    "FlexMatch": (
        "flexmatch",
        lambda size: FlexMatch(TAU, size, CLASSES, warm_up=False),
        {"confidence.warm_up": False},
        "xmed-lab/SemiAnAgg@7b972a8: local_flex.py, train.py",
    ),
    "FreeMatch": (
        "freematch",
        lambda size: FreeMatch(CLASSES, MOMENTUM),
        {"confidence.fairness_weight": 0.3},
        f"{USB}freematch",
    ),
    "SoftMatch": ("softmatch", lambda size: SoftMatch(CLASSES, MOMENTUM), {}, f"{USB}softmatch, hooks/dist_align.py"),
    "ACR": (
        "acr",
        lambda size: None,
        {"confidence.threshold": 0.5, "confidence.strength": 0.5},
        "Gank0078/ACR@9a8f421: train.py",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "ACR")) for case in CASES])
def test_rounds_of_fedavg_semi(case, monkeypatch):
    monkeypatch.setattr(acr, "ESTIMATE_FROM", 1)
    monkeypatch.setattr(acr, "ESTIMATE_MOMENTUM", 0.6)
    kind, rule_of, fields, code = CASES[case]
    trainer = ACR if case == "ACR" else OfOneClassifier
    problem = make_problem("fedavg_semi", **{
        "data.labelled_clients": 1, "client.nesterov": False, "client.persistent": True, "client.epochs": 1,
        "client.clip_norm": 0.0, "confidence.kind": kind, "confidence.labels_from": "local",
        "confidence.momentum": MOMENTUM, "confidence.memory": "run",
        "confidence.threshold": TAU, **fields,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS, seed=2), rounds=4 if case == "ACR" else 3)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config.client
    options = problem.config.confidence
    sgds, rules = [SGD.of(config) for _ in CLIENTS], [trainer(options, rule_of(len(c))) for c in CLIENTS]
    model, weights = in_float64(run.states[0].model), []

    def seen(params, statistics, rows, views):
        """[{head: logits}] for views that pass in turn, and the statistics."""
        outputs, own = [], statistics["backbone"]
        for view in views:
            features, own = backbone(params["backbone"], own, view(images[rows]), train=True)
            outputs.append({head: linear(params[head], features) for head in trainer.heads})
        return outputs, {**statistics, "backbone": own}

    def train_client(job, sgd, rule):
        params, statistics, accepted = model["params"], model["batch_stats"], 0.0
        for rows in job.batches(config.batch_size):
            of_client = [mirrored] if job.client == LABELLED else [mirrored, *[rolled] * trainer.strong_views]
            before, _ = seen(params, statistics, rows, of_client)
            targets = {} if job.client == LABELLED else rule.targets(before[0], rows)

            def loss(params, statistics=statistics, rows=rows, views=of_client, before=before, targets=targets):
                (weak, *strong), after = seen(params, statistics, rows, views)
                if job.client == LABELLED:
                    return rule.on_labels(weak, labels[rows]), after
                losses = [
                    np.mean(cross_entropy(view[head], chosen) * of_images)
                    for view in strong
                    for head, (chosen, of_images) in targets.items()
                ]
                predicted = before[1]["classifier"].argmax(axis=1)
                further = rule.further(strong[0]["classifier"], predicted, targets["classifier"][1])
                return sum(losses) / len(strong) + further, after

            slope, statistics = gradient(loss, params)
            params = sgd.step(params, slope)
            if targets:
                accepted += targets["classifier"][1].sum()
                weights.extend(targets["classifier"][1])
        return {"params": params, "batch_stats": statistics}, accepted

    for number, of_round in enumerate(run.rounds):
        uploads, counts = {}, {}
        for both in zip(*of_round.jobs):
            job = both[0] if both[0].client == LABELLED else both[1]
            rules[job.client].begin(number == 0)
            uploads[job.client], counts[job.client] = train_client(job, sgds[job.client], rules[job.client])
        others = [client for client in uploads if client != LABELLED]
        of_others = weighted_mean([uploads[k] for k in others], [counts[k] for k in others])
        model = weighted_mean([uploads[LABELLED], of_others], [0.5, 0.5])
    assert np.mean(weights) > 0.1 and min(weights) < 0.9
    agree("fedavg_semi", case, run, model, code=code)
