"""A client's training: the steps of C-reg, and of the local model and F-reg, which exist for one round."""

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client import At, Batches, Deck, Examples, Loss, Plan, threshold_of, train_views
from fedjax_ssl.client import local_training as training
from fedjax_ssl.client.steps import MakeOptimizer
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Phase, Previous, Problem
from fedjax_ssl.methods.feddure.pair import PAIR, Pair, fresh_regulator, local_losses, optimizers, risen, step_of_both
from fedjax_ssl.ops.losses import cross_entropy, mean_present
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import select, where, without

TAU = 0.6  # C-reg learns from its own label of an image if its probability reaches it
# lambda, the weight of C-reg's loss on its own labels, rises to 8 over 20 steps, as in the code; a round may end
# earlier.
WEIGHT, RISE = 8.0, 20


def local_training(problem: Problem) -> Phase:
    """Tuning steps of C-reg alone, then steps of all three models."""
    network, options, size = problem.network, problem.config.feddure, problem.config.client.batch_size
    num_steps = options.tuning_steps + options.steps

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        """Its work is F-reg before its first step."""
        examples = Examples.of(data, cohort)
        keys = jax.vmap(lambda key: jax.random.split(key, 3))(examples.keys)
        deck = Deck.shuffled(examples, examples.unlabelled, keys[:, 0], num_steps)
        labelled = Deck.shuffled(examples, examples.labelled, keys[:, 1], num_steps)
        regulator = jax.vmap(lambda key: fresh_regulator(key, problem.num_classes))(keys[:, 2])
        steps = jnp.where(jnp.any(examples.present, axis=1), num_steps, 0)
        return Plan({"unlabelled": deck, "labelled": labelled}, steps, regulator)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        """C-reg's loss. Computing it also takes the step of the local model and of F-reg."""
        labelled_key, weak_key, strong_key = jax.random.split(at.key, 3)
        known, mask = batch.labelled, batch.unlabelled.mask
        labelled, images = problem.weak(labelled_key, known.inputs), batch.unlabelled.inputs
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)

        groups = [([labelled], known.mask), ([weak, strong], mask)]
        (of_labelled, of_weak, of_strong), after = train_views(network, model, groups, together=True)
        labelled_loss = cross_entropy(of_labelled.logits, known.labels, known.mask)
        p = jax.lax.stop_gradient(jax.nn.softmax(of_weak.logits))
        confident = jnp.max(p, axis=-1) >= threshold_of(problem, TAU)
        loss_on_own_labels = mean_present(confident * optax.softmax_cross_entropy(of_strong.logits, p), mask)

        losses = local_losses(problem, model, (labelled, known), (weak, batch.unlabelled), p)
        pair, effect = step_of_both(problem, at, losses, p, mask)
        y_tilde = jnp.argmax(jax.lax.stop_gradient(of_strong.logits), axis=-1)
        effect_loss = effect * cross_entropy(of_strong.logits, y_tilde, mask)

        step = at.step - options.tuning_steps  # counted from the first one of all three
        lambda_ = WEIGHT * jnp.minimum(1.0, (step + 1) / RISE)
        further = lambda_ * loss_on_own_labels + (effect_loss if options.coarse else 0.0)
        all_three = step >= 0
        value = labelled_loss + jnp.where(all_three, further, 0.0)
        metrics = {"labelled_loss": labelled_loss, "unlabelled_loss": jnp.where(all_three, loss_on_own_labels, 0.0)}
        metrics["learning_effect"] = jnp.where(all_three, effect, 0.0)
        counts = jnp.any(known.mask) | (all_three & jnp.any(mask))
        remember = {PAIR: where(all_three, pair, at.own[PAIR])}
        return Loss(value, after.batch_stats, metrics, counts, remember)

    sizes = {"unlabelled": options.unlabelled_batch, "labelled": size}
    return with_pair(problem, training(problem, plan, loss, sizes, optimizer=rising(problem)))


def with_pair(problem: Problem, phase: Phase) -> Phase:
    """The phase with a fresh local model and a fresh F-reg, which are discarded at its end."""

    def start(received: Broadcast, data: FederatedData, work: Plan, own):
        params = select(received.model.params, CLASSIFIER)
        of_local, of_regulator = optimizers(problem, received.learning_rate)
        pair = Pair(params, of_local.init(params), work.work, of_regulator.init(work.work))
        carry = phase.start(received, data, work, {**own, PAIR: pair})
        of_client, rise = carry.learner.opt_state
        rise = jax.tree.map(jnp.zeros_like, rise)  # counts the steps of this round, even if the optimizer is persistent
        return carry._replace(learner=carry.learner._replace(opt_state=(of_client, rise)))

    def finish(received: Broadcast, work: Plan, carry, num_steps):
        finished = phase.finish(received, work, carry, num_steps)
        return finished._replace(own=without(finished.own, PAIR))

    return phase._replace(start=start, finish=finish)


def rising(problem: Problem) -> MakeOptimizer:
    """Makes C-reg's optimizer from the clients': its learning rate rises over the first steps."""
    rise = risen(problem.config.feddure.warm_up_steps)
    return lambda rate: optax.chain(problem.optimizer(rate), optax.scale_by_schedule(rise))
