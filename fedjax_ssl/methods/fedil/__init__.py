"""FedIL: Federated Incremental Learning from Decentralized Unlabeled Data with Convergence Analysis.

Yang, Yuan, Liu, Deng and Bao, 2023 (arXiv 2302.11823). What differs from FedAvg:
  1. the server trains before the clients. Its model theta_0 is sent with the global model theta', and a divergence in
     the loss keeps the clients' predictions near those of theta_0 (eq. 12);
  2. an image whose label has been confident, unchanged and confirmed by theta_0 k times in a row is added to the
     client's pseudo-label set permanently (eq. 14 to 21);
  3. uploads that point away from the server's update are left out of the mean (eq. 24 to 26).

docs/methods/fedil.md has what the paper leaves open.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, whole, word
from fedjax_ssl.client import (
    At,
    Batches,
    Deck,
    Examples,
    Loss,
    Plan,
    global_model,
    labels_for_report,
    local_training,
    qualify,
    threshold_of,
)
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import (
    CLASSIFIER,
    Broadcast,
    Cohort,
    Method,
    Metrics,
    Phase,
    Previous,
    Problem,
    Received,
    State,
    no_op,
)
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.fedil.client import Credibility, advance
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.batches import draw_with_replacement
from fedjax_ssl.ops.losses import cross_entropy, kl_divergence, mean_present
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import cosines, select
from fedjax_ssl.server import SERVER_MODEL, fedavg, train_server_model

# Eq. 25 is a plain mean. The paper has no training before the first round; then the global model, which learns from the
# labels through the clients alone, needs far more than a hundred rounds.
FIELDS = {"aggregation.weights": "uniform", "server.pretrain_epochs": 40}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments, IID
        "num_rounds": 2000,
        "clients_per_round": 5,
        "data.server_draw": "random",
        "data.partition": "iid",
        "server.augmentation": "weak",
        "server.pretrain_epochs": 0,
    },
    # Table II
    "no_label_set": {"fedil.label_set": False},
    "no_cosine": {"fedil.cosine_screening": False},
    "plain_fedil": {"fedil.label_set": False, "fedil.cosine_screening": False},
}
CREDIBILITY = "credibility"  # the entry of a client's memory
# The entry of `State.server` with the norms of the global model's last changes (Figure 4): float32 [20], newest first;
# NaN for future rounds.
INCREMENTS, AVERAGE_ROUNDS = "increments", 20


def defaults() -> Section:
    section = Section()
    section.successive = whole(7, least=1)  # k: equal labels in a row until a label joins the set (Table III: 2 to 8)
    section.count_per = word("round", "epoch")  # t of eq. 17 to 19 counts a client's rounds; 'epoch': its local epochs
    section.label_set = True  # whether there is a pseudo-label set (xi_c of eq. 14; Table II)
    section.cosine_screening = True  # whether uploads are screened, eq. 25 (Table II)
    return section


class LabelSet(NamedTuple):
    """A client's pseudo-label set D^l at the beginning of a round; positions count the client's examples."""

    set_labels: jax.Array  # int32 [n_max], labels of the set's members at the beginning of the round
    set_first: jax.Array  # int32 [n_max], positions, those of the set's members first
    set_size: jax.Array  # int32 []


def fedil(problem: Problem) -> Method:
    """Algorithms 1 and 2 as a Method."""
    options = problem.config.fedil

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        zeros = jnp.zeros(data.client_index.shape, jnp.int32)
        return {CREDIBILITY: Credibility(zeros, zeros, zeros.astype(bool))}

    def at_server(data: FederatedData, model: Model) -> dict[str, Any]:
        return {SERVER_MODEL: model, INCREMENTS: jnp.full(AVERAGE_ROUNDS, jnp.nan)}

    label = labels_for_report(problem, threshold_of(problem))
    frame = alternating(problem, (on_all_images(problem),), own, server=at_server, label=label)

    def same_direction(state: State, received: Received) -> jax.Array:
        """epsilon(S) of eq. 25 and 26: whether an update's cosine with the server's update is at least 0."""
        from_global = lambda tree: jax.tree.map(  # noqa: E731
            jnp.subtract, select(tree, CLASSIFIER), select(state.model.params, CLASSIFIER)
        )
        server_update = from_global(state.server[SERVER_MODEL].params)
        return cosines(from_global(received.uploads.model.params), server_update) >= 0

    aggregation = fedavg(problem, screened_by=same_direction if options.cosine_screening else None)

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        """Eq. 24 and 25; if no upload passes, theta' stays."""
        after, metrics = aggregation.aggregate(state, data, received, key)
        increments = jnp.concatenate([metrics["update_norm"][None], state.server[INCREMENTS][:-1]])
        after = after._replace(server={**after.server, INCREMENTS: increments})
        metrics["update_norm_average"] = jnp.nanmean(increments)
        if options.cosine_screening:
            metrics["screened_out"] = jnp.sum(received.accepted & ~same_direction(state, received))
        return after, metrics

    return frame._replace(
        server_before=lambda state, data, key: train_server_model(problem, state, data, key),  # eq. 22
        # Two models are sent, theta' and the server's theta_0.
        broadcast=lambda state, data, key: global_model(problem, state, extra=state.server[SERVER_MODEL]),
        aggregate=aggregate,
        server_after=no_op,
    )


def on_all_images(problem: Problem) -> Phase:
    """Algorithm 2: the three losses of a step, and the counts of its labels."""
    network, config, options = problem.network, problem.config.client, problem.config.fedil

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples, credibility = Examples.of(data, cohort), cohort.own[CREDIBILITY]
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        first = jnp.argsort(~credibility.in_set, axis=1, stable=True)
        members = LabelSet(credibility.label, first, jnp.sum(credibility.in_set, axis=1))
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size), members)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        members: LabelSet = at.work
        weak_key, strong_key, set_key, set_view_key = jax.random.split(at.key, 4)
        images, mask, positions = batch.unlabelled.inputs, batch.unlabelled.mask, batch.unlabelled.positions
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)  # eq. 7
        reference = network.predict(at.received.extra, weak).logits  # y_0 of eq. 10
        views = (weak, strong)
        if options.label_set:
            # A batch of D^l, with replacement. While the set is empty, the batch's images are used, with a loss of 0.
            places = draw_with_replacement(set_key, jnp.maximum(members.set_size, 1), config.batch_size)
            drawn = jnp.where(members.set_size > 0, members.set_first[places], positions)
            views += (problem.weak(set_view_key, at.data.inputs[at.decks["unlabelled"].rows[drawn]]),)

        outputs, batch_stats = network.train(model, views, mask)
        of_weak, of_strong = outputs[0].logits, outputs[1].logits
        labels, confident = qualify(jax.nn.softmax(of_weak), threshold_of(problem), strictly=False)
        pseudo_loss = cross_entropy(of_strong, labels, mask, confident)  # xi_a of eq. 12
        kl_loss = kl_divergence(reference, of_weak, mask)  # xi_b of eq. 12
        set_loss = jnp.float32(0.0)
        if options.label_set:  # xi_c, eq. 15
            set_loss = cross_entropy(outputs[2].logits, members.set_labels[drawn], mask & (members.set_size > 0))
        value = pseudo_loss + kl_loss + set_loss  # eq. 14
        agreed = jnp.argmax(reference, axis=-1).astype(jnp.int32) == labels  # eq. 18
        counts = mask & ((batch.unlabelled.epoch == config.epochs - 1) | (options.count_per == "epoch"))
        metrics = {
            "client_loss": value,
            "pseudo_loss": pseudo_loss,
            "kl_loss": kl_loss,
            "set_loss": set_loss,
            "confident_share": mean_present(confident, mask),
            "set_size": members.set_size.astype(jnp.float32),
        }
        # Eq. 17 to 21.
        counted = advance(at.own[CREDIBILITY], positions, labels, confident & agreed, counts, options.successive)
        return Loss(value, batch_stats, metrics, remember={CREDIBILITY: counted})

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size})


ENTRY = Entry(
    fedil,
    title="FedIL",
    paper="https://arxiv.org/abs/2302.11823",
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("threshold",),
    tiny={"confidence.threshold": 0.2, "fedil.successive": 1},
)
