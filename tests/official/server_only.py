"""The server alone: cross-entropy on its labelled images, before the first round and in each round."""

import autograd.numpy as np

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, cross_entropy, in_float64, trained

ANCHORS = [0, 1, 2, 2, 1, 0, 1]
CLIENTS = [[-1] * 9, [-1] * 4, [-1] * 7]


def test_rounds_of_the_server_alone():
    fields = {"server.epochs": 2, "server.pretrain_epochs": 3, "server.pretrain_learning_rate": 0.02,
              "server.learning_rate": 0.02, "server.persistent": False, "server.augmentation": "weak"}  # fmt: skip
    problem = make_problem("server_only", **fields)
    run = train(problem, federation(CLIENTS, ANCHORS), rounds=2)
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config.server
    model = in_float64(run.fresh)

    def loss(params, statistics, batch):
        logits, statistics = classify(params, statistics, mirrored(images[batch]), train=True)
        return np.mean(cross_entropy(logits, labels[batch])), statistics

    for number, noted in enumerate([run.init, *run.rounds]):
        sgd = SGD.of(config, config.learning_rate if number else config.pretrain_learning_rate)
        rows = [rows for _, rows in noted.seen]
        rows[1::2] = [batch[: len(ANCHORS) - config.batch_size] for batch in rows[1::2]]  # the second batch is short
        model = trained(model, sgd, rows, loss)
    agree("server_only", "pre-training and two rounds", run, model, code="no code: SGD as PyTorch's")
