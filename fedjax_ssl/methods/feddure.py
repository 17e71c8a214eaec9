"""FedDure: Combating Data Imbalances in Federated Semi-supervised Learning with Dual Regulators.

Bai et al., AAAI 2024 (arXiv 2307.05358). For clients with labels for a few of their images, whose labelled and
unlabelled images have different classes. What differs from FedAvg+FixMatch: a client has three models,
  1. the coarse regulator (C-reg), which labels; it is what travels, is averaged and tested;
  2. the local model, which begins each round as a copy of it, learns from its labels alone, and is then forgotten;
  3. the fine regulator (F-reg), a small network from C-reg's probabilities of an image to the image's weight in the
     local model's loss; it begins afresh each round.
Training is bi-level: F-reg descends the labelled loss that the local model would have after a step with its weights;
then the local model takes the step; and C-reg learns from labels, from its own confident ones, and from the learning
effect d, by which the step changed the local model's labelled loss (as in Meta Pseudo Labels, Pham et al., CVPR 2021).

The paper's text was not at hand: this follows its abstract and its public code (White1973/FedDure, commit 50ecb77). The
released method has no F-reg (groups/client_ssl/base_ssl.py:293-960, variant `code`). Its network, its input and the
normalised weights are those of a base class (groups/models/model.py:12-24, base_ssl.py:110-173) that never trains it;
how F-reg is trained here is ours, after Meta-Weight-Net (Shu et al., NeurIPS 2019): one step of plain SGD ahead.

d is the loss after the step less the loss before it (base_ssl.py:782), the other way round than in the derivation of
Meta Pseudo Labels: `feddure.effect`. The code's cosine behind the warm-up begins after its last step, and is left out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client import At, Batch, Deck, Examples, Hooks, Loss, label_for_report, local_sgd, own_optimizers
from fedjax_ssl.client.consistency import train_views
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Images, Jobs, Method, Phase, Previous, Problem
from fedjax_ssl.fields import Section, real, share, whole, word
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model, make_optimizer
from fedjax_ssl.learning.trees import norm, select, where
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating

FIELDS = {"data.labels": "clients"}
VARIANTS: Variants = {
    "paper": {  # its public code's file for CIFAR-10
        "num_rounds": 200,
        "clients_per_round": 5,
        "data.labels_per_class": 5,
        "data.partition": "dirichlet_clients",
        "data.alpha": 0.5,
        "model.name": "resnet9",
        "model.classifier_init": "torch_linear",
        "client.batch_size": 10,
        "client.optimizer": "adam",
        "client.learning_rate": 6e-4,
        "client.weight_decay": 0.0,
        "client.clip_norm": 0.0,
        "feddure.warm_up_steps": 10,
        "feddure.wait_steps": 2,
    },
    "code": {"feddure.fine": False},
    "no_coarse": {"feddure.coarse": False},
}
PAIR = "pair"  # the entry of a client's memory while it trains: its local model and F-reg


def defaults() -> Section:
    """The section `config.feddure`."""
    section = Section()
    section.threshold = share(0.6)  # C-reg learns from its own label of an image if its probability reaches it
    section.tuning_steps = whole(5, least=0)  # at first, of C-reg on labelled images alone
    section.steps = whole(5, least=1)  # then, of all three
    section.unlabelled_batch = whole(64, least=1)  # unlabelled images in a step, beside client.batch_size labelled ones
    section.unlabelled_weight = real(8.0, least=0)  # of C-reg's loss on its own labels, at full strength
    section.unlabelled_rise = whole(20, least=1)  # steps over which it rises to it
    section.warm_up_steps = whole(0, least=0)  # steps of a round over which learning rates rise from 0
    section.wait_steps = whole(0, least=0)  # of the local model, beforehand, at a rate of 0
    section.coarse = True  # C-reg learns from d
    section.effect = word("after_less_before", "before_less_after")  # d; the first is the code's
    section.fine = True  # F-reg weights images; False: all weigh the same
    section.fine_hidden = whole(100, least=1)  # width of F-reg's hidden layer
    section.fine_learning_rate = real(1e-3, above=0)  # of its Adam
    return section


class FedDureWork(NamedTuple):
    """What one client trains on."""

    deck: Deck  # its unlabelled images
    labelled: Deck
    regulator: dict[str, jax.Array]  # F-reg before its first step


class Pair(NamedTuple):
    """What a client has besides C-reg while it trains."""

    params: Any  # the local model's
    opt_state: Any
    regulator: dict[str, jax.Array]  # F-reg
    regulator_state: Any  # of its optimiser


def feddure(problem: Problem) -> Method:
    """FedDure as a Method."""

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        return own_optimizers(problem, data, model, CLASSIFIER, adapt=rising(problem))

    return alternating(problem, (with_pair(problem, local_training(problem)),), own)


def with_pair(problem: Problem, phase: Phase) -> Phase:
    """The phase with a fresh local model and F-reg at its beginning, which are forgotten at its end."""

    def start(received: Broadcast, data: FederatedData, work: FedDureWork, own):
        params = select(received.model.params, CLASSIFIER)
        of_local, of_regulator = optimizers(problem, received.learning_rate)
        pair = Pair(params, of_local.init(params), work.regulator, of_regulator.init(work.regulator))
        return phase.start(received, data, work, {**own, PAIR: pair})

    def finish(received: Broadcast, work: FedDureWork, carry, num_steps):
        finished = phase.finish(received, work, carry, num_steps)
        return finished._replace(own={name: value for name, value in finished.own.items() if name != PAIR})

    return phase._replace(start=start, finish=finish)


def optimizers(problem: Problem, learning_rate: jax.Array):
    """Of the local model, which is `config.client`'s as C-reg's is, and of F-reg."""
    options = problem.config.feddure
    of_local = make_optimizer(problem.config.client, learning_rate)
    rise = risen(options.warm_up_steps + options.wait_steps, options.wait_steps)
    return optax.chain(of_local, optax.scale_by_schedule(rise)), optax.adam(options.fine_learning_rate)


def rising(problem: Problem):
    """C-reg's optimiser out of `config.client`'s: its rate rises over the first steps."""
    rise = risen(problem.config.feddure.warm_up_steps)
    return lambda of_client: optax.chain(of_client, optax.scale_by_schedule(rise))


def risen(steps: int, wait: int = 0):
    """Number of a step, from 0 -> the factor of its learning rate: i / steps, 0 for the first `wait`."""
    return lambda i: jnp.where(i < wait, 0.0, jnp.minimum(1.0, i / steps)) if steps else jnp.float32(1)


def local_training(problem: Problem) -> Phase:
    """The tuning steps, then those of all three models."""
    network, options, size = problem.network, problem.config.feddure, problem.config.client.batch_size
    num_steps = options.tuning_steps + options.steps

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)
        keys = jax.vmap(lambda key: jax.random.split(key, 3))(examples.keys)
        deck = Deck.shuffled(examples, examples.unlabelled, keys[:, 0], num_steps)
        labelled = Deck.shuffled(examples, examples.labelled, keys[:, 1], num_steps)
        regulator = jax.vmap(lambda key: fresh_regulator(key, problem.num_classes, options.fine_hidden))(keys[:, 2])
        report = label_for_report(problem, received.model, data, examples, options.threshold)
        steps = jnp.where(jnp.any(examples.present, axis=1), num_steps, 0)
        return Jobs(steps, FedDureWork(deck, labelled, regulator), report)

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        """C-reg's loss, with the step of the local model and of F-reg in it."""
        labelled_key, weak_key, strong_key = jax.random.split(at.key, 3)
        known = at.work.labelled.batch(at.step, size).read(at.data)
        labelled = problem.weak(labelled_key, known.inputs)
        weak, strong = problem.weak(weak_key, batch.inputs), problem.strong(strong_key, batch.inputs)

        groups = [([labelled], known.mask), ([weak, strong], batch.mask)]
        (of_labelled, of_weak, of_strong), after = train_views(network, model, groups, together=True)
        labelled_loss = cross_entropy(of_labelled.logits, known.labels, known.mask)
        p = jax.lax.stop_gradient(jax.nn.softmax(of_weak.logits))
        confident = jnp.max(p, axis=-1) >= options.threshold
        own_labels = -jnp.sum(p * jax.nn.log_softmax(of_strong.logits), axis=-1)
        number = jnp.maximum(jnp.sum(batch.mask), 1)
        own_loss = jnp.sum(jnp.where(batch.mask & confident, own_labels, 0.0)) / number

        pair, effect = taught(problem, model, at, (labelled, known), (weak, batch), p)
        towards = jnp.argmax(jax.lax.stop_gradient(of_strong.logits), axis=-1)
        effect_loss = effect * cross_entropy(of_strong.logits, towards, batch.mask)

        step = at.step - options.tuning_steps  # of all three
        rise = options.unlabelled_weight * jnp.minimum(1.0, (step + 1) / options.unlabelled_rise)
        further = rise * own_loss + (effect_loss if options.coarse else 0.0)
        together = step >= 0
        value = labelled_loss + jnp.where(together, further, 0.0)
        metrics = {"labelled_loss": labelled_loss, "unlabelled_loss": jnp.where(together, own_loss, 0.0)}
        metrics["learning_effect"] = jnp.where(together, effect, 0.0)
        counts = jnp.any(known.mask) | (together & jnp.any(batch.mask))
        return Loss(value, after.batch_stats, metrics, aux=where(together, pair, at.own[PAIR]), counts=counts)

    hooks = Hooks(remember=lambda own, model, aux, step: {PAIR: aux}, adapt=rising(problem))
    return local_sgd(problem, prepare, loss, batch_size=options.unlabelled_batch, hooks=hooks)


def taught(
    problem: Problem,
    model: Model,
    at: At,
    labelled: tuple[Images, Batch],
    unlabelled: tuple[Images, Batch],
    p: jax.Array,
) -> tuple[Pair, jax.Array]:
    """A step of F-reg, and with its weights one of the local model.

    Args:
        problem: the run.
        model: C-reg; of it nothing is read but what the local model lacks.
        at: of the step.
        labelled: weak views, and their batch.
        unlabelled: weak views, and their batch.
        p: float32 [B, C], C-reg's probabilities of the unlabelled ones, which it labels by; no gradient.

    Returns:
        The pair after the step; and d, float32 [], the change of the local model's labelled loss.
    """
    options, pair, rate = problem.config.feddure, at.own[PAIR], at.received.learning_rate
    of_local, of_regulator = optimizers(problem, rate)

    def each(params, views: Images, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """l_i in training mode, float32 [B]; 0 for padding."""
        (outputs,), _ = problem.network.train(model.with_parts(**params), (views,), mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, jnp.where(mask, labels, 0))
        return jnp.where(mask, losses, 0.0)

    def labelled_loss(params) -> jax.Array:
        views, known = labelled
        return jnp.sum(each(params, views, known.labels, known.mask)) / jnp.maximum(jnp.sum(known.mask), 1)

    views, batch = unlabelled

    def taught_losses(params) -> jax.Array:
        return each(params, views, jnp.argmax(p, axis=-1), batch.mask)

    def shares_of(regulator) -> jax.Array:
        """m_i / sum_j m_j, float32 [B]."""
        weights = weights_of(regulator, p) if options.fine else jnp.ones(batch.mask.shape)
        weights = jnp.where(batch.mask, weights, 0.0)
        return weights / jnp.maximum(jnp.sum(weights), 1e-12)

    def slope(shares: jax.Array):
        return jax.grad(lambda params: jnp.sum(shares * taught_losses(params)))(pair.params)

    regulator, regulator_state = pair.regulator, pair.regulator_state
    if options.fine:
        ahead = jax.tree.map(lambda leaf, g: leaf - rate * g, pair.params, slope(shares_of(regulator)))
        # By the chain rule an image's share moves the loss ahead by -rate <its slope, the labelled slope there>.
        gains = -rate * slopes_along(taught_losses, pair.params, jax.grad(labelled_loss)(ahead))
        of_shares = jax.grad(lambda regulator: jnp.sum(gains * shares_of(regulator)))(regulator)
        updates, regulator_state = of_regulator.update(of_shares, regulator_state, regulator)
        regulator = optax.apply_updates(regulator, updates)
    updates, opt_state = of_local.update(slope(shares_of(regulator)), pair.opt_state, pair.params)
    params = optax.apply_updates(pair.params, updates)
    effect = labelled_loss(params) - labelled_loss(pair.params)
    if options.effect == "before_less_after":
        effect = -effect
    return jax.lax.stop_gradient((Pair(params, opt_state, regulator, regulator_state), effect))


def slopes_along(function: Callable[[Any], jax.Array], params: Any, direction: Any) -> jax.Array:
    """<gradient of f_i, direction> for each of a function's values f_i, float32 [B].

    By a central difference over a length of 0.01 (as DARTS, Liu et al., ICLR 2019): no second derivative, which layers
    with a gradient of their own do not have.
    """
    length = 0.01 / jnp.maximum(norm(direction), 1e-12)
    ends = [jax.tree.map(lambda leaf, d, h=h: leaf + h * d, params, direction) for h in (length, -length)]
    return (function(ends[0]) - function(ends[1])) / (2 * length)


def fresh_regulator(key: jax.Array, num_classes: int, hidden: int) -> dict[str, jax.Array]:
    """F-reg: C -> `hidden` -> 1, with PyTorch's initial values of linear layers."""
    keys = jax.random.split(key, 4)
    shapes = {"w1": (num_classes, hidden), "b1": (hidden,), "w2": (hidden,), "b2": ()}
    bounds = {"w1": num_classes, "b1": num_classes, "w2": hidden, "b2": hidden}
    return {
        name: jax.random.uniform(own, shape, minval=-1.0, maxval=1.0) / jnp.sqrt(bounds[name])
        for own, (name, shape) in zip(keys, shapes.items())
    }


def weights_of(regulator: dict[str, jax.Array], p: jax.Array) -> jax.Array:
    """sigmoid(w2 relu(w1 p + b1) + b2), float32 [B], of probabilities float32 [B, C]."""
    hidden = jax.nn.relu(jnp.matmul(p, regulator["w1"], precision="highest") + regulator["b1"])
    return jax.nn.sigmoid(jnp.matmul(hidden, regulator["w2"], precision="highest") + regulator["b2"])


ENTRY = Entry(
    feddure,
    title="FedDure",
    paper="https://arxiv.org/abs/2307.05358",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
    tiny={"feddure.threshold": 0.2, "feddure.tuning_steps": 1, "feddure.steps": 2, "feddure.fine_hidden": 4},
)
