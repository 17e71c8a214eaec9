"""Fields of uploads: how they are averaged, attacked, compressed, delayed and made private."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def aggregation_fields() -> Section:
    """How uploads become one model."""
    section = Section()
    # Weights of uploads in their mean: numbers of images, of images trained on, or equal. Methods with weights of their
    # own do not read it: cbafed, semianagg, orchestra; by default fedlabel, fedavg_semi, isofed and fl2
    # (fedlabel.weights, fedavg_semi.apart, isofed.unlabelled_loss, fl2.status_weights).
    section.weights = word("size", "qualified", "uniform")
    # Each client clips its update of the parameters to this length before sending; 0: no clipping.
    section.clip_norm = real(0.0, least=0)
    # An update more than this many times as long as the cohort's median is dropped and counted, as one that is not
    # finite is; 0: lengths are not compared.
    section.longest_update = real(1000.0, least=0)
    # How uploads become one model: the weighted mean, or a rule that a few lying clients cannot move far: 'median' and
    # 'trimmed_mean' of each number, 'krum', 'multi_krum', 'geometric_median' of whole models; see
    # docs/how_to/robustness.md.
    section.mean = word("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
    # Of 'trimmed_mean', 'krum' and 'multi_krum': the part of a cohort that may lie.
    section.byzantine_share = real(0.2, least=0, below=0.5)
    # The server shortens longer updates to this length; 0: none.
    section.norm_bound = real(0.0, least=0)
    section.optimizer = word("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi")  # of their mean
    section.learning_rate = real(1.0, above=0)  # of the server optimiser; 'fedavg' has none
    # Of 'fedavgm'; of 'fedadam' and 'fedyogi' the decay of the first moment.
    section.momentum = real(0.5, least=0, below=1)
    section.adaptivity = real(1e-3, above=0)  # tau of the adaptive ones (Reddi et al., 2021)
    return section


def attack_fields() -> Section:
    """Clients that lie."""
    section = Section()
    # How some clients attack, to test a mean: 'sign_flip', 'noise', 'scaled' and 'little' (A Little Is Enough) change
    # what they send; with 'labels' they train on the next class's label and exaggerate their numbers of images; with
    # 'poison' they replace unlabelled images by crafted ones, so that images of one class get another's label. See
    # docs/how_to/robustness.md.
    section.kind = word("none", "sign_flip", "noise", "scaled", "little", "labels", "poison")
    section.share = share(0.2)  # share of attackers: floor(share K) clients, drawn by the seed
    # Times the honest update's length; with 'labels' times the number of images; with 'little' standard deviations;
    # with 'poison' crafted images per thousand of all clients' images. 0: 1 for 'sign_flip' and 'noise', 10 for
    # 'scaled' and 'labels', 5 for 'poison', the paper's formula for 'little'.
    section.strength = real(0.0, least=0)
    section.from_class = whole(4, least=0)  # with 'poison': the class whose images should be labelled wrongly
    section.to_class = whole(9, least=0)  # and the class they should be labelled as
    section.targets = whole(1, least=1)  # with 'poison': how many images the attackers target
    return section


def compression_fields() -> Section:
    """What an upload leaves out."""
    section = Section()
    # Compression of uploads: 'int8', rounded at random, or 'top_k', the largest numbers alone; see
    # docs/how_to/failures.md.
    section.kind = word("none", "int8", "top_k")
    section.share = real(0.05, above=0, most=1)  # of 'top_k': k over all numbers of an update
    # With 'top_k': a client adds what was left out to its next update; one more model for each client.
    section.error_feedback = True
    return section


def availability_fields() -> Section:
    """Clients that answer late, or never."""
    section = Section()
    # Probability that a client of the cohort does not answer: it trains nothing in this round.
    section.never = real(0.0, least=0, below=1)
    section.late = share(0.0)  # probability that an answer arrives one round late
    section.late_weight = share(1.0)  # factor of a late upload's weight; 0: it is dropped
    return section


def privacy_fields() -> Section:
    """Differential privacy of clients."""
    section = Section()
    # z of differential privacy: each client clips its update to S = aggregation.clip_norm, and the server takes their
    # sum with Gaussian noise of deviation z S, over clients_per_round; weights are not read. 0: no noise. See
    # docs/how_to/privacy.md.
    section.noise = real(0.0, least=0)
    section.delta = real(1e-5, above=0, below=1)  # for which epsilon is reported
    # 'poisson': each client joins independently, clients_per_round in the mean; 'fixed': always so many, and epsilon is
    # far larger.
    section.cohorts = word("poisson", "fixed")
    return section
