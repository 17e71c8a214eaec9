"""ProxyFL: proxies of one client, the prior without an upload, and the switches; tests/official has whole rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.proxyfl import COUNTS, FEATURES, PRIOR, PROXIES, VARIANTS, tuned_proxies
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import make_problem
from fedjax_ssl.run.validation import validate
from tests.helpers.linear_heads import DIM, LinearHeads
from tests.helpers.runs import TINY_BACKBONE
from tests.helpers.small_problem import federation, phases_of, sent_down, small_problem, train

THRESHOLD = 0.6
A_FEW = 0
PRIOR_SENT = np.array([0.5, 0.2, 0.3])


def build(*variants, method="proxyfl", **fields):
    given = functools.reduce(lambda a, b: {**a, **VARIANTS[b]}, variants, {})
    fields = {"data.labels": "clients", "confidence.threshold": THRESHOLD, "client.epochs": 1, **given, **fields}
    problem = small_problem(method, network=LinearHeads({FEATURES: ("", DIM), PROXIES: ("", DIM)}), **fields)
    validate(problem.config)
    return problem, METHODS[method].factory(problem)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1, -1]])


# --- The server. -----------------------------------------------------------------------------------------------------


def test_proxies_of_one_client_move_without_a_number_lost():
    """The distance to a proxy's own point is 0: no gradient comes of it, and no NaN."""
    average = np.eye(3, dtype=np.float32)
    found = np.asarray(tuned_proxies(average, average[None], jnp.array([True]), jax.random.key(0), epochs=5))
    assert np.all(np.isfinite(found))
    # Each proxy is pushed away from the others' points alone.
    gaps = np.linalg.norm(found[:, None] - average, axis=-1)
    assert np.all(gaps[~np.eye(3, dtype=bool)] > np.sqrt(2))


def uploads(problem, seed=0):
    """Four clients' messages of which the second is not accepted, and the state that they meet."""
    rng, state = np.random.default_rng(seed), State(jnp.int32(0), sent_down(problem).model)
    noise = lambda leaf: np.float32(rng.normal(size=(4, *leaf.shape)))  # noqa: E731
    method = METHODS["proxyfl"].factory(problem)
    server = jax.eval_shape(method.init, federation([[0, -1], [-1]]), jax.random.key(0)).server
    told = {COUNTS: np.float32([[3, 0, 1], [np.nan] * 3, [0, 0, 0], [4, 8, 4]])} if PRIOR in server else {}
    model = jax.tree.map(noise, state.model)
    params = {name: part for name, part in model.params.items() if PRIOR in server or name not in (FEATURES, PROXIES)}
    sizes = jnp.array([10, 99, 30, 60])
    accepted = jnp.array([True, False, True, True])
    received = Received(Upload(Model(params, model.batch_stats), told), accepted, jnp.arange(4), None, sizes, sizes)
    if PRIOR in server:
        state = state._replace(server={PRIOR: jnp.asarray(PRIOR_SENT, jnp.float32)})
    return method, state, received


def test_the_prior_is_that_of_the_clients_counts():
    problem, _ = build("no_tuning")
    method, state, received = uploads(problem)
    after, _ = method.aggregate(state, None, received, jax.random.key(0))
    expected = (np.array([3, 0, 1]) / 4 + np.array([4, 8, 4]) / 16) / 2
    np.testing.assert_allclose(after.server[PRIOR], expected, rtol=1e-6)
    np.testing.assert_allclose(np.sum(after.server[PRIOR]), 1, rtol=1e-6)
    broadcast = method.broadcast(after, None, None)
    np.testing.assert_array_equal(broadcast.extra, after.server[PRIOR])  # it goes down in the next round
    nothing = received._replace(uploads=received.uploads._replace(metadata={COUNTS: np.zeros((4, 3), np.float32)}))
    after, _ = method.aggregate(state, None, nothing, jax.random.key(0))
    np.testing.assert_array_equal(after.server[PRIOR], state.server[PRIOR])


# --- The switches. ---------------------------------------------------------------------------------------------------


def test_each_part_is_switched_off_alone(data):
    for tuning, variant in ((True, "no_contrastive"), (False, "plain_proxyfl")):
        problem, _ = build(variant, **({"proxyfl.tuning_epochs": 2} if tuning else {}))
        method, state, received = uploads(problem)
        assert state.server == {} and method.broadcast(state, None, None).extra == ()  # no prior travels
        _, finished = train(phases_of(method)[0], sent_down(problem), data, A_FEW)
        assert finished.upload.metadata == {} and set(finished.upload.model.params) == {"backbone", "classifier"}
        assert "contrastive_loss" not in finished.metrics
        after, _ = method.aggregate(state, None, received, jax.random.key(0))
        mean = np.tensordot([0.1, 0, 0.3, 0.6], received.uploads.model.params["classifier"]["kernel"], axes=1)
        assert np.allclose(after.model.params["classifier"]["kernel"], mean, atol=1e-5) != tuning
        for name in (FEATURES, PROXIES):  # not trained, and not decayed
            np.testing.assert_array_equal(after.model.params[name]["kernel"], state.model.params[name]["kernel"])


def test_a_rule_with_weights_is_for_training_without_the_contrastive_loss():
    fields = {"confidence.kind": "softmatch", "confidence.memory": "run"}
    with pytest.raises(UserError, match="'softmatch' gives weights, but proxyfl has none"):
        build(**fields)
    build("no_contrastive", **fields)


def test_without_both_it_is_fixmatch_with_global_labels(data):
    """The "none" row of its ablation, where the loss is the code's mean over the batch; batch statistics and all."""
    finished = []
    for variants, method, fields in (
        (("plain_proxyfl",), "proxyfl", {"proxyfl.loss_over": "batch"}),
        ((), "fixmatch", {"confidence.labels_from": "received"}),
    ):
        problem, built = build(*variants, method=method, **fields)
        finished.append(train(phases_of(built)[0], sent_down(problem), data, A_FEW)[1])
    assert finished[0].metrics.keys() == finished[1].metrics.keys()
    for found, expected in zip(*(jax.tree.leaves((one.metrics, one.upload)) for one in finished)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_in_the_paper_s_setting_classifier_and_projections_begin_as_the_code_s():
    """The code's are `torch.nn.Linear`'s, P_w without a bias: uniform within 1 / sqrt(fan-in)."""
    config = apply_arguments(base_config(), "sage,paper,proxyfl,code")
    config.model.name, config.model.width = TINY_BACKBONE, 0
    facts = {"num_classes": 3, "image_shape": (8, 8, 1), "mean": (0.5,), "std": (0.25,), "flip": False}
    params = make_problem(config, facts, lacks_labels=False).network.init(jax.random.key(0)).params
    leaves = [params[name]["kernel"] for name in ("classifier", FEATURES, PROXIES)]
    for leaf in (*leaves, params["classifier"]["bias"], params[FEATURES]["bias"]):
        assert 0.08 < np.max(np.abs(leaf)) < 32**-0.5 and np.ptp(leaf) > 0.1
    assert "bias" not in params[PROXIES]
