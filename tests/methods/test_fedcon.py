"""FedCon against NumPy: the server's two networks, the clients' projectors and rate, its configuration.

tests/official/fedcon.py has whole rounds: a client's steps with LARS, its target and projector, the code's server.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import State
from fedjax_ssl.methods import METHODS, fedcon
from fedjax_ssl.ops.losses import negative_cosine
from fedjax_ssl.ops.schedule import warmed_up
from fedjax_ssl.run.validation import validate
from fedjax_ssl.sweep import load_sweep, plan
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    PIXELS,
    SmallNetwork,
    assert_model,
    federation,
    loss_and_gradient,
    pixels_of,
    probabilities,
    running_mean,
    small_problem,
)

CLIENT = 1


class BiasedFeatures(SmallNetwork):
    """Features that the backbone trains: the centred pixels and the backbone's bias, three numbers for the first."""

    def _outputs(self, params, x):
        outputs = super()._outputs(params, x)
        return outputs._replace(features=x + jnp.pad(params["backbone"]["bias"], (0, PIXELS - self.classes)))


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 2, [-1] * 7], at_server=[0, 1, 2, 0, 1])


def coin(key, images):
    """A view that is mirrored or not."""
    return jnp.where(jax.random.bernoulli(key), images[:, :, ::-1], images)


def build(**fields):
    fields = {"fedcon.projector_hidden": 6, "model.normalisation": "running", **fields}
    problem = small_problem("fedcon", BiasedFeatures(), weak=coin, **fields)
    validate(problem.config)
    return problem, METHODS["fedcon"].factory(problem)


def views_of(data, rows, key):
    """The two views of a step's images, pixels [n, 4]."""
    return [pixels_of(data, rows, lambda _, x, key=key: coin(key, x)) for key in jax.random.split(key)]


# --- A client. -------------------------------------------------------------------------------------------------------


def test_projectors_are_the_clients_own(data):
    """Each begins with another one, beside the global model."""
    problem, method = build(**{"client.persistent": True})
    state = jax.jit(method.init)(data, jax.random.key(0))
    kernels = np.asarray(state.clients["projector"]["first"]["kernel"])
    assert kernels.shape == (problem.config.num_clients, PIXELS, 6)
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels) and not np.any(state.clients["target_seen"])
    assert set(state.model.params) == {"backbone", "classifier"}


def test_negative_cosine():
    p, z, mask = (
        np.array([[3.0, 4], [1, 0], [9, 9]]),
        np.array([[4.0, 3], [0, 2], [9, 9]]),
        np.array([True, True, False]),
    )
    assert float(negative_cosine(p, z, mask)) == pytest.approx(-0.48)
    gradient = jax.grad(lambda z: negative_cosine(p, z, mask))(z)
    assert not np.any(gradient)  # of the target there is none


# --- The server. -----------------------------------------------------------------------------------------------------


def server_by_hand(problem, data, state, key, number):
    """L_server over one epoch in batches of 2: the network, the mean losses, the running statistics."""
    config, student = problem.config.server, in_numpy(state.model.params)
    shuffle_key, steps_key = jax.random.split(key)
    order = np.asarray(jax.random.permutation(jax.random.split(shuffle_key, 1)[0], data.server_index))
    model, velocity, running = (
        in_numpy(state.model.params),
        at_rest(in_numpy(state.model.params)),
        np.full(PIXELS, 0.25),
    )
    ramp = np.exp(-5 * (1 - min(number / 9, 1)) ** 2) * 0.7
    rate, losses = config.learning_rate * (1 + np.cos(np.pi * (number - 1) / 8)) / 2, []  # of round number - 1 of 8
    for index in range(3):
        rows = order[2 * index : 2 * index + 2]
        views = views_of(data, rows, jax.random.fold_in(steps_key, index))
        one_hot = np.eye(3)[np.asarray(data.visible_labels)[rows]]
        s = [probabilities(student, x, x.mean(axis=0)) for x in views]
        gradient, values = dict.fromkeys(model, 0), [0, 0]
        for x, held_to in zip(views, s[::-1]):
            for part, (weight, targets) in enumerate(((0.5, one_hot), (0.5 * ramp, held_to))):
                value, own = loss_and_gradient(model, x, x.mean(axis=0), targets / len(rows))
                entropy = np.sum(held_to * np.log(held_to)) / len(rows) if part else 0
                values[part] += 0.5 * (value + entropy)
                gradient = {name: g + weight * own[name] for name, g in gradient.items()}
        losses.append(values)
        share = 0.5 * (np.cos(np.pi * (1000 * number + index) / 20000) + 1) / 2
        student = {name: (1 - share) * v + share * model[name] for name, v in student.items()}
        model, velocity = sgd_step(model, gradient, velocity, config, rate)
        running = running_mean(running, *views)
    return model, np.mean(losses, axis=0), running


def test_the_server_trains_a_network_and_its_average(data, monkeypatch):
    """The student starts each round as a copy of the network; the code's never does, see tests/official/fedcon.py."""
    monkeypatch.setattr(fedcon, "STUDENT_SPEED", 0.5)
    monkeypatch.setattr(fedcon, "RAMP_ROUNDS", 9)
    server = {"server.batch_size": 2, "server.learning_rate": 0.5, "server.clip_norm": 1.5, "server.momentum": 0.5}
    schedule = {"schedule": "cosine", "num_rounds": 8, "server.pretrain_epochs": 0}
    problem, method = build(**server, **schedule, **{"fedcon.consistency_weight": 0.7})
    state, key = method.init(data, jax.random.key(0))._replace(round=jnp.int32(4)), jax.random.key(3)
    after, metrics = jax.jit(method.server_after)(state, data, key)
    model, losses, running = server_by_hand(problem, data, state, key, 5)
    assert_model(after.model, model, running)
    np.testing.assert_allclose([metrics["server_loss"], metrics["server_consistency"]], losses, rtol=1e-4, atol=1e-12)
    assert set(after.model.params) == {"backbone", "classifier"} and "student" not in after.server


def test_nobody_sees_a_strong_view(data):
    """Not even the training before the first round, which is that of all methods."""

    def refused(key, images):
        raise AssertionError("a strong view")

    problem = small_problem("fedcon", BiasedFeatures(), weak=coin, strong=refused, **{"server.pretrain_epochs": 1})
    method = METHODS["fedcon"].factory(problem)
    state = jax.eval_shape(method.init, data, jax.random.key(0))
    jax.eval_shape(method.server_after, state, data, jax.random.key(0))


# --- The clients' optimiser and rate. --------------------------------------------------------------------------------


def test_a_rate_rises_and_falls():
    """SimCLR's, and FixMatch's, which ends at a fifth; FedRGD's bound is reached where the cosine is negative."""
    rates = [float(warmed_up(0.3, jnp.int32(t), 3, 11)) for t in range(12)]
    expected = [0.1, 0.2, 0.3, *(0.15 * (1 + np.cos(np.pi * s / 8)) for s in range(9))]
    np.testing.assert_allclose(rates, expected, atol=1e-7)
    rates = [float(warmed_up(0.3, jnp.int32(t), 0, 4, "seven_sixteenths")) for t in range(7)]
    np.testing.assert_allclose(rates, [0.3 * max(np.cos(7 * np.pi * t / 64), 1e-5) for t in range(7)], rtol=1e-5)
    problem, method = build(**{"fedcon.client_schedule": "warm_up", "num_rounds": 40, "schedule": "cosine"})
    state = State(jnp.int32(4), problem.network.init(jax.random.key(0)))
    assert float(method.broadcast(state, None, None).learning_rate) == pytest.approx(0.2)  # half of 0.4
    problem, method = build(num_rounds=8, schedule="cosine")
    assert float(method.broadcast(state, None, None).learning_rate) == pytest.approx(0.2)


def test_its_optimisers_are_its_own_behind_any_recipe():
    config = apply_arguments(base_config(), "strong,fedcon,own_optimisers")
    for side in (config.client, config.server):
        assert not (side.nesterov or side.persistent or side.clip_norm)
    assert config.server.learning_rate == config.server.pretrain_learning_rate == 0.01


def test_its_row_in_the_table_of_few_labels_is_its_public_code(request, tmp_path):
    """One epoch at either side, and a plain mean although clients are of unlike sizes, in (FL)^2's setting."""
    sweep = load_sweep(f"{request.config.rootpath}/configs/sweeps/fl2_table1.py")
    config = next(cell.config for cell in plan(sweep, tmp_path) if cell.name == "FedCon, Dir 0.1")
    assert (config.client.epochs, config.server.epochs, config.aggregation.weights) == (1, 1, "uniform")
    assert (config.client.optimizer, config.client.batch_size, config.server.batch_size) == ("lars", 50, 10)
