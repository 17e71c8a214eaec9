"""Fields of uploads: how they are averaged, attacked, compressed, delayed and made private."""

from fedjax_ssl.base.fields.section import Section, real, share, whole, word


def aggregation_fields() -> Section:
    """How uploads become one model."""
    section = Section()
    # Weights of uploads in their mean: a client's 'size' in images, its 'qualified' images (those trained on), or
    # 'uniform'. Methods with their own weights ignore it: cbafed, fedpdm, semianagg, orchestra; by default feddb,
    # fedlabel, fedavg_semi, isofed and fl2.
    section.weights = word("size", "qualified", "uniform")
    # Each client clips its update of the parameters to this norm before sending; 0: no clipping.
    section.clip_norm = real(0.0, least=0)
    # How uploads become one model: the weighted 'mean', or a rule that a few lying clients cannot move far: 'median' or
    # 'trimmed_mean' of each number; 'krum', 'multi_krum' or 'geometric_median' of whole models. See
    # docs/reference/attacks.md.
    section.mean = word("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
    # With 'trimmed_mean', 'krum' or 'multi_krum': the share of a cohort that may lie.
    section.byzantine_share = real(0.2, least=0, below=0.5, static=True)
    # The server clips longer updates to this norm; 0: no clipping.
    section.norm_bound = real(0.0, least=0)
    # The server's optimizer, which is applied to that mean.
    section.optimizer = word("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi")
    section.learning_rate = real(1.0, above=0)  # learning rate of this optimizer; 'fedavg' has none
    # Momentum of 'fedavgm'; decay of the first moment of 'fedadam' and 'fedyogi'.
    section.momentum = real(0.5, least=0, below=1)
    return section


def attack_fields() -> Section:
    """Clients that lie."""
    section = Section()
    # What attackers do: 'sign_flip', 'noise', 'scaled' and 'little' change their uploads; 'labels' trains on false
    # labels; 'poison' crafts unlabelled images; 'none': no attack. See docs/reference/attacks.md.
    section.kind = word("none", "sign_flip", "noise", "scaled", "little", "labels", "poison")
    section.share = share(0.2)  # share of attackers: floor(share K) clients, drawn by the seed
    # Strength of the attack, in units of its kind; 0: the default of the kind. See docs/reference/attacks.md.
    section.strength = real(0.0, least=0)
    section.from_class = whole(4, least=0)  # with 'poison': the class whose images should be mislabelled
    section.to_class = whole(9, least=0)  # with 'poison': the class they should be labelled as
    section.targets = whole(1, least=1)  # with 'poison': how many images the attackers target
    return section


def compression_fields() -> Section:
    """What an upload leaves out."""
    section = Section()
    # Compression of uploads: 'none', 'int8' with random rounding, or 'top_k', only the largest numbers; see
    # docs/how_to/robustness.md.
    section.kind = word("none", "int8", "top_k")
    section.share = real(0.05, above=0, most=1, static=True)  # with 'top_k': k / number of parameters
    # With 'top_k': a client adds its compression error to its next update; needs one more model for each client.
    section.error_feedback = True
    return section


def availability_fields() -> Section:
    """Clients that answer late or never."""
    section = Section()
    # Probability that a client of the cohort does not answer; it does not train in this round.
    section.never = real(0.0, least=0, below=1)
    section.late = share(0.0)  # probability that an answer arrives one round late
    # Factor of a late upload's weight; 0: it is dropped. Robust means (aggregation.mean) count it in full.
    section.late_weight = share(1.0, static=True)
    return section


def privacy_fields() -> Section:
    """Differential privacy of clients."""
    section = Section()
    # z of differential privacy: Gaussian noise of deviation z aggregation.clip_norm on the unweighted sum of
    # updates. 0: no noise. See docs/how_to/privacy.md.
    section.noise = real(0.0, least=0)
    section.delta = real(1e-5, above=0, below=1)  # delta for which epsilon is reported
    # 'poisson': each client joins independently, clients_per_round on average; 'fixed': always this number, with a far
    # larger epsilon.
    section.cohorts = word("poisson", "fixed")
    # Noise and cohorts follow from the seed, which gives no privacy: for experiments. False: from a secret of the run.
    section.reproducible = False
    return section
