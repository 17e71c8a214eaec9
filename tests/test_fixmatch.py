"""FixMatch's server in parallel, and its local steps, against NumPy and a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl.config import apply_arguments, validate
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, ModelUpload, Received, State
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.server.aggregation import OPT_STATE
from fedjax_ssl.server.training import SERVER_MODEL, ServerModel


def build(**overrides):
    fields = {"model.name": TINY_BACKBONE, "model.normalisation": "running", **overrides}
    config = apply_arguments(make_tiny_config(**fields), "fixmatch")
    validate(config)
    experiment = build_experiment(config)
    return experiment, State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("optimizer, momentum", [("fedavg", 0.0), ("fedavgm", 0.5)])
def test_a_server_in_parallel_has_half_the_weight_before_the_server_optimiser(optimizer, momentum):
    """v <- beta v + (w - mean), w <- w - v, the mean of the server's model and of the clients' mean, half and half."""
    experiment, state = build(**{"fixmatch.server": "parallel", "aggregation.optimizer": optimizer})
    shapes = experiment.state_shape.server.get(OPT_STATE, ())
    rng = np.random.default_rng(0)
    noise = lambda tree, *axes: jax.tree.map(  # noqa: E731
        lambda leaf: jnp.float32(rng.normal(size=(*axes, *leaf.shape))), tree
    )
    state = state._replace(server={OPT_STATE: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)})
    sizes, w, v = jnp.array([30, 99, 10]), flat(state.params), 0.0
    for accepted in ([True, False, True], [False, False, False], [True, True, True]):
        own = ServerModel(noise(state.params), noise(state.batch_stats))
        uploads = ModelUpload(noise(state.params, 3), noise(state.batch_stats, 3))
        state = state._replace(server={**state.server, SERVER_MODEL: own})
        state, metrics = experiment.method.aggregate(state, Received(uploads, jnp.array(accepted), sizes, sizes))

        weights = np.where(accepted, sizes, 0) / max(np.sum(np.where(accepted, sizes, 0)), 1)
        half = 0.5 if any(accepted) else 0.0
        means = []
        for part in (0, 1):
            rows = np.stack([flat(jax.tree.map(lambda leaf, m=m: leaf[m], uploads[part])) for m in range(3)])
            means.append(half * weights @ rows + (1 - half) * flat(own[part]))
        before, v = w, momentum * v + (w - means[0])
        w = w - v
        np.testing.assert_allclose(flat(state.params), w, atol=1e-5)
        np.testing.assert_allclose(flat(state.batch_stats), means[1], atol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.linalg.norm(w - before), rtol=1e-5)


# Augmentation is off, because its draws depend on the size of the batch, which padding changes. Batches are small, for
# some to have no confident image.
PLAIN = {
    "augment.padding": 0,
    "augment.num_ops": 0,
    "augment.flavour": "semifl",
    "client.epochs": 1,
    "client.batch_size": 4,
    "client.weight_decay": 0.05,
    "fixmatch.threshold": 0.25,
}


def train_by_hand(experiment, state, work, loss_over):
    """SGD, one unpadded batch after the other, every view in a pass of its own; and each batch's confident images."""
    network, config = experiment.problem.network, experiment.problem.config.client
    images = (np.asarray(experiment.data.images, np.float32) / 255 - network.mean) / network.std
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(config.learning_rate, momentum=config.momentum),
    )
    params, batch_stats, opt_state = state.params, state.batch_stats, optimizer.init(state.params)

    @jax.jit
    def logits(params, batch_stats, x):
        variables = {"params": params, "batch_stats": batch_stats}
        outputs, updated = network.model.apply(variables, x, train=True, mutable=["batch_stats"])
        return outputs.logits, updated["batch_stats"]

    def loss_fn(params, batch_stats, x, labels, divisor):
        of_strong, batch_stats = logits(params, batch_stats, x)
        losses = -jax.nn.log_softmax(of_strong)[jnp.arange(len(x)), labels]
        return jnp.sum(jnp.where(labels >= 0, losses, 0)) / divisor, batch_stats

    gradient_of, update = jax.jit(jax.grad(loss_fn, has_aux=True)), jax.jit(optimizer.update)
    counts = []
    for epoch in range(config.epochs):
        for first in range(0, int(work.size), config.batch_size):
            places = np.asarray(work.order[epoch, first : min(first + config.batch_size, int(work.size))])
            x = images[np.asarray(work.rows)[places]]
            of_weak, after_weak = logits(params, batch_stats, x)
            p = np.exp(of_weak) / np.exp(of_weak).sum(axis=1, keepdims=True)
            labels = np.where(p.max(axis=1) >= 0.25, p.argmax(axis=1), -1)
            counts.append(np.sum(labels >= 0))
            divisor = len(x)
            if loss_over == "confident":
                x, labels, divisor = x[labels >= 0], labels[labels >= 0], counts[-1]
                if not counts[-1]:
                    continue
            gradient, batch_stats = gradient_of(params, after_weak, x, labels, divisor)
            updates, opt_state = update(gradient, opt_state, params)
            params = optax.apply_updates(params, updates)
    return params, batch_stats, counts


@pytest.mark.parametrize("loss_over", ["batch", "confident"])
def test_local_steps_equal_the_plain_loop(loss_over):
    experiment, state = build(**PLAIN, **{"fixmatch.loss_over": loss_over})
    broadcast = experiment.method.broadcast(state, experiment.data)
    cohort, phase = Cohort(jnp.array([5]), {}, jax.random.key(1)), experiment.method.phases[0]

    @jax.jit
    def both(broadcast, data):
        phase_cohort = cohort._replace(key=jax.random.fold_in(cohort.key, 0))
        return train_cohort((phase,), broadcast, data, cohort, 1), phase.prepare(broadcast, data, phase_cohort, None)

    result, jobs = both(broadcast, experiment.data)
    work = jax.tree.map(lambda leaf: leaf[0], jobs.work)
    params, batch_stats, counts = train_by_hand(experiment, state, work, loss_over)
    assert min(counts) == 0 and any(0 < count < 4 for count in counts), counts
    upload = jax.tree.map(lambda leaf: leaf[0], result.finished.upload)
    np.testing.assert_allclose(flat(upload.params), flat(params), atol=1e-4)
    np.testing.assert_allclose(flat(upload.batch_stats), flat(batch_stats), atol=1e-4)
    assert np.max(np.abs(flat(params) - flat(state.params))) > 1e-2
