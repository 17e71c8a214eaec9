"""A method with two models at each client that label images for each other: docs/how_to/change_a_method.md.

python launch.py --config.method=examples/co_training.py:co_training --config.data.labels=clients
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.client import Loss, labelled_phase, unlabelled_phase
from fedjax_ssl.client.confidence import mean_present
from fedjax_ssl.engine import CLASSIFIER, Method, Problem
from fedjax_ssl.methods import Entry, Section, alternating, share
from fedjax_ssl.models.network import companion_model, with_companion_statistics
from fedjax_ssl.ops.losses import cross_entropy

PARTS = (*CLASSIFIER, "peer")


def defaults() -> Section:
    section = Section()
    section.momentum = share(0.9)  # momentum of the remembered agreement
    section.threshold = share(0.95)  # a label counts if its probability reaches it
    return section


def build(problem: Problem) -> Method:
    network, peer = problem.network, problem.network.companions["peer"]
    options = problem.config.co_training

    def passed(model, views, mask):
        (first,), stats = network.train(model, (views,), mask)
        (second,), own = peer.train(companion_model(model, "peer"), (views,), mask)
        return first.logits, second.heads["votes"], with_companion_statistics(stats, "peer", own)

    def label(logits):
        return jnp.argmax(logits, axis=-1), jnp.max(jax.nn.softmax(logits), axis=-1) >= options.threshold

    def on_labels(model, batch, at) -> Loss:
        known = batch.labelled
        first, second, stats = passed(model, problem.weak(at.key, known.inputs), known.mask)
        value = sum(cross_entropy(logits, known.labels, known.mask) for logits in (first, second))
        return Loss(value, stats, {"labelled_loss": value})

    def on_the_rest(model, batch, at) -> Loss:
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        weak_key, strong_key = jax.random.split(at.key)
        weak = problem.weak(weak_key, images)
        by_first, sure_first = label(network.predict(model, weak).logits)
        by_second, sure_second = label(peer.predict(companion_model(model, "peer"), weak).heads["votes"])
        first, second, stats = passed(model, problem.strong(strong_key, images), mask)
        of_first = cross_entropy(first, by_second, mask, sure_second)
        of_second = cross_entropy(second, by_first, mask, sure_first)
        value = at.own["agreement"] * (of_first + of_second)
        agreed = mean_present(by_first == by_second, mask)
        agreement = options.momentum * at.own["agreement"] + (1 - options.momentum) * agreed
        return Loss(value, stats, {"unlabelled_loss": value}, remember={"agreement": agreement})

    def own(data, model):  # the clients' memory before the first round, leaves [K, ...]
        return {"agreement": jnp.zeros(len(data.ids))}

    phases = labelled_phase(problem, on_labels, PARTS), unlabelled_phase(problem, on_the_rest, PARTS)
    return alternating(problem, phases, own, parts=PARTS)


co_training = Entry(
    build,
    defaults=defaults,
    settings=("clients", "some_clients"),
    companions={"peer": lambda config: {"votes": None}},
)
