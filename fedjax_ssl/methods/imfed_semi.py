"""imFed-Semi: clients learn to tell apart sub-banks of their images whose class proportions they estimated.

Jiang et al., "Dynamic Bank Learning for Semi-supervised Federated Image Diagnosis with Class Imbalance", MICCAI 2022
(arXiv 2206.13079). The server has labels, the clients have none. What differs from FedAvg with alternate training:
  1. a client divides its images into sub-banks of different class proportions;
  2. its bank has the images of which the received model is confident now, or was very confident in an earlier round.
     From it the client estimates the class proportions of each sub-bank;
  3. it trains on images that are confident now: a transition function turns class probabilities into probabilities of
     sub-banks, whose label is known.

This follows the public code, med-air/imFedSemi, as only the abstract was available. **That code divides the images by
their hidden labels**; here the received model's predictions divide them, in each round. Clients with labels, if any,
minimise cross-entropy. docs/methods/imfed_semi.md has more. The file is longer than most, as the division of the images
and the estimate of the proportions are written out.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, share, word
from fedjax_ssl.client import At, Batches, Deck, Examples, Loss, Plan, labelled_phase, local_training
from fedjax_ssl.client.by_role import unlabelled_optimizer
from fedjax_ssl.client.deck import of_whole_batches, split_keys
from fedjax_ssl.client.labels import told_scores
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.labels import clients_may_have_labels
from fedjax_ssl.engine import Broadcast, Cohort, Label, Labels, Method, Phase, Previous, Problem, Report
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import BY_ROLE, alternating, two_smoothed_views
from fedjax_ssl.ops.losses import mean_present
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server.training import ServerLoss, ServerLossResult

FIELDS = {
    **BY_ROLE,
    "data.labels": "server",
    "client.persistent": True,
    "server.persistent": True,
    "server.pretrain_persistent": True,
}
VARIANTS: Variants = {"code": {"imfed_semi.posterior": "logits"}}
BANK = "bank"  # a client's memory: bool [n_max], images of which a received model was very confident
TINY = 1e-12  # the least posterior whose logarithm is taken


def defaults() -> Section:
    section = Section()
    section.confident = share(0.5)  # a larger probability puts an image into the bank for this round
    section.very_confident = share(0.9)  # a larger one keeps it there for ever
    # Cross-entropy takes the sub-banks' posterior as 'probabilities'; or as 'logits', so that a softmax follows (code).
    section.posterior = word("probabilities", "logits")
    return section


def imfed_semi(problem: Problem) -> Method:
    """Its algorithm as a Method."""
    before = (labelled_phase(problem),) if clients_may_have_labels(problem.config.data) else ()
    phases = (*before, on_sub_banks(problem, continues=bool(before)))
    own = lambda data, model: {BANK: jnp.zeros(data.client_index.shape, bool)}  # noqa: E731
    return alternating(problem, phases, own, label=fill_banks(problem), server_loss=on_server_labels)


def on_server_labels(problem: Problem, data: FederatedData) -> ServerLoss:
    """The server's loss: two weak views of its images, with smoothed labels."""

    def loss(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        value, _, batch_stats = two_smoothed_views(problem, model, data.inputs[rows], labels, mask, key)
        return value, (batch_stats, {"server_loss": value})

    return loss


def fill_banks(problem: Problem) -> Label:
    """The received model labels a weak view of each image; banks are filled, and their class proportions counted.

    `Labels.more` is (sub-banks, Pi, rho): int32 [M, n_max], the sub-bank of each image; float32 [M, S, C], the classes'
    shares in each sub-bank's part of the bank; float32 [M, S], the sub-banks' shares of all images.
    """
    options, num_classes = problem.config.imfed_semi, problem.num_classes

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort, split_keys(cohort)[0])
        p = told_scores(problem, received.model, data, examples, num_views=1)
        best, labels = jnp.max(p, axis=-1), jnp.argmax(p, axis=-1).astype(jnp.int32)
        confident = examples.unlabelled & (best > options.confident)
        lasting = cohort.own[BANK] | (examples.unlabelled & (best > options.very_confident))
        classes = jax.nn.one_hot(jnp.where(examples.unlabelled, labels, -1), num_classes)
        wanted = jax.vmap(lambda client: drawn_proportions(data.seed, client, num_classes))(cohort.clients)
        sub_banks = divided(classes, wanted)
        members = jax.nn.one_hot(sub_banks, num_classes) * examples.unlabelled[..., None]
        counts = jnp.einsum("mns,mnc->msc", members, classes * (confident | lasting)[..., None])
        pi = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
        rho = jnp.sum(members, axis=1) / jnp.maximum(jnp.sum(members, axis=(1, 2))[:, None], 1)
        return Labels(Report(labels, confident | examples.labelled), own={BANK: lasting}, more=(sub_banks, pi, rho))

    return label


def drawn_proportions(seed: jax.Array, client: jax.Array, number: int) -> jax.Array:
    """The class proportions that a client's sub-banks should have, the same in each round: float32 [S, C], S = C.

    They are uniform between 0.1 and 1, twice as much for class s of sub-bank s, and then normalised.
    """
    key = jax.random.fold_in(jax.random.key(seed), client)
    drawn = jax.random.uniform(key, (number, number), minval=0.1) * (1 + jnp.eye(number))
    return drawn / jnp.sum(drawn, axis=1, keepdims=True)


def divided(classes: jax.Array, wanted: jax.Array) -> jax.Array:
    """The sub-bank of each image, int32 [M, n]; `classes` are one-hot, float32 [M, n, C], zeros for no image.

    Sub-bank s takes the next floor(floor(n / S) wanted_sc) images of class c, in the order of the client's images; the
    last one takes all that are left.
    """
    size = jnp.sum(classes, axis=(1, 2)) // wanted.shape[1]
    ends = jnp.cumsum(jnp.floor(size[:, None, None] * wanted), axis=1)[:, :-1]  # [M, S - 1, C]
    before = jnp.sum(classes * (jnp.cumsum(classes, axis=1) - classes), axis=-1)  # [M, n], its place in its class
    ends = jnp.einsum("mnc,msc->mns", classes, ends, precision="highest")
    return jnp.sum(before[..., None] >= ends, axis=-1, dtype=jnp.int32)


def on_sub_banks(problem: Problem, continues: bool) -> Phase:
    """Trains on the images that are confident now: H(s, q(x)), q_s(x) ~ rho_s sum_c Pi_sc p_c(x)."""
    config, options, network = problem.config.client, problem.config.imfed_semi, problem.network

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples, keys = Examples.of(data, cohort), split_keys(cohort)[1]
        chosen = cohort.labels.report.qualified & examples.unlabelled
        deck = of_whole_batches(Deck.shuffled(examples, chosen, keys, config.epochs), config.batch_size)
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        unlabelled, (sub_banks, pi, rho) = batch.unlabelled, at.labels.more
        (outputs,), batch_stats = network.train(model, (problem.weak(at.key, unlabelled.inputs),), unlabelled.mask)
        mixed = rho * jnp.matmul(jax.nn.softmax(outputs.logits), pi.T, precision="highest")
        q = mixed / jnp.maximum(jnp.sum(mixed, axis=-1, keepdims=True), TINY)
        log_q = jax.nn.log_softmax(q) if options.posterior == "logits" else jnp.log(jnp.maximum(q, TINY))
        of_bank = jnp.take_along_axis(log_q, sub_banks[unlabelled.positions][:, None], axis=-1)[:, 0]
        value = -mean_present(of_bank, unlabelled.mask)
        return Loss(value, batch_stats, {"unlabelled_loss": value})

    sizes, optimizer = {"unlabelled": config.batch_size}, unlabelled_optimizer(problem)
    return local_training(problem, plan, loss, sizes, optimizer=optimizer, continues=continues)


ENTRY = Entry(
    imfed_semi,
    title="imFed-Semi",
    paper="https://arxiv.org/abs/2206.13079",
    settings=("server", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    tiny={"imfed_semi.confident": 0.11, "imfed_semi.very_confident": 0.12, "clients_per_round": 8},
)
