"""Fields of pseudo-labels: which count, how much, and in which loss."""

from fedjax_ssl.base.fields.section import Section, real, share, whole, word

RULES = ("share", "sat", "flexmatch", "freematch", "softmatch", "acr")


def confidence_fields() -> Section:
    """Which pseudo-labels count, and how much: see docs/concepts/confidence.md."""
    section = Section()
    # The rule: 'fixed', the method's threshold; 'share', 'sat', 'flexmatch', 'freematch', 'softmatch', see
    # docs/concepts/confidence.md; 'acr', with a second classifier, in fedavg_semi, semianagg and isofed; or your own
    # FILE.py:RULE, see docs/how_to/change_a_method.md.
    section.kind = word("fixed", *RULES, code=True)
    # tau: a label counts if its score reaches it, or by the rule. None: the method's own, 0.3 in fedirm and fedlabel,
    # 0.6 in feddure and fedanchor (there of a cosine), 0.8 in uda, 0.85 in fedmatch, else 0.95.
    section.threshold = real(None, least=-1)
    # The model that labels: the 'received' one, or the 'local' one in training. 'method': 'received' in fedavg_semi,
    # semianagg and isofed; 'local' in fixmatch, uda, sage, proxyfl and fedopenmatch. Others ignore it.
    section.labels_from = word("method", "received", "local")
    # How long a client keeps the rule's state: one 'round' or the whole 'run'.
    section.memory = word("round", "run")
    section.share = real(0.5, above=0, most=1)  # with 'share': the share of each client's images that count
    section.momentum = real(0.999, least=0, below=1)  # of 'freematch' and 'softmatch': momentum of their averages
    section.warm_up = True  # with 'flexmatch': images without a stored label lower the thresholds
    # With 'freematch': weight of its fairness term, which fedavg_semi, semianagg, isofed and twin_sight use. The
    # reference code also has 0.001.
    section.fairness_weight = real(0.01, least=0)
    section.clamp_least = share(0.0)  # with 'freematch' or 'sat': a threshold's lower bound; its paper uses 0.9 on SVHN
    section.clamp_most = share(1.0)  # with 'freematch' or 'sat': a threshold's upper bound; its paper uses 0.95 on SVHN
    section.strength = real(2.0, least=0)  # tau_2 of 'acr': the largest adjustment by log pi
    # What a client of fedavg_semi or semianagg reports as its number of pseudo-labels: 'trained_on', the sum of their
    # weights in the loss; or 'confident', the number that reach the threshold.
    section.accepted = word("trained_on", "confident")
    # 'app_u' divides probabilities by the client's mean prediction before labelling (FedDB). Only methods with labels
    # from a softmax accept it, see docs/concepts/confidence.md. 'none': no division.
    section.debias = word("none", "app_u")
    return section


def consistency_fields() -> Section:
    """Training strong views towards labels of weak views."""
    # For fixmatch, uda, sage, proxyfl and fedopenmatch: each step trains a strong view towards the label of a weak one.
    section = Section()
    section.unlabelled_ratio = whole(1, least=1)  # mu: unlabelled images per step, in multiples of client.batch_size
    section.unlabelled_weight = real(1.0, least=0)  # lambda_u, weight of the unlabelled images' loss
    section.include_labelled = False  # also uses labelled images as unlabelled ones (SAGE)
    # Steps of a local epoch: 'longer', one pass over the larger of the labelled and unlabelled sets; 'unlabelled',
    # floor(unlabelled images / client.batch_size), whatever mu is (SAGE: two passes with mu = 2).
    section.epoch_length = word("longer", "unlabelled")
    return section
