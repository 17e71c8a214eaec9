"""FedMatch: Federated Semi-Supervised Learning with Inter-Client Consistency and Disjoint Learning.

Jeong, Yoon, Yang and Hwang, ICLR 2021 (arXiv 2006.12097). What differs from FedAvg:
  1. the parameters are a sum, theta = sigma + psi: labelled images train sigma, unlabelled ones psi, in turn. Where
     the server has the labels it trains sigma, and clients psi alone;
  2. the unlabelled loss: agreement of the client's model with those of the clients most like it, its helpers, on
     confident images; a strong view of these towards the label that most of the models vote for; |psi|_1, and a
     distance of psi from sigma;
  3. messages are sparse: an entry travels where it has changed by more than a bound.

Where the paper's text leaves a value open, it is that of the public code. Its learning rates fall by the loss of 2,000
labelled validation images, which every client has; here no method sees such labels, so they fall by the loss that a
client (or the server) has in its own training.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.client import Batch, Deck, Examples, Loss, global_model, label_cohort, local_sgd
from fedjax_ssl.client import own_optimizers, own_thresholds, qualify
from fedjax_ssl.client.compose import PLATEAU, in_turn, sparse_upload, with_plateau
from fedjax_ssl.engine import Jobs, Method, Phase, Problem, Received, State, WireBytes, no_op
from fedjax_ssl.engine.interface import completed
from fedjax_ssl.learning import sparse
from fedjax_ssl.learning.losses import cross_entropy, kl_divergence
from fedjax_ssl.learning.plateau import after_epoch, fresh_plateau
from fedjax_ssl.learning.schedule import learning_rate_at
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import row, tree_bytes
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.server import CLASSIFICATION, fedavg, own_optimizer, supervised_loss, train_on_anchors
from fedjax_ssl.server.similar_clients import embed_models, nearest_clients

SIGMA, PSI = "sigma", "psi"  # the parts of the parameters, each a whole model's
SIGMA_OPTIMIZER = "sigma_optimizer"  # the entry in a client's memory of the optimiser of sigma; psi has the usual one
# Entries of the server's memory: sigma and psi; what each client uploaded last, its vector, and whether it ever did.
PARTS, UPLOADED, VECTORS, SEEN = "parts", "uploaded", "vectors", "seen"

FIELDS = {"aggregation.weights": "uniform", "server.pretrain_epochs": 0, "server.augmentation": "weak"}
_PAPER = {  # the setting of its experiments, besides the learning rates' rule
    "num_rounds": 200,
    "clients_per_round": 5,
    "data.partition": "iid",
    "data.standardise": False,
    "model.name": "resnet9",
    "model.normalisation": "none",
    "augment.flavour": "fedmatch",
    "augment.num_ops": 6,
    "augment.padding": 0,
    "augment.flip": "never",
    **{
        f"{side}.{field}": value
        for side in ("client", "server")
        for field, value in {
            "epochs": 1,
            "learning_rate": 1e-3,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "clip_norm": 0.0,
        }.items()
    },
}
VARIANTS = {
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
        "data.num_anchors": 1000,
        "client.batch_size": 100,
        "server.batch_size": 100,
        "fedmatch.l1_weight": 1e-5,
        "fedmatch.smallest": 1e-5,
        "fedmatch.least_change": 1e-5,
        "fedmatch.patience": 20,
    },
    "non_iid": {"data.partition": "profiles"},
    "no_helpers": {"fedmatch.helpers": 0},
    "public_code": {"fedmatch.threshold": 0.75, "fedmatch.shuffle": False},
}


def defaults() -> ConfigDict:
    """The section `config.fedmatch`."""
    section = ConfigDict()
    section.threshold = 0.85  # tau; a prediction counts from it on. The public code has 0.75
    section.helpers = 2  # H, the clients whose psi a client gets; 0: none
    section.helper_interval = 10  # rounds from one sending of helpers to the next; they serve in that round alone
    section.labelled_weight = 10.0  # lambda_s of cross-entropy, at clients and server
    section.helper_weight = 0.01  # lambda_i of the divergence from the helpers' predictions
    section.pseudo_weight = 0.01  # lambda_a of the strong view's cross-entropy towards the label of the vote
    section.l2_weight = 10.0  # lambda_L2 of |sigma - psi|^2; it draws psi towards sigma
    section.l1_weight = 1e-4  # lambda_L1 of |psi|_1; with labels at the server the paper has 1e-5
    section.smallest = 5e-6  # entries of psi of this size or less are 0 in messages and tests; at the server 1e-5
    section.least_change = 5e-5  # entries that changed by this or less do not travel; with labels at the server 1e-5
    section.index_bytes = 0  # of an entry's position in a sparse message; the paper counts values alone, 4 bytes each
    # Whether messages down are counted as sparse too, against what a client has: the server then remembers two models
    # for each of all clients, instead of one.
    section.sparse_down = True
    # The learning rate of a client (of the server, if it has the labels) is divided by 3 after so many of its visits
    # without a new lowest loss in training; 0: never. With labels at the server the paper has 20.
    section.patience = 5
    # At clients with labels an epoch has as many unlabelled batches as labelled ones, and their size follows; it is at
    # most this, else there are more steps. 450 unlabelled images beside 50 labelled ones make 5 batches of 90.
    section.unlabelled_batch = 102
    section.shuffle = True  # False: batches in the same order in each round, as in the public code
    return section


class Work(NamedTuple):
    """What one client trains on.

    Attributes:
        deck: its unlabelled examples.
        batches: int32 [], of an epoch.
        size: int32 [], unlabelled examples of a batch.
        labelled: its labelled examples; None if no client has any.
        thresholds: float32 [C], for each class.
        personal: the message to this client alone.
    """

    deck: Deck
    batches: jax.Array
    size: jax.Array
    labelled: Deck | None
    thresholds: jax.Array
    personal: dict[str, Any]


def whole(model: Model) -> Model:
    """theta = sigma + psi, from a model of the two parts."""
    return Model(jax.tree.map(jnp.add, model.params[SIGMA], model.params[PSI]), model.batch_stats)


def nearest_number(count: jax.Array, size: int) -> jax.Array:
    """Batches of an epoch: count / size to the nearest whole number, at least one; the last one may be short."""
    return jnp.maximum(jnp.round(count / size).astype(jnp.int32), 1)


def clients_have_labels(problem: Problem) -> bool:
    """Whether clients train sigma."""
    return problem.config.data.labels != "server" or problem.config.data.reveal_labels


def fedmatch(problem: Problem) -> Method:
    """Algorithms 1 (labels at the clients) and 2 (labels at the server) as a Method."""
    config, network, options = problem.config, problem.network, problem.config.fedmatch
    parts = (SIGMA, PSI) if clients_have_labels(problem) else (PSI,)
    num_helpers = min(options.helpers, config.num_clients - 1)
    aggregation = fedavg(problem, parts=parts)
    frame = alternating(problem, (local_training(problem, parts),))

    def apart(state: State) -> State:
        """The state with sigma and psi for its model."""
        return state._replace(model=Model(state.server[PARTS], state.model.batch_stats))

    def together(state: State) -> State:
        """What is tested: theta = sigma + psi without the small entries of psi."""
        sigma, psi = state.model.params[SIGMA], state.model.params[PSI]
        theta = whole(state.model._replace(params={SIGMA: sigma, PSI: sparse.cut(psi, options.smallest)}))
        return state._replace(model=theta, server={**state.server, PARTS: state.model.params})

    def init(data, key) -> State:
        init_key, train_key = jax.random.split(key)
        model = network.init(init_key)
        model = model._replace(params={SIGMA: model.params, PSI: jax.tree.map(lambda leaf: 0.2 * leaf, model.params)})
        nobody = jnp.zeros(config.num_clients, bool)
        remembered = {SIGMA, PSI} if options.sparse_down else {PSI}
        tables = {name: jax.tree.map(lambda leaf: jnp.zeros((len(nobody), *leaf.shape)), model.params[name])
                  for name in remembered}  # fmt: skip
        server = {
            UPLOADED: tables,
            VECTORS: jnp.zeros((len(nobody), problem.num_classes)),
            SEEN: nobody,
            PLATEAU: fresh_plateau(),
            **aggregation.init(model.params),
            **own_optimizer(config.server, model, (SIGMA,), CLASSIFICATION),
        }
        clients = {
            PLATEAU: fresh_plateau((config.num_clients,)),
            **own_thresholds(problem),
            **own_optimizers(problem, model, (PSI,)),
            **(own_optimizers(problem, model, (SIGMA,), SIGMA_OPTIMIZER) if SIGMA in parts else {}),
        }
        state = State(jnp.int32(0), model, server, clients)
        rate = jnp.float32(config.server.pretrain_learning_rate)
        return together(train_sigma(state, data, train_key, rate, config.server.pretrain_epochs)[0])

    def train_sigma(state: State, data, key, rate, epochs, memory=None):
        """L_s on the server's images, of sigma; psi stays."""
        loss = supervised_loss(problem, data, config.server.augmentation)

        def weighted(model, *batch):
            value, aux = loss(whole(model), *batch)
            return options.labelled_weight * value, aux

        order = key if options.shuffle else jax.random.key(0)
        size, sizes = config.server.batch_size, {"parts": (SIGMA,), "epochs": epochs, "memory": memory}
        return train_on_anchors(state, data, weighted, config.server, rate, order, batch_size=size, **sizes)

    def server_before(state: State, data, key):
        """Labels at the server: it trains sigma, at a learning rate of its own."""
        plateau = state.server[PLATEAU]
        rate = learning_rate_at(config, config.server.learning_rate, state.round) * plateau.factor
        state, metrics = train_sigma(apart(state), data, key, rate, config.server.epochs, CLASSIFICATION)
        if metrics and options.patience:
            plateau = after_epoch(plateau, metrics["server_loss"], options.patience)
        return together(state._replace(server={**state.server, PLATEAU: plateau})), metrics

    def helpers_travel(state: State) -> jax.Array:
        return (state.round + 1) % options.helper_interval == 0

    def personal(state: State, data, clients, key):
        """The psi of the nearest clients; and how many entries of sigma and psi are new to a client, all at first."""
        current, uploaded = state.server[PARTS], state.server[UPLOADED]
        sent = jnp.full(len(clients), float(sum(leaf.size for leaf in jax.tree.leaves(current))))
        if options.sparse_down:
            new = lambda held: sparse.count(sparse.differs(current, held, options.least_change))  # noqa: E731
            sent = jnp.where(state.server[SEEN][clients], jax.vmap(new)(row(uploaded, clients)), sent)
        if not num_helpers:
            return {"entries": sent}
        near, known = nearest_clients(state.server[VECTORS], state.server[SEEN], clients, num_helpers)
        return {"entries": sent, "helpers": row(uploaded[PSI], near), "present": known & helpers_travel(state)}

    def aggregate(state: State, data, received: Received, key):
        """The uniform mean of what was uploaded; each client's psi, and the vector of its model, are remembered."""
        state = apart(state)
        after, metrics = aggregation.aggregate(state, data, received, key)
        models = jax.vmap(lambda model: completed(state.model, model))(received.uploads.model)
        vectors = embed_models(network, whole, models, data.images.shape[1:])
        place = jnp.where(received.accepted, received.clients, config.num_clients)  # beyond the end: dropped
        put = lambda table, rows: table.at[place].set(rows, mode="drop")  # noqa: E731
        tables = {name: jax.tree.map(put, table, models.params[name]) for name, table in state.server[UPLOADED].items()}
        memory = {UPLOADED: tables, VECTORS: put(state.server[VECTORS], vectors), SEEN: put(state.server[SEEN], True)}
        return together(after._replace(server={**after.server, **memory})), metrics

    entry_bytes = 4 + options.index_bytes

    def bytes_down(broadcast, own) -> jax.Array:
        """The entries that are new to the client, and those of its helpers' psi that are not 0."""
        entries = own["entries"]
        if num_helpers:
            entries += jnp.sum(jnp.where(own["present"], jax.vmap(sparse.count)(own["helpers"]), 0.0))
        return entry_bytes * entries + tree_bytes((broadcast.model.batch_stats, broadcast.learning_rate))

    def bytes_up(upload) -> jax.Array:
        return entry_bytes * upload.told["entries"] + tree_bytes(upload.model.batch_stats)

    return frame._replace(
        init=init,
        server_before=server_before,
        broadcast=lambda state, data, key: global_model(problem, apart(state), extra=helpers_travel(state)),
        personal=personal,
        aggregate=aggregate,
        server_after=no_op,
        wire_bytes=WireBytes(bytes_down, bytes_up),
    )


def local_training(problem: Problem, parts: tuple[str, ...]) -> Phase:
    """A client's epoch: in each step L_s moves sigma (if clients have labels), then L_u moves psi; a sparse upload."""
    network, config, options = problem.network, problem.config.client, problem.config.fedmatch
    room = options.unlabelled_batch if SIGMA in parts else config.batch_size

    def prepare(received, data, cohort, previous) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)
        unlabelled = examples._replace(present=examples.unlabelled)
        # For the report, and for thresholds that adapt: training makes its labels step by step.
        scores = lambda images: network.probabilities(whole(received.model), images)  # noqa: E731
        made = label_cohort(problem, scores, data, unlabelled, threshold=options.threshold)
        keys = examples.keys
        if not options.shuffle:
            keys = jax.vmap(lambda client: jax.random.fold_in(jax.random.key(0), client))(cohort.clients)
        deck, labelled = Deck.shuffled(examples, examples.unlabelled, keys, config.epochs), None
        batches, size = nearest_number(deck.size, room), jnp.full_like(deck.size, room)
        if SIGMA in parts:
            labelled_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            labelled = Deck.shuffled(examples, examples.labelled, labelled_keys, config.epochs)
            batches = jnp.maximum(nearest_number(labelled.size, config.batch_size), -(-deck.size // room))
            size = -(-deck.size // batches)
        num_steps = jnp.where(jnp.any(examples.present, axis=1), config.epochs * batches, 0)
        report = made.report._replace(qualified=made.report.qualified | examples.labelled)
        work = Work(deck, batches, size, labelled, made.thresholds, cohort.personal)
        return Jobs(num_steps, work, report, made.own)

    def supervised(received, data, work: Work, batch: Batch, own, key):
        """L_s = lambda_s CE(y, f(x)), which moves sigma."""
        batches = nearest_number(work.labelled.size, config.batch_size)
        known = work.labelled.cut(batch.index, batches, config.batch_size, config.batch_size)
        images = problem.weak(key, data.images[known.rows])

        def of(model) -> Loss:
            (outputs,), batch_stats = network.train(whole(model), (images,), known.mask)
            value = cross_entropy(outputs.logits, data.visible_labels[known.rows], known.mask)
            return Loss(options.labelled_weight * value, batch_stats, {"labelled_loss": value})

        return of

    def unsupervised(received, data, work: Work, batch: Batch, own, key):
        """L_u, which moves psi: inter-client consistency, the vote's label for a strong view, L1 and L2 terms."""
        weak_key, strong_key = jax.random.split(key)
        batch = work.deck.cut(batch.index, work.batches, work.size, room)
        images = data.images[batch.rows]
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)
        present = work.personal.get("present", jnp.zeros(0, bool))  # [H]

        def of_helpers(sigma, batch_stats) -> jax.Array:
            """The logits of sigma + psi_j for each helper j, [H, B, C]; 0 in rounds without helpers."""
            shape = (len(present), len(weak), problem.num_classes)
            if not len(present):
                return jnp.zeros(shape)
            predict = lambda psi: network.predict(whole(Model({SIGMA: sigma, PSI: psi}, batch_stats)), weak).logits  # noqa: E731
            by_all = lambda: jax.lax.map(predict, work.personal["helpers"])  # noqa: E731
            return jax.lax.cond(received.extra, by_all, lambda: jnp.zeros(shape))

        def of(model) -> Loss:
            helpers = of_helpers(model.params[SIGMA], model.batch_stats)
            (of_weak, of_strong), batch_stats = network.train(whole(model), (weak, strong), batch.mask)
            guess, confident = qualify(jax.nn.softmax(of_weak.logits), work.thresholds, strictly=False)
            counted = confident & batch.mask  # Q
            votes = jax.nn.one_hot(jnp.argmax(helpers, axis=-1), problem.num_classes) * present[:, None, None]
            votes = jax.nn.one_hot(guess, problem.num_classes) + jnp.sum(votes, axis=0)
            divergences = [kl_divergence(logits, of_weak.logits, counted) for logits in helpers]
            helper_loss = sum(jnp.where(present, jnp.stack(divergences), 0.0)) / jnp.maximum(jnp.sum(present), 1) \
                if divergences else jnp.float32(0.0)  # fmt: skip
            pseudo_loss = cross_entropy(of_strong.logits, jnp.argmax(votes, axis=-1), counted)
            leaves = zip(*(jax.tree.leaves(model.params[name]) for name in (SIGMA, PSI)))
            l1, l2 = (sum(terms) for terms in zip(*((jnp.sum(abs(psi)), jnp.sum((sigma - psi) ** 2)) for sigma, psi in leaves)))
            value = options.helper_weight * helper_loss + options.pseudo_weight * pseudo_loss
            value += options.l1_weight * l1 + options.l2_weight * l2
            metrics = {
                "client_loss": value,
                "helper_loss": helper_loss,
                "pseudo_loss": pseudo_loss,
                "confident_share": jnp.sum(counted) / jnp.maximum(jnp.sum(batch.mask), 1),
            }
            return Loss(value, batch_stats, metrics)

        return of

    metrics = ("client_loss", "helper_loss", "pseudo_loss", "confident_share")
    turns = [local_sgd(problem, prepare, unsupervised, metrics=metrics, parts=(PSI,))]
    if SIGMA in parts:
        of_sigma = {"metrics": ("labelled_loss",), "parts": (SIGMA,), "memory": SIGMA_OPTIMIZER}
        turns = [local_sgd(problem, prepare, supervised, **of_sigma), *turns]
    phase = in_turn(*turns)
    if options.patience:
        phase = with_plateau(phase, "labelled_loss" if SIGMA in parts else "client_loss", options.patience)
    return sparse_upload(phase, parts, options.smallest, options.least_change)


ENTRY = Entry(
    fedmatch,
    title="FedMatch",
    paper="https://arxiv.org/abs/2006.12097",
    settings=("clients", "server"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    at_least={"helpers": 0, "helper_interval": 1, "patience": 0, "unlabelled_batch": 1, "smallest": 0.0,
              "least_change": 0.0, "index_bytes": 0},  # fmt: skip
    tiny={"fedmatch.threshold": 0.15, "fedmatch.helper_interval": 1, "fedmatch.unlabelled_batch": 32},
)
