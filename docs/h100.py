"""What the papers' tables cost on one H100, computed from the measured step of Wide-ResNet-28-2 (docs/performance.md).

    python docs/h100.py fedanchor_table1.py    # hours and dollars of each data set

A step of another backbone takes longer by its operations for one image, and one of another batch by its size. Only the
clients' steps count: no tests, no server's steps, no warm-ups, and no method's further views of an image.
"""

import functools
import math
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.config import base_config
from fedjax_ssl.models import build_model
from fedjax_ssl.sweep import load_sweep
from fedjax_ssl.sweep.plan import plan

SWEEPS = pathlib.Path(__file__).parents[1] / "configs" / "sweeps"
MEASURED, MILLISECONDS, BATCH = "wrn28_2", 0.9, 10  # bfloat16, ten lanes, both views of a batch
DOLLARS = 3.0  # of an hour
ABOUT = f"""The last column is computed, not measured: the clients' steps of all runs of each data set, with
{MILLISECONDS} ms for [a step](../performance.md#gpus) of Wide-ResNet-28-2 and a batch of {BATCH}, in proportion to the
operations for other backbones and to the images for other batches; {DOLLARS:g} dollars an hour."""
PAPERS = ("_table", "_figure", "_ablation", "semianagg_")  # in the names of sweeps that are in a paper
SIZES = {  # training images of 32 pixels or fewer
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn_cropped": 73_257,
    "mnist": 60_000,
    "fashion_mnist": 60_000,
    "emnist/byclass": 697_932,
    "organamnist.npz": 34_561,
    "bloodmnist.npz": 11_959,
    "cinic10.npz": 90_000,
}


@functools.cache
def operations(backbone: str) -> float:
    """Floating-point operations of a forward pass of one image of 32x32x3."""
    section = base_config().model
    section.update({"name": backbone, "normalisation": "group"})
    module = build_model(section, 10, (), "images", {})
    image = jnp.zeros((1, 32, 32, 3))
    params = jax.eval_shape(module.init, jax.random.key(0), image)
    return jax.jit(module.apply).lower(params, image).cost_analysis()["flops"]


def client_steps(config: ConfigDict, images: int) -> int:
    """Steps of one client in one round, if there are so many training images."""
    if config.method == "fedlabel":
        return config.fedlabel.labelled_steps + config.fedlabel.unlabelled_steps
    if config.method == "server_only" or config.data.centralised:
        return 0
    each = config.data.examples_per_client or (images - config.data.server_labels) // config.num_clients
    if config.method == "supervised" and not config.data.reveal_labels:
        each = math.ceil(each * labelled_share(config, images))
    return config.client.epochs * math.ceil(each / config.client.batch_size)


def labelled_share(config: ConfigDict, images: int) -> float:
    """The share of the clients' images that have labels."""
    data = config.data
    if data.labels == "some_clients":
        return data.labelled_clients / config.num_clients
    if data.labels == "profile":
        return sum(data.label_profile) / config.num_clients
    return data.num_labelled / images if data.num_labelled else data.labelled_share


def hours(sweep: pathlib.Path, data: str) -> float | None:
    """Hours of one data set of a sweep; None for data of another size."""
    total = 0.0
    for cell in plan(load_sweep(f"{sweep}:{data}" if data else str(sweep)), pathlib.Path("runs")):
        config = cell.config
        images = SIZES.get(config.data.path if config.data.source == "npz" else config.data.source)
        if images is None or config.data.imbalance != 1:
            return None
        steps = config.num_rounds * config.clients_per_round * client_steps(config, images) * len(cell.seeds)
        of_backbone = operations(config.model.name) / operations(MEASURED)
        total += steps * MILLISECONDS * of_backbone * config.client.batch_size / BATCH / 3.6e6
    return total


def cell(sweep: pathlib.Path) -> str:
    """The table's cell; '' for sweeps of our own."""
    if not any(part in sweep.name for part in PAPERS):
        return ""
    found = {data: hours(sweep, data) for data in runpy.run_path(str(sweep)).get("DATASETS", ("",))}
    cost = {data: f"{math.ceil(time):,} h, {time * DOLLARS:,.0f} $" for data, time in found.items() if time is not None}
    return "; ".join(f"{data} {text}".strip() for data, text in cost.items())


if __name__ == "__main__":
    print(cell(SWEEPS / sys.argv[1]))
