"""(FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning.

Lee, Le, Shin and Lee, NeurIPS 2024 (arXiv 2410.23227). The server has very few labels, 10 or 40 of CIFAR-10. What
differs from SemiFL:
  1. client-specific adaptive thresholds (CAT): a client's threshold is its mean confidence in this round, lower for
     classes that the received model rarely predicts. Labels are made once a round, and a client trains on the accepted
     images (D_a);
  2. sharpness-aware consistency (SACR): the images of D_a above a fixed high threshold (D_f) determine the worst
     perturbation of the parameters, by ASAM, under which their predictions should not change;
  3. learning-status-aware aggregation (LSAA): the less confident a client was, the larger the weight of its upload.
There is no mixup. docs/methods/fl2.md has the differences between paper, code and this file.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, is_on, real, word
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Deck,
    Examples,
    Loss,
    Plan,
    label_cohort,
    local_training,
    make_confidence,
    threshold_of,
)
from fedjax_ssl.client.deck import split_keys
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Label, Labels, Method, Phase, Previous, Problem, Received
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy, mean_present, soft_label_loss
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import norm
from fedjax_ssl.server import fedavg, own_weights

FIELDS = {"confidence.kind": "sat"}  # CAT; another rule may be set instead
VARIANTS: Variants = {
    "paper": {  # the CIFAR-10 setting of its experiments, to be named after the recipe `strong`
        "num_rounds": 800,
        "data.partition": "dirichlet_clients",
        "model.classifier_init": "torch",
        "augment.flavour": "fl2",
        "augment.num_ops": 3,
        "client.batch_size": 32,
        "server.epochs": 5,
        "server.batch_size": 10,
        "server.augmentation": "weak",
        "server.pretrain_epochs": 5,  # Algorithm 1: the server trains before the clients of the first round
        "server.pretrain_learning_rate": 0.03,
        "model.statistics": "all_mixed",
        "model.statistics_weights": "samples",  # our choice; the code's batches have different sizes
    },
    "cifar100": {"fl2.radius": 1.0},
    "code": {
        "schedule": "constant",
        "server.pretrain_epochs": 50,
        "server.pretrain_persistent": True,
        "model.statistics_weights": "batches",
    },
    # The ablation; all three combined are FedAvg+FixMatch with labels once a round.
    "no_cat": {"confidence.kind": "fixed"},  # at confidence.threshold
    "no_sacr": {"fl2.consistency_weight": 0.0},
    "no_lsaa": {"fl2.status_weights": False},
    "sacr_on_all": {"confidence.threshold": 0.0},  # not only on the most confident images
    "sam": {"fl2.perturbation": "sam"},
}
OFFSET = 0.01  # of |v| in T_v of a weight
TINY = 1e-16  # added to the norm, so that a zero gradient has no perturbation
STATUS = "status"  # metadata of a client's upload: tau_k


def defaults() -> Section:
    section = Section()
    section.consistency_weight = real(1.0, least=0)  # weight of SACR's loss; 0: without it
    section.radius = real(0.1, least=0)  # rho, the length of the perturbation; the paper has 1.0 on CIFAR-100
    section.perturbation = word("asam", "sam")  # section 5.1; 'sam': eq. 12 as printed
    section.status_weights = True  # LSAA; False: aggregation.weights
    return section


def fl2(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    options = problem.config.fl2
    rule = make_confidence(problem, threshold_of(problem), strictly=True, hard=True)
    aggregation = fedavg(problem, weighted_by=own_weights(by_status) if options.status_weights else None)
    label = adaptive_labels(problem, rule)
    return alternating(problem, (on_accepted(problem),), label=label, rule=rule, aggregation=aggregation)


def by_status(received: Received) -> jax.Array:
    """LSAA: beta_k is proportional to 1 - tau_k; if all clients are certain, weights are equal."""
    room = jnp.where(received.accepted, jnp.clip(1 - received.uploads.metadata[STATUS], 0.0, 1.0), 0.0)
    return jnp.where(jnp.sum(room) > 0, room, received.accepted)


def adaptive_labels(problem: Problem, rule: Confidence) -> Label:
    """CAT: tau_k is the client's mean confidence, tau_k(c) depends on how often c is predicted.

    `Labels.more` says which images are in D_f, bool [M, n_max].
    """
    high = threshold_of(problem)

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort, split_keys(cohort)[0])
        made = label_cohort(problem, received.model, data, examples, rule, num_views=1)
        status = jax.vmap(mean_present)(made.more, examples.present)
        return made._replace(tells={STATUS: status}, more=made.more > high)

    return label


def on_accepted(problem: Problem) -> Phase:
    """A client's epochs on the accepted images, D_a."""
    network, config, options = problem.network, problem.config.client, problem.config.fl2

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        qualified, (_, shuffle_keys) = cohort.labels.report.qualified, split_keys(cohort)
        deck = Deck.shuffled(Examples.of(data, cohort), qualified, shuffle_keys, config.epochs)
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        strong_key, _ = jax.random.split(at.key)
        images, mask, positions = batch.unlabelled.inputs, batch.unlabelled.mask, batch.unlabelled.positions
        labels, surest = at.labels.report.labels[positions], mask & at.labels.more[positions]
        strong = problem.strong(strong_key, images)  # one draw for all passes

        def passed(params, view):
            (outputs,), batch_stats = network.train(model._replace(params=params), (view,), mask)
            return outputs.logits, batch_stats

        logits, batch_stats = passed(model.params, strong)
        value = cross_entropy(logits, labels, mask)  # L_a
        metrics = {"adaptive_loss": value}
        if is_on(options.consistency_weight):
            current, target = jax.lax.stop_gradient((model.params, logits))
            # L_p, of the most confident images; without any its gradient is 0, and nothing is perturbed.
            slope = jax.grad(lambda params: cross_entropy(passed(params, strong)[0], labels, surest))(current)
            moved = perturbation(current, slope, options.radius, options.perturbation == "asam")
            # The gradient is computed at w* = w + eps and applied at w.
            perturbed = jax.tree.map(jnp.add, model.params, moved)
            consistency_loss = soft_label_loss(  # L_cs
                passed(perturbed, strong)[0], jax.nn.softmax(target), surest.astype(jnp.float32), mask
            )
            metrics["consistency_loss"] = consistency_loss
            value += options.consistency_weight * consistency_loss
        return Loss(value, batch_stats, {"client_loss": value, **metrics})

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size})


def perturbation(params: Any, gradients: Any, radius: float, adaptive: bool = True) -> Any:
    """eps_v = rho T_v^2 g_v / |(T_v g_v)_v|, with the norm over all parameters as one vector, like the parameters.

    SAM has T_v = 1 (Foret et al., ICLR 2021). ASAM (`adaptive`) has T_v = |v| + 0.01 elementwise for weights and 1 for
    biases, leaves whose name begins with 'bias' (Kwon et al., ICML 2021). If all gradients are 0, eps is 0.
    """

    def scale(path, leaf):
        is_bias = jax.tree_util.keystr(path[-1:], simple=True).startswith("bias")
        return jnp.ones_like(leaf) if is_bias or not adaptive else jnp.abs(leaf) + OFFSET

    scales = jax.tree.map_with_path(scale, params)
    scaled = jax.tree.map(jnp.multiply, scales, gradients)
    length = norm(scaled) + TINY
    return jax.tree.map(lambda t, g: radius * t * (g / length), scales, scaled)


ENTRY = Entry(
    fl2,
    title="(FL)^2",
    paper="https://arxiv.org/abs/2410.23227",
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    mislabels=True,
    tiny={"confidence.threshold": 0.2},
)
