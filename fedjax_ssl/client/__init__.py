"""The clients' side: labels, confidence, local training. Uses the engine's types; does not import server code."""

from fedjax_ssl.client.acr import STANDARD
from fedjax_ssl.client.by_role import LABELLED, labelled_phase, unlabelled_phase, unlabelled_plan
from fedjax_ssl.client.confidence import Confidence, make_confidence, own_confidence, qualify
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.fix_mix import fix_mix_phase
from fedjax_ssl.client.labels import (
    label_cohort,
    labels_for_report,
    labels_of_received,
    score_by_own_models,
    score_cohort,
    weak_views,
)
from fedjax_ssl.client.mean_teacher import mean_teacher_phase, own_teachers
from fedjax_ssl.client.on_labels import (
    adjusted_cross_entropy,
    class_counts,
    class_shares,
    labelled_plan,
    loss_on_labels,
)
from fedjax_ssl.client.passes import both_kinds, passes, total, train_views
from fedjax_ssl.client.self_training import ACCEPTED, is_acr, own_states, self_training, trained_parts_of
from fedjax_ssl.client.steps import (
    At,
    Batches,
    Loss,
    LossFunction,
    Plan,
    global_model,
    local_training,
    own_optimizers,
    trained_models,
)

__all__ = [
    "ACCEPTED",
    "LABELLED",
    "STANDARD",
    "At",
    "Batch",
    "Batches",
    "Confidence",
    "Deck",
    "Examples",
    "Loss",
    "LossFunction",
    "Plan",
    "adjusted_cross_entropy",
    "both_kinds",
    "class_counts",
    "class_shares",
    "fix_mix_phase",
    "global_model",
    "is_acr",
    "label_cohort",
    "labelled_phase",
    "labelled_plan",
    "labels_for_report",
    "labels_of_received",
    "local_training",
    "loss_on_labels",
    "make_confidence",
    "mean_teacher_phase",
    "own_confidence",
    "own_optimizers",
    "own_states",
    "own_teachers",
    "passes",
    "qualify",
    "score_by_own_models",
    "score_cohort",
    "self_training",
    "total",
    "train_views",
    "trained_models",
    "trained_parts_of",
    "unlabelled_phase",
    "unlabelled_plan",
    "weak_views",
]
