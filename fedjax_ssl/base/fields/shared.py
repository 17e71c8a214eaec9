"""The fields that all methods share; each file of this folder has some of their sections."""

from fedjax_ssl.base.fields.data import augment_fields, data_fields, residence_fields
from fedjax_ssl.base.fields.labels import confidence_fields, consistency_fields
from fedjax_ssl.base.fields.model import encoder_fields, model_fields, probe_fields
from fedjax_ssl.base.fields.section import MOST_SEED, Declared, Range, Section, real, several, whole, word
from fedjax_ssl.base.fields.training import client_fields, server_fields
from fedjax_ssl.base.fields.uploads import (
    aggregation_fields,
    attack_fields,
    availability_fields,
    compression_fields,
    privacy_fields,
)

# Fields that change results by rounding only: they may differ when a run is resumed.
CHANGES_NO_RESULT = (
    "checkpoint_every",
    "devices",
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


MEASURES = (
    *("balanced_accuracy", "precision", "auc", "shots", "knn"),  # of each test
    *("f1", "sensitivity", "specificity", "kappa", "calibration", "top5"),  # of the last model
)


def shared_fields() -> Section:
    """The fields that all methods share, with their defaults and ranges; each method adds a section."""
    config = Section()
    config.method = "fedanchor"  # a name from docs/methods.md, or your own FILE.py:NAME
    config.seed = whole(0, least=0, most=MOST_SEED)  # partition, initialisation, cohorts, everything random
    # Trains one run for each of these seeds, in WORKDIR/seed_N.
    config.seeds = several((), whole(least=0, most=MOST_SEED), distinct=True)
    config.num_rounds = whole(500, least=1, traced=True)  # T, rounds of the run
    config.num_clients = whole(100, least=1)  # K, clients of the whole federation
    # M, size of the cohort, which is drawn in each round without replacement. rscfed draws groups instead.
    config.clients_per_round = whole(10, least=1)
    # Start from another run's model: RUN or RUN/checkpoints/ROUND. If RUN has several seeds, this run's is taken. See
    # docs/how_to/start_from_a_model.md.
    config.init_from = ""
    config.schedule = word("constant", "cosine")  # schedule of all learning rates over rounds; 'cosine' falls to 0
    config.warm_up_rounds = whole(0, least=0)  # first rounds, in which learning rates rise in equal steps
    config.drop_rounds = several((), whole(least=1), distinct=True)  # rounds after which learning rates are a tenth
    # Rounds between two tests of the global model. The first and the last round always have one; see
    # docs/how_to/reports.md.
    config.eval_every = whole(1, least=1)
    # More measures: in each test 'balanced_accuracy', 'precision', 'auc', 'shots', 'knn'; of the last model 'f1',
    # 'sensitivity', 'specificity', 'kappa', 'calibration', 'top5'. See docs/reference/measures.md.
    config.eval_measures = several((), word(*MEASURES), distinct=True)
    # With data.client_test_share: number of rounds between tests of all clients on their own images. Each test trains
    # every client once. 0: only at the end.
    config.eval_clients_every = whole(0, least=0)
    # Parts of the model that each client keeps and never sends, such as ('classifier',). See
    # docs/how_to/personal_models.md.
    config.personal_parts = several((), Declared("", Range(str)), distinct=True)
    # Rounds between two checkpoints. None: 10, or 50 if they contain a model or an optimizer state for each client.
    config.checkpoint_every = whole(None, least=1)
    # The report shows the latent space after these rounds and the last one; 0 is before the first.
    config.snapshot_rounds = several((), whole(least=0))
    # These change speed only. With None the library chooses what was fastest in its measurements.
    config.lanes = whole(None, least=1)  # clients trained side by side on each device
    config.devices = whole(None, least=1)  # devices to use; None: all of them, on a CPU one per client
    config.eval_batch_size = whole(None, least=1)  # images per batch when images are labelled or the model is evaluated
    # Rounds in one compiled call. Progress is shown and signals are handled between calls. With stop.patience: at most
    # eval_every.
    config.rounds_per_dispatch = whole(None, least=1)

    # The two views of each image in fedu, fedema and orchestra, see fedjax_ssl/ops/augment/views.py.
    config.views = word("simclr", "orchestra")

    config.stop = stop_fields()
    config.data = data_fields()
    config.residence = residence_fields()
    config.model = model_fields()
    config.encoder = encoder_fields()
    config.augment = augment_fields()
    config.probe = probe_fields()
    config.client = client_fields()
    config.server = server_fields()
    config.aggregation = aggregation_fields()
    config.attack = attack_fields()
    config.compression = compression_fields()
    config.availability = availability_fields()
    config.privacy = privacy_fields()
    config.confidence = confidence_fields()
    config.consistency = consistency_fields()
    config.log = log_fields()
    return config


def stop_fields() -> Section:
    """What ends a run before `num_rounds`. See docs/how_to/resume.md."""
    section = Section()
    section.patience = whole(0, least=0)  # stop after this many rounds without better validation accuracy; 0: off
    section.bytes = real(0.0, least=0)  # stop before all rounds together send more bytes than this, up and down; 0: off
    # Stop after this many seconds of rounds, without compiling. A resumed run has as many again. 0: off.
    section.seconds = real(0.0, least=0)
    return section


def log_fields() -> Section:
    """What a run shows."""
    section = Section()
    section.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md at the end of a run
    section.tensorboard = True  # event files in WORKDIR/tensorboard
    section.wandb_project = ""  # project of Weights & Biases, with a run for each seed; '': none
    return section
