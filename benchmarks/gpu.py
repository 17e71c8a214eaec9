"""Measures a GPU; each figure is written at once, and the same command measures what --out lacks.

    python benchmarks/gpu.py --npz=cifar10.npz    # with real CIFAR-10: x_train, y_train, ...; random images without it
    python benchmarks/gpu.py --parts=steps,torch --backbones=wrn28_2 --dtypes=bfloat16 --lanes=10,1 --forms=grouped

Parts, the most useful first:

  rounds  whole rounds of FedAnchor and of SemiFL on CIFAR-10 (100 clients, LDA 0.1, 10 a round, 5 epochs in batches of
          10), in both dtypes
  torch   the same local step in PyTorch, one client after the other: eager as in research code, with channels last,
          with bfloat16, and with torch.compile, compared with ours; see benchmarks/peer.py. A step is SemiFL's and
          FedAnchor's: a fix pass and a mix pass on batches of 10
  steps   our local step alone, for every form of the lanes' convolutions and several numbers of lanes

Milliseconds a step are per client: the time of all lanes divided by their number.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import jax
import jax.numpy as jnp
from harness import describe, random_npz, seconds_of, write

from fedjax_ssl import base_config
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.data.kinds.images import Images
from fedjax_ssl.models import build_model
from fedjax_ssl.models.network import Network
from fedjax_ssl.models.passes import LANE_FORMS, use_lane_form
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.programs import compile_dispatch

STEP, ROUND = "ms a step", "s a round"
STEPS = 20  # of the timed loop of the part `steps`


def rounds(options):
    """(name, function that measures it) of each figure."""
    kinds = itertools.product(options.backbones, options.dtypes, ("fedanchor", "semifl"))
    for backbone, dtype, method in kinds:
        yield f"{method}, {backbone}, {dtype}", functools.partial(time_rounds, method, backbone, dtype, options)


def time_rounds(method: str, backbone: str, dtype: str, options) -> dict:
    """Seconds of a round of the paper's experiment on the given or on random images."""
    config = base_config()
    images = options.npz or random_npz(pathlib.Path(options.out).with_suffix("") / "random.npz")
    config.data.source, config.data.path, config.data.flip = "npz", images, True
    arguments = f"{method},strong,natural_images,mix" if method == "fedanchor" else method
    config = apply_arguments(config, f"{arguments},{backbone},server_labels=250,alpha=0.1")
    config.model.dtype, config.rounds_per_dispatch, config.data.examples_per_client = dtype, 5, options.images
    config.confidence.threshold = 0.0  # after so few rounds a model has no confident label, and would train on nothing
    experiment = build_experiment(config)
    with use_machine(config, experiment.data) as machine:
        started = time.perf_counter()
        dispatch = compile_dispatch(machine, experiment)
        compiling = time.perf_counter() - started
        arguments = experiment.data, experiment.hidden_labels
        state = dispatch(experiment.init(experiment.data), *arguments, jnp.int32(2)).state
        seconds, steps = [], []
        for _ in range(options.repeats):
            started = time.perf_counter()
            result = jax.block_until_ready(dispatch(state, *arguments, jnp.int32(5)))
            seconds.append((time.perf_counter() - started) / 5)
            state = result.state
            steps.append(float(jax.device_get(result.results.metrics["local_steps"]).sum()) / 5)
        lanes = machine.lanes(config.clients_per_round)
    second = statistics.median(seconds)
    found = {STEP: 1e3 * second / statistics.mean(steps), ROUND: second, "lanes": lanes, "compile s": compiling}
    return {**found, "local steps": statistics.mean(steps)}


def torch_steps(options):
    """The peer's forms, and ours for comparison."""
    import torch

    forms = {
        "eager": {"channels_last": False},
        "eager, channels last": {},
        "eager, channels last, bfloat16": {"torch_dtype": torch.bfloat16},
        "compiled, channels last": {"compiled": True},
        "compiled, channels last, bfloat16": {"compiled": True, "torch_dtype": torch.bfloat16},
    }
    for backbone in options.backbones:
        for dtype in options.dtypes:
            what = f"ours, {backbone}, {dtype}"
            yield what, functools.partial(time_peer, backbone, options, "ours", dtype=dtype)
        for name, form in forms.items():
            yield f"PyTorch, {backbone}, {name}", functools.partial(time_peer, backbone, options, "torch", **form)


def time_peer(backbone: str, options, side: str, **form) -> dict:
    """Times a cohort's round of one side: ten clients, 100 images each unless --images says otherwise."""
    import peer

    words = argparse.Namespace(clients=10, images=options.images or 100, epochs=1, batch_size=10, devices=1)
    with peer.both_sides(backbone, words, **form) as sides:
        seconds = seconds_of({side: sides.functions[side]}, options.repeats)[side]
        return {STEP: 1e3 * statistics.median(seconds) / sides.local_steps, "device": sides.device}


def steps(options):
    """Forms of the lanes' convolutions."""
    for dtype, lanes, form in itertools.product(options.dtypes, map(int, options.lanes), options.forms):
        what = f"{options.backbones[0]}, {dtype}, {lanes} lanes, {form}"
        yield what, functools.partial(time_lane_step, options.backbones[0], dtype, lanes, form, options.repeats)


def time_lane_step(name: str, dtype: str, lanes: int, form: str, repeats: int) -> dict:
    """Times a loop of local steps over all lanes."""
    config = base_config()
    config.model.name, config.model.dtype = name, dtype
    network = Network(build_model(config.model, 10), Images((32, 32, 3), (0.5,), (0.25,)), "running")
    images = jax.random.randint(jax.random.key(0), (10, 32, 32, 3), 0, 256).astype(jnp.float32)
    labels, mask = jnp.arange(10), jnp.ones(10, bool)

    def step(model):
        def loss_fn(params):
            outputs, updated = network.train(model._replace(params=params), (images, images), mask)
            return sum(cross_entropy(view.logits, labels, mask) for view in outputs), updated

        gradient, batch_stats = jax.grad(loss_fn, has_aux=True)(model.params)
        return Model(jax.tree.map(lambda p, g: p - 0.01 * g, model.params, gradient), batch_stats)

    with use_lane_form(form):
        model = jax.jit(jax.vmap(network.init))(jax.random.split(jax.random.key(1), lanes))
        loop = jax.jit(lambda model: jax.lax.fori_loop(0, STEPS, lambda _, m: jax.vmap(step)(m), model))
        lowered, started = loop.lower(model), time.perf_counter()
        run = lowered.compile()
    compiling = time.perf_counter() - started
    seconds = seconds_of({"step": functools.partial(run, model)}, repeats)["step"]
    return {STEP: 1e3 * min(seconds) / STEPS / lanes, "compile s": compiling}


PARTS = {"rounds": rounds, "torch": torch_steps, "steps": steps}


def main() -> None:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--npz", help="CIFAR-10; random images without it")
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--backbones", type=words, default=["wrn28_2", "resnet18"], help="'steps' takes the first")
    parser.add_argument("--dtypes", type=words, default=["bfloat16", "float32"], help="of ours")
    parser.add_argument("--lanes", type=words, default=["10", "1", "4", "30"], help="of 'steps'")
    parser.add_argument("--forms", type=words, default=list(LANE_FORMS), help="of 'steps'")
    parser.add_argument("--images", type=int, default=0, help="for each client; 0: all, or 100 in 'torch'")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    path = pathlib.Path(options.out)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for part in options.parts:
        for what, measured in PARTS[part](options):
            if (part, what) not in [(row["part"], row["what"]) for row in rows if "failed" not in row]:
                try:
                    row = {"part": part, "what": what, **measured()}
                except Exception as error:  # such as too little memory: measure the others all the same
                    row = {"part": part, "what": what, "failed": f"{type(error).__name__}: {error}"[:200]}
                rows = [*(old for old in rows if (old["part"], old["what"]) != (part, what)), row]
                write(options.out, describe(), rows)


if __name__ == "__main__":
    main()
