"""FedCD's balance of classes against a plain loop, its lesson and the lesson's slope against autograd."""

import autograd.numpy as np
import jax
import jax.numpy as jnp
import pytest
from autograd import grad
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_ssl.methods.fedcd import balance, lesson
from fedjax_ssl.models import Outputs
from tests.official.reference import softmax


def balance_by_hand(logits, confident, ranks):
    """Image by image, from the definition; logits [n, C] of the present images."""
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mass = p.sum(axis=0)
    spread = mass.max() - mass.min()
    sure = [c for c in range(len(mass)) if spread > 0 and (mass[c] - mass.min()) / spread >= confident]
    marked = []
    for image in logits:
        order = sorted(range(len(image)), key=lambda c, image=image: -image[c])
        marked.append(any(order.index(c) in range(ranks[0], ranks[1] + 1) for c in sure))
    return np.array([len(marked) / marked.count(mark) for mark in marked]), np.mean(marked)


@pytest.mark.parametrize(("confident", "ranks", "share"), [
    (0.4, (2, 3), "some"), (0.4, (5, 6), "none"), (0.0, (0, 4), "all"), (1.0, (1, 2), "some"),
])  # fmt: skip
def test_rare_images_get_the_weight_of_the_others(confident, ranks, share):
    """Clients of nine, six and no images among nine places; what is in a place without an image does not matter."""
    logits = np.random.default_rng(4).normal(size=(3, 9, 5)).astype(np.float32) + np.float32([1, 0, 0, 0.5, -1])
    sizes = np.array([9, 6, 0])
    present = np.arange(9) < sizes[:, None]
    found = np.asarray(balance(jnp.asarray(logits), jnp.asarray(present), confident, ranks))
    for client, size in enumerate(sizes[:2]):
        expected, marked = balance_by_hand(logits[client, :size].astype(np.float64), confident, ranks)
        assert_allclose(found[client, :size], expected, rtol=1e-6)
        assert share == ("none" if marked == 0 else "all" if marked == 1 else "some")
    assert np.all(np.isfinite(found))


def test_equal_masses_make_no_class_confident():
    found = balance(jnp.zeros((4, 3)), jnp.ones(4, bool), 0.4, (0, 2))
    assert_array_equal(found, np.ones(4))


def test_a_lesson_and_its_slope():
    """Also through the purity exp(-V); padding has the weight 0, and any scale of the weights cancels."""
    rng = np.random.default_rng(0)
    weights, kernel = np.float32([2, 0.5, 0, 1]), rng.normal(size=(3, 5)).astype(np.float32)
    x, taught = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    scores, head = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    known = taught @ kernel

    def found(kernel, scale):
        features = x @ kernel
        return lesson(Outputs(features @ head, {}, features), Outputs(scores, {}, known), scale * weights)

    def by_hand(kernel):
        features = x.astype(np.float64) @ kernel
        p, q = softmax(features @ head), softmax(scores.astype(np.float64)) ** 2
        q = q / np.sum(q, axis=1, keepdims=True)
        target = softmax(known.astype(np.float64))
        apart = np.sum(target * (np.log(target) - np.log(softmax(features))), axis=1)
        return np.sum(weights * np.exp(-apart) * np.sum((p - q) ** 2, axis=1)) / np.sum(weights)

    for scale in (1.0, 10.0):
        value, slope = jax.value_and_grad(found)(kernel, scale)
        assert_allclose(value, by_hand(kernel.astype(np.float64)), rtol=1e-5)
        assert_allclose(slope, grad(by_hand)(kernel.astype(np.float64)), atol=1e-6)
