"""Which clients are alike, by what their models say of one image of noise."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.fedmatch.server import Vectors, nearest_clients, noise_image


def test_the_noise_is_one_image():
    noise = np.asarray(noise_image((32, 32, 3)))
    assert noise.shape == (1, 32, 32, 3) and noise.min() >= 0 and noise.max() <= 255
    np.testing.assert_array_equal(noise, noise_image((32, 32, 3)))
    # A normal distribution of mean and deviation 125 between -1 and 1.04 deviations.
    np.testing.assert_allclose([noise.mean(), noise.std()], [127.1, 68.1], atol=3)


def test_helpers_are_the_nearest_clients():
    outputs = np.array([[0.0, 0], [1, 0], [0, 3], [0, 1], [9, 9], [0, 0.5]])
    seen = np.array([True, True, True, True, True, False])
    vectors = Vectors(jnp.array(outputs, jnp.float32), jnp.array(seen))
    find = jax.jit(nearest_clients, static_argnums=2)
    near, present = find(vectors, jnp.array([0, 2, 5, 4]), 2)
    np.testing.assert_array_equal(near[:2], [[1, 3], [3, 0]])  # of 0 the equally distant 1 and 3, in their order
    np.testing.assert_array_equal(present, [[True] * 2, [True] * 2, [False] * 2, [True] * 2])
    for client, found in zip((0, 2, 4), np.asarray(near)[[0, 1, 3]]):
        distances = np.linalg.norm(outputs - outputs[client], axis=1)
        distances[[client, 5]] = np.inf
        np.testing.assert_array_equal(found, np.argsort(distances, kind="stable")[:2])
    few = vectors._replace(seen=jnp.array([True, True] + [False] * 4))
    np.testing.assert_array_equal(find(few, jnp.array([0, 1, 2, 3]), 2)[1], [[True, False]] * 2 + [[False] * 2] * 2)
