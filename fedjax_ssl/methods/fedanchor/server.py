"""The server's contrastive loss on its anchors, which orders a head's space by labels (FedAnchor, eq. 1 and 2)."""

import jax

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.ops.losses import common_direction_penalty, label_contrastive_loss
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server.training import ServerLoss, ServerLossResult


def contrastive_loss(
    problem: Problem,
    data: FederatedData,
    head: str,
    *,
    augmentation: str,
    temperature: float,
    negatives: str,
    self_pairs: bool,
    common_direction_weight: float,
) -> ServerLoss:
    """The label contrastive loss of a head's outputs on augmented anchors.

    Args:
        problem: the run's.
        data: the federation's data.
        head: the head's name.
        augmentation: 'none', 'weak' or 'strong'.
        temperature, negatives, self_pairs: see `label_contrastive_loss`.
        common_direction_weight: the weight of `common_direction_penalty`; 0: no penalty.

    Returns:
        The loss. Its metric `contrastive_loss` excludes the penalty.
    """
    augment = {"none": lambda _, images: images, "weak": problem.weak, "strong": problem.strong}[augmentation]

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        (outputs,), batch_stats = problem.network.train(model, (augment(key, data.inputs[rows]),), mask)
        embeddings = outputs.heads[head]
        loss = label_contrastive_loss(embeddings, labels, mask, problem.num_classes, temperature, negatives, self_pairs)
        metrics = {"contrastive_loss": loss}
        if common_direction_weight:
            loss += common_direction_weight * common_direction_penalty(embeddings, mask)
        return loss, (batch_stats, metrics)

    return loss_fn
