"""ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised Learning.

Chen and Wang, CVPR 2026 (arXiv 2602.21078). A class's proxy is its row of the classifier's weight. What differs from
FedAvg+FixMatch with a few labels at every client:
  1. pseudo-labels come from the received global model;
  2. GPT: the server tunes the averaged proxies so that each is nearer to the clients' proxies of its class than to
     those of other classes;
  3. ICPL: images without a confident label are trained on as well. Each image is pulled to the proxies of its candidate
     classes and pushed away from images that share no candidate with it. For this, clients report the counts of their
     labels, and the server sends the prior of the classes.

Paper and public code (DuowenC/FSSLlib f732a27) differ. Defaults follow the paper, except for the server's tuning, where
they follow the code, which produced the figures. The variant `code` follows the code; see docs/methods/proxyfl.md.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.fields import Section, is_on, real, whole, word
from fedjax_ssl.client import At, Batches, Confidence, Loss, global_model, make_confidence, passes, threshold_of, total
from fedjax_ssl.client.passes import Passed, check_both_label
from fedjax_ssl.engine import CLASSIFIER, Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.models.projectors import Projection
from fedjax_ssl.ops.batches import batch_positions, epoch_orders, num_batches
from fedjax_ssl.ops.losses import cross_entropy, mean_present, unit_vectors
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import add_up, moving_average
from fedjax_ssl.server import Flow, Given, Link, fedavg
from fedjax_ssl.server.aggregation import counts_told, most_examples

VARIANTS: Variants = {
    "code": {"proxyfl.details": "code", "proxyfl.loss_over": "batch", "proxyfl.contrastive_over": "all"},
    # The rows of its ablation.
    "no_tuning": {"proxyfl.tuning_epochs": 0},
    "no_contrastive": {"proxyfl.contrastive_weight": 0.0},
    "plain_proxyfl": {"proxyfl.tuning_epochs": 0, "proxyfl.contrastive_weight": 0.0},
}
FEATURES, PROXIES = "feature_projection", "proxy_projection"  # the heads P_f and P_w
COUNTS = "class_counts"  # metadata of uploads: how many images of each class a client has labelled or trusts
PRIOR = "prior"  # the entry of the server's memory with the shares of the classes
# The code's numbers: of the server's tuning, and of its own prior and negatives.
BATCH_SIZE, LEARNING_RATE, LARGEST_MARGIN = 4, 0.005, 100.0
PRIOR_MOMENTUM, LEAST_SIMILARITY = 0.99, 1e-6


def defaults() -> Section:
    section = Section()
    # Where paper and code differ. 'paper': an image is confident by the received model (eq. 9), a labelled image's
    # candidate is its label, the local model weights proxies, and the prior is the mean of the clients' class shares.
    # 'code': an image is confident by either model; the received model gives a labelled image's candidates, and weights
    # proxies; images less similar than 1e-6 are no negatives; the prior is an average over rounds of pooled counts.
    section.details = word("paper", "code")
    # L_u is the mean over 'confident' images (eq. 9) or over the whole 'batch' (code).
    section.loss_over = word("confident", "batch")
    # The contrastive loss: means over confident and over other images, added ('each'); or one mean over 'all' (code).
    section.contrastive_over = word("each", "all")
    section.contrastive_weight = real(1.0, least=0)  # beta, the weight of ICPL; 0: without it
    # Q, epochs of the server's tuning (GPT); 10 on CIFAR-100, where more epochs overfit; 0: without it
    section.tuning_epochs = whole(100, least=0)
    return section


def proxyfl(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    options = problem.config.proxyfl
    contrastive, as_code = is_on(options.contrastive_weight), options.details == "code"
    # Almost every image has a weight above 0 by a soft rule, so ICPL would treat all as confident.
    rule = make_confidence(problem, threshold_of(problem), hard=contrastive)
    parts = (*CLASSIFIER, FEATURES, PROXIES) if contrastive else CLASSIFIER
    check_both_label(problem, "proxyfl")

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        seen, mask = passes(problem, model, batch, at), batch.unlabelled.mask
        labels, weights = rule.label(at.labels, jax.nn.softmax(seen.by_received))
        if as_code:
            weights = jnp.maximum(weights, rule.label(at.labels, jax.nn.softmax(seen.by_local))[1])
        counted = mask if options.loss_over == "batch" else mask & (weights > 0)  # eq. 9
        pseudo_loss = cross_entropy(seen.strong.logits, labels, counted, weights)
        if not contrastive:
            return total(problem, batch, seen, pseudo_loss, weights)
        contrast, counts = contrastive_loss(problem, rule, model, batch, seen, at, labels, weights)
        result = total(problem, batch, seen, pseudo_loss, weights, options.contrastive_weight * contrast)
        return result._replace(metrics={**result.metrics, "contrastive_loss": contrast}, sums={COUNTS: counts})

    links = [Link(functools.partial(tune_proxies, options.tuning_epochs))] if options.tuning_epochs else []
    if contrastive:
        uniform = jnp.full(problem.num_classes, 1 / problem.num_classes)
        links.append(Link(functools.partial(update_prior, problem, as_code), lambda params: {PRIOR: uniform}))
    aggregation = fedavg(problem, after_mean=tuple(links), parts=parts)
    method = on_both_kinds(problem, loss, rule, parts=parts, aggregation=aggregation)
    if not contrastive:
        return method
    return method._replace(broadcast=lambda state, data, key: global_model(problem, state, extra=state.server[PRIOR]))


# --- ICPL, the clients' additional loss. ------------------------------------------------------------------------------


def contrastive_loss(
    problem: Problem,
    rule: Confidence,
    model: Model,
    batch: Batches,
    seen: Passed,
    at: At,
    labels: jax.Array,
    weights_of_labels: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """ICPL: pulls every image to the proxies of its candidate classes, and away from images that share none of them.

    The only candidate of a confident image is its label; those of other images are the classes more likely than in the
    prior. The labels of the unlabelled images and their weights are int32 and float32 [B]. Returns the loss; and the
    counts of labels by class that the client reports, float32 [C], 0 before its last epoch.
    """
    options, num_classes, prior = problem.config.proxyfl, problem.num_classes, at.received.extra
    as_code = options.details == "code"
    mask, counts, p = batch.unlabelled.mask, weights_of_labels > 0, jax.nn.softmax(seen.by_received)

    def candidates(p, labels, counts):  # xi_i
        return jnp.where(counts[:, None], jax.nn.one_hot(labels, num_classes) > 0, p > prior)

    xi = candidates(p, labels, counts)
    weights = jnp.where(counts[:, None], 1.0, p if as_code else jax.nn.softmax(seen.by_local)) * xi
    # Both views of an image have the same candidates; labelled images are only negatives.
    sets, masks, pulls = [xi, xi], [mask, mask], [weights, weights]
    views = [seen.weak, seen.strong]
    told = [jax.nn.one_hot(labels, num_classes) * (counts & mask)[:, None]]
    if batch.labelled:
        of_labelled = jax.nn.one_hot(batch.labelled.labels, num_classes)
        labelled_xi = of_labelled > 0
        if as_code:
            q = jax.nn.softmax(seen.labelled_by_received)
            of_known, weights_of_known = rule.label(at.labels, q)
            labelled_xi = candidates(q, of_known, weights_of_known > 0)
        sets, masks, pulls = [*sets, labelled_xi], [*masks, batch.labelled.mask], [*pulls, jnp.zeros_like(of_labelled)]
        views.append(seen.labelled)
        told.append(of_labelled * batch.labelled.mask[:, None])
    of_sets, present, number = jnp.concatenate(sets), jnp.concatenate(masks), len(mask)

    z = unit_vectors(jnp.concatenate([view.heads[FEATURES] for view in views]))
    omega = model.params["classifier"]["kernel"].T
    v = unit_vectors(jnp.matmul(omega, model.params[PROXIES]["kernel"], precision="highest"))
    positives = jnp.sum(z * jnp.matmul(jnp.concatenate(pulls), v, precision="highest"), axis=-1)
    least = LEAST_SIMILARITY if as_code else -1.0
    losses = disjoint_sets_losses(z, positives, of_sets, present, least)[: 2 * number]
    usable = (present & jnp.any(of_sets, axis=1))[: 2 * number]
    sure = jnp.tile(counts, 2)
    groups = [usable] if options.contrastive_over == "all" else [usable & sure, usable & ~sure]
    value = add_up(mean_present(losses, group) for group in groups)
    last_epoch = at.step >= at.num_steps - at.num_steps // problem.config.client.epochs
    return value, jnp.where(last_epoch, jnp.sum(jnp.concatenate(told), axis=0), 0.0)


def disjoint_sets_losses(
    vectors: jax.Array, positives: jax.Array, sets: jax.Array, present: jax.Array, least: float
) -> jax.Array:
    """Each example's contrastive loss against the examples that share no candidate class with it: float32 [B].

        l_i = -log( exp(s_i) / (exp(s_i) + sum_{j in R_i} exp(z_i . z_j)) ),    R_i = {j : xi_j and xi_i disjoint}

    z are unit vectors, float32 [B, D]; s (`positives`) is float32 [B]; xi (`sets`) is bool [B, C], and an example with
    an empty set is never a negative; `present` is False for padding. Pairs less similar than `least` are no negatives.
    """
    similarities = jnp.matmul(vectors, vectors.T, precision="highest")
    shared = jnp.matmul(sets.astype(jnp.float32), sets.T.astype(jnp.float32)) > 0
    usable = present & jnp.any(sets, axis=1)
    negative = ~shared & usable[None, :] & (similarities >= least)
    logits = jnp.concatenate([positives[:, None], jnp.where(negative, similarities, -jnp.inf)], axis=1)
    return jax.nn.logsumexp(logits, axis=1) - positives


# --- The server. ------------------------------------------------------------------------------------------------------


def update_prior(problem: Problem, as_code: bool, flow: Flow, given: Given) -> Flow:
    """The share of each class, from the counts of this round's clients; without any it does not change."""
    ratio = problem.config.consistency.unlabelled_ratio  # there are at most this many times as many steps as batches
    most = ratio * (1 + ratio) * most_examples(problem, given.received)
    counts = jnp.where(flow.weights[:, None] > 0, counts_told(given.received, COUNTS, most), 0.0)
    totals, old = jnp.sum(counts, axis=1, keepdims=True), flow.memory[PRIOR]
    if as_code:
        pooled = jnp.sum(counts, axis=0) / jnp.maximum(jnp.sum(counts), 1)
        new = moving_average(old, pooled, PRIOR_MOMENTUM)
    else:
        new = jnp.sum(counts / jnp.maximum(totals, 1), axis=0) / jnp.maximum(jnp.sum(totals > 0), 1)
    return flow._replace(memory={**flow.memory, PRIOR: jnp.where(jnp.sum(counts) > 0, new, old)})


def tune_proxies(epochs: int, flow: Flow, given: Given) -> Flow:
    """GPT after the mean. The classifier's kernel is trained; its bias stays the mean."""
    params = flow.model.params
    classifier, uploads = params["classifier"], given.received.uploads.model.params
    uploaded = jnp.swapaxes(uploads["classifier"]["kernel"], 1, 2)
    tuned = tuned_proxies(classifier["kernel"].T, uploaded, flow.weights > 0, given.key, epochs).T
    params = {**params, "classifier": {**classifier, "kernel": tuned}}
    return flow._replace(model=flow.model._replace(params=params))


def tuned_proxies(average: jax.Array, proxies: jax.Array, active: jax.Array, key: jax.Array, epochs: int) -> jax.Array:
    """Plain SGD on the points (omega_m^c, c) of all clients m and classes c: the global proxies, float32 [C, F].

        l(m, c) = -log( exp(-d_c) / sum_j exp(-d_j) )
        d_j = |omega_m^c - Omega^j|

    A margin is added to the true distance d_c: the distance of the most isolated averaged proxy to its nearest
    neighbour, at most `LARGEST_MARGIN`. The clients' proxies are float32 [R, C, F], of which the rows `active` are
    present. The global proxies start from the `average`.
    """
    rows, num_classes = proxies.shape[:2]
    proxies = jnp.where(active[:, None, None], proxies, 0.0)
    clients, classes = jnp.divmod(jnp.arange(rows * num_classes), num_classes)
    present = active[clients]
    orders = epoch_orders(key, present, epochs)
    gaps = jnp.where(jnp.eye(num_classes, dtype=bool), jnp.inf, distances(average[:, None], average))
    margin = jnp.minimum(jnp.max(jnp.min(gaps, axis=1)), LARGEST_MARGIN)

    def step(current: jax.Array, index: jax.Array):
        epoch, batch = jnp.divmod(index, steps)
        places, mask = batch_positions(batch, BATCH_SIZE, jnp.sum(present))
        points = orders[epoch, jnp.minimum(places, len(classes) - 1)]
        of_client, labels = proxies[clients[points]], classes[points]

        def loss(tuned):
            d = distances(of_client[jnp.arange(len(points)), labels][:, None], tuned)
            logits = -(d + margin * jax.nn.one_hot(labels, num_classes))
            return mean_present(optax.softmax_cross_entropy_with_integer_labels(logits, labels), mask)

        return current - LEARNING_RATE * jax.grad(loss)(current), None

    steps = num_batches(len(classes), BATCH_SIZE)
    return jax.lax.scan(step, average, jnp.arange(epochs * steps))[0]


def distances(a: jax.Array, b: jax.Array) -> jax.Array:
    """Euclidean distances along the last axis; equal vectors have distance 0 and a zero gradient."""
    squared = jnp.sum(jnp.square(a - b), axis=-1)
    positive = squared > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)


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
    heads_if={name: lambda config: config.proxyfl.contrastive_weight > 0 for name in (FEATURES, PROXIES)},
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "proxyfl.tuning_epochs": 2},
)
