"""Many rounds as one program: when it ends, and which rounds test the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import stack_seeds
from fedjax_ssl.engine.dispatch import make_dispatch, over_seeds
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row
from tests.helpers.toy_federation import TRUTH, OneNumber, federation, problem, toy_method, toy_state


def test_a_dispatch_ends_early():
    """After the rounds that were asked for, or at an unhealthy one."""
    counted = toy_method(
        aggregate=lambda state, data, received, key: (
            state._replace(model=Model({"classifier": state.model.params["classifier"] + 1}, {})), {}
        ),
        broadcast=lambda state, data, key: toy_method().broadcast(
            state._replace(server={"fails": jnp.full(2, state.round == state.server["fails_in"])}), data, key
        ),
    )  # fmt: skip
    dispatch = jax.jit(make_dispatch(make_round(problem(), counted, lanes=2), capacity=6))
    for num_rounds, fails_in, done, healthy in (
        (4, 9, 4, True),
        (6, 2, 3, False),
        (0, 9, 0, True),
        (8, 9, 6, True),  # no more than its results have room for
    ):
        server = {"draw": jnp.array([0, 4]), "fails_in": jnp.int32(fails_in)}
        found = dispatch(toy_state(**server), federation(), jnp.array(TRUTH), num_rounds)
        assert (found.rounds_done, found.state.round, bool(found.healthy)) == (done, done, healthy)
        np.testing.assert_array_equal(found.results.metrics["round"], [*range(1, done + 1)] + [0] * (6 - done))


class Counting(OneNumber):
    """Counts how often a model is really tested: once for each seed and batch."""

    def __init__(self, counts):
        self._counts = counts

    def predict(self, model, images):
        jax.debug.callback(lambda _: self._counts.append(1), model.params["classifier"])
        return super().predict(model, images)


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_a_round_without_a_test_does_not_pay_for_it(num_seeds):
    """Several rounds in one dispatch, and several seeds at once; the states are those of a run that tests each round.

    The first round, every third and the last of eight have a test. The model's sign changes with each round.
    """
    method = toy_method(
        aggregate=lambda state, data, received, key: (
            state._replace(model=Model({"classifier": -state.model.params["classifier"]}, {})), {}
        )
    )  # fmt: skip
    state = toy_state(draw=jnp.array([0, 4]), fails=jnp.zeros(2, bool))
    data, found, counts = federation(), {}, {1: [], 3: []}
    if num_seeds > 1:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_seeds), state)
        data = stack_seeds([federation(seed=seed) for seed in range(num_seeds)])
    for every, counted in counts.items():
        run = problem(num_rounds=8, eval_every=every)._replace(network=Counting(counted))
        round_fn = make_round(run, method, lanes=2)
        dispatch = jax.jit(make_dispatch(over_seeds(round_fn) if num_seeds > 1 else round_fn, capacity=8))
        found[every] = jax.device_get(dispatch(state, data, jnp.array(TRUTH), 8))
        jax.effects_barrier()
    assert {every: len(counted) for every, counted in counts.items()} == {1: 8 * num_seeds, 3: 4 * num_seeds}
    jax.tree.map(np.testing.assert_array_equal, found[1].state, found[3].state)
    for number in range(8):
        results = [row(of.results, number) for of in found.values()]
        for seed in range(num_seeds):
            always, some = (each if num_seeds == 1 else row(each, seed) for each in results)
            expected = {"test_accuracy", "test_loss"} if number + 1 not in (1, 3, 6, 8) else set()
            assert always.metrics.keys() - some.measured().keys() == expected
            assert always.metrics["test_accuracy"] == (0.25 if number % 2 == 0 else 0.75)
            for name, value in some.measured().items():
                np.testing.assert_array_equal(value, always.metrics[name], err_msg=name)
