"""BYOL at a client as in FedU and FedEMA: the reference for both.

From EasyFL-AI/EasyFL@8a9554e: applications/fedssl/client.py (`FedSSLClient.train`, `_calculate_divergence`) and
model.py (`BYOLModel`). In its order: both views through the online encoder, through the predictor and through the
target, which is in training mode, too; a step; the target's moving average.

Running statistics start from the received ones. In the code, a client's own predictor brings its own statistics, and if
the first target is the online encoder itself, the encoder's statistics move twice as often. No training reads them.
"""

import autograd.numpy as np

from tests.official import convolutions
from tests.official.harness import agree, federation, make_problem, mirrored, rolled, train
from tests.official.reference import SGD, gradient, in_float64, projector, unit, weighted_mean

CODE = "EasyFL-AI/EasyFL@8a9554e: applications/fedssl/client.py, model.py, server.py"
RATE = 0.01
SIZES = (14, 6, 13)  # the second has only whole batches of 6; the others drop their last images in each epoch
ENCODER, ONLINE = ("backbone", "projector"), ("backbone", "projector", "predictor")


def problem_of(arguments, **fields):
    """FedU's or FedEMA's problem, with convolutions and plain momentum as in their code."""
    return make_problem(arguments, **{
        "model.name": convolutions.NAME, "model.projector_hidden": 32, "model.projector_dim": 8, "client.epochs": 1,
        "client.batch_size": 6, "client.nesterov": False, "client.clip_norm": 0.0, "client.learning_rate": RATE,
        **fields,
    })  # fmt: skip


def clients_data():
    """Clients without labels; only the probe uses the server's labelled images."""
    return federation([[-1] * size for size in SIZES], at_server=[0, 1, 2, 0])


def encode(params, statistics, images):
    """Projections of a batch by backbone and projector in training mode, and the statistics after it."""
    features, of_backbone = convolutions.backbone(params["backbone"], statistics["backbone"], images, True)
    z, of_projector = projector(params["projector"], statistics["projector"], features, True)
    return z, {**statistics, "backbone": of_backbone, "projector": of_projector}


def train_client(problem, job, online, target, decay, rate, alias=False):
    """Local epochs from an online model and a target's parameters.

    Args:
        problem: of the run.
        job: gives the batches.
        online: {'params', 'batch_stats'} of all parts.
        target: parameters of the encoder.
        decay: of the target.
        rate: the learning rate.
        alias: whether the target is the online encoder itself.

    Returns:
        The online model, and the target's parameters.
    """
    images, config = np.asarray(clients_data().inputs), problem.config.client
    params, statistics = online["params"], online["batch_stats"]
    sgd = SGD.of(config, rate)
    for rows in job.batches(config.batch_size):
        views = mirrored(images[rows]), rolled(images[rows])
        of_target = [unit(encode(params if alias else target, statistics, view)[0]) for view in views]

        def loss(params, statistics=statistics, views=views, of_target=of_target):
            projections = []
            for view in views:
                z, statistics = encode(params, statistics, view)
                projections.append(z)
            value = 0.0
            for z, other in zip(projections, reversed(of_target)):
                prediction, of_predictor = projector(params["predictor"], statistics["predictor"], z, True)
                statistics = {**statistics, "predictor": of_predictor}
                value = value + np.mean(2 - 2 * np.sum(unit(prediction) * other, axis=-1))
            return value, statistics

        slope, statistics = gradient(loss, params)
        params = sgd.step(params, {part: slope[part] for part in ONLINE})
        target = average(target, params, decay)
    target = {part: params[part] for part in ENCODER} if alias else target
    return {"params": params, "batch_stats": statistics}, target


def average(tree, other, share):
    """share * tree + (1 - share) * other, for the parts of `tree`."""
    if isinstance(tree, dict):
        return {name: average(leaf, other[name], share) for name, leaf in tree.items()}
    return share * tree + (1 - share) * other


def divergence(before, after):
    """The mean Euclidean distance of convolution kernels; the code selects them by name, which leaves out shortcuts."""
    one, other = (model["params"]["backbone"] for model in (before, after))
    return np.mean(
        [np.sqrt(np.sum((one[name]["kernel"] - other[name]["kernel"]) ** 2)) for name in ("first", "second")]
    )


def compare(method, what, problem, rounds, visit, statistics=True):
    """Runs the library and the reference and compares their models.

    Args:
        method, what: see `agree`.
        problem: of the run.
        rounds: number of rounds.
        visit: (number of the round, client, the global model, the job with its batches, the client's memory, a dict
            that it may change) -> the model that the client sends.
        statistics: whether they are compared, too.

    Returns:
        The clients' memories.
    """
    data = clients_data()
    run = train(problem, data, rounds)
    model, memories = in_float64(run.states[0].model), [{} for _ in SIZES]
    for number, of_round in enumerate(run.rounds):
        (jobs,) = of_round.jobs
        sent = [visit(number, job.client, model, job, memories[job.client]) for job in jobs]
        model = weighted_mean(sent, [SIZES[job.client] for job in jobs])
    ours = in_float64(run.states[-1].model)
    for each in (model, ours):
        del each["params"]["classifier"]  # the probe's
    kinds = ("params", "batch_stats") if statistics else ("params",)
    ours = type(run.states[-1].model)(**ours)
    agree(method, what, run, {kind: model[kind] for kind in kinds}, code=CODE, found=ours)
    return memories
