"""The losses against NumPy written from the papers' equations, where tests/official does not reach."""

import jax
import numpy as np
import pytest

from fedjax_ssl.ops import losses
from fedjax_ssl.ops.losses import common_direction_penalty, info_nce, information_loss, label_contrastive_loss

CLASSES = 4
# Jitted: each operation of its own would be a program of its own.
cross_entropy, mixup_cross_entropy, soft_label_loss, kl_divergence = map(
    jax.jit, (losses.cross_entropy, losses.mixup_cross_entropy, losses.soft_label_loss, losses.kl_divergence)
)
neighbourhood_loss = jax.jit(losses.neighbourhood_loss, static_argnames="replica")


def softmax_rows(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, CLASSES)).astype(np.float32) * 3
    return logits, rng.integers(0, CLASSES, 6), rng.integers(0, CLASSES, 6), np.array([1, 1, 0, 1, 1, 0], bool)


def test_cross_entropy(batch):
    logits, labels, _, mask = batch
    probabilities = softmax_rows(logits)
    expected = np.mean([-np.log(probabilities[i, labels[i]]) for i in range(6) if mask[i]])
    np.testing.assert_allclose(cross_entropy(logits, labels, mask), expected, rtol=1e-6)
    hostile = np.where(mask, labels, -7)  # padding may hold anything
    np.testing.assert_allclose(cross_entropy(logits, hostile, mask), expected, rtol=1e-6)
    assert cross_entropy(logits, labels, np.zeros(6, bool)) == 0.0


@pytest.mark.parametrize("weights", [[0.5, 2.0, 9.0, 0.0, 1.0, 3.0], [0.0] * 6])
def test_a_weight_for_each_image(batch, weights):
    """sum_b w_b H_b over the number that count, whatever the weights add up to; in mixup the same."""
    logits, labels, partners, mask = batch
    log_p, weights = np.log(softmax_rows(logits)), np.array(weights, np.float32)
    first, second = (
        sum(-weights[i] * log_p[i, of[i]] for i in range(6) if mask[i]) / mask.sum() for of in (labels, partners)
    )
    np.testing.assert_allclose(cross_entropy(logits, labels, mask, weights), first, rtol=1e-6)
    found = mixup_cross_entropy(logits, labels, partners, 0.3, mask, weights)
    np.testing.assert_allclose(found, 0.3 * first + 0.7 * second, rtol=1e-5)
    ones = cross_entropy(logits, labels, mask, np.ones(6, np.float32))
    np.testing.assert_allclose(ones, cross_entropy(logits, labels, mask), rtol=1e-6)


def test_soft_label_loss(batch):
    """w_b KL(q_b || p_b) over the whole batch; where q is 0, 0 log 0 is 0; weight and mask leave images out."""
    logits, _, _, mask = batch
    rng = np.random.default_rng(2)
    q = softmax_rows(rng.normal(size=(6, CLASSES))).astype(np.float32)
    q[0] = [0, 1, 0, 0]
    weights, p = np.array([1.0, 0.25, 7.0, 0.0, 2.0, 7.0], np.float32), softmax_rows(logits)
    terms = [weights[b] * sum(q[b, c] * np.log(q[b, c] / p[b, c]) for c in range(CLASSES) if q[b, c]) for b in range(6)]
    expected = sum(np.array(terms)[mask]) / mask.sum()
    np.testing.assert_allclose(soft_label_loss(logits, q, weights, mask), expected, rtol=1e-5)
    hostile = np.where(mask[:, None], q, np.nan).astype(np.float32)
    np.testing.assert_allclose(soft_label_loss(logits, hostile, weights, mask), expected, rtol=1e-5)
    assert np.all(np.isfinite(jax.jit(jax.grad(soft_label_loss))(logits, q, weights, mask)))
    assert soft_label_loss(logits, q, weights, np.zeros(6, bool)) == 0


def test_label_contrastive_gradient_is_finite_where_the_loss_has_nothing_to_say():
    gradient = jax.jit(jax.grad(lambda z, labels: label_contrastive_loss(z, labels, np.ones(3, bool), CLASSES, 0.1)))
    one_class_only = gradient(np.ones((3, 2), np.float32), np.array([1, 1, 1]))
    assert np.all(np.asarray(one_class_only) == 0)
    with_zero_vector = gradient(np.float32([[0, 0], [1, 0], [0, 1]]), np.array([1, 1, 2]))
    assert np.all(np.isfinite(with_zero_vector))
    cold = jax.jit(jax.grad(lambda z, labels: label_contrastive_loss(z, labels, np.ones(3, bool), CLASSES, 0.005)))
    opposite = cold(np.float32([[1, 0.1], [1, 0.2], [-1, 0]]), np.array([1, 1, 2]))  # exp(-1 / 0.005) is 0 in float32
    assert np.all(np.isfinite(opposite)) and np.any(opposite != 0)


def test_the_common_direction_is_the_mean_similarity():
    """Over all pairs, itself included; what eq. 1 cannot see: adding it to every similarity changes no loss there."""
    rng = np.random.default_rng(0)
    z = (rng.normal(size=(7, 5)) + 2).astype(np.float32)
    mask = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    z[3] = 0
    lengths = np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-30)
    unit = (z / lengths)[mask]
    expected = np.mean([a @ b for a in unit for b in unit])
    penalty = jax.jit(jax.value_and_grad(common_direction_penalty))
    found, gradient = penalty(z, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 0.1 < expected < 0.9
    assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[~mask] == 0)
    assert penalty(z, np.zeros(7, bool))[0] == 0


VIEWS = np.random.default_rng(5).normal(size=(2, 5, 3)).astype(np.float32)
PRESENT = np.array([True, True, False, True, True])


@pytest.mark.parametrize("loss", [lambda one, mask: info_nce(one, VIEWS[1], mask, 0.07),
                                  lambda one, mask: neighbourhood_loss(one, VIEWS[1], mask)])  # fmt: skip
@pytest.mark.parametrize("count", [0, 1])
def test_relations_between_images_of_which_there_are_too_few(loss, count):
    mask = np.arange(5) < count
    value, gradient = jax.jit(jax.value_and_grad(loss))(VIEWS[0], mask)
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize("count, square, xor", [(64, 4096, 66), (5, 25, 7), (2, 4, 1), (1, 1, 3), (0, 1, 2)])
def test_the_neighbourhood_s_divisor_is_a_square_or_an_exclusive_or(count, square, xor):
    """B XOR 2 is 0 for two images, and then 1 is taken."""
    one, other = np.random.default_rng(0).normal(size=(2, 64, 3)).astype(np.float32)
    mask = np.arange(64) < count
    distance = square * neighbourhood_loss(one, other, mask)
    assert count < 2 or distance > 0.01
    np.testing.assert_allclose(neighbourhood_loss(one, other, mask, replica=True), distance / xor, rtol=1e-6)


def test_the_two_parts_of_information():
    logits = 2 * VIEWS[0]
    p = softmax_rows(logits.astype(np.float64))[PRESENT]
    each, of_mean = jax.jit(information_loss)(logits, PRESENT)
    np.testing.assert_allclose(each, np.mean([-np.sum(row * np.log(row)) for row in p]), rtol=1e-5)
    mean = p.mean(axis=0)
    np.testing.assert_allclose(of_mean, -np.sum(mean * np.log(mean)), rtol=1e-5)
    assert jax.jit(information_loss)(logits, np.zeros(5, bool)) == (0.0, 0.0)
    # Sure of one image for each class: nothing is unknown, and log C is known of all.
    sure = jax.jit(information_loss)(np.eye(3, dtype=np.float32) * 1e4, np.ones(3, bool))
    np.testing.assert_allclose(sure, [0.0, np.log(3)], atol=1e-6)
