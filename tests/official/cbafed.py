"""CBAFed: a first stage of the labelled client alone, then all clients; models are averaged with records of themselves.

minglllli/CBAFed@4f2eef4: train_main.py (both stages, thresholds, weights, the global record), local_supervised.py (the
labelled client's record) and local_PL.py (which labels count, the single image of a last batch). The first stage there
is one call with several epochs; here each of these epochs is a round.
"""

import autograd.numpy as np

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax, weighted_mean

CLIENTS = [[0, 1, 1, 0, 1, 0, 2, 1, 0], [-1] * 9, [-1] * 5]
CODE = "minglllli/CBAFed@4f2eef4: train_main.py, local_supervised.py, local_PL.py"
WARM_UP, EPOCHS, EVERY, BASE, CAP, RARE = 4, 4, 3, 0.34, 0.45, 0.09
RATES = (0.05, 0.04)


def drawn_back(model, record, weight):
    """(weight record + model) / (weight + 1), including statistics."""
    return weighted_mean([record, model], [weight, 1.0])


def test_rounds_of_cbafed(monkeypatch):
    """The first stage, whose last epoch ends with an average, then four rounds with all clients."""
    monkeypatch.setattr("fedjax_ssl.methods.cbafed.client.BASE", BASE)
    monkeypatch.setattr("fedjax_ssl.methods.cbafed.client.RARE", RARE)
    problem = make_problem("cbafed", **{
        "cbafed.warm_up_rounds": WARM_UP, "cbafed.labelled_epochs": EPOCHS, "cbafed.residual_every": EVERY,
        "cbafed.cap": CAP, "client.epochs": 1, "client.nesterov": False,
        "client.learning_rate": RATES[0], "client.unlabelled_learning_rate": RATES[1], "client.clip_norm": 5.0,
    })  # fmt: skip
    run = train(problem, federation(CLIENTS), WARM_UP + 4, rests=range(1, WARM_UP + 1))
    images, labels = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels)
    optimizers = [SGD.of(problem.config.client, RATES[client > 0]) for client in range(3)]
    model = in_float64(run.states[0].model)
    kinds = {"first": 0, "second": 0, "none": 0, "lone": 0}

    def epoch_of(model, sgd, batches, targets):
        params, statistics = model["params"], model["batch_stats"]
        for rows in batches:

            def loss(params, statistics=statistics, rows=rows):
                logits, statistics = classify(params, statistics, mirrored(images[rows]), train=True)
                return np.mean(cross_entropy(logits, targets[rows])), statistics

            slope, statistics = gradient(loss, params)
            params = sgd.step(params, slope)
        return {"params": params, "batch_stats": statistics}

    def labelled_epochs(model, job, number):
        batches, record = job.batches(4), None
        for epoch in range(number):
            model = epoch_of(model, optimizers[0], batches[3 * epoch : 3 * epoch + 3], labels)
            if epoch == 0:
                record = model
            elif epoch % EVERY == 0:
                model = record = drawn_back(model, record, 4.0)
        return model

    def pseudo_labels(model, rows, shares):
        """Labels of the rows that count."""
        thresholds, found = np.minimum(shares + BASE - np.std(shares, ddof=1), CAP), {}
        logits, _ = classify(model["params"], model["batch_stats"], mirrored(images[rows]), train=False)
        for row, p in zip(rows, softmax(logits)):
            second, first = np.argsort(p)[-2:]
            kind = "first" if p[first] > thresholds[first] else "second" if shares[second] < RARE else "none"
            kinds[kind] += 1
            if kind != "none":
                found[row] = first if kind == "first" else second
        return found

    given = np.bincount(CLIENTS[0], minlength=3)
    made = np.zeros(3)
    for number, of_round in enumerate(run.rounds):
        on_given, on_made = ({job.client: job for job in jobs} for jobs in of_round.jobs)
        if number < WARM_UP:  # the labelled client alone
            model = epoch_of(model, optimizers[0], on_given[0].batches(4)[:3], labels)
            if number == 0:
                record = model
            elif number % EVERY == 0:
                model = record = drawn_back(model, record, 4.0)
            if number == WARM_UP - 1:
                agree("cbafed", "first stage", run._replace(states=run.states[: WARM_UP + 1]), model, code=CODE)
            continue
        stage = number - WARM_UP
        record = model if stage == 0 else record
        shares = (given + made) / np.sum(given + made) * 3 / 10
        sent, weights, made = [labelled_epochs(model, on_given[0], EPOCHS)], [len(CLIENTS[0])], np.zeros(3)
        for client in (1, 2):
            found = pseudo_labels(model, np.asarray(run.data.client_index)[client, : len(CLIENTS[client])], shares)
            batches = on_made[client].batches(4)
            trained = np.concatenate(batches) if batches else np.zeros(0, int)
            lone = len(found) % 4 == 1
            kinds["lone"] += lone
            assert set(trained) <= set(found) and len(trained) == len(found) - lone, "other labels count"
            if not found:
                continue
            targets = np.full(len(images), -1)
            targets[list(found)] = list(found.values())
            sent.append(epoch_of(model, optimizers[client], batches, targets))
            weights.append(len(found))
            made = made + np.bincount(list(found.values()), minlength=3)
        model = weighted_mean(sent, weights)
        if stage > 0 and stage % EVERY == 0:
            model = record = drawn_back(model, record, 1.0)
    agree("cbafed", "both stages", run, model, code=CODE)
    assert all(kinds.values()), kinds
