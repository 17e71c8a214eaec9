"""A problem small enough for NumPy: images of 2x2 pixels, three classes, a linear network, no files.

The gradients have a closed form, so that local trainings are recomputed by hand. Phases run without `jit`: their
operations compile once for all tests. Jitted, each variant of a step would be another program, which takes twice the
time.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client import own_optimizers, own_states
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Previous, Problem
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from tests.helpers.federations import one_after_the_other, put_federation
from tests.helpers.linear_network import in_numpy, softmax

SIDE, PIXELS, CLASSES, HEAD_DIM = 2, 4, 3, 5
NUM_CLIENTS, MAX_SIZE, NUM_IMAGES = 4, 10, 24  # equal shapes: all federations share the compiled operations
KEPT = 0.75  # share of the running mean that a training pass keeps


class SmallNetwork:
    """Logits (x - c) @ kernel + bias of the pixels x in 0..1, in place of a `Network`; a head likewise.

    As in batch normalisation, c is the mean of each view's present images in training, and the statistics in
    evaluation: a running mean, view after view.
    """

    given = None  # every model is newly initialised
    inputs = types.SimpleNamespace()  # of the usual mixup

    def __init__(self, head="", pixels=PIXELS, classes=CLASSES, normalisation="running", head_dim=HEAD_DIM):
        self.head, self.pixels, self.classes, self.normalisation = head, pixels, classes, normalisation
        self.head_dim = head_dim
        self.passes = []  # sizes of the views of each training pass

    def init(self, key):
        shapes = {"backbone": {"bias": (self.classes,)}, "classifier": {"kernel": (self.pixels, self.classes)}}
        if self.head:
            shapes[self.head] = {"kernel": (self.pixels, self.head_dim)}
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        drawn = [2 * jax.random.normal(k, shape) for k, shape in zip(jax.random.split(key, len(leaves)), leaves)]
        return Model(jax.tree.unflatten(treedef, drawn), {"mean": jnp.full(self.pixels, 0.25)})

    def _pixels(self, images):
        return images.astype(jnp.float32).reshape(len(images), -1) / 255

    def _outputs(self, params, x):
        bias, heads = params["backbone"]["bias"], {}
        if self.head:  # the head includes the backbone's bias, so that its loss trains the backbone
            heads[self.head] = _matmul(x, params[self.head]["kernel"]) + 0.1 * jnp.sum(bias)
        return Outputs(_matmul(x, params["classifier"]["kernel"]) + bias, heads, x)

    def predict(self, model, images):
        return self._outputs(model.params, self._pixels(images) - model.batch_stats["mean"])

    def predict_rows(self, model, images, rows, batch_size):
        del batch_size
        return self.predict(model, images[rows])

    def probabilities(self, model, images):
        return jax.nn.softmax(self.predict(model, images).logits)

    def train(self, model, views, mask):
        self.passes.append([len(view) for view in views])
        outputs, running, count = [], model.batch_stats["mean"], jnp.sum(mask)
        for view in views:
            x = self._pixels(view)
            mean = jnp.sum(jnp.where(mask[:, None], x, 0), axis=0) / jnp.maximum(count, 1)
            outputs.append(self._outputs(model.params, x - mean))
            running = jnp.where(count > 0, KEPT * running + (1 - KEPT) * mean, running)
        return tuple(outputs), {"mean": running} if self.normalisation == "running" else model.batch_stats


def _matmul(a, b):
    return jnp.matmul(a, b, precision="highest")


def itself(key, images):
    """A view without random draws."""
    del key
    return images


def negative(key, images):
    """A second such view."""
    del key
    return 255 - images


def mirrored(key, images):
    """A third such view."""
    del key
    return images[:, :, ::-1]


def federation(clients, at_server=(), seed=0):
    """Random images with the given labels.

    Args:
        clients: for each client the labels of its images, -1 for a hidden label.
        at_server: labels of the server's images, the table's first rows. Row 0 also pads the clients' rows; without
            server images it belongs to nobody, but has a label. Clients without images and images of nobody fill up to
            `NUM_CLIENTS` and `NUM_IMAGES`.
    """
    clients = [*clients, *[[]] * (NUM_CLIENTS - len(clients))]
    labels = [*(at_server or [1]), *(label for client in clients for label in client)]
    labels += [1] * (NUM_IMAGES - len(labels))
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), SIDE, SIDE, 1)).astype(np.uint8)
    rows = one_after_the_other(clients, max(len(at_server), 1))
    return put_federation(images, labels, rows, range(len(at_server)), width=MAX_SIZE)


def small_problem(arguments, network=None, weak=mirrored, strong=negative, **fields):
    """A problem of a method: two local epochs, batches of 3, plain SGD with all its options."""
    config = apply_arguments(base_config(), arguments)
    config.update_from_flattened_dict({
        "num_clients": NUM_CLIENTS, "clients_per_round": 2, "eval_batch_size": 8,
        "client.epochs": 2, "client.batch_size": 3, "client.learning_rate": 0.4, "client.momentum": 0.5,
        "client.weight_decay": 0.05, "client.clip_norm": 0.5, "client.nesterov": True, **fields,
    })  # fmt: skip
    return Problem(config, network or SmallNetwork(), weak, strong, CLASSES, (weak, strong))


def sent_down(problem, extra=(), seed=4):
    """A broadcast with a model drawn from a seed."""
    rate = jnp.float32(problem.config.client.learning_rate)
    return Broadcast(problem.network.init(jax.random.key(seed)), rate, extra)


def phases_of(method):
    """A method's phases; the last one makes the round's labels before its plan, as the engine does."""
    if method.label is None:
        return method.phases
    *before, last = method.phases

    def prepare(received, data, cohort, previous):
        labels = method.label(received, data, cohort, previous)
        jobs = last.prepare(received, data, cohort._replace(labels=labels), previous)
        return jobs._replace(own={**labels.own, **jobs.own})

    return (*before, last._replace(prepare=prepare))


def prepare(phase, received, data, client, own=None, previous=None, personal=()):
    """The job of one client, without the leading axis; `previous` has one."""
    own, personal = jax.tree.map(lambda leaf: leaf[None], (own or {}, personal))
    cohort = Cohort(jnp.array([client]), own, jax.random.key(4), personal=personal)
    return jax.tree.map(lambda leaf: leaf[0], phase.prepare(received, data, cohort, previous))


def train(phase, received, data, client, own=None, previous=None, personal=(), jit=False):
    """Runs one client's phase step by step; returns its job and its results.

    `jit` compiles the beginning, a step and the end: for phases with many operations that no other test has.
    """
    job = prepare(phase, received, data, client, own, previous, personal)
    start, step, finish = map(jax.jit, (phase.start, phase.step, phase.finish)) if jit else phase[1:]
    carry = start(received, data, job.work, {**(own or {}), **job.own})
    for index in range(int(job.num_steps)):
        carry = step(received, data, job.work, carry, jnp.int32(index), jax.random.key(index))
    return job, finish(received, job.work, carry, job.num_steps)


def handed_on(job, finished):
    """What one client's phase passes on to the next."""
    took_part = jnp.array([bool(job.num_steps > 0 if job.takes_part is None else job.takes_part)])
    return Previous(jax.tree.map(lambda leaf: leaf[None] * took_part[0], finished.upload), took_part)


# The same in NumPy, float64. A model is {"bias": [C], "kernel": [pixels, C]}; its statistics are separate.


def statistics_of(model):
    """The running mean of the pixels, [4]."""
    return np.asarray(model.batch_stats["mean"], np.float64)


def pixels_of(data, rows, view=itself):
    """Pixels [n, 4] in 0..1 of a view of some rows of the image table."""
    images = np.asarray(view(None, data.inputs))[np.asarray(rows)]
    return images.reshape(-1, PIXELS) / 255


def probabilities(model, x, centre):
    return softmax((x - centre) @ model["kernel"] + model["bias"])


def predicted(model, x):
    """A `Model`'s probabilities of pixels x in evaluation."""
    return probabilities(in_numpy(model.params), x, statistics_of(model))


def loss_and_gradient(model, x, centre, targets):
    """sum_i sum_c -t_ic log p_ic for any target rows, and its gradient."""
    p = probabilities(model, x, centre)
    wrong = p * targets.sum(axis=1, keepdims=True) - targets
    gradient = {"bias": wrong.sum(axis=0), "kernel": (x - centre).T @ wrong}
    return -np.sum(targets * np.log(p)), gradient


def running_mean(running, *views):
    """The network's statistics after training passes over some views in turn."""
    for x in views:
        running = KEPT * running + (1 - KEPT) * x.mean(axis=0) if len(x) else running
    return running


def assert_model(found, params, statistics=None):
    """Compares a `Model` with NumPy's."""
    for name, leaf in in_numpy(found.params).items():
        np.testing.assert_allclose(leaf, params[name], atol=1e-5, err_msg=name)
    if statistics is not None:
        np.testing.assert_allclose(statistics_of(found), statistics, atol=1e-6)


def memory_of(problem, data, client):
    """A client's memory before its first round."""
    model = problem.network.init(jax.random.key(0))
    memory = {**own_states(problem, data), **own_optimizers(problem, data, model, CLASSIFIER)}
    return jax.tree.map(lambda leaf: leaf[client], memory)
