"""Compares one client round with plain eager PyTorch as in research code; prints `ratio NAME X`, our time over theirs.

    pip install '.[bench]'
    python benchmarks/peer.py --out=peer.json            # both models
    python benchmarks/peer.py --models=cnn --repeats=9

Both sides train the same cohort: by default 10 clients of 100 images, one local epoch in batches of 10, every image
with its pseudo-label, a fix pass and a mix pass in each step, SGD with momentum, weight decay and clipping, running
batch statistics, then the mean of the models. Both augment by a random flip and crop in batched tensor code. (Research
code often runs RandAugment image by image on the host, which would flatter us.)
PyTorch trains one client after the other, channels last, on all cores or on its GPU. Ours trains like the command line,
on a CPU with a client on every core (--devices=1: one at a time on all cores). The runs alternate; a ratio is the
median over the repeats. Before, both models get the same weights and must agree.
"""

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from harness import describe, federation, seconds_of, write
from torch import nn
from torch.nn import functional as F

from fedjax_ssl import base_config, use_every_core
from fedjax_ssl.client import Examples, fix_mix_phase
from fedjax_ssl.data.kinds import Images
from fedjax_ssl.engine import Broadcast, Cohort, Labels, Problem, Report, trained_parts
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.models import build_model
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.augment import weak_augment
from fedjax_ssl.run.machine import find_machine, use
from fedjax_ssl.server.aggregation import weighted_mean

IMAGE_SHAPES = {"wrn28_2": (32, 32, 3), "resnet18": (32, 32, 3), "cnn": (28, 28, 1)}
PARTS = ("backbone", "classifier")
CLASSES = 10
PADDING = 4


# --- PyTorch as in research code. -------------------------------------------------------------------------------------


class InStages(nn.Module):
    """Blocks in stages, with our names. All but the first stage halve the image's sides."""

    def add_stages(self, make, channels, widths, blocks):
        self.names = []
        for stage, features in enumerate(widths):
            for block in range(blocks):
                self.names.append(f"stage{stage}_block{block}")
                self.add_module(self.names[-1], make(channels, features, 2 if stage > 0 and block == 0 else 1))
                channels = features

    def stages(self, x):
        return functools.reduce(lambda x, name: getattr(self, name)(x), self.names, x)


class TorchWideBlock(nn.Module):
    def __init__(self, channels, features, stride):
        super().__init__()
        self.norm0, self.norm1 = nn.BatchNorm2d(channels), nn.BatchNorm2d(features)
        self.conv0 = nn.Conv2d(channels, features, 3, stride, 1, bias=False)
        self.conv1 = nn.Conv2d(features, features, 3, 1, 1, bias=False)
        self.shortcut_conv = nn.Conv2d(channels, features, 1, stride, bias=False) if channels != features else None

    def forward(self, x):
        y = F.relu(self.norm0(x))
        shortcut = x if self.shortcut_conv is None else self.shortcut_conv(y)
        return shortcut + self.conv1(F.relu(self.norm1(self.conv0(y))))


class TorchWideResNet(InStages):
    """Wide-ResNet-28-2 with the part names of `fedjax_ssl.models.wide_resnet`."""

    def __init__(self):
        super().__init__()
        self.stem_conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.add_stages(TorchWideBlock, 16, (32, 64, 128), 4)
        self.final_norm = nn.BatchNorm2d(128)
        self.classifier = nn.Linear(128, CLASSES)

    def forward(self, x):
        x = self.stages(self.stem_conv(x))
        return self.classifier(F.relu(self.final_norm(x)).mean((2, 3)))


class TorchBasicBlock(nn.Module):
    def __init__(self, channels, features, stride):
        super().__init__()
        self.conv0 = nn.Conv2d(channels, features, 3, stride, 1, bias=False)
        self.conv1 = nn.Conv2d(features, features, 3, 1, 1, bias=False)
        self.norm0, self.norm1 = nn.BatchNorm2d(features), nn.BatchNorm2d(features)
        self.changes = channels != features
        if self.changes:
            self.shortcut_conv = nn.Conv2d(channels, features, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(features)

    def forward(self, x):
        y = self.norm1(self.conv1(F.relu(self.norm0(self.conv0(x)))))
        return F.relu(y + (self.shortcut_norm(self.shortcut_conv(x)) if self.changes else x))


class TorchResNet18(InStages):
    """ResNet-18 with the stem for small images and the names of `fedjax_ssl.models.resnet`."""

    def __init__(self):
        super().__init__()
        self.stem_conv = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(64)
        self.add_stages(TorchBasicBlock, 64, (64, 128, 256, 512), 2)
        self.classifier = nn.Linear(512, CLASSES)

    def forward(self, x):
        return self.classifier(self.stages(F.relu(self.stem_norm(self.stem_conv(x)))).mean((2, 3)))


class TorchSmallCNN(nn.Module):
    """The small CNN with the names of `fedjax_ssl.models.cnn`. Its hidden layer reads positions in our order."""

    def __init__(self):
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32)
        self.hidden, self.norm2 = nn.Linear(32 * 7 * 7, 128, bias=False), nn.BatchNorm1d(128)
        self.classifier = nn.Linear(128, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm0(self.conv0(x))), 2)
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.classifier(F.relu(self.norm2(self.hidden(x))))


TORCH_MODELS = {"wrn28_2": TorchWideResNet, "resnet18": TorchResNet18, "cnn": TorchSmallCNN}


def torch_weights(params, batch_stats):
    """Our parameters and statistics as a PyTorch state dict."""
    names = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    state = {}
    for tree in ({**params["backbone"], "classifier": params["classifier"]}, batch_stats["backbone"]):
        for path, leaf in jax.tree.leaves_with_path(tree):
            *module, name = (part.key for part in path)
            value = np.asarray(leaf)
            if name == "kernel":
                value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
            state[".".join([*module, names[name]])] = torch.from_numpy(value.copy())
    return state


def torch_flip_and_crop(images, flip):
    """A random flip and crop of a batch [B, C, H, W] in batched tensor operations."""
    batch, channels, height, width = images.shape
    if flip:
        mirrored = torch.rand(batch, 1, 1, 1, device=images.device) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
    padded = F.pad(images, (PADDING,) * 4, mode="reflect")
    offsets = torch.randint(0, 2 * PADDING + 1, (2, batch, 1), device=images.device)
    rows = (offsets[0] + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (offsets[1] + torch.arange(width, device=images.device))[:, None, None, :]
    which = torch.arange(batch, device=images.device)[:, None, None, None]
    return padded[which, torch.arange(channels, device=images.device)[:, None, None], rows, columns]


class TorchCohort:
    """A federated round as a loop over clients, each with a copy of the global model.

    Args:
        name, weights, images, labels, config, device: of the cohort.
        channels_last: the memory format of images and kernels.
        torch_dtype: of autocast; None: float32.
        compiled: whether torch.compile compiles forward and backward passes.
    """

    def __init__(
        self, name, weights, images, labels, config, device, channels_last=True, torch_dtype=None, compiled=False
    ):  # fmt: skip
        self.device, self.config, self.flip = device, config, images.shape[-1] == 3
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.weights = {key: value.to(device) for key, value in weights.items()}
        self.model = TORCH_MODELS[name]().to(device, memory_format=self.memory_format)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.autocast = functools.partial(torch.autocast, device.type, torch_dtype, enabled=torch_dtype is not None)
        self.images = torch.from_numpy(images).permute(0, 1, 4, 2, 3).to(device)  # uint8 [M, n, C, H, W]
        self.labels = torch.from_numpy(labels).long().to(device)

    def prepare(self, images):
        """Converts raw levels to the network's input as ours does: mean 0.5, deviation 0.25."""
        return ((images.float() / 255 - 0.5) / 0.25).contiguous(memory_format=self.memory_format)

    def logits(self, images):
        self.model.load_state_dict(self.weights, strict=False)
        self.model.eval()
        with torch.no_grad():
            return self.model(self.prepare(torch.from_numpy(images).permute(0, 3, 1, 2).to(self.device))).cpu().numpy()

    def round(self):
        config, sums = self.config.client, {}
        beta = torch.distributions.Beta(0.75, 0.75)
        for images, labels in zip(self.images, self.labels):
            self.model.load_state_dict(self.weights, strict=False)
            self.model.train()
            optimizer = torch.optim.SGD(
                self.model.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
            )
            partners = torch.randint(len(images), (len(images),), device=self.device)
            for _ in range(config.epochs):
                order = torch.randperm(len(images), device=self.device)
                for start in range(0, len(images), config.batch_size):
                    fix, mix = order[start : start + config.batch_size], partners[start : start + config.batch_size]
                    mixing = float(beta.sample())
                    mixture = mixing * images[fix].float() + (1 - mixing) * images[mix].float()
                    strong = self.prepare(torch_flip_and_crop(images[fix].float(), self.flip))
                    weak = self.prepare(torch_flip_and_crop(mixture, self.flip))
                    optimizer.zero_grad()
                    with self.autocast():
                        loss = F.cross_entropy(self.forward(strong), labels[fix])
                        logits = self.forward(weak)
                        loss = loss + mixing * F.cross_entropy(logits, labels[fix])
                        loss = loss + (1 - mixing) * F.cross_entropy(logits, labels[mix])
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
                    optimizer.step()
            for key, value in self.model.state_dict().items():
                sums[key] = sums.get(key, 0) + value.detach().clone() / len(self.images)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return sums


# --- Ours: the library's own phase and engine. ------------------------------------------------------------------------


def our_problem(image_shape, config):
    weak = functools.partial(weak_augment, flip=image_shape[-1] == 3, padding=PADDING)
    network = Network(build_model(config.model, CLASSES), Images(image_shape, (0.5,), (0.25,)), "running")
    return Problem(config, network, weak, weak, CLASSES)


def our_round(problem, machine, num_clients, lanes):
    """(broadcast, data, key) -> the mean model."""

    def label(broadcast, data, cohort, previous):
        examples = Examples.of(data, cohort)
        return Labels(Report(examples.labels, examples.present), weights=examples.present.astype(jnp.float32))

    phase = fix_mix_phase(problem, mixup_alpha=0.75, mix_weight=1.0, mix_order="mix_then_augment", parts=PARTS)

    def round_fn(broadcast, data, key):
        cohort = Cohort(jnp.arange(num_clients), {}, key)
        result = train_cohort((phase,), broadcast, data, cohort, lanes, label=label)
        received = trained_parts(problem.network, broadcast.model, PARTS)
        return weighted_mean(result.upload.model, result.took_part.astype(jnp.float32), otherwise=received)

    return machine.jit(round_fn)


class Sides(NamedTuple):
    """Both sides of a comparison, ready to be timed."""

    functions: dict[str, Callable]  # 'torch' and 'ours': a cohort's round
    lanes: int
    local_steps: int  # of a round
    device: str
    logits_apart: float


@contextlib.contextmanager
def both_sides(name, options, dtype="float32", **torch_form):
    """A cohort's round by both sides, with the same weights and images.

    Args:
        name: of a model.
        options: clients, images, epochs, batch_size and devices.
        dtype: of our computation.
        torch_form: of `TorchCohort`.
    """
    config = base_config()
    config.model.name, config.model.dtype = name, dtype
    config.client.epochs, config.client.batch_size = options.epochs, options.batch_size
    config.clients_per_round, config.devices = options.clients, options.devices
    image_shape = IMAGE_SHAPES[name]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (options.clients, options.images, *image_shape), np.uint8)
    labels = rng.integers(0, CLASSES, (options.clients, options.images), np.int32)
    rows = np.arange(labels.size).reshape(options.clients, -1)
    data = federation(images.reshape(-1, *image_shape), labels.reshape(-1), rows)
    problem = our_problem(image_shape, config)
    model = jax.jit(problem.network.init)(jax.random.key(0))
    broadcast = Broadcast(model, jnp.float32(0.03))

    device = torch.device("cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu")
    theirs = TorchCohort(name, torch_weights(*model), images, labels, config, device, **torch_form)
    ours = jax.jit(problem.network.predict)(model, jnp.asarray(images[0])).logits
    apart = float(np.abs(np.asarray(ours) - theirs.logits(images[0])).max())
    digits = 1e-2 if dtype == "float32" else 1e-1
    assert apart < digits * max(1.0, float(np.abs(np.asarray(ours)).max())), f"{name}: the models differ by {apart}"

    with use(find_machine(config)) as machine:
        lanes = machine.lanes(config.clients_per_round)
        arguments = machine.put((broadcast, data, jax.random.key(1)))
        round_fn = functools.partial(our_round(problem, machine, options.clients, lanes), *arguments)
        steps = options.clients * options.epochs * -(-options.images // options.batch_size)
        yield Sides({"torch": theirs.round, "ours": round_fn}, lanes, steps, str(device), apart)


def compare(name, options):
    """Times both sides in turn; returns a row of the table."""
    with both_sides(name, options) as sides:
        times = seconds_of(sides.functions, options.repeats)
    row = {"model": name, "lanes": sides.lanes, "device": sides.device, "logits_apart": sides.logits_apart}
    row["local_steps"] = sides.local_steps
    for side, seconds in times.items():
        row[f"{side}, ms per step"] = 1e3 * statistics.median(seconds) / sides.local_steps
    row["ratio"] = statistics.median(o / t for o, t in zip(times["ours"], times["torch"]))
    print(f"ratio {name} {row['ratio']:.3f}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wrn28_2,cnn")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=100, help="of each client")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=10)
    parser.add_argument("--devices", type=int, help="for ours; default: as the command line chooses")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="peer.json")
    options = parser.parse_args()
    if options.devices is None:
        use_every_core()
    rows = [compare(name, options) for name in options.models.split(",")]
    write(options.out, {**describe(), "torch": torch.__version__, "torch_threads": torch.get_num_threads()}, rows)


if __name__ == "__main__":
    main()
