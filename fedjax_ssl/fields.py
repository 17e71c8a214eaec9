"""The fields that all methods share: defaults, ranges, meanings; recipes, and the other words of a command line.

Imports `sections` alone: help reads this file, and must not wait for JAX.
"""

from fedjax_ssl.sections import MOST_SEED, Section, real, several, share, whole, word

# Fields that change no result beyond rounding: they may differ when a run is resumed.
CHANGES_NO_RESULT = (
    "checkpoint_every",
    "checkpoint_every_persistent",
    "devices",
    "eval_batch_size",
    "lanes",
    "log.report",
    "log.tensorboard",
    "log.wandb_project",
    "rounds_per_dispatch",
    "snapshot_rounds",
)

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


def shared_fields() -> Section:
    """The fields that all methods share, with their defaults and ranges; each method adds a section."""
    config = Section()
    config.method = "fedanchor"  # a name of docs/methods.md, or your own FILE.py:NAME
    config.seed = whole(0, least=0, most=MOST_SEED)  # partition, initialisation, cohorts, everything random
    # Several runs with these seeds instead of one, in WORKDIR/seed_N.
    config.seeds = several((), whole(least=0, most=MOST_SEED), distinct=True)
    config.num_rounds = whole(500, least=1)  # T, the rounds of the run
    config.num_clients = whole(100, least=1)  # K, of the whole federation
    # M, the cohort: drawn anew in each round, without replacement; but rscfed draws groups of its own.
    config.clients_per_round = whole(10, least=1)
    # The run, RUN or RUN/checkpoints/ROUND, whose model this one begins with in all parts that both have, in place of
    # fresh weights; in a folder of several seeds, the run of this seed. server.pretrain_epochs train it further.
    config.init_from = ""
    config.schedule = word("constant", "cosine")  # of all learning rates, over rounds; 'cosine': to 0
    # After each round besides accuracy and loss: of 'balanced_accuracy', 'precision', 'auc', 'shots' and 'knn', in
    # brackets. 'knn' compares features with those of the server's labelled images.
    config.eval_measures = several((), word("balanced_accuracy", "precision", "auc", "shots", "knn"), distinct=True)
    # Of 'shots': classes of fewer training images have few, of more than the last many.
    config.eval_shots = several((20, 100), whole(least=0))
    config.eval_neighbours = whole(200, least=1)  # of 'knn': how many of the nearest vote
    config.checkpoint_every = whole(10, least=1)  # rounds between two checkpoints
    # Instead, where a checkpoint has a model (an optimiser) for each client.
    config.checkpoint_every_persistent = whole(50, least=1)
    # After which the report shows the latent space, and the last; 0: before the first.
    config.snapshot_rounds = several((), whole(least=0))
    # Performance only; None takes the measured default of the backend.
    config.lanes = whole(None, least=1)  # clients trained side by side on each device
    config.devices = whole(None, least=1)  # that share the lanes; None: all; of a processor's cores one a client
    config.eval_batch_size = whole(None, least=1)  # images at a time in labelling and evaluation
    # Rounds between two looks at progress and signals; with data.validation 1, to see each round's model.
    config.rounds_per_dispatch = whole(None, least=1)

    config.data = Section()
    # 'digits', 'npz', 'folder', or of TensorFlow Datasets cifar10, cifar100, svhn_cropped, mnist, fashion_mnist,
    # emnist/byclass: see docs/data.md.
    config.data.source = "cifar10"
    config.data.path = ""  # of the npz (x_train, y_train, x_test, y_test) or the folder; see docs/own_data.md
    config.data.image_size = whole(0, least=0)  # for a folder: resize all to N x N pixels; 0: they have one size
    # Before that: cut out the square in the middle, or 'stretch': resize the whole image.
    config.data.fit = word("crop", "stretch")
    config.data.tfds_dir = ""  # TensorFlow Datasets' data_dir; '' is its default, ~/tensorflow_datasets
    config.data.flip = False  # for an npz or a folder: whether a mirrored image is still one of its class
    config.data.standardise = True  # pixels by the channels' means and deviations; or 0 to 1 alone (FedMatch)
    # By whose: their 'own'; or as public codes have it on every data set: 'cifar10', all by CIFAR-10's (FedLabel), or
    # 'cifar10_in_training', a BUG of SAGE's and ProxyFL's: those who train by CIFAR-10's mean and deviations of 0.247,
    # 0.244 and 0.262, tests by the own ones.
    config.data.normalisation = word("own", "cifar10", "cifar10_in_training")
    config.data.labels = word("server", "clients", "some_clients")  # who holds them; see docs/data.md
    # Of 'clients': the part of each client's images that has labels.
    config.data.labelled_share = real(0.1, above=0, most=1)
    # Of 'clients', instead of the share: so many of each class that a client has.
    config.data.labels_per_class = whole(0, least=0)
    config.data.num_labelled = whole(0, least=0)  # of 'clients', instead: so many in all, balanced, divided apart
    config.data.labelled_clients = whole(1, least=1)  # of 'some_clients': how many have labels for all their images
    config.data.labelled_rule = word("random", "most_classes")  # which those are; see docs/data.md
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed.
    config.data.imbalance = real(1.0)  # IF, the largest class over the smallest; negative: reversed; 1: as the source
    config.data.largest_class = whole(0, least=0)  # n_max, its images; 0: as many as the smallest of the source has
    # The same of labelled images alone (anchors; of 'clients' those of num_labelled; of 'some_clients' those of the
    # labelled clients), which are then drawn first, as ACR's; 0: they are of the tail above.
    config.data.labelled_largest_class = whole(0, least=0)
    config.data.labelled_imbalance = real(1.0)  # of that tail
    config.data.balanced_test = False  # cut the test set to as many images of each class as the smallest has
    # Training images held out, as many of each class; measured each round, not the test set.
    config.data.validation = whole(0, least=0)
    config.data.num_anchors = whole(500, least=0)  # S, labelled images of the server, not of clients; of 'server' alone
    config.data.anchors = word("balanced", "random")  # 'balanced': S / C of each class
    # How the rest is divided; see fedjax_ssl/data/partition_schemes.py.
    config.data.partition = word(
        "lda", "iid", "stratified", "dirichlet_clients", "dirichlet_pairs", "dirichlet_classes", "shards", "profiles",
        "main_class",
    )  # fmt: skip
    # Of the Dirichlet partitions: lower is more heterogeneous. In 'dirichlet_pairs' (SAGE) far less than in the others:
    # two clients share each of its near-IID parts, so that its 0.1 is not to be compared with theirs.
    config.data.alpha = real(0.1, above=0)
    config.data.classes_per_client = whole(2, least=1)  # of the 'shards' partition
    config.data.main_share = share(0.4)  # of 'main_class': the part of a client's images that is of its own class
    config.data.examples_per_client = whole(0, least=0)  # at most so many for each client; 0: all
    config.data.partition_file = ""  # take this saved partition instead
    config.data.reveal_labels = False  # to the methods: for upper bounds alone, and marked in every table
    config.data.centralised = False  # the server holds the clients' images and their labels, too: likewise

    config.model = Section()
    # 'cnn', 'lenet', 'resnet8', 'resnet9', 'resnet18', 'resnet34', 'resnet50', 'wrn16_1', 'wrn28_2', 'wrn28_8';
    # 'resnet18_imagenet', whose stem is for images of about 224 x 224 pixels; or your own, see docs/own_model.md.
    # SAGE's is 'resnet8' of width 64, FedMatch's 'resnet9' with normalisation 'none'.
    config.model.name = "resnet18"
    config.model.width = whole(0, least=0)  # channels of a ResNet's first stage; 0: 16 of 'resnet8', 64 of the others
    config.model.anchor_dim = whole(128, least=0)  # width of the anchor head, of the methods that have one
    # Hidden width of the projector and the predictor, of the methods that have them.
    config.model.projector_hidden = whole(4096, least=1)
    config.model.projector_dim = whole(2048, least=1)  # width of what they give
    config.model.normalisation = word("running", "static", "group", "none")  # see docs/architecture.md
    # Of 'static': whose images they are from. 'moments', of all as 'all', but with the variance between the clients.
    config.model.statistics = word("server", "cohort", "all", "all_mixed", "moments")
    config.model.statistics_passes = whole(2, least=1)  # exchanges in a round under 'moments', one a layer at the most
    # Of those batches in their mean: a short one counts as a full one, or 'samples': as its images ((FL)^2). Under
    # 'moments' nothing reads it: every image counts alike.
    config.model.statistics_weights = word("batches", "samples")
    # How the classifier begins: 'lecun', a normal kernel of variance 1 / fan-in; 'torch', a uniform one of a third of
    # that variance ((FL)^2's and SemiFL's); both with a bias of 0. 'torch_linear': kernels and biases of the classifier
    # and of all heads are uniform within 1 / sqrt(fan-in), as torch.nn.Linear draws them (most public code).
    config.model.classifier_init = word("lecun", "torch", "torch_linear")
    config.model.dtype = word("float32", "bfloat16")  # of the computation; parameters are float32

    config.augment = Section()
    # Mirrored images: as the data set allows, 'always' (SAGE on SVHN), or 'never'.
    config.augment.flip = word("dataset", "always", "never")
    config.augment.padding = whole(4, least=0)  # pixels around the image before the random crop; 0: no crop
    config.augment.border = word("reflect", "zeros")  # what those are; 'zeros': black (FedLabel)
    # Instead of padding, which must be 0 then: the side in pixels to which images are enlarged before the crop, 40 for
    # images of 32 and 250 for those of 224 (RSCFed, SemiAnAgg). RandAugment sees the enlarged ones if it comes first.
    config.augment.resized = whole(0, least=0)
    # Of RandAugment, see fedjax_ssl/augment/flavours.py; 'none': strong views are weak.
    config.augment.flavour = word("usb", "semifl", "fixmatch", "fedlabel", "fedmatch", "none")
    config.augment.num_ops = whole(2, least=0)  # n of RandAugment: operations for each image
    # Whether flip and crop come before RandAugment: as its flavour has it; or 'geometry_first' ((FL)^2, on 'usb').
    config.augment.order = word("flavour", "geometry_first")
    # m of RandAugment, 0 to 10 ('fedlabel': to 30); 'usb' and 'fedmatch' draw their own.
    config.augment.magnitude = whole(10, least=0, most=30)

    # Of self-supervised methods, fedu, fedema and orchestra: two views of each image, changed in this order. Behind the
    # crop comes the flip of augment.flip.
    config.views = Section()
    # The least part of the image's area that a random crop has, before it is enlarged to the image's size.
    config.views.smallest_crop = real(0.08, above=0, most=1)
    config.views.interpolation = word("bilinear", "bicubic")  # of the crop
    config.views.jitter = share(0.8)  # how often colours are changed, in random order
    config.views.brightness = real(0.8, least=0)  # by a factor from 1 minus this, or 0, to 1 plus this
    config.views.contrast = real(0.8, least=0)  # likewise
    config.views.saturation = real(0.8, least=0)  # likewise
    config.views.hue = real(0.2, least=0, most=0.5)  # is turned by at most this part of the circle
    config.views.grey = share(0.2)  # how often the image loses its colours
    config.views.blur = share(0.0)  # how often the first view is blurred
    config.views.second_blur = share(0.0)  # and the second one
    config.views.blur_radius = whole(1, least=1)  # in pixels: a Gaussian of 3 x 3 pixels
    config.views.second_solarise = share(0.0)  # how often the lighter half of the second view's levels is inverted

    # Of the same methods: the classifier, which the server fits to its labelled images' features after each round.
    config.probe = Section()
    # Of the square of its weights, on features of deviation 1, beside the mean square error.
    config.probe.strength = real(0.1, least=1e-4)
    # Of cross-entropy of the whole model on the labelled images, by config.server's optimiser at its learning rate,
    # whatever the schedule, before the model is tested; clients get the model without them.
    config.probe.epochs = whole(0, least=0)

    config.client = _sgd_section(learning_rate=0.03, epochs=5, least_epochs=1, batch_size=10)
    config.client.proximal = real(0.0, least=0)  # mu of FedProx, mu/2 |w - w_t|^2 in the local loss
    config.client.spare_classifier = False  # weight decay and clipping are of the other parts alone (SemiAnAgg's code)
    # Of methods with a phase on labelled images alone: supervised, fedlabel, fedtrinet, fedavg_semi, semianagg, rscfed,
    # cbafed, isofed, twin_sight; the views of all but fedlabel, fedtrinet's in its tuning.
    config.client.logit_adjustment = real(0.0, least=0)  # tau: tau log(share of the class) joins the logits in the loss
    config.client.absent_class = real(0.5, above=0)  # the count of a class that the client lacks, in that share
    # Joins every share in the place of that count (SemiAnAgg's code: 1e-12); 0: none. The logits of a class that the
    # client lacks then grow without bound, for they never cost anything.
    config.client.share_offset = share(0.0)
    # 'both': half the loss of the weak view, half of the strong one.
    config.client.labelled_views = word("weak", "both")
    # Of the phase on unlabelled images behind that of fedavg_semi, semianagg, rscfed, cbafed, isofed and twin_sight;
    # None: as above.
    config.client.unlabelled_learning_rate = real(None, above=0)
    config.client.unlabelled_clip_norm = real(None, least=0)  # 0: no clipping

    config.server = _sgd_section(learning_rate=0.03, epochs=1, least_epochs=0, batch_size=10)
    config.server.augmentation = word("strong", "weak")  # of the labelled images in cross-entropy
    config.server.pretrain_epochs = whole(5, least=0)  # on the anchors, before the first round
    config.server.pretrain_learning_rate = real(0.05, above=0)  # in those epochs
    # With server.persistent: the optimiser of the pre-training is that of the rounds, too ((FL)^2's code).
    config.server.pretrain_persistent = False

    config.aggregation = Section()
    # Of uploads in their mean. Not read by methods with weights of their own: cbafed, semianagg, orchestra; fedlabel,
    # fedavg_semi, isofed and fl2 by their defaults (fedlabel.weights, fedavg_semi.apart, isofed.unlabelled_loss,
    # fl2.status_weights).
    config.aggregation.weights = word("size", "qualified", "uniform")
    # Of a client's update of the parameters, which it clips before sending; 0: none.
    config.aggregation.clip_norm = real(0.0, least=0)
    # An update that is so many times as long as the cohort's median is dropped and counted, as one that is not finite;
    # 0: none is.
    config.aggregation.longest_update = real(1000.0, least=0)
    # How uploads become one model: the weighted mean; or a rule that a few lying clients cannot move far: 'median' and
    # 'trimmed_mean' of each number, 'krum', 'multi_krum', 'geometric_median' of whole models. See
    # fedjax_ssl/server/robust.py.
    config.aggregation.mean = word("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
    # Of 'trimmed_mean', 'krum' and 'multi_krum': the part of a cohort that may lie.
    config.aggregation.malicious_share = real(0.2, least=0, below=0.5)
    # An update that is longer is shortened to this length by the server, whoever sends it; 0: none is.
    config.aggregation.norm_bound = real(0.0, least=0)
    config.aggregation.optimizer = word("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi")  # of their mean
    config.aggregation.learning_rate = real(1.0, above=0)  # of the server optimiser; 'fedavg' has none
    # Of 'fedavgm', and the first moment's decay of 'fedadam' and 'fedyogi'.
    config.aggregation.momentum = real(0.5, least=0, below=1)
    config.aggregation.adaptivity = real(1e-3, above=0)  # tau of the adaptive ones (Reddi et al., 2021)

    config.attack = Section()
    # Of clients that lie, to test a mean with: 'sign_flip', 'noise', 'scaled' and 'little' (A Little Is Enough) are of
    # what they send; 'labels': they train on false labels, the next class's, and exaggerate their counts of examples;
    # 'poison': they replace some of their unlabelled images by crafted ones, so that images of one class get another's
    # label. See fedjax_ssl/engine/attacks.py and fedjax_ssl/data/poison.py.
    config.attack.kind = word("none", "sign_flip", "noise", "scaled", "little", "labels", "poison")
    config.attack.share = share(0.2)  # of all clients: floor(share K) are drawn by the seed
    # How many times the honest update's length, or of 'labels' the count of examples; of 'little' how many standard
    # deviations; of 'poison' how many of all clients' images are crafted, in a thousand. 0: 1 of 'sign_flip' and
    # 'noise', 10 of 'scaled' and 'labels', 5 of 'poison', of 'little' by its paper's formula.
    config.attack.strength = real(0.0, least=0)
    config.attack.from_class = whole(4, least=0)  # of 'poison': the class whose images are to be labelled wrongly
    config.attack.to_class = whole(9, least=0)  # and the class whose label they are to get
    config.attack.targets = whole(1, least=1)  # how many images of the attackers the crafted ones lead to

    config.compression = Section()
    # Of uploads, whose updates are 'int8', rounded at random, or 'top_k', the largest numbers alone: see
    # fedjax_ssl/engine/compression.py.
    config.compression.kind = word("none", "int8", "top_k")
    config.compression.share = real(0.05, above=0, most=1)  # of 'top_k': k over all numbers of an update
    # Of 'top_k': a client keeps what was left out, and adds it to its next update; one more model for each client.
    config.compression.error_feedback = True

    config.availability = Section()
    # Of a cohort, each client by itself: it does not answer, does nothing, and is not waited for.
    config.availability.never = real(0.0, least=0, below=1)
    config.availability.late = share(0.0)  # of those that answer: their update joins the next round's
    config.availability.late_weight = share(1.0)  # times the weight of a late upload; 0: it is dropped

    config.privacy = Section()
    # z, for differential privacy of clients: each clips its update to aggregation.clip_norm, S, and the server takes
    # their sum with Gaussian noise of deviation z S, over clients_per_round; weights are not read. 0: no noise. See
    # fedjax_ssl/engine/privacy.py.
    config.privacy.noise = real(0.0, least=0)
    config.privacy.delta = real(1e-5, above=0, below=1)  # for which epsilon is reported
    # Each client joins by itself, so that clients_per_round do in the mean; or 'fixed': so many always, and epsilon is
    # far larger.
    config.privacy.cohorts = word("poisson", "fixed")

    config.threshold = Section()
    # Of pseudo-labels: 'fixed' at the method's own threshold; or 'share', 'client_mean', 'sat', 'freematch',
    # 'flexmatch', which adapt to the client or the class: see fedjax_ssl/client/thresholds.py.
    config.threshold.kind = word("fixed", "share", "client_mean", "sat", "flexmatch", "freematch")
    # Of 'share': the part of each client's examples that counts, those of largest score.
    config.threshold.share = real(0.5, above=0, most=1)
    config.threshold.momentum = real(0.9, least=0, below=1)  # of the averages of 'freematch' at each client
    # 'none'; or 'app_u', probabilities divided by the client's mean of them before they label (FedDB), for methods with
    # labels by a softmax; the others refuse it: see fedjax_ssl/client/debias.py.
    config.threshold.debias = word("none", "app_u")

    # Of clients without labels in fedavg_semi, semianagg, isofed and twin_sight: how much each pseudo-label counts,
    # batch by batch. See fedjax_ssl/client/trainers.py and acr.py.
    config.trainer = Section()
    config.trainer.name = word("flexmatch", "fixmatch", "freematch", "softmatch", "acr")  # the rule
    # tau of 'fixmatch', 'flexmatch', 'acr'; of all, what is reported as confident.
    config.trainer.threshold = share(0.95)
    # What thresholds learn from batches lasts for the 'per_round' pass, as in SemiAnAgg's code, or is 'persistent'.
    config.trainer.counters = word("per_round", "persistent")
    config.trainer.labels_from = word("received", "local")  # the global model as it came down, or the one in training
    # What a client tells of its pseudo-labels: 'trained_on', the sum of their weights in the loss; or 'confident', how
    # many reach the threshold.
    config.trainer.accepted = word("trained_on", "confident")
    config.trainer.warm_up = True  # of 'flexmatch': images without a stored label hold the thresholds down
    config.trainer.momentum = real(0.999, least=0, below=1)  # of the averages of 'freematch' and 'softmatch'
    # Of 'freematch': of its fairness term; the reference code also has 0.001.
    config.trainer.fairness_weight = real(0.01, least=0)
    # Of 'freematch': tau_t averages this quantile of a batch's largest probabilities (in the reference code 0.8 may be
    # chosen); 0: their mean.
    config.trainer.quantile = share(0.0)
    config.trainer.level_cap = share(1.0)  # of 'freematch': the most that tau_t may be; the reference code has 0.95
    config.trainer.clamp_least = share(0.0)  # of 'freematch': the least threshold of a class; its paper on SVHN has 0.9
    config.trainer.clamp_most = share(1.0)  # of 'freematch': the most; there 0.95
    config.trainer.uniform_alignment = True  # of 'softmatch': probabilities aligned to equally frequent classes
    # n of 'softmatch': the larger, the faster a weight falls below the mean.
    config.trainer.n_sigma = real(2.0, above=0)
    # Of 'acr', which compares a client's images with the labelled ones; its estimate always survives rounds.
    config.trainer.strength = real(2.0, least=0)  # tau, the largest adjustment by log pi, and the balanced head's
    # Rounds that a client has had before it estimates its shares: its code's `epoch > 5`, which counts from 0.
    config.trainer.estimate_from = whole(6, least=0)
    config.trainer.estimate_momentum = real(0.99, least=0, below=1)  # of the estimate, over batches
    # Of confident labels; 'presence', a BUG of its code, for replication alone: 1 for each class of a batch.
    config.trainer.histogram = word("counts", "presence")

    # Of methods that train a strong view towards the label of a weak one in each step: fixmatch, uda, sage,
    # proxyfl.
    config.consistency = Section()
    config.consistency.unlabelled_ratio = whole(1, least=1)  # mu: unlabelled images in a step, times client.batch_size
    config.consistency.unlabelled_weight = real(1.0, least=0)  # lambda_u of the unlabelled images' loss
    # The model in training; or 'received': the global model as it came down.
    config.consistency.labels_from = word("local", "received")
    # Batch statistics of labelled, weak and strong images: of each 'apart', or of all 'together', as the reference
    # codes of labels at the clients interleave them; 'auto': together where clients have labels.
    config.consistency.batch_norm = word("auto", "apart", "together")
    config.consistency.include_labelled = False  # labelled images are unlabelled ones, too, without their labels (SAGE)
    # Steps of a local epoch: 'longer', as many as the longer of the two, labelled or unlabelled images, needs to be
    # gone through once; 'unlabelled', the unlabelled images / client.batch_size rounded down, whatever mu is (SAGE:
    # with mu 2 it goes through them twice).
    config.consistency.epoch_length = word("longer", "unlabelled")

    config.log = Section()
    config.log.report = True  # WORKDIR/report.html, figures/ and MODEL_CARD.md when a run is over
    config.log.tensorboard = True  # event files in WORKDIR/tensorboard
    config.log.wandb_project = ""  # of Weights & Biases, which gets a run for each seed; '': none
    return config


def _sgd_section(learning_rate: float, epochs: int, least_epochs: int, batch_size: int) -> Section:
    section = Section()
    section.epochs = whole(epochs, least=least_epochs)  # passes over the training data in a round
    section.batch_size = whole(batch_size, least=1)  # images in a step; the last one of an epoch may have fewer
    section.learning_rate = real(learning_rate, above=0)  # in the first round; see schedule
    section.optimizer = "sgd"  # PyTorch's; or any of optax by name, such as 'adam' or 'lars(trust_coefficient=0.01)'
    section.momentum = real(0.9, least=0, below=1)  # of 'sgd', and of others that take one
    section.nesterov = False  # Nesterov's form of the momentum
    section.weight_decay = real(5e-4, least=0)  # added to the gradient; some optimisers decay by their own rule
    section.clip_norm = real(1.0, least=0)  # of the whole gradient; 0: no clipping
    section.persistent = False  # the optimiser's state survives rounds; of clients: one more model for each of all K
    return section
