"""Encodes every image of a data set with a frozen encoder before the first round, once for each view.

The features are stored in blocks in the user's cache, keyed by the weights, the images and the settings of the
views. An encoding that was stopped therefore continues, and all runs with the same views share it.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded, private_cache
from fedjax_ssl.data import Dataset, feature_statistics, load_dataset
from fedjax_ssl.data.content import row_sums
from fedjax_ssl.data.kinds import IMAGE
from fedjax_ssl.data.unknown import set_apart
from fedjax_ssl.models.encoders import ENCODED_TOGETHER, checksum, find_encoder, frozen
from fedjax_ssl.ops.augment import image_views
from fedjax_ssl.run.kept_files import KeptFiles
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import say

MOST_CACHE_BYTES = 20_000_000_000  # of all features; the least recently used are removed
BLOCK = 256  # images in a file; an interruption loses at most one file
# The fields of `config.augment` that the views of images depend on.
_AUGMENTATION = ("flip", "padding", "border", "resized", "flavour", "num_ops", "magnitude")


def read_data(config: ConfigDict, tell: Callable[[str], Any] = lambda text: None) -> Dataset:
    """Reads a run's data set, applies its encoder, sets unknown classes apart; `tell` gets the progress of reading."""
    dataset = through_encoder(config, load_dataset(config.data, tell))
    return set_apart(dataset, config.data) if config.data.unknown_classes else dataset


def through_encoder(config: ConfigDict, dataset: Dataset) -> Dataset:
    """The data set after `config.encoder`: features; with adapters, pixels from 0 to 1; without an encoder, unchanged.

    Raises a UserError if the encoder has no weights, or they, the data or their standardisation do not fit.
    """
    if config.encoder.name == "none":
        return dataset
    if not config.encoder.weights:
        raise UserError(f"encoder.name={config.encoder.name} takes encoder.weights, a file of convert-weights")
    if dataset.kind != IMAGE or dataset.x_train.shape[1] != dataset.x_train.shape[2]:
        given = "x".join(map(str, dataset.x_train.shape[1:3])) if dataset.kind == IMAGE else f"{dataset.kind} data"
        raise UserError(f"encoder.name={config.encoder.name} takes square images, not {given}")
    if config.data.normalisation != "own":
        name = config.encoder.name
        raise UserError(f"encoder.name={name} has its own means and deviations; leave data.normalisation='own'")
    if config.encoder.adapters.rank:
        channels = dataset.x_train.shape[-1]
        known = _encoder_facts(config.encoder)
        return dataset._replace(mean=(0.0,) * channels, std=(1.0,) * channels, details={**dataset.details, **known})
    return as_features(config, dataset)


def _encoder_facts(options: ConfigDict) -> dict[str, Any]:
    """What a run records of its encoder, so that no other weights are taken for it later."""
    side = options.side or find_encoder(options.name).side
    return {"encoder": options.name, "encoder_side": side, "weights": checksum(expanded(options.weights))}


def _settings(config: ConfigDict, facts: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """What all features of a data set depend on but the images."""
    return {
        "version": 3,
        "encoder": facts["encoder"],
        "weights": facts["weights"],
        "side": facts["encoder_side"],
        "flip": bool(dataset.flip),
        "augment": [config.augment[name] for name in _AUGMENTATION],
    }


def as_features(config: ConfigDict, dataset: Dataset) -> Dataset:
    """The data set with an encoder's features: float32 [N, V, F] for training, [T, 1, F] for the test set.

    View 0 is the image itself. The first `encoder.weak_views` views, view 0 included, are weak; the others are strong.
    Views are drawn by `config.augment`, and depend on the image's row only, not on the run's seed.
    Raises a UserError if the weights do not fit the encoder.
    """
    options, features_of, facts = config.encoder, frozen(config.encoder), _encoder_facts(config.encoder)
    views_of = _views_of(config, dataset)

    def of_view(pixels: np.ndarray, rows: np.ndarray, number: int) -> np.ndarray:
        """Features float32 [n, F], computed in batches of equal size."""
        size, found = ENCODED_TOGETHER, []
        for start in range(0, len(rows), size):
            short = size - len(rows[start : start + size])
            batch = np.pad(pixels[start : start + size], [(0, short), (0, 0), (0, 0), (0, 0)])
            at = jax.device_put(np.pad(rows[start : start + size], (0, short)))
            found.append(np.asarray(features_of(views_of(jax.device_put(batch), at, number)))[: size - short])
        return np.concatenate(found)

    sides = {"train": (dataset.x_train, options.weak_views, options.strong_views), "test": (dataset.x_test, 1, 0)}
    total = sum(len(images) * (weak + strong) for images, weak, strong in sides.values())
    width = jax.eval_shape(features_of, jax.ShapeDtypeStruct((1, *dataset.x_train.shape[1:]), np.uint8)).shape[-1]
    folder = private_cache("features", MOST_CACHE_BYTES)
    files = None if folder is None else KeptFiles(folder, "its images are encoded again")
    kept = f"kept in {folder}" if folder else "not kept: the user's cache is not writable, or others can write into it"
    say(f"{options.name}: {total:,} views, {total * width * 4 / 1e6:,.0f} MB of features in memory, {kept}")
    settings = _settings(config, facts, dataset)
    arrays: dict[str, np.ndarray] = {}
    done = 0
    with doing(f"encoding {total:,} views") as task:
        for part, (images, weak, strong) in sides.items():
            sums = row_sums(images)
            arrays[part] = np.empty((len(images), weak + strong, width), np.float32)
            name = f"{json.dumps(settings, sort_keys=True)} {weak} {strong}"
            for start in range(0, len(images), BLOCK):
                rows = np.arange(start, min(start + BLOCK, len(images)))
                block = arrays[part][rows[0] : rows[-1] + 1]  # a view, so that the array is filled in place
                known_by = f"{name} {start} {images.shape[1:]} ".encode() + sums[rows].tobytes()
                key = hashlib.sha256(known_by).hexdigest()
                if files is not None and (found := files.get(key)) is not None:
                    block[:] = np.frombuffer(found, np.float32).reshape(block.shape)
                else:
                    for view in range(weak + strong):
                        block[:, view] = of_view(images[rows], rows, view)
                    if files is not None:
                        files.put(key, block.tobytes())
                done += len(rows) * (weak + strong)
                task.text = f"encoding: {done:,} of {total:,} views"
    mean, std = feature_statistics(arrays["train"], of_one_unit=True)
    details = {
        **dataset.details,
        "shape": list(arrays["train"].shape[1:]),
        "weak_views": options.weak_views,
        **facts,
        "encoded_images": list(dataset.x_train.shape[1:]),
    }
    told: dict[str, Any] = {"mean": mean, "std": std, "details": details, "flip": False, "kind": "features"}
    return dataset._replace(x_train=arrays["train"], x_test=arrays["test"], **told)


def _views_of(config: ConfigDict, dataset: Dataset) -> Callable[..., jax.Array]:
    """Makes the function (images uint8 [B, H, W, C], their rows, the view's number) -> that view of the images."""
    views, weak_views = image_views(config, dataset.x_train.shape[1:], dataset.flip), config.encoder.weak_views

    @jax.jit
    def views_of(pixels: jax.Array, rows: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), number)
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(rows)

        def each(view: Callable[..., jax.Array]) -> jax.Array:
            return jax.vmap(lambda key, image: view(key, image[None])[0])(keys, pixels)

        kind = jnp.where(number == 0, 0, jnp.where(number < weak_views, 1, 2))
        return jax.lax.switch(kind, [lambda: pixels, lambda: each(views.weak), lambda: each(views.strong)])

    return views_of
