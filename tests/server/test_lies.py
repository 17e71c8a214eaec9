"""Four clients, one of which lies in its statistics, its counts or both: no robust mean lets it destroy the model.

Its parameters are honest, so that what is chosen or weighted by parameters would take its statistics.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.server.aggregation import MEANS, fedavg
from fedjax_ssl.server.statistics import Sums, make_statistics, mean_of_sums, sum_statistics
from tests.helpers.runs import TINY_BACKBONE, make_fedanchor_config

CLIENTS, LIAR, LARGEST = 4, 2, 2**31 - 1
RULES = sorted(MEANS.keys() - {"mean"})
# What the liar tells in place of the means and variances of its layers.
LIES = {
    "far away": lambda mean, var: (0 * mean + 100, 0 * var + 1e4),
    "means alone": lambda mean, var: (mean + 10 * np.sqrt(var), var),
    "no variance": lambda mean, var: (mean, 0 * var),
    "variances alone": lambda mean, var: (mean, 1e4 * var),
    "negative variances": lambda mean, var: (mean, -var),
    "opposite": lambda mean, var: (-mean, var),
    "one channel": lambda mean, var: (np.where(np.arange(len(mean)) == 0, 1e3, mean), var),
    "another channel's": lambda mean, var: (np.roll(mean, 1), np.roll(var, 1)),
    "enormous": lambda mean, var: (0 * mean + 1e12, 0 * var + 1e24),
}


@pytest.fixture(scope="module")
def federation():
    """(experiment, a good model, clients' batches, accuracy of a model): a fitted classifier on random layers."""
    config = make_fedanchor_config(**{"model.name": TINY_BACKBONE, "method": "fixmatch"})
    experiment = build_experiment(config)
    network = experiment.problem.network
    digits = load_digits()
    images = jnp.array(15 * digits.images[..., None], jnp.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    clients, test = order[:1200].reshape(CLIENTS, -1), order[1200:]
    masks = jnp.ones(clients.shape, bool)
    of_all = sum_statistics(network, network.init(jax.random.key(0)), images, clients, masks)
    model = network.init(jax.random.key(0))._replace(batch_stats=mean_of_sums([of_all]))
    features = np.asarray(network.predict(model, images[clients.ravel()]).features)
    wanted = np.eye(10)[digits.target[clients.ravel()]]
    fitted = np.linalg.lstsq(np.c_[features, np.ones(len(features))], wanted)[0]
    classifier = {"kernel": jnp.array(fitted[:-1], jnp.float32), "bias": jnp.array(fitted[-1], jnp.float32)}
    model = model.with_parts(classifier=classifier)

    def accuracy(model):
        return jnp.mean(jnp.argmax(network.predict(model, images[test]).logits, axis=-1) == digits.target[test])

    return experiment, model, (images, jnp.array(clients), masks), accuracy


def told(batch_stats, lie):
    """The clients' statistics, leaves [4, ...], with the liar's."""
    if "var" not in batch_stats:
        return {name: told(part, lie) for name, part in batch_stats.items()}
    found = {name: np.array(leaf) for name, leaf in batch_stats.items()}
    found["mean"][LIAR], found["var"][LIAR] = lie(found["mean"][LIAR], found["var"][LIAR])
    return found


def check(accuracies, lies):
    """All rules at all lies: within two points of the same rule where nobody lies."""
    for rule, (honest, *of_lies) in accuracies.items():
        assert honest > 0.8, rule
        for lie, found in zip(lies, of_lies, strict=True):
            assert found > honest - 0.02, (rule, lie, honest, found)


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def options(experiment, rule, **fields):
    config = experiment.problem.config.copy_and_resolve_references()
    config.update_from_flattened_dict({"aggregation.mean": rule, "aggregation.byzantine_share": 0.25, **fields})
    return config


@pytest.mark.test_all
def test_running_statistics_beside_honest_parameters(federation):
    """Whatever numbers of images the liar claims: every lie with a true one and with the largest."""
    experiment, model, batches, accuracy = federation
    network = experiment.problem.network._replace(normalisation="running")
    sums = sum_statistics(network, model, *batches, num_owners=CLIENTS)
    drift = np.random.default_rng(1)
    params = [jax.tree.map(lambda x: x + 0.01 * drift.normal(size=x.shape).astype(np.float32), model.params)
              for _ in range(CLIENTS)]  # fmt: skip
    params[LIAR] = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), axis=0), *params)  # Krum chooses it
    cases = [told(sums.total, lie) for lie in (lambda *honest: honest, *LIES.values())]
    sizes = np.full(CLIENTS, 300)

    @functools.partial(jax.jit, static_argnums=0)
    def trained(rule, statistics, sizes):
        problem = experiment.problem._replace(network=network, config=options(experiment, rule))
        aggregation = fedavg(problem)
        state = State(jnp.int32(0), model, aggregation.init(model.params))

        def one(statistics, sizes):
            ids = jnp.arange(CLIENTS)
            received = Received(Upload(Model(stacked(params), statistics)), ids >= 0, ids, None, sizes, sizes)
            return accuracy(aggregation.aggregate(state, None, received, jax.random.key(0))[0].model)

        return jax.lax.map(lambda of: one(*of), (statistics, sizes))

    of_lies, claimed = cases + cases[1:], [sizes] * len(cases)
    claimed += [np.where(np.arange(CLIENTS) == LIAR, LARGEST, sizes)] * (len(cases) - 1)
    check({rule: trained(rule, stacked(of_lies), stacked(claimed)) for rule in RULES}, [*LIES, *LIES])


@pytest.mark.parametrize("source", ["cohort", "moments"])
def test_sums_that_clients_send(federation, source):
    """As Flower's nodes send them; the server has no images."""
    experiment, model, batches, accuracy = federation
    moments = source == "moments"
    sums = sum_statistics(experiment.problem.network, model, *batches, moments=moments, num_owners=CLIENTS)
    means = jax.tree.map(lambda leaf: leaf / sums.count[0], sums.total)
    cases = [told(means, lie) for lie in (lambda *honest: honest, *LIES.values())]
    count = sums.count.astype(jnp.float32)
    data = experiment.data._replace(server_index=jnp.zeros(0, jnp.int32))

    @functools.partial(jax.jit, static_argnums=0)
    def tested(rule, statistics):
        def one(means):
            total = jax.tree.map(lambda leaf: leaf * count[0], means)
            network = experiment.problem.network._replace(gathered=Sums(total, count))
            refresh = make_statistics(network, options(experiment, rule, **{"model.statistics": source}))
            return accuracy(refresh(State(jnp.int32(0), model), data, jnp.arange(CLIENTS), None).model)

        return jax.lax.map(one, statistics)

    check({rule: tested(rule, stacked(cases)) for rule in RULES}, list(LIES))


def test_statistics_before_the_first_round_are_the_server_s():
    """Nobody was asked yet, and the server has labelled images."""
    fields = {"aggregation.mean": "median", "model.normalisation": "static", "model.statistics": "cohort"}
    state = build_experiment(make_fedanchor_config(**fields)).state_shape
    assert jax.tree.leaves(state.model.batch_stats)
