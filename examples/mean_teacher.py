"""Federated mean teacher: each client keeps the moving average of its models, which labels weak views for strong ones.

Source: Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017.

    python launch.py --config.method=examples/mean_teacher.py:mean_teacher --workdir=runs/teacher
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.client import At, Batches, Loss, local_training, unlabelled_plan
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods import alternating
from fedjax_ssl.ops.trees import moving_average, repeated

DECAY = 0.99  # of the average


def mean_teacher(problem: Problem) -> Method:
    network, sizes = problem.network, {"unlabelled": problem.config.client.batch_size}

    def own(data, model):  # every client's first teacher, leaves [K, ...]
        return {"teacher": repeated(model, len(data.ids))}

    def loss(model, batch: Batches, at: At) -> Loss:
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        weak_key, strong_key = jax.random.split(at.key)
        guess = network.probabilities(at.own["teacher"], problem.weak(weak_key, images))
        (strong,), batch_stats = network.train(model, (problem.strong(strong_key, images),), mask)
        apart = jnp.mean((jax.nn.softmax(strong.logits) - guess) ** 2, axis=-1)
        value = jnp.sum(apart * mask) / jnp.maximum(jnp.sum(mask), 1)
        return Loss(value, batch_stats, {"client_loss": value})

    def after(own, model):  # after each step
        return {"teacher": moving_average(own["teacher"], model, DECAY)}

    phase = local_training(problem, unlabelled_plan(problem), loss, sizes, after=after)
    return alternating(problem, (phase,), own)
