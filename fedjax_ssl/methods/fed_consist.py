"""Fed-Consist: FedAvg, with consistency regularisation at the clients without labels.

Yang et al., "Federated semi-supervised learning for COVID region segmentation in chest CT using multi-national data
from China, Italy, Japan", Medical Image Analysis 70, 2021. Some clients have labels for all their images, the others
for none. What differs from FedAvg: a client without labels trains its model to predict the same for two views of an
image.

The paper segments images. This is the baseline for classification that later papers compare with, the "naive" solution
of FedIRM's figure 1a: a consistency loss at unlabelled clients, cross-entropy at the others, FedAvg. **The loss below
is inferred**, since only the paper's abstract was available and it has no public code. docs/methods/fed_consist.md
says more. With a mean teacher this is `fedirm,consistency`.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, whole
from fedjax_ssl.client import At, Batches, Loss, labelled_phase, unlabelled_phase, unlabelled_plan
from fedjax_ssl.client.steps import LossFunction
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import Entry, labels_alone
from fedjax_ssl.methods.frames import BY_ROLE, alternating
from fedjax_ssl.ops.losses import mean_present
from fedjax_ssl.ops.sgd import Model


def defaults() -> Section:
    section = Section()
    # First rounds, in which only clients with labels train: 21 in FedIRM's code, whose consistency loss this is.
    section.warm_up_rounds = whole(21, least=0)
    section.consistency_weight = real(0.02, least=0)  # lambda; RSCFed's code has 0.02 for such a loss
    return section


def fed_consist(problem: Problem) -> Method:
    """Labels, then consistency, then FedAvg as a Method."""
    plan = unlabelled_plan(problem, problem.config.fed_consist.warm_up_rounds)
    phases = labelled_phase(problem), unlabelled_phase(problem, consistency(problem), plan=plan)
    return alternating(problem, phases)


def consistency(problem: Problem) -> LossFunction:
    """The loss lambda / B sum_b |p(x_b') - p(x_b'')|^2 of two weak views; p(x_b'') is a target without gradient."""
    weight, network = problem.config.fed_consist.consistency_weight, problem.network

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        views = tuple(problem.weak(key, images) for key in jax.random.split(at.key))

        outputs, batch_stats = network.train(model, views, mask)
        p, target = (jax.nn.softmax(of_view.logits) for of_view in outputs)
        errors = jnp.sum(jnp.square(p - jax.lax.stop_gradient(target)), axis=-1)
        value = weight * mean_present(errors, mask)
        return Loss(value, batch_stats, {"unlabelled_loss": value})

    return loss


ENTRY = Entry(
    fed_consist,
    title="Fed-Consist",
    paper="https://doi.org/10.1016/j.media.2021.101992",
    settings=("some_clients", "profile"),
    defaults=defaults,
    fields=BY_ROLE,
    confidence=(),
    advice=lambda config: labels_alone(config, "fed_consist.warm_up_rounds"),
    tiny={"fed_consist.warm_up_rounds": 0, "clients_per_round": 8, "data.labelled_clients": 2},
)
