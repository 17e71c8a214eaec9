"""Seconds of a round on features encoded beforehand, and with the encoder in each step.

    python benchmarks/frozen_encoder.py
    python benchmarks/frozen_encoder.py --side=224 --rounds=3

ViT-S/16 with random weights, on random images resized to SIDE pixels: FixMatch, 4 clients of 32 images a round, one
epoch in batches of 10. The encoder in the loop has adapters of rank 4 in its last block, whose gradients need only this
block. On features a linear head is trained. Seconds are from `timings.jsonl`: the median without the first round.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # this library, from any working directory


def random_weights(path, encoder, side):
    """Writes random weights."""
    import jax
    import numpy as np

    from fedjax_ssl.encoders import save_weights

    random, leaves = np.random.default_rng(0), jax.tree_util.tree_leaves_with_path(encoder.shapes(side))
    arrays = {"/".join(key.key for key in place): 0.02 * random.normal(size=leaf.shape) for place, leaf in leaves}
    save_weights(path, encoder, arrays)


def random_images(path):
    """Writes 320 training and 40 test images, of 10 classes and 32 x 32 pixels."""
    import numpy as np

    random = np.random.default_rng(0)
    parts = {"train": 320, "test": 40}
    arrays = {f"x_{part}": random.integers(0, 256, (size, 32, 32, 3), np.uint8) for part, size in parts.items()}
    np.savez(path, **arrays, **{f"y_{part}": np.arange(size) % 10 for part, size in parts.items()})


def seconds_of(config, folder):
    """(median seconds of a round, seconds before the first) of a run."""
    from fedjax_ssl import train

    started = time.monotonic()
    train(config, folder)
    whole = time.monotonic() - started
    lines = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    rounds = [line["seconds"] for line in lines if "seconds" in line]
    return statistics.median(rounds[1:]), whole - sum(rounds)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)

    from fedjax_ssl import base_config
    from fedjax_ssl.encoders import ENCODERS

    config = base_config()
    config.update_from_flattened_dict(
        {
            "method": "fixmatch", "num_rounds": options.rounds, "num_clients": 8, "clients_per_round": 4,
            "rounds_per_dispatch": 1, "data.source": "npz", "data.server_labels": 20, "data.alpha": 1000.0,
            "data.examples_per_client": 32, "client.epochs": 1, "server.pretrain_epochs": 0, "server.epochs": 1,
            "model.name": "linear", "model.normalisation": "none", 
            "encoder.name": "vit_s16", "encoder.side": options.side, "encoder.weak_views": 2,
            "encoder.strong_views": 2, "log.report": False, "log.tensorboard": False,
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["XDG_CACHE_HOME"] = name  # so that features are encoded here, and XLA's cache is empty
        config.encoder.weights = str(folder / "random.safetensors")
        config.data.path = str(folder / "images.npz")
        random_images(folder / "images.npz")
        random_weights(folder / "random.safetensors", ENCODERS["vit_s16"], options.side)
        cached, before = seconds_of(config, folder / "features")
        config.encoder.adapters.rank, config.encoder.adapters.blocks = 4, 1
        looped, _ = seconds_of(config, folder / "adapters")
    print(f"images of {options.side} pixels: a round on features {cached:.4f} s, behind {before:.0f} s of encoding and "
          f"compiling; with the encoder in the loop {looped:.3f} s, {looped / cached:.0f} times as long")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
