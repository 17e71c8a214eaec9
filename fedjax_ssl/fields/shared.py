"""The fields that all methods share; each file of this folder has some of their sections."""

from fedjax_ssl.fields.data import data_fields, residence_fields
from fedjax_ssl.fields.encoder import encoder_fields
from fedjax_ssl.fields.labels import confidence_fields, consistency_fields, trainer_fields
from fedjax_ssl.fields.model import model_fields, probe_fields
from fedjax_ssl.fields.section import MOST_SEED, Section, real, several, text, whole, word
from fedjax_ssl.fields.training import client_fields, server_fields
from fedjax_ssl.fields.uploads import (
    aggregation_fields,
    attack_fields,
    availability_fields,
    compression_fields,
    privacy_fields,
)
from fedjax_ssl.fields.views import augment_fields, views_fields

# Fields that change results by rounding only: they may differ when a run is resumed.
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
    # How a cohort of more than 16,384 clients is drawn: 'keyed', at a cost independent of their number; or 'permuted',
    # by sorting all of them, as in versions before 0.2.
    config.cohorts = word("keyed", "permuted")
    # Start from another run's model, RUN or RUN/checkpoints/ROUND, for all parts that both models have. In a folder of
    # several seeds it is the run with this seed. server.pretrain_epochs train it further.
    config.init_from = ""
    config.schedule = word("constant", "cosine")  # of all learning rates over rounds; 'cosine' falls to 0
    # Further measures after each round, a tuple of 'balanced_accuracy', 'precision', 'auc', 'shots', 'knn'; see
    # docs/reference/measures.md.
    config.eval_measures = several((), word("balanced_accuracy", "precision", "auc", "shots", "knn"), distinct=True)
    # Of 'shots': classes with fewer training images than the first number are 'few', with more than the last 'many'.
    config.eval_shots = several((20, 100), whole(least=0))
    config.eval_neighbours = whole(200, least=1)  # of 'knn': number of neighbours that vote
    # With data.client_test_share: rounds between two tests of all clients on their own test images, in metrics.jsonl.
    # 0: only at the end, in summary.json. A test costs local training of all clients.
    config.eval_clients_every = whole(0, least=0)
    # Parts of the model that each client keeps for itself, as in ('classifier',): never sent, never averaged. See
    # docs/how_to/personal_models.md.
    config.personal_parts = several((), text(), distinct=True)
    config.checkpoint_every = whole(10, least=1)  # rounds between two checkpoints
    # The same if checkpoints contain a model or an optimizer state for each client.
    config.checkpoint_every_persistent = whole(50, least=1)
    # Rounds after which the report shows the latent space, besides the last one; 0: before the first.
    config.snapshot_rounds = several((), whole(least=0))
    # Performance only; None: the measured default of the backend.
    config.lanes = whole(None, least=1)  # clients trained side by side on each device
    config.devices = whole(None, least=1)  # how many devices to use; None: all, on a CPU one per client
    config.eval_batch_size = whole(None, least=1)  # images per batch in labelling and evaluation
    # Rounds in one compiled call. Progress and signals are checked between calls. With data.validation it is 1.
    config.rounds_per_dispatch = whole(None, least=1)

    config.stop = stop_fields()
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


def stop_fields() -> Section:
    """What ends a run before `num_rounds`. See docs/how_to/resume.md."""
    section = Section()
    section.patience = whole(0, least=0)  # rounds without a better accuracy on data.validation, which it needs; 0: off
    section.bytes = real(0.0, least=0)  # that all rounds may send, both ways; 0: no bound
    # Of the rounds of one start, without compiling; started again, the run goes on for as long. 0: no bound.
    section.seconds = real(0.0, least=0)
    return section


def log_fields() -> Section:
    """What a run shows."""
    section = Section()
    section.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md at the end of a run
    section.tensorboard = True  # event files in WORKDIR/tensorboard
    section.wandb_project = ""  # project of Weights & Biases, with a run for each seed; '': none
    return section
