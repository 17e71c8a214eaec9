"""A client's local training against a plain loop written from FedAnchor's equations 6 to 10, on unpadded batches."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl.augment import sample_lambda, weak_augment
from fedjax_ssl.augment.mixup import mix_images
from fedjax_ssl.client.local_sgd import GlobalModel
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, State
from fedjax_ssl.learning.batches import draw_with_replacement
from fedjax_ssl.methods import semifl
from fedjax_ssl.run.experiment import build_experiment
from linear_network import LinearNetwork, at_rest, in_numpy, loss_and_gradient, sgd_step

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

    @jax.jit
    def step(trained, batch_stats, opt_state, *batch):
        gradient, batch_stats = jax.grad(loss_fn, has_aux=True)(trained, batch_stats, *batch)
        updates, opt_state = optimizer.update(gradient, opt_state, trained)
        return optax.apply_updates(trained, updates), batch_stats, opt_state

    for index in range(num_steps):
        batch = slice(10 * index, min(10 * index + 10, int(work.num_fix)))
        fix, mix = np.asarray(work.fix_order[0, batch]), np.asarray(work.mix[batch])
        _, mix_key = jax.random.split(jax.random.fold_in(client_key, index))
        mixing = sample_lambda(jax.random.split(mix_key, 3)[0], 0.75)
        rows, labels = np.asarray(work.rows), np.asarray(work.labels)
        batch = images[rows[fix]], labels[fix], images[rows[mix]], labels[mix], mixing
        trained, batch_stats, opt_state = step(trained, batch_stats, opt_state, *batch)
    return trained, batch_stats


def test_padded_steps_equal_the_unpadded_plain_loop():
    experiment = build_experiment(
        make_tiny_config(**PLAIN, **{"model.name": TINY_BACKBONE, "model.normalisation": "running"})
    )
    state = State(jnp.int32(0), *jax.jit(experiment.problem.network.init)(jax.random.key(0)))
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


def views_and_mixture(x, partners, mix_order):
    """One batch of the test below in NumPy: the strong view, and the mixture with 0.3 of the image itself."""
    mix = lambda a, b: 0.3 * a + 0.7 * b  # noqa: E731
    return 1 - x, mix(x, partners) ** 2 if mix_order == "mix_then_augment" else mix(x**2, partners**2)


@pytest.mark.parametrize("mix_order", ["mix_then_augment", "augment_then_mix"])
def test_the_mixture_is_augmented_after_or_before(mix_order, monkeypatch):
    """SemiFL's local training in either order, with a weak view that is not linear, against a NumPy loop."""
    monkeypatch.setattr("fedjax_ssl.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))
    config = make_tiny_config(**{"method": "semifl", "model.name": TINY_BACKBONE, "semifl.threshold": 0.3})
    config.update_from_flattened_dict({"semifl.mix_order": mix_order, "semifl.mix_weight": 0.6})
    experiment = build_experiment(config)
    network, data, rate = LinearNetwork(64, 10), experiment.data, config.client.learning_rate
    problem = experiment.problem._replace(
        network=network,
        weak=lambda key, images: images.astype(jnp.float32) ** 2 / 255,
        strong=lambda key, images: 255 - images,
    )
    phase = semifl.semifl(problem).phases[0]
    broadcast = GlobalModel(*network.init(jax.random.key(1)), jnp.float32(rate))
    cohort = Cohort(jnp.array([2]), {}, jax.random.key(4))
    jobs = jax.jit(lambda broadcast, data: phase.prepare(broadcast, data, cohort, None))(broadcast, data)
    work, step = jax.tree.map(lambda leaf: leaf[0], jobs.work), jax.jit(phase.step)
    carry = phase.start(broadcast, work, {})
    for index in range(int(jobs.num_steps[0])):
        carry = step(broadcast, data, work, carry, index, cohort.key)

    images = np.asarray(data.images)[np.asarray(work.rows)].reshape(33, 64) / 255.0
    one_hot = np.eye(10)[np.asarray(work.labels)]
    model = in_numpy(broadcast.params)
    velocity, steps, num_fix = at_rest(model), 0, int(work.num_fix)
    assert 10 < num_fix < 33
    for order in np.asarray(work.fix_order):
        for first in range(0, num_fix, 10):
            batch = slice(first, min(first + 10, num_fix))
            fix, partner = order[batch], np.asarray(work.mix)[batch]
            strong, mixture = views_and_mixture(images[fix], images[partner], mix_order)
            of_fix = loss_and_gradient(model, strong, one_hot[fix])[1]
            of_mix = loss_and_gradient(model, mixture, 0.3 * one_hot[fix] + 0.7 * one_hot[partner])[1]
            gradient = {name: of_fix[name] + 0.6 * of_mix[name] for name in model}
            model, velocity = sgd_step(model, gradient, velocity, config.client, rate)
            steps += 1
    assert steps == jobs.num_steps[0]
    for name, leaf in in_numpy(carry.learner.params).items():
        np.testing.assert_allclose(leaf, model[name], atol=1e-5)


@pytest.mark.parametrize("mix_order", ["mix_then_augment", "augment_then_mix"])
def test_crops_are_drawn_for_the_mixture_or_for_each_of_its_images(mix_order, monkeypatch):
    """Each mixture is looked up among those of all pairs of crops: (top, left) of the image and of its partner."""
    monkeypatch.setattr("fedjax_ssl.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))
    problem = types.SimpleNamespace(weak=functools.partial(weak_augment, flip=False, padding=1))
    images, partners = np.random.default_rng(0).integers(0, 256, (2, 20, 8, 8, 1)).astype(np.uint8)
    mixtures, mixing = mix_images(problem, jax.random.key(0), images, partners, 0.75, mix_order)
    assert mixing == jnp.float32(0.3)

    def crops(image):
        padded = np.pad(image[..., 0].astype(np.float64), 1, mode="reflect")
        return {(top, left): padded[top : top + 8, left : left + 8] for top in range(3) for left in range(3)}

    drawn = []
    for mixture, image, partner in zip(np.asarray(mixtures), images, partners):
        candidates = [
            (a, b)
            for a, of_image in crops(image).items()
            for b, of_partner in crops(partner).items()
            if np.allclose(mixture[..., 0], 0.3 * of_image + 0.7 * of_partner, atol=1e-3)
        ]
        assert len(candidates) == 1
        drawn += candidates
    assert len({a for a, _ in drawn}) > 4  # each image has its own
    together = sum(a == b for a, b in drawn)
    # Of 20 pairs that are drawn apart 2.2 are the same by chance.
    assert together == 20 if mix_order == "mix_then_augment" else together < 10
