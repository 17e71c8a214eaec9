"""FedRGD: users and server train side by side and are averaged in groups; each averaging deals users to places again.

jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning@9a18e89: train_LocalSGD.py:389-660 (the steps of a rank,
and whose images it has), utils_v2.py:838-855 (who gets which place), 1581-1603 (means of the groups, then of the
replicas), comm_helpers.py:263-283 (only parameters; momentum stays). Its networks have group normalisation. Users'
images come in full batches; so do the server's here, whose number is a multiple of the batch size. The code changes the
rate in each step, the library in each round; here rises and falls are by rounds.
"""

import autograd.numpy as np
import jax
import pytest

from tests.official import convolutions
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    cross_entropy,
    gradient,
    in_float64,
    linear,
    pixels,
    relu,
    softmax,
    weighted_mean,
)

CLIENTS, ANCHORS = [[-1] * 11, [-1] * 4, [-1] * 7, [-1] * 5, [-1] * 9], [0, 1, 2, 2, 1, 0, 1, 0]
PLACES, GROUPS, STEPS, ROUNDS, THRESHOLD, RATE = 4, 2, 3, 5, 0.8, 0.05
CODE = (
    "jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning@9a18e89: train_LocalSGD.py, utils_v2.py, "
    "comm_helpers.py"
)


def in_groups(layer, x):
    """Normalises each image's channels [B, H, W, C] in groups of two."""
    groups = x.reshape(len(x), -1, x.shape[-1] // 2, 2)
    mean = np.mean(groups, axis=(1, 3), keepdims=True)
    var = np.mean((groups - mean) ** 2, axis=(1, 3), keepdims=True)
    return ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape) * layer["scale"] + layer["bias"]


def logits(params, images):
    own = params["backbone"]

    def layer(name, x):
        return in_groups(own[f"{name}_norm"], convolutions.convolution(own[name]["kernel"], x))

    x = relu(layer("first", pixels(images).reshape(images.shape)))
    x = relu(layer("second", x) + layer("shortcut", x))
    return linear(params["classifier"], x.reshape(len(x), -1))


def rate_of(number):
    """Rises in equal steps over two rounds, then follows seven sixteenths of a cosine's period over four rounds."""
    return RATE * ((number + 1) / 2 if number < 2 else np.cos(7 / 16 * np.pi * (number - 2) / 4))


@pytest.mark.parametrize("users", ["fixmatch", pytest.param("self_training", marks=pytest.mark.slow)])
def test_rounds_of_fedrgd(users):
    problem = make_problem("fedrgd", **{
        "model.name": convolutions.NAME, "model.normalisation": "group", "num_clients": 5, "clients_per_round": PLACES,
        "client.learning_rate": RATE, "server.learning_rate": RATE, "client.clip_norm": 0.0, "server.clip_norm": 0.0,
        "fedrgd.steps": STEPS, "fedrgd.groups": GROUPS, "fedrgd.users": users, "confidence.threshold": THRESHOLD,
        "fedrgd.warm_up_rounds": 2, "fedrgd.decay_rounds": 6,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS, ANCHORS), rounds=ROUNDS)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config
    model, accepted, dealt = in_float64(run.states[0].model)["params"], [], set()
    places, replicas = [model] * PLACES, [model] * GROUPS
    of_places, of_replicas = [SGD.of(config.client) for _ in places], [SGD.of(config.server) for _ in replicas]

    def user_step(sgd, params, rows):
        views = mirrored(images[rows]), mirrored(images[rows]) if users == "self_training" else rolled(images[rows])
        p = softmax(logits(params, views[0]))
        mask, guess = np.max(p, axis=1) >= THRESHOLD, np.argmax(p, axis=1)
        accepted.append(np.mean(mask))
        slope, _ = gradient(lambda p: (np.mean(cross_entropy(logits(p, views[1]), guess) * mask), None), params)
        return sgd.step(params, slope)

    def server_step(sgd, params, rows):
        x, y = mirrored(images[rows]), labels[rows]
        slope, _ = gradient(lambda p: (np.mean(cross_entropy(logits(p, x), y)), None), params)
        return sgd.step(params, slope)

    for number, of_round in enumerate(run.rounds):
        for sgd in of_places + of_replicas:
            sgd.rate = rate_of(number)
        for place, job in enumerate(of_round.jobs[0]):
            dealt.add((job.client, place))
            for rows in job.batches(4, job.work[0].decks["unlabelled"])[:STEPS]:
                places[place] = user_step(of_places[place], places[place], rows)
        at_server = [rows for _, rows in of_round.seen if np.all(rows < len(ANCHORS))]
        for group, sgd in enumerate(of_replicas):
            for rows in at_server[group * STEPS :][:STEPS]:
                replicas[group] = server_step(sgd, replicas[group], rows)
        means = [weighted_mean([*places[2 * g : 2 * g + 2], replicas[g]], [1, 1, 1]) for g in range(GROUPS)]
        places = [means[place // 2] for place in range(PLACES)]
        replicas = [weighted_mean(means, [1, 1])] * GROUPS
    assert 0.1 < np.mean(accepted) < 0.9
    assert max(sum(client == one for client, _ in dealt) for one in range(5)) > 2
    distance = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.max(np.abs(a - b)), *means)))
    assert distance > 1e-2, "groups that are equal would not show who was in which"
    what = "users dealt anew, FixMatch" if users == "fixmatch" else "users dealt anew, self-training"
    agree("fedrgd", what, run, {"params": replicas[0]}, code=CODE)
