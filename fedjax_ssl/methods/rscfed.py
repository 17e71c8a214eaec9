"""RSCFed: Random Sampling Consensus Federated Semi-supervised Learning.

Liang et al., CVPR 2022 (arXiv 2203.13993). Some clients have labels for all their images, the others for none. What
differs from FedAvg:
  1. a round draws several groups of clients, each without replacement; all start from the same global model. A client
     in two groups trains twice, and its optimizer and teacher advance twice;
  2. a client without labels has its own mean teacher. Its student minimises the squared error to the teacher's
     sharpened probabilities of another weak view. The teacher is never reset; the student starts from the global
     model;
  3. within a group, an upload's weight falls with its distance to the group's mean; a labelled client counts more. The
     global model is the plain mean of the groups' models.

The paper's setting starts from a model trained on the labelled client only. If a run starts from an untrained model,
set `rscfed.teacher_statistics='received'`: with 'first' the teacher would keep that model's statistics for ever.
docs/methods/rscfed.md has the differences to the public code, xmed-lab/RSCFed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, real, whole, word
from fedjax_ssl.client import LABELLED, At, Batches, Loss, labelled_phase, unlabelled_phase
from fedjax_ssl.client.mean_teacher import TEACHER, follow, own_teachers, sharpened, teacher_of
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Method, Phase, Problem, Received, Selection, State
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import BY_ROLE, TEN_CLIENTS, alternating
from fedjax_ssl.ops.draws import draw_distinct
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import column, row_norms, weighted_sum
from fedjax_ssl.server import fedavg
from fedjax_ssl.server.aggregation import Link, client_weights, group_members, own_weights

FIELDS = {**BY_ROLE, "client.persistent": True}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on SVHN and CIFAR-100
        **TEN_CLIENTS,
        "num_rounds": 1000,
        "model.name": "lenet",
        "model.normalisation": "none",
        "client.unlabelled_learning_rate": 0.021,
        "client.clip_norm": 5.0,
        "rscfed.beta": 1e4,
        "rscfed.beta_labelled": 100.0,
    },
    "isic": {
        "model.name": "resnet18_imagenet",
        "model.normalisation": "running",
        "num_rounds": 800,
        "client.batch_size": 12,
        "client.learning_rate": 0.002,
        "client.unlabelled_learning_rate": 0.001,
        "rscfed.labelled_factor": 200.0,
        "rscfed.beta": 0.01,
        "rscfed.beta_labelled": 0.01,
    },
    "code": {"rscfed.loss_over": "batch_size", "rscfed.beta": 1e4, "rscfed.beta_labelled": 100.0},
}


def defaults() -> Section:
    section = Section()
    section.groups = whole(3, least=1)  # groups of a round, trained one after the other
    section.group_size = whole(5, least=1)  # clients per group, without replacement; clients_per_round is ignored
    section.consistency_weight = real(0.02, least=0)  # weight of the squared error to the teacher
    # Normalisation statistics of the teacher: those of the 'first' model that the client received, as in the code; or
    # those of the model 'received' in this round.
    section.teacher_statistics = word("first", "received")
    # Squared errors are divided by the images 'present' in a batch, or always by the 'batch_size' (code).
    section.loss_over = word("present", "batch_size")
    section.labelled_factor = real(6.0, above=0)  # factor of a labelled client's weight, after its distance
    # The weight is exp(-beta d / n) for an upload at distance d with n images, in a group without labels. The paper's
    # 10000 and 100 are for clients of some 7,000 images; these are for 70.
    section.beta = real(100.0, least=0)
    section.beta_labelled = real(1.0, least=0)  # beta of a group with a labelled client
    return section


def rscfed(problem: Problem) -> Method:
    """Its algorithm as a Method."""
    config, options = problem.config, problem.config.rscfed
    if options.group_size > config.num_clients:
        raise UserError(
            f"rscfed.group_size is {options.group_size}, but the federation has num_clients = {config.num_clients}"
        )

    def select_groups(state: State, data: FederatedData, key: jax.Array) -> Selection:
        keys = jax.random.split(key, options.groups)
        clients = jax.vmap(lambda key: draw_distinct(key, len(data.client_size), options.group_size))(keys)
        return Selection(clients.reshape(-1), turns=options.groups)

    phases = labelled_phase(problem), with_teacher(problem)
    aggregation = fedavg(problem, weighted_by=distance_reweighted(problem))
    return alternating(problem, phases, own=own_teachers, aggregation=aggregation)._replace(select=select_groups)


# --- A client without labels. -----------------------------------------------------------------------------------------


def with_teacher(problem: Problem) -> Phase:
    """Makes the phase of `client.epochs` passes over a client's unlabelled images, after `labelled_phase`.

    The loss is weight * sum_i |p(x_i'') - q(x_i')|^2 / B. p is the student's prediction for one weak view, and
    q = p_T^(1/T) / sum_c p_T^(1/T) the teacher's for another one, in evaluation mode.
    """
    options, config, network = problem.config.rscfed, problem.config.client, problem.network

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, (first_key, second_key) = batch.unlabelled.inputs, batch.unlabelled.mask, jax.random.split(at.key)
        teacher = teacher_of(at, options.teacher_statistics)
        targets = sharpened(network.predict(teacher, problem.weak(first_key, images)).logits)
        views = problem.weak(second_key, images)
        size = jnp.maximum(jnp.sum(mask), 1) if options.loss_over == "present" else config.batch_size

        (outputs,), batch_stats = network.train(model, (views,), mask)
        errors = jnp.sum(jnp.square(jax.nn.softmax(outputs.logits) - targets), axis=-1)
        value = options.consistency_weight * jnp.sum(jnp.where(mask, errors, 0.0)) / size
        return Loss(value, batch_stats, {"unlabelled_loss": value}, remember={TEACHER: teacher})

    return unlabelled_phase(problem, loss, after=follow)


# --- Groups. ----------------------------------------------------------------------------------------------------------


def distance_reweighted(problem: Problem) -> Link:
    """Weights uploads so that their mean is the plain mean of the models of all groups that have uploads.

    f_i is the share of upload i in its group by `aggregation.weights`, wbar = sum_i f_i w_i, d_i = |w_i - wbar|. The
    group's model is sum_i u_i w_i, with u_i ~ f_i exp(-beta d_i / n_i) times the factor of a labelled client.
    """
    options, kind = problem.config.rscfed, problem.config.aggregation.weights

    def rule(received: Received) -> jax.Array:
        sizes = client_weights(kind, received)
        in_group = group_members(received, options.groups)
        labelled = received.uploads.metadata[LABELLED] > 0
        factors = jnp.where(labelled, options.labelled_factor, 1.0)
        shares = jnp.where(in_group, sizes, 0.0)
        shares /= jnp.maximum(jnp.sum(shares, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        distances = distances_to_mean(received.uploads.model, shares, in_group)
        betas = jnp.where(jnp.any(in_group & labelled, axis=1), options.beta_labelled, options.beta)
        weights = consensus_weights(shares, distances, received.sizes, factors, betas)
        return jnp.sum(weights, axis=0)

    return own_weights(rule)


def distances_to_mean(models: Any, shares: jax.Array, in_group: jax.Array) -> jax.Array:
    """d_i = |w_i - wbar| of each group's models, wbar = sum_i f_i w_i, summed over their tensors: float32 [G, R].

    Models have leaves [R, ...], including normalisation statistics; `in_group` is bool [G, R], and the distance of a
    row that is not in the group is 0. Shares f_i are float32 [G, R], whose rows sum to 1 or are 0.
    """
    models = jax.tree.map(lambda leaf: jnp.where(column(jnp.any(in_group, axis=0), leaf), leaf, 0), models)

    def of_group(group):
        share, members = group

        def deviation(leaf):
            return jnp.where(column(members, leaf), leaf - weighted_sum(share, leaf), 0)

        return sum(row_norms(deviation(leaf)) for leaf in jax.tree.leaves(models))

    return jax.lax.map(of_group, (shares, in_group))


def consensus_weights(
    shares: jax.Array, distances: jax.Array, sizes: jax.Array, factors: jax.Array, betas: jax.Array
) -> jax.Array:
    """u_i = factor_i f_i exp(-beta d_i / n_i), normalised in each group; the nearest upload's weight never underflows.

    Shares f_i and distances d_i are float32 [G, R], sizes n_i int32 [R], factors float32 [R], betas float32 [G]. The
    rows of the result, float32 [G, R], sum to 1, or are 0 for a group without shares.
    """
    exponents = jnp.where(shares > 0, betas[:, None] * distances / jnp.maximum(sizes, 1), jnp.inf)
    least = jnp.min(exponents, axis=1, keepdims=True)
    nearness = jnp.where(shares > 0, jnp.exp(least - exponents), 0.0)
    weights = shares * factors * nearness
    return weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)


ENTRY = Entry(
    rscfed,
    title="RSCFed",
    paper="https://arxiv.org/abs/2203.13993",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    tiny={"rscfed.groups": 2, "rscfed.group_size": 8, "rscfed.consistency_weight": 1.0},
)
