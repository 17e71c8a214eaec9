"""SemiAnAgg: Learning Unlabeled Clients Divergence for Federated Semi-Supervised Learning via Anchor Model Aggregation.

Elbatel et al., TMLR 2024 (arXiv 2407.10327). Some clients have labels for all their images, the others for none. What
differs from FedAvg-Semi:
  1. every client computes the features of its images by an anchor, an untrained network shared by all clients;
  2. a client without labels compares them with the received model's features, by the mean cosine for each pseudo-label
     (eq. 3). A value near 1 means that features are close to random;
  3. the server turns the cosines into weights (eq. 4 and 5): a client whose classes are farther from the anchor than
     those of other clients has a larger weight;
  4. labelled clients have half of the total weight, shared by images; the others have the other half, shared by these
     weights (eq. 6).

Eq. 2 to 6 are implemented as in the public code. The weights lie between 0 and 1/(K_U - 1) for K_U clients without
labels, and hardly differ from 1/K_U: compare with `fedavg_semi,uniform`. Cosines below 0 count as 0. Pseudo-labels
count by `config.confidence` (in the paper FlexMatch, behind a warm-up).
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import MOST_SEED, Section, share, whole, word
from fedjax_ssl.client import ACCEPTED, STANDARD, Examples
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Method, Metrics, Phase, Problem, Received, State
from fedjax_ssl.methods.entry import Entry, Variants, few_labels
from fedjax_ssl.methods.frames import TEN_CLIENTS, trained_by_role, unlabelled_images
from fedjax_ssl.models import Outputs
from fedjax_ssl.models.untrained import kaiming_model
from fedjax_ssl.ops.losses import unit_vectors
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import with_rows, without

FIELDS = {"data.labels": "some_clients", "confidence.threshold": 0.9}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on SVHN, behind a warm-up of 250 rounds; numbers as in its code
        **TEN_CLIENTS,
        "num_rounds": 500,
        "model.name": "resnet18",
        "client.clip_norm": 0.0,
        "client.persistent": True,
        "client.unlabelled_learning_rate": 0.02,
        "client.unlabelled_clip_norm": 5.0,
        "augment.num_ops": 3,
        "client.labelled_views": "both",
        "client.spare_classifier": True,
        "confidence.kind": "flexmatch",
    },
    # The balanced softmax for every data set, with a share of almost 0 for absent classes.
    "code": {
        "confidence.kind": "flexmatch",
        "client.logit_adjustment": 1.0,
        "client.share_offset": 1e-12,
        "confidence.accepted": "confident",
        "semianagg.without_labels": "labelled",
    },
    # The paper's rule. Its thresholds start at 0, so an untrained model with a few labels at each client collapses.
    "flexmatch": {"confidence.kind": "flexmatch"},
    "balanced": {"client.logit_adjustment": 1.0},  # the balanced softmax at labelled clients, as on CIFAR-100-LT
}
ANCHOR = "anchor_features"  # a client's memory: the anchor's features of its images
COSINES = "class_cosines"  # metadata of uploads
WEIGHT = "weight_among_unlabelled"  # a metric: r_k of each client, NaN for one without images without labels


def defaults() -> Section:
    section = Section()
    # lambda_1, the weight of all labelled clients together; other clients have the rest.
    section.labelled_share = share(0.5)
    section.anchor_seed = whole(0, least=0, most=MOST_SEED)  # the seed from which clients create the anchor
    # Weights of clients without labels in a round in which none has a pseudo-label (see confidence.accepted):
    # 'uniform', the limit of eq. 5; or 'labelled': labelled clients have all the weight.
    section.without_labels = word("uniform", "labelled")
    return section


def semianagg(problem: Problem) -> Method:
    """Eq. 2 to 6 as a Method."""
    options, network = problem.config.semianagg, problem.network

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        anchor = kaiming_model(network, jax.random.key(options.anchor_seed))
        rows, size = data.client_index, problem.config.eval_batch_size  # of the clients that are here
        features = network.predict_rows(anchor, data.inputs, rows.reshape(-1), size).features
        return {ANCHOR: unit_vectors(features).reshape(*rows.shape, -1)}

    def tell(outputs: Outputs, examples: Examples, confident: jax.Array) -> dict[str, Any]:
        cosines = jnp.sum(unit_vectors(outputs.features) * examples.own[ANCHOR], axis=-1)
        labels = jnp.argmax(outputs.logits, axis=-1)
        return {COSINES: class_cosines(cosines, labels, confident, problem.num_classes)}

    def weights(received: Received) -> jax.Array:
        told = jnp.clip(received.uploads.metadata[COSINES], 0.0, 1.0)
        scores = diversity(told, unlabelled_images(received) > 0)
        if options.without_labels == "uniform":
            return scores
        told = jnp.where(received.accepted, received.uploads.metadata[ACCEPTED], 0.0)
        return jnp.where(jnp.sum(told) > 0, scores, 0.0)

    method = trained_by_role(problem, weights, options.labelled_share, tell=tell, own=own)

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        state, metrics = method.aggregate(state, data, received, key)
        nobody = jnp.full(len(data.client_size), jnp.nan)
        told = with_rows(nobody, received.clients, weights(received), unlabelled_images(received) > 0)
        return state, {**metrics, WEIGHT: told}

    phases = tuple(without_memory(phase, ANCHOR) for phase in method.phases)
    return method._replace(phases=phases, aggregate=aggregate)


def class_cosines(cosines: jax.Array, labels: jax.Array, compared: jax.Array, num_classes: int) -> jax.Array:
    """w_c, the mean cosine over a client's images of each pseudo-label (eq. 3), float32 [..., C]; at least 0.

    Cosines are float32 [..., n], labels int32 [..., n], and the images that count bool [..., n]. A class without an
    image has 1.
    """
    of_class = jax.nn.one_hot(labels, num_classes) * compared[..., None]
    counts = jnp.sum(of_class, axis=-2)
    means = jnp.sum(of_class * cosines[..., None], axis=-2) / jnp.maximum(counts, 1)
    return jnp.where(counts > 0, jnp.maximum(means, 0.0), 1.0)


def diversity(cosines: jax.Array, unlabelled: jax.Array) -> jax.Array:
    """r_k, the weights of the clients without labels (eq. 4 and 5), float32 [R], from w of each upload, float32 [R, C].

        W_c^k = w_c^k / sum_j w_c^j,    r^k = sum_c (1 - W_c^k) / sum_j sum_c (1 - W_c^j)

    Only uploads of clients that have images without labels, bool [R], have a weight. The weights sum to 1; a single
    client has 1, and without any all are 0. If all cosines of a class are 0, its W is uniform.
    """
    number = jnp.maximum(jnp.sum(unlabelled), 1)
    cosines = jnp.where(unlabelled[:, None], cosines, 0.0)
    total = jnp.sum(cosines, axis=0)
    shares = jnp.where(total > 0, cosines / jnp.where(total > 0, total, 1.0), 1.0 / number)
    scores = jnp.where(unlabelled, jnp.sum(1.0 - shares, axis=1), 0.0)
    of_all = jnp.sum(scores)
    # For a single client the scores are 0, up to rounding.
    several = (number > 1) & (of_all > 0)
    return jnp.where(several, scores / jnp.where(several, of_all, 1.0), unlabelled / number)


def without_memory(phase: Phase, name: str) -> Phase:
    """A phase whose `prepare` reads an entry of the clients' memory, but whose steps neither read nor carry it."""

    def start(received: Broadcast, data: FederatedData, work, own):
        return phase.start(received, data, work, without(own, name))

    return phase._replace(start=start)


ENTRY = Entry(
    semianagg,
    title="SemiAnAgg",
    paper="https://arxiv.org/abs/2407.10327",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    heads={STANDARD: lambda model: None},
    heads_if={STANDARD: lambda config: config.confidence.kind == "acr"},
    mislabels=True,
    advice=few_labels,
    tiny={"confidence.threshold": 0.2, "confidence.kind": "acr", "clients_per_round": 8},
)
