"""BSemiFL: Semi-supervised Federated Learning via a Bayesian Approach.

Wang, Wang, Li, Ren, Han, Xu, Guo, Zhang and Li, ICML 2025 (PMLR 267). The server has labels. What differs from SemiFL,
by the abstract and a summary of its Algorithm 1:
  1. a client keeps its local model, and re-labels its images by the received (global) and the local model together;
  2. the server trains the global model on its labels, and sends with it a sum of sampling probabilities. The closeness
     of each model to an image follows by Bayesian inference;
  3. the pseudo-label is the combination of both models' predictions, weighted by their closeness.

**All else is inferred**, since no equation could be read and no code is public: an image's sampling probability is the
density that a classifier implies (Grathwohl et al., ICLR 2020), both models have the same prior, the local model is
that of the client's last round, labels are hard and need confidence, and there is no mixup. docs/methods/bsemifl.md
says more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Deck,
    Examples,
    Loss,
    Plan,
    global_model,
    local_training,
    make_confidence,
    threshold_of,
)
from fedjax_ssl.client.labels import as_told, label_by_scores, logits_of_each
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Label, Labels, Method, Phase, Previous, Problem, State
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated, where_rows

LOCAL, HAS_LOCAL = "local_model", "has_local_model"  # entries of a client's memory


def bsemifl(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method; the server's training closes a round instead of opening it."""
    rule = make_confidence(problem, threshold_of(problem))
    label, phases = label_by_closeness(problem, rule), (on_accepted(problem),)
    method = alternating(problem, phases, own=own_models, label=label, rule=rule)

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        """The global model, and the logarithm of its sum of sampling probabilities over the labelled images."""

        def masses(rows: jax.Array) -> jax.Array:
            return log_mass(problem.network.predict(state.model, data.inputs[rows]).logits)

        of_labelled = map_batches(masses, data.server_index, problem.config.eval_batch_size)
        return global_model(problem, state, extra=jax.nn.logsumexp(of_labelled))

    return method._replace(broadcast=broadcast)


def own_models(data: FederatedData, model: Model) -> dict[str, Any]:
    """The entries of `State.clients`, leaves [K, ...]: each client's local model, and whether it has one yet."""
    number = len(data.ids)
    return {LOCAL: repeated(model, number), HAS_LOCAL: jnp.zeros(number, bool)}


def log_mass(logits: jax.Array) -> jax.Array:
    """log sum_c exp f_c(x), float32 [...], the logarithm of an image's sampling probability times a constant."""
    return jax.nn.logsumexp(logits, axis=-1)


def closeness(of_global: jax.Array, of_local: jax.Array, log_sum: jax.Array, present: jax.Array) -> jax.Array:
    """p(global model | x) = p_g(x) / (p_g(x) + p_l(x)), float32 [M, n]; the rest is that of the local model.

    p(x) is exp of `log_mass` of a model's logits, float32 [M, n, C], divided by its sum: the received one over the
    server's labelled images (`log_sum` is its logarithm), or over the client's images that are `present`, bool [M, n].
    """
    own_mass = log_mass(of_local)
    own_sum = jax.nn.logsumexp(jnp.where(present, own_mass, -jnp.inf), axis=1, keepdims=True)
    return jax.nn.sigmoid((log_mass(of_global) - log_sum) - (own_mass - own_sum))


def label_by_closeness(problem: Problem, rule: Confidence) -> Label:
    """Labels by w_g f_g(x) + (1 - w_g) f_l(x). A client without a local model has the received one as such."""

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)
        whole = repeated(received.model, len(cohort.clients))
        local = where_rows(cohort.own[HAS_LOCAL], cohort.own[LOCAL], whole)
        of_global, of_local = logits_of_each(problem, received.model, (local,), data.inputs, examples)
        share = closeness(of_global, of_local, received.extra, examples.present)
        weight = share[..., None]
        scores = weight * jax.nn.softmax(of_global) + (1 - weight) * jax.nn.softmax(of_local)
        made = label_by_scores(problem, as_told(data, examples.rows, scores), examples, rule)
        facts = {**made.report.facts, "global_closeness": share}
        return made._replace(report=made.report._replace(facts=facts))

    return label


def on_accepted(problem: Problem) -> Phase:
    """A client's epochs on strong views of the images whose labels count; it keeps the model as its local one."""
    network, config = problem.network, problem.config.client

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, cohort.labels.report.qualified, examples.keys, config.epochs)
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, positions = batch.unlabelled.inputs, batch.unlabelled.mask, batch.unlabelled.positions
        (strong,), batch_stats = network.train(model, (problem.strong(at.key, images),), mask)
        labels, weights = at.labels.report.labels[positions], at.labels.weights[positions]
        value = cross_entropy(strong.logits, labels, mask, weights)
        return Loss(value, batch_stats, {"client_loss": value})

    def after(own: Mapping[str, Any], model: Model) -> dict[str, Any]:
        return {LOCAL: model, HAS_LOCAL: jnp.bool_(True)}

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size}, after=after)


ENTRY = Entry(
    bsemifl,
    title="BSemiFL",
    paper="https://proceedings.mlr.press/v267/wang25dc.html",
    mislabels=True,
    tiny={"confidence.threshold": 0.2},
)
