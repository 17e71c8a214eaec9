"""Measures whether a process's memory stays constant while it trains run after run, as in a sweep.

    python benchmarks/memory.py --runs=8 --out=memory.json

Each run is FedAnchor on the digits for two rounds. The anchor head's dimension differs, so each run is compiled; the
compilation cache is an empty folder. Prints the process's resident memory after each run, in MB, and `memory growth X`,
the last value divided by the second. With --keep_freed the library does not give memory back.
"""

import argparse
import pathlib
import tempfile
from unittest import mock

import jax
from harness import describe, write

from fedjax_ssl import base_config, train
from fedjax_ssl.run import memory


def resident_mb() -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--keep_freed", action="store_true")
    parser.add_argument("--out", default="memory.json")
    options = parser.parse_args()
    if options.keep_freed:
        mock.patch.object(memory, "_malloc_trim", lambda: None).start()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
        for number in range(options.runs):
            config = base_config()
            config.data.source = "digits"
            config.data.server_labels = 40
            config.data.examples_per_client = 33
            config.num_clients, config.clients_per_round, config.num_rounds = 8, 4, 2
            config.model.name, config.model.anchor_dim = "cnn", 64 + number
            config.augment.padding = 1
            config.client.epochs = 1
            config.log.report = config.log.tensorboard = False
            train(config, f"{folder}/{number}")
            memory.give_back_memory()
            rows.append({"run": number + 1, "resident, MB": resident_mb()})
            print(f"run {number + 1}: {rows[-1]['resident, MB']:.0f} MB", flush=True)
    print(f"memory growth {rows[-1]['resident, MB'] / rows[1]['resident, MB']:.3f}")
    write(options.out, describe(), rows)


if __name__ == "__main__":
    main()
