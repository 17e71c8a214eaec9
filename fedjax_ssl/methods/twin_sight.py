"""Twin-sight: Robust Training of Federated Models with Extremely Label Deficiency.

Zhang et al., ICLR 2024 (arXiv 2402.14430). Some clients have labels for all their images, the others for none. What
differs from FedAvg:
  1. every client trains two models, each with its own backbone: the supervised one, which is tested, and its twin,
     which never sees a label;
  2. the twin minimises InfoNCE between two views of each image, L_i;
  3. a neighbourhood term L_n pulls the models together: images whose features are near in one model should be near in
     the other, by the Gram matrices of unit vectors, |G_u - G_s|_F^2 / B^2;
  4. only the supervised model uses labels: cross-entropy if a client has them, else pseudo-labels. The twin's objective
     is the same for both roles, which keeps them from drifting apart.
Both models are averaged by the clients' sizes, so that twice as much is sent. Each model passes both views of a batch
as one batch of twice the size, with common batch statistics (model/SemiFed.py:34-42 of the public code).

A client with images of both kinds trains on the labelled ones first and then on the others. docs/methods/twin_sight.md
has the differences to the public code (github.com/tmlr-group/Twin-sight, commit 974798a).
"""

import jax

from fedjax_ssl.base.fields import Section, is_on, real, word
from fedjax_ssl.client import (
    At,
    Batches,
    Examples,
    Loss,
    adjusted_cross_entropy,
    labelled_phase,
    labels_of_received,
    own_states,
    train_views,
    unlabelled_phase,
)
from fedjax_ssl.client.by_role import unlabelled_optimizer
from fedjax_ssl.client.confidence import MEMORY, fixed, threshold_of
from fedjax_ssl.client.labels import debiased
from fedjax_ssl.client.self_training import loss_by_rule, rule_of, states_of_round
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Images, Label, Labels, Method, Phase, Previous, Problem
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.frames import BY_ROLE, alternating
from fedjax_ssl.models import Outputs
from fedjax_ssl.models.network import companion_model, with_companion_statistics
from fedjax_ssl.models.projectors import BYOL_HEADS
from fedjax_ssl.ops.losses import info_nce, neighbourhood_loss
from fedjax_ssl.ops.sgd import Model, without_parts

TWIN, PROJECTOR = "twin", "projector"  # the second network, and its head
PARTS = (*CLASSIFIER, TWIN)
TEMPERATURE = 0.07  # of InfoNCE
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments; this flavour of RandAugment (3, 5) draws the 5 at random
        "num_rounds": 500,
        "num_clients": 10,
        "clients_per_round": 5,
        "data.labelled_clients": 4,
        "data.partition": "dirichlet_clients",  # inferred: clients' sizes, which weight the mean, differ
        "data.alpha": 0.1,
        "augment.num_ops": 3,
        "augment.border": "zeros",
        "model.classifier_init": "torch_linear",
        "model.projector_hidden": 4096,
        "model.projector_dim": 2048,
        "client.epochs": 1,
        "client.batch_size": 64,
        "client.learning_rate": 0.01,
        "client.momentum": 0.9,
        "client.weight_decay": 1e-4,
        "client.clip_norm": 0.0,
        "client.persistent": True,  # its code makes one optimizer for each client
    },
    "code": {"twin_sight.replica": True, "twin_sight.pseudo_weight": 0.0, "twin_sight.labels_from": "strong"},
    "freematch": {"confidence.kind": "freematch", "confidence.fairness_weight": 0.0},  # its code leaves the term out
    "partial": {  # every client has labels for a twentieth of its images; there the code has pseudo-labels, not swapped
        "data.labels": "clients",
        "data.labelled_share": 0.05,
        "twin_sight.labels_from": "weak",
        "twin_sight.pseudo_weight": 5.0,
        "client.proximal": 1.0,
    },
    "no_neighbourhood": {"twin_sight.neighbourhood_weight": 0.0},
}


def defaults() -> Section:
    section = Section()
    section.contrastive_weight = real(0.5, least=0)  # weight of L_i
    section.neighbourhood_weight = real(1.0, least=0)  # weight of L_n
    section.replica = False  # a bug of the code: L_n is divided by B XOR 2 instead of B^2
    # The two views: weak and 'strong', two 'weak' ones, or both 'views' of `config.views`.
    section.second_view = word("strong", "weak", "views")
    # Weight of the loss of pseudo-labels, at clients without labels; 0: there are none, as by default in the code.
    section.pseudo_weight = real(0.5, least=0)
    # The view that gives the label; the other view is trained. The code has 'strong'.
    section.labels_from = word("weak", "strong")
    return section


def twin_sight(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method."""
    phases = on_labels(problem), without_labels(problem)
    if not is_on(problem.config.twin_sight.pseudo_weight):
        return alternating(problem, phases, parts=PARTS)
    own = lambda data, model: own_states(problem, data)  # noqa: E731
    return alternating(problem, phases, own, label=labels_and_states(problem), parts=PARTS)


def twin_loss(
    problem: Problem, model: Model, views: tuple[Images, Images], mask: jax.Array
) -> tuple[Loss, list[Outputs]]:
    """The weighted sum of L_i of two views by the twin and L_n of the first view by both models.

    Each model passes both views as one batch. Also returns the supervised model's outputs for both views.
    """
    network, options = problem.network, problem.config.twin_sight
    batch = [(list(views), mask)]
    twin = companion_model(model, TWIN)
    (one, other), twin = train_views(network.companions[TWIN], twin, batch, together=True)
    outputs, after = train_views(network, model, batch, together=True)
    contrastive = info_nce(one.heads[PROJECTOR], other.heads[PROJECTOR], mask, TEMPERATURE)
    neighbourhood = neighbourhood_loss(one.features, outputs[0].features, mask, options.replica)
    value = options.contrastive_weight * contrastive + options.neighbourhood_weight * neighbourhood
    metrics = {"contrastive_loss": contrastive, "neighbourhood_loss": neighbourhood}
    batch_stats = with_companion_statistics(after.batch_stats, TWIN, twin.batch_stats)
    return Loss(value, batch_stats, metrics), outputs


def on_labels(problem: Problem) -> Phase:
    """CE + 0.5 L_i + L_n on labelled images."""
    views_of, num_trained = views(problem), 2 if problem.config.client.labelled_views == "both" else 1

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        known = batch.labelled
        of_both, outputs = twin_loss(problem, model, views_of(at.key, known.inputs), known.mask)
        labelled_loss = adjusted_cross_entropy(outputs[:num_trained], known.labels, known.mask, at.work)
        return Loss(labelled_loss + of_both.value, of_both.batch_stats, {"labelled_loss": labelled_loss})

    return labelled_phase(problem, loss, PARTS)


def labels_and_states(problem: Problem) -> Label:
    """The report of the labels that reach the threshold, and the rule's states at the beginning of the round."""
    confident = fixed(None, problem.num_classes, threshold_of(problem), strictly=False)
    of_received = labels_of_received(problem, confident)

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        made = of_received(received, data, cohort, previous)
        return made._replace(own=states_of_round(problem, Examples.of(data, cohort)))

    return label


def without_labels(problem: Problem) -> Phase:
    """0.5 L_i + L_n + 0.5 the loss of pseudo-labels, on unlabelled images."""
    options, views_of, rule = problem.config.twin_sight, views(problem), rule_of(problem)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        unlabelled = batch.unlabelled
        of_both, outputs = twin_loss(problem, model, views_of(at.key, unlabelled.inputs), unlabelled.mask)
        if not is_on(options.pseudo_weight):
            return of_both._replace(metrics={"unlabelled_loss": of_both.value, **of_both.metrics})
        labelling, trained = outputs if options.labels_from == "weak" else outputs[::-1]
        logits = debiased(jax.lax.stop_gradient(labelling.logits), at.labels.prior)
        pseudo_loss, _, state = loss_by_rule(rule, batch, at, logits, trained.logits)
        value = of_both.value + options.pseudo_weight * pseudo_loss
        metrics = {"unlabelled_loss": value, **of_both.metrics, "pseudo_loss": pseudo_loss}
        return Loss(value, of_both.batch_stats, metrics, remember={MEMORY: state})

    if is_on(options.pseudo_weight):
        return unlabelled_phase(problem, loss, PARTS)
    optimizer = unlabelled_optimizer(problem)  # the classifier has no loss here, so it must not decay
    return unlabelled_phase(
        problem, loss, PARTS, optimizer=lambda rate: without_parts(optimizer(rate), ("classifier",))
    )


def views(problem: Problem):
    """(key, images [B, H, W, C]) -> the two views of each, by `twin_sight.second_view`."""
    kinds = {"strong": (problem.weak, problem.strong), "weak": (problem.weak, problem.weak), "views": problem.views}
    first, second = kinds[problem.config.twin_sight.second_view]

    def of(key: jax.Array, images: Images) -> tuple[Images, Images]:
        first_key, second_key = jax.random.split(key)
        return first(first_key, images), second(second_key, images)

    return of


ENTRY = Entry(
    twin_sight,
    title="Twin-sight",
    paper="https://arxiv.org/abs/2402.14430",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=BY_ROLE,
    variants=VARIANTS,
    advice=one_mean,
    companions={TWIN: lambda config: {PROJECTOR: BYOL_HEADS[PROJECTOR](config.model)}},
    tiny={"model.projector_hidden": 8, "model.projector_dim": 4, "confidence.threshold": 0.2, "clients_per_round": 8},
)
