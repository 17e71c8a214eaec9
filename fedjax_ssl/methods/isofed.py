"""IsoFed: labelled and unlabelled clients train in turn, and are never averaged together.

Saha, Mishra and Noble, "Rethinking Semi-Supervised Federated Learning: How to co-train fully-labeled and
fully-unlabeled client imaging data", MICCAI 2023 (arXiv 2310.18815). Some clients have labels for all their images, the
others for none. What differs from FedAvg, by the abstract:
  1. isolated aggregation: a mean is over labelled clients only, or over unlabelled clients only;
  2. a client that receives the global model first adapts it to its images without labels.

**All else is inferred**, since only the abstract was available and no code is published: rounds alternate, so that one
model is passed on between the roles; the adaptation maximises information; clients without labels train on
pseudo-labels by `config.confidence`. A client with any label counts as labelled. docs/methods/isofed.md says more.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, is_on, word
from fedjax_ssl.client import STANDARD, At, Batches, Deck, Examples, Loss, Plan, local_training, trained_parts_of
from fedjax_ssl.client.by_role import unlabelled_optimizer
from fedjax_ssl.client.steps import going_on
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Jobs, Method, Phase, Previous, Problem, State
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import BY_ROLE, trained_by_role, unlabelled_images
from fedjax_ssl.ops.losses import information_loss
from fedjax_ssl.ops.sgd import Model, without_parts
from fedjax_ssl.server import labelled_clients, only_eligible

VARIANTS: Variants = {"no_adaptation": {"isofed.adaptation": "none"}}


def defaults() -> Section:
    section = Section()
    # A client's adaptation of the received model: 'information', the mean entropy of predictions minus the entropy of
    # their mean; or 'none'.
    section.adaptation = word("information", "none")
    return section


def isofed(problem: Problem) -> Method:
    """The alternation as a Method."""
    availability = problem.config.availability
    if is_on(availability.late) and availability.late_weight:
        raise UserError("availability.late_weight must be 0 for isofed, which never averages both kinds of clients")
    # With one role in a round, its share of the mean is the whole mean.
    method = trained_by_role(problem, unlabelled_images, share=0.5)
    if problem.config.isofed.adaptation != "none":
        labelled, unlabelled = method.phases
        first, second = adaptation(problem, of_labelled=True), adaptation(problem, of_labelled=False)

        def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
            return going_on(labelled.prepare(received, data, cohort, previous), received, previous)

        method = method._replace(phases=(first, labelled._replace(prepare=prepare), second, unlabelled))

    def has_turn(state: State, data: FederatedData) -> jax.Array:
        turn = labelled_clients(data) == (state.round % 2 == 0)  # rounds are counted from 0: labelled clients first
        return jnp.where(jnp.any(turn & (data.client_size > 0)), turn, ~turn)  # a role without clients yields its turn

    return only_eligible(problem, method, has_turn)


def adaptation(problem: Problem, of_labelled: bool) -> Phase:
    """A pass over all images of a client without using labels, for clients of one role (with or without labels).

    Each role has its learning rate and clipping. The optimizer starts afresh, and a second classifier is not trained.
    """
    config, network = problem.config.client, problem.network
    metric = "labelled_adaptation_loss" if of_labelled else "unlabelled_adaptation_loss"

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        chosen = labelled_clients(data)[cohort.clients] == of_labelled
        deck = Deck.shuffled(examples, examples.present & chosen[:, None], examples.keys, 1)
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask = problem.weak(at.key, batch.unlabelled.inputs), batch.unlabelled.mask

        (outputs,), batch_stats = network.train(model, (images,), mask)
        each, of_mean = information_loss(outputs.logits, mask)
        return Loss(each - of_mean, batch_stats, {metric: each - of_mean})

    parts = trained_parts_of(problem)
    resting = tuple(part for part in parts if part not in CLASSIFIER)
    of_role = problem.optimizer if of_labelled else unlabelled_optimizer(problem)
    return local_training(
        problem,
        plan,
        loss,
        {"unlabelled": config.batch_size},
        parts=parts,
        optimizer=lambda rate: without_parts(of_role(rate), resting),
        memory=None,
        continues=not of_labelled,
    )


ENTRY = Entry(
    isofed,
    title="IsoFed",
    paper="https://arxiv.org/abs/2310.18815",
    settings=("some_clients", "profile"),
    defaults=defaults,
    fields=BY_ROLE,
    variants=VARIANTS,
    heads={STANDARD: lambda model: None},
    heads_if={STANDARD: lambda config: config.confidence.kind == "acr"},
    tiny={"confidence.threshold": 0.2, "clients_per_round": 8, "data.labelled_clients": 2},
    rests=(1, 2),  # clients with labels train in one round, the others in the next
)
