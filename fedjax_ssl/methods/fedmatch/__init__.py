"""FedMatch: Federated Semi-Supervised Learning with Inter-Client Consistency and Disjoint Learning.

Jeong, Yoon, Yang and Hwang, ICLR 2021 (arXiv 2006.12097). What differs from FedAvg:
  1. the parameters are a sum, theta = sigma + psi. Labelled images train sigma and unlabelled images train psi, in
     alternate steps. If the server has the labels, it trains sigma, and clients train only psi;
  2. the unlabelled loss: on confident images, a client's predictions should agree with those of its helpers, the models
     of the most similar clients, and a strong view is trained towards the label for which most of these models vote.
     The loss also has |psi|_1, and on request (`l2_weight`) a distance between psi and sigma;
  3. messages are sparse: an entry is sent only if it has changed by more than a bound.

docs/methods/fedmatch.md has our reading of the paper.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.fields import Section, real, whole
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Loss,
    LossFunction,
    global_model,
    labels_of_received,
    make_confidence,
    own_confidence,
    own_optimizers,
    threshold_of,
)
from fedjax_ssl.client.labels import debiased
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.labels import clients_may_have_labels
from fedjax_ssl.engine import Method, Metrics, Problem, Received, State
from fedjax_ssl.engine.interface import completed, read_records, write_records
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.fedmatch.client import (
    SIGMA_OPTIMIZER,
    agreed_labels,
    disjoint_phase,
    helper_logits,
    inter_client_consistency,
)
from fedjax_ssl.methods.fedmatch.phases import (
    PLATEAU,
    PSI,
    SIGMA,
    after_epoch,
    cut_psi,
    distances,
    divided,
    fresh_plateau,
    merged,
    sparse_upload,
)
from fedjax_ssl.methods.fedmatch.server import (
    ENTRIES,
    SPARSE_WIRE_BYTES,
    Vectors,
    entries_of_helpers,
    entries_sent,
    nearest_clients,
    noise_image,
)
from fedjax_ssl.ops.losses import cross_entropy, mean_present
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated, select, with_rows, zeros_unless
from fedjax_ssl.server import (
    CLASSIFICATION,
    ServerPlan,
    fedavg,
    make_statistics,
    own_optimizer,
    supervised_loss,
    train_on_server_labels,
)

PARTS, VECTORS = "parts", "vectors"  # the server's memory: sigma and psi; uploads' outputs for a noise image
UPLOADS = "uploads"  # the server's record of each client: the parameters of its last upload, by part
# The code's weights of the losses: lambda_s of cross-entropy at clients and server, lambda_i of the divergence from the
# helpers' predictions, and lambda_a of the strong view's cross-entropy towards the voted label.
LABELLED, HELPERS, VOTED = 10.0, 0.01, 0.01

FIELDS = {
    "aggregation.weights": "uniform",
    "server.pretrain_epochs": 0,
    "server.augmentation": "weak",
    # lambda_s = 10 multiplies the step; gradients are not clipped, as in the paper.
    "client.learning_rate": 0.003,
    "server.learning_rate": 0.003,
    "server.pretrain_learning_rate": 0.005,
    "client.clip_norm": 0.0,
    "server.clip_norm": 0.0,
}
_SGD = {"epochs": 1, "learning_rate": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
_PAPER = {  # the setting of its experiments, except the rule for learning rates
    "num_rounds": 200,
    "clients_per_round": 5,
    "data.partition": "stratified",
    "data.normalisation": "none",
    "model.name": "resnet9",
    "model.normalisation": "none",
    "augment.flavour": "fedmatch",
    "augment.num_ops": 6,
    "augment.padding": 0,
    "augment.flip": "never",
    "fedmatch.l2_weight": 10.0,
    **{f"{side}.{field}": value for side in ("client", "server") for field, value in _SGD.items()},
}
_AT_SERVER = {  # values if the server has the labels
    "fedmatch.l1_weight": 1e-5,
    "fedmatch.smallest": 1e-5,
    "fedmatch.least_change": 1e-5,
    "fedmatch.patience": 20,
}
VARIANTS: Variants = {
    "labels_at_client": {
        **_PAPER,
        "data.labels": "clients",
        "data.labels_per_class": 5,
        "client.batch_size": 10,
        "fedmatch.l1_weight": 1e-4,
        "fedmatch.smallest": 5e-6,
        "fedmatch.least_change": 5e-5,
        "fedmatch.patience": 5,
    },
    "labels_at_server": {
        **_PAPER,
        "data.labels": "server",
        "data.server_labels": 1000,
        "client.batch_size": 100,
        "server.batch_size": 100,
        **_AT_SERVER,
    },
    "at_server": _AT_SERVER,  # for the setting of another config file
    "non_iid": {"data.partition": "profiles"},
    "no_helpers": {"fedmatch.helpers": 0},
    "public_code": {"confidence.threshold": 0.75},
}


def defaults() -> Section:
    section = Section()
    section.helpers = whole(2, least=0)  # H, number of clients whose psi a client gets; 0: none
    # Interval in rounds at which helpers are sent; they are used in that round only.
    section.helper_interval = whole(10, least=1)
    section.l2_weight = real(0.0, least=0)  # lambda_L2 of |sigma - psi|^2; 10 in the paper, worse from new weights
    section.l1_weight = real(1e-4, least=0)  # lambda_L1 of |psi|_1; with labels at the server the paper has 1e-5
    # l1_thres: entries of psi up to this magnitude count as 0 in messages and in tests; with labels at the server 1e-5.
    section.smallest = real(5e-6, least=0)
    # delta_thres: entries that changed by no more than this are not sent; with labels at the server 1e-5.
    section.least_change = real(5e-5, least=0)
    # Whether messages to clients count as sparse too: only what differs from the client's last upload. The server then
    # stores two models for each client instead of one.
    section.sparse_down = True
    # The learning rate of a client (or of the server, if it has the labels) is divided by 3 after this many visits
    # without a new lowest training loss; 0: never. With labels at the server the paper has 20.
    section.patience = whole(5, least=0)
    return section


def fedmatch(problem: Problem) -> Method:
    """Both algorithms, labels at the clients and labels at the server, as a Method."""
    config, network, options = problem.config, problem.network, problem.config.fedmatch
    rule = make_confidence(problem, threshold_of(problem, 0.85), hard=True)
    clients_train = (SIGMA, PSI) if clients_may_have_labels(config.data) or config.data.reveal_labels else (PSI,)
    aggregation = fedavg(problem, parts=clients_train)

    def init(data: FederatedData, key: jax.Array) -> State:
        """Draws sigma, and sets psi to a fifth of it; a given model is split into such a sum."""
        init_key, train_key = jax.random.split(key)
        model = network.init(init_key)
        parts = divided(model.params, is_sum=network.given is not None)
        model = model._replace(params=parts)
        nothing = jax.tree.map(jnp.zeros_like, parts if options.sparse_down else {PSI: parts[PSI]})
        server = {
            VECTORS: Vectors(jnp.zeros((config.num_clients, problem.num_classes)), jnp.zeros(config.num_clients, bool)),
            PLATEAU: fresh_plateau(),
            **aggregation.init(parts),
            **own_optimizer(problem, model, (SIGMA,)),
        }
        own = {
            PLATEAU: fresh_plateau((len(data.ids),)),
            **own_confidence(problem, data, rule),
            **own_optimizers(problem, data, model, (PSI,)),
        }
        if SIGMA in clients_train:
            own |= own_optimizers(problem, data, model, (SIGMA,), SIGMA_OPTIMIZER)
        records = repeated(nothing, len(data.record_ids))
        state = State(jnp.int32(0), model, server, own, {UPLOADS: records})
        rate = jnp.float32(config.server.pretrain_learning_rate)
        memory = CLASSIFICATION if config.server.pretrain_persistent else None
        state, _ = train_sigma(problem, state, data, train_key, rate, config.server.pretrain_epochs, memory)
        return with_sum(state, options.smallest)

    def server_before(state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
        plateau, rate = state.server[PLATEAU], learning_rate_at(config, config.server.learning_rate, state.round)
        rate, epochs = rate * plateau.factor, config.server.epochs
        state, metrics = train_sigma(problem, with_parts(state), data, key, rate, epochs, CLASSIFICATION)
        if metrics and options.patience:
            plateau = after_epoch(plateau, metrics["server_loss"], options.patience)
        return with_sum(state._replace(server={**state.server, PLATEAU: plateau}), options.smallest), metrics

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        """The uniform mean of the parts that clients train; the server keeps each client's psi and vector."""
        state = with_parts(state)
        after, metrics = aggregation.aggregate(state, data, received, key)
        models = jax.vmap(lambda model: completed(state.model, model))(received.uploads.model)
        noise = noise_image(data.inputs.shape[1:])
        outputs = jax.lax.map(lambda model: network.probabilities(model, noise)[0], merged(models))
        new = Vectors(outputs, received.accepted)
        vectors = with_rows(state.server[VECTORS], received.clients, new, received.accepted)
        uploads = select(models.params, tuple(state.records[UPLOADS]))
        after = write_records(after, data, received, {UPLOADS: uploads})
        return with_sum(after._replace(server={**after.server, VECTORS: vectors}), options.smallest), metrics

    # In each step of a client sigma learns by L_s, if it has labels, then psi by L_u.
    phase = disjoint_phase(problem, clients_train, labelled_loss(problem), unlabelled_loss(problem, rule))
    personal, recalls = messages(problem)
    of_received = labels_of_received(problem, rule)
    return Method(
        init=init,
        server_before=server_before,
        broadcast=lambda state, data, key: global_model(
            problem, with_parts(state), extra=helpers_travel(options, state)
        ),
        personal=personal,
        recalls=recalls,
        label=lambda received, *others: of_received(received._replace(model=merged(received.model)), *others),
        phases=(sparse_upload(phase, options.least_change, options.smallest),),
        aggregate=aggregate,
        statistics=make_statistics(network, config),
        wire_bytes=SPARSE_WIRE_BYTES,
    )


# --- The model in two parts, and what is tested. ----------------------------------------------------------------------


def with_parts(state: State) -> State:
    """The state whose model is sigma and psi, apart."""
    return state._replace(model=Model(state.server[PARTS], state.model.batch_stats))


def with_sum(state: State, smallest: float) -> State:
    """The state whose model is theta = sigma + psi, in which the smallest entries of psi are 0."""
    parts = state.model.params
    tested = merged(state.model._replace(params=cut_psi(parts, smallest)))
    return state._replace(model=tested, server={**state.server, PARTS: parts})


def train_sigma(
    problem: Problem, state: State, data: FederatedData, key: jax.Array, rate, epochs: int, memory: str | None
) -> tuple[State, Metrics]:
    """Epochs of lambda_s CE(y, f(x; sigma + psi)) on the server's images, if it has any; psi is not changed."""
    cross_entropy_of = supervised_loss(problem, data)

    def loss(model: Model, *batch):
        value, aux = cross_entropy_of(merged(model), *batch)
        return LABELLED * value, aux

    plan = ServerPlan(loss, epochs, (SIGMA,), memory=memory)
    return train_on_server_labels(problem, state, data, key, rate, plan)


# --- Messages to clients: sigma and psi to all; in every tenth round also the helpers' psi to each client. ------------


def helpers_travel(options: ConfigDict, state: State) -> jax.Array:
    """Whether helpers are sent in this round, bool []."""
    return (state.round + 1) % options.helper_interval == 0


def messages(problem: Problem) -> tuple[Callable[..., dict[str, Any]], Callable[[State, jax.Array], jax.Array] | None]:
    """The method's stages `personal` and `recalls`."""
    options = problem.config.fedmatch
    num_helpers = min(options.helpers, problem.config.num_clients - 1)

    def recalls(state: State, clients: jax.Array) -> jax.Array:
        """The helpers of each client, int32 [M, H]; -1: none."""
        near, known = nearest_clients(state.server[VECTORS], clients, num_helpers)
        return jnp.where(known & helpers_travel(options, state), near, -1)

    def personal(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> dict[str, Any]:
        """The helpers' psi, whether each is present, and the number of parameter entries sent to each client."""
        held = read_records(state, data, clients)[UPLOADS]  # what a client has: its last upload
        seen = state.server[VECTORS].seen[clients]
        entries = entries_sent(options, state.server[PARTS], held, seen)
        if not num_helpers:
            return {ENTRIES: entries}
        near = recalls(state, clients)
        present = near >= 0
        helpers = zeros_unless(helpers_travel(options, state), lambda: read_records(state, data, near)[UPLOADS][PSI])
        entries += entries_of_helpers(options, helpers, present, held[PSI])
        return {ENTRIES: entries, "helpers": helpers, "present": present}

    return personal, recalls if num_helpers else None


# --- The losses of a client's step. -----------------------------------------------------------------------------------


def labelled_loss(problem: Problem) -> LossFunction:
    """L_s = lambda_s l(f(alpha(x); sigma + psi), y), which trains sigma."""

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        known = batch.labelled
        images = problem.weak(at.key, known.inputs)

        (outputs,), batch_stats = problem.network.train(merged(model), (images,), known.mask)
        value = cross_entropy(outputs.logits, known.labels, known.mask)
        # Without labels there is no step: momentum and weight decay would still move sigma.
        return Loss(LABELLED * value, batch_stats, {"labelled_loss": value}, counts=jnp.any(known.mask))

    return loss


def unlabelled_loss(problem: Problem, rule: Confidence) -> LossFunction:
    """L_u, which trains psi: consistency with helpers, the voted label for a strong view, the L1 and L2 terms."""
    network, options = problem.network, problem.config.fedmatch

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, (weak_key, strong_key) = batch.unlabelled.inputs, batch.unlabelled.mask, jax.random.split(at.key)
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)
        helpers, present = helper_logits(problem, at.received, at.work.personal, weak)

        (of_weak, of_strong), batch_stats = network.train(merged(model), (weak, strong), mask)
        voting, votes = (debiased(logits, at.labels.prior) for logits in (of_weak.logits, helpers))
        guess, weights = rule.label(at.labels, jax.nn.softmax(voting))
        confident = mask & (weights > 0)  # Q
        helper_loss = inter_client_consistency(helpers, present, of_weak.logits, confident)
        pseudo_loss = cross_entropy(of_strong.logits, agreed_labels(guess, votes, present), confident)
        l1, l2 = distances(model.params)
        value = HELPERS * helper_loss + VOTED * pseudo_loss
        value += options.l1_weight * l1 + options.l2_weight * l2
        metrics = {"client_loss": value, "helper_loss": helper_loss, "pseudo_loss": pseudo_loss}
        return Loss(value, batch_stats, {**metrics, "confident_share": mean_present(confident, mask)})

    return loss


ENTRY = Entry(
    fedmatch,
    title="FedMatch",
    paper="https://arxiv.org/abs/2006.12097",
    settings=("clients", "server", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    images_alone="compares clients by what their models say of an image of noise",
    tiny={"confidence.threshold": 0.15, "fedmatch.helper_interval": 1},
)
