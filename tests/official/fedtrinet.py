"""FedTriNet with three players in evaluation mode, in the order of its code (Michelingweo/FedTriNet@e70525b).

main_fed.py:555-816 (threshold, spliced network, vote, mean), models/Update.py:243-309, 366-406 (the three trainings).
By default the code drops one of the players (main_fed.py:659-663). It also tunes on the true labels of accepted images
(main_fed.py:544, 678; models/Update.py:121), normalises its players by single images, and ends an epoch with the
shorter of two lists. The library and this reference do none of this, see docs/methods/fedtrinet.md.
"""

import autograd.numpy as np

from tests.official.harness import agree, federation, make_problem, mirrored, train
from tests.official.reference import SGD, classify, cross_entropy, gradient, in_float64, softmax, weighted_mean

CLIENTS = [[0, 1, 2, 0, 2, 1, *[-1] * 8], [2, 0, 1, 1, *[-1] * 5], [1, 0, 2, 2, 0, *[-1] * 11]]
WARM_UP, EPOCHS, SIZE, ENOUGH, FACTOR, FINAL_WEIGHT = 1, 2, 6, 2, 3.3, 0.15
FIELDS = {
    "data.labels": "clients", "client.epochs": EPOCHS, "client.batch_size": SIZE, "client.momentum": 0.5,
    "client.nesterov": False, "client.weight_decay": 0.0, "client.clip_norm": 0.0, "fedtrinet.reference": "test",
    "fedtrinet.warm_up_rounds": WARM_UP, "fedtrinet.factor": FACTOR,
    "fedtrinet.full_rounds": 1, "fedtrinet.decay_rounds": 8, "fedtrinet.protected_from": 2,
    "fedtrinet.ramp_from": 1, "fedtrinet.ramp_epochs": 4,
}  # fmt: skip


def probabilities(model, x):
    return softmax(classify(model["params"], model["batch_stats"], x, train=False)[0])


def spliced(head, rest):
    """A model with the first layer and its normalisation from `head`, and all else from `rest`."""
    parts = {kind: {**rest[kind], "backbone": dict(rest[kind]["backbone"])} for kind in rest}
    for kind, part in parts.items():
        part["backbone"] |= {name: head[kind]["backbone"][name] for name in ("first", "first_norm")
                             if name in head[kind]["backbone"]}  # fmt: skip
    return parts


def trained(model, steps, config, frozen=False):
    """A model after steps of SGD; each step is (images, labels), perhaps with a second batch and its weight."""
    sgd, first = SGD.of(config), model
    for (x, y), *second in steps:

        def loss(params, statistics=model["batch_stats"], x=x, y=y, second=second):
            logits, statistics = classify(params, statistics, x, train=True)
            value = np.mean(cross_entropy(logits, y))
            for more, labels, weight in second:
                logits, statistics = classify(params, statistics, more, train=True)
                value = (value + weight * np.mean(cross_entropy(logits, labels))) / 2
            return value, statistics

        slope, statistics = gradient(loss, model["params"])
        model = {"params": sgd.step(model["params"], slope), "batch_stats": statistics}
        if frozen:
            for name in ("first", "first_norm"):
                model["params"]["backbone"][name] = first["params"]["backbone"][name]
    return model


def test_rounds_of_fedtrinet(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.methods.fedtrinet.client.ENOUGH", ENOUGH)
    problem = make_problem("fedtrinet", **FIELDS)
    run = train(problem, federation(CLIENTS), rounds=WARM_UP + 3, rests=range(1, WARM_UP + 1))
    images, labels, config = np.asarray(run.data.inputs), np.asarray(run.data.visible_labels), problem.config.client
    model = in_float64(run.states[0].model)
    local, known, counts, both = {}, np.array(labels), dict.fromkeys(range(3), 0), 0
    brought = []  # for each client and round: whether it brought a label, and all missing ones

    for number, of_round in enumerate(run.rounds):
        r, uploads = number - WARM_UP, []
        if r == 0:
            confidence = np.mean(np.max(probabilities(model, np.asarray(run.data.test_inputs)), axis=1))
        for first, second in zip(*of_round.jobs):
            client, start = first.client, model
            if r >= 0:
                threshold = FACTOR * confidence * (1 if r < 1 else 1 - r / 8 if r < 2 else 0.5)
                steps = [((mirrored(images[rows]), labels[rows]),) for rows in first.batches(SIZE)]
                start = trained(spliced(model, local[client]), steps, config, frozen=True)
                rows = np.asarray(run.data.client_index[client, : len(CLIENTS[client])])
                rows = rows[known[rows] < 0]
                if len(rows):
                    votes = sum(probabilities(player, images[rows]) for player in (local[client], start, model))
                    new = np.max(votes, axis=1) >= threshold
                    known[rows[new]] = np.argmax(votes, axis=1)[new]
                    counts[client] += new.sum() >= ENOUGH
                    brought.append((r, new.any(), new.all()))
            batches = second.batches(SIZE)
            more = second.batches(SIZE, second.work.decks["accepted"]) if counts[client] else []
            assert sorted(set(np.concatenate(batches))) == sorted(
                row for row in np.asarray(run.data.client_index[client, : len(CLIENTS[client])]) if known[row] >= 0
            )
            steps = []
            for index, rows in enumerate(batches):
                step = [(mirrored(images[rows]), known[rows])]
                if more:
                    s = index // (len(batches) // EPOCHS) + EPOCHS * r
                    weight = FINAL_WEIGHT * min(max((s - 1) / 4, 0), 1)
                    accepted = more[index % len(more)]
                    step.append((mirrored(images[accepted]), known[accepted], weight))
                    both += weight > 0
                steps.append(step)
            local[client] = trained(start, steps, config)
            uploads.append(local[client])
        model = weighted_mean(uploads, [1] * len(uploads))
    assert both and len({r for r, some, _ in brought if some}) > 1 and not all(every for *_, every in brought)
    agree("fedtrinet", "head frozen", run, model, code="Michelingweo/FedTriNet@e70525b: main_fed.py, models/Update.py")
