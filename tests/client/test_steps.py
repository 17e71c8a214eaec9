"""Local SGD on a linear network against NumPy: steps, memory, what is told, and the update that is clipped."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.client import Deck, Examples, Loss, Plan, global_model, local_training, own_optimizers, trained_models
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import CLASSIFIER, Cohort, Previous, Problem, State, Upload
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import CLASSES, SmallNetwork, loss_and_gradient
from tests.helpers.toy_federation import federation

RATE = 0.5
CLIENTS = [[8, 2, 6, 9, 1], [], [7, 3, 0]]
LABELS = np.array([0, 1, 2, 0, 1, 2, 1, 0, 2, 1])
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 2, 2, 1)).astype(np.uint8)
DATA = federation(CLIENTS, dict(enumerate(LABELS)))._replace(inputs=jnp.array(IMAGES))


EVERYONE = types.SimpleNamespace(ids=range(3))  # K clients


def problem_with(**fields):
    config = base_config()
    config.num_clients = 3
    config.client.epochs, config.client.batch_size, config.client.learning_rate = 2, 2, RATE
    config.update_from_flattened_dict(fields)
    return Problem(config, SmallNetwork(normalisation="group"), None, None, CLASSES)


def phase_of(problem, **how):
    """Cross-entropy of the visible labels."""
    config = problem.config.client

    def plan(received, data, cohort, previous):
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        return Plan({"labelled": deck}, deck.num_steps(config.batch_size), tells={"size": deck.size})

    def loss(model, batch, at):
        known = batch.labelled
        (outputs,), batch_stats = problem.network.train(model, (known.inputs,), known.mask)
        value = cross_entropy(outputs.logits, known.labels, known.mask)
        rows = jnp.sum(known.rows * known.mask)
        remember = {"total": at.own["total"] + (at.step + 1) * rows} if "total" in at.own else {}
        return Loss(value, batch_stats, {"client_loss": value}, None, remember, {"rows": rows})

    return local_training(problem, plan, loss, {"labelled": config.batch_size}, **how)


def run(problem, phase, clients=(0, 1, 2), own=None):
    """The cohort's result, and the model that it received."""
    state = State(jnp.int32(0), problem.network.init(jax.random.key(1)))
    cohort = Cohort(jnp.array(clients), own or {}, jax.random.key(2))
    received = global_model(problem, state)
    result = jax.jit(lambda data: train_cohort((phase,), received, data, cohort, 2))(DATA)
    return result, received, phase.prepare(received, DATA, cohort._replace(key=jax.random.fold_in(cohort.key, 0)), None)


def steps_by_hand(config, model, deck, velocity=None, kept=()):
    """The model after all steps, the velocity; and of each step its rows and the model after it.

    FedProx's term is not of the parameters that are `kept`.
    """
    start, velocity, seen, after_each = dict(model), velocity or at_rest(model), [], []
    size, order = int(deck.size), np.asarray(deck.order)
    for epoch in order:
        for first in range(0, size, config.batch_size):
            rows = np.asarray(deck.rows)[epoch[first : min(first + config.batch_size, size)]]
            x = IMAGES[rows].reshape(len(rows), -1) / 255.0
            _, gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(CLASSES)[LABELS[rows]] / len(rows))
            for name in gradient.keys() - set(kept):
                gradient[name] = gradient[name] + config.proximal * (model[name] - start[name])
            model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
            seen.append(rows)
            after_each.append(model)
    return model, velocity, seen, after_each


def assert_models_equal(params, model):
    for name, leaf in in_numpy(params).items():
        np.testing.assert_allclose(leaf, model[name], atol=2e-5)


def test_parts_that_are_not_sent_may_go_far_from_the_received_ones():
    """FedProx's term is of what is sent."""
    problem = problem_with(**{"client.proximal": 0.7, "client.clip_norm": 0.0})
    result, received, jobs = run(problem, phase_of(problem, sent=("classifier",)))
    assert result.upload.model.params.keys() == {"classifier"}
    for job in (0, 2):
        deck, start = row(jobs.work.decks["labelled"], job), in_numpy(received.model.params)
        model, *_ = steps_by_hand(problem.config.client, start, deck, kept=["bias"])
        np.testing.assert_allclose(result.upload.model.params["classifier"]["kernel"][job], model["kernel"], atol=2e-5)


def test_memory_metadata_and_a_persistent_optimiser():
    """`after` is given what the loss remembers, and the model after the step; the plan's and the sums are told."""
    problem = problem_with(**{"client.persistent": True, "client.clip_norm": 0.0})

    def after(own, model):
        return {"total": own["total"] + jnp.sum(model.params["backbone"]["bias"])}

    empty = own_optimizers(problem, EVERYONE, problem.network.init(jax.random.key(1)), CLASSIFIER)
    before = jax.tree.map(lambda leaf: 0.01 * (1 + jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), empty)
    own = {**before, "total": jnp.array([5.0, 6.0, 7.0]), "other": jnp.array([1, 2, 3])}
    result, received, jobs = run(problem, phase_of(problem, after=after), own=own)
    assert set(result.memory_of_steps) == {"opt_state", "total"}  # nothing else is written
    np.testing.assert_array_equal(result.num_steps, [2 * 3, 0, 2 * 2])
    np.testing.assert_array_equal(result.took_part, [True, False, True])
    start, momenta = in_numpy(received.model.params), lambda own, job: in_numpy(row(own["opt_state"][2].trace, job))
    for job in (0, 2):
        deck, total = row(jobs.work.decks["labelled"], job), float(own["total"][job])
        model, velocity, seen, after_each = steps_by_hand(problem.config.client, start, deck, momenta(before, job))
        for index, (rows, then) in enumerate(zip(seen, after_each)):
            total += (index + 1) * rows.sum() + then["bias"].sum()
        assert_models_equal(row(result.upload.model.params, job), model)
        for name, leaf in momenta(result.memory_of_steps, job).items():
            np.testing.assert_allclose(leaf, velocity[name], atol=2e-5)
        np.testing.assert_allclose(result.memory_of_steps["total"][job], total, rtol=1e-5)
        told = row(result.upload.metadata, job)
        assert told["size"] == len(CLIENTS[job]) and told["rows"] == sum(rows.sum() for rows in seen)
    untouched = {name: own[name] for name in result.memory_of_steps}  # client 1 made no step
    jax.tree.map(np.testing.assert_array_equal, row(result.memory_of_steps, 1), row(untouched, 1))


def test_training_may_begin_with_another_model_and_have_an_optimiser_of_its_own():
    """As a second phase does: with the client's model, and momenta that are not those of the first."""
    problem = problem_with(**{"client.persistent": True, "client.clip_norm": 0.0})
    other = problem.network.init(jax.random.key(9))
    own = {
        **own_optimizers(problem, EVERYONE, other, CLASSIFIER),
        **own_optimizers(problem, EVERYONE, other, CLASSIFIER, memory="second"),
    }
    phase = phase_of(problem, begin=lambda received, own: other, memory="second")
    result, received, jobs = run(problem, phase, own=own)
    assert set(result.memory_of_steps) == {"second"}
    for job in (0, 2):
        model, velocity, *_ = steps_by_hand(
            problem.config.client, in_numpy(other.params), row(jobs.work.decks["labelled"], job)
        )
        assert_models_equal(row(result.upload.model.params, job), model)
        for name, leaf in in_numpy(row(result.memory_of_steps["second"][2].trace, job)).items():
            np.testing.assert_allclose(leaf, velocity[name], atol=2e-5)
    assert not np.allclose(in_numpy(received.model.params)["kernel"], in_numpy(other.params)["kernel"], atol=0.1)


@pytest.mark.parametrize("sends_statistics", [True, False])
def test_models_of_the_phase_before(sends_statistics):
    """Whole models, with the parts and statistics that were handed on; who made no step has the received one."""
    received = global_model(
        problem_with(), State(jnp.int32(0), Model({"a": jnp.ones(2), "b": jnp.zeros(1)}, {"m": 5.0}))
    )
    statistics = {"m": jnp.array([1.0, 2.0, 3.0])} if sends_statistics else ()
    uploads = Upload(Model({"a": jnp.arange(6.0).reshape(3, 2)}, statistics))
    models = trained_models(received, Previous(uploads, jnp.array([True, False, True])))
    np.testing.assert_array_equal(models.params["a"], [[0, 1], [1, 1], [4, 5]])
    np.testing.assert_array_equal(models.params["b"], np.zeros((3, 1)))
    np.testing.assert_array_equal(models.batch_stats["m"], [1, 5, 3] if sends_statistics else [5, 5, 5])
