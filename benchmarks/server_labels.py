"""Measures what FedAnchor's server alone teaches: how well its two heads label images that nobody trained on, by round.

    python benchmarks/server_labels.py --rounds=0,10,20 --config=configs/fedanchor_cifar10.py:paper,resnet8,plain \\
        --config.data.examples_per_client=100 --config.data.validation=2000

No client trains: a round is the server's two epochs on its anchors. NumPy computes labels of the held-out images
(data.validation) from the network's outputs, with plain cosines (FedAnchor's eq. 3) and with cosines as seen from the
anchors' mean (`fedanchor.centred`). Prints a table with a row for each of --rounds:

    anchors right       by the classification head, on the anchors themselves: how far they are fitted
    classifier          percent of correct labels among the most confident tenth, the most confident 30 %, and all
    cosine, centred     the same, with confidence by the cosine; then for each threshold the share that passes (and is
                        right): 0.6, and the quantiles 0.25 and 0.5 of the anchors' own leave-one-out scores
    common              length of the mean of the unit embeddings of the unseen images: anchor head, backbone
    within - between    mean cosine of two images of one class, and of two classes: anchors; unseen images
    dead                percent of backbone features that are zero for every unseen image
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import describe

from fedjax_ssl.config import parse_config
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.methods.fedanchor import HEAD
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.validation import validate

SURE = (0.1, 0.3, 1.0)
QUANTILES = (0.25, 0.5)
COLUMNS = (
    "round", "anchors right", "classifier", "cosine", "> 0.6", "> q.25", "> q.5", "centred", "> 0.6", "> q.25",
    "> q.5", "common", "within - between, anchors", "unseen", "dead",
)  # fmt: skip


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a zero row stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


def of_the_surest(sureness: np.ndarray, right: np.ndarray) -> str:
    """Percent of correct labels among the most confident parts of all images."""
    ranked = right[np.argsort(-sureness)]
    return " ".join(f"{100 * ranked[: int(part * len(ranked))].mean():.0f}" for part in SURE)


def by_cosine(anchors: np.ndarray, labels: np.ndarray, images: np.ndarray, truth: np.ndarray) -> list[str]:
    """Eq. 3's labels, and which thresholds let through how many."""
    anchors, images, classes = unit(anchors), unit(images), np.arange(labels.max() + 1)
    similarities = anchors @ anchors.T
    np.fill_diagonal(similarities, np.nan)
    own = np.array([np.nanmean(row[labels == label]) for row, label in zip(similarities, labels)])
    scores = np.stack([(images @ anchors[labels == c].T).mean(axis=1) for c in classes], axis=1)
    best, right = scores.max(axis=1), scores.argmax(axis=1) == truth
    cells = [of_the_surest(best, right)]
    for threshold in (0.6, *(np.nanquantile(own, quantile) for quantile in QUANTILES)):
        passes = best > threshold
        cells.append(f"{100 * passes.mean():.0f} ({100 * right[passes].mean():.0f})" if passes.any() else "0 (-)")
    return cells


def within_and_between(vectors: np.ndarray, labels: np.ndarray) -> str:
    """Mean cosine over pairs of one class and of two."""
    similarities, same = unit(vectors) @ unit(vectors).T, labels[:, None] == labels[None, :]
    others = ~np.eye(len(labels), dtype=bool)
    return f"{similarities[same & others].mean():.2f} - {similarities[~same].mean():.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", default="0,10,20", help="of the server, after which a row is printed")
    parser.add_argument("--config", required=True)
    options, overrides = parser.parse_known_args()
    config = parse_config(options.config, overrides)
    validate(config)
    if config.method != "fedanchor" or not config.data.validation:
        sys.exit("this is about fedanchor, and needs held-out images: --config.data.validation=N")
    shown = sorted({int(number) for number in options.rounds.split(",")})
    with use_machine(config) as machine:
        experiment = build_experiment(config)
        method, network, data = experiment.method, experiment.problem.network, experiment.data

        @machine.jit
        def outputs_of(model):
            def outputs(images):
                found = network.predict(model, images)
                return found.heads[HEAD], jax.nn.softmax(found.logits), found.features

            rows = jnp.concatenate([data.server_index, data.validation_index])
            return map_batches(outputs, data.inputs[rows], config.eval_batch_size)

        def one_round(state, key):
            state, _ = method.server_after(state, data, key)
            return method.statistics(state, data, jnp.zeros((0,), jnp.int32), key)

        train = machine.jit(one_round)
        state = machine.jit(lambda data: initialise(experiment, data))(data)
        print(f"# {' '.join(sys.argv[1:])}\n# {describe()}\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        truth = np.asarray(experiment.hidden_labels)
        labels, unseen = truth[np.asarray(data.server_index)], truth[np.asarray(data.validation_index)]
        for number in range(max(shown) + 1):
            if number in shown:
                head, probabilities, features = (np.asarray(leaf, np.float64) for leaf in outputs_of(state.model))
                size, right = len(labels), probabilities.argmax(axis=1) == np.concatenate([labels, unseen])
                anchors, images = head[:size], head[size:]
                row = [number, f"{100 * right[:size].mean():.0f}"]
                row += [of_the_surest(probabilities[size:].max(axis=1), right[size:])]
                for centre in (0.0, anchors.mean(axis=0)):
                    row += by_cosine(anchors - centre, labels, images - centre, unseen)
                row += [" ".join(f"{np.linalg.norm(unit(x[size:]).mean(axis=0)):.2f}" for x in (head, features))]
                row += [within_and_between(anchors, labels), within_and_between(images, unseen)]
                row += [f"{100 * np.mean(features[size:].max(axis=0) <= 0):.0f}"]
                print(f"| {' | '.join(map(str, row))} |", flush=True)
            state = train(state, jax.random.fold_in(jax.random.key(config.seed), number))
            state = state._replace(round=state.round + 1)


if __name__ == "__main__":
    main()
