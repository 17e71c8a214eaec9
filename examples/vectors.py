"""FixMatch on your own kind of input: vectors instead of images, with their own views, backbone and data."""

from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np

from fedjax_ssl import base_config
from fedjax_ssl.data import Dataset, federate, make_partition
from fedjax_ssl.engine import Problem
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import Heads
from fedjax_ssl.models.network import Network


class Vectors(NamedTuple):
    """How an example is stored and given to the network; see `fedjax_ssl.data.kinds`."""

    shape: tuple[int]  # shape of an example

    def to_network(self, inputs):
        return inputs


class Perceptron(nn.Module):
    """Maps inputs [B, 20] to features [B, 32]."""

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        return nn.relu(nn.Dense(32)(inputs))


def weak(key, inputs):
    return inputs + 0.1 * jax.random.normal(key, inputs.shape)


def strong(key, inputs):
    return weak(key, inputs) * jax.random.bernoulli(key, 0.7, inputs.shape)


rng = np.random.default_rng(0)
y = np.arange(1000, dtype=np.int32) % 4
x = (np.eye(4, 20)[y] * 5 + rng.normal(size=(1000, 20))).astype(np.float32)
dataset = Dataset("vectors", x[:800], y[:800], x[800:], y[800:], 4, mean=(), std=(), flip=False)

config = base_config()
config.num_clients, config.clients_per_round, config.data.server_labels = 10, 5, 20
config.model.normalisation, config.data.alpha = "none", 100.0
config.client.learning_rate, config.server.pretrain_epochs = 0.01, 20
network = Network(Heads(Perceptron(), 4, {}), Vectors((20,)), config.model.normalisation)
problem = Problem(config, network, weak, strong, num_classes=4)
method = METHODS["fixmatch"].factory(problem)
data, hidden_labels = federate(dataset, make_partition(y[:800], 4, config.data, 10, seed=0), seed=0)
run_round = jax.jit(make_round(problem, method, lanes=5))
state = method.init(data, jax.random.key(0))
for _ in range(5):
    state, result = run_round(state, data, hidden_labels)
    print({name: round(float(result.metrics[name]), 3) for name in ("test_accuracy", "client_loss", "confident_share")})
