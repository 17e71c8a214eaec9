"""The clients' side: labels, confidence, local training. Uses the engine's types; does not import server code."""

from fedjax_ssl.client.acr import STANDARD
from fedjax_ssl.client.by_role import LABELLED, labelled_phase, unlabelled_phase, unlabelled_plan
from fedjax_ssl.client.confidence import Confidence, make_confidence, own_confidence, qualify, threshold_of
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.fix_mix import fix_mix_phase
from fedjax_ssl.client.labels import label_cohort, labels_for_report, labels_of_received, score_cohort, weak_views
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
