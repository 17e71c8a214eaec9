"""Counts each client's correctly classified test images: by the global, the fine-tuned and the personalised model.

Source of fine-tuning: Jiang et al., "Improving Federated Learning Personalization via Model Agnostic Meta Learning",
arXiv 1909.12488: local training from the global model on the client's own data, after FedAvg.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.personal import OWN_PARTS
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.cohort import cohort_of, train_cohort
from fedjax_ssl.engine.interface import Broadcast, Method, Problem, State, completed
from fedjax_ssl.engine.round import round_keys, select_of
from fedjax_ssl.engine.tracing import num_jobs
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row, where
from fedjax_ssl.records.clients import GLOBAL, PERSONAL, TUNED
from fedjax_ssl.run.experiment import Experiment
from fedjax_ssl.server.statistics import batches_of, mean_of_sums, sum_statistics

# (state, data, clients int32 [M], which of these rows are present bool [M], their test images [M, n, ...], the true
# labels int32 [M, n], -1 for padding) -> for each model the number of correct images, int32 [M].
ClientTests = Callable[..., dict[str, jax.Array]]


def make_client_tests(problem: Problem, method: Method, lanes: int) -> ClientTests:
    """Makes the function that tests some clients. It does not change the run's state.

    Fine-tuning is one more round of the method's own local training from the global model, at a constant
    `client.learning_rate`. The fine-tuned model is the one that the client would upload. A client that takes no part
    keeps the received model. Under the policy 'static' a fine-tuned model has the statistics of the client's own
    training images. Raises a UserError when the function is traced, if clients upload no parts of the tested model.
    """
    network, config, parts = problem.network, problem.config, tuple(problem.config.personal_parts)

    def right(model: Model, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = map_batches(
            lambda rows: network.predict(model, images[rows]).logits, jnp.arange(len(images)), config.eval_batch_size
        )
        return jnp.sum((jnp.argmax(logits, axis=-1) == labels) & (labels >= 0))

    def test(state: State, data: FederatedData, clients, present, images, labels) -> dict[str, jax.Array]:
        found = {GLOBAL: jax.lax.map(lambda of: right(state.model, *of), (images, labels))}
        if not method.phases:
            return found
        keys = round_keys(data.seed, state.round)
        mine = row(state.clients.get(OWN_PARTS, {}), data.place(clients))
        if parts:
            found[PERSONAL] = jax.lax.map(
                lambda of: right(state.model.with_parts(**of[0]), *of[1:]), (mine, images, labels)
            )
        selection = select_of(problem, method)(state, data, keys.select)
        group = None if selection.group is None and selection.turns == 1 else jnp.zeros_like(clients)
        sent = method.broadcast(state, data, keys.broadcast)
        if isinstance(sent, Broadcast):
            sent = sent._replace(learning_rate=jnp.float32(config.client.learning_rate))
        message = () if method.personal is None else method.personal(state, data, clients, keys.personal)
        cohort = cohort_of(state, data, clients, group, message, keys.clients)
        result = train_cohort(method.phases, sent, data, cohort, lanes, present=present, label=method.label)

        if not set(result.upload.model.params) <= set(state.model.params):
            raise UserError(
                f"data.client_test_share is not for {config.method}, whose clients upload no parts of the tested model"
            )

        def tuned(of: Any) -> jax.Array:
            client, took_part, upload, before, after, *test_set = of
            start = state.model.with_parts(**before)
            trained = _with_own_statistics(problem, completed(start, upload).with_parts(**after), data, client)
            return right(where(took_part, trained, start), *test_set)

        after = result.memory_of_steps.get(OWN_PARTS, {})
        rows = result.clients, result.took_part, result.upload.model, row(mine, result.job), after
        counts = jax.lax.map(tuned, (*rows, images[result.job], labels[result.job]))
        place = jnp.where(result.present, result.job, len(clients))  # several devices deal out the rows
        found[TUNED] = jnp.zeros(len(clients), counts.dtype).at[place].set(counts, mode="drop")
        return found

    return test


def _with_own_statistics(problem: Problem, model: Model, data: FederatedData, client: jax.Array) -> Model:
    """With the policy 'static', a client's model with the statistics of its own training images, if it has any."""
    network = problem.network
    if network.normalisation != "static":
        return model
    batches = batches_of([(data.rows_of(client[None]), data.client_size[client][None])])
    found = sum_statistics(network, model, data.inputs, *batches, problem.config.model.statistics_weights)
    some = found.count[0] > 0
    return model._replace(
        batch_stats=jax.tree.map(lambda *of: jnp.where(some, *of), mean_of_sums([found]), model.batch_stats)
    )


def clients_at_once(experiment: Experiment) -> int:
    """How many clients a call tests: as many as train side by side in a round."""
    if experiment.views is not None:
        return experiment.views.clients
    return num_jobs(experiment.problem, experiment.method, experiment.state_shape, experiment.data)


def test_set_of(experiment: Experiment, clients: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Test images of some clients [M, width, ...], and their labels int32 [M, width], -1 for padding."""
    dataset, tests = experiment.dataset, experiment.partition.client_test_rows
    images = np.zeros((len(clients), width, *dataset.x_train.shape[1:]), dataset.x_train.dtype)
    labels = np.full((len(clients), width), -1, np.int32)
    for place, client in enumerate(clients):
        rows = tests[client]
        images[place, : len(rows)], labels[place, : len(rows)] = dataset.x_train[rows], dataset.y_train[rows]
    return images, labels
