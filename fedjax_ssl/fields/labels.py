"""Fields of pseudo-labels: which count, how much, and for which loss."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def confidence_fields() -> Section:
    """Which pseudo-labels count, and how much: see fedjax_ssl/client/confidence.py."""
    section = Section()
    # 'fixed' at the method's own threshold; or 'share', 'client_mean', 'sat', 'flexmatch', 'freematch', 'softmatch',
    # which adapt to the client or the class, see docs/concepts/confidence.md; or your own, see
    # docs/how_to/change_a_method.md. Methods with a rule of their own refuse the others.
    section.kind = word("fixed", "share", "client_mean", "sat", "flexmatch", "freematch", "softmatch", code=True)
    # How long a client keeps what the rule has learned: a 'round', or the whole 'run'.
    section.memory = word("round", "run")
    section.share = real(0.5, above=0, most=1)  # of 'share': the part of each client's images that counts
    section.momentum = real(0.999, least=0, below=1)  # of the averages of 'freematch' and 'softmatch'
    section.warm_up = True  # of 'flexmatch': images without a stored label hold the thresholds down
    # Of 'freematch': of its fairness term, where the loss is made step by step in fedavg_semi, semianagg, isofed and
    # twin_sight; the reference code also has 0.001.
    section.fairness_weight = real(0.01, least=0)
    # Of 'freematch': tau_t averages this quantile of the largest probabilities (in the reference code 0.8 may be
    # chosen); 0: their mean.
    section.quantile = share(0.0)
    section.level_cap = share(1.0)  # of 'freematch': the most that tau_t may be; the reference code has 0.95
    section.clamp_least = share(0.0)  # of 'freematch': the least threshold of a class; its paper on SVHN has 0.9
    section.clamp_most = share(1.0)  # of 'freematch': the most; there 0.95
    section.uniform_alignment = True  # of 'softmatch': probabilities aligned to equally frequent classes
    section.n_sigma = real(2.0, above=0)  # n of 'softmatch': the larger, the faster a weight falls below the mean
    # 'none'; or 'app_u', probabilities divided by the client's mean of them before they label (FedDB), for methods with
    # labels by a softmax; the others refuse it: see fedjax_ssl/client/debias.py.
    section.debias = word("none", "app_u")
    return section


def trainer_fields() -> Section:
    """Training on pseudo-labels in fedavg_semi, semianagg, isofed and twin_sight."""
    section = Section()
    # What pseudo-labels count by: config.confidence; or 'acr', ACR's own rule with a second classifier.
    section.name = word("confidence", "acr")
    section.threshold = share(0.95)  # tau of the rule; from it on a label is reported as confident
    section.labels_from = word("received", "local")  # the global model as it came down, or the one in training
    # What a client tells of its pseudo-labels: 'trained_on', the sum of their weights in the loss; or 'confident', how
    # many reach the threshold.
    section.accepted = word("trained_on", "confident")
    # Of 'acr', which compares a client's images with the labelled ones; its estimate always survives rounds.
    section.strength = real(2.0, least=0)  # tau, the largest adjustment by log pi, and the balanced head's
    # Rounds that a client has had before it estimates its shares: its code's `epoch > 5`, which counts from 0.
    section.estimate_from = whole(6, least=0)
    section.estimate_momentum = real(0.99, least=0, below=1)  # of the estimate, over batches
    # Of confident labels; 'presence', a BUG of its code, for replication alone: 1 for each class of a batch.
    section.histogram = word("counts", "presence")
    return section


def consistency_fields() -> Section:
    """A strong view trained towards the label of a weak one."""
    # Of methods that train a strong view towards the label of a weak one in each step: fixmatch, uda, sage,
    # proxyfl.
    section = Section()
    section.unlabelled_ratio = whole(1, least=1)  # mu: unlabelled images in a step, times client.batch_size
    section.unlabelled_weight = real(1.0, least=0)  # lambda_u of the unlabelled images' loss
    # The model in training; or 'received': the global model as it came down.
    section.labels_from = word("local", "received")
    # Batch statistics of labelled, weak and strong images: of each 'apart', or of all 'together', as the reference
    # codes of labels at the clients interleave them; 'auto': together where clients have labels.
    section.batch_norm = word("auto", "apart", "together")
    section.include_labelled = False  # labelled images are unlabelled ones, too, without their labels (SAGE)
    # Steps of a local epoch: 'longer', as many as the longer of the two, labelled or unlabelled images, needs to be
    # gone through once; 'unlabelled', the unlabelled images / client.batch_size rounded down, whatever mu is (SAGE:
    # with mu 2 it goes through them twice).
    section.epoch_length = word("longer", "unlabelled")
    return section
