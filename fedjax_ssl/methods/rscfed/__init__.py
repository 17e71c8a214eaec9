"""RSCFed: Random Sampling Consensus Federated Semi-supervised Learning.

Liang et al., CVPR 2022 (arXiv 2203.13993). Some clients have labels for all their images, the others for none. What
differs from FedAvg:
  1. a round draws several groups of clients, each without replacement; all start from the same global model. A client
     in two groups trains twice, and its optimizer and teacher advance twice;
  2. a client without labels has its own mean teacher. Its student minimises the squared error to the teacher's
     sharpened probabilities of another weak view. The teacher is never reset; the student starts from the global
     model;
  3. within a group, an upload's weight falls with its distance to the group's mean; a labelled client counts more. The
     global model is the plain mean of the groups' models.

The paper's setting starts from a model trained on the labelled client only. If a run starts from an untrained model,
set `rscfed.teacher_statistics='received'`: with 'first' the teacher would keep that model's statistics for ever.

A labelled client counts 6 times, as with the command `--un_dist=avg` in the README of xmed-lab/RSCFed@4872944. Later
READMEs lack this argument, but the code (train_main.py:284-287 at ae35f03) still reads it. If it is empty, a labelled
client counts 36 times; the first commit (8d9c2e7, train_main.py:328) then leaves out the
distances. The code also adds up distances of PyTorch's batch counters; with normalisation layers these make all weights
of a group underflow. Here they are left out, and the nearest upload always keeps a weight.
"""

import jax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, real, share, whole, word
from fedjax_ssl.client import LABELLED, labelled_phase, mean_teacher_phase, own_teachers
from fedjax_ssl.client.mean_teacher import DIVISORS, STATISTICS
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Method, Problem, Selection, State
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.methods.rscfed.server import distance_reweighted
from fedjax_ssl.ops.draws import draw_distinct
from fedjax_ssl.server import fedavg

FIELDS = {
    "data.labels": "some_clients",
    "client.persistent": True,
    "client.labelled_views": "weak",
    "client.spare_classifier": False,
}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on SVHN and CIFAR-100
        "num_rounds": 1000,
        "num_clients": 10,
        "clients_per_round": 10,
        "data.partition": "dirichlet_clients",
        "data.alpha": 0.8,
        "data.labelled_rule": "most_classes",
        "model.name": "lenet",
        "model.classifier_init": "torch_linear",
        "model.normalisation": "none",
        "client.epochs": 1,
        "client.batch_size": 64,
        "client.learning_rate": 0.03,
        "client.unlabelled_learning_rate": 0.021,
        "client.clip_norm": 5.0,
        "augment.flip": "always",
        "augment.padding": 0,
        "augment.resized": 40,
    },
    "isic": {
        "model.name": "resnet18_imagenet",
        "model.normalisation": "running",
        "num_rounds": 800,
        "client.batch_size": 12,
        "client.learning_rate": 0.002,
        "client.unlabelled_learning_rate": 0.001,
        "rscfed.labelled_factor": 200.0,
        "rscfed.beta": 0.01,
        "rscfed.beta_labelled": 0.01,
    },
    "code": {"rscfed.loss_over": "batch_size"},
    "fedavg": {"rscfed.groups": 1, "rscfed.labelled_factor": 1.0, "rscfed.beta": 0.0, "rscfed.beta_labelled": 0.0},
}


def defaults() -> Section:
    """The section `config.rscfed`."""
    section = Section()
    section.groups = whole(3, least=1)  # groups of a round, trained one after the other
    section.group_size = whole(5, least=1)  # clients per group, without replacement; clients_per_round is ignored
    section.consistency_weight = real(0.02, least=0)  # weight of the squared error to the teacher
    section.temperature = real(0.5, above=0)  # T of the teacher's probabilities, p^(1/T) / sum p^(1/T)
    # The teacher's largest decay: in its step t, from 0, the decay is min(1 - 1 / (t + 1), this).
    section.ema_decay = share(0.999)
    # Normalisation statistics of the teacher: those of the 'first' model that the client received, as in the code;
    # those of the model 'received' in this round; or 'averaged' like the parameters.
    section.teacher_statistics = word("first", *STATISTICS)
    # Squared errors are divided by the images 'present' in a batch, or always by the 'batch_size'.
    section.loss_over = word("present", *DIVISORS)
    section.labelled_factor = real(6.0, above=0)  # factor of a labelled client's weight, after its distance
    # The weight is exp(-beta d / n) for an upload at distance d with n images, in a group without labels.
    section.beta = real(1e4, least=0)
    section.beta_labelled = real(100.0, least=0)  # beta of a group with a labelled client
    return section


def rscfed(problem: Problem) -> Method:
    """Its algorithm as a Method."""
    config, options = problem.config, problem.config.rscfed
    if options.group_size > config.num_clients:
        raise UserError(
            f"rscfed.group_size is {options.group_size}, but the federation has num_clients = {config.num_clients}"
        )

    def select_groups(state: State, data: FederatedData, key: jax.Array) -> Selection:
        del state
        keys = jax.random.split(key, options.groups)
        clients = jax.vmap(lambda key: draw_distinct(key, len(data.client_size), options.group_size))(keys)
        return Selection(clients.reshape(-1), turns=options.groups)

    with_teacher = mean_teacher_phase(
        problem,
        options.consistency_weight,
        temperature=options.temperature,
        decay=options.ema_decay,
        statistics=options.teacher_statistics,
        loss_over=options.loss_over,
    )
    reweighted = distance_reweighted(
        config.aggregation.weights,
        options.groups,
        lambda received: received.uploads.metadata[LABELLED] > 0,
        factor=options.labelled_factor,
        beta=options.beta,
        beta_labelled=options.beta_labelled,
    )
    method = alternating(
        problem,
        (labelled_phase(problem), with_teacher),
        own=own_teachers,
        aggregation=fedavg(problem, weighted_by=reweighted),
    )
    return method._replace(select=select_groups)


ENTRY = Entry(
    rscfed,
    title="RSCFed",
    paper="https://arxiv.org/abs/2203.13993",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    tiny={"rscfed.groups": 2, "rscfed.group_size": 8, "rscfed.consistency_weight": 1.0},
)
