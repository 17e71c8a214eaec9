"""A trained model for inference: images in, classes out, preprocessing included."""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.config import complete
from fedjax_ssl.data.npz import open_archive, read_arrays
from fedjax_ssl.engine.interface import State
from fedjax_ssl.errors import UserError
from fedjax_ssl.files import replace_arrays
from fedjax_ssl.imports import is_own
from fedjax_ssl.methods import METHODS, find_method
from fedjax_ssl.models.network import build_network
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.dataset import read_dataset
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, DATASET, read_config, refuse_code

BATCH_SIZE = 256  # images at a time: one program for any number, and a bound for the memory


class Prediction(NamedTuple):
    """A model's outputs for B images.

    Attributes:
        labels: int32 [B], the most probable class.
        probabilities: float32 [B, C].
        embeddings: float32 [B, D], of the head that represents an image for the method, else the features.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    embeddings: np.ndarray


class Predictor(NamedTuple):
    """A trained model; call it with images.

    Attributes:
        image_shape: (height, width, channels).
        class_names: of the C classes; their numbers if the data set has none.
        round: after which the model was saved.
        outputs: images [BATCH_SIZE, H, W, C] -> (probabilities, embeddings), compiled.
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    round: int
    outputs: Callable

    def __call__(self, images: np.ndarray) -> Prediction:
        """Classifies images.

        Args:
            images: uint8 [B, H, W, C], or [B, H, W] with one channel; or floats of the same range, 0 to 255.

        Raises:
            UserError: the images are of another shape than the model's, or not of that range.
        """
        images = self._check(np.asarray(images))
        found = []
        for start in range(0, len(images), BATCH_SIZE):
            chunk = images[start : start + BATCH_SIZE]
            padding = [(0, BATCH_SIZE - len(chunk))] + [(0, 0)] * 3
            found.append(jax.device_get(self.outputs(jnp.asarray(np.pad(chunk, padding)))))
        outputs = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(images)], *found)
        probabilities, embeddings = outputs
        return Prediction(np.argmax(probabilities, axis=-1).astype(np.int32), probabilities, embeddings)

    def _check(self, images: np.ndarray) -> np.ndarray:
        if images.ndim == 3 and self.image_shape[-1] == 1:
            images = images[..., np.newaxis]
        if images.shape[1:] != self.image_shape:
            wanted = "x".join(map(str, self.image_shape))
            raise UserError(f"images of shape {images.shape}; the model takes [B, H, W, C] of {wanted}")
        if len(images) == 0:
            raise UserError("there are no images")
        if images.dtype != np.uint8:
            if not np.issubdtype(images.dtype, np.number) or np.issubdtype(images.dtype, np.complexfloating):
                raise UserError(f"images are {images.dtype}; the model takes numbers from 0 to 255")
            images = images.astype(np.float32)
            if not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 255):
                raise UserError("images have values outside of 0 to 255; give pixels as they are, not normalised")
            if images.max() <= 1 and len(np.unique(images)) > 2:
                raise UserError("images have no value above 1; the model takes pixels from 0 to 255: multiply by 255")
        return images


def load(workdir: str | os.PathLike, allow_code: bool = False) -> Predictor:
    """The model of a run's newest checkpoint, or of the one before if that is damaged, which a warning says.

    Args:
        workdir: of a run, finished or not. Nothing is written into it.
        allow_code: whether code may be run that the folder names: a method or a backbone as FILE.py:NAME or
            MODULE:NAME. Say so for folders that you trust.

    Returns:
        A function from images to a `Prediction`, with the pixel normalisation inside.

    Raises:
        UserError: the folder has no run or no checkpoint that can be used, or it cannot be read, or it names code and
            `allow_code` is False.
    """
    folder = pathlib.Path(workdir)
    if not (folder / CONFIG).exists():
        runs = [path.parent.name for path in sorted(folder.glob(f"*/{CONFIG}"))]
        seeds = f"; its runs are in {', '.join(runs[:3])}" if runs else ""
        raise UserError(f"{folder} holds no run: there is no {CONFIG}{seeds}")
    if not (folder / DATASET).exists():
        raise UserError(f"the run in {folder} has no {DATASET}; start it again to have it written")
    saved = read_config(folder)
    config = ConfigDict(complete(saved))
    if not allow_code:
        refuse_code(folder, config, "if you trust it, say allow_code=True, or --allow_code on the command line")
    facts = read_dataset(folder)
    if config.method not in METHODS and not is_own(config.method):
        raise UserError(f"{folder} holds a run of {config.method!r}, which is not registered: see fedjax_ssl.methods")
    try:
        entry = find_method(config.method)
    except UserError as error:  # its file is gone, or is looked for from another folder than the run's
        raise UserError(f"the run in {folder} needs its method's file: {error}") from error
    config = ConfigDict(complete(saved))  # a method from a file has defaults, too, now that it is known
    network = build_network(config, facts, entry.heads_of(config), entry.embedding)
    model = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    restored = Checkpoints(folder / CHECKPOINTS).restore_part(State(None, model))
    for line in restored.passed_over:
        print(f"warning: {line}; the model is that of round {restored.round}", file=sys.stderr, flush=True)
    trained = restored.state.model

    @jax.jit
    def outputs(images):
        found = network.predict(trained, images)
        return jax.nn.softmax(found.logits), network.embeddings(found)

    class_names = facts.get("class_names") or [str(label) for label in range(facts["num_classes"])]
    return Predictor(tuple(facts["image_shape"]), tuple(class_names), restored.round, outputs)


def predict_file(
    workdir: str | os.PathLike,
    images_file: str,
    out: str | os.PathLike,
    key: str = "",
    allow_code: bool = False,
) -> Prediction:
    """Classifies the images of an npz file, and writes `labels`, `probabilities` and `embeddings` into another.

    Args:
        workdir: of a run.
        images_file: an npz file.
        out: the npz file to be written.
        key: name of the images' array in it; by default `images`, `x`, `x_test`, or the only array.
        allow_code: see `load`.

    Raises:
        UserError: see `load`, `Predictor` and `read_arrays`; or the file cannot be written.
    """
    for name, value in {"workdir": workdir, "npz": images_file, "out": out}.items():
        if not value:
            raise UserError(f"--{name} is missing: predict takes --workdir=RUN, --npz=FILE and --out=FILE")
    predictor = load(workdir, allow_code)
    images = read_arrays(images_file, (key or _image_key(images_file),), field="npz")
    (images,) = images.values()
    prediction = predictor(images)
    path = pathlib.Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_arrays(path, **prediction._asdict())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return prediction


def _image_key(path: str) -> str:
    """Which array of an npz file holds the images."""
    with open_archive(path, "npz", "an npz file with images") as archive:
        names = archive.files
    usual = [name for name in ("images", "x", "x_test") if name in names]
    if not usual and len(names) != 1:
        raise UserError(f"{path} holds {', '.join(names)}; say which are the images: --key=NAME")
    return (usual or names)[0]
