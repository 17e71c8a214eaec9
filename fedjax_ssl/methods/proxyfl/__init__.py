"""ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised Learning.

Chen and Wang, CVPR 2026 (arXiv 2602.21078). A class's proxy is its row of the classifier's weight. What differs from
FedAvg+FixMatch with a few labels at every client:
  1. pseudo-labels come from the received global model;
  2. GPT: the server tunes the averaged proxies so that each is nearer to the clients' proxies of its class than to
     those of other classes (`proxyfl.tuning`);
  3. ICPL: images without a confident label are trained on as well. Each image is pulled to the proxies of its candidate
     classes and pushed away from images that share no candidate with it (`proxyfl.contrastive`). For this, clients
     report the counts of their labels, and the server sends the prior of the classes.
GPT and ICPL can be switched off separately. Without both, and with `proxyfl.loss_over='batch'` (as in the code), it is
FixMatch with global labels. The paper's mean over confident images makes longer steps if few images are confident.

Paper and public code differ. Defaults follow the paper, except for the server's tuning, where they follow the code,
which produced the figures: eq. 2 measures distances to the client's other proxies instead. The variant `code` follows
the code. The experiments' setting is SAGE's, see its variant `paper`, including the code's shared optimizer and
normalisation.
"""

import functools

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, share, whole, word
from fedjax_ssl.client import At, Batches, Loss, global_model, make_confidence, passes, threshold_of, total
from fedjax_ssl.client.passes import check_both_label
from fedjax_ssl.engine import CLASSIFIER, Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.methods.proxyfl.client import COUNTS, FEATURES, PROXIES, contrastive_loss
from fedjax_ssl.methods.proxyfl.server import tune_proxies
from fedjax_ssl.models.projectors import Projection
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import Flow, Given, Link, fedavg

PRIOR = "prior"  # the entry of the server's memory with the shares of the classes
VARIANTS: Variants = {
    "code": {
        "proxyfl.confident": "either",
        "proxyfl.loss_over": "batch",
        "proxyfl.labelled_sets": "received",
        "proxyfl.weights_from": "received",
        "proxyfl.contrastive_over": "all",
        "proxyfl.least_similarity": 1e-6,
        "proxyfl.prior": "pooled",
    },
    # The rows of its ablation.
    "no_tuning": {"proxyfl.tuning": False},
    "no_contrastive": {"proxyfl.contrastive": False},
    "plain_proxyfl": {"proxyfl.tuning": False, "proxyfl.contrastive": False},
}


def defaults() -> Section:
    """The section `config.proxyfl`."""
    section = Section()
    # The model whose confidence must reach it: 'received' (eq. 9), or 'either' of both models (code).
    section.confident = word("received", "either")
    # L_u is the mean over 'confident' images (eq. 9) or over the whole 'batch' (code).
    section.loss_over = word("confident", "batch")
    section.contrastive = True  # ICPL, the clients' loss
    section.contrastive_weight = real(1.0, least=0)  # beta
    # Candidates of a labelled image: its label ('truth'), or those by the 'received' model (code).
    section.labelled_sets = word("truth", "received")
    # The model that weights the proxies of an unconfident image: 'local', or 'received' (code).
    section.weights_from = word("local", "received")
    # The contrastive loss: means over confident and over other images, added ('each'); or one mean over 'all' (code).
    section.contrastive_over = word("each", "all")
    # Images less similar than this do not count as negatives; 1e-6 (code).
    section.least_similarity = real(-1.0, least=-1, most=1)
    # The prior: 'mean' of the clients' class shares in this round, or 'pooled' counts averaged over rounds (code).
    section.prior = word("mean", "pooled")
    section.prior_momentum = share(0.99)  # momentum of this average over rounds
    section.tuning = True  # GPT, the server's step
    section.tuning_epochs = whole(100, least=0)  # Q; 10 on CIFAR-100, where more epochs overfit
    section.tuning_batch_size = whole(4, least=1)  # proxies in a step
    section.tuning_learning_rate = real(0.005, above=0)  # learning rate of its plain SGD
    section.tuning_margin = real(100.0, least=0)  # largest margin of the true class (code); 0: none, as printed
    return section


def proxyfl(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    options = problem.config.proxyfl
    # Almost every image has a weight above 0 by a soft rule, so ICPL would treat all as confident.
    rule = make_confidence(problem, threshold_of(problem), hard=options.contrastive)
    parts = (*CLASSIFIER, FEATURES, PROXIES) if options.contrastive else CLASSIFIER

    check_both_label(problem, "proxyfl")

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        seen, mask = passes(problem, model, batch, at), batch.unlabelled.mask
        labels, weights = rule.label(at.labels, jax.nn.softmax(seen.by_received))
        if options.confident == "either":
            weights = jnp.maximum(weights, rule.label(at.labels, jax.nn.softmax(seen.by_local))[1])
        counted = mask if options.loss_over == "batch" else mask & (weights > 0)  # eq. 9
        pseudo_loss = cross_entropy(seen.strong.logits, labels, counted, weights)
        if not options.contrastive:
            return total(problem, batch, seen, pseudo_loss, weights)
        contrast, counts = contrastive_loss(problem, rule, model, batch, seen, at, labels, weights)
        result = total(problem, batch, seen, pseudo_loss, weights, options.contrastive_weight * contrast)
        return result._replace(metrics={**result.metrics, "contrastive_loss": contrast}, sums={COUNTS: counts})

    links = []
    if options.tuning:
        links.append(
            tune_proxies(
                epochs=options.tuning_epochs,
                batch_size=options.tuning_batch_size,
                learning_rate=options.tuning_learning_rate,
                largest_margin=options.tuning_margin,
            )
        )
    if options.contrastive:
        uniform = jnp.full(problem.num_classes, 1 / problem.num_classes)
        links.append(Link(functools.partial(update_prior, options), lambda params: {PRIOR: uniform}))
    aggregation = fedavg(problem, after_mean=tuple(links), parts=parts)
    method = on_both_kinds(problem, loss, rule, parts=parts, aggregation=aggregation)
    if not options.contrastive:
        return method
    return method._replace(broadcast=lambda state, data, key: global_model(problem, state, extra=state.server[PRIOR]))


def update_prior(options, flow: Flow, given: Given) -> Flow:
    """The share of each class, from the counts of this round's clients; without any it does not change."""
    counts = jnp.where(flow.weights[:, None] > 0, given.received.uploads.metadata[COUNTS], 0.0)
    totals, old = jnp.sum(counts, axis=1, keepdims=True), flow.memory[PRIOR]
    if options.prior == "mean":
        new = jnp.sum(counts / jnp.maximum(totals, 1), axis=0) / jnp.maximum(jnp.sum(totals > 0), 1)
    else:
        pooled = jnp.sum(counts, axis=0) / jnp.maximum(jnp.sum(counts), 1)
        new = options.prior_momentum * old + (1 - options.prior_momentum) * pooled
    return flow._replace(memory={**flow.memory, PRIOR: jnp.where(jnp.sum(counts) > 0, new, old)})


ENTRY = Entry(
    proxyfl,
    title="ProxyFL",
    paper="https://arxiv.org/abs/2602.21078",
    settings=("clients", "some_clients", "server", "profile"),
    defaults=defaults,
    variants=VARIANTS,
    heads={
        FEATURES: lambda config: functools.partial(Projection, True),
        PROXIES: lambda config: functools.partial(Projection, False),
    },
    heads_if={name: lambda config: config.proxyfl.contrastive for name in (FEATURES, PROXIES)},
    mislabels=True,
    tiny={"confidence.threshold": 0.2, "proxyfl.tuning_epochs": 2},
)
