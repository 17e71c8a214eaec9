"""The scripts of examples/: plain loops with the numbers of the compiled round, and another kind of input."""

import ast
import importlib.util
import runpy

import chex
import numpy as np
import optax
import pytest

from tests.official.consistency import CLIENTS
from tests.official.harness import federation, make_problem, mirrored, rolled, train

pytestmark = pytest.mark.test_all

FIELDS = {
    "data.labels": "clients",
    "model.normalisation": "none",
    "confidence.threshold": 0.5,
    "consistency.unlabelled_ratio": 1,
    "client.clip_norm": 0.0,
    "client.nesterov": False,
    "client.weight_decay": 0.0,
}


@pytest.fixture
def example(root):
    spec = importlib.util.spec_from_file_location("fixmatch_example", root / "examples" / "fixmatch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_fixmatch_equals_the_compiled_rounds(example):
    run = train(make_problem("fixmatch", **FIELDS), federation(CLIENTS), rounds=2)
    config, images, labels = run.problem.config.client, np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    optimizer = optax.sgd(config.learning_rate, config.momentum)
    train_client = example.make_client(run.problem.network, optimizer, threshold=0.5)
    model = run.states[0].model

    def batches(job):
        """As many steps as the longer list has batches; the shorter one starts again."""
        few, many = job.batches(config.batch_size, job.work.decks["labelled"]), job.batches(config.batch_size)
        for index in range(job.num_steps):
            known, rows = few[index % len(few)], many[index % len(many)]
            yield mirrored(images[known]), labels[known], mirrored(images[rows]), rolled(images[rows])

    for of_round in run.rounds:
        (jobs,) = of_round.jobs
        trained = [train_client(model, batches(job)) for job in jobs]
        model = example.mean(trained, [len(CLIENTS[job.client]) for job in jobs])
    moved = np.abs(model.params["classifier"]["kernel"] - run.states[0].model.params["classifier"]["kernel"])
    assert np.max(moved) > 0.01
    chex.assert_trees_all_close(model.params, run.states[-1].model.params, atol=1e-5)


def test_vectors_train(root, capsys):
    runpy.run_path(str(root / "examples" / "vectors.py"))
    rounds = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rounds) == 5 and rounds[-1]["test_accuracy"] > 0.8  # guessing gives 0.25
    assert all(metrics["client_loss"] > 0 and 0 < metrics["confident_share"] <= 1 for metrics in rounds)
