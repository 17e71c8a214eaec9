"""A second network whose model travels with the first one's: entries of one `Model`, and passes of their own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TINY_BACKBONE, make_tiny_config
from fedjax_ssl.data import dataset_facts, load_dataset
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.methods.twin_sight import Projector
from fedjax_ssl.models.network import build_network, companion_model, with_companion_statistics
from fedjax_ssl.server.statistics import mean_statistics

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1)).astype(np.uint8)
MASK = np.array([True] * 5 + [False])


@pytest.fixture(scope="module", params=["running", "static", "group"])
def networks(request):
    """With the twin and without."""
    config = make_tiny_config(**{"model.name": TINY_BACKBONE, "model.normalisation": request.param})
    facts = dataset_facts(load_dataset(config.data))
    heads = {"projector": functools.partial(Projector, 8, 4, request.param)}
    return build_network(config, facts, companions={"twin": lambda config: heads}), build_network(config, facts)


def test_the_first_network_does_not_see_its_companion(networks):
    both, alone = networks
    model = both.init(jax.random.key(0))
    assert set(model.params) == {"backbone", "classifier", "twin"}
    own = Model({name: model.params[name] for name in ("backbone", "classifier")},
                {name: part for name, part in model.batch_stats.items() if name != "twin"})  # fmt: skip
    chex.assert_trees_all_equal(own, alone.init(jax.random.key(0)))
    chex.assert_trees_all_equal(both.predict(model, IMAGES), alone.predict(own, IMAGES))
    outputs, batch_stats = both.train(model, (IMAGES,), MASK)
    expected, of_own = alone.train(own, (IMAGES,), MASK)
    chex.assert_trees_all_equal(outputs, expected)
    twins = {"twin": model.batch_stats["twin"]} if "twin" in model.batch_stats else {}
    chex.assert_trees_all_equal(batch_stats, {**of_own, **twins})
    if both.normalisation == "static":
        rows = jnp.arange(6)[None]
        taken = mean_statistics(both, model, jnp.asarray(IMAGES), rows, MASK[None])
        of_own = mean_statistics(alone, own, jnp.asarray(IMAGES), rows, MASK[None])
        chex.assert_trees_all_equal(taken, {**of_own, **twins})


def test_the_companion_has_other_weights_and_passes_of_its_own(networks):
    both, _ = networks
    model = both.init(jax.random.key(0))
    twin, network = companion_model(model, "twin"), both.companions["twin"]
    assert set(twin.params) == {"backbone", "projector"}
    assert np.any(twin.params["backbone"]["hidden"]["kernel"] != model.params["backbone"]["hidden"]["kernel"])
    (outputs,), batch_stats = network.train(twin, (IMAGES,), MASK)
    assert outputs.heads["projector"].shape == (6, 4) and outputs.logits.shape == (6, 0)
    after = with_companion_statistics(model.batch_stats, "twin", batch_stats)
    chex.assert_trees_all_equal_shapes(after, model.batch_stats)
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), after, model.batch_stats))
    assert sum(moved) == (4 if both.normalisation == "running" else 0)  # of two layers, and none of the first network
    padded = network.train(twin, (np.where(MASK[:, None, None, None], IMAGES, 255),), MASK)[0][0]
    np.testing.assert_allclose(padded.heads["projector"][:5], outputs.heads["projector"][:5], atol=1e-6)


def test_a_given_model_takes_the_place_of_fresh_parts(networks):
    both, _ = networks
    model, other = both.init(jax.random.key(0)), both.init(jax.random.key(1))
    given = Model({"backbone": other.params["backbone"], "twin": other.params["twin"]}, other.batch_stats)
    found = both._replace(given=given).init(jax.random.key(0))
    chex.assert_trees_all_equal(found.params, {**given.params, "classifier": model.params["classifier"]})
    chex.assert_trees_all_equal(found.batch_stats, other.batch_stats)
    assert list(found.params) == list(model.params)  # FedTriNet's head part is known by the order
