"""FedAnchor: Enhancing Federated Semi-Supervised Learning with Label Contrastive Loss for Unlabeled Clients.

Qiu et al., 2024 (arXiv 2402.10191). What differs from FedAvg: the model has a second head, whose space the server
shapes with a label contrastive loss; clients label their images by cosine similarity to the server's labelled anchors
there; and after each aggregation the server trains one epoch on each head.
"""

import functools

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import RECIPES, Section, is_on, real, whole, word
from fedjax_ssl.client import (
    Confidence,
    Examples,
    fix_mix_phase,
    global_model,
    make_confidence,
    own_confidence,
    own_optimizers,
    score_cohort,
    threshold_of,
)
from fedjax_ssl.client.fix_mix import label_keys
from fedjax_ssl.client.labels import as_told, label_by_scores
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Label, Labels, Method, Metrics, Previous, Problem, State
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.fedanchor.client import (
    AnchorEmbeddings,
    ClassAnchors,
    along_common_direction,
    class_anchors,
    class_mean_scores,
)
from fedjax_ssl.models.heads import Linear
from fedjax_ssl.ops.losses import common_direction_penalty, label_contrastive_loss
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import (
    ServerPlan,
    fedavg,
    make_statistics,
    own_optimizer,
    server_lambda,
    supervised_loss,
    supervised_mixup_loss,
    train_on_server_labels,
)
from fedjax_ssl.server.training import ServerLoss, ServerLossResult

HEAD = "anchor_head"
MIXUP_ALPHA, MIX_WEIGHT = 0.75, 1.0  # a of eq. 8 and b of eq. 10 (appendix B)
THRESHOLD = 0.6  # t of eq. 5 (appendix C)
CONTRASTIVE = ("backbone", HEAD)  # what the contrastive loss trains

# The systems of the paper's tables that differ from FedAnchor in one or two fields: name -> fields.
VARIANTS: Variants = {
    # Found by screening on held-out images of CIFAR-10, under the recipe `strong`: for correct labels, the anchors must
    # be learned before the first round.
    "natural_images": {"server.augmentation": "weak", "server.pretrain_epochs": 40},
    # The paper's values, for config files with other defaults.
    "paper": {**RECIPES["plain"], "server.augmentation": "strong", "server.pretrain_epochs": 5},
    # Fewer but more accurate labels than with 0.6: the 30 % of each client's images with the largest centred scores.
    "surest": {
        "fedanchor.centred": True,
        "fedanchor.common_direction_weight": 1.0,
        "confidence.kind": "share",
        "confidence.share": 0.3,
    },
    "mix": {"fedanchor.server_mixup": True},  # Tables 1 and 2, "FedAnchor (mix)"
    "no_mixup": {"fedanchor.client_mixup": False},  # Table 3
    "server_mixup": {"fedanchor.client_mixup": False, "fedanchor.server_mixup": True},  # Table 3
    "no_contrastive": {"fedanchor.contrastive": False},  # Table 3, "w/o contr loss"
    "ensemble": {"fedanchor.ensemble_views": 4},  # section 4.5
    "all_pairs": {"fedanchor.travels": "all_pairs"},  # what the paper sends
    # Only the server trains, with both its losses: no cosine reaches the threshold, and 'static' statistics come from
    # its own images. Clients still label, for the report. Name it after a recipe, because recipes set statistics too.
    "no_clients": {
        "confidence.threshold": 2.0,
        "confidence.kind": "fixed",
        "model.statistics": "server",
    },
}


def defaults() -> Section:
    section = Section()
    # Pseudo-labels (section 4.2).
    section.travels = word("class_means", "all_pairs")  # what is sent: C vectors, or all S (paper); scores are equal
    section.ensemble_views = whole(0, least=0)  # n: scores are means over n weak views (section 4.5); 0: the raw image
    # An option that is not in the paper, off by default, for data where 0.6 accepts everything or nothing.
    section.centred = False  # subtracts the anchors' mean before cosines; the mean is sent with the class means
    # Local training (section 4.3, appendix B).
    section.client_mixup = True  # whether clients use the mix loss (Table 3)
    # Server training (sections 4.1, 4.4 and 4.5). The paper only gives values for the first two fields.
    section.server_mixup = False  # whether the server uses the clients' losses: FedAnchor (mix)
    section.contrastive = True  # whether there is a contrastive loss; False: Table 3's "w/o contr loss"
    section.contrastive_batch_size = whole(25, least=1)  # anchors per step: eq. 1 compares them with each other
    section.contrastive_learning_rate = real(0.03, above=0)  # its initial learning rate; the rest is as in `server`
    section.temperature = real(0.1, above=0)  # tau of eq. 1
    # Weight of a penalty on the common part of all embeddings, which eq. 1 does not constrain.
    section.common_direction_weight = real(0.0, least=0)
    return section


def fedanchor(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    config, options, aggregation = problem.config, problem.config.fedanchor, fedavg(problem)

    def init(data: FederatedData, key: jax.Array) -> State:
        """Fresh weights, pre-trained on the anchors (appendix C)."""
        init_key, train_key = jax.random.split(key)
        model = problem.network.init(init_key)
        optimizers = own_optimizer(problem, model) | own_optimizer(problem, model, CONTRASTIVE, "contrastive")
        state = State(jnp.int32(0), model, optimizers if config.server.pretrain_persistent else {})
        epochs, rate = config.server.pretrain_epochs, config.server.pretrain_learning_rate
        state, _ = train(problem, state, data, train_key, (rate, rate), epochs, epochs * options.contrastive)
        model = state.model
        server = {**aggregation.init(model.params), **optimizers, **state.server}
        own = own_confidence(problem, data, rule_of(problem))
        return state._replace(server=server, clients={**own_optimizers(problem, data, model, CLASSIFIER), **own})

    def server_after(state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
        rates = config.server.learning_rate, options.contrastive_learning_rate
        rates = [learning_rate_at(config, rate, state.round) for rate in rates]
        return train(problem, state, data, key, rates, config.server.epochs, int(options.contrastive))

    on_fix_and_mix = fix_mix_phase(  # eq. 5 to 10
        problem, mixup_alpha=MIXUP_ALPHA if options.client_mixup else 0.0, mix_weight=MIX_WEIGHT
    )
    return Method(
        init=init,
        broadcast=lambda state, data, key: global_model(problem, state, message(problem, state, data)),
        label=labels_by_anchors(problem),
        phases=(on_fix_and_mix,),
        # w_{t+1} = sum_m n_m / sum n_m w_m (Algorithm 1); a client with an empty fix set sends nothing.
        aggregate=aggregation.aggregate,
        server_after=server_after,
        statistics=make_statistics(problem.network, config),
    )


# --- Pseudo-labels (section 4.2). -------------------------------------------------------------------------------------


def message(problem: Problem, state: State, data: FederatedData) -> ClassAnchors | AnchorEmbeddings:
    """The anchors' embeddings by w_t, as class means or one by one."""
    options, rows = problem.config.fedanchor, data.server_index
    outputs = problem.network.predict_rows(state.model, data.inputs, rows, problem.config.eval_batch_size)
    anchors = AnchorEmbeddings(outputs.heads[HEAD], data.visible_labels[rows])
    if options.travels == "all_pairs":
        return anchors
    return class_anchors(anchors, problem.num_classes, options.centred)


def rule_of(problem: Problem) -> Confidence:
    """Eq. 5: which labels count, by their scores. These are cosines, and the rules' weights are for probabilities."""
    return make_confidence(problem, threshold_of(problem, THRESHOLD), strictly=True, hard=True)


def labels_by_anchors(problem: Problem) -> Label:
    """Eq. 3 to 5. The report has the labels by the classification head as well."""
    options, network = problem.config.fedanchor, problem.network

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples, anchors = Examples.of(data, cohort, label_keys(cohort)), received.extra
        if isinstance(anchors, AnchorEmbeddings):
            anchors = class_anchors(anchors, problem.num_classes, options.centred)

        def scores(images):  # eq. 3, and the classification head's probabilities
            outputs = network.predict(received.model, images)
            return {
                HEAD: class_mean_scores(outputs.heads[HEAD], anchors),
                "classification_head": jax.nn.softmax(outputs.logits),
                "common_direction": along_common_direction(outputs.heads[HEAD], anchors),
            }

        scored = score_cohort(problem, scores, data.inputs, examples, options.ensemble_views)
        common_direction = scored.pop("common_direction")
        scored = jax.tree.map(lambda leaf: as_told(data, examples.rows, leaf), scored)
        made = label_by_scores(problem, scored[HEAD], examples, rule_of(problem))  # eq. 4, eq. 5
        report = made.report._replace(
            others={name: jnp.argmax(of_rule, axis=-1).astype(jnp.int32) for name, of_rule in scored.items()},
            facts={**made.report.facts, "common_direction": common_direction},
        )
        return made._replace(report=report)

    return label


# --- Server: one epoch on the classification head, one on the anchor head (section 4.4). ------------------------------


def train(
    problem: Problem, state: State, data: FederatedData, key: jax.Array, rates, epochs: int, contrastive_epochs: int
) -> tuple[State, Metrics]:
    """One training after the other, each at its own rate and with its own optimizer."""
    options, classification, lambdas = problem.config.fedanchor, supervised_loss(problem, data), None
    if options.server_mixup:  # FedAnchor (mix)
        classification = supervised_mixup_loss(problem, data, MIXUP_ALPHA, MIX_WEIGHT)
        lambdas = functools.partial(server_lambda, alpha=MIXUP_ALPHA)
    contrastive, size = contrastive_loss(problem, data), options.contrastive_batch_size
    plans = (
        ServerPlan(classification, epochs, draw=lambdas),
        ServerPlan(contrastive, contrastive_epochs, CONTRASTIVE, size, "contrastive"),
    )
    metrics: Metrics = {}
    for plan, rate, own_key in zip(plans, rates, jax.random.split(key, 2), strict=True):
        state, of_plan = train_on_server_labels(problem, state, data, own_key, rate, plan)
        metrics |= of_plan
    return state, metrics


def contrastive_loss(problem: Problem, data: FederatedData) -> ServerLoss:
    """Eq. 1 and 2 on the anchor head's outputs; its metric excludes `common_direction_penalty`."""
    options = problem.config.fedanchor

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        (outputs,), batch_stats = problem.network.train(model, (data.inputs[rows],), mask)
        embeddings = outputs.heads[HEAD]
        loss = label_contrastive_loss(embeddings, labels, mask, problem.num_classes, options.temperature)
        metrics = {"contrastive_loss": loss}
        if is_on(options.common_direction_weight):
            loss += options.common_direction_weight * common_direction_penalty(embeddings, mask)
        return loss, (batch_stats, metrics)

    return loss_fn


ENTRY = Entry(
    fedanchor,
    title="FedAnchor",
    paper="https://arxiv.org/abs/2402.10191",
    defaults=defaults,
    variants=VARIANTS,
    heads={HEAD: lambda model: functools.partial(Linear, 128)},  # of width 128
    embedding=HEAD,
    confidence=("kind", "threshold"),
    mislabels=True,
    tiny={"confidence.threshold": 0.5},
)
