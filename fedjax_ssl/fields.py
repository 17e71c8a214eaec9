"""The fields that all methods share, with defaults and meanings; recipes, and the other words of a command line.

Imports ml_collections alone: help reads this file, and must not wait for JAX.
"""

from ml_collections import ConfigDict, config_dict

# Fields that change no result beyond rounding: they may differ when a run is resumed.
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

FLIPS = ("dataset", "always", "never")

IID_ALPHA = 1000.0  # FedAnchor's "IID" is Dir 1000 ("Federated datasets" of its experiments)

# Words that every config file takes behind its colon, besides methods, their variants, recipes and backbones.
WORDS = {
    "iid": {"data.alpha": IID_ALPHA},
    "stratified": {"data.partition": "stratified"},  # FedMatch's batch-IID
    "two_classes": {"data.partition": "shards", "data.classes_per_client": 2},  # FedIL's non-IID
    "centralised": {"method": "anchors_only", "data.centralised": True},
}

# The same, with a value: name=value.
ARGUMENT_FIELDS = {"anchors": "data.num_anchors", "alpha": "data.alpha", "images": "data.examples_per_client"}

# Recipes: fragments of a configuration that any method takes, so that methods are compared under the same. The
# published systems differ in their recipes as much as in their ideas, and accuracies by tens of points with them.
# `plain` is what FedAnchor's tables must have used for all their rows (docs/methods.md); `strong` is SemiFL's own.
RECIPES = {
    "plain": {
        "schedule": "constant",
        "client.nesterov": False,
        "client.clip_norm": 0.0,
        "client.persistent": False,
        "server.nesterov": False,
        "server.clip_norm": 0.0,
        "server.persistent": False,
        "model.normalisation": "running",
        "aggregation.weights": "size",
        "aggregation.optimizer": "fedavg",
    },
    "strong": {
        "schedule": "cosine",
        "client.nesterov": True,
        "client.clip_norm": 1.0,
        "client.persistent": True,
        "server.nesterov": True,
        "server.clip_norm": 1.0,
        "server.persistent": True,
        "model.normalisation": "static",
        "model.statistics": "all",
        "aggregation.weights": "uniform",
        "aggregation.optimizer": "fedavgm",
        "aggregation.learning_rate": 1.0,
        "aggregation.momentum": 0.5,
    },
}


def shared_fields() -> ConfigDict:
    """The fields that all methods share, with their defaults; each method has a section of its own besides."""
    config = ConfigDict()
    config.method = "fedanchor"  # a name of docs/methods.md, or your own FILE.py:NAME
    config.seed = 0  # partition, initialisation, cohorts, everything random
    config.seeds = ()  # several runs with these seeds instead of one, in WORKDIR/seed_N
    config.num_rounds = 500  # T, the rounds of the run
    config.num_clients = 100  # K, of the whole federation
    config.clients_per_round = 10  # M, the cohort: drawn anew in each round, without replacement
    # The run, RUN or RUN/checkpoints/ROUND, whose model this one begins with in all parts that both have, in place of
    # fresh weights; in a folder of several seeds, the run of this seed. server.pretrain_epochs train it further.
    config.init_from = ""
    config.schedule = "constant"  # of all learning rates, over rounds: 'constant' or 'cosine' to 0
    config.eval_batch_size = 500  # images at a time in labelling and evaluation; bounds the memory
    # After each round besides accuracy and loss: of 'balanced_accuracy', 'precision', 'auc' and 'shots', in brackets.
    config.eval_measures = ()
    config.eval_shots = (20, 100)  # of 'shots': classes of fewer training images have few, of more than the last many
    config.checkpoint_every = 10  # rounds between two checkpoints
    config.checkpoint_every_persistent = 50  # instead, where a checkpoint has a model (an optimiser) for each client
    config.snapshot_rounds = ()  # after which the report shows the latent space, and the last; 0: before the first
    # Performance only; None takes the measured default of the backend.
    config.lanes = config_dict.placeholder(int)  # clients trained side by side on each device
    config.devices = config_dict.placeholder(int)  # that share the lanes; None: all
    config.rounds_per_dispatch = config_dict.placeholder(int)  # rounds between two looks at progress and signals

    config.data = ConfigDict()
    config.data.source = "cifar10"  # 'digits', 'npz', 'folder', or a TensorFlow Datasets name
    config.data.path = ""  # of the npz (x_train, y_train, x_test, y_test) or the folder; see docs/own_data.md
    config.data.image_size = 0  # for a folder: resize all to N x N pixels; 0: they have one size
    config.data.fit = "crop"  # before that: cut out the square in the middle, or 'stretch': resize the whole image
    config.data.tfds_dir = ""  # TensorFlow Datasets' data_dir; '' is its default, ~/tensorflow_datasets
    config.data.flip = False  # for an npz or a folder: whether a mirrored image is still one of its class
    config.data.standardise = True  # pixels by the channels' means and deviations; or 0 to 1 alone (FedMatch)
    # By whose: their 'own'; or as public codes have it on every data set: 'cifar10', all by CIFAR-10's (FedLabel), or
    # 'cifar10_in_training', a BUG of SAGE's and ProxyFL's: those who train by CIFAR-10's mean and deviations of 0.247,
    # 0.244 and 0.262, tests by the own ones.
    config.data.normalisation = "own"
    config.data.labels = "server"  # who holds them: 'server', 'clients', 'some_clients'; see docs/data.md
    config.data.labelled_share = 0.1  # of 'clients': the part of each client's images that has labels
    config.data.labels_per_class = 0  # of 'clients', instead of the share: so many of each class that a client has
    config.data.num_labelled = 0  # of 'clients', instead: so many in all, balanced, divided apart from the others
    config.data.labelled_clients = 1  # of 'some_clients': how many have labels for all their images
    config.data.labelled_rule = "random"  # which those are, or 'most_classes': as RSCFed's, see docs/data.md
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed.
    config.data.imbalance = 1.0  # IF, the largest class over the smallest; negative: reversed; 1: as in the source
    config.data.largest_class = 0  # n_max, images of the largest class; 0: as many as the smallest of the source has
    # The same of labelled images alone (anchors; of 'clients' those of num_labelled; of 'some_clients' those of the
    # labelled clients), which are then drawn first, as ACR's; 0: they are of the tail above.
    config.data.labelled_largest_class = 0
    config.data.labelled_imbalance = 1.0  # of that tail
    config.data.balanced_test = False  # cut the test set to as many images of each class as the smallest has
    config.data.validation = 0  # training images held out, as many of each class; measured each round, not the test set
    config.data.num_anchors = 500  # S, labelled images of the server, taken away from the clients; of 'server' alone
    config.data.anchors = "balanced"  # S / C of each class, or 'random'
    config.data.partition = "lda"  # how the rest is divided; see fedjax_ssl/data/partition_schemes.py
    # Of the Dirichlet partitions: lower is more heterogeneous. In 'dirichlet_pairs' (SAGE) far less than in the others:
    # two clients share each of its near-IID parts, so that its 0.1 is not to be compared with theirs.
    config.data.alpha = 0.1
    config.data.classes_per_client = 2  # of the 'shards' partition
    config.data.examples_per_client = 0  # at most so many for each client; 0: all
    config.data.partition_file = ""  # take this saved partition instead
    config.data.reveal_labels = False  # to the methods: for upper bounds alone, and marked in every table
    config.data.centralised = False  # the server holds the clients' images and their labels, too: likewise

    config.model = ConfigDict()
    # 'cnn', 'lenet', 'resnet8', 'resnet9', 'resnet18', 'resnet34', 'resnet50', 'wrn16_1', 'wrn28_2', 'wrn28_8';
    # 'resnet18_imagenet', whose stem is for images of about 224 x 224 pixels; or your own, see docs/own_model.md.
    # SAGE's is 'resnet8' of width 64, FedMatch's 'resnet9' with normalisation 'none'.
    config.model.name = "resnet18"
    config.model.width = 0  # channels of a ResNet's first stage; 0: 16 of 'resnet8', 64 of the others
    config.model.anchor_dim = 128  # width of the anchor head, of the methods that have one
    config.model.normalisation = "running"  # 'running', 'static', 'group' or 'none'; see docs/architecture.md
    config.model.statistics = "server"  # of 'static', from images of: 'server', 'cohort', 'all' or 'all_mixed'
    config.model.dtype = "float32"  # of the computation, or 'bfloat16'; parameters are float32

    config.augment = ConfigDict()
    config.augment.flip = "dataset"  # mirrored images: as the data set allows, 'always' (SAGE on SVHN), or 'never'
    config.augment.padding = 4  # pixels around the image before the random crop; 0: no crop
    config.augment.border = "reflect"  # what those are, or 'zeros': black (FedLabel)
    # Instead of padding, which must be 0 then: the side in pixels to which images are enlarged before the crop, 40 for
    # images of 32 and 250 for those of 224 (RSCFed, SemiAnAgg). RandAugment sees the enlarged ones if it comes first.
    config.augment.resized = 0
    config.augment.flavour = "usb"  # of RandAugment, see fedjax_ssl/augment/flavours.py; 'none': strong views are weak
    config.augment.num_ops = 2  # n of RandAugment: operations for each image
    config.augment.magnitude = 10  # m of RandAugment, 0 to 10 ('fedlabel': to 30); 'usb' and 'fedmatch' draw their own

    config.client = _sgd_section(learning_rate=0.03, epochs=5, batch_size=10)
    config.client.proximal = 0.0  # mu of FedProx, mu/2 |w - w_t|^2 in the local loss
    config.client.spare_classifier = False  # weight decay and clipping are of the other parts alone (SemiAnAgg's code)
    # Of methods with a phase on labelled images alone: supervised, fedlabel, fedtrinet, fedavg_semi, semianagg, rscfed,
    # cbafed, isofed; the views of all but fedlabel and fedtrinet.
    config.client.logit_adjustment = 0.0  # tau: tau log(share of the class there) joins the logits in the loss
    config.client.absent_class = 0.5  # the count of a class that the client lacks, in that share
    config.client.share_offset = 0.0  # joins every share in the place of that count (SemiAnAgg's code: 1e-12); 0: none
    config.client.labelled_views = "weak"  # 'both': half the loss of the weak view, half that of the strong one
    # Of the phase on unlabelled images behind that of fedavg_semi, semianagg, rscfed, cbafed, isofed and twin_sight;
    # None: as above.
    config.client.unlabelled_learning_rate = config_dict.placeholder(float)
    config.client.unlabelled_clip_norm = config_dict.placeholder(float)  # 0: no clipping

    config.server = _sgd_section(learning_rate=0.03, epochs=1, batch_size=10)
    config.server.augmentation = "strong"  # of the labelled images in cross-entropy: 'strong' or 'weak'
    config.server.pretrain_epochs = 5  # on the anchors, before the first round
    config.server.pretrain_learning_rate = 0.05  # in those epochs

    config.aggregation = ConfigDict()
    config.aggregation.weights = "size"  # 'size', 'qualified' or 'uniform'
    config.aggregation.clip_norm = 0.0  # of a client's update of the parameters, which it clips before sending; 0: none
    # An update that is so many times as long as the cohort's median is dropped and counted, as one that is not finite;
    # 0: none is.
    config.aggregation.longest_update = 1000.0
    config.aggregation.optimizer = "fedavg"  # or 'fedavgm', 'fedadagrad', 'fedadam', 'fedyogi'
    config.aggregation.learning_rate = 1.0  # of the server optimiser; 'fedavg' has none
    config.aggregation.momentum = 0.5  # of 'fedavgm', and the first moment's decay of 'fedadam' and 'fedyogi'
    config.aggregation.adaptivity = 1e-3  # tau of the adaptive ones (Reddi et al., 2021)

    config.threshold = ConfigDict()
    # Of pseudo-labels: 'fixed' at the method's own threshold; or 'share', 'client_mean', 'sat', 'freematch',
    # 'flexmatch', which adapt to the client or the class: see fedjax_ssl/client/thresholds.py.
    config.threshold.kind = "fixed"
    config.threshold.share = 0.5  # of 'share': the part of each client's examples that counts, those of largest score
    config.threshold.momentum = 0.9  # of the averages of 'freematch' at each client
    # Of methods with labels by a softmax, all but fedil: 'none', or 'app_u', probabilities divided by the client's mean
    # of them before they label (FedDB): see fedjax_ssl/client/labels.py.
    config.threshold.debias = "none"

    # Of clients without labels in fedavg_semi, semianagg, isofed and twin_sight: how much each pseudo-label counts,
    # batch by batch. See fedjax_ssl/client/trainers.py and acr.py.
    config.trainer = ConfigDict()
    config.trainer.name = "flexmatch"  # or 'fixmatch', 'freematch', 'softmatch', 'acr'
    config.trainer.threshold = 0.95  # tau of 'fixmatch', 'flexmatch', 'acr'; of all, what is reported as confident
    # What thresholds learn from batches lasts for the 'per_round' pass, as in SemiAnAgg's code, or is 'persistent'.
    config.trainer.counters = "per_round"
    config.trainer.labels_from = "received"  # the global model as it came down, once a round; or 'local', in training
    # What a client tells of its pseudo-labels: 'trained_on', the sum of their weights in the loss; or 'confident', how
    # many reach the threshold.
    config.trainer.accepted = "trained_on"
    config.trainer.warm_up = True  # of 'flexmatch': images without a stored label hold the thresholds down
    config.trainer.momentum = 0.999  # of the averages of 'freematch' and 'softmatch' over batches
    config.trainer.fairness_weight = 0.01  # of 'freematch': of its fairness term; the reference code also has 0.001
    config.trainer.uniform_alignment = True  # of 'softmatch': probabilities aligned to equally frequent classes
    config.trainer.n_sigma = 2.0  # n of 'softmatch': the larger, the faster a weight falls below the mean
    # Of 'acr', which compares a client's images with the labelled ones; its estimate always survives rounds.
    config.trainer.strength = 2.0  # tau, the largest adjustment of logits by log pi, and the balanced head's
    config.trainer.estimate_from = 5  # the rounds that a client has had before it estimates its shares of classes
    config.trainer.estimate_momentum = 0.99  # of the estimate, over batches
    config.trainer.histogram = "counts"  # of confident labels in a batch; 'presence': 1 for each class that has one

    # Of methods that train a strong view towards the label of a weak one in each step: fixmatch, uda, sage,
    # proxyfl.
    config.consistency = ConfigDict()
    config.consistency.unlabelled_ratio = 1  # mu: unlabelled images in a step, as a multiple of client.batch_size
    config.consistency.unlabelled_weight = 1.0  # lambda_u of the unlabelled images' loss
    config.consistency.labels_from = "local"  # the model in training; or 'received': the global model as it came down
    # Batch statistics of labelled, weak and strong images: of each 'apart', or of all 'together', as the reference
    # codes of labels at the clients interleave them; 'auto': together where clients have labels.
    config.consistency.batch_norm = "auto"
    config.consistency.include_labelled = False  # labelled images are unlabelled ones, too, without their labels (SAGE)
    # Steps of a local epoch: 'longer', as many as the longer of the two, labelled or unlabelled images, needs to be
    # gone through once; 'unlabelled', the unlabelled images / client.batch_size rounded down, whatever mu is (SAGE:
    # with mu 2 it goes through them twice).
    config.consistency.epoch_length = "longer"

    config.log = ConfigDict()
    config.log.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md when a run is over
    config.log.tensorboard = True  # event files in WORKDIR/tensorboard
    config.log.wandb_project = ""  # of Weights & Biases, which gets a run for each seed; '': none
    return config


def _sgd_section(learning_rate: float, epochs: int, batch_size: int) -> ConfigDict:
    section = ConfigDict()
    section.epochs = epochs  # passes over the training data in a round
    section.batch_size = batch_size  # images in a step; the last one of an epoch may have fewer
    section.learning_rate = learning_rate  # in the first round; see schedule
    section.optimizer = "sgd"  # PyTorch's; or any of optax by name, such as 'adam' or 'lars(trust_coefficient=0.01)'
    section.momentum = 0.9  # of 'sgd', and of others that take one
    section.nesterov = False  # Nesterov's form of the momentum
    section.weight_decay = 5e-4  # added to the gradient; some optimisers decay by their own rule
    section.clip_norm = 1.0  # of the whole gradient; 0: no clipping
    section.persistent = False  # the optimiser's state survives rounds; of clients: one more model for each of all K
    return section
