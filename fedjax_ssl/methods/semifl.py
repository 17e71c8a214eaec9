"""SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training.

Diao, Ding and Tarokh, NeurIPS 2022 (arXiv 2106.01432). What differs from FedAvg:
  1. clients label their images once a round with the received global model, and train on the confident ones;
  2. the confident images are the fix set; for the mix set each is mixed with a partner drawn from all images of the
     client, confident or not (mixup, as in MixMatch);
  3. the server aggregates with momentum, and then trains on its labelled images.

The paper's own recipe is `strong` (see `fedjax_ssl/base/fields/`). The variants `paper` and `code` together do the same
as its public code, which most likely gave the paper's figures.
"""

from fedjax_ssl.base.fields import Section, word
from fedjax_ssl.client import Examples, fix_mix_phase, label_cohort, make_confidence, threshold_of
from fedjax_ssl.client.fix_mix import label_keys
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Labels, Method, Previous, Problem
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating

VARIANTS: Variants = {
    "paper": {  # the setting of its experiments, after the recipe `strong`; with 1,000 labels or fewer, batches of 10
        "num_rounds": 800,
        "data.partition": "dirichlet_clients",
        "augment.flavour": "semifl",
        "server.epochs": 5,
        "server.batch_size": 250,
        "server.augmentation": "weak",
        "server.pretrain_epochs": 0,
        "model.statistics": "all_mixed",  # as in its experiments, with clients of two classes
    },
    "code": {  # further settings of its public code, to be named after `paper`
        "model.classifier_init": "torch",
        "semifl.partners": "epoch",
    },
    "no_mixup": {"semifl.mixup": False},  # FedAnchor's Table 3, "SemiFL + no mixup"
}
MIXUP_ALPHA = 0.75  # a of lambda ~ Beta(a, a), eq. 6


def defaults() -> Section:
    section = Section()
    section.mixup = True  # False: only the fix loss
    section.partners = word("round", "epoch")  # how often mix partners are drawn; its code: 'epoch'
    return section


def semifl(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    options = problem.config.semifl
    rule = make_confidence(problem, threshold_of(problem))

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        """Eq. 4: the global model's hard labels, and whether each reaches the threshold."""
        examples = Examples.of(data, cohort, label_keys(cohort))
        return label_cohort(problem, received.model, data, examples, rule, num_views=1)

    on_fix_and_mix = fix_mix_phase(  # eq. 5 to 8
        problem,
        mixup_alpha=MIXUP_ALPHA if options.mixup else 0.0,
        mix_order="augment_then_mix",  # eq. 6
        partners=options.partners,
    )
    return alternating(problem, (on_fix_and_mix,), label=label, rule=rule)


ENTRY = Entry(
    semifl,
    title="SemiFL",
    paper="https://arxiv.org/abs/2106.01432",
    defaults=defaults,
    variants=VARIANTS,
    mislabels=True,
    tiny={"confidence.threshold": 0.2, "confidence.kind": "freematch", "confidence.memory": "run"},
)
