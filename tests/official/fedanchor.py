"""FedAnchor by the algorithm of its paper (arXiv 2402.10191); its code is not public.

Algorithm 1, eq. 1 and 2 (the label contrastive loss), 3 to 5 (labels by cosines to the anchors), 6 to 10 (fix and mix
sets), section 4.4 and appendix C (the server's epochs on one head, then the other, also before the first round).
Running statistics are updated in all trainings, view by view; clients' statistics are averaged like parameters. A
client trains only backbone and classifier.
"""

import autograd.numpy as np
import jax.numpy as jnp

from fedjax_ssl.methods.fedanchor import contrastive_loss
from tests.official.fix_mix import LAMBDA, dimmed, mixed_loss, steps
from tests.official.harness import CLASSES, agree, federation, itself, make_problem, rolled, train
from tests.official.reference import SGD, backbone, classify, cross_entropy, gradient, in_float64, linear, weighted_mean

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1, 0, 2]
THRESHOLD, TEMPERATURE, PRETRAINED, ROUNDS, CONTRASTIVE_RATE = 0.8, 0.5, 2, 3, 0.02
FIELDS = {
    "confidence.threshold": THRESHOLD, "fedanchor.temperature": TEMPERATURE, "fedanchor.contrastive_batch_size": 5,
    "fedanchor.contrastive_learning_rate": CONTRASTIVE_RATE,
    "server.batch_size": 4, "server.epochs": 1, "server.pretrain_epochs": PRETRAINED,
    "server.pretrain_learning_rate": 0.03, "client.clip_norm": 0.5,
}  # fmt: skip


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=1, keepdims=True))


def embed(params, statistics, images, train):
    """The anchor head's outputs, and the backbone's statistics after the pass."""
    features, new = backbone(params["backbone"], statistics["backbone"], images, train)
    return linear(params["anchor_head"], features), {**statistics, "backbone": new}


def noted(problem, data):
    """The library's contrastive loss, which lets the weak view see its images, for the record of its batches."""
    loss = contrastive_loss(problem, data)

    def of_batch(model, rows, *others):
        problem.weak(None, data.inputs[rows])
        return loss(model, rows, *others)

    return of_batch


def label_contrastive(z, labels):
    """Eq. 1 and 2 as sums over pairs; classes without a pair are left out."""
    weights = np.exp(unit(z) @ unit(z).T / TEMPERATURE)
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z))]
    value = 0.0
    for c in range(CLASSES):
        same = [weights[i, j] for i, j in pairs if labels[i] == labels[j] == c and i != j]
        other = [weights[i, j] for i, j in pairs if labels[i] != labels[j]]
        if same and other:
            value = value - np.log(sum(same) / sum(other))
    return value / CLASSES


def test_rounds_of_fedanchor(monkeypatch):
    def of_the_paper(key, alpha):
        assert alpha == 0.75
        return jnp.float32(LAMBDA)

    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", of_the_paper)
    monkeypatch.setattr("fedjax_ssl.methods.fedanchor.contrastive_loss", noted)
    problem = make_problem("fedanchor,paper", weak=dimmed, **FIELDS)
    run = train(problem, federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config
    fresh = in_float64(run.fresh)
    params, statistics, shares = fresh["params"], fresh["batch_stats"], []

    def trained(rate, view, seen, size, epochs, parts, loss_of):
        """The model after epochs of the server; `seen` are the rows of its steps, padded."""
        nonlocal params, statistics
        sgd, steps = SGD.of(config.server, rate), -(-len(ANCHORS) // size)
        assert len(seen) == steps * epochs
        for step, rows in enumerate(seen):
            rows = rows[: len(ANCHORS) - step % steps * size]
            x, y = view(images[rows]), labels[rows]

            def loss(own, x=x, y=y, params=params, statistics=statistics):
                return loss_of({**params, **own}, statistics, x, y)

            slope, statistics = gradient(loss, {name: params[name] for name in parts})
            params = sgd.step(params, slope)

    def classification(params, statistics, x, y):
        logits, statistics = classify(params, statistics, x, train=True)
        return np.mean(cross_entropy(logits, y)), statistics

    def contrastive(params, statistics, x, y):
        z, statistics = embed(params, statistics, x, train=True)
        return label_contrastive(z, y), statistics

    def server_trains(of_round, epochs, rates):
        at_server = [(name, rows) for name, rows in of_round.seen if 0 <= rows[0] < len(ANCHORS)]
        seen = {name: [rows for of, rows in at_server if of == name] for name in ("strong", "weak")}
        trained(rates[0], rolled, seen["strong"], 4, epochs[0], ("backbone", "classifier"), classification)
        trained(rates[1], itself, seen["weak"], 5, epochs[1], ("backbone", "anchor_head"), contrastive)

    server_trains(run.init, (PRETRAINED, PRETRAINED), (0.03, 0.03))
    for of_round in run.rounds:
        uploads, sizes = [], []
        anchors = unit(embed(params, statistics, images[: len(ANCHORS)], train=False)[0])
        for job in of_round.jobs[0]:
            rows = np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
            cosines = unit(embed(params, statistics, images[rows], train=False)[0]) @ anchors.T
            scores = np.stack([cosines[:, np.array(ANCHORS) == c].mean(axis=1) for c in range(CLASSES)], axis=1)
            guess, chosen = np.argmax(scores, axis=1), np.max(scores, axis=1) > THRESHOLD
            shares.append(np.mean(chosen))
            todo, sgd, seen = list(steps(job, 4)), SGD.of(config.client), statistics
            assert {place for places, _ in todo for place in places} == set(np.flatnonzero(chosen))
            local = {name: params[name] for name in ("backbone", "classifier")}
            for fix, mix in todo:
                mixture = LAMBDA * images[rows[fix]] + (1 - LAMBDA) * images[rows[mix]]
                x, x_mix = rolled(images[rows[fix]]), dimmed(mixture)

                def loss(local, seen=seen, x=x, x_mix=x_mix, y=guess[fix], y_mix=guess[mix]):
                    of_fix, seen = classify(local, seen, x, train=True)
                    of_mix, seen = classify(local, seen, x_mix, train=True)
                    return mixed_loss(of_fix, of_mix, y, y_mix), seen

                slope, seen = gradient(loss, local)
                local = sgd.step(local, slope)
            if todo:
                uploads.append((local, seen))
                sizes.append(len(rows))
        found, statistics = weighted_mean(uploads, sizes)
        params = {**params, **found}
        server_trains(of_round, (1, 1), (0.05, CONTRASTIVE_RATE))
    assert 0.1 < np.mean(shares) < 0.9
    code = "no code: by the paper's algorithm 1"
    agree("fedanchor", "algorithm 1", run, {"params": params, "batch_stats": statistics}, code=code)
