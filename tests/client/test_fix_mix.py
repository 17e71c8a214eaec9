"""Local training on a fix set and a mix set against NumPy: FedAnchor's equations 5 to 10, SemiFL's 5 to 8."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.client import fix_mix_phase
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, Labels, Report
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.batches import draw_with_replacement
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    loss_and_gradient,
    phases_of,
    pixels_of,
    prepare,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

SIZE = 10


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 2, [-1] * SIZE], at_server=[0, 1, 2])


@pytest.fixture(autouse=True)
def one_lambda(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))


def squared(key, images):
    """A weak view that is not linear: mixing before it is not mixing after it."""
    del key
    return images.astype(jnp.float32) ** 2 / 255


def train_by_hand(problem, data, received, work, weights, mix_weight):
    """Unpadded batches, a pass for each of the two sets; weights are those of the client's images [n]."""
    config, rows = problem.config.client, np.asarray(work.decks["fix"].rows)
    model, statistics = in_numpy(received.model.params), statistics_of(received.model)
    velocity, losses = at_rest(model), []
    one_hot, size = np.eye(CLASSES)[np.asarray(work.labels.report.labels)], int(work.decks["fix"].size)
    for number, fix in enumerate(batches(np.asarray(work.decks["fix"].order), size, config.batch_size)):
        epoch, place = divmod(number, -(-size // config.batch_size))
        first, mix = place * config.batch_size, np.asarray(work.decks["mix"].order)
        partner = mix[epoch if len(mix) > 1 else 0, first : first + len(fix)]
        x, x_mix = pixels_of(data, rows[fix]), pixels_of(data, rows[partner])
        share = weights[fix][:, None] / len(fix)
        passes = [(1 - x, share * one_hot[fix])]
        if mix_weight:
            passes.append(((0.3 * x + 0.7 * x_mix) ** 2, share * (0.3 * one_hot[fix] + 0.7 * one_hot[partner])))
        found = [loss_and_gradient(model, view, view.mean(axis=0), targets) for view, targets in passes]
        gradient = {name: sum(w * g[name] for w, (_, g) in zip((1, mix_weight), found)) for name in model}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, *(view for view, _ in passes))
        losses.append([loss for loss, _ in found])
    return model, statistics, np.mean(losses, axis=0)


def assert_as_by_hand(finished, by_hand, mix_weight):
    model, statistics, losses = by_hand
    assert_model(finished.upload.model, model, statistics)
    found = [finished.metrics[name] for name in ("fix_loss", "mix_loss")[: len(losses)]]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(
        finished.metrics["client_loss"], np.dot([1, mix_weight][: len(losses)], losses), rtol=1e-5
    )


LABELS = np.array([0, 2, 1, 1, 0, 2, 2, 1, 0, 1])
WEIGHTS = np.array([0.2, 1, 0, 0.7, 3, 0.4, 0, 1, 0, 0.5])  # 7 images, so that each epoch has a batch of one


def test_each_image_has_its_weight_in_both_losses(data):
    """tests/official has either order of view and mixture: FedAnchor's and SemiFL's."""
    problem = small_problem("semifl", weak=squared)

    def label(received, data, cohort, previous):
        report = Report(jnp.asarray(LABELS)[None], jnp.asarray(WEIGHTS > 0)[None])
        return Labels(report, weights=jnp.float32(WEIGHTS)[None])

    options = {"mixup_alpha": 0.75, "mix_weight": 0.6, "mix_order": "mix_then_augment"}
    method = types.SimpleNamespace(label=label, phases=(fix_mix_phase(problem, **options),))
    (phase,), received = phases_of(method), sent_down(problem)
    job, finished = train(phase, received, data, 1)
    # Who has no weight is not in the fix set, but may be in the mix set.
    assert job.work.decks["fix"].size == 7 and job.num_steps == 2 * 3
    for epoch in np.asarray(job.work.decks["fix"].order):
        assert set(epoch[:7]) == set(np.flatnonzero(WEIGHTS))
    assert set(np.asarray(job.work.decks["mix"].order).ravel()) & set(np.flatnonzero(WEIGHTS == 0))
    assert_as_by_hand(finished, train_by_hand(problem, data, received, job.work, WEIGHTS, 0.6), 0.6)


def test_who_qualifies_with_nothing_has_no_step(data):
    problem = small_problem("semifl", **{"confidence.threshold": 1.0})
    job = prepare(phases_of(METHODS["semifl"].factory(problem))[0], sent_down(problem), data, 1)
    assert job.num_steps == 0 and not np.any(job.work.labels.report.qualified)


def test_the_mix_set_is_drawn_with_replacement_from_the_whole_client(data):
    """Eq. 6: qualified or not, and an example more than once."""
    drawn = np.asarray(draw_with_replacement(jax.random.key(0), jnp.int32(7), 7000))
    counts = np.bincount(drawn, minlength=7)
    assert len(counts) == 7  # nothing beyond the client's size
    # 1000 expected each, standard deviation 29.
    assert np.all(np.abs(counts - 1000) < 5 * 29)
    problem = small_problem("semifl", **{"confidence.threshold": 0.6})
    phase, received = phases_of(METHODS["semifl"].factory(problem))[0], sent_down(problem)
    once = np.asarray(prepare(phase, received, data, 0).work.decks["mix"].order)
    assert once.shape == (1, SIZE) and set(once[0]) == {0, 1}  # a client of two images
    problem.config.semifl.partners = "epoch"
    anew = np.asarray(
        prepare(phases_of(METHODS["semifl"].factory(problem))[0], received, data, 1).work.decks["mix"].order
    )
    assert anew.shape == (2, SIZE) and np.any(anew[0] != anew[1]) and 0 <= anew.min() <= anew.max() < SIZE


@pytest.mark.test_all
def test_lambdas_are_drawn_before_the_steps_but_on_a_cpu(data, monkeypatch):
    """All that a cohort may need at once, with the keys of the steps: the same."""
    of_key = lambda key, alpha: jax.random.uniform(key) ** alpha  # noqa: E731
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", of_key)
    problem = small_problem("semifl", weak=squared, **{"confidence.threshold": 0.55})
    phase, received = phases_of(METHODS["semifl"].factory(problem))[0], sent_down(problem)
    cohort, results = Cohort(jnp.arange(2), {}, jax.random.key(5)), []
    for platform in ("cpu", "gpu"):
        with use_platform(platform):
            jobs = jax.eval_shape(lambda: phase.prepare(received, data, cohort._replace(step_key=cohort.key), None))
            results.append(jax.jit(lambda: train_cohort((phase,), received, data, cohort, 2).upload)())
        assert (jobs.work.work is None) == (platform == "cpu")
    assert jobs.work.work.shape == (2, 2 * 4)  # two epochs of four batches
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *results)
