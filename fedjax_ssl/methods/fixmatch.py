"""FedAvg+FixMatch: FixMatch at each client, wherever labels are.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020 (arXiv
2001.07685), as the baseline of SemiFL (its Table 4), FedAnchor (Tables 1 and 2) and FedLabel (Table 1). What differs
from FedAvg:
  1. the pseudo-label of an image is made in the step that trains on it, by the client's current model (or by the
     received one: `confidence.labels_from`);
  2. the strong view of an image is trained towards the label of its weak view if that label is confident;
  3. clients with labels add their cross-entropy to each step's loss. A server with labels trains after aggregation
     (FedAnchor's form), or in parallel from the same global model with half the weight in the mean (SemiFL's).
"""

import jax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, word
from fedjax_ssl.client import At, Batches, Loss, make_confidence, passes, threshold_of, total
from fedjax_ssl.data import server_has_labels
from fedjax_ssl.engine import Method, Problem, no_op
from fedjax_ssl.methods.entry import LABELS_AT, Entry, Variants, one_mean
from fedjax_ssl.methods.frames import on_both_kinds
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import SERVER_MODEL, fedavg, train_server_model

VARIANTS: Variants = {
    "parallel": {"fixmatch.server": "parallel"},  # SemiFL's Table 4
    "fedprox": {"client.proximal": 0.01},  # FedLabel's FedProx+FixMatch; no paper gives mu
    "lpl": {"confidence.labels_from": "local"},  # SAGE's FixMatch-LPL, labels of the client's current model
    "gpl": {"confidence.labels_from": "received"},  # SAGE's FixMatch-GPL, labels of the received global model
}


def defaults() -> Section:
    section = Section()
    # A server with labels trains after aggregation ('alternate') or at the same time as the clients ('parallel').
    section.server = word("alternate", "parallel")
    # Normalisation statistics for labelling: 'train', those of the batch of weak views, which share a pass with strong
    # ones, as in the reference code; 'eval', the model's running or static statistics.
    section.label_mode = word("train", "eval")
    return section


def fixmatch(problem: Problem) -> Method:
    """FedAvg+FixMatch as a Method."""
    options, data = problem.config.fixmatch, problem.config.data
    rule = make_confidence(problem, threshold_of(problem))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        """Eq. 3 and 4: cross-entropy of labelled images, and of strong views towards confident hard labels."""
        seen = passes(problem, model, batch, at, options.label_mode)
        labels, weights = rule.label(at.labels, jax.nn.softmax(seen.scores))
        pseudo_loss = cross_entropy(seen.strong.logits, labels, batch.unlabelled.mask, weights)
        return total(problem, batch, seen, pseudo_loss, weights)

    if options.server == "alternate":
        return on_both_kinds(problem, loss, rule)
    if not server_has_labels(data):
        raise UserError("fixmatch.server='parallel' trains a server with labels, which has none here (data.labels)")
    if parts := tuple(problem.config.personal_parts):
        raise UserError(f"personal_parts={parts} is not for fixmatch.server='parallel', whose server has its own model")

    aggregation = fedavg(problem, server_model=lambda state: state.server[SERVER_MODEL])
    server = lambda data, model: {SERVER_MODEL: model}  # noqa: E731
    return on_both_kinds(problem, loss, rule, server=server, aggregation=aggregation)._replace(
        server_before=lambda state, data, key: train_server_model(problem, state, data, key), server_after=no_op
    )


ENTRY = Entry(
    fixmatch,
    title="FedAvg with FixMatch",
    paper="https://arxiv.org/abs/2001.07685",
    settings=LABELS_AT,
    defaults=defaults,
    variants=VARIANTS,
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "fixmatch.server": "parallel", "confidence.kind": "sat"},
)
