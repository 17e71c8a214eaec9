"""The configuration: every field with its default, what it means, and which values make sense."""

import json
from typing import Any

from ml_collections import ConfigDict, config_dict

from fedjax_ssl.aggregation import OPTIMIZERS, WEIGHTS
from fedjax_ssl.augment import check_rand_augment
from fedjax_ssl.errors import UserError
from fedjax_ssl.methods import DEFAULTS, FIELDS, METHODS, VARIANTS, registered
from fedjax_ssl.models import BACKBONES, is_own
from fedjax_ssl.recipes import RECIPES
from fedjax_ssl.schedule import SCHEDULES
from fedjax_ssl.statistics import SOURCES
from fedjax_ssl.thresholds import KINDS

# Fields that change no result beyond rounding: they may differ when a run is taken up again.
CHANGES_NO_RESULT = (
    "checkpoint_every",
    "checkpoint_every_persistent",
    "devices",
    "lanes",
    "log.report",
    "log.tensorboard",
    "log.wandb_project",
    "rounds_per_dispatch",
    "snapshot_rounds",
)

# What every config file takes behind its colon, besides methods and their variants.
ARGUMENT_FIELDS = {"anchors": "data.num_anchors", "alpha": "data.alpha", "images": "data.examples_per_client"}
IID_ALPHA = 1000.0  # FedAnchor's "IID" is Dir 1000 ("Federated datasets" of its experiments)
ARGUMENTS = {
    **RECIPES,
    **{name: {"model.name": name} for name in BACKBONES},
    "iid": {"data.alpha": IID_ALPHA},
    "two_classes": {"data.partition": "shards", "data.classes_per_client": 2},  # FedIL's non-IID
    "centralised": {"method": "anchors_only", "data.centralised": True},
}


def base_config() -> ConfigDict:
    """All fields with their defaults, locked: FedAnchor as its paper runs it on CIFAR-10, IID or not by `data`."""
    config = ConfigDict()
    config.method = "fedanchor"  # one of fedjax_ssl.methods.METHODS
    config.seed = 0  # partition, initialisation, cohorts, everything random
    config.seeds = ()  # several runs with these seeds instead of one, in WORKDIR/seed_N
    config.num_rounds = 500  # T, the rounds of the run
    config.num_clients = 100  # K, of the whole federation
    config.clients_per_round = 10  # M, the cohort: drawn anew in each round, without replacement
    config.schedule = "constant"  # of all learning rates, over rounds: 'constant' or 'cosine' to 0
    config.eval_batch_size = 500  # images at a time in labelling and evaluation; bounds the memory
    config.checkpoint_every = 10  # rounds between two checkpoints
    config.checkpoint_every_persistent = 50  # instead, where clients keep optimisers: a model for each in a checkpoint
    config.snapshot_rounds = ()  # after which the report shows the latent space, and the last; 0: before the first
    # Performance only; None takes the measured default of the backend.
    config.lanes = config_dict.placeholder(int)  # clients trained side by side on each device
    config.devices = config_dict.placeholder(int)  # that share the lanes; None: all
    config.rounds_per_dispatch = config_dict.placeholder(int)  # rounds between two looks at progress and signals

    config.data = ConfigDict()
    config.data.source = "cifar10"  # 'digits', 'npz', 'folder', or a TensorFlow Datasets name
    config.data.path = ""  # of the npz (x_train, y_train, x_test, y_test) or the folder; see docs/own_data.md
    config.data.image_size = 0  # for a folder: cut and resize all to N x N pixels; 0: they have one size
    config.data.tfds_dir = ""  # TensorFlow Datasets' data_dir; '' is its default, ~/tensorflow_datasets
    config.data.flip = False  # for an npz or a folder: whether a mirrored image is still one of its class
    config.data.num_anchors = 500  # S, labelled images at the server, taken away from the clients
    config.data.anchors = "balanced"  # S / C of each class, or 'random'
    config.data.partition = "lda"  # how the rest is divided; see fedjax_ssl/data/partition_schemes.py
    config.data.alpha = 0.1  # of the Dirichlet partitions: lower is more heterogeneous
    config.data.classes_per_client = 2  # of the 'shards' partition
    config.data.examples_per_client = 0  # at most so many for each client; 0: all
    config.data.partition_file = ""  # take this saved partition instead
    config.data.reveal_labels = False  # to the methods: for upper bounds alone, and marked in every table
    config.data.centralised = False  # the server holds the clients' images and their labels, too: likewise

    config.model = ConfigDict()
    config.model.name = "resnet18"  # 'cnn', 'resnet18', 'wrn28_2', 'wrn28_8', or your own, see docs/own_model.md
    config.model.anchor_dim = 128  # width of the anchor head, of the methods that have one
    config.model.normalisation = "running"  # 'running', 'static' or 'group'; see docs/architecture.md
    config.model.statistics = "server"  # of 'static', from images of: 'server', 'cohort', 'all' or 'all_mixed'
    config.model.dtype = "float32"  # of the computation, or 'bfloat16'; parameters are float32

    config.augment = ConfigDict()
    config.augment.padding = 4  # pixels of reflection around the image before the random crop
    config.augment.flavour = "usb"  # of RandAugment; see fedjax_ssl/augment/randaugment.py
    config.augment.num_ops = 2  # n of RandAugment: operations for each image
    config.augment.magnitude = 10  # m of RandAugment, 0 to 10 ('fedlabel': to 30); 'usb' draws its own

    config.client = _sgd_section(learning_rate=0.03, epochs=5, batch_size=10)
    config.client.proximal = 0.0  # mu of FedProx, mu/2 |w - w_t|^2 in the local loss

    config.server = _sgd_section(learning_rate=0.03, epochs=1, batch_size=10)
    config.server.augmentation = "strong"  # of the labelled images in cross-entropy: 'strong' or 'weak'
    config.server.pretrain_epochs = 5  # on the anchors, before the first round
    config.server.pretrain_learning_rate = 0.05  # in those epochs

    config.aggregation = ConfigDict()
    config.aggregation.weights = "size"  # 'size', 'qualified' or 'uniform'
    config.aggregation.clip_norm = 0.0  # of each client's whole update; 0: no clipping
    config.aggregation.optimizer = "fedavg"  # or 'fedavgm', 'fedadagrad', 'fedadam', 'fedyogi'
    config.aggregation.learning_rate = 1.0  # of the server optimiser; 'fedavg' has none
    config.aggregation.momentum = 0.5  # of 'fedavgm', and the first moment's decay of 'fedadam' and 'fedyogi'
    config.aggregation.adaptivity = 1e-3  # tau of the adaptive ones (Reddi et al., 2021)

    config.threshold = ConfigDict()
    # Of pseudo-labels: 'fixed' at the method's own threshold; or 'client_mean', 'sat', 'freematch', 'flexmatch', which
    # adapt to the client or the class: see fedjax_ssl/thresholds.py.
    config.threshold.kind = "fixed"
    config.threshold.momentum = 0.9  # of the averages that 'freematch' keeps at each client

    config.log = ConfigDict()
    config.log.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md when a run is over
    config.log.tensorboard = True  # event files in WORKDIR/tensorboard
    config.log.wandb_project = ""  # of Weights & Biases, which gets a run for each seed; '': none

    for method, defaults in DEFAULTS.items():
        config[method] = defaults()
    return config.lock()


def _sgd_section(learning_rate: float, epochs: int, batch_size: int) -> ConfigDict:
    section = ConfigDict()
    section.epochs = epochs  # passes over the training data in a round
    section.batch_size = batch_size  # images in a step; the last one of an epoch may have fewer
    section.learning_rate = learning_rate  # of SGD, in the first round; see schedule
    section.momentum = 0.9  # of SGD
    section.nesterov = False  # Nesterov's form of the momentum
    section.weight_decay = 5e-4  # added to the gradient of all trained parameters
    section.clip_norm = 1.0  # of the whole gradient; 0: no clipping
    section.persistent = False  # the optimiser's state survives rounds; of clients: one more model for each of all K
    return section


def validate(config: ConfigDict) -> None:
    """Looks at the fields that can be wrong whatever the data are; the parts look at theirs when they are built.

    Raises:
        UserError: one line that names the field, its value and what it may be.
    """
    for field, known in {
        "method": METHODS,
        "schedule": SCHEDULES,
        "server.augmentation": ("strong", "weak"),
        "aggregation.weights": WEIGHTS,
        "aggregation.optimizer": OPTIMIZERS,
        "model.statistics": SOURCES,
        "threshold.kind": KINDS,
    }.items():
        if _get(config, field) not in known:
            raise UserError(f"{field} is {_get(config, field)!r}; known: {', '.join(known)}")
    for field, least in {
        "num_rounds": 1,
        "num_clients": 1,
        "clients_per_round": 1,
        "eval_batch_size": 1,
        "checkpoint_every": 1,
        "checkpoint_every_persistent": 1,
        "lanes": 1,
        "devices": 1,
        "rounds_per_dispatch": 1,
        "data.num_anchors": 1,
        "data.examples_per_client": 0,
        "data.image_size": 0,
        "model.anchor_dim": 0,
        "augment.padding": 0,
        "client.epochs": 1,
        "client.batch_size": 1,
        "client.proximal": 0,
        "server.epochs": 0,
        "server.batch_size": 1,
        "server.pretrain_epochs": 0,
        "aggregation.clip_norm": 0,
        "seed": 0,
    }.items():
        value = _get(config, field)
        if value is not None and value < least:
            raise UserError(f"{field} must be at least {least}, not {value}")
    check_rand_augment(config.augment.flavour, config.augment.num_ops, config.augment.magnitude)
    seeds = config.seeds
    if any(type(seed) is not int or seed < 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds must be different whole numbers from 0 on, as in (0, 1, 2), not {tuple(seeds)}")
    snapshots = config.snapshot_rounds
    if any(type(number) is not int or number < 0 for number in snapshots):
        raise UserError(f"snapshot_rounds must be whole numbers from 0 on, as in (1, 50), not {tuple(snapshots)}")
    for field in (
        "client.learning_rate",
        "server.learning_rate",
        "server.pretrain_learning_rate",
        "aggregation.learning_rate",
        "aggregation.adaptivity",
        "data.alpha",
    ):
        if not _get(config, field) > 0:
            raise UserError(f"{field} must be above 0, not {_get(config, field)}")
    for field in ("threshold.momentum", "aggregation.momentum"):
        if not 0 <= _get(config, field) < 1:
            raise UserError(f"{field} must be at least 0 and below 1, not {_get(config, field)}")
    if config.clients_per_round > config.num_clients:
        raise UserError(
            f"clients_per_round is {config.clients_per_round}, but the federation has num_clients = "
            f"{config.num_clients}"
        )
    if config.log.wandb_project:
        _check_wandb()


def _check_wandb() -> None:
    try:
        import wandb
    except ImportError:
        wandb = None
    if not hasattr(wandb, "init"):  # a folder of that name, which its runs leave behind, can be imported, too
        raise UserError("log.wandb_project needs the package wandb: pip install 'fedjax_ssl[wandb]'")


def for_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """The configuration of one of the runs that `config.seeds` asks for: as if it had been asked for alone."""
    config = config.copy_and_resolve_references()
    config.seed, config.seeds = seed, ()
    with config.unlocked():
        for name in _of_other_registered(config.method):
            if name in config:
                del config[name]
    return config


def _of_other_registered(method: str) -> set[str]:
    """Sections that are not written down with a run: of methods from outside the library, but for the run's own.

    Otherwise a run of any method could not be taken up again where they are not registered, or have changed.
    """
    return registered() - {method}


def labels_revealed(config: Any) -> bool:
    """Whether a configuration, nested dicts or a ConfigDict, is of a bound that sees the clients' labels."""
    return bool(config["data"]["reveal_labels"] or config["data"]["centralised"])


def differences(old: dict, new: dict) -> dict[str, tuple]:
    """The fields in which two configurations (as nested dicts) differ: name -> (old value, new value)."""
    flat_old, flat_new = flatten(old), flatten(new)
    missing = "(no such field)"
    pairs = {name: (flat_old.get(name, missing), flat_new.get(name, missing)) for name in {**flat_old, **flat_new}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def complete(old: dict) -> dict:
    """A configuration that an earlier version wrote, with the fields that it did not have yet at their defaults.

    A new field's default is what the library did before it had the field, or a run could not be taken up again.
    """
    filled = json.loads(json.dumps(base_config().to_dict()))
    for name in _of_other_registered(old.get("method", filled["method"])):
        filled.pop(name, None)
    for section, value in old.items():
        if isinstance(value, dict) and isinstance(filled.get(section), dict):
            filled[section].update(value)
        else:
            filled[section] = value
    return filled


def flatten(nested: dict, prefix: str = "") -> dict:
    """A nested dict as one level, with dotted names."""
    flat = {}
    for name, value in nested.items():
        if isinstance(value, dict | ConfigDict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def apply_arguments(config: ConfigDict, arguments: str) -> ConfigDict:
    """Applies the part of `--config=FILE:ARGUMENTS` behind the colon, for instance 'semifl,strong,wrn28_2,anchors=500'.

    Args:
        config: is changed.
        arguments: with commas between them, applied in their order: name=value pairs of `ARGUMENT_FIELDS`; the name of
            a method, instead of the file's; a recipe; a backbone, also by its import path; 'iid'; 'two_classes', for
            each client; 'centralised', the fully supervised bound without a federation; a variant of the method.

    Returns:
        The configuration.

    Raises:
        UserError: for an unknown name, or a value that is not of the field's type.
    """
    fields = ARGUMENT_FIELDS
    for argument in filter(None, arguments.split(",")):
        variants = {**FIELDS, **ARGUMENTS, **VARIANTS[config.method]}
        name, equals, text = argument.partition("=")
        if equals and name in fields:
            kind = type(_get(config, fields[name]))
            try:
                config.update_from_flattened_dict({fields[name]: kind(text)})
            except ValueError:
                raise UserError(f"config argument {name} takes a value of type {kind.__name__}, not {text!r}") from None
        elif not equals and name in variants:
            config.update_from_flattened_dict(variants[name])
        elif is_own(argument):
            config.model.name = argument
        else:
            known = [*variants, *(f"{field}=..." for field in fields)]
            raise UserError(f"unknown config argument {argument!r}; known: {', '.join(known)}")
    return config


def _get(config: ConfigDict, dotted: str):
    for name in dotted.split("."):
        config = config[name]
    return config
