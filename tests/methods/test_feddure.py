"""FedDure: its rates, which rise in each round anew, and a client's steps, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.feddure.pair import fresh_regulator
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_heads import gradient_of
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_first_step_of_a_round_moves_nothing(persistent):
    """At a rate of 0, whatever an optimizer that lasts has counted in earlier rounds."""
    fields = {"client.persistent": persistent, "client.weight_decay": 0.0, "client.momentum": 0.0}
    problem = small_problem("feddure", **fields, **{"feddure.warm_up_steps": 10, "feddure.unlabelled_batch": 3})
    data = federation([[0, 1, -1, -1, 2]])
    method, received = METHODS["feddure"].factory(problem), sent_down(problem)
    state = jax.jit(method.init)(data, jax.random.key(0))
    assert bool(state.clients) == persistent
    own = jax.tree.map(lambda leaf: leaf[0] + 7 * (leaf.dtype == jnp.int32), state.clients)  # as after seven steps
    (phase,) = phases_of(method)
    job = prepare(phase, received, data, 0, own)
    carry = jax.jit(phase.start)(received, data, job.work, {**own, **job.own})
    step = jax.jit(phase.step)
    params = []
    for index in range(2):
        carry = step(received, data, job.work, carry, jnp.int32(index), jax.random.key(index))
        params.append(np.asarray(carry.learner.model.params["classifier"]["kernel"]))
    np.testing.assert_array_equal(params[0], received.model.params["classifier"]["kernel"])
    assert np.abs(params[1] - params[0]).max() > 0


def test_the_fine_regulator_begins_as_torch_draws_its_linear_layers():
    """Uniform within 1 / sqrt(fan-in)."""
    regulator = fresh_regulator(jax.random.key(0), 16, 400)
    assert [regulator[name].shape for name in ("w1", "b1", "w2", "b2")] == [(16, 400), (400,), (400,), ()]
    for name, fan_in in (("w1", 16), ("b1", 16), ("w2", 400)):
        for end in (regulator[name].min(), regulator[name].max()):
            assert 0.97 < np.abs(end) * np.sqrt(fan_in) <= 1
    assert np.abs(regulator["b2"]) * 20 <= 1


@pytest.mark.parametrize("more", [{}, {"feddure.coarse": False}])
def test_steps_are_those_of_the_equations(more):
    """One of tuning and two of all three models. F-reg's slope is the difference of losses a step ahead."""
    data = federation([[0, 1, -1, -1, 2, -1, -1, 1, -1]])
    options = {
        "tuning_steps": 1, "steps": 2, "unlabelled_batch": 3, "unlabelled_weight": 5.0,
        "unlabelled_rise": 4, "fine_hidden": 4, "fine_learning_rate": 0.5,
    }  # fmt: skip
    fields = {f"feddure.{name}": value for name, value in options.items()}
    fields |= {"client.batch_size": 2, "confidence.threshold": 0.6}
    problem = small_problem("feddure", **fields, **more)
    received, config = sent_down(problem), problem.config.client
    job, finished = train(phases_of(METHODS["feddure"].factory(problem))[0], received, data, 0, jit=True)

    rows = np.asarray(data.client_index)[0, :9]
    labels, rate = np.asarray(data.visible_labels)[rows], config.learning_rate
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    local, velocity, of_local, effects, confident = model, at_rest(model), at_rest(model), [0.0], []
    regulator = {name: np.atleast_1d(np.float64(leaf)) for name, leaf in job.work.work.items()}
    first, second = at_rest(regulator), at_rest(regulator)  # Adam's moments
    labelled = batches(np.asarray(job.work.decks["labelled"].order), 4, 2)
    for step, unknown in enumerate(batches(np.asarray(job.work.decks["unlabelled"].order), 5, 3)[:3]):
        x, y = pixels_of(data, rows[labelled[step]], mirrored), np.eye(CLASSES)[labels[labelled[step]]]
        weak, strong = (pixels_of(data, rows[unknown], view) for view in (mirrored, negative))
        views = np.concatenate([x, weak, strong])
        centre, n = views.mean(axis=0), len(unknown)
        gradient = loss_and_gradient(model, x, centre, y / len(x))[1]
        if step:
            p = probabilities(model, weak, centre)

            def taught(regulator, p=p, weak=weak, local=local):
                m = np.maximum(p @ regulator["w1"] + regulator["b1"], 0) @ regulator["w2"] + regulator["b2"]
                m = 1 / (1 + np.exp(-m))
                targets = (m / m.sum())[:, None] * np.eye(CLASSES)[p.argmax(axis=1)]
                return loss_and_gradient(local, weak, weak.mean(axis=0), targets)[1]

            def on_labels(model, x=x, y=y):
                return loss_and_gradient(model, x, x.mean(axis=0), y / len(x))[0]

            def ahead(regulator, local=local, taught=taught, on_labels=on_labels):
                slope = taught(regulator)
                return on_labels({name: leaf - rate * slope[name] for name, leaf in local.items()})

            for name, slope in gradient_of(ahead, regulator).items():
                first[name] = 0.9 * first[name] + 0.1 * slope
                second[name] = 0.999 * second[name] + 0.001 * slope**2
                mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
                regulator[name] = regulator[name] - 0.5 * mean / (np.sqrt(square) + 1e-8)
            before = on_labels(local)
            local, of_local = sgd_step(local, taught(regulator), of_local, config, rate)
            effects.append(on_labels(local) - before)
            confident += (p.max(axis=1) >= 0.6).tolist()
            towards = np.eye(CLASSES)[probabilities(model, strong, centre).argmax(axis=1)]
            targets = 5 * step / 4 * (p.max(axis=1) >= 0.6)[:, None] * p + (not more) * effects[-1] * towards
            slope = loss_and_gradient(model, strong, centre, targets / n)[1]
            gradient = {name: gradient[name] + slope[name] for name in gradient}
        model, velocity = sgd_step(model, gradient, velocity, config, rate)
        statistics = running_mean(statistics, views)
    assert 0 < np.mean(confident) < 1
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["learning_effect"], np.mean(effects), rtol=1e-4)
