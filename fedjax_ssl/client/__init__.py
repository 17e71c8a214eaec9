"""The clients' side: labels, confidence, local training. Uses the engine's types; does not import server code."""

from fedjax_ssl.client.acr import STANDARD
from fedjax_ssl.client.by_role import LABELLED, jobs_without_labels, labelled_phase, unlabelled_phase
from fedjax_ssl.client.confidence import Confidence, make_confidence, own_confidence, qualify
from fedjax_ssl.client.consistency import Rule, Views, Weigh, consistency_phase
from fedjax_ssl.client.deck import Batch, Deck, Examples, Work
from fedjax_ssl.client.fix_mix import fix_mix_phase
from fedjax_ssl.client.labels import (
    Labelled,
    label_cohort,
    label_for_report,
    score_by_own_models,
    score_cohort,
    states_and_report,
    weak_views,
)
from fedjax_ssl.client.local_sgd import (
    At,
    Hooks,
    Loss,
    LossFunction,
    global_model,
    local_sgd,
    own_optimizers,
    trained_models,
)
from fedjax_ssl.client.mean_teacher import mean_teacher_phase, own_teachers
from fedjax_ssl.client.on_labels import (
    OnLabels,
    adjusted_cross_entropy,
    class_counts,
    class_shares,
    jobs_on_labels,
    loss_on_labels,
)
from fedjax_ssl.client.self_training import ACCEPTED, needs_prior, own_trainer, self_training, trained_parts_of

__all__ = [
    "ACCEPTED",
    "LABELLED",
    "STANDARD",
    "At",
    "Batch",
    "Confidence",
    "Deck",
    "Examples",
    "Hooks",
    "Labelled",
    "Loss",
    "LossFunction",
    "OnLabels",
    "Rule",
    "Views",
    "Weigh",
    "Work",
    "adjusted_cross_entropy",
    "class_counts",
    "class_shares",
    "consistency_phase",
    "fix_mix_phase",
    "global_model",
    "jobs_on_labels",
    "jobs_without_labels",
    "label_cohort",
    "label_for_report",
    "labelled_phase",
    "local_sgd",
    "loss_on_labels",
    "make_confidence",
    "mean_teacher_phase",
    "needs_prior",
    "own_confidence",
    "own_optimizers",
    "own_teachers",
    "own_trainer",
    "qualify",
    "score_by_own_models",
    "score_cohort",
    "self_training",
    "states_and_report",
    "trained_models",
    "trained_parts_of",
    "unlabelled_phase",
    "weak_views",
]
