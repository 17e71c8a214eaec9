"""Uploads that are far longer than the others, against NumPy, and what becomes of them in a round."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.round import make_round
from fedjax_ssl.engine.untrusted.screening import longest_update, too_long
from fedjax_ssl.ops.sgd import Model
from tests.helpers.toy_federation import problem, run, toy_method, toy_phase


def long_by_hand(sent, received, counted, times):
    """Whether each row's change is longer than so many lower medians, and than the model; float64, part by part."""
    found = np.zeros(len(counted), bool)
    for part in range(2):
        lengths = np.sqrt(
            sum(np.square(sent[part][name] - received[part].get(name, 0)).reshape(len(counted), -1).sum(axis=1)
                for name in sent[part])
        )  # fmt: skip
        among = sorted(lengths[counted])
        length = np.sqrt(sum(np.square(leaf).sum() for leaf in received[part].values()))
        median = among[(len(among) - 1) // 2]
        found |= lengths > (max(times * median, length) if median else times * length)
    return found


@pytest.mark.parametrize("factor, part", [(1, 0), (100, 0), (3e4, 0), (1e30, 0), (3e4, 1), (0, 0)])
def test_an_upload_that_is_far_longer_than_the_others(factor, part):
    """Against NumPy: by parameters, by statistics, with rows that are not counted, and with an entry of its own."""
    rng = np.random.default_rng(int(factor) % 97)
    received = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}, {"mean": rng.normal(size=3)}
    sent = tuple(
        {name: leaf + rng.normal(size=(6, *leaf.shape)) for name, leaf in entries.items()} for entries in received
    )
    sent[0]["own"] = rng.normal(size=(6, 4))
    counted = np.array([True, True, False, True, True, True])
    for leaf in sent[part].values():
        leaf[2] *= 1e6  # took no part, or is not finite
        leaf[4] *= factor
    assert not factor or long_by_hand(sent, received, counted, 1000)[4] == (factor > 1000)
    as_model = lambda parts: Model(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parts))  # noqa: E731
    found = too_long(as_model(sent), as_model(received), jnp.asarray(counted), 1000.0)
    np.testing.assert_array_equal(found & counted, long_by_hand(sent, received, counted, 1000) & counted)


@pytest.mark.parametrize("received", [0.0, 2.0])
@pytest.mark.parametrize("lengths, dropped", [
    ([1e30], []), ([1e30, 1.0], [0]), ([0.0, 0.0, 5.0], []), ([1.0, 1.0, 1e30, 1e30], [2, 3]), ([3e38, 3e38, 1.0], []),
])  # fmt: skip
def test_the_median_is_the_lower_one(lengths, dropped, received):
    assert found_too_long(lengths, received) == dropped


@pytest.mark.parametrize("lengths, dropped", [
    ([0.0, 0.0, 5.0, 6.0, 1e30], [4]), ([0.0, 2001.0], [1]), ([0.0, 1999.0], []), ([1e-4, 1.9], []), ([1e-4, 2.1], [1]),
])  # fmt: skip
def test_where_few_have_moved_the_model_that_went_down_is_the_measure(lengths, dropped):
    """One that moved alone was its own median; of two the one that moved as it should was dropped."""
    assert found_too_long(lengths, 2.0) == dropped


@jax.jit
def of_one_number(sent, received, counted):
    broadcast = types.SimpleNamespace(model=Model({"w": received[None]}, {}))
    return too_long(Model({"w": sent[:, None]}, {}), broadcast, counted, 1000.0)


def found_too_long(lengths, received):
    """The places of the uploads of one number that are too long, where the model that went down has that length.

    Further rows, of nobody, let all tests share a program.
    """
    counted = np.arange(6) < len(lengths)
    sent = np.float32([*lengths, *[0.0] * (6 - len(lengths))]) + np.float32(received)
    return np.flatnonzero(of_one_number(sent, jnp.float32(received), counted) & counted).tolist()


def test_one_that_is_too_long_is_dropped_counted_and_not_remembered():
    """As one that is not finite."""
    phase = toy_phase()

    def finish(received, work, carry, num_steps):
        finished = phase.finish(received, work, carry, num_steps)
        huge = jax.tree.map(lambda leaf: jnp.where(work["client"] == 4, 1e30, leaf), finished.upload.model)
        return finished._replace(upload=finished.upload._replace(model=huge))

    method, draw = toy_method(phases=(phase._replace(finish=finish),)), [0, 1, 4]
    state, result = run(jax.jit(make_round(problem(), method, lanes=2)), draw, [False] * 3)
    assert (result.metrics["uploads"], result.metrics["dropped_uploads"]) == (3, 1)
    assert result.healthy and state.server["received"]["accepted"].tolist() == [True, True, False]
    assert state.clients["trained"][4] == 400
    assert longest_update(problem(**{"privacy.noise": 1.0}).config) == 0  # no upload may decide about another one
