"""Checks whether a code change changes results: tiny runs of every method, variant and option, compared bit by bit.

    python benchmarks/unchanged.py before.json              # with the old code; an hour of one core
    python benchmarks/unchanged.py after.json --against=before.json
    python benchmarks/unchanged.py after.json --against=before.json --only='fixmatch*'

Each run has two rounds on the digits. The file holds a hash of every array of its last state, and the metrics of each
round. An existing file is completed. Both files must be from one machine, because processors round differently.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import pathlib
import sys
import tempfile

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from fedjax_ssl import UserError, train  # noqa: E402
from fedjax_ssl.config import apply_arguments, flatten, ranges  # noqa: E402
from fedjax_ssl.methods import METHODS  # noqa: E402
from tests.helpers.runs import TINY_BACKBONE, make_fedanchor_config  # noqa: E402

# Keeps a run tiny, whatever a variant sets.
TINY = {
    "num_rounds": 2, "num_clients": 8, "clients_per_round": 4, "checkpoint_every": 10, "rounds_per_dispatch": 1,
    "model.name": TINY_BACKBONE, "model.projector_hidden": 8, "model.projector_dim": 4,
    "client.epochs": 1, "server.epochs": 1, "server.pretrain_epochs": 1, "client.batch_size": 10,
    "server.batch_size": 10, "augment.flavour": "none",  # RandAugment takes longer to compile than the rest
}  # fmt: skip
# The method for words of a section that belongs to no method; otherwise FixMatch.
TRIED_WITH = {
    "consistency": "fixmatch,lpl",
    "aggregation": "supervised,all_labels",
    "compression": "supervised,all_labels",
    "attack": "fixmatch,lpl",
    "views": "fedu",
    "probe": "fedu",
}
ATTACKED = {"attack.share": 0.3, "aggregation.byzantine_share": 0.3, "attack.from_class": 1}
POISONED = {"attack.kind": "poison", **ATTACKED, "attack.strength": 30.0}
PRIVATE = {"privacy.noise": 1.0, "privacy.reproducible": True, "aggregation.clip_norm": 1.0,
           "model.normalisation": "group"}  # fmt: skip
OTHERS = {
    "private": ("supervised,all_labels", PRIVATE),
    "private, fixed cohorts": ("supervised,all_labels", {**PRIVATE, "privacy.cohorts": "fixed"}),
    "late": ("fixmatch", {"availability.late": 0.5, "availability.late_weight": 0.5}),
    "absent": ("fixmatch", {"availability.never": 0.3}),
    "lanes": ("fixmatch", {"lanes": 2}),
    "two rounds in a dispatch": ("fixmatch", {"rounds_per_dispatch": 2}),
    "seeds": ("fixmatch", {"seeds": (0, 1)}),
    "validation": ("fixmatch", {"data.validation": 20}),
    "poison": ("fixmatch", POISONED),
    "geometry first": ("fixmatch", {"augment.flavour": "fl2"}),
    "measures": ("fixmatch", {"eval_measures": ("shots",)}),
}


def cases():
    """Name -> (arguments of a config file, fields): all settings, variants, words and switches."""
    found = dict(OTHERS)
    for method, entry in METHODS.items():
        for labels in entry.settings:
            found[f"{method}, labels {labels}"] = (method, {"data.labels": labels, **entry.tiny})
        for variant in entry.variants:
            found[f"{method},{variant}"] = (f"{method},{variant}", tiny_of(method))
    defaults = flatten(config_of("fedanchor", {}))
    for field, its_range in ranges().items():
        section = field.partition(".")[0]
        arguments = section if section in METHODS else TRIED_WITH.get(section, "fixmatch")
        values = its_range.choices or ((False, True) if its_range.kind is bool else ())
        for value in values:
            if value != defaults.get(field) and not field.startswith(("log.", "data.tfds")):
                needed = {**tiny_of(arguments.partition(",")[0]), **(ATTACKED if section == "attack" else {})}
                found[f"{field}={value}"] = (arguments, {**needed, field: value})
    return found


def tiny_of(method):
    """A method's own fields for a tiny run, without those that choose something."""
    return {field: value for field, value in METHODS[method].tiny.items() if not isinstance(value, str)}


def config_of(arguments, fields):
    """The configuration of a tiny run."""
    entry = METHODS[arguments.partition(",")[0]]
    config = make_fedanchor_config(**{"data.labels": fields.get("data.labels", entry.settings[0])})
    config = apply_arguments(config, arguments)
    config.update_from_flattened_dict({**TINY, **fields})
    if config.data.labels != "server" and "model.statistics" not in fields:
        config.model.statistics = "cohort"  # the server has no images
    return config


def result_of(arguments, fields):
    """Hashes of the last state's arrays and the metrics of all rounds, or why the run was refused."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        try:
            state = train(config_of(arguments, fields), workdir)
        except UserError as error:
            return {"refused": str(error).replace(folder, "")}
        hashes = sorted(digest(leaf) for leaf in jax.tree.leaves(state))
        metrics = {
            f"{path.relative_to(workdir)}, line {number}": json.loads(line)
            for path in sorted(workdir.rglob("metrics.jsonl"))
            for number, line in enumerate(path.read_text().splitlines())
        }
    return {"state": hashes, "metrics": metrics}


def digest(leaf):
    """A digest of an array's dtype, shape and bytes."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def difference(old, new):
    """The difference between two results in a few words; '' if none."""
    if "refused" in old or "refused" in new:
        return "" if old == new else f"{old.get('refused', 'trained')} | {new.get('refused', 'trained')}"
    apart = len(set(new["state"]) - set(old["state"]))
    words = [f"{apart} of {len(new['state'])} arrays"] if new["state"] != old["state"] else []
    for line in new["metrics"]:
        one, other = old["metrics"].get(line, {}), new["metrics"][line]
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        words += [f"{line}: {', '.join(sorted(names))}"] if names else []
    return "; ".join(words)


def main():
    """Trains, writes, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path, help="a file of the old code, to be compared with")
    parser.add_argument("--only", default="*", help="names of runs, with * and ?")
    options = parser.parse_args()
    results = json.loads(options.file.read_text()) if options.file.exists() else {}
    chosen = {name: case for name, case in cases().items() if fnmatch.fnmatchcase(name, options.only)}
    for number, (name, case) in enumerate(chosen.items(), start=1):
        if name not in results:
            print(f"{number} of {len(chosen)}: {name}", file=sys.stderr, flush=True)
            results[name] = result_of(*case)
            options.file.write_text(json.dumps(results, indent=1))
            jax.clear_caches()
    if options.against is None:
        return
    before = json.loads(options.against.read_text())
    compared = [name for name in chosen if name in before]
    differing = {name: text for name in compared if (text := difference(before[name], results[name]))}
    for name, text in differing.items():
        print(f"{name}: {text}")
    print(f"{len(compared)} runs compared, {len(differing)} differ; new: {sorted(set(chosen) - set(before))}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
