"""FedMatch with labels at clients and at the server (wyjeong/FedMatch@4947aa2).

models/fedmatch/client.py:56-119 (both losses), modules/train.py:113-178 (a round's batches: as many unlabelled as
labelled ones), :387-478 (what counts as changed in an upload), models/fedmatch/server.py:96-159 (helpers: the nearest
by the models' outputs for an image of noise) and modules/federated.py:133-176 (order of a round, the server's loss).
Its network has no normalisation. Its learning rate falls by the loss on validation images at every client, which the
library lacks, so rates are constant here. Keras clips probabilities at 1e-7, which no loss here approaches.
"""

import autograd.numpy as np
import jax
import pytest

from fedjax_ssl.methods.fedmatch.server import noise_image
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import classify, cross_entropy, gradient, in_float64, log_softmax, softmax, weighted_mean

RATE, THRESHOLD, SMALLEST, LEAST_CHANGE, HELPERS_EVERY = 0.01, 0.5, 2e-3, 5e-4, 2
LABELLED, CONSISTENCY, PSEUDO, L1, L2 = 10.0, 0.5, 0.4, 1e-3, 3.0
WHERE = {
    "clients": ([[0, 1, -1, 2, 0, -1, -1, 2, -1, -1, 1], [2, -1, 0, -1, -1, 1, -1], [1, -1, 0, -1, 2, -1, -1, -1]], ()),
    "server": ([[-1] * 11, [-1] * 5, [-1] * 8], [0, 1, 2, 2, 1, 0, 1]),
}
FIELDS = {
    "model.normalisation": "none", "client.epochs": 1, "client.batch_size": 2, "client.learning_rate": RATE,
    "client.momentum": 0.0, "client.nesterov": False, "client.weight_decay": 0.0, "server.epochs": 1,
    "server.learning_rate": RATE, "server.momentum": 0.0, "server.weight_decay": 0.0, "confidence.threshold": THRESHOLD,
    "fedmatch.helpers": 1, "fedmatch.helper_interval": HELPERS_EVERY, "fedmatch.l1_weight": L1,
    "fedmatch.l2_weight": L2, "fedmatch.smallest": SMALLEST, "fedmatch.least_change": LEAST_CHANGE,
    "fedmatch.patience": 0,
}  # fmt: skip


def added(sigma, psi):
    return jax.tree.map(lambda a, b: a + b, sigma, psi)


def moved(params, slope):
    return jax.tree.map(lambda p, g: p - RATE * g, params, slope)


def logits(params, images):
    return classify(params, {}, images, train=True)[0]


def without_small(psi):
    return jax.tree.map(lambda leaf: np.where(np.abs(leaf) > SMALLEST, leaf, 0), psi)


def uploaded(new, old, compared):
    """Entries that `compared` shows as changed by more than the bound are the client's, others the server's."""
    return jax.tree.map(lambda n, o, c: np.where(np.abs(c - o) > LEAST_CHANGE, n, o), new, old, compared)


def supervised_step(sigma, psi, x, y):
    loss = lambda sigma: (LABELLED * np.mean(cross_entropy(logits(added(sigma, psi), x), y)), None)  # noqa: E731
    return moved(sigma, gradient(loss, sigma)[0])


def unlabelled_step(sigma, psi, images, helpers, seen):
    """psi after a step of `loss_fn_u`; `seen` receives which images are confident."""
    weak = mirrored(images)
    p = softmax(logits(added(sigma, psi), weak))
    chosen = np.max(p, axis=1) >= THRESHOLD
    seen.append(np.mean(chosen))
    votes = np.eye(p.shape[1])[np.argmax(p, axis=1)]
    by_helpers = [softmax(logits(helper, weak))[chosen] for helper in helpers]
    for of_helper in by_helpers:
        votes[chosen] += np.eye(p.shape[1])[np.argmax(of_helper, axis=1)]
    labels = np.argmax(votes, axis=1)[chosen]

    def loss(psi):
        value, theta = 0.0, added(sigma, psi)
        if chosen.any():
            of_weak = log_softmax(logits(theta, weak[chosen]))
            for q in by_helpers:
                value = value + CONSISTENCY / len(helpers) * np.mean(np.sum(q * (np.log(q) - of_weak), axis=1))
            value = value + PSEUDO * np.mean(cross_entropy(logits(theta, rolled(images[chosen])), labels))
        pairs = list(zip(jax.tree.leaves(sigma), jax.tree.leaves(psi)))
        value = value + L1 * sum(np.sum(np.abs(b)) for _, b in pairs)
        return value + L2 * sum(np.sum((a - b) ** 2) for a, b in pairs), None

    return moved(psi, gradient(loss, psi)[0])


def batches(deck, size, number):
    rows = deck.rows[deck.order[0][: int(deck.size)]]
    return [rows[i * size : (i + 1) * size] for i in range(number)]


@pytest.mark.parametrize("where", ["clients", pytest.param("server", marks=pytest.mark.slow)])
def test_rounds_of_fedmatch(where, monkeypatch):
    for name, value in (("LABELLED", LABELLED), ("HELPERS", CONSISTENCY), ("VOTED", PSEUDO)):
        monkeypatch.setattr(f"fedjax_ssl.methods.fedmatch.{name}", value)
    clients, anchors = WHERE[where]
    with_labels = where == "clients"
    problem = make_problem("fedmatch", **{"data.labels": where, **FIELDS})
    run = train(problem, federation(clients, anchors), rounds=4)
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    sigma = in_float64(run.fresh)["params"]
    psi = jax.tree.map(lambda leaf: 0.2 * leaf, sigma)
    noise = np.array(noise_image(images.shape[1:]), np.float64)
    vectors, kept, seen, voted = {}, {}, [], 0

    for number, of_round in enumerate(run.rounds):
        if not with_labels:
            for first, (_, rows) in zip((0, 4), of_round.seen):
                rows = rows[: len(anchors) - first]
                sigma = supervised_step(sigma, psi, mirrored(images[rows]), labels[rows])
        (jobs,), uploads = of_round.jobs, {}
        for job in jobs:
            own_sigma, own_psi, helpers = sigma, psi, []
            if job.client in vectors and (number + 1) % HELPERS_EVERY == 0:
                others = [client for client in vectors if client != job.client]
                distance = [np.linalg.norm(vectors[client] - vectors[job.client]) for client in others]
                helpers, voted = [added(sigma, kept[others[int(np.argmin(distance))]])], voted + 1
            work = job.work.work
            num_labelled = sum(label >= 0 for label in clients[job.client])
            num_unlabelled = len(clients[job.client]) - num_labelled
            num_steps = round((num_labelled if with_labels else num_unlabelled) / 2)
            assert num_steps == job.num_steps
            size = -(-num_unlabelled // num_steps) if with_labels else 2
            for step, rows in enumerate(batches(work.unlabelled, size, num_steps)):
                if with_labels:
                    known = batches(work.labelled, 2, num_steps)[step]
                    own_sigma = supervised_step(own_sigma, own_psi, mirrored(images[known]), labels[known])
                own_psi = unlabelled_step(own_sigma, own_psi, images[rows], helpers, seen)
            up_sigma = uploaded(own_sigma, sigma, own_sigma)
            uploads[job.client] = up_sigma, uploaded(own_psi, psi, without_small(own_psi))
        kept |= {client: up_psi for client, (_, up_psi) in uploads.items()}
        vectors |= {client: softmax(logits(added(*parts), noise))[0] for client, parts in uploads.items()}
        sigma, psi = weighted_mean(list(uploads.values()), [1] * len(uploads))

    assert 0.1 < np.mean(seen) < 0.9 and voted == 6
    agree("fedmatch", f"labels at {where}", run, {"params": added(sigma, without_small(psi))},
          code="wyjeong/FedMatch@4947aa2: models/fedmatch, modules/train.py")  # fmt: skip
    parts = in_float64(run.states[-1].model._replace(params=run.states[-1].server["parts"]))["params"]
    differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), parts, {"sigma": sigma, "psi": psi})
    assert max(jax.tree.leaves(differences)) <= 1e-5
