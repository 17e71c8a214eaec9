"""FedAvg with FixMatch on the digits in plain JAX: a loop over clients, and over the batches of each.

    python examples/fixmatch.py

The library's `method=fixmatch` trains a round's clients at once, and gives the same numbers on the same batches
(tests/test_examples.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from fedjax_ssl import base_config
from fedjax_ssl.data import dataset_facts, load_dataset, make_partition
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.models.network import build_network


def make_client(network, optimizer, threshold):
    def loss(params, model, labelled, labels, weak, strong):
        logits = [network.predict(model._replace(params=params), view).logits for view in (labelled, weak, strong)]
        supervised = cross_entropy(logits[0], labels)
        probabilities = jax.lax.stop_gradient(jax.nn.softmax(logits[1]))
        confident = jnp.max(probabilities, axis=-1) >= threshold
        unsupervised = confident * cross_entropy(logits[2], jnp.argmax(probabilities, axis=-1))
        return jnp.mean(supervised) + jnp.mean(unsupervised)

    @jax.jit
    def step(model, state, *batch):
        updates, state = optimizer.update(jax.grad(loss)(model.params, model, *batch), state, model.params)
        return model._replace(params=optax.apply_updates(model.params, updates)), state

    def train(model, batches):  # batches of (labelled images, labels, weak views, strong views)
        state = optimizer.init(model.params)
        for batch in batches:
            model, state = step(model, state, *batch)
        return model

    return train


def mean(models, sizes):
    return jax.tree.map(lambda *leaves: sum(n * leaf for n, leaf in zip(sizes, leaves)) / sum(sizes), *models)


def main(rounds=20, rng=np.random.default_rng(0)):  # noqa: B008
    config = base_config()
    config.data.update(source="digits", labels="clients", alpha=0.5)
    config.model.update(name="cnn", normalisation="group")
    data = load_dataset(config.data)
    partition = make_partition(data.y_train, data.num_classes, config.data, num_clients=20, seed=0)
    network = build_network(config, dataset_facts(data), KINDS[IMAGE])
    model, train = network.init(jax.random.key(0)), make_client(network, optax.sgd(0.03, momentum=0.9), threshold=0.8)
    shifted = lambda images: np.roll(images, rng.integers(-1, 2, 2), axis=(1, 2))  # noqa: E731
    for number in range(1, rounds + 1):
        trained, cohort = [], [partition.client_rows[client] for client in rng.choice(20, 8, replace=False)]
        for rows in cohort:
            known, batches = np.intersect1d(rows, partition.labelled_rows), []
            for few, many in ((rng.choice(known, 10), rng.choice(rows, 30)) for _ in range(20)):
                x, weak, strong = (shifted(data.x_train[own]) for own in (few, many, many))
                batches.append((x, data.y_train[few], weak, strong * (rng.random(strong.shape) > 0.2)))
            trained.append(train(model, batches))
        model = mean(trained, [len(rows) for rows in cohort])
        correct = jnp.argmax(network.predict(model, data.x_test).logits, axis=-1) == data.y_test
        print(f"round {number}: test accuracy {100 * jnp.mean(correct):.1f} %")


if __name__ == "__main__":
    main()
