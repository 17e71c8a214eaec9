"""FedAvg-Semi: labelled and unlabelled clients are averaged separately, and each mean has half the weight.

The baseline of SemiAnAgg (TMLR 2024, arXiv 2407.10327, eq. 2). Some clients have labels for all their images,
the others for none. What differs from FedAvg:
  1. clients with labels minimise cross-entropy, the others train on the labels that the received model gives their
     images, weighted by `config.confidence` (in the paper FlexMatch, behind a warm-up);
  2. the mean is l1 times that of labelled clients, weighted by images, plus l2 times that of the others, weighted by
     the pseudo-labels they trained on. Without any pseudo-label the labelled clients have all the weight.
A client with images of both kinds trains on one after the other and counts in both means.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, word
from fedjax_ssl.client import ACCEPTED, STANDARD
from fedjax_ssl.engine import Method, Problem, Received
from fedjax_ssl.methods.entry import Entry, Variants, few_labels
from fedjax_ssl.methods.frames import trained_by_role, unlabelled_images
from fedjax_ssl.server.aggregation import counts_told, most_examples

FIELDS = {"data.labels": "some_clients", "confidence.threshold": 0.9}
VARIANTS: Variants = {
    "uniform": {"fedavg_semi.unlabelled_weights": "uniform"},
    "together": {"fedavg_semi.apart": False},  # FedAvg in SemiAnAgg's ablation
    "code": {"confidence.kind": "flexmatch", "confidence.accepted": "confident"},  # as SemiAnAgg's code counts them
    # The paper's rule. Its thresholds start at 0, so an untrained model with a few labels at each client collapses.
    "flexmatch": {"confidence.kind": "flexmatch"},
}


def defaults() -> Section:
    section = Section()
    section.apart = True  # averages labelled and other clients separately; False: one mean of all
    # Weights among clients without labels: 'accepted', the pseudo-labels they trained on (eq. 2), see
    # confidence.accepted; or 'uniform'.
    section.unlabelled_weights = word("accepted", "uniform")
    return section


def fedavg_semi(problem: Problem) -> Method:
    """Eq. 2 as a Method."""
    options = problem.config.fedavg_semi

    def accepted(received: Received) -> jax.Array:
        """N_k^U, the pseudo-labels that the client trained on, float32 [R]."""
        return counts_told(received, ACCEPTED, most_examples(problem, received))

    weights = accepted if options.unlabelled_weights == "accepted" else any_images
    # l1 of eq. 2, the weight of all labelled clients together, is a half.
    return trained_by_role(problem, weights if options.apart else None, 0.5)


def any_images(received: Received) -> jax.Array:
    """1 for a client with images without a label, else 0, float32 [R]."""
    return (unlabelled_images(received) > 0).astype(jnp.float32)


ENTRY = Entry(
    fedavg_semi,
    title="FedAvg-Semi",
    paper="https://arxiv.org/abs/2407.10327",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    heads={STANDARD: lambda model: None},
    heads_if={STANDARD: lambda config: config.confidence.kind == "acr"},
    mislabels=True,
    advice=few_labels,
    tiny={"confidence.threshold": 0.2, "clients_per_round": 8},
)
