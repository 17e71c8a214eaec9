"""Everything worth measuring on a GPU, in one command that may be stopped and resumed.

    python benchmarks/gpu.py --npz=cifar10.npz          # with real CIFAR-10: x_train, y_train, ...
    python benchmarks/gpu.py --minutes=2                # random images: the same times, no useful accuracy
    python benchmarks/gpu.py --parts=steps,torch --backbones=wrn28_2 --dtypes=bfloat16 --lanes=10,1 --forms=grouped

It needs no network and no configuration file. Each part has its own process and --minutes; its figures stay in --out.
The same command measures what is missing there, and finally prints one table. Programs are compiled side by side, which
takes most of the time: on an H100 with 16 cores about a minute for three steps. Parts, the most useful first:

  rounds  whole rounds of FedAnchor and of SemiFL on CIFAR-10 (100 clients, LDA 0.1, 10 a round, 5 epochs in batches of
          10), in both dtypes: seconds a round, and the share of this GPU's matrix-product and memory rates
  torch   the same local step in PyTorch, one client after the other: eager as in research code, with channels last,
          with bfloat16, and with torch.compile, compared with ours; see benchmarks/peer.py. A step is SemiFL's and
          FedAnchor's: a fix pass and a mix pass on batches of 10
  steps   our local step alone, for every form of the lanes' convolutions and several numbers of lanes

Milliseconds a step are per client: the time of all lanes divided by their number.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

TINY = {
    "backbones": "cnn",
    "lanes": "1,2",
    "num_clients": 4,
    "clients": 2,
    "images": 20,
    "epochs": 1,
    "warm_rounds": 1,
    "rounds": 1,
    "repeats": 1,
}
# The table's names of the times.
STEP, ROUND = "ms a step", "s a round"


def rounds(options):
    """Times rounds of whole programs."""
    for backbone, dtype, method in itertools.product(
        options.backbones.split(","), options.dtypes.split(","), ("fedanchor", "semifl")
    ):
        config = functools.partial(cifar10_config, method, backbone, dtype, options)
        yield f"{method}, {backbone}, {dtype}", functools.partial(time_rounds, config, 500, options)


def time_rounds(make_config, whole: int, options):
    """Compiles rounds; returns a function that measures seconds a round and the shares of the machine's rates.

    Args:
        make_config: of the experiment.
        whole: number of rounds of a run.
        options: of the command line.
    """
    import jax
    import jax.numpy as jnp

    from fedjax_ssl.run.experiment import build_experiment
    from fedjax_ssl.run.machine import use, use_machine
    from fedjax_ssl.run.observe.profiling import step_flops
    from fedjax_ssl.run.programs import compile_dispatch

    config = make_config()
    config.rounds_per_dispatch = max(options.rounds, options.warm_rounds)
    config.confidence.threshold = 0.0  # after so few rounds a model has no confident label, and would train on nothing
    experiment = build_experiment(config)
    with use_machine(config, experiment.data) as machine:
        started = time.perf_counter()
        dispatch = compile_dispatch(machine, experiment)
        compile_seconds = time.perf_counter() - started
        init = experiment.init.lower(experiment.data).compile()

    def measured() -> dict:
        with use(machine):
            state = init(experiment.data)
            flops = step_flops(experiment, state)
            arguments = experiment.data, experiment.hidden_labels
            state = jax.block_until_ready(dispatch(state, *arguments, jnp.int32(options.warm_rounds)).state)
            seconds, steps = [], []
            for _ in range(options.repeats):
                started = time.perf_counter()
                result = jax.block_until_ready(dispatch(state, *arguments, jnp.int32(options.rounds)))
                seconds.append((time.perf_counter() - started) / options.rounds)
                state = result.state
                local_steps = jax.device_get(result.results.metrics["local_steps"])
                steps.append(float(local_steps[: options.rounds].sum()) / options.rounds)
            lanes = machine.lanes(config.clients_per_round)
        dtype, second, step = config.model.dtype, statistics.median(seconds), statistics.mean(steps)
        # A step reads and writes parameters, momentum and gradient, in addition to activations.
        numbers = sum(leaf.size for leaf in jax.tree.leaves(state.model.params))
        return {
            STEP: 1e3 * second / step,
            ROUND: second,
            "more": {
                "lanes": lanes,
                "compile s": compile_seconds,
                f"{whole} rounds, min": whole * second / 60,
                "local steps a round": step,
                "share of matrix products": flops * step / second / matrix_product_rate(dtype),
                "share of memory rate": 5 * 4 * numbers * step / second / memory_rate(),
            },
        }

    return measured


def torch_steps(options):
    """The peer's forms, and ours for comparison."""
    import peer
    import torch

    forms = {
        "eager": {"channels_last": False},
        "eager, channels last": {},
        "eager, channels last, bfloat16": {"torch_dtype": torch.bfloat16},
        "compiled, channels last": {"compiled": True},
        "compiled, channels last, bfloat16": {"compiled": True, "torch_dtype": torch.bfloat16},
    }
    for backbone in options.backbones.split(","):
        time_one = functools.partial(time_peer, peer, backbone, options)
        for dtype in options.dtypes.split(","):
            yield f"ours, {backbone}, {dtype}", functools.partial(time_one, "ours", dtype=dtype)
        for name in reversed(forms):
            yield f"PyTorch, {backbone}, {name}", functools.partial(time_one, "torch", **forms[name])


def time_peer(peer, backbone: str, options, side: str, **form):
    """Times a cohort's round of one side. PyTorch compiles in the first call, as its compiler allows no threads."""
    import jax
    from harness import seconds_of

    images = options.images or 100
    words = argparse.Namespace(clients=options.clients, images=images, epochs=1, batch_size=10, devices=1)
    with peer.both_sides(backbone, words, **form) as sides:
        if side == "ours":
            jax.block_until_ready(sides.functions[side]())

    def measured() -> dict:
        seconds = seconds_of({side: sides.functions[side]}, options.repeats)[side]
        more = {"lanes": sides.lanes} if side == "ours" else {"device": sides.device}
        return {STEP: 1e3 * statistics.median(seconds) / sides.local_steps, "more": more}

    return measured


def steps(options):
    """Times forms of the lanes' convolutions."""
    from fedjax_ssl.models.passes import LANE_FORMS

    dtypes, lanes = options.dtypes.split(","), list(map(int, options.lanes.split(",")))
    forms = options.forms.split(",") if options.forms else LANE_FORMS
    for dtype, number, form in itertools.product(dtypes, lanes, forms):
        backbone = options.backbones.split(",")[0]
        what = f"{backbone}, {dtype}, {number} lanes, {form}"
        yield what, functools.partial(time_lane_step, backbone, dtype, number, form, options.repeats)


def time_lane_step(name: str, dtype: str, lanes: int, form: str, repeats: int, number: int = 20):
    """Times a loop of local steps over all lanes."""
    import jax
    import jax.numpy as jnp
    from harness import seconds_of

    from fedjax_ssl import base_config
    from fedjax_ssl.data.kinds.images import Images
    from fedjax_ssl.models import build_model
    from fedjax_ssl.models.network import Network
    from fedjax_ssl.models.passes import use_lane_form
    from fedjax_ssl.ops.losses import cross_entropy
    from fedjax_ssl.ops.sgd import Model

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
        over_lanes = jax.vmap(step)
        model = jax.jit(jax.vmap(network.init))(jax.random.split(jax.random.key(1), lanes))
        loop = jax.jit(lambda model: jax.lax.fori_loop(0, number, lambda _, m: over_lanes(m), model))
        lowered, started = loop.lower(model), time.perf_counter()
        run = lowered.compile()
        compile_seconds = time.perf_counter() - started

    def measured() -> dict:
        seconds = seconds_of({"step": functools.partial(run, model)}, repeats)["step"]
        return {STEP: 1e3 * min(seconds) / number / lanes, "more": {"compile s": compile_seconds}}

    return measured


def images_of(options) -> str:
    """The path of the given images, or of random ones beside the results."""
    from harness import random_npz

    return options.npz or random_npz(pathlib.Path(options.out).with_suffix("") / "random.npz")


def cifar10_config(method: str, backbone: str, dtype: str, options):
    """The paper's experiment on the given or on random images."""
    from fedjax_ssl import base_config
    from fedjax_ssl.config import apply_arguments

    config = base_config()
    config.data.source, config.data.path, config.data.flip = "npz", images_of(options), True
    arguments = f"{method},strong,natural_images,mix" if method == "fedanchor" else method
    config = apply_arguments(config, f"{arguments},{backbone},server_labels=250,alpha=0.1")
    config.model.dtype = dtype
    config.num_clients, config.clients_per_round = options.num_clients, options.clients
    config.data.examples_per_client, config.client.epochs = options.images, options.epochs
    return config


@functools.cache
def matrix_product_rate(dtype: str) -> float:
    """The highest rate of a square matrix product, in floating-point operations per second."""
    import jax
    import jax.numpy as jnp
    from harness import seconds_of

    side = 4096 if jax.default_backend() != "cpu" else 1024
    a = jnp.ones((side, side), dtype)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, 10, lambda _, x: (a @ x) / side, a))
    return 10 * 2 * side**3 / min(seconds_of({"product": lambda: product(a)}, 5)["product"])


@functools.cache
def memory_rate() -> float:
    """Bytes per second that a copy reads and writes."""
    import jax
    import jax.numpy as jnp
    from harness import seconds_of

    x = jnp.ones(2**26, jnp.float32)  # 256 MB
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: y * 1.0001, x))
    return 10 * 2 * x.nbytes / min(seconds_of({"copy": lambda: copy(x)}, 5)["copy"])


PARTS = {"rounds": rounds, "torch": torch_steps, "steps": steps}


# --- A process and a time limit for each part. ------------------------------------------------------------------------


def rows_of(path: pathlib.Path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(part: str, options) -> None:
    """Measures the part's figures that are not in the file, and writes each at once.

    Compiles `options.compilers` programs side by side, then measures them one after the other.
    """
    from harness import describe

    path = pathlib.Path(options.out)
    there = {(row["part"], row["what"]) for row in rows_of(path) if "failed" not in row["more"]}
    missing = [(what, function) for what, function in PARTS[part](options) if (part, what) not in there]
    for start in range(0, len(missing), options.compilers):
        some = missing[start : start + options.compilers]
        with concurrent.futures.ThreadPoolExecutor(len(some)) as threads:
            compiled = [(what, threads.submit(function)) for what, function in some]
        for what, measured in compiled:
            try:
                row = {"part": part, "what": what, **measured.result()()}
            except Exception as error:  # such as too little memory: measure the others all the same
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                row = {"part": part, "what": what, "more": {"failed": why}}
            print(text_of(row), flush=True)
            others = [old for old in rows_of(path) if (old["part"], old["what"]) != (part, what)]
            whole = json.dumps({"machine": describe(), "rows": [*others, row]}, indent=2) + "\n"
            path.with_suffix(".part").write_text(whole)
            path.with_suffix(".part").replace(path)


def cells_of(row: dict) -> list[str]:
    def text(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    figures = [text(row[name]) if name in row else "" for name in (STEP, ROUND)]
    more = ", ".join(f"{name} {text(value)}" for name, value in row["more"].items())
    return [row["part"], row["what"], *figures, more]


def text_of(row: dict) -> str:
    return "| " + " | ".join(cells_of(row)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10, help="of each part")
    parser.add_argument("--npz", default="", help="CIFAR-10 as an npz; random images without it")
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--tiny", action="store_true", help="every part as small as can be")
    parser.add_argument("--backbones", default="wrn28_2,resnet18")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of ours")
    parser.add_argument("--lanes", default="10,1,4,30", help="of the part 'steps'")
    parser.add_argument("--forms", default="", help="of the part 'steps'; all without it")
    parser.add_argument("--num_clients", type=int, default=100)
    parser.add_argument("--clients", type=int, default=10, help="of a round")
    parser.add_argument("--images", type=int, default=0, help="for each client; 0: all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warm_rounds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compilers", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="programs at once")
    parser.add_argument("--in_this_process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY)
    if options.in_this_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
        with contextlib.suppress(KeyboardInterrupt):  # at the end of its time
            measure(options.in_this_process, options)
        return 0
    failed = []
    for part in options.parts.split(","):
        print(f"== {part}, at most {options.minutes:g} minutes", flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], f"--in_this_process={part}"]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # PyTorch needs memory, too
        process = subprocess.Popen(command, env=environment)
        try:
            process.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # a run then saves its round
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(f"{part} is stopped; the same command goes on with it", flush=True)
        else:
            failed += [part] if process.returncode else []
    path = pathlib.Path(options.out)
    if path.exists():
        found = json.loads(path.read_text())
        print("\n" + ", ".join(f"{name} {value}" for name, value in found["machine"].items()))
        print(f"| part | what | {STEP} | {ROUND} | more |\n|---|---|---|---|---|")
        print("\n".join(text_of(row) for row in sorted(found["rows"], key=lambda row: list(PARTS).index(row["part"]))))
    for part in failed:
        print(f"error: the part {part} ended with an error", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
