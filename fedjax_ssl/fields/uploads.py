"""Fields of uploads: their mean, and what befalls them on the way."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def aggregation_fields() -> Section:
    """How uploads become one model."""
    section = Section()
    # Of uploads in their mean. Not read by methods with weights of their own: cbafed, semianagg, orchestra; fedlabel,
    # fedavg_semi, isofed and fl2 by their defaults (fedlabel.weights, fedavg_semi.apart, isofed.unlabelled_loss,
    # fl2.status_weights).
    section.weights = word("size", "qualified", "uniform")
    # Of a client's update of the parameters, which it clips before sending; 0: none.
    section.clip_norm = real(0.0, least=0)
    # An update that is so many times as long as the cohort's median is dropped and counted, as one that is not finite;
    # 0: none is.
    section.longest_update = real(1000.0, least=0)
    # How uploads become one model: the weighted mean; or a rule that a few lying clients cannot move far: 'median' and
    # 'trimmed_mean' of each number, 'krum', 'multi_krum', 'geometric_median' of whole models. See
    # fedjax_ssl/server/robust.py.
    section.mean = word("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
    # Of 'trimmed_mean', 'krum' and 'multi_krum': the part of a cohort that may lie.
    section.byzantine_share = real(0.2, least=0, below=0.5)
    # An update that is longer is shortened to this length by the server, whoever sends it; 0: none is.
    section.norm_bound = real(0.0, least=0)
    section.optimizer = word("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi")  # of their mean
    section.learning_rate = real(1.0, above=0)  # of the server optimiser; 'fedavg' has none
    # Of 'fedavgm', and the first moment's decay of 'fedadam' and 'fedyogi'.
    section.momentum = real(0.5, least=0, below=1)
    section.adaptivity = real(1e-3, above=0)  # tau of the adaptive ones (Reddi et al., 2021)
    return section


def attack_fields() -> Section:
    """Clients that lie."""
    section = Section()
    # Of clients that lie, to test a mean with: 'sign_flip', 'noise', 'scaled' and 'little' (A Little Is Enough) are of
    # what they send; 'labels': they train on false labels, the next class's, and exaggerate their counts of examples;
    # 'poison': they replace some of their unlabelled images by crafted ones, so that images of one class get another's
    # label. See fedjax_ssl/engine/attacks.py and fedjax_ssl/data/poison.py.
    section.kind = word("none", "sign_flip", "noise", "scaled", "little", "labels", "poison")
    section.share = share(0.2)  # of all clients: floor(share K) are drawn by the seed
    # How many times the honest update's length, or of 'labels' the count of examples; of 'little' how many standard
    # deviations; of 'poison' how many of all clients' images are crafted, in a thousand. 0: 1 of 'sign_flip' and
    # 'noise', 10 of 'scaled' and 'labels', 5 of 'poison', of 'little' by its paper's formula.
    section.strength = real(0.0, least=0)
    section.from_class = whole(4, least=0)  # of 'poison': the class whose images are to be labelled wrongly
    section.to_class = whole(9, least=0)  # and the class whose label they are to get
    section.targets = whole(1, least=1)  # how many images of the attackers the crafted ones lead to
    return section


def compression_fields() -> Section:
    """What an upload leaves out."""
    section = Section()
    # Of uploads, whose updates are 'int8', rounded at random, or 'top_k', the largest numbers alone: see
    # fedjax_ssl/engine/compression.py.
    section.kind = word("none", "int8", "top_k")
    section.share = real(0.05, above=0, most=1)  # of 'top_k': k over all numbers of an update
    # Of 'top_k': a client keeps what was left out, and adds it to its next update; one more model for each client.
    section.error_feedback = True
    return section


def availability_fields() -> Section:
    """Clients that answer late, or never."""
    section = Section()
    # Of a cohort, each client by itself: it does not answer, does nothing, and is not waited for.
    section.never = real(0.0, least=0, below=1)
    section.late = share(0.0)  # of those that answer: their update joins the next round's
    section.late_weight = share(1.0)  # times the weight of a late upload; 0: it is dropped
    return section


def privacy_fields() -> Section:
    """Differential privacy of clients."""
    section = Section()
    # z, for differential privacy of clients: each clips its update to aggregation.clip_norm, S, and the server takes
    # their sum with Gaussian noise of deviation z S, over clients_per_round; weights are not read. 0: no noise. See
    # fedjax_ssl/engine/privacy.py.
    section.noise = real(0.0, least=0)
    section.delta = real(1e-5, above=0, below=1)  # for which epsilon is reported
    # Each client joins by itself, so that clients_per_round do in the mean; or 'fixed': so many always, and epsilon is
    # far larger.
    section.cohorts = word("poisson", "fixed")
    return section
