"""A trained model for inference: images, rows or texts in, classes out, preprocessing included."""

import csv as csv_files
import functools
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.config import complete, ranges
from fedjax_ssl.data.folder import load_pictures
from fedjax_ssl.data.npz import KEYS, MEDMNIST_KEYS, open_archive, read_arrays
from fedjax_ssl.data.tables import read_columns
from fedjax_ssl.encoders import backbone_of, checksum, frozen
from fedjax_ssl.engine.interface import State
from fedjax_ssl.errors import UserError, known_are
from fedjax_ssl.files import expanded, replace_arrays, replace_file
from fedjax_ssl.imports import is_own
from fedjax_ssl.kinds import IMAGE, KINDS, Kind, kind_name, kind_of
from fedjax_ssl.kinds.table import encode, is_missing
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.methods import METHODS, find_method
from fedjax_ssl.models.network import Network, build_network
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.dataset import read_dataset
from fedjax_ssl.records.workdir import CHECKPOINTS, CONFIG, DATASET, read_config, refuse_code

BATCH_SIZE = 256  # images at a time: one program for any number, and a bound for the memory


class Prediction(NamedTuple):
    """A model's outputs for B examples."""

    labels: np.ndarray  # int32 [B], the most probable class
    classes: np.ndarray  # str [B], its name
    probabilities: np.ndarray  # float32 [B, C]
    embeddings: np.ndarray  # float32 [B, D], of the head that represents an image for the method, else the features


class Predictor(NamedTuple):
    """A trained model; call it with images, or what else it was trained on."""

    facts: Mapping[str, Any]  # of the training data, see `fedjax_ssl.data.dataset_facts`
    class_names: tuple[str, ...]  # of the C classes; their numbers if the data set has none
    round: int  # after which the model was saved
    network: Network  # the model's passes, as pure functions
    model: Model  # its numbers, as the network takes them
    outputs: Callable[..., Any]  # examples [BATCH_SIZE, ...] -> (probabilities, embeddings), compiled
    fit: str  # how images of another shape are brought to this one, see `fedjax_ssl.data.folder`
    # Of a model of a frozen encoder's features: images [B, H, W, C], or [B, H, W] with one channel, to float32 [B, D].
    # Raises a UserError: they are not in the training's form, or the encoder's weights are not those of the training.
    encode: Callable[[Any], np.ndarray] | None = None

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"Predictor(round {self.round}, {self.kind.noun} {shape}, {len(self.class_names)} classes)"

    @property
    def kind(self) -> Kind:
        """The kind of its inputs."""
        return kind_of(self.facts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an example: of an image (height, width, channels), else (columns,), (features,) or (tokens,)."""
        shape = self.network.inputs.shape
        return shape[-1:] if len(shape) == 2 else shape

    @property
    def params(self) -> Any:
        """The parameters, nested dicts of float32 arrays: the backbone's, the classifier's, those of further heads."""
        return self.model.params

    @property
    def batch_stats(self) -> Any:
        """The normalisation statistics of the layers that have any, in the same form."""
        return self.model.batch_stats

    def __call__(self, inputs: Any) -> Prediction:
        """Classifies images, or what else the model was trained on.

        Args:
            inputs: images uint8 [B, H, W, C], or [B, H, W] with one channel; or floats of the same range, 0 to 255.
                Features, numbers [B, D]; of a frozen encoder also images as above, which are encoded first. Of a
                table its columns by name, or numbers [B, F]. Texts, or token ids [B, L].

        Raises:
            UserError: the inputs are of another shape than the model's, or not as above; or the encoder's weights are
                not those of the training.
        """
        if self.encode is not None and self.are_images(inputs):
            inputs = self.encode(inputs)
        examples = self.kind.given(inputs, self.facts)
        found = []
        for start in range(0, len(examples), BATCH_SIZE):
            chunk = examples[start : start + BATCH_SIZE]
            padding = [(0, BATCH_SIZE - len(chunk))] + [(0, 0)] * (chunk.ndim - 1)
            found.append(jax.device_get(self.outputs(jnp.asarray(np.pad(chunk, padding)))))
        outputs = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(examples)], *found)
        probabilities, embeddings = outputs
        labels = np.argmax(probabilities, axis=-1).astype(np.int32)
        return Prediction(labels, np.array(self.class_names)[labels], probabilities, embeddings)

    def are_images(self, inputs: Any) -> bool:
        """Whether inputs are images, for the model or for its encoder, and no features."""
        if self.encode is None:
            return kind_name(self.facts) == IMAGE
        shape = np.shape(inputs)
        return len(shape) == 4 or (len(shape) == 3 and (*shape[1:], 1) == self.image_shape)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of the images that it takes, itself or by its encoder; None: it takes none."""
        shape = self.facts.get("image_shape" if self.encode is None else "encoded_images")
        return None if shape is None else tuple(shape)


def load(workdir: str | os.PathLike[str], allow_code: bool = False) -> Predictor:
    """The model of a run's newest checkpoint, or of the one before if that is damaged, which a warning says.

    Args:
        workdir: of a run, finished or not. Nothing is written into it.
        allow_code: whether code may be run that the folder names: a method or a backbone as FILE.py:NAME or
            MODULE:NAME. Say so for folders that you trust.

    Returns:
        A function from examples to a `Prediction`, with their preprocessing inside.

    Raises:
        UserError: the folder has no run or no checkpoint that can be used, or it cannot be read, or it names code and
            `allow_code` is False.
    """
    folder = expanded(workdir)
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
    for field, its_range in ranges().items():
        if field.startswith("model."):  # of which the network is made
            its_range.check(f"{folder / CONFIG}: {field}", config.model[field.partition(".")[2]])
    if config.encoder.adapters.rank and "weights" in facts:
        _check_weights(config.encoder, facts)
    network = build_network(config, facts, entry.heads_of(config), entry.embedding, backbone=backbone_of(config))
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
    encode = _encoding(config.encoder, facts) if "encoded_images" in facts else None
    return Predictor(facts, tuple(class_names), restored.round, network, trained, outputs, config.data.fit, encode)


def _check_weights(options: ConfigDict, facts: Mapping[str, Any]) -> None:
    weights = expanded(options.weights)
    if checksum(weights) != facts["weights"]:
        raise UserError(f"{weights} are not the weights that the model was trained with")


def _encoding(options: ConfigDict, facts: Mapping[str, Any]) -> Callable[[Any], np.ndarray]:
    """`Predictor.encode`; the weights are read with the first images: who has features needs no file of them."""

    @functools.cache
    def read() -> Callable[[jax.Array], jax.Array]:
        features_of = frozen(options)
        _check_weights(options, facts)
        return features_of

    def encode(images: Any) -> np.ndarray:
        features_of = read()
        images = KINDS[IMAGE].given(images, {"image_shape": facts["encoded_images"]})
        size, found = options.batch_size, []
        for start in range(0, len(images), size):
            chunk = images[start : start + size]
            padded = np.pad(chunk, [(0, size - len(chunk)), (0, 0), (0, 0), (0, 0)])
            found.append(np.asarray(features_of(jnp.asarray(padded)))[: len(chunk)])
        return np.concatenate(found)

    return encode


class Predicted(NamedTuple):
    """What was predicted for the examples of a file or a folder."""

    prediction: Prediction  # for B examples
    files: list[str] | None  # of each, as seen from the folder; None of an npz file
    true_labels: np.ndarray | None  # int32 [B], -1 where none is known; None if there are no labels
    of_images: bool = True

    @property
    def labelled(self) -> int:
        """How many images have a label."""
        return 0 if self.true_labels is None else int(np.sum(self.true_labels >= 0))

    @property
    def accuracy(self) -> float | None:
        """The share of images with a label that are classified right; None without any."""
        if not self.labelled:
            return None
        return float(np.sum(self.prediction.labels == self.true_labels) / self.labelled)


def predict_file(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    npz: str = "",
    images: str = "",
    key: str = "",
    allow_code: bool = False,
    csv: str = "",
) -> Predicted:
    """Classifies the examples of an npz or csv file, or the images of a folder, and writes the predictions.

    Args:
        workdir: of a run.
        out: the file to be written: NAME.csv with a line for each image, or an npz file with `labels`, `classes`,
            `probabilities` and `embeddings`, `class_names`, and `files` and `true_labels` where these are known.
        npz: an npz file; labels are taken from its `labels`, `y` or `y_test`, as the images are called.
        images: a folder, FOLDER/IMAGE, or with labels FOLDER/CLASS/IMAGE.
        key: name of the images' array in the npz file; by default `images`, `x`, `x_test`, `test_images`, or the only
            array.
        allow_code: see `load`.
        csv: a csv or parquet file, for models of tables and texts; labels are taken from the column of the training's.

    Raises:
        UserError: see `load`, `Predictor`, `read_arrays` and `load_pictures`; or labels are none of the model's
            classes; or the file cannot be written.
    """
    for name, value in {"workdir": workdir, "npz": npz or images or csv, "out": out}.items():
        if not value:
            raise UserError(
                f"--{name} is missing: predict takes --workdir=RUN, --npz=FILE, --images=FOLDER or --csv=FILE, and "
                "--out=FILE"
            )
    given = [f"--{name}" for name, value in {"npz": npz, "images": images, "csv": csv}.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are {len(given)} places for inputs; give one of them")
    path = expanded(out)
    if path.is_dir():
        raise UserError(f"--out={path} is a folder; predictions are written into a file")
    predictor = load(workdir, allow_code)
    if images and predictor.image_shape is None:
        raise UserError(f"--images is for images, but the model takes {predictor.kind.noun}")
    if csv:
        inputs, files, labels = _of_csv(predictor, csv)
    else:
        inputs, files, labels = _of_folder(predictor, images) if images else _of_npz(predictor, npz, key)
    found = Predicted(predictor(inputs), files, labels, predictor.are_images(inputs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            replace_file(path, _as_csv(predictor, found))
        else:
            known = {"files": files and np.array(files), "true_labels": labels}
            replace_arrays(
                path,
                **found.prediction._asdict(),
                class_names=np.array(predictor.class_names),
                **{name: value for name, value in known.items() if value is not None},
            )
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return found


def _as_csv(predictor: Predictor, found: Predicted) -> str:
    """A line for each example: its file or number, the predicted class, how probable it is, its true class if any."""
    text = io.StringIO()
    writer = csv_files.writer(text, lineterminator="\n")
    labels = found.true_labels
    what = "image" if found.of_images else "row"
    writer.writerow([what, "class", "probability", *(["true class"] if labels is not None else [])])
    best = found.prediction.probabilities.max(axis=1)
    for row, (name, probability) in enumerate(zip(found.prediction.classes, best)):
        true = [] if labels is None else [predictor.class_names[labels[row]] if labels[row] >= 0 else ""]
        writer.writerow([found.files[row] if found.files else row, name, f"{probability:.6g}", *true])
    return text.getvalue()


def _of_folder(predictor: Predictor, folder: str) -> tuple[np.ndarray, list[str], np.ndarray | None]:
    """A folder's images, their files, and their labels where the folder has one for each class."""
    assert predictor.image_shape is not None
    found = load_pictures(folder, predictor.image_shape, predictor.fit, "images")
    if found.classes is None:
        return found.images, found.files, None
    names = predictor.class_names
    for name in dict.fromkeys(found.classes):
        if name not in names:
            raise UserError(
                f"{folder}/{name} is not named for a class of the model{known_are(name, names)}; images without labels "
                "lie in the folder itself"
            )
    return found.images, found.files, np.array([names.index(name) for name in found.classes], np.int32)


def _of_csv(predictor: Predictor, path: str) -> tuple[Any, None, np.ndarray | None]:
    """The inputs of a csv or parquet file, and their labels where it has the training's column of labels."""
    facts, columns = predictor.facts, read_columns(path, "csv")
    of_text, of_labels = facts.get("text_column"), facts.get("label_column", "")
    if kind_name(facts) != "table" and not of_text:
        raise UserError(f"--csv is for tables and texts, but the model takes {predictor.kind.noun}; use --npz")
    if of_text and of_text not in columns:
        raise UserError(f"{path} has no column {of_text!r}, that of the texts{known_are(of_text, columns)}")
    labels = None
    if of_labels in columns:
        codes = {name: code for code, name in enumerate(predictor.class_names)}
        present = [label.strip() for label in columns[of_labels] if not is_missing(label)]
        unknown = [label for label in present if label not in codes]
        if unknown:
            raise UserError(f"{path} has the label {unknown[0]!r}{known_are(unknown[0], codes)}")
        labels = np.array([codes.get(label.strip(), -1) for label in columns[of_labels]], np.int32)
    return columns[of_text] if of_text else encode(columns, facts, path), None, labels


# How labels are called in a file whose images are called so.
_LABELS_OF = {"images": "labels", "x": "y", **dict(zip(KEYS[::2], KEYS[1::2])),
              **dict(zip(MEDMNIST_KEYS[::2], MEDMNIST_KEYS[1::2]))}  # fmt: skip


def _of_npz(predictor: Predictor, path: str, key: str) -> tuple[np.ndarray, None, np.ndarray | None]:
    """An npz file's images, and their labels where it has them."""
    key = key or _image_key(path)
    of_labels = _LABELS_OF.get(key, "labels")
    arrays = read_arrays(path, (key,), "npz", optional=(of_labels,))
    labels = arrays.get(of_labels) if of_labels != key else None
    if labels is None:
        return arrays[key], None, None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST has them
    num_classes, of_images = len(predictor.class_names), arrays[key].shape[:1]
    if labels.shape != of_images or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{path}: {of_labels} is {labels.dtype} of shape {labels.shape}; labels must be {list(of_images)} "
            "integers, one per image: rename the array if it has something else"
        )
    if labels.size and (labels.min() < -1 or labels.max() >= num_classes):
        worst = labels.min() if labels.min() < -1 else labels.max()
        known = f"the model's are 0 to {num_classes - 1}, and -1 means no label"
        raise UserError(f"{path}: {of_labels} has {worst}; {known}")
    return arrays[key], None, labels.astype(np.int32)


def _image_key(path: str) -> str:
    """Which array of an npz file holds the images."""
    with open_archive(path, "npz", "an npz file with images") as archive:
        names = archive.files
    usual = [name for name in ("images", "x", "x_test", "test_images") if name in names]
    if not usual and len(names) != 1:
        raise UserError(f"{path} holds {', '.join(names)}; say which are the images: --key=NAME")
    return (usual or names)[0]
