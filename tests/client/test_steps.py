"""Local SGD on a linear network against NumPy: steps, memory, what is told, and the update that is clipped."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.client import Deck, Examples, Loss, Plan, global_model, local_training, own_optimizers, trained_models
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import CLASSIFIER, Cohort, Previous, Problem, State, Upload
from fedjax_ssl.engine.untrusted.delivery import clipped
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


def phase_of(problem, counts=False, **how):
    """Cross-entropy of the visible labels; with `counts` only the steps of odd numbers are taken."""
    config = problem.config.client

    def plan(received, data, cohort, previous):
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        return Plan({"labelled": deck}, deck.num_steps(config.batch_size), tells={"size": deck.size})

    def loss(model, batch, at):
        known = batch.labelled
        (outputs,), batch_stats = problem.network.train(model, (known.inputs,), known.mask)
        value = cross_entropy(outputs.logits, known.labels, known.mask)
        taken = at.step % 2 == 1 if counts else None
        rows = jnp.sum(known.rows * known.mask)
        remember = {"total": at.own["total"] + (at.step + 1) * rows} if "total" in at.own else {}
        return Loss(value, batch_stats, {"client_loss": value}, taken, remember, {"rows": rows})

    return local_training(problem, plan, loss, {"labelled": config.batch_size}, **how)


def run(problem, phase, clients=(0, 1, 2), own=None):
    """The cohort's result, and the model that it received."""
    state = State(jnp.int32(0), problem.network.init(jax.random.key(1)))
    cohort = Cohort(jnp.array(clients), own or {}, jax.random.key(2))
    received = global_model(problem, state)
    result = jax.jit(lambda data: train_cohort((phase,), received, data, cohort, 2))(DATA)
    return result, received, phase.prepare(received, DATA, cohort._replace(key=jax.random.fold_in(cohort.key, 0)), None)


def steps_by_hand(config, model, deck, velocity=None, counts=False, kept=()):
    """The model after all steps, the velocity, the mean loss; and of each step its rows and the model after it.

    FedProx's term is not of the parameters that are `kept`.
    """
    start, velocity, losses, seen, after_each = dict(model), velocity or at_rest(model), [], [], []
    size, order = int(deck.size), np.asarray(deck.order)
    for epoch in order:
        for first in range(0, size, config.batch_size):
            rows = np.asarray(deck.rows)[epoch[first : min(first + config.batch_size, size)]]
            x = IMAGES[rows].reshape(len(rows), -1) / 255.0
            loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(CLASSES)[LABELS[rows]] / len(rows))
            for name in gradient.keys() - set(kept):
                gradient[name] = gradient[name] + config.proximal * (model[name] - start[name])
            if not counts or len(seen) % 2 == 1:
                model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
            losses.append(loss)
            seen.append(rows)
            after_each.append(model)
    return model, velocity, np.mean(losses), seen, after_each


def assert_models_equal(params, model):
    for name, leaf in in_numpy(params).items():
        np.testing.assert_allclose(leaf, model[name], atol=2e-5)


FIELDS = {
    "plain": {"client.momentum": 0.0, "client.weight_decay": 0.0, "client.clip_norm": 0.0},
    "momentum and weight decay": {"client.momentum": 0.9, "client.weight_decay": 0.05, "client.clip_norm": 0.0},
    "gradient clipped": {"client.clip_norm": 0.1, "client.nesterov": True},
    "proximal": {"client.proximal": 0.7, "client.clip_norm": 0.0},
}


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "plain"])
def test_steps_equal_numpy(name):
    """Every client's steps over unpadded batches; a client without examples takes no part."""
    problem = problem_with(**FIELDS[name])
    result, received, jobs = run(problem, phase_of(problem))
    np.testing.assert_array_equal(result.num_steps, [2 * 3, 0, 2 * 2])
    np.testing.assert_array_equal(result.took_part, [True, False, True])
    start = in_numpy(received.model.params)
    for job in (0, 2):
        model, _, loss, *_ = steps_by_hand(problem.config.client, start, row(jobs.work.decks["labelled"], job))
        assert_models_equal(row(result.upload.model.params, job), model)
        assert result.upload.model.batch_stats == ()
        np.testing.assert_allclose(result.metrics[0][0]["client_loss"][job], loss, rtol=1e-5)
    assert result.memory_of_steps == {} and set(result.upload.metadata) == {"rows", "size"}


def test_an_update_is_clipped_as_one_vector_where_it_is_delivered():
    """Of the parts that are sent: a client's own parts are not among them."""
    problem, norm = problem_with(**FIELDS["plain"]), 0.1
    for sent in (CLASSIFIER, ("backbone",)):
        result, received, _ = run(problem, phase_of(problem, sent=sent))
        shorter = clipped(result.upload.model, received.model, norm)
        for job in (0, 2):
            trained = row(result.upload.model.params, job)
            of_parts = (trained, {part: received.model.params[part] for part in sent}, row(shorter.params, job))
            new, old, found = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each)]) for each in of_parts)
            assert np.linalg.norm(new - old) > norm
            np.testing.assert_allclose(found, old + norm * (new - old) / np.linalg.norm(new - old), atol=1e-6)


def test_parts_that_are_not_sent_may_go_far_from_the_received_ones():
    """FedProx's term is of what is sent."""
    problem = problem_with(**FIELDS["proximal"])
    result, received, jobs = run(problem, phase_of(problem, sent=("classifier",)))
    assert result.upload.model.params.keys() == {"classifier"}
    for job in (0, 2):
        deck, start = row(jobs.work.decks["labelled"], job), in_numpy(received.model.params)
        model, *_ = steps_by_hand(problem.config.client, start, deck, kept=["bias"])
        np.testing.assert_allclose(result.upload.model.params["classifier"]["kernel"][job], model["kernel"], atol=2e-5)


def test_a_step_that_does_not_count_leaves_model_and_optimiser():
    """Without a gradient there would still be weight decay, and the momentum of the step before."""
    problem = problem_with(**{"client.weight_decay": 0.1, "client.clip_norm": 0.0})
    result, received, jobs = run(problem, phase_of(problem, counts=True))
    for job in (0, 2):
        deck = row(jobs.work.decks["labelled"], job)
        model, _, loss, *_ = steps_by_hand(problem.config.client, in_numpy(received.model.params), deck, counts=True)
        assert_models_equal(row(result.upload.model.params, job), model)
        np.testing.assert_allclose(result.metrics[0][0]["client_loss"][job], loss, rtol=1e-5)  # it is looked at


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
    start, momenta = in_numpy(received.model.params), lambda own, job: in_numpy(row(own["opt_state"][2].trace, job))
    for job in (0, 2):
        deck, total = row(jobs.work.decks["labelled"], job), float(own["total"][job])
        model, velocity, _, seen, after_each = steps_by_hand(problem.config.client, start, deck, momenta(before, job))
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


def test_optimisers_that_start_afresh_leave_no_memory():
    problem = problem_with()
    assert own_optimizers(problem, EVERYONE, problem.network.init(jax.random.key(1)), CLASSIFIER) == {}


def test_the_learning_rate_travels():
    """A broadcast's rate is what the steps take, whatever the configuration says."""
    problem = problem_with(schedule="cosine", num_rounds=8)
    state = State(jnp.int32(2), problem.network.init(jax.random.key(1)))
    received = global_model(problem, state, extra=jnp.int32(7))
    np.testing.assert_allclose(received.learning_rate, RATE * (1 + np.cos(np.pi / 4)) / 2, rtol=1e-6)
    assert received.model is state.model and received.extra == 7
    phase = phase_of(problem_with(**{"client.learning_rate": 99.0, "client.clip_norm": 0.0}))
    cohort = Cohort(jnp.array([2]), {}, jax.random.key(0))
    work = row(phase.prepare(received, DATA, cohort, None).work, 0)
    carry, deck = phase.start(received, DATA, work, {}), work.decks["labelled"]
    carry = phase.step(received, DATA, work, carry, jnp.int32(0), cohort.key)
    rows = np.asarray(deck.rows)[np.asarray(deck.order)[0, :2]]
    model = in_numpy(received.model.params)
    x = IMAGES[rows].reshape(2, -1) / 255
    gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(CLASSES)[LABELS[rows]] / 2)[1]
    gradient = {name: leaf + 5e-4 * model[name] for name, leaf in gradient.items()}
    expected = {name: model[name] - float(received.learning_rate) * gradient[name] for name in model}
    assert_models_equal(carry.learner.model.params, expected)


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


def test_a_phase_may_adapt_its_optimiser():
    """A half of each step, and a state of its own in the clients' memory."""
    problem = problem_with(**{"client.persistent": True, "client.clip_norm": 0.0, "client.momentum": 0.0})
    optimizer = lambda rate: optax.chain(problem.optimizer(rate), optax.trace(0.0), optax.scale(0.5))  # noqa: E731
    model = problem.network.init(jax.random.key(1))
    own = own_optimizers(problem, EVERYONE, model, CLASSIFIER, optimizer=optimizer)
    result, _, jobs = run(problem, phase_of(problem, optimizer=optimizer), own=own)
    half = problem_with(**{"client.learning_rate": RATE / 2, "client.clip_norm": 0.0, "client.momentum": 0.0})
    for job in (0, 2):
        expected, *_ = steps_by_hand(half.config.client, in_numpy(model.params), row(jobs.work.decks["labelled"], job))
        assert_models_equal(row(result.upload.model.params, job), expected)
    assert jax.tree.structure(result.memory_of_steps["opt_state"]) == jax.tree.structure(own["opt_state"])


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
