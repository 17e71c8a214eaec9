"""A second network whose model travels with the first one's: entries of one `Model`, and passes of their own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import dataset_facts, load_dataset
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.models import Projector
from fedjax_ssl.models.network import _overlaid, build_network, companion_model, with_companion_statistics
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server.statistics import mean_of_sums, sum_statistics
from tests.helpers.runs import TINY_BACKBONE, make_tiny_config

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1)).astype(np.uint8)
MASK = np.array([True] * 5 + [False])


@pytest.fixture(scope="module", params=["running", "static"])
def networks(request):
    """With the twin and without."""
    config = make_tiny_config(**{"model.name": TINY_BACKBONE, "model.normalisation": request.param})
    facts = dataset_facts(load_dataset(config.data))
    heads = {"projector": functools.partial(Projector, 8, 4, request.param)}
    of_images = config, facts, KINDS[IMAGE]
    return build_network(*of_images, companions={"twin": lambda config: heads}), build_network(*of_images)


def test_the_first_network_does_not_see_its_companion(networks):
    both, alone = networks
    model = jax.jit(both.init)(jax.random.key(0))
    assert set(model.params) == {"backbone", "classifier", "twin"}
    own = Model({name: model.params[name] for name in ("backbone", "classifier")},
                {name: part for name, part in model.batch_stats.items() if name != "twin"})  # fmt: skip
    chex.assert_trees_all_equal(own, jax.jit(alone.init)(jax.random.key(0)))
    chex.assert_trees_all_close(jax.jit(both.predict)(model, IMAGES), jax.jit(alone.predict)(own, IMAGES), atol=1e-6)
    outputs, batch_stats = jax.jit(both.train)(model, (IMAGES,), MASK)
    expected, of_own = jax.jit(alone.train)(own, (IMAGES,), MASK)
    chex.assert_trees_all_close(outputs, expected, atol=1e-6)
    twins = {"twin": model.batch_stats["twin"]} if "twin" in model.batch_stats else {}
    chex.assert_trees_all_close(batch_stats, {**of_own, **twins}, atol=1e-6)
    if both.normalisation == "static":
        one_batch = jnp.arange(6)[None], jnp.array(MASK)[None]

        def pass_of(network, moments):
            def statistics(model):
                found = mean_of_sums([sum_statistics(network, model, jnp.array(IMAGES), *one_batch, moments=moments)])
                return network.pooled_statistics(model, found) if moments else found

            return jax.jit(statistics)

        for moments in (False, True):
            taken, of_own = pass_of(both, moments)(model), pass_of(alone, moments)(own)
            chex.assert_trees_all_close(taken, {**of_own, **twins}, atol=1e-6)


def test_the_companion_has_other_weights_and_passes_of_its_own(networks):
    both, _ = networks
    model = jax.jit(both.init)(jax.random.key(0))
    twin, network = companion_model(model, "twin"), both.companions["twin"]
    assert set(twin.params) == {"backbone", "projector"}
    assert np.any(twin.params["backbone"]["hidden"]["kernel"] != model.params["backbone"]["hidden"]["kernel"])
    (outputs,), batch_stats = jax.jit(network.train)(twin, (IMAGES,), MASK)
    assert outputs.heads["projector"].shape == (6, 4) and outputs.logits.shape == (6, 0)
    after = with_companion_statistics(model.batch_stats, "twin", batch_stats)
    chex.assert_trees_all_equal_shapes(after, model.batch_stats)
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), after, model.batch_stats))
    assert sum(moved) == (4 if both.normalisation == "running" else 0)  # of two layers, and none of the first network
    hostile = np.where(MASK[:, None, None, None], IMAGES, np.uint8(255))
    (padded,), _ = jax.jit(network.train)(twin, (hostile,), MASK)
    np.testing.assert_allclose(padded.heads["projector"][:5], outputs.heads["projector"][:5], atol=1e-6)


def test_a_given_model_takes_the_place_of_fresh_parts(networks):
    both, _ = networks
    model, other = jax.jit(both.init)(jax.random.key(0)), jax.jit(both.init)(jax.random.key(1))
    given = Model({"backbone": other.params["backbone"], "twin": other.params["twin"]}, other.batch_stats)
    found = jax.jit(lambda given, key: both._replace(given=given).init(key))(given, jax.random.key(0))
    chex.assert_trees_all_equal(found.params, {**given.params, "classifier": model.params["classifier"]})
    chex.assert_trees_all_equal(found.batch_stats, other.batch_stats)


def test_entries_stay_in_the_order_in_which_they_were_made():
    """By which FedTriNet knows the head part; JAX sorts the entries of what it returns."""
    found = _overlaid({"stem": {"b": 1, "a": 2}, "head": 3, "body": 4}, {"body": 5, "stem": {"a": 6, "b": 7}})
    assert list(found) == ["stem", "head", "body"] and list(found["stem"]) == ["b", "a"]
    assert found == {"stem": {"b": 7, "a": 6}, "head": 3, "body": 5}
