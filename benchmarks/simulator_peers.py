"""The peers of `simulators.py`: each trains `rounds` rounds in an environment of its own, without this library.

A peer takes (work, rounds, folder) and returns (weights by layer, when each round was over); (None, None) if another
process has them. `work` is what `simulators.prepare` wrote.
"""

import functools
import json
import os
import pathlib
import time

import numpy as np

EVERY = 10  # a test in each tenth round
RATE = 0.1
CORES = len(os.sched_getaffinity(0))
TORCH_LAYERS = {0: "conv0", 2: "conv1", 6: "dense", 8: "classifier"}


def scaled(images):
    """Images as the peers hold them: float32, 0 to 1. Ours keeps bytes and does this in its step."""
    return images.astype(np.float32) / 255


def torch_network(work):
    """The network with the work's weights, channels last."""
    import torch
    from torch import nn

    network = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    values = {}
    for place, layer in TORCH_LAYERS.items():
        kernel = work[f"{layer}.kernel"]
        if layer == "dense":  # PyTorch flattens channels first
            kernel = kernel.reshape(14, 14, 64, 128).transpose(2, 0, 1, 3).reshape(-1, 128)
        values[f"{place}.weight"] = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        values[f"{place}.bias"] = work[f"{layer}.bias"]
    network.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})
    return network.to(memory_format=torch.channels_last)


def from_torch(state):
    arrays = {}
    for place, layer in TORCH_LAYERS.items():
        kernel = state[f"{place}.weight"].detach().numpy()
        kernel = kernel.transpose(2, 3, 1, 0) if kernel.ndim == 4 else kernel.T
        if layer == "dense":
            kernel = kernel.reshape(64, 14, 14, 128).transpose(1, 2, 0, 3).reshape(-1, 128)
        arrays |= {f"{layer}.kernel": kernel, f"{layer}.bias": state[f"{place}.bias"].detach().numpy()}
    return arrays


def torch_data(work):
    """Each client's images and labels, and the test's; images [N, C, H, W], channels last in memory."""
    import torch

    def tensors(images, labels):
        images = torch.from_numpy(scaled(images)).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        return images, torch.from_numpy(labels).long()

    images, labels = tensors(work["x_train"], work["y_train"])
    return [(images[rows], labels[rows]) for rows in work["rows"]], tensors(work["x_test"], work["y_test"])


def torch_epoch(network, images, labels, batch):
    """One epoch of SGD over a client's images in a random order."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for chosen in torch.randperm(len(images)).split(batch):
        optimizer.zero_grad()
        F.cross_entropy(network(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def torch_accuracy(network, images, labels):
    import torch

    with torch.no_grad():
        parts = zip(images.split(1000), labels.split(1000))
        return sum(int((network(x).argmax(1) == y).sum()) for x, y in parts) / len(labels)


def cohorts(work, rounds):
    """The clients of each round, the same in all processes of a side."""
    rng = np.random.default_rng(0)
    return [rng.choice(len(work["rows"]), int(work["cohort"]), replace=False) for _ in range(rounds)]


def loop(work, rounds, folder):
    import torch.multiprocessing as mp

    mp.spawn(loop_process, (str(folder), rounds), nprocs=CORES)
    return None, None  # the first process has written them


def loop_process(rank, folder, rounds):
    import torch
    import torch.distributed as dist

    folder = pathlib.Path(folder)
    work = np.load(folder / "work.npz")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=CORES)
    (network, local), (clients, test), ends = (torch_network(work), torch_network(work)), torch_data(work), []
    for number, cohort in enumerate(cohorts(work, rounds), 1):
        received = network.state_dict()
        total = {name: torch.zeros_like(value) for name, value in received.items()}
        for client in cohort[rank::CORES]:
            local.load_state_dict(received)
            torch_epoch(local, *clients[client], int(work["batch"]))
            for name, value in local.state_dict().items():
                total[name] += value / len(cohort)
        for value in total.values():
            dist.all_reduce(value)
        network.load_state_dict(total)
        if number % EVERY == 0 or number == rounds:
            part = [values[rank::CORES] for values in test]
            accuracy = torch.tensor(torch_accuracy(network, *part) / CORES)
            dist.all_reduce(accuracy)
        ends.append(time.monotonic())
    if rank == 0:
        save(folder, from_torch(network.state_dict()), ends)


def fedjax(work, rounds, folder):
    import fedjax
    import jax
    import jax.numpy as jnp
    from fedjax.core.models import Model

    def scores(params, batch, key=None):
        x, conv = batch["x"], jax.lax.conv_general_dilated
        for layer in ("conv0", "conv1"):
            x = conv(x, params[f"{layer}.kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + params[f"{layer}.bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(len(x), -1)
        x = jax.nn.relu(x @ params["dense.kernel"] + params["dense.bias"])
        return x @ params["classifier.kernel"] + params["classifier.bias"]

    loss = lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)  # noqa: E731
    model = Model(None, scores, scores, loss, {"accuracy": fedjax.metrics.Accuracy()})
    images = scaled(work["x_train"])
    clients = [
        fedjax.ClientDataset({"x": images[rows], "y": work["y_train"][rows].astype(np.int32)}) for rows in work["rows"]
    ]
    test = fedjax.ClientDataset({"x": scaled(work["x_test"]), "y": work["y_test"].astype(np.int32)})
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=int(work["batch"])),
    )
    state, ends = algorithm.init({name: jnp.asarray(work[name]) for name in weight_names(work)}), []
    for number, cohort in enumerate(cohorts(work, rounds), 1):
        keys = jax.random.split(jax.random.PRNGKey(number), len(cohort))
        state, _ = algorithm.apply(state, [(client, clients[client], key) for client, key in zip(cohort, keys)])
        if number % EVERY == 0 or number == rounds:
            fedjax.evaluate_model(model, state.params, test.padded_batch(batch_size=1000))
        jax.block_until_ready(state.params)
        ends.append(time.monotonic())
    return {name: np.asarray(value) for name, value in state.params.items()}, ends


def pfl(work, rounds, folder):
    import types

    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional as F

    torch.set_num_threads(1)
    network, (clients, test), ends = torch_network(work), torch_data(work), []

    def metrics(self, images, labels, eval=True):
        with torch.no_grad():
            return {"accuracy": Weighted(int((self(images).argmax(1) == labels).sum()), len(labels))}

    class Ends(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            ends.append(time.monotonic())
            return False, Metrics()

    network.loss = types.MethodType(lambda self, x, y, eval=False: F.cross_entropy(self(x), y), network)
    network.metrics = types.MethodType(metrics, network)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    backend = SimulatedBackend(
        FederatedDataset.from_slices(clients, get_user_sampler("minimize_reuse", range(len(clients)))),
        None,
        postprocessors=[WeightByUser()],
    )
    evaluation = NNEvalHyperParams(local_batch_size=1000)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, EVERY, int(work["cohort"]), None),
        backend,
        model,
        NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=int(work["batch"])),
        evaluation,
        callbacks=[CentralEvaluationCallback(Dataset(test), evaluation, EVERY), Ends()],
    )
    if int(os.environ.get("RANK", 0)):
        return None, None
    return from_torch(network.state_dict()), ends


@functools.cache
def flower_client(path):
    """A network, each client's data and the batch size, which a worker of Ray keeps from message to message."""
    import torch

    torch.set_num_threads(1)
    work = dict(np.load(path))
    return torch_network(work), torch_data(work)[0], int(work["batch"])


def flower(work, rounds, folder):
    import flwr
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    client, server, ends, trained = ClientApp(), ServerApp(), [], []
    network, path = torch_network(work), folder / "work.npz"

    @client.train()
    def train(message, context):
        network, clients, batch = flower_client(path)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        torch_epoch(network, *clients[int(context.node_config["partition-id"])], batch)
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    @server.main()
    def run(grid, context):
        torch.set_num_threads(CORES)  # for the tests, while no client trains
        test = torch_data({**work, "rows": work["rows"][:0]})[1]

        def evaluate(number, arrays):
            if number and (number % EVERY == 0 or number == rounds):
                network.load_state_dict(arrays.to_torch_state_dict())
                torch_accuracy(network, *test)
            if number:
                ends.append(time.monotonic())

        cohort, number = int(work["cohort"]), len(work["rows"])
        strategy = FedAvg(cohort / number, 0.0, min_train_nodes=cohort, min_available_nodes=number)
        result = strategy.start(grid, ArrayRecord(network.state_dict()), rounds, evaluate_fn=evaluate)
        trained.append(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CORES}}
    flwr.simulation.run_simulation(server, client, len(work["rows"]), backend_config=resources)
    return from_torch(trained[0]), ends


def fluke(work, rounds, folder):
    import torch
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.utils import FederationObserver

    torch.set_num_threads(CORES)  # it trains in one process
    clients, test = torch_data(work)
    ends, environment = [], FlukeENV()
    environment.set_device("cpu")
    environment.set_evaluator(ClassificationEval(eval_every=EVERY, n_classes=10))
    environment.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)

    class Splitter:
        def assign(self, number, batch_size):
            loaders = [FastDataLoader(*data, num_labels=10, batch_size=batch_size, shuffle=True) for data in clients]
            tests = FastDataLoader(*test, num_labels=10, batch_size=1000)
            return (loaders, [None] * number), tests

    class Ends(FederationObserver):
        def end_round(self, round):
            ends.append(time.monotonic())

    settings = {
        "client": {
            "batch_size": int(work["batch"]), "local_epochs": 1, "loss": "CrossEntropyLoss", "persistency": False,
            "optimizer": {"name": "SGD", "lr": RATE}, "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        },
        "server": {"weighted": False}, "model": torch_network(work),
    }  # fmt: skip
    algorithm = FedAVG(len(clients), Splitter(), DDict(settings))
    algorithm.set_callbacks([Ends()])
    algorithm.run(rounds, int(work["cohort"]) / len(clients))
    return from_torch(algorithm.server.model.state_dict()), ends


def weight_names(work):
    return [name for name in work if name.endswith((".kernel", ".bias"))]


def save(folder, weights, ends):
    np.savez(folder / "weights.npz", **weights)
    (folder / "ends.json").write_text(json.dumps(ends))
