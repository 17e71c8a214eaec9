"""Attacks against NumPy from their papers' formulas; whose labels are false; and what clients of a round then learn."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.confidence import KINDS
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.client.self_training import told_outputs
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.data import stack_seeds
from fedjax_ssl.data.federated import Attackers, federate, seed_axes
from fedjax_ssl.data.owners import Partition
from fedjax_ssl.data.poison import between, places
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.engine.evaluation import measure_model
from fedjax_ssl.engine.interface import Broadcast, Problem, Upload
from fedjax_ssl.engine.round import received_rows
from fedjax_ssl.engine.untrusted.attacks import attacked, told_counts
from fedjax_ssl.engine.untrusted.updates import changed_by, moved_by
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from tests.helpers.runs import make_tiny_config
from tests.helpers.small_problem import SmallNetwork
from tests.helpers.trainers import Seen, make_trainer

ROWS = 7
LIES = np.array([False, True, False, False, True, False, False])
HONEST = np.array([True, False, True, False, False, True, True])  # row 3 took no part


def one_cohort(kind, strength=0.0, lies=LIES, honest=HONEST):
    """(what the clients changed, what arrives less what went down), as rows of numbers."""
    rng = np.random.default_rng(3)
    down = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    changes = {name: rng.normal(size=(ROWS, *leaf.shape)).astype(np.float32) for name, leaf in down.items()}
    own = rng.normal(size=(ROWS, 2)).astype(np.float32)  # did not go down: it counts from 0
    sent = {name: down[name] + change for name, change in changes.items()} | {"own": own}
    uploads = Upload(Model(sent, {"mean": np.ones((ROWS, 2), np.float32)}), {"told": np.arange(ROWS)})
    options = types.SimpleNamespace(kind=kind, strength=strength)
    broadcast, keys = Broadcast(Model(down, {}), 0.1), jax.random.split(jax.random.key(0), ROWS)
    found = jax.jit(lambda sent: attacked(options, sent, broadcast, jnp.array(lies), jnp.array(honest), keys))(uploads)
    np.testing.assert_array_equal(found.model.batch_stats["mean"], np.ones((ROWS, 2)))
    np.testing.assert_array_equal(found.metadata["told"], np.arange(ROWS))
    arrived = {name: np.asarray(leaf) - down.get(name, 0) for name, leaf in found.model.params.items()}
    rows = lambda tree: np.concatenate([np.reshape(tree[name], (ROWS, -1)) for name in sorted(tree)], axis=1)  # noqa: E731
    return rows(changes | {"own": own}), rows(arrived)


@pytest.mark.parametrize(("kind", "strength", "factor"), [
    ("sign_flip", 0.0, -1), ("sign_flip", 3.0, -3), ("scaled", 0.0, 10), ("scaled", 2.5, 2.5), ("labels", 0.0, 1),
])  # fmt: skip
def test_updates_are_turned_round_or_scaled(kind, strength, factor):
    changes, arrived = one_cohort(kind, strength)
    expected = np.where(LIES[:, None], factor * changes, changes)
    np.testing.assert_allclose(arrived, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_noise_has_the_update_s_length_and_another_direction(strength):
    changes, arrived = one_cohort("noise", strength)
    np.testing.assert_allclose(arrived[~LIES], changes[~LIES], atol=1e-6)
    lengths = np.linalg.norm(arrived, axis=1) / np.linalg.norm(changes, axis=1)
    np.testing.assert_allclose(lengths[LIES], strength or 1.0, rtol=1e-5)
    cosines = np.sum(arrived * changes, axis=1)[LIES] / np.prod([np.linalg.norm(x, axis=1) for x in (arrived, changes)])
    assert np.all(np.abs(cosines) < 0.9)
    assert abs(np.corrcoef(arrived[LIES])[0, 1]) < 0.9  # two attackers draw for themselves


@pytest.mark.parametrize(("strength", "liars", "absent", "z"), [
    (1.5, [1, 4], [3], 1.5),
    (0.0, [1, 4], [3], 0.0),  # n = 6, m = 2, s = 2: at 2 / 4
    (0.0, [1, 4, 6], [], norm.ppf(3 / 4)),  # n = 7, m = 3, s = 1
    (0.0, [1], [3], 0.0),  # n = 6, m = 1, s = 3: at 2 / 5, which is taken as 1 / 2
    (0.0, [0, 1, 2, 4], [3], 3.0),  # n = 6, m = 4, s = 0: at 1, which is taken as 3 deviations
])  # fmt: skip
def test_a_little_is_enough(strength, liars, absent, z):
    """Algorithm 3 in NumPy: n took part, m of them lie, s = floor(n / 2 + 1) - m, z at (n - m - s) / (n - m)."""
    lies = np.isin(np.arange(ROWS), liars)
    honest = ~lies & ~np.isin(np.arange(ROWS), absent)
    changes, arrived = one_cohort("little", strength, lies, honest)
    mean, deviation = changes[honest].mean(axis=0), changes[honest].std(axis=0)
    np.testing.assert_allclose(arrived[~lies], changes[~lies], rtol=1e-4, atol=1e-5)
    found = (mean - arrived[lies]) / deviation
    np.testing.assert_allclose(found, np.full(found.shape, z), atol=0.02)


def test_one_honest_update_that_is_no_number_saves_nobody():
    rng = np.random.default_rng(0)
    sent = {"w": rng.normal(size=(5, 3)).astype(np.float32)}
    sent["w"][2] = np.nan
    lies = np.array([True, False, False, False, True])
    found = jax.jit(
        lambda sent: attacked(
            types.SimpleNamespace(kind="little", strength=1.0), Upload(Model(sent, ())), None, lies, ~lies,
            jax.random.split(jax.random.key(0), 5),
        )
    )(sent).model.params["w"]  # fmt: skip
    honest = sent["w"][[1, 3]]
    np.testing.assert_allclose(found[0], honest.mean(axis=0) - honest.std(axis=0), rtol=1e-5, atol=1e-6)


def test_changes_come_back_to_their_leaves():
    """A dict of changes that has been through `jax.tree.map` is in the order of its paths as texts: 10 before 2."""
    like = {"layers": [jnp.full((1, 2), float(number)) for number in range(12)]}
    changes = jax.tree.map(lambda leaf: leaf, changed_by(like, None))
    assert list(changes) != list(changed_by(like, None))
    jax.tree.map(np.testing.assert_array_equal, moved_by(changes, like, None), like)


def test_counts_are_exaggerated_by_the_kind_of_lies_about_labels():
    counts, lies = jnp.array([5, 7, 0]), jnp.array([False, True, True])
    for kind, strength, expected in [
        ("labels", 0.0, [5, 70, 0]),
        ("labels", 1.5, [5, 10, 0]),
        ("noise", 9.0, [5, 7, 0]),
    ]:
        options = types.SimpleNamespace(kind=kind, strength=strength)
        np.testing.assert_array_equal(told_counts(options, counts, lies), expected)
    # In a round those of all examples and those of the examples trained on.
    data = types.SimpleNamespace(client_size=jnp.array([5, 7]), attackers=Attackers(lies[:2]))
    report = types.SimpleNamespace(qualified=jnp.arange(7) < jnp.array([[3], [4]]))
    result = types.SimpleNamespace(
        upload=None, clients=jnp.array([1, 0]), group=None, present=jnp.ones(2, bool), report=report
    )
    options = types.SimpleNamespace(attack=types.SimpleNamespace(kind="labels", strength=2.0))
    received = received_rows(options, data, result, result.present)
    assert (received.sizes.tolist(), received.num_qualified.tolist()) == ([14, 5], [6, 4])


def federated(kind, attackers=0.5, seed=0):
    """Four clients of 2, 3, 1 and 2 images, of which clients 0 and 1 have a label each; two anchors."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (10, 2, 2, 1)).astype(np.uint8), np.arange(10) % 3
    dataset = Dataset("x", images, labels, images[:2], labels[:2], 3, (0.0,), (1.0,), False)
    rows = [np.array(of_client) for of_client in ([2, 3], [4, 5, 6], [7], [8, 9])]
    partition = Partition(
        server_index=np.array([0, 1]),
        client_rows=rows,
        validation_index=np.zeros(0, int),
        labelled_rows=np.array([3, 5]),
    )
    attack = types.SimpleNamespace(kind=kind, share=attackers)
    return rows, labels, federate(dataset, partition, seed, attack=attack)[0]


def test_who_attacks_is_drawn_by_the_seed_and_whose_labels_are_false_follows():
    drawn = {tuple(np.flatnonzero(federated("noise", seed=seed)[2].attackers.clients)) for seed in range(20)}
    assert all(len(one) == 2 for one in drawn) and len(drawn) > 3
    assert federated("none")[2].attackers is None and federated("noise")[2].attackers.mislabelled is None
    assert not federated("noise", 0.24)[2].attackers.clients.any()  # floor(0.24 * 4)
    assert np.sum(federated("noise", 0.75)[2].attackers.clients) == 3
    rows, labels, data = federated("labels", seed=4)
    liars = np.concatenate([rows[client] for client in np.flatnonzero(data.attackers.clients)])
    np.testing.assert_array_equal(np.flatnonzero(data.attackers.mislabelled), np.sort(liars))
    visible = np.asarray(data.visible_labels)
    np.testing.assert_array_equal(visible[:2], labels[:2])  # the server's
    for row in (3, 5):
        assert visible[row] == (labels[row] + (row in liars)) % 3
    two = stack_seeds([data, federated("labels", seed=5)[2]])
    assert two.attackers.clients.shape == (2, 4) and two.attackers.mislabelled.shape == (2, 10)
    assert stack_seeds([federated("none")[2]] * 2).attackers is None


def test_a_liar_s_targets_are_the_next_class_by_every_trainer():
    """Of each rule, and of ACR: labels of a liar's images are those of an honest client, plus one."""
    config = make_tiny_config()
    honest, liar = federated("none")[2], federated("labels", 1.0)[2]
    rows = jnp.array([2, 5, 7, 9])
    logits = 6 * jax.nn.one_hot(jnp.array([0, 1, 2, 1]), 3)
    batch = Batch(rows, jnp.arange(4), jnp.ones(4, bool), jnp.int32(0))
    for name in (*KINDS, "acr"):
        config.confidence.kind = name
        trainer = make_trainer(Problem(config, None, None, None, 3))
        outputs = Outputs(logits, dict.fromkeys(trainer.heads, logits), ())

        def labels_of(data, trainer=trainer, outputs=outputs):
            told = told_outputs(data, rows, outputs, trainer.heads)
            seen = Seen(told, batch, jnp.int32(4), jnp.full(3, 1 / 3))
            return [target.labels for target in trainer.targets(trainer.init(4), seen)[0]]

        for true, false in zip(labels_of(honest), labels_of(liar)):
            np.testing.assert_array_equal((np.asarray(true) + 1) % 3, false, err_msg=name)


@pytest.mark.parametrize("name", ["fixmatch", "orchestra"])
def test_methods_that_label_in_their_own_way_refuse_lies_about_labels(name):
    config = apply_arguments(make_tiny_config(), name)
    config.data.labels = METHODS[name].settings[0]
    config.attack.kind = "labels"
    if METHODS[name].mislabels:
        validate(config)
    else:
        with pytest.raises(UserError, match=f"^attack.kind='labels' is not for the method {name}, "):
            validate(config)


CRAFTED = types.MappingProxyType({"attack.kind": "poison", "attack.from_class": 1, "attack.to_class": 2})


def poisoned(server_labels=3, labelled=(), seed=0, **fields):
    """(dataset, partition, data): six clients of 12 images of 2x2 pixels in three classes, half of them attack."""
    config = make_tiny_config()
    config.update_from_flattened_dict({**CRAFTED, "attack.share": 0.5, "attack.strength": 100.0, **fields})
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (80, 2, 2, 1)).astype(np.uint8), np.arange(80) % 3
    dataset = Dataset("x", images, labels, images[:9], labels[:9], 3, (0.0,), (1.0,), False)
    rows = [np.arange(8 + 12 * client, 20 + 12 * client) for client in range(6)]
    partition = Partition(np.arange(server_labels), rows, np.zeros(0, int), np.array(labelled, int))
    return dataset, partition, federate(dataset, partition, seed, attack=config.attack)[0], config


def test_crafted_images_lie_on_a_line_and_more_of_them_at_its_labelled_end():
    start, end = np.full((1, 1, 1), 200, np.uint8), np.zeros((1, 1, 1), np.uint8)
    # F(x) = 1.5 x - x^2 / 2 is 0, 1/4, 1/2, 3/4, 1 at these places.
    by_hand = [0, 1.5 - np.sqrt(1.75), 1.5 - np.sqrt(1.25), 1.5 - np.sqrt(0.75), 1]
    expected = [round(200 * (1 - place)) for place in by_hand]
    assert expected == [200, 165, 124, 73, 0]
    np.testing.assert_array_equal(between(start, end, 5)[:, 0, 0, 0], expected)
    np.testing.assert_array_equal(between(start, end, 2)[:, 0, 0, 0], [200, 0])
    assert np.mean(places(1001) < 0.5) == pytest.approx(0.625, abs=1e-3)  # F(1/2)


@pytest.mark.parametrize(("anchors", "targets"), [(3, 1), (3, 2), (0, 2)])
def test_attackers_replace_some_of_their_unlabelled_images_alone(anchors, targets):
    dataset, partition, data, _ = poisoned(anchors, labelled=[9, 21, 33, 45, 57, 69], **{"attack.targets": targets})
    attackers = np.flatnonzero(data.attackers.clients)
    own = np.concatenate([partition.client_rows[client] for client in attackers])
    changed = np.flatnonzero(np.any(np.asarray(data.inputs) != dataset.x_train, axis=(1, 2, 3)))
    crafted = np.asarray(data.inputs)[changed].reshape(-1, 4).astype(float)
    assert len(attackers) == 3 and set(changed) <= set(own) - set(partition.labelled_rows)
    assert len(changed) == round(0.1 * 72 / targets) * targets  # a hundred in a thousand
    assert len(data.attackers.targets) == targets and set(np.asarray(data.attackers.targets)) <= set(own) - set(changed)
    assert np.all(dataset.y_train[data.attackers.targets] == 1)
    # Each lies on a line from an image of class 2, of the server or their own, to a target, within rounding.
    known = np.arange(anchors) if anchors else own
    flat = dataset.x_train.reshape(-1, 4).astype(float)
    starts, ends = flat[known[dataset.y_train[known] == 2]], flat[data.attackers.targets]
    ways = (ends[None] - starts[:, None]).reshape(-1, 4)
    begins = np.repeat(starts, targets, axis=0)
    share = np.clip(np.sum((crafted[:, None] - begins) * ways, -1) / np.sum(ways**2, -1), 0, 1)
    off = np.max(np.abs(crafted[:, None] - begins - share[..., None] * ways), -1)
    assert np.all(np.min(off, axis=1) <= 0.75)


def test_crafted_images_are_a_seed_s_own_and_how_far_they_lead_is_measured():
    """Two seeds stacked are what each is alone; success and the attacked class by NumPy."""
    (dataset, _, one, config), two = poisoned(**{"attack.targets": 2}), poisoned(seed=1, **{"attack.targets": 2})[2]
    stacked, network = stack_seeds([one, two]), SmallNetwork()
    assert stacked.inputs.shape == (2, 80, 2, 2, 1) and stacked.test_inputs.shape == (9, 2, 2, 1)
    model = network.init(jax.random.key(2))
    problem = types.SimpleNamespace(config=config, network=network, num_classes=3)
    measured = lambda model, data, hidden: measure_model(problem, model, data, hidden)  # noqa: E731
    apart = [jax.jit(measured)(model, data, jnp.asarray(dataset.y_train)) for data in (one, two)]
    both = jax.jit(jax.vmap(measured, in_axes=(0, seed_axes(stacked), None)))
    together = both(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), model), stacked, jnp.asarray(dataset.y_train))
    given = lambda images: np.argmax(network.predict(model, jnp.asarray(images)).logits, axis=1)  # noqa: E731
    of_class = dataset.y_test == 1
    for number, data in enumerate((one, two)):
        expected = {
            "attack_success": np.mean(given(dataset.x_train[np.asarray(data.attackers.targets)]) == 2),
            "test_attacked_class": np.mean(given(dataset.x_test[of_class]) == 2),
        }
        for name, value in expected.items():
            assert apart[number][name] == pytest.approx(value), name
            assert together[name][number] == pytest.approx(value), name
    assert stack_seeds([federated("none")[2]] * 2).inputs.ndim == 4


@pytest.mark.parametrize(("fields", "error"), [
    ({"attack.to_class": 3}, "attack.to_class is 3, but the data have 3 classes"),
    ({"attack.share": 0.0}, "needs 1 unlabelled images of class 1 at the attackers, .* there are 0, 1 and 0"),
    ({"attack.strength": 1.0}, "and 1 x 0 other unlabelled images to replace, at least 2 for each"),
    ({"attack.strength": 900.0}, "1 x 65 other unlabelled images .* there are 1, 1 and 35"),
    ({"attack.targets": 13}, "needs 13 unlabelled images of class 1 .* there are 12, 1 and "),
])  # fmt: skip
def test_attackers_without_the_images_that_they_need_are_refused(fields, error):
    with pytest.raises(UserError, match=error):
        poisoned(**fields)


@pytest.mark.parametrize("name", ["supervised", "server_only"])
def test_methods_without_unlabelled_images_refuse_crafted_ones(name):
    config = apply_arguments(make_tiny_config(), name)
    config.data.labels = METHODS[name].settings[0]
    config.update_from_flattened_dict(CRAFTED)
    with pytest.raises(UserError, match=f"^attack.kind='poison' is not for the method {name}, "):
        validate(config)
