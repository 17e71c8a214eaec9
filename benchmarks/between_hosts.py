"""Lists what travels between devices in one round, read from the compiled program; nothing is trained.

    python benchmarks/between_hosts.py                                            # FedAnchor, MNIST, the small CNN
    python benchmarks/between_hosts.py --devices=8 --config=configs/fedanchor_cifar10.py --config.client.epochs=1

A program for N processor cores is divided like a program for N hosts with one device each: the same operations carry
the same bytes between hosts. Each operation is listed with its result on a device, times its number of runs in a round
if it is in a loop of known length ('each' if the length is unknown before the round). 'sent' is what a device sends, as
in a ring: of n devices each sends 2 (n - 1) / n of an all-reduce's result, (n - 1) / n of an all-gather's result, and
as much as it holds for other operations.
"""

import argparse
import collections
import re
from typing import NamedTuple

import jax

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", default="configs/fedanchor_mnist.py")
parser.add_argument("--devices", type=int, default=2)

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
NAME = r"%?([\w.-]+)"


class Collective(NamedTuple):
    """An operation of a program in which devices exchange something.

    Attributes:
        kind: of `KINDS`.
        size: bytes of its result on a device.
        times: how often it runs in one run of the program; 0 if this depends on the data.
        shapes: of the result, as text.
        stage: the scopes in which it was traced.
    """

    kind: str
    size: int
    times: int
    shapes: str
    stage: str

    def sent(self, devices: int) -> float:
        """Bytes that a device sends each time."""
        share = {"all-reduce": 2 * (devices - 1) / devices, "all-gather": (devices - 1) / devices}
        return self.size * share.get(self.kind, 1.0)


def collectives(program: str) -> list[Collective]:
    """The operations in a compiled program's text in which devices exchange something."""
    computations, entry = {}, ""
    for block in re.split(r"\n(?=\S)", program):
        head = re.match(rf"(ENTRY )?{NAME} \(", block)
        if head:
            computations[head[2]] = block
            entry = head[2] if head[1] else entry
    found = []

    def visit(name: str, times: int) -> None:
        for line in computations[name].splitlines()[1:]:
            if " while(" in line:
                length = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                inside = times * int(length[1]) if length else 0
                visit(re.search(rf"body={NAME}", line)[1], inside)
                continue
            operation = re.search(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
            if operation:
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", operation[1])
                size = sum(BYTES[kind] * _product(numbers) for kind, numbers in shapes)
                stage = re.search(r'op_name="([^"]*)"', line)
                text = " ".join(f"{kind}[{numbers}]" for kind, numbers in shapes)
                found.append(Collective(operation[2], size, times, text, _stage(stage[1] if stage else "")))
            elif " fusion(" not in line:  # conditionals and calls; a fusion exchanges nothing
                for part in re.findall(
                    r"(?:calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|\S+)", line
                ):
                    for called in re.findall(NAME, part):
                        if called in computations:
                            visit(called, times)

    visit(entry, 1)
    return found


def _product(numbers: str) -> int:
    product = 1
    for number in filter(None, numbers.split(",")):
        product *= int(number)
    return product


def _stage(path: str) -> str:
    """The stage of a round by the scopes in which an operation was traced; of several, the most frequent."""
    scopes = re.findall(r"(label|train|aggregate|server|statistics|evaluate)/", path)
    return collections.Counter(scopes).most_common(1)[0][0] if scopes else "-"


def main() -> None:
    own, overrides = parser.parse_known_args()
    jax.config.update("jax_num_cpu_devices", own.devices)
    from fedjax_ssl.config import parse_config
    from fedjax_ssl.engine.round import make_round
    from fedjax_ssl.engine.tracing import num_jobs
    from fedjax_ssl.learning.trees import tree_bytes
    from fedjax_ssl.run.experiment import build_experiment
    from fedjax_ssl.run.machine import use_machine

    config = parse_config(own.config, overrides)
    config.devices = own.devices
    experiment = build_experiment(config)
    arguments = experiment.state_shape, experiment.data, experiment.hidden_labels
    with use_machine(config) as machine:
        jobs = num_jobs(experiment.problem, experiment.method, experiment.state_shape, experiment.data)
        round_fn = make_round(experiment.problem, experiment.method, machine.lanes(jobs))
        program = machine.jit(round_fn).lower(*arguments).compile().as_text()
    groups = collections.defaultdict(list)
    for each in collectives(program):
        groups[each.stage, each.kind, each.times].append(each)
    model = experiment.state_shape.model
    print(f"{own.config}: {config.method}, {config.model.name}, {own.devices} devices")
    print(f"model {tree_bytes(model):,} bytes; data on every device {tree_bytes(experiment.data):,} bytes\n")
    print(f"{'stage':14} {'operation':18} {'number':>6} {'times':>6} {'bytes':>12} {'sent':>12}  largest")
    total = 0.0
    for (stage, kind, times), each in sorted(groups.items()):
        size, sent = sum(one.size for one in each), sum(one.sent(own.devices) for one in each)
        total += sent * times
        largest = max(each, key=lambda one: one.size).shapes
        often = str(times) if times else "each"
        size, sent = size * max(times, 1), sent * max(times, 1)
        print(f"{stage:14} {kind:18} {len(each):6} {often:>6} {size:12,} {sent:12,.0f}  {largest[:60]}")
    print(f"\na device sends {total:,.0f} bytes in a round, but for what is sent each time")


if __name__ == "__main__":
    main()
