"""Compares a round of FedAvg with the simulators that a user could take instead; prints `ratio WORK PEER X`.

    python benchmarks/simulators.py --work=pfl --repeats=3 --out=simulators.json

Sides: this library's `train`; a plain PyTorch loop in as many processes as cores; pfl-research 0.6.0 (torchrun, as many
processes); Flower 1.42 (Ray, one core for each client); FedJAX 0.0.17 with JAX 0.5.3, the newest that it runs on; fluke
0.8.1. A peer gets an environment of its own, made below --environments when it is first needed.

`pfl` is pfl-research's CIFAR-10 benchmark, 1,000 clients of 50 images, 50 a round, batches of 10, SGD at 0.1, its
CNN (without dropout, whose random numbers differ between libraries), tested on 10,000 images in every tenth round.
`large_clients` has the same images in 100 clients of 500, 10 a round.

Before anything is timed, all sides train two rounds of 4 clients, each of whose images are one batch, from equal
weights; the weights must then agree. The sides run in turn; a ratio is the median over the repeats of our seconds of a
round over theirs. Memory is the largest sum of the proportional set sizes of a side's processes.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

TORCH = "torch==2.13.0"
PEERS = {
    "loop": (TORCH,),
    "pfl": (TORCH, "pfl[pytorch]==0.6.0"),
    "flower": (TORCH, "flwr[simulation]==1.42.0"),
    "fedjax": ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3"),
    "fluke": ("fluke-fl==0.8.1",),
}
EVERY = 10  # a test in each tenth round
RATE = 0.1
WORKS = {
    "pfl": {"clients": 1000, "images": 50, "cohort": 50, "batch": 10, "tests": 10_000},
    "large_clients": {"clients": 100, "images": 500, "cohort": 10, "batch": 10, "tests": 10_000},
    "check": {"clients": 4, "images": 50, "cohort": 4, "batch": 50, "tests": 100},
}
CORES = len(os.sched_getaffinity(0))


# --- The sides: each trains `rounds` rounds and returns (weights, when each round was over). --------------------------


def scaled(images):
    """Images as the peers hold them: float32, 0 to 1. Ours keeps bytes and does this in its step."""
    return images.astype(np.float32) / 255


def ours(work, rounds, folder):
    from fedjax_ssl import train
    from fedjax_ssl.run.observe.listeners import WriteRecords

    ends, write = [], WriteRecords.take

    def take(self, turn):
        ends.extend([time.monotonic()] * (turn.done - len(ends)))  # a dispatch ends several rounds at once
        write(self, turn)

    WriteRecords.take = take
    config = our_config(work)
    config.num_rounds = rounds
    with tempfile.TemporaryDirectory() as runs:
        state = train(config, pathlib.Path(runs) / "run")
    return to_arrays(state.model.params), ends


def our_config(work):
    """FedAvg on all labels, without augmentation, as a user would set it."""
    from fedjax_ssl import base_config, use_every_core
    from fedjax_ssl.config import apply_arguments

    use_every_core()
    config = apply_arguments(base_config(), "supervised,all_labels")
    config.num_clients, config.clients_per_round, config.eval_every = len(work["rows"]), int(work["cohort"]), EVERY
    config.data.update({"source": "npz", "path": str(work["npz"]), "normalisation": "none"})
    config.data.update({"labels": "clients", "partition": "iid"})
    config.model.update({"name": f"{__file__}:OurNetwork", "normalisation": "none"})
    config.client.update({"epochs": 1, "batch_size": int(work["batch"]), "learning_rate": RATE, "momentum": 0.0})
    config.client.update({"weight_decay": 0.0, "clip_norm": 0.0})
    config.augment.update({"flip": "never", "padding": 0, "flavour": "none"})
    config.schedule, config.log.report = "constant", False
    return config


def __getattr__(name):
    """`OurNetwork`, which a user's file would define; the peers' environments have no Flax."""
    if name != "OurNetwork":
        raise AttributeError(name)
    import flax.linen as nn

    class OurNetwork(nn.Module):
        @nn.compact
        def __call__(self, images):
            x = nn.relu(nn.Conv(32, (3, 3), padding="VALID", name="conv0")(images))
            x = nn.relu(nn.Conv(64, (3, 3), padding="VALID", name="conv1")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.relu(nn.Dense(128, name="dense")(x.reshape(len(x), -1)))

    return OurNetwork


def to_arrays(params):
    layers = {**params["backbone"], "classifier": params["classifier"]}
    return {f"{layer}.{leaf}": np.asarray(value) for layer, leaves in layers.items() for leaf, value in leaves.items()}


def torch_network(work):
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
    return network


TORCH_LAYERS = {0: "conv0", 2: "conv1", 6: "dense", 8: "classifier"}


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
    network, (clients, test), ends = torch_network(work).to(memory_format=torch.channels_last), torch_data(work), []
    local = torch_network(work).to(memory_format=torch.channels_last)
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
    network, (clients, test), ends = torch_network(work).to(memory_format=torch.channels_last), torch_data(work), []

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
    """What a worker needs: a network, each client's data, the batch size."""
    import torch

    torch.set_num_threads(1)
    work = dict(np.load(path))
    return torch_network(work).to(memory_format=torch.channels_last), torch_data(work)[0], int(work["batch"])


def flower(work, rounds, folder):
    import flwr
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    client, server, ends, trained = ClientApp(), ServerApp(), [], []
    network, path = torch_network(work).to(memory_format=torch.channels_last), folder / "work.npz"

    @client.train()
    def train(message, context):
        import simulators  # by its name: Ray's workers then keep its cache from message to message

        network, clients, batch = simulators.flower_client(path)
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
        "server": {"weighted": False}, "model": torch_network(work).to(memory_format=torch.channels_last),
    }  # fmt: skip
    algorithm = FedAVG(len(clients), Splitter(), DDict(settings))
    algorithm.set_callbacks([Ends()])
    algorithm.run(rounds, int(work["cohort"]) / len(clients))
    return from_torch(algorithm.server.model.state_dict()), ends


def weight_names(work):
    return [name for name in work if name.endswith((".kernel", ".bias"))]


# --- The benchmark. ---------------------------------------------------------------------------------------------------


def save(folder, weights, ends):
    np.savez(folder / "weights.npz", **weights)
    (folder / "ends.json").write_text(json.dumps(ends))


def prepare(name, folder):
    """Writes a work into a folder: random images, the rows of each client, and our initial weights."""
    size, rng = WORKS[name], np.random.default_rng(0)
    number = size["clients"] * size["images"]
    arrays = {"x_train": rng.integers(0, 256, (number, 32, 32, 3), np.uint8), "y_train": np.arange(number) % 10}
    arrays |= {"x_test": rng.integers(0, 256, (size["tests"], 32, 32, 3), np.uint8)}
    arrays |= {"y_test": np.arange(size["tests"]) % 10}
    np.savez(folder / "images.npz", **arrays)
    work = {**arrays, "npz": folder / "images.npz", "cohort": size["cohort"], "batch": size["batch"]}
    work["rows"] = np.empty((size["clients"], 0))
    from fedjax_ssl.run.experiment import build_experiment

    experiment = build_experiment(our_config(work))
    work["rows"] = np.asarray(experiment.data.client_index)
    weights = to_arrays(experiment.init(experiment.data, None).model.params)
    np.savez(folder / "work.npz", **weights, **{key: np.asarray(value) for key, value in work.items() if key != "npz"})


def python_of(side, environments):
    """The interpreter of a side; makes the peer's environment if there is none."""
    if side == "ours":
        return sys.executable
    folder = environments / side
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS[side]], check=True)
        (folder / "made").touch()
    return python


def run_side(side, rounds, folder, environments):
    """Trains one side in processes of its own; returns (weights, seconds of a round, MB)."""
    for name in ("weights.npz", "ends.json", "rendezvous"):
        (folder / name).unlink(missing_ok=True)
    command = [python_of(side, environments)]
    if side == "pfl":
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={CORES}"]
    command += [__file__, f"--side={side}", f"--rounds={rounds}", f"--folder={folder}"]
    with open(folder / f"{side}.log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": ""}
        if side == "ours":
            environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(5)  # reading the sizes of large processes costs a tenth of a second
    if process.returncode:
        sys.exit(f"{side} ended with status {process.returncode}; see {folder / f'{side}.log'}")
    ends = json.loads((folder / "ends.json").read_text())
    return dict(np.load(folder / "weights.npz")), ends, peak


def seconds_of_a_round(ends):
    """Mean over the rounds after the tenth; programs are compiled before."""
    return (ends[-1] - ends[EVERY - 1]) / (len(ends) - EVERY)


def memory_of(process):
    """MB of a process and its children: their proportional set sizes."""
    folder, total = pathlib.Path(f"/proc/{process}"), 0.0
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        total = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except (OSError, StopIteration):  # it has ended meanwhile
        return total
    return total + sum(map(memory_of, children))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="pfl", choices=[name for name in WORKS if name != "check"])
    parser.add_argument("--sides", default=",".join(("ours", *PEERS)))
    parser.add_argument("--rounds", type=int, default=30, help=f"{EVERY} are not timed; a multiple of it, above it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "simulators"))
    parser.add_argument("--out", default="simulators.json")
    parser.add_argument("--side", help="trains this side alone, inside its environment")
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.side:
        work = dict(np.load(options.folder / "work.npz"))
        work["npz"] = options.folder / "images.npz"
        weights, ends = globals()[options.side](work, options.rounds, options.folder)
        if weights is not None:
            save(options.folder, weights, ends)
        return
    compare(options)


def compare(options):
    from harness import describe, write

    sides, times, memory = options.sides.split(","), {}, {}
    with tempfile.TemporaryDirectory() as check, tempfile.TemporaryDirectory() as folder:
        check, folder = pathlib.Path(check), pathlib.Path(folder)
        prepare("check", check)
        weights = {side: run_side(side, 2, check, options.environments)[0] for side in sides}
        apart = {side: max(float(np.abs(own[name] - weights[sides[0]][name]).max()) for name in own)
                 for side, own in weights.items()}  # fmt: skip
        print(f"largest difference of a weight from {sides[0]}'s after two rounds: {apart}", flush=True)
        assert max(apart.values()) < 1e-4, "the sides do not do the same work"
        prepare(options.work, folder)
        for _ in range(options.repeats):
            for side in sides:
                _, ends, peak = run_side(side, options.rounds, folder, options.environments)
                times.setdefault(side, []).append(seconds_of_a_round(ends))
                memory[side] = max(peak, memory.get(side, 0.0))
                print(f"{side} {times[side][-1]:.3f} s a round, {peak:.0f} MB", flush=True)
    rows = []
    for side in sides:
        ratio = statistics.median(o / t for o, t in zip(times[sides[0]], times[side]))
        print(f"ratio {options.work} {side} {ratio:.3f}", flush=True)
        row = {"side": side, "s a round": statistics.median(times[side]), "ours over it": ratio}
        rows.append(row | {"MB": memory[side], "weights apart": apart[side]})
    write(options.out, describe(), rows)


if __name__ == "__main__":
    main()
