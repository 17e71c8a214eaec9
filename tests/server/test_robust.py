"""Robust means against NumPy, upload by upload, and against a client that lies."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.server import fedavg, robust
from fedjax_ssl.server.aggregation import MEANS, mean_statistics
from tests.helpers.runs import make_tiny_config

ROWS, ABSENT = 8, 3  # the row that does not count holds what is no number
RULES = sorted(MEANS.keys() - {"mean"})
NUMBERS = 15  # of the parameters; the statistics come behind them: two means, two variances


def both(rule):
    """A rule for parameters and for statistics, as the chain applies it."""

    def apply(uploads, weights, before, share):
        params = MEANS[rule](uploads.params, weights, before.params, share)
        return Model(params, mean_statistics(rule, uploads.batch_stats, weights, before.batch_stats, share))

    return jax.jit(apply)


COMPILED = {rule: both(rule) for rule in RULES}


def drawn(seed=0, absent=True):
    """(uploads, weights, the model before, uploads that count as rows of numbers, their weights)."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (4, 3), "bias": (3,)}
    leaves = {name: rng.normal(size=(ROWS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    statistics = {"mean": rng.normal(size=(ROWS, 2)), "var": rng.uniform(1, 3, (ROWS, 2)) * [100, 0.01]}
    statistics = {name: leaf.astype(np.float32) for name, leaf in statistics.items()}
    weights = rng.uniform(1, 9, ROWS).astype(np.float32)
    counted = np.arange(ROWS) != ABSENT if absent else np.ones(ROWS, bool)
    every = [leaves["bias"], leaves["kernel"], *statistics.values()]
    rows = np.concatenate([leaf.reshape(ROWS, -1) for leaf in every], axis=1)
    for leaf in every:
        leaf[~counted] = [np.nan, np.inf][seed % 2]
    before = jax.tree.map(lambda leaf: jnp.full(leaf.shape[1:], 0.5), Model(leaves, statistics))
    return Model(leaves, statistics), weights * counted, before, rows[counted], weights[counted]


def flat(model):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tuple(model))])  # by name


def scores_by_hand(rows, liars):
    """Krum's: of each row the sum of its n - f - 2 least squared distances."""
    neighbours = max(len(rows) - liars - 2, 1)
    return [sum(sorted(np.sum((one - two) ** 2) for j, two in enumerate(rows) if j != i)[:neighbours])
            for i, one in enumerate(rows)]  # fmt: skip


def by_hand(rule, rows, weights, share):
    """A rule for parameters; and for statistics, whose distances are in roots of the channels' median variances."""
    rows = rows.astype(np.float64)
    variances = np.median(rows[:, -2:], axis=0) + 1e-5
    unit = np.concatenate([np.sqrt(variances), variances])
    params, statistics = (
        of_vectors(rule, part, weights, share) for part in (rows[:, :NUMBERS], rows[:, NUMBERS:] / unit)
    )
    return np.concatenate([params, statistics * unit])


def of_vectors(rule, rows, weights, share):
    """A rule as its paper has it, but that no weight counts more than their lower median."""
    liars = int(share * len(rows))
    if rule == "median":
        return np.median(rows, axis=0)
    if rule == "trimmed_mean":
        return np.sort(rows, axis=0)[liars : len(rows) - liars].mean(axis=0)
    if rule == "krum":
        return rows[np.argmin(scores_by_hand(rows, liars))]
    if rule == "multi_krum":
        return rows[np.argsort(scores_by_hand(rows, liars))[: max(len(rows) - liars - 2, 1)]].mean(axis=0)
    weights = np.minimum(weights, np.sort(weights)[(len(weights) - 1) // 2])
    median = np.median(rows, axis=0)
    for _ in range(10):
        beta = weights / np.maximum(np.linalg.norm(rows - median, axis=1), 1e-5)
        median = np.average(rows, axis=0, weights=beta)
    return median


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("seed", "absent", "share"), [(0, True, 0.3), (1, True, 0.2), (2, False, 0.3), (3, False, 0.0)]
)
def test_rules_are_those_of_their_papers(rule, seed, absent, share):
    uploads, weights, before, rows, counted_weights = drawn(seed, absent)
    found = COMPILED[rule](uploads, weights, before, share)
    np.testing.assert_allclose(flat(found), by_hand(rule, rows, counted_weights, share), rtol=1e-4, atol=1e-5)


def test_a_trimmed_mean_keeps_a_value_however_large_the_share():
    uploads, weights, before, rows, _ = drawn(2, False)
    found = COMPILED["trimmed_mean"](uploads, weights, before, 0.4999999)
    np.testing.assert_allclose(flat(found), by_hand("trimmed_mean", rows, weights, 0.4999999), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
@pytest.mark.parametrize("large", [[1e19], [-3.4e38], [1e30, -1e30], [1e25, 3e38]])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_number_whose_square_is_too_large_is_far_away(rule, large, everywhere):
    """In float32, where such a distance counted 0; by a rule in float64 the liars are not chosen."""
    uploads, weights, before, rows, counted_weights = drawn(5, absent=False)
    liars = [1, 6][: len(large)]
    kernel = uploads.params["kernel"]  # its numbers come behind the bias's three
    for row, value in zip(liars, large):
        kernel[(row, ...) if everywhere else (row, 0, 0)] = value
        rows[row, 3 : 15 if everywhere else 4] = value
    found = flat(COMPILED[rule](uploads, weights, before, 0.25))
    expected = by_hand(rule, rows.astype(np.float64), counted_weights, 0.25)
    assert np.abs(expected[:NUMBERS]).max() < 10
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("large", [1e4, 1e19, -1e30, 3e38])
def test_ten_steps_to_the_geometric_median_are_enough_whatever_is_sent(large):
    """From the weighted mean they ended at 1e9 and more."""
    uploads, weights, before, rows, counted_weights = drawn(6, absent=False)
    uploads.params["kernel"][[1, 6]] = large
    found, honest = flat(COMPILED["geometric_median"](uploads, weights, before, 0.0)), np.delete(rows, [1, 6], axis=0)
    found_params, honest = found[:NUMBERS], honest[:, :NUMBERS]
    assert np.all((found_params > honest.min(axis=0)) & (found_params < honest.max(axis=0)))
    if large < 1e19:  # the square of its distance is a float32
        rows[[1, 6], 3:15] = large
        np.testing.assert_allclose(found, by_hand("geometric_median", rows, counted_weights, 0.0), rtol=1e-3, atol=1e-4)


def test_the_geometric_median_has_the_least_sum_of_distances():
    uploads, weights, before, rows, _ = drawn(4)
    rows = rows[:, :NUMBERS]

    def cost(point):
        return np.sum(np.linalg.norm(rows - point, axis=1))

    found = flat(COMPILED["geometric_median"](uploads, weights > 0, before, 0.0))[:NUMBERS]
    rivals = [np.average(rows, axis=0), np.median(rows, axis=0), *rows]
    rivals += [found + 0.05 * direction for direction in np.random.default_rng(0).normal(size=(50, len(found)))]
    assert all(cost(found) < cost(rival) for rival in rivals)


@pytest.mark.parametrize("rule", RULES)
def test_without_an_upload_the_model_stays_and_of_one_it_is_taken(rule):
    uploads, weights, before, *_ = drawn(0)
    found = COMPILED[rule](uploads, 0 * weights, before, 0.2)
    np.testing.assert_array_equal(flat(found), flat(before))
    only = np.where(np.arange(ROWS) == 5, weights, 0)
    found = COMPILED[rule](uploads, only, before, 0.2)
    np.testing.assert_allclose(flat(found), flat(jax.tree.map(lambda leaf: leaf[5], uploads)), rtol=1e-6)


def test_long_updates_are_shortened_and_short_ones_stay():
    uploads, _, before, *_ = drawn(2, absent=False)
    found = jax.jit(robust.bounded)(uploads, before, 3.0)
    for part in ("params", "batch_stats"):
        old, new, start = (
            np.concatenate([np.reshape(leaf, (rows, -1)) for leaf in jax.tree.leaves(getattr(model, part))], axis=1)
            for model, rows in ((uploads, ROWS), (found, ROWS), (before, 1))
        )
        lengths = np.linalg.norm(old - start, axis=1, keepdims=True)
        np.testing.assert_allclose(new, start + (old - start) * np.minimum(1, 3.0 / lengths), rtol=1e-5, atol=1e-6)
        assert part == "batch_stats" or (lengths < 3.0).any() != (lengths > 3.0).all()
    assert robust.bounded(Model({"w": jnp.ones((2, 3))}, ()), Model({"w": jnp.zeros(3)}, ()), 1.0).batch_stats == ()


@pytest.mark.parametrize("rule", [*RULES, "mean"])
def test_a_lying_client_moves_the_mean_and_no_robust_one(rule):
    """Through the chain of `config.aggregation`: nine clients near one, and one at minus a hundred."""
    section = make_tiny_config(**{"aggregation.mean": rule, "aggregation.byzantine_share": 0.1}).aggregation
    config = types.SimpleNamespace(aggregation=section, method="fedavg")
    problem = types.SimpleNamespace(config=config, network=types.SimpleNamespace(normalisation="none"))
    kernels = np.random.default_rng(0).normal(1.0, 0.1, (10, 2, 3)).astype(np.float32)
    kernels[4] = -100
    ones = jnp.ones(10, bool)
    upload = Upload(Model({"classifier": jnp.array(kernels)}, ()))
    received = Received(upload, ones, jnp.arange(10), None, 30 * jnp.ones(10, jnp.int32), 9 * jnp.ones(10, jnp.int32))
    aggregation = fedavg(problem, parts=("classifier",))
    state = State(
        jnp.int32(0), Model({"classifier": jnp.zeros((2, 3))}, {}), aggregation.init({"classifier": kernels[0]})
    )
    aggregate = jax.jit(lambda state, received: aggregation.aggregate(state, None, received, jax.random.key(0))[0])
    after = aggregate(state, received)
    honest = np.all((after.model.params["classifier"] > 0.6) & (after.model.params["classifier"] < 1.4))
    assert honest == (rule != "mean")
    if rule == "mean":  # nine near one, one at -5 / sqrt(6) in every number
        section.norm_bound = 5.0
        bounded, _ = fedavg(problem, parts=("classifier",)).aggregate(state, None, received, jax.random.key(0))
        expected = (np.delete(kernels, 4, 0).sum(axis=0) - 5 / np.sqrt(6)) / 10
        np.testing.assert_allclose(bounded.model.params["classifier"], expected, rtol=1e-4)


@pytest.mark.parametrize("field", [{"aggregation.mean": "median"}, {"aggregation.norm_bound": 1.0}])
@pytest.mark.parametrize("method", [{"method": "fedrgd"}, {"method": "fedlabel", "fedlabel.as_in_code": True}])
def test_methods_with_a_mean_of_their_own_refuse_another(method, field):
    if method["method"] == "fedlabel":
        method = {**method, "data.labels": "clients"}
    with pytest.raises(UserError, match=r"are not for (fedrgd|fedlabel), whose mean is its own"):
        build_experiment(
            make_tiny_config(**{"model.normalisation": "group", "data.reveal_labels": False, **method, **field})
        )
