"""The fields that all methods share; each file of this folder has some of their sections."""

from fedjax_ssl.fields.data import data_fields, residence_fields
from fedjax_ssl.fields.encoder import encoder_fields
from fedjax_ssl.fields.labels import confidence_fields, consistency_fields, trainer_fields
from fedjax_ssl.fields.model import model_fields, probe_fields
from fedjax_ssl.fields.section import MOST_SEED, Section, several, whole, word
from fedjax_ssl.fields.training import client_fields, server_fields
from fedjax_ssl.fields.uploads import (
    aggregation_fields,
    attack_fields,
    availability_fields,
    compression_fields,
    privacy_fields,
)
from fedjax_ssl.fields.views import augment_fields, views_fields

# Fields that change no result beyond rounding: they may differ when a run is resumed.
CHANGES_NO_RESULT = (
    "checkpoint_every",
    "checkpoint_every_persistent",
    "devices",
    "encoder.batch_size",
    "eval_batch_size",
    "lanes",
    "log.report",
    "log.tensorboard",
    "log.wandb_project",
    "residence.clients",
    "residence.data",
    "rounds_per_dispatch",
    "snapshot_rounds",
)


def shared_fields() -> Section:
    """The fields that all methods share, with their defaults and ranges; each method adds a section."""
    config = Section()
    config.method = "fedanchor"  # a name of docs/methods.md, or your own FILE.py:NAME
    config.seed = whole(0, least=0, most=MOST_SEED)  # partition, initialisation, cohorts, everything random
    # Several runs with these seeds instead of one, in WORKDIR/seed_N.
    config.seeds = several((), whole(least=0, most=MOST_SEED), distinct=True)
    config.num_rounds = whole(500, least=1)  # T, the rounds of the run
    config.num_clients = whole(100, least=1)  # K, of the whole federation
    # M, the cohort: drawn in each round without replacement. rscfed draws groups of its own.
    config.clients_per_round = whole(10, least=1)
    # How a cohort of more than 16,384 clients is drawn: 'keyed', at a cost that does not grow with them; or 'permuted',
    # by sorting all of them, as versions before 0.2 did.
    config.cohorts = word("keyed", "permuted")
    # Start from the model of another run, RUN or RUN/checkpoints/ROUND, in all parts that both have. In a folder of
    # several seeds it is the run of this seed. server.pretrain_epochs train it further.
    config.init_from = ""
    config.schedule = word("constant", "cosine")  # of all learning rates over rounds; 'cosine' falls to 0
    # Further measures after each round, in brackets: 'balanced_accuracy', 'precision', 'auc', 'shots', 'knn'; see
    # docs/reference/measures.md.
    config.eval_measures = several((), word("balanced_accuracy", "precision", "auc", "shots", "knn"), distinct=True)
    # Of 'shots': classes with fewer training images than the first are 'few', with more than the last 'many'.
    config.eval_shots = several((20, 100), whole(least=0))
    config.eval_neighbours = whole(200, least=1)  # of 'knn': how many neighbours vote
    config.checkpoint_every = whole(10, least=1)  # rounds between two checkpoints
    # The same where a checkpoint has a model or an optimiser for each client.
    config.checkpoint_every_persistent = whole(50, least=1)
    # Rounds after which the report shows the latent space, besides the last one; 0: before the first.
    config.snapshot_rounds = several((), whole(least=0))
    # Performance only; None takes the measured default of the backend.
    config.lanes = whole(None, least=1)  # clients trained side by side on each device
    config.devices = whole(None, least=1)  # how many devices to use; None: all, on a CPU one per client
    config.eval_batch_size = whole(None, least=1)  # images at a time in labelling and evaluation
    # Rounds in one compiled call, between two looks at progress and signals; 1 with data.validation.
    config.rounds_per_dispatch = whole(None, least=1)

    config.data = data_fields()
    config.residence = residence_fields()
    config.model = model_fields()
    config.encoder = encoder_fields()
    config.augment = augment_fields()
    config.views = views_fields()
    config.probe = probe_fields()
    config.client = client_fields()
    config.server = server_fields()
    config.aggregation = aggregation_fields()
    config.attack = attack_fields()
    config.compression = compression_fields()
    config.availability = availability_fields()
    config.privacy = privacy_fields()
    config.confidence = confidence_fields()
    config.trainer = trainer_fields()
    config.consistency = consistency_fields()
    config.log = log_fields()
    return config


def log_fields() -> Section:
    """What a run shows."""
    section = Section()
    section.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md when a run is over
    section.tensorboard = True  # event files in WORKDIR/tensorboard
    section.wandb_project = ""  # of Weights & Biases, with a run for each seed; '': none
    return section
