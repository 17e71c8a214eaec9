"""A client's local training against a plain loop written from FedAnchor's equations 6 to 10, on unpadded batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from conftest import make_tiny_config
from fedjax_ssl.augment import sample_lambda
from fedjax_ssl.batches import draw_with_replacement
from fedjax_ssl.clients import Cohort, train_cohort
from fedjax_ssl.experiment import build_experiment
from fedjax_ssl.method import State

# Every example qualifies, 33 of them: the fourth batch of an epoch has three. Augmentation is off, because its draws
# depend on the size of the batch, which padding changes.
PLAIN = {
    "fedanchor.threshold": -1.0,
    "augment.padding": 0,
    "augment.num_ops": 0,
    "augment.flavour": "semifl",
    "client.epochs": 1,
    "client.clip_norm": 0.5,
}


def train_by_hand(experiment, state, client, work, cohort_key, num_steps):
    """SGD with PyTorch's conventions, one batch after the other; two separate forward passes a step."""
    network, data, config = experiment.problem.network, experiment.data, experiment.problem.config.client
    images = (np.asarray(data.images, np.float32) / 255 - network.mean) / network.std
    client_key = jax.random.fold_in(jax.random.fold_in(cohort_key, 0), client)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(config.learning_rate, momentum=config.momentum),
    )
    trained = {name: state.params[name] for name in ("backbone", "classifier")}
    batch_stats, opt_state = state.batch_stats, optimizer.init(trained)

    def loss_fn(trained, batch_stats, x_fix, y_fix, x_mix, y_mix, mixing):
        def logits(x, batch_stats):
            variables = {"params": {**state.params, **trained}, "batch_stats": batch_stats}
            outputs, updated = network.model.apply(variables, x, train=True, mutable=["batch_stats"])
            return outputs.logits, updated["batch_stats"]

        def entropy(logits, labels):
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

        of_fix, batch_stats = logits(x_fix, batch_stats)
        of_mix, batch_stats = logits(mixing * x_fix + (1 - mixing) * x_mix, batch_stats)
        mix_loss = mixing * entropy(of_mix, y_fix) + (1 - mixing) * entropy(of_mix, y_mix)
        return entropy(of_fix, y_fix) + mix_loss, batch_stats

    step = jax.jit(jax.grad(loss_fn, has_aux=True))
    for index in range(num_steps):
        batch = slice(10 * index, min(10 * index + 10, int(work.num_fix)))
        fix, mix = np.asarray(work.fix_order[0, batch]), np.asarray(work.mix[batch])
        _, mix_key = jax.random.split(jax.random.fold_in(client_key, index))
        mixing = sample_lambda(jax.random.split(mix_key, 3)[0], 0.75)
        rows, labels = np.asarray(work.rows), np.asarray(work.labels)
        gradient, batch_stats = step(
            trained, batch_stats, images[rows[fix]], labels[fix], images[rows[mix]], labels[mix], mixing
        )
        updates, opt_state = optimizer.update(gradient, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    return trained, batch_stats


def test_padded_steps_equal_the_unpadded_plain_loop():
    experiment = build_experiment(make_tiny_config(**PLAIN, **{"model.normalisation": "running"}))
    state = State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))
    broadcast = jax.jit(experiment.method.broadcast)(state, experiment.data)
    cohort = Cohort(jnp.array([5]), (), jax.random.key(1))
    phase = experiment.method.phases[0]
    phase_cohort = cohort._replace(key=jax.random.fold_in(cohort.key, 0))

    @jax.jit
    def both(broadcast, data):
        trained = train_cohort((phase,), broadcast, data, cohort, 1)
        return trained, phase.prepare(broadcast, data, phase_cohort, None)

    result, jobs = both(broadcast, experiment.data)
    work = jax.tree.map(lambda leaf: leaf[0], jobs.work)
    assert int(work.num_fix) == 33 and int(result.num_steps[0]) == 4
    trained, batch_stats = train_by_hand(experiment, state, 5, work, cohort.key, 4)
    upload = result.finished.upload
    for mine, expected in ((upload.params, trained), (upload.batch_stats, batch_stats)):
        for found, reference in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found[0], reference, atol=1e-4)


def test_the_mix_set_is_drawn_with_replacement_from_the_whole_client():
    """Eq. 6: qualified or not, and an example more than once."""
    drawn = np.asarray(draw_with_replacement(jax.random.key(0), jnp.int32(7), 7000))
    counts = np.bincount(drawn, minlength=7)
    assert len(counts) == 7  # nothing beyond the client's size
    # 1000 expected each, standard deviation 29.
    assert np.all(np.abs(counts - 1000) < 5 * 29)
