"""Orchestra: clusters of projections at clients and server, a target network, rotated images.

akhilmathurs/orchestra@b6ae718: models.py (`orchestra`, `sknopp`), client.py (`ssl_train`), myfedavg.py. The code drops
the result of the online network's first pass, which changes only running statistics; so only parameters are compared.
"""

import autograd.numpy as np
import jax
import jax.numpy as jnp

from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import (
    SGD,
    backbone,
    gradient,
    in_float64,
    linear,
    log_softmax,
    normalise,
    softmax,
    unit,
    weighted_mean,
)

CODE = "akhilmathurs/orchestra@b6ae718: models.py, client.py, myfedavg.py"
SIZES = (13, 8, 9)  # 3, 2 and 2 full batches; in two epochs each client fills its memory of 8 several times
BATCH, MEMORY, GLOBAL, LOCAL, STEPS, DECAY, TEMPERATURE = 4, 8, 5, 3, 30, 0.9, 0.3
ENCODER = ("backbone", "projector")


def project(params, images):
    """Outputs of backbone and projector in training mode; the projector's last layer is normalised, too."""
    nothing = {"mean": 0.0, "var": 1.0}
    features, _ = backbone(params["backbone"], {"first_norm": nothing, "second_norm": nothing}, images, True)
    layers = params["projector"]
    x, _ = normalise(layers["norm"], nothing, linear(layers["first"], features), True)
    return normalise({}, nothing, linear(layers["second"], np.maximum(x, 0)), True)[0]


def sinkhorn(scores, most):
    """Balanced soft assignments, [N, G]; the change is checked in every tenth iteration."""
    p = softmax(25 * scores).T
    clusters, samples = p.shape
    c, error = np.full(samples, 1 / samples), 1e3
    for iteration in range(most):
        r = 1 / clusters / (p @ c)
        new = 1 / samples / (r @ p)
        if iteration % 10 == 0:
            error = np.sum(np.abs(c / new - 1))
        c = new
        if error < 1e-2:
            break
    return (p * c).T * r * samples


def local_clusters(memory):
    """Five rounds of balanced clustering, started from the first rows; an empty cluster takes the first row."""
    centroids = memory[:LOCAL]
    for _ in range(5):
        of_row = np.argmax(sinkhorn(memory @ centroids.T, 10), axis=1)
        members = [memory[of_row == index] if np.any(of_row == index) else memory[:1] for index in range(LOCAL)]
        centroids = unit(np.stack([np.mean(rows, axis=0) for rows in members]))
    return centroids


def global_clusters(centroids, vectors):
    """SGD on minus the cosine of balanced and predicted assignments; scales centroids to length 1 after each step."""
    sgd = SGD(0.01, 0.9, 1e-4)
    for _ in range(STEPS):
        balanced = unit(sinkhorn(vectors @ centroids.T, 100))

        def loss(params, balanced=balanced):
            predicted = unit(softmax(unit(vectors) @ params["c"].T / TEMPERATURE))
            return -np.mean(np.sum(balanced * predicted, axis=1)), None

        centroids = unit(sgd.step({"c": centroids}, gradient(loss, {"c": centroids})[0])["c"])
    return centroids


def test_rounds_of_orchestra(monkeypatch):
    """The first round only clusters, two more train. Draws of rows and rotations are fixed."""

    def first_rows(key, number, shape, replace):
        assert not replace
        return jnp.arange(shape[0])

    monkeypatch.setattr(jax.random, "choice", first_rows)
    draw = lambda key, shape, least, most: jnp.arange(shape[0]) % 4 if most == 4 else jnp.zeros(shape, int)  # noqa: E731
    monkeypatch.setattr(jax.random, "randint", draw)
    monkeypatch.setattr("fedjax_ssl.methods.orchestra.DECAY", DECAY)
    monkeypatch.setattr("fedjax_ssl.methods.orchestra.clusters.STEPS", STEPS)
    monkeypatch.setattr("fedjax_ssl.methods.orchestra.clusters.TEMPERATURE", TEMPERATURE)
    problem = make_problem("orchestra", **{
        "model.projector_hidden": 16, "model.projector_dim": 6, "orchestra.clusters": GLOBAL,
        "orchestra.memory": MEMORY, "orchestra.local_clusters": LOCAL, "client.batch_size": BATCH,
        "client.nesterov": False, "client.clip_norm": 0.0, "client.learning_rate": 0.001,
    })  # fmt: skip
    run = train(problem, federation([[-1] * size for size in SIZES], at_server=[0, 1, 2, 0]), rounds=3)
    images, rows_of = np.asarray(run.data.inputs), np.asarray(run.data.client_index)
    turns = np.arange(BATCH) % 4
    centroids = np.array(run.states[0].server["centroids"], np.float64)
    model = in_float64(run.states[0].model)["params"]
    memories = [None] * 3

    def train_client(params, job):
        sgd, memory = SGD.of(problem.config.client), memories[job.client]
        for rows in job.batches(BATCH):
            first, second = mirrored(images[rows]), rolled(images[rows])
            third = np.stack([np.rot90(image, number) for image, number in zip(first, turns)])
            target = jax.tree.map(
                lambda own, new: DECAY * own + (1 - DECAY) * new,
                params["target"],
                {name: params[name] for name in ENCODER},
            )
            of_target = unit(project(target, first))
            assigned = softmax(of_target @ centroids.T / TEMPERATURE)

            def loss(params, second=second, third=third, assigned=assigned):
                predicted = log_softmax(unit(project(params, second)) @ centroids.T / TEMPERATURE)
                cluster_loss = -np.mean(np.sum(assigned * predicted, axis=1))
                rotation = log_softmax(linear(params["rotation"], project(params, third)))
                return cluster_loss - np.mean(rotation[np.arange(BATCH), turns]), None

            slope, _ = gradient(loss, params)
            params = {**sgd.step(params, {name: slope[name] for name in (*ENCODER, "rotation")}), "target": target}
            memory = np.concatenate([memory[BATCH:], of_target])
        memories[job.client] = memory
        return params

    for number, of_round in enumerate(run.rounds):
        jobs = of_round.jobs[0]
        if number == 0:
            for client in range(3):
                batches = rows_of[client, :MEMORY].reshape(-1, BATCH)
                target = model["target"]
                memories[client] = np.concatenate([unit(project(target, mirrored(images[rows]))) for rows in batches])
            sent = [model] * 3
        else:
            sent = [train_client(model, job) for job in jobs]
        model = weighted_mean(sent, [SIZES[job.client] // BATCH for job in jobs])
        centroids = global_clusters(centroids, np.concatenate([local_clusters(memories[job.client]) for job in jobs]))
    del model["classifier"]  # the probe's
    found = run.states[-1].model
    found = found._replace(params={name: part for name, part in found.params.items() if name != "classifier"})
    agree("orchestra", "three rounds", run, {"params": model}, code=CODE, found=found)
    assert np.max(np.abs(np.array(run.states[-1].server["centroids"]) - centroids)) < 1e-5
