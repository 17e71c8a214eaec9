"""Fields of pseudo-labels: which count, how much, and in which loss."""

from fedjax_ssl.base.fields.section import Section, real, share, whole, word


def confidence_fields() -> Section:
    """Which pseudo-labels count, and how much: see fedjax_ssl/client/confidence.py."""
    section = Section()
    # The rule: 'fixed', the method's threshold; 'share', 'client_mean', 'sat', 'flexmatch', 'freematch', 'softmatch',
    # see docs/concepts/confidence.md; or your own FILE.py:RULE, see docs/how_to/change_a_method.md.
    section.kind = word("fixed", "share", "client_mean", "sat", "flexmatch", "freematch", "softmatch", code=True)
    # How long a client keeps the rule's state: one 'round' or the whole 'run'.
    section.memory = word("round", "run")
    section.share = real(0.5, above=0, most=1)  # with 'share': the share of each client's images that count
    section.momentum = real(0.999, least=0, below=1)  # of 'freematch' and 'softmatch': momentum of their averages
    section.warm_up = True  # with 'flexmatch': images without a stored label lower the thresholds
    # With 'freematch': weight of its fairness term, which fedavg_semi, semianagg, isofed and twin_sight use. The
    # reference code also has 0.001.
    section.fairness_weight = real(0.01, least=0)
    # With 'freematch' or 'sat': tau_t averages this quantile of the largest probabilities (the reference code offers
    # 0.8); 0: their mean.
    section.quantile = share(0.0)
    section.level_cap = share(1.0)  # with 'freematch' or 'sat': the upper bound of tau_t; the reference code uses 0.95
    section.clamp_least = share(0.0)  # with 'freematch' or 'sat': a threshold's lower bound; its paper uses 0.9 on SVHN
    section.clamp_most = share(1.0)  # with 'freematch' or 'sat': a threshold's upper bound; its paper uses 0.95 on SVHN
    section.uniform_alignment = True  # with 'softmatch': aligns probabilities to equally frequent classes
    section.n_sigma = real(2.0, above=0)  # n of 'softmatch': with a larger n weights fall faster below the mean
    # 'app_u' divides probabilities by the client's mean prediction before labelling (FedDB). Only methods with labels
    # from a softmax accept it, see docs/concepts/confidence.md. 'none': no division.
    section.debias = word("none", "app_u")
    return section


def trainer_fields() -> Section:
    """Training on pseudo-labels in fedavg_semi, semianagg, isofed and twin_sight."""
    section = Section()
    # Which rule weights pseudo-labels: config.confidence, or 'acr', ACR's own with a second classifier.
    section.name = word("confidence", "acr")
    section.threshold = share(0.95)  # tau of the rule; pseudo-labels that reach it are reported as confident
    section.labels_from = word("received", "local")  # labels come from the 'received' model or the 'local' one
    # What a client reports as its number of pseudo-labels: 'trained_on', the sum of their weights in the loss; or
    # 'confident', the number that reach the threshold.
    section.accepted = word("trained_on", "confident")
    # For 'acr', which estimates the class shares of a client's unlabelled images and keeps them between rounds.
    section.strength = real(2.0, least=0)  # tau_2: the largest adjustment by log pi; the balanced head always uses it
    # A client estimates its class shares after this many rounds; ACR's code has `epoch > 5`, counted from 0.
    section.estimate_from = whole(6, least=0)
    section.estimate_momentum = real(0.99, least=0, below=1)  # momentum of the estimate, over batches
    return section


def consistency_fields() -> Section:
    """Training strong views towards labels of weak views."""
    # For fixmatch, uda, sage, proxyfl and fedopenmatch: each step trains a strong view towards the label of a weak one.
    section = Section()
    section.unlabelled_ratio = whole(1, least=1)  # mu: unlabelled images per step, in multiples of client.batch_size
    section.unlabelled_weight = real(1.0, least=0)  # lambda_u, weight of the unlabelled images' loss
    # The model that labels: the 'local' one in training, or the global one as 'received'.
    section.labels_from = word("local", "received")
    # Batch statistics of labelled, weak and strong images: 'apart', for each kind; 'together', for all, as in reference
    # codes with labels at clients; 'auto': together if clients have labels.
    section.batch_norm = word("auto", "apart", "together")
    section.include_labelled = False  # also uses labelled images as unlabelled ones (SAGE)
    # Steps of a local epoch: 'longer', one pass over the larger of the labelled and unlabelled sets; 'unlabelled',
    # floor(unlabelled images / client.batch_size), whatever mu is (SAGE: two passes with mu = 2).
    section.epoch_length = word("longer", "unlabelled")
    return section
