"""SemiFL: labels once a round, fix and mix sets, static statistics of all images, alternate training.

diaoenmao/SemiFL...@4ec3663: src/modules/modules.py:43-66 (the mean and its momentum), 146-172 (the server), 205-251
(labels, fix and mix set), 322-360 (a client's epochs), src/models/wresnet.py:93-116 (the loss), src/data.py:238-250
(statistics), 290-305 (partners, drawn again in each epoch), src/train_classifier_ssfl.py:96-135 (order).
"""

import autograd.numpy as np
import jax.numpy as jnp
import pytest

from tests.official.alternate import BATCH, Mean, anchor_batches, classified, statistics_of
from tests.official.fix_mix import LAMBDA, dimmed, mixed_loss, steps
from tests.official.harness import agree, federation, make_problem, rolled, train
from tests.official.reference import SGD, classify, gradient, in_float64, softmax

CLIENTS, ANCHORS = [[-1] * 13, [-1] * 6, [-1] * 9], [0, 1, 2, 2, 1, 0, 1]
THRESHOLD, EPOCHS, RATE, ROUNDS = 0.5, 2, 0.05, 3
CODE = (
    "diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training@4ec3663: "
    "src/modules/modules.py, models/wresnet.py, data.py, train_classifier_ssfl.py"
)


@pytest.mark.parametrize("partners", ["epoch", pytest.param("round", marks=pytest.mark.slow)])
def test_rounds_of_semifl(partners, monkeypatch):
    def of_the_paper(key, alpha):
        assert alpha == 0.75
        return jnp.float32(LAMBDA)

    monkeypatch.setattr("fedjax_ssl.server.statistics.BATCH_SIZE", BATCH)
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", of_the_paper)
    problem = make_problem("semifl,strong,paper" + (",code" if partners == "epoch" else ""), weak=dimmed, **{
        "num_rounds": ROUNDS, "model.normalisation": "static", "client.batch_size": 4, "server.batch_size": 5,
        "server.epochs": EPOCHS, "confidence.threshold": THRESHOLD,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config
    params = in_float64(run.fresh)["params"]
    statistics, mean = statistics_of(params, images), Mean(0.5)
    of_server, of_clients = SGD.of(config.server), [SGD.of(config.client) for _ in CLIENTS]
    shares, empty, anew = [], 0, 0

    def logits(params, x):
        return classify(params, statistics, x, train=True)[0]

    for number, of_round in enumerate(run.rounds):
        for sgd in [of_server, *of_clients]:
            sgd.rate = RATE * (1 + np.cos(np.pi * number / ROUNDS)) / 2
        uploads = []
        for job in of_round.jobs[0]:
            rows = np.asarray(run.data.client_index[job.client, : len(CLIENTS[job.client])])
            p = softmax(classify(params, statistics, dimmed(images[rows]), train=False)[0])
            guess, chosen = np.argmax(p, axis=1), np.max(p, axis=1) >= THRESHOLD
            shares.append(np.mean(chosen))
            todo, local = list(steps(job, 4)), params
            assert {place for places, _ in todo for place in places} == set(np.flatnonzero(chosen))
            half = len(todo) // EPOCHS
            anew += any(not np.array_equal(one, other) for (_, one), (_, other) in zip(todo[:half], todo[half:]))
            for fix, mix in todo:
                x = rolled(images[rows[fix]])
                x_mix = LAMBDA * dimmed(images[rows[fix]]) + (1 - LAMBDA) * dimmed(images[rows[mix]])

                def loss(params, x=x, x_mix=x_mix, y=guess[fix], y_mix=guess[mix]):
                    return mixed_loss(logits(params, x), logits(params, x_mix), y, y_mix), None

                local = of_clients[job.client].step(local, gradient(loss, local)[0])
            uploads += [local] if todo else []
            empty += not todo
        params = mean.step(params, uploads, [1] * len(uploads))
        at_server = anchor_batches(of_round.seen, len(ANCHORS), 5, EPOCHS)
        batches = [(dimmed(images[rows]), labels[rows]) for rows in at_server]
        params = classified(of_server, params, statistics, batches)
        statistics = statistics_of(params, images)
    assert 0.1 < np.mean(shares) < 0.9 and empty < len(shares) and bool(anew) == (partners == "epoch")
    what = "its code, partners anew in each epoch" if partners == "epoch" else "partners once a round"
    agree("semifl", what, run, {"params": params, "batch_stats": statistics}, code=CODE)
