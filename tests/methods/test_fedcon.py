"""FedCon against NumPy: a client's two views and its target, the server's two networks, and what travels."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS, fedcon
from fedjax_ssl.ops.losses import negative_cosine
from fedjax_ssl.ops.schedule import warmed_up
from fedjax_ssl.ops.sgd import make_optimizer
from fedjax_ssl.ops.trees import row
from fedjax_ssl.run.validation import validate
from fedjax_ssl.sweep import load_sweep, plan
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    PIXELS,
    SmallNetwork,
    assert_model,
    federation,
    loss_and_gradient,
    phases_of,
    pixels_of,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    train,
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


def byol_loss(params, target, views):
    """L_client by its equations, float64 in, and what it is a function of: the backbone's bias and the projector."""

    def features(bias, x):
        return x - x.mean(axis=0) + jnp.pad(bias, (0, 1))

    def project(h, z):
        hidden = z @ h["first"]["kernel"]
        hidden = (hidden - hidden.mean(axis=0)) / jnp.sqrt(hidden.var(axis=0) + 1e-5)
        hidden = jnp.maximum(hidden * h["norm"]["scale"] + h["norm"]["bias"], 0)
        return hidden @ h["second"]["kernel"] + h["second"]["bias"]

    def distance(p, z):
        return -jnp.mean(jnp.sum(p * z, axis=1) / jnp.linalg.norm(p, axis=1) / jnp.linalg.norm(z, axis=1))

    one, two = (project(params["projector"], features(params["backbone"]["bias"], x)) for x in views)
    t_one, t_two = (features(target["bias"], x) for x in views)
    return (distance(one, t_two) + distance(two, t_one)) / 2


def test_a_client_holds_two_views_to_its_target(data):
    """Two visits: the target is the received backbone at first, and then the client's own slow average."""
    problem, method = build(**{"fedcon.target_decay": 0.6, "client.batch_size": 4})
    config, state = problem.config.client, jax.jit(method.init)(data, jax.random.key(0))
    received, own = sent_down(problem), row(state.clients, CLIENT)
    gradient_of = jax.jit(jax.value_and_grad(byol_loss))
    params = {name: received.model.params[name] for name in ("backbone",)} | {"projector": own["projector"]}
    target, rows = received.model.params["backbone"], np.asarray(data.client_index[CLIENT])
    for visit in range(2):
        job, finished = train(phases_of(method)[0], received, data, CLIENT, own, jit=True)
        params = {"backbone": received.model.params["backbone"], "projector": params["projector"]}
        leaves, treedef = jax.tree.flatten(params)
        names = [str(number) for number in range(len(leaves))]
        model = dict(zip(names, (np.asarray(leaf, np.float64) for leaf in leaves)))
        velocity, losses, running = at_rest(model), [], np.full(PIXELS, 0.25)
        for index in range(4):
            order = np.asarray(job.work.decks["unlabelled"].order)[index // 2]
            batch = rows[order[:4] if index % 2 == 0 else order[4:7]]
            views = views_of(data, batch, jax.random.key(index))
            params = jax.tree.unflatten(treedef, [jnp.float32(model[name]) for name in names])
            loss, gradient = gradient_of(params, target, [jnp.float32(x) for x in views])
            gradient = dict(zip(names, (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient))))
            model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
            params = jax.tree.unflatten(treedef, [jnp.float32(model[name]) for name in names])
            target = {"bias": 0.6 * target["bias"] + 0.4 * params["backbone"]["bias"]}
            losses.append(loss)
            running = running_mean(running, *views)
        assert job.num_steps == 4
        assert set(finished.upload.model.params) == {"backbone"} and finished.upload.metadata == {}
        np.testing.assert_allclose(
            finished.upload.model.params["backbone"]["bias"], params["backbone"]["bias"], atol=2e-5
        )
        np.testing.assert_allclose(finished.upload.model.batch_stats["mean"], running, atol=1e-6)
        chex.assert_trees_all_close(finished.own["projector"], params["projector"], atol=2e-5)
        chex.assert_trees_all_close(finished.own["target"], target, atol=2e-5)
        np.testing.assert_allclose(finished.metrics["client_loss"], np.mean(losses), rtol=1e-4)
        assert bool(job.own["target_seen"])
        own = {**own, **job.own, **finished.own}
        received = sent_down(problem, seed=6 + visit)  # the target is no more the received backbone


def test_projectors_are_the_clients_own(data):
    """Each begins with another one; a mean of uploads leaves the classifier as it is."""
    problem, method = build(**{"client.persistent": True, "aggregation.weights": "uniform"})
    state = jax.jit(method.init)(data, jax.random.key(0))
    kernels = np.asarray(state.clients["projector"]["first"]["kernel"])
    assert kernels.shape == (problem.config.num_clients, PIXELS, 6)
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels) and not np.any(state.clients["target_seen"])
    assert set(state.model.params) == {"backbone", "classifier"}
    backbones = {"bias": jnp.float32([[1, 2, 3], [5, 6, 7]])}
    statistics = {"mean": jnp.float32([[0, 0, 0, 0], [1, 2, 3, 4]])}
    uploads = Upload(state.model._replace(params={"backbone": backbones}, batch_stats=statistics))
    sizes = jnp.int32([2, 7])
    received = Received(uploads, jnp.ones(2, bool), jnp.arange(2), None, sizes, sizes)
    after, _ = jax.jit(method.aggregate)(state, data, received, jax.random.key(0))
    kernel = np.asarray(state.model.params["classifier"]["kernel"])
    assert_model(after.model, {"bias": np.array([3, 4, 5]), "kernel": kernel}, [0.5, 1, 1.5, 2])


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


def server_by_hand(problem, data, state, key, number, student):
    """L_server over one epoch in batches of 2: the network, the student, the mean losses, the running statistics."""
    config, options = problem.config.server, problem.config.fedcon
    shuffle_key, steps_key = jax.random.split(key)
    order = np.asarray(jax.random.permutation(jax.random.split(shuffle_key, 1)[0], data.server_index))
    model, velocity, running = (
        in_numpy(state.model.params),
        at_rest(in_numpy(state.model.params)),
        np.full(PIXELS, 0.25),
    )
    ramp = np.exp(-5 * (1 - min(number / options.ramp_rounds, 1)) ** 2) * options.consistency_weight
    rate, losses = config.learning_rate * (1 + np.cos(np.pi * (number - 1) / 8)) / 2, []  # of round number - 1 of 8
    for index in range(3):
        rows = order[2 * index : 2 * index + 2]
        views = views_of(data, rows, jax.random.fold_in(steps_key, index))
        one_hot = np.eye(3)[np.asarray(data.visible_labels)[rows]]
        other = model if options.replica else student
        s = [probabilities(other, x, x.mean(axis=0)) for x in views]
        gradient, values = dict.fromkeys(model, 0), [0, 0]
        for x, held_to in zip(views, s[::-1]):
            for part, (weight, targets) in enumerate(((0.5, one_hot), (0.5 * ramp, held_to))):
                value, own = loss_and_gradient(model, x, x.mean(axis=0), targets / len(rows))
                entropy = np.sum(held_to * np.log(held_to)) / len(rows) if part else 0
                values[part] += 0.5 * (value + entropy)
                gradient = {name: g + weight * own[name] for name, g in gradient.items()}
        losses.append(values)
        share = options.student_speed * (np.cos(np.pi * (1000 * number + index) / 20000) + 1) / 2
        student = {name: (1 - share) * v + share * model[name] for name, v in student.items()}
        model, velocity = sgd_step(model, gradient, velocity, config, rate)
        running = running_mean(running, *views)
    return model, student, np.mean(losses, axis=0), running


@pytest.mark.parametrize("fields", [{}, {"fedcon.replica": True}])
def test_the_server_trains_a_network_and_its_average(data, fields):
    server = {"server.batch_size": 2, "server.learning_rate": 0.5, "server.clip_norm": 1.5, "server.momentum": 0.5}
    options = {"fedcon.student_speed": 0.5, "fedcon.ramp_rounds": 9, "fedcon.consistency_weight": 0.7}
    schedule = {"schedule": "cosine", "num_rounds": 8}
    problem, method = build(**server, **options, **schedule, **{"server.pretrain_epochs": 0}, **fields)
    state, key = jax.jit(method.init)(data, jax.random.key(0)), jax.random.key(3)
    student = in_numpy(state.model.params)
    if "student" in state.server:  # it has fallen behind
        student = {name: leaf + 0.7 for name, leaf in student.items()}
        state.server["student"] = jax.tree.map(lambda leaf: leaf + 0.7, state.server["student"])
    state = state._replace(round=jnp.int32(4))
    after, metrics = jax.jit(method.server_after)(state, data, key)
    model, student, losses, running = server_by_hand(problem, data, state, key, 5, student)
    assert_model(after.model, model, running)
    np.testing.assert_allclose([metrics["server_loss"], metrics["server_consistency"]], losses, rtol=1e-4, atol=1e-12)
    assert set(after.model.params) == {"backbone", "classifier"}
    assert ("student" in after.server) == (problem.config.fedcon.replica)
    if "student" in after.server:
        chex.assert_trees_all_close(in_numpy(after.server["student"]), student, atol=1e-5)


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


def test_the_paper_s_lars_spares_what_is_no_matrix():
    """SimCLR's: no decay and no trust ratio of biases and normalisations."""
    optimizer = make_optimizer(apply_arguments(base_config(), "fedcon,paper").client, 0.1)
    params = {"bias": jnp.float32([0.5, -1]), "kernel": jnp.float32([[1, 2], [3, -4]])}
    gradients = {"bias": jnp.float32([0.2, 0.1]), "kernel": jnp.float32([[0.1, -0.3], [0.2, 0.5]])}
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    decayed = np.asarray(gradients["kernel"], np.float64) + 1.5e-6 * np.asarray(params["kernel"])
    ratio = 0.001 * np.linalg.norm(params["kernel"]) / np.linalg.norm(decayed)
    np.testing.assert_allclose(updates["kernel"], -0.1 * ratio * decayed, rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], -0.1 * gradients["bias"], rtol=1e-6)
    assert fedcon.VARIANTS["paper"]["client.learning_rate"] == pytest.approx(0.01172, abs=1e-5)


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
