"""FedCD: Federated Semi-Supervised Learning with Class Awareness Balance via Dual Teachers.

Liu, Wu and Qin, AAAI 2024. Some clients have labels for all their images, the others for none. What differs from
FedAvg, at a client without labels:
  1. dual teacher distillation: its student minimises the squared error to the sharpened probabilities of two teachers
     for another weak view. The local one is a mean teacher, which is never reset; the global one is the received model;
  2. knowledge purification: an image counts less for a teacher whose features are far from the student's;
  3. class awareness balance: once a round the received model finds the classes that it predicts most at this client.
     An image that ranks one of them low may be of a rare class; such images get a higher weight.

The code of the client without labels is public, YunzZ-Liu/FedCD; **all else is inferred**, since only the paper's
abstract and settings could be read: labelled clients, the optimizers that clients keep, and the mean of models are
those of RSCFed, on which the code is based. docs/methods/fedcd.md says more.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.fields import Section, real, share, whole, word
from fedjax_ssl.client import At, Batches, Examples, Loss, Plan, labelled_phase, score_cohort, unlabelled_phase
from fedjax_ssl.client.by_role import unlabelled_plan
from fedjax_ssl.client.deck import split_keys
from fedjax_ssl.client.mean_teacher import TEACHER, follow, own_teachers, sharpened, teacher_of
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Method, Phase, Previous, Problem
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import BY_ROLE, TEN_CLIENTS, alternating
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model

FIELDS = {**BY_ROLE, "client.persistent": True}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on HAM10000; clients, partition and clipping as RSCFed's
        **TEN_CLIENTS,
        "num_rounds": 1000,
        "client.batch_size": 12,
        "client.learning_rate": 0.02,
        "client.unlabelled_learning_rate": 0.01,
        "client.clip_norm": 5.0,
    },
    "code": {"fedcd.teacher_statistics": "first"},
}


def defaults() -> Section:
    section = Section()
    section.global_weight = real(0.02, least=0)  # lambda_1, weight of the received model's lesson
    section.local_weight = real(0.02, least=0)  # lambda_2, weight of the mean teacher's lesson
    # Normalisation statistics of the mean teacher: those of the 'first' model that the client received, as in the code,
    # which for an untrained one are useless for ever; or those of the model 'received' in this round.
    section.teacher_statistics = word("received", "first")
    section.confident = share(0.4)  # a class is confident if its scaled mass reaches this, see `balance`
    # An image is unreliable if a confident class has a rank from this one, counted from 0, to `last_rank` in it. With
    # too few classes for such ranks all images count the same.
    section.first_rank = whole(5, least=0)
    section.last_rank = whole(6, least=0)  # see `first_rank`
    return section


def fedcd(problem: Problem) -> Method:
    """Its Algorithm 1, the unlabelled client, within FedAvg as a Method."""
    return alternating(problem, (labelled_phase(problem), with_two_teachers(problem)), own=own_teachers)


def with_two_teachers(problem: Problem) -> Phase:
    """Makes the phase of `client.epochs` passes over a client's unlabelled images, after `labelled_phase`.

    The loss is lambda_1 L(received model) + lambda_2 L(mean teacher), see `lesson`.
    """
    network, options = problem.network, problem.config.fedcd
    passes = unlabelled_plan(problem)

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        """`Plan.work` is the images' weights in this round, float32 [M, n_max]."""
        examples = Examples.of(data, cohort, split_keys(cohort)[0])

        def logits(images: jax.Array) -> jax.Array:
            return network.predict(received.model, images).logits

        scores = score_cohort(problem, logits, data.inputs, examples, num_views=1)
        ranks = options.first_rank, options.last_rank
        weights = balance(scores, examples.unlabelled, options.confident, ranks)
        return passes(received, data, cohort, previous)._replace(work=weights)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        teacher_key, student_key = jax.random.split(at.key)
        weights = jnp.where(mask, at.work[batch.unlabelled.positions], 0.0)
        teacher, view = teacher_of(at, options.teacher_statistics), problem.weak(teacher_key, images)
        (student,), batch_stats = network.train(model, (problem.weak(student_key, images),), mask)
        by_global = lesson(student, network.predict(at.received.model, view), weights)
        by_local = lesson(student, network.predict(teacher, view), weights)
        value = options.global_weight * by_global + options.local_weight * by_local
        metrics = {"unlabelled_loss": value, "global_loss": by_global, "local_loss": by_local}
        return Loss(value, batch_stats, metrics, remember={TEACHER: teacher})

    return unlabelled_phase(problem, loss, plan=plan, after=follow)


def lesson(student: Outputs, teacher: Outputs, weights: jax.Array) -> jax.Array:
    """L = sum_i w_i exp(-V_i) |p_i - q_i|^2 / sum_i w_i, of a batch: float32 [].

    p is the student's probabilities, q the teacher's sharpened ones, and V_i = KL(softmax(teacher's features) ||
    softmax(student's features)), through which the student's gradient flows too, as in the code. w is float32 [B].
    """
    of_teacher, of_student = jax.nn.log_softmax(teacher.features), jax.nn.log_softmax(student.features)
    divergences = optax.losses.kl_divergence_with_log_targets(of_student, of_teacher)
    errors = jnp.sum(jnp.square(jax.nn.softmax(student.logits) - sharpened(teacher.logits)), axis=-1)
    # Any scale of the weights cancels; a step has at least one image.
    return jnp.sum(weights * jnp.exp(-divergences) * errors) / jnp.sum(weights)


def balance(logits: jax.Array, present: jax.Array, confident: jax.Array | float, ranks: tuple[int, int]) -> jax.Array:
    """The weight of each client's images by class awareness balance, float32 [..., n].

    Of logits, float32 [..., n, C], and the images that are `present`, bool [..., n], the mass of a class is the sum of
    its probabilities, scaled so that the client's least is 0 and the largest 1. A class whose mass is at least
    `confident` and that ranks from `ranks[0]` to `ranks[1]` in an image, from 0, makes it unreliable. U of N images
    being so, each has the weight N / U, the others N / (N - U).
    """
    mass = jnp.sum(jnp.where(present[..., None], jax.nn.softmax(logits), 0.0), axis=-2, keepdims=True)
    least, most = jnp.min(mass, axis=-1, keepdims=True), jnp.max(mass, axis=-1, keepdims=True)
    sure = (most > least) & (mass - least >= confident * (most - least))
    place = jnp.argsort(jnp.argsort(logits, axis=-1, descending=True), axis=-1)
    unreliable = present & jnp.any(sure & (place >= ranks[0]) & (place <= ranks[1]), axis=-1)
    of_all, of_them = (jnp.sum(which, axis=-1, keepdims=True) for which in (present, unreliable))
    return of_all / jnp.maximum(jnp.where(unreliable, of_them, of_all - of_them), 1)


ENTRY = Entry(
    fedcd,
    title="FedCD",
    paper="https://doi.org/10.1609/aaai.v38i4.28175",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    tiny={"fedcd.global_weight": 1.0, "fedcd.local_weight": 1.0, "fedcd.first_rank": 1},
)
