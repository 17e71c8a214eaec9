"""RSCFed's groups and their means with lost uploads, against NumPy; tests/official has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.rscfed import consensus_weights
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from fedjax_ssl.server.aggregation import group_members
from tests.helpers.small_problem import NUM_CLIENTS, assert_model, federation, small_problem


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2, 1, 1, 0], [-1] * 7, [-1] * 3, [-1] * 8])


def build(**fields):
    problem = small_problem("rscfed", **{"rscfed.group_size": 3, **fields})
    validate(problem.config)
    return problem, METHODS["rscfed"].factory(problem)


# --- Groups. ---------------------------------------------------------------------------------------------------------


def test_groups_are_drawn_apart_and_without_replacement(data):
    _, method = build(**{"rscfed.groups": 5})
    draws = [method.select(None, data, jax.random.key(seed)) for seed in range(8)]
    groups = np.array([np.split(np.asarray(draw.clients), 5) for draw in draws])
    assert all(draw.turns == 5 and len(set(group)) == 3 for draw, of_draw in zip(draws, groups) for group in of_draw)
    assert set(groups.ravel()) == set(range(NUM_CLIENTS))
    assert len({tuple(sorted(group)) for group in groups.reshape(-1, 3)}) == 4
    assert len({tuple(of_draw.ravel()) for of_draw in groups}) == 8


def test_a_group_larger_than_the_federation_is_refused():
    with pytest.raises(UserError, match=r"rscfed\.group_size is 5, but the federation has num_clients = 4"):
        build(**{"rscfed.group_size": 5})


# --- Aggregation. ----------------------------------------------------------------------------------------------------


def aggregate_by_hand(models, group, accepted, labelled, sizes, options):
    """Group by group, in float64: the weights of all rows, None if there is none; models are lists of tensors."""
    weights, used = np.zeros(len(models)), 0
    for number in range(options.groups):
        rows = [i for i in range(len(models)) if group[i] == number and accepted[i] and sizes[i] > 0]
        if not rows:
            continue
        used += 1
        factor = {i: options.labelled_factor if labelled[i] else 1.0 for i in rows}
        f = {i: sizes[i] for i in rows}
        total = sum(f.values())
        means = [sum(f[i] / total * models[i][tensor] for i in rows) for tensor in range(len(models[0]))]
        beta = options.beta_labelled if any(labelled[i] for i in rows) else options.beta
        u = {}
        for i in rows:
            distance = sum(np.sqrt(np.sum((tensor - mean) ** 2)) for tensor, mean in zip(models[i], means))
            u[i] = factor[i] * f[i] / total * np.exp(-beta * distance / sizes[i])
        for i in rows:
            weights[i] += u[i] / sum(u.values())
    return weights / used if used else None


SIZES, LABELS = np.array([5, 7, 3, 8]), np.array([True, False, False, False])


def upload(clients, group, accepted, seed=0):
    """Received rows of these clients, drawn; who is not accepted has no number."""
    rng, rows = np.random.default_rng(seed), len(clients)
    tensors = [rng.normal(size=(rows, *shape)).astype(np.float32) for shape in ((3,), (4, 3), (4,))]
    for tensor in tensors:
        tensor[~accepted] = np.nan
    model = Model({"backbone": {"bias": tensors[0]}, "classifier": {"kernel": tensors[1]}}, {"mean": tensors[2]})
    told = {"labelled": np.where(LABELS[clients], SIZES[clients], 0).astype(np.float32)}
    sizes = np.int32(SIZES[clients])
    received = Received(Upload(model, told), accepted, np.array(clients), group, sizes, sizes)
    return jax.tree.map(jnp.asarray, received), [[t[i].astype(np.float64) for t in tensors] for i in range(rows)]


def test_the_global_model_is_the_mean_of_the_groups_models(data):
    """Of four groups one has a labelled client, one lost an upload, one a single upload, and one lost them all."""
    betas = {"rscfed.beta": 2.0, "rscfed.beta_labelled": 0.7}
    problem, method = build(**{"rscfed.groups": 4, **betas})
    clients, group = np.array([0, 1, 2, 3, 1, 2, 0, 3, 1, 2, 1, 3]), np.repeat(np.arange(4), 3)
    accepted = np.array([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0], bool)
    received, models = upload(clients, group, accepted)
    state = method.init(data, jax.random.key(0))
    found, _ = jax.jit(method.aggregate)(state, data, received, jax.random.key(0))
    weights = aggregate_by_hand(models, group, accepted, LABELS[clients], SIZES[clients], problem.config.rscfed)
    assert weights[6] == pytest.approx(1 / 3) and weights.sum() == pytest.approx(1)
    bias, kernel, mean = (sum(w * m[tensor] for w, m in zip(weights, models) if w > 0) for tensor in range(3))
    assert_model(found.model, {"bias": bias, "kernel": kernel}, mean)


def test_a_single_group_has_all_uploads():
    received, _ = upload(np.array([0, 3, 1]), None, np.array([True, False, True]))
    np.testing.assert_array_equal(group_members(received, 1), [[True, False, True]])


def test_weights_survive_where_their_exponentials_underflow():
    """exp(-1e4) is 0 in every precision; the nearest upload then has all the weight, and equal ones share it."""
    shares = jnp.array([[0.2, 0.3, 0.5], [0.25, 0.75, 0.0], [0.0, 0.0, 0.0]])
    distances = jnp.array([[3.0, 1.0, 2.0], [4.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    found = jax.jit(consensus_weights)(shares, distances, jnp.array([1, 1, 1]), jnp.ones(3), jnp.full(3, 1e4))
    np.testing.assert_allclose(found, [[0, 1, 0], [0.25, 0.75, 0], [0, 0, 0]], rtol=1e-6)
