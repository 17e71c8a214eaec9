"""The classifier of self-supervised methods: a linear probe on the features of the server's labelled images.

The server fits it in closed form after each round. So the model has a test accuracy and can be saved, loaded and used
for predictions like any other model. Clients neither train nor read the classifier.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data import FederatedData, server_has_labels
from fedjax_ssl.engine.interface import Method, Metrics, Problem, State
from fedjax_ssl.server.training import ServerPlan, supervised_loss, train_on_server_labels

STRENGTH = 0.1  # lambda of ridge regression, for features standardised to deviation 1
FEDERATED = "federated"  # entry of `State.server`: the model before fine-tuning, if the tested model is fine-tuned


def with_probe(problem: Problem, method: Method) -> Method:
    """Adds a classifier to a method without one, fitted to the features of the server's labelled images.

    It is fitted at the end of a round, after the normalisation statistics, which the features need. With `probe.epochs`
    the tested model is then fine-tuned; the next round begins with the model before fine-tuning. Without labels at the
    server the classifier keeps its initial weights.
    """
    config, network = problem.config, problem.network
    if not server_has_labels(config.data):
        return method
    epochs = config.probe.epochs

    def statistics(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> State:
        state = method.statistics(state, data, clients, key)
        rows = data.server_index
        features = network.predict_rows(state.model, data.inputs, rows, config.eval_batch_size).features
        fitted = ridge(
            state.model.params["classifier"], features, data.visible_labels[rows], problem.num_classes, STRENGTH
        )
        model = state.model.with_parts(classifier=fitted)
        if epochs == 0:
            return state._replace(model=model)
        state = state._replace(model=model, server={**state.server, FEDERATED: model})
        rate = jnp.float32(config.server.learning_rate)  # constant, because fine-tuning starts afresh in each round
        plan = ServerPlan(supervised_loss(problem, data), epochs, memory=None)
        tuned, _ = train_on_server_labels(problem, state, data, jax.random.fold_in(key, 0), rate, plan)
        return method.statistics(tuned, data, clients, key)

    def server_before(state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
        if epochs:
            state = state._replace(model=state.server[FEDERATED])
        return method.server_before(state, data, key)

    return method._replace(statistics=statistics, server_before=server_before)


def ridge(classifier: dict[str, Any], features: jax.Array, labels: jax.Array, num_classes: int, strength: float):
    """Fits a linear classifier to one-hot labels by ridge regression; gives its parameters, for the original features.

    It minimises 1/S sum_i |y_i - W z_i - b|^2 + strength |W|^2 over the features z, float32 [S, F], standardised to
    mean 0 and deviation 1. Constant features get weight 0. Of the given classifier only the names `kernel` [F, C] and
    perhaps `bias` [C] are read; without a bias features are not shifted.

    Source: Hoerl and Kennard, "Ridge Regression", Technometrics 1970.
    """
    targets, has_bias = jax.nn.one_hot(labels, num_classes), "bias" in classifier
    shift = jnp.mean(features, axis=0) if has_bias else jnp.zeros(features.shape[1])
    shares = jnp.mean(targets, axis=0) if has_bias else jnp.zeros(num_classes)
    deviation = jnp.sqrt(jnp.mean(jnp.square(features - shift), axis=0))
    # Features that vary only by rounding are constant.
    varies = deviation > 1e-6 * jnp.max(jnp.abs(features), axis=0)
    scale = jnp.where(varies, 1 / jnp.where(varies, deviation, 1.0), 0.0)
    inputs = (features - shift) * scale
    size, width = inputs.shape

    def solve(matrix: jax.Array, right: jax.Array) -> jax.Array:
        return jax.scipy.linalg.solve(matrix + size * strength * jnp.eye(len(matrix)), right, assume_a="pos")

    def product(one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.matmul(one, other, precision="highest")

    if size < width:  # solve the smaller of two equivalent systems
        weights = product(inputs.T, solve(product(inputs, inputs.T), targets - shares))
    else:
        weights = solve(product(inputs.T, inputs), product(inputs.T, targets - shares))
    kernel = weights * scale[:, None]
    return {"kernel": kernel, **({"bias": shares - product(shift, kernel)} if has_bias else {})}
