"""Checks that the place of a federation's arrays (`config.residence`) changes no result: tiny runs of every method, bit
by bit.

    python benchmarks/residences.py residences.json
    python benchmarks/residences.py residences.json --only='fixmatch*'

Each case is trained twice for six rounds on the digits: wholly on the device, and moved between places during training.
Methods with clients' memory move from the device to the disk, to the host and back to the device; others from the host
to the device. The metrics of all rounds and the whole last state, including the clients' memory, must be equal. On the
disk nothing is kept in memory between rounds.

XLA does not optimise here, as in `unchanged.py`; XLA_FLAGS, read later, may change this. An existing file is completed.
"""

import argparse
import fnmatch
import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from benchmarks.unchanged import config_of, digest, tiny_of  # noqa: E402  # it sets XLA's flags
from fedjax_ssl import UserError, train  # noqa: E402
from fedjax_ssl.methods import METHODS  # noqa: E402
from fedjax_ssl.run import client_memory  # noqa: E402

REMEMBERING = (("device", 1), ("disk", 3), ("host", 5), ("device", 6))  # places, and the rounds that end there
OTHERS = (("host", 3), ("device", 6))
# Options that give any method's clients a memory.
OPTIONS = {
    "thresholds of a run": {"confidence.kind": "flexmatch", "confidence.memory": "run"},
    "lasting optimisers": {"client.persistent": True},
    "compression": {"compression.kind": "top_k"},
    "late": {"availability.late": 0.5, "availability.late_weight": 0.5},
    "own classifiers": {"personal_parts": ("classifier",)},
}
OF_METHODS = {
    "fedpdm": {"fedpdm.adjustment": 0.0},  # grows with round / num_rounds; the moved run raises num_rounds
    "fedtrinet": {"fedtrinet.reference": "test"},  # the default reads all images at once
}


def cases():
    """Name -> (method, fields): each method with its first setting, and the options."""
    # Statistics of all clients are refused if only a round's clients are on the device.
    always = {"model.normalisation": "running"}
    of_methods = {
        name: (name, {"data.labels": entry.settings[0], **always, **entry.tiny, **OF_METHODS.get(name, {})})
        for name, entry in METHODS.items()
    }
    own = tiny_of("fixmatch")
    return of_methods | {
        f"fixmatch, {name}": ("fixmatch", {**own, **always, **fields}) for name, fields in OPTIONS.items()
    }


def train_in(places, method, fields, folder):
    """Trains a run in one place after the other; returns its last state and metrics."""
    for place, num_rounds in places:
        config = config_of(method, fields)
        config.num_rounds, config.checkpoint_every = num_rounds, 10
        config.residence.data, config.residence.clients = "device" if place == "device" else "host", place
        state = train(config, folder)
        jax.clear_caches()
    return state, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compared(method, fields):
    """The number of arrays that clients keep, and the differences in words; '' if none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            state, metrics = train_in(REMEMBERING[-1:], method, fields, pathlib.Path(folder) / "whole")
            kept = len(jax.tree.leaves(state.of_clients))
            moved = REMEMBERING if kept else OTHERS
            other, others = train_in(moved, method, fields, pathlib.Path(folder) / "moved")
        except UserError as error:
            return {"refused": str(error).replace(folder, "")}
    expected, found = digests(state), digests(other)
    odd = [f"round {line['round']}" for line, old in zip(others, metrics, strict=True) if line != old]
    odd += [path for path in {**expected, **found} if expected.get(path) != found.get(path)]
    return {"kept": kept, "differs": ", ".join(odd)}


def digests(state):
    """A digest of each array by its path."""
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def main():
    """Trains, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--only", default="*", help="names of cases, with * and ?")
    options = parser.parse_args()
    client_memory.CACHE_BYTES = 0
    results = json.loads(options.file.read_text()) if options.file.exists() else {}
    chosen = {name: case for name, case in cases().items() if fnmatch.fnmatchcase(name, options.only)}
    for name, case in chosen.items():
        if name not in results:
            results[name] = compared(*case)
            options.file.write_text(json.dumps(results, indent=1))
        print(name, results[name], flush=True)
    odd = [name for name in chosen if results[name].get("refused") or results[name]["differs"]]
    print(f"{len(chosen)} cases, {len(odd)} differ or are refused: {odd}")
    sys.exit(bool(odd))


if __name__ == "__main__":
    main()
