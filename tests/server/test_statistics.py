"""The statistics pass of 'static' normalisation against NumPy, for a model of one layer; and whose images it takes."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.kinds import Images
from fedjax_ssl.engine.interface import Problem, State
from fedjax_ssl.methods import frames
from fedjax_ssl.models import Normalisation, Outputs
from fedjax_ssl.models.network import Network
from fedjax_ssl.server import statistics
from fedjax_ssl.server.statistics import make_statistics, num_exchanging, sum_statistics
from tests.helpers.federations import put_federation

B = 4
CLIENTS = [[31, 3, 17, 8, 22, 11, 38, 5, 27], [], [19, 2, 33, 14, 9]]
ANCHORS = [36, 1, 20, 12, 7, 29]
EVERYBODY = [ANCHORS, *CLIENTS]
POOL = sorted(row for rows in EVERYBODY for row in rows)


class OneLayer(nn.Module):
    """Normalises the pixels' channels, and nothing else."""

    classifier_init: str = "lecun"  # as a `Heads` has

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        return Outputs(Normalisation("static", name="norm")(images, train, mask, num_views), {}, images)


NETWORK = Network(OneLayer(), Images((2, 3, 2), (0.4, 0.5), (0.2, 0.3)), normalisation="static")


def section(source, passes=2, weights="batches"):
    config = base_config()
    chosen = config.model
    chosen.statistics, chosen.statistics_passes, chosen.statistics_weights = source, passes, weights
    return config


@pytest.fixture(scope="module")
def federation():
    """40 images, dark ones at client 0 and bright ones at client 2; nobody's are white and must not count."""
    rng = np.random.default_rng(0)
    images = np.full((40, 2, 3, 2), 255, np.uint8)
    for rows, low in ((CLIENTS[0], 0), (CLIENTS[2], 150), (ANCHORS, 80)):
        images[rows] = rng.integers(low, low + 60, (len(rows), 2, 3, 2))
    return put_federation(images, np.full(40, -1), CLIENTS, ANCHORS)  # padded with row 0, which is nobody's


@pytest.fixture(scope="module")
def state():
    return State(jnp.int32(0), jax.jit(NETWORK.init)(jax.random.key(0)))


def moments(images, batches, weights=None):
    """Mean over the batches of their means and of their unbiased variances, by NumPy: two arrays [2]."""
    values = (np.asarray(images, np.float64) / 255 - NETWORK.inputs.mean) / NETWORK.inputs.std
    of_each = [values[rows].reshape(-1, 2) for rows in batches]
    means, variances = [v.mean(axis=0) for v in of_each], [v.var(axis=0, ddof=1) for v in of_each]
    return np.average(means, axis=0, weights=weights), np.average(variances, axis=0, weights=weights)


def chunks(rows):
    return [rows[start : start + B] for start in range(0, len(rows), B)]


@pytest.mark.parametrize(
    ("source", "weights"),
    [("server", "batches"), ("cohort", "batches"), ("cohort", "samples"), ("all", "batches"), ("all_mixed", "batches")],
)
def test_sources(federation, state, monkeypatch, source, weights):
    monkeypatch.setattr(statistics, "BATCH_SIZE", B)
    refresh = jax.jit(make_statistics(NETWORK, section(source, weights=weights)))
    after = refresh(state, federation, jnp.array([2, 1]), None).model
    chex.assert_trees_all_equal(after.params, state.model.params)
    found = after.batch_stats["norm"]
    batches = {
        "server": chunks(ANCHORS),
        "cohort": chunks(ANCHORS) + chunks(CLIENTS[2]),
        "all": [chunk for rows in EVERYBODY for chunk in chunks(rows)],
        "all_mixed": chunks(POOL),
    }
    of_each = [len(rows) for rows in batches[source]] if weights == "samples" else None
    mean, var = moments(federation.inputs, batches[source], of_each)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["var"], var, rtol=1e-5)
    # What 'all' leaves out is the variance between the owners: here more than half of it.
    total = moments(federation.inputs, [POOL])[1]
    assert np.all(var > 0.75 * total) if source == "all_mixed" else np.all(var < 0.5 * total)


@pytest.mark.parametrize("source", ["cohort", "all"])
def test_clients_go_through_the_robust_mean_and_the_server_does_not(federation, state, monkeypatch, source):
    """The median over clients of their own means, with the weight of all their batches; a client without images is
    none of them."""
    monkeypatch.setattr(statistics, "BATCH_SIZE", B)
    config = section(source)
    config.aggregation.mean = "median"
    after = jax.jit(make_statistics(NETWORK, config))(state, federation, jnp.array([2, 1, 0]), None)
    of_server, *of_clients = (chunks(rows) for rows in EVERYBODY if rows)
    owned = np.array([moments(federation.inputs, batches) for batches in (of_server, *of_clients)])
    number = [len(of_server), sum(map(len, of_clients))]
    mean, var = np.average([owned[0], np.median(owned[1:], axis=0)], axis=0, weights=number)
    found = after.model.batch_stats["norm"]
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["var"], var, rtol=1e-5)


def test_without_images_of_the_server(federation, state, monkeypatch):
    """Where there is no cohort either, before the first round, everybody is asked; 'server' has nobody to ask."""
    monkeypatch.setattr(statistics, "BATCH_SIZE", B)
    nobody = federation._replace(server_index=jnp.zeros((0,), jnp.int32))
    refresh = jax.jit(make_statistics(NETWORK, section("cohort")))
    for cohort, owners in (([2, 1], CLIENTS[2:]), ([], CLIENTS)):
        found = refresh(state, nobody, jnp.array(cohort, int), None).model.batch_stats["norm"]
        mean, var = moments(federation.inputs, [chunk for rows in owners for chunk in chunks(rows)])
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(found["var"], var, rtol=1e-5)
    with pytest.raises(UserError, match=r"model.statistics='server'.*all_mixed"):
        make_statistics(NETWORK, section("server"))(state, nobody, jnp.array([2]), None)


class ThreeLayers(nn.Module):
    """Three normalisations, with a linear map and a ReLU between them: of each position, and of the whole image."""

    classifier_init: str = "lecun"  # as a `Heads` has

    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = Normalisation("static", name="norm0")(images, train, mask, num_views)
        x = nn.Dense(3, name="dense0")(x)
        x = nn.relu(Normalisation("static", name="norm1")(x, train, mask, num_views))
        x = nn.Dense(4, name="dense1")(x.reshape(len(x), -1))
        return Outputs(Normalisation("static", name="norm2")(x, train, mask, num_views), {}, x)


DEEP = NETWORK._replace(module=ThreeLayers())


def inputs_by_hand(params, statistics, images, rows):
    """The inputs of the three layers in evaluation mode, by NumPy in float64: [n, C] each, a row a value."""
    params, statistics = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, statistics))
    x, inputs = (np.asarray(images, np.float64)[rows] / 255 - DEEP.inputs.mean) / DEEP.inputs.std, []
    for number in range(3):
        inputs.append(x.reshape(-1, x.shape[-1]))
        norm, layer = params[f"norm{number}"], statistics[f"norm{number}"]
        x = (x - layer["mean"]) / np.sqrt(layer["var"] + 1e-5) * norm["scale"] + norm["bias"]
        if number < 2:
            dense = params[f"dense{number}"]
            x = np.maximum(x, 0) if number else x
            x = (x.reshape(len(x), -1) if number else x) @ dense["kernel"] + dense["bias"]
    return inputs


def moments_by_hand(params, statistics, images, owners, passes):
    """The law of total variance over the owners: the mean of their variances, plus the variance of their means."""
    for _ in range(passes):
        of_owners = [inputs_by_hand(params, statistics, images, rows) for rows in owners if rows]
        sizes = [len(rows) for rows in owners if rows]
        found = {}
        for number in range(3):
            means = np.array([inputs[number].mean(axis=0) for inputs in of_owners])
            variances = np.array([inputs[number].var(axis=0) for inputs in of_owners])
            mean = np.average(means, axis=0, weights=sizes)
            var = np.average(variances + (means - mean) ** 2, axis=0, weights=sizes)
            found[f"norm{number}"] = {"mean": mean, "var": var}
        statistics = found
    return statistics


@pytest.fixture(scope="module")
def deep():
    """A model of three layers whose parameters and statistics are anything."""
    model, rng = jax.device_get(jax.jit(DEEP.init)(jax.random.key(1))), np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.float32(leaf + 0.3 * rng.normal(size=leaf.shape)), model.params)
    drawn = jax.tree.map(lambda leaf: np.float32(leaf + rng.uniform(0, 1, leaf.shape)), model.batch_stats)
    return State(jnp.int32(0), model._replace(params=params, batch_stats=drawn))


def close(found, expected, **tolerance):
    chex.assert_trees_all_close(jax.device_get(found), jax.tree.map(np.float32, expected), **tolerance)


def test_moments_against_the_law_of_total_variance(federation, deep, monkeypatch):
    """One exchange, two, and as many as layers, of unequal clients, one of which has no images."""
    monkeypatch.setattr(statistics, "BATCH_SIZE", B)
    params, start = deep.model
    exact = moments_by_hand(params, start, federation.inputs, [POOL], 3)  # of all images as one owner
    for passes in (1, 2, 9):
        refresh = jax.jit(make_statistics(DEEP, section("moments", passes)))
        after = refresh(deep, federation, jnp.array([2]), None).model
        chex.assert_trees_all_equal(after.params, params)
        expected = moments_by_hand(params, start, federation.inputs, EVERYBODY, min(passes, 3))
        close(after.batch_stats, expected, rtol=2e-5, atol=2e-6)
        settled = [f"norm{number}" for number in range(min(passes, 3))]  # whatever the layers above them are
        close({name: after.batch_stats[name] for name in settled}, {name: exact[name] for name in settled},
              rtol=2e-5, atol=2e-6)  # fmt: skip
    # In training mode they normalise all images as one batch.
    sums = jax.jit(lambda *of: sum_statistics(DEEP, *of).total)
    in_one = sums(deep.model, federation.inputs, np.array([POOL]), np.ones((1, len(POOL)), bool))
    in_one = jax.tree.map(lambda leaf: leaf[0], jax.device_get(in_one))
    values = {"norm0": 6 * len(POOL), "norm1": 6 * len(POOL), "norm2": len(POOL)}  # its variances are the unbiased ones
    biased = {name: {"mean": one["mean"], "var": one["var"] * (values[name] - 1) / values[name]}
              for name, one in in_one.items()}  # fmt: skip
    close(after.batch_stats, biased, rtol=2e-5, atol=2e-6)
    # Before the first round, whatever `statistics_passes` is.
    first = jax.jit(make_statistics(DEEP, section("moments", 1)))(deep, federation, np.zeros(0, int), None)
    chex.assert_trees_all_equal(first.model.batch_stats, after.batch_stats)


def test_moments_of_values_far_from_zero(federation, state):
    """A mean that is a thousand deviations: float32 keeps no digit of the variance of E[x^2] - E[x]^2."""
    images = jnp.full_like(federation.inputs, 254).at[jnp.array(POOL[::2])].add(1)
    network = NETWORK._replace(inputs=Images((2, 3, 2), (-2.0, -2.0), (0.001, 0.001)))
    far = federation._replace(inputs=images)
    refresh = jax.jit(make_statistics(network, section("moments")))
    for _ in range(2):  # the second begins with the mean of the first
        state = refresh(state, far, jnp.array([1]), None)
    values = (np.asarray(images, np.float64)[POOL] / 255 + 2.0) / 0.001
    expected = {"mean": values.mean(axis=(0, 1, 2)), "var": values.var(axis=(0, 1, 2))}
    assert np.all(expected["mean"] > 1000 * np.sqrt(expected["var"]))
    close(state.model.batch_stats["norm"], expected, rtol=1e-3)


@pytest.mark.parametrize("source", ["cohort", "moments"])
def test_nobody_who_is_asked_answers(federation, state, source):
    silent = federation._replace(server_index=jnp.zeros((0,), jnp.int32), client_size=jnp.zeros(3, jnp.int32))
    after = jax.jit(make_statistics(NETWORK, section(source)))(state, silent, np.array([2]), None)
    chex.assert_trees_all_equal(after.model, state.model)


def test_other_policies_need_no_pass(state):
    for policy in ("running", "group"):
        assert make_statistics(NETWORK._replace(normalisation=policy), section("all"))(state, None, None, None) is state


@pytest.mark.parametrize(
    "source, expected", [("server", 0), ("cohort", 4), ("all", 9), ("all_mixed", 9), ("moments", 9)]
)
def test_who_exchanges_statistics(source, expected):
    assert num_exchanging(NETWORK, source, 4, 9) == expected
    assert num_exchanging(NETWORK._replace(normalisation="running"), source, 4, 9) == 0


def test_where_no_client_trains_the_statistics_are_the_servers(monkeypatch):
    asked, config = [], base_config()
    monkeypatch.setattr(frames, "make_statistics", lambda network, *how: asked.append(how))
    for phases in ((), ("one",)):
        frames.alternating(Problem(config, NETWORK, None, None, 2), phases)
    assert asked == [(config, "server"), (config, None)]
