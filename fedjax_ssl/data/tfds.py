"""Loads published data sets through TensorFlow Datasets (TFDS), but without TensorFlow.

TFDS needs no TensorFlow to read data that it has prepared in its array_record format. To prepare data, it uses
TensorFlow only to open local files, join paths and encode PNG images; this module replaces these functions. Data sets
are thus downloaded, verified, prepared and stored as by TFDS itself, and all programs that use TFDS share the prepared
folder.
"""

import contextlib
import importlib
import io
import os
import sys
import types
import urllib.parse
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from absl import logging

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.data.npz import KEYS

_FILE_FORMAT = "array_record"
# EMNIST's images are stored transposed (mirrored and rotated by 90 degrees).
_TRANSPOSED = ("emnist/byclass",)
_NPZ_WAY = "bring the data as a file: --config.data.source=npz --config.data.path=FILE"
_ANSWER_WITHIN = 8.0  # seconds for a host of a data set


def load_tfds(name: str) -> dict[str, Any]:
    """Loads a data set of TFDS, such as 'cifar10' or 'emnist/byclass'; downloads and prepares it first if necessary.

    It lies in the folder that the environment variable TFDS_DATA_DIR names, otherwise in ~/tensorflow_datasets.
    The first time, SVHN also downloads its "extra" split (1.3 GB), which is not used. Examples are in their official
    order if TFDS knows it (CIFAR, SVHN), otherwise in TFDS's order, which is also fixed. The result has fields of
    `Dataset`. Raises a UserError if the data cannot be downloaded or read.
    """
    folder = os.environ.get("TFDS_DATA_DIR")  # read here, as TFDS reads it only when it is imported
    with _quiet():
        api = importlib.import_module("tensorflow_datasets")  # here, since it takes a second
        try:
            builder = api.builder(name, data_dir=folder and os.path.expanduser(folder), file_format=_FILE_FORMAT)
            if not builder.data_path.exists():
                _check_reachable(name, builder.url_infos or ())
                _prepare(name, builder, api)
            train, test = (_read_split(builder, split, name in _TRANSPOSED) for split in ("train", "test"))
        except UserError:
            raise
        except Exception as error:  # The errors of TFDS and of its dependencies have no common base.
            raise UserError(
                f"data.source={name} cannot be read from {folder or '~/tensorflow_datasets'} ({first_line(error)}); "
                f"remove it there, set another TFDS_DATA_DIR, or {_NPZ_WAY}"
            ) from error
    classes = builder.info.features["label"]
    fields = dict(zip(KEYS, (*train, *test)))
    return {**fields, "num_classes": classes.num_classes, "class_names": tuple(classes.names)}


def _check_reachable(name: str, urls: Iterable[str]) -> None:
    """Raises a UserError unless every host of a data set answers for one of its files; TFDS would try for minutes."""
    import requests  # TFDS downloads with it, with the same proxies and certificates.

    for host, url in {urllib.parse.urlsplit(url).netloc: url for url in urls}.items():
        try:
            with requests.get(url, stream=True, timeout=_ANSWER_WITHIN) as response:  # Headers only.
                response.raise_for_status()
        except (requests.RequestException, OSError) as error:
            why = f"{host} cannot be reached ({type(error).__name__}: {first_line(error)})"
            what = "connect to the network, set TFDS_DATA_DIR to a folder where TFDS has prepared it"
            raise UserError(f"data.source={name} must be downloaded, but {why}; {what}, or {_NPZ_WAY}") from error


def _prepare(name: str, builder: Any, api: types.ModuleType) -> None:
    """Downloads a data set, verified by TFDS, and writes it in the array_record format.

    TFDS works in a temporary folder, which is renamed when it is complete: after an interruption it starts again.
    """
    generate_examples = builder._generate_examples

    def generate_encoded_examples(*args, **kwargs):
        # TFDS stores image files unchanged, but would encode arrays with TensorFlow.
        for key, example in generate_examples(*args, **kwargs):
            yield key, {**example, "image": _png_file(example["image"])}

    builder._generate_examples = generate_encoded_examples
    try:
        with _without_tensorflow():
            builder.download_and_prepare(
                download_config=api.download.DownloadConfig(try_download_gcs=False), file_format=_FILE_FORMAT
            )
    except Exception as error:  # Network, disk, checksums, archives: no common base.
        why = f"could not be downloaded and prepared ({type(error).__name__}: {first_line(error)})"
        raise UserError(f"data.source={name} {why}; start it again, or {_NPZ_WAY}") from error


def _png_file(image: np.ndarray) -> io.BytesIO:
    """Encodes one image, uint8 [H, W, C] with C = 1 or 3, as a PNG file in memory."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "png")
    file.seek(0)
    return file


def _read_split(builder: Any, split: str, transpose: bool) -> tuple[np.ndarray, np.ndarray]:
    """Reads all images [N, H, W, C] and labels [N] of one split into memory."""
    source = builder.as_data_source(split, file_format=_FILE_FORMAT)
    images = np.empty((len(source), *builder.info.features["image"].shape), np.uint8)
    labels = np.empty(len(source), np.int32)
    names = []
    for row, example in enumerate(source):
        images[row], labels[row] = example["image"], example["label"]
        if "id" in example:
            names.append(example["id"])
    if names:  # TFDS shuffles examples before writing; these names number them in the official order.
        order = np.argsort(np.array(names))
        images, labels = images[order], labels[order]
    if transpose:
        images = np.ascontiguousarray(images.swapaxes(1, 2))
    return images, labels


class _NeverRaised(Exception):
    """Replaces the TensorFlow errors that TFDS names in except clauses."""


class _Errors:
    """tf.errors."""

    def __getattr__(self, name: str) -> type[Exception]:
        return _NeverRaised


# The TensorFlow functions for local files that TFDS calls to download, unpack and shuffle.
_STAND_IN = types.SimpleNamespace(
    compat=types.SimpleNamespace(as_text=os.fsdecode),
    errors=_Errors(),
    io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open, exists=os.path.exists, remove=os.remove)),
)


@contextlib.contextmanager
def _without_tensorflow() -> Iterator[None]:
    """Replaces the few TensorFlow functions on local files, so that TFDS does not import TensorFlow."""
    # Modules that TFDS would otherwise import only after this context has ended.
    importlib.import_module("tensorflow_datasets.core.download.extractor")
    importlib.import_module("tensorflow_datasets.core.shuffle")
    lazy = importlib.import_module("tensorflow_datasets.core.utils.lazy_imports_utils").tensorflow
    borrowers = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tensorflow_datasets.") and vars(module).get("tf") is lazy
    ]
    for module in borrowers:
        vars(module)["tf"] = _STAND_IN
    try:
        yield
    finally:
        for module in borrowers:
            vars(module)["tf"] = lazy


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what TFDS prints and warns about, except for its progress bars."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
