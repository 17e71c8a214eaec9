"""A trained model for inference: images, features, table rows or texts in, classes out, with preprocessing."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError, known_are, say
from fedjax_ssl.base.files import as_csv, expanded, replace_arrays, replace_file, writing
from fedjax_ssl.base.imports import forget_changed, is_own
from fedjax_ssl.config import ranges, typed
from fedjax_ssl.data.folder import load_pictures
from fedjax_ssl.data.kinds import IMAGE, KINDS, Kind, kind_name, kind_of
from fedjax_ssl.data.kinds.table import as_texts, encode
from fedjax_ssl.data.labels import read_labels
from fedjax_ssl.data.npz import KEYS, MEDMNIST_KEYS, known_labels, names_in, read_arrays
from fedjax_ssl.data.tables import read_columns, values_of
from fedjax_ssl.engine.interface import State
from fedjax_ssl.methods import find_method
from fedjax_ssl.models.encoders import ENCODED_TOGETHER, backbone_of, checksum, frozen
from fedjax_ssl.models.network import Network, build_network
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.origin import changed_files
from fedjax_ssl.records.sealed import read_dataset
from fedjax_ssl.records.workdir import BEST, CHECKPOINTS, CONFIG, read_config, refuse_code
from fedjax_ssl.serve.judging import num_in_training

NEWEST = "newest"  # the checkpoint that is loaded, unless it is BEST
BATCH_SIZE = 256  # examples in a batch: one program for any number of examples, with bounded memory


class Prediction(NamedTuple):
    """A model's outputs for B examples."""

    labels: np.ndarray  # int32 [B], the most probable class
    classes: np.ndarray  # str [B], its name
    probabilities: np.ndarray  # float32 [B, C]
    embeddings: np.ndarray  # float32 [B, D]: the output of the method's embedding head, else the features


class Predictor(NamedTuple):
    """A trained model; call it with images, or other inputs of the kind that it was trained on."""

    facts: Mapping[str, Any]  # of the training data, see `fedjax_ssl.data.dataset_facts`
    class_names: tuple[str, ...]  # names of the C classes; their numbers if the data set has no names
    round: int  # the model was saved after this round
    network: Network  # the model's forward passes, as pure functions
    model: Model  # its parameters and normalisation statistics
    outputs: Callable[..., Any]  # examples [BATCH_SIZE, ...] -> (probabilities, embeddings), compiled
    fit: str  # how images of another shape are fitted to this one, see `fedjax_ssl.data.folder`
    # For a model on a frozen encoder's features: images [B, H, W, C] or, with one channel, [B, H, W] -> float32 [B, D].
    # Raises a UserError if the images' form or the encoder's weights differ from those in training.
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
        """The shape of an example: (height, width, channels), (columns,), (features,) or (tokens,)."""
        shape = self.network.inputs.shape
        return shape[-1:] if "weak_views" in self.facts else shape  # of several views of an example, the first

    @property
    def params(self) -> Any:
        """The parameters of the backbone, the classifier and further heads: nested dicts of float32 arrays."""
        return self.model.params

    @property
    def batch_stats(self) -> Any:
        """The normalisation statistics of the layers that have them, in nested dicts like `params`."""
        return self.model.batch_stats

    def __call__(self, inputs: Any) -> Prediction:
        """Classifies images, or other inputs of the kind that the model was trained on.

        Args:
            inputs: images, uint8 [B, H, W, C] or, with one channel, [B, H, W]; or floats from 0 to 255.
                Features, numbers [B, D]; with a frozen encoder also images as above, which are encoded first. Tables,
                as columns by name or numbers [B, F]. Texts, or token ids [B, L].

        Raises:
            UserError: the inputs do not have the model's shape or the form above, or the encoder's weights differ from
                those in training.
        """
        if self.encode is not None and self.are_images(inputs):
            inputs = self.encode(inputs)
        examples = self.kind.given(inputs, self.facts)
        probabilities, embeddings = in_batches(self.outputs, examples, BATCH_SIZE)
        labels = np.argmax(probabilities, axis=-1).astype(np.int32)
        return Prediction(labels, np.array(self.class_names)[labels], probabilities, embeddings)

    def are_images(self, inputs: Any) -> bool:
        """Whether inputs are images, for the model or its encoder, and not features."""
        if self.encode is None:
            return kind_name(self.facts) == IMAGE
        shape = np.shape(inputs)
        return len(shape) == 4 or (len(shape) == 3 and (*shape[1:], 1) == self.image_shape)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of the images that the model or its encoder takes; None: it takes no images."""
        shape = self.facts.get("image_shape" if self.encode is None else "encoded_images")
        return None if shape is None else tuple(shape)


def load(workdir: str | os.PathLike[str], allow_code: bool = False, checkpoint: str = NEWEST) -> Predictor:
    """Loads the model of a run's newest checkpoint; if it is damaged, warns and loads the checkpoint before it.

    Args:
        workdir: the folder of a run, finished or not. Nothing is written into it.
        allow_code: whether to run code that the folder names, a method or a backbone as FILE.py:NAME or MODULE:NAME.
            Set it only for folders that you trust.
        checkpoint: 'newest', or 'best': of the round with the best accuracy on the run's validation images.

    Returns:
        A function from examples to a `Prediction`, with their preprocessing inside.

    Raises:
        UserError: the folder has no run or no usable checkpoint, such as no best one without validation images, or
            cannot be read, or names code and `allow_code` is False.
    """
    if checkpoint not in (NEWEST, BEST):
        raise UserError(f"checkpoint is {checkpoint!r}{known_are(checkpoint, (NEWEST, BEST))}")
    folder = expanded(workdir)
    if not (folder / CONFIG).exists():
        runs = [path.parent.name for path in sorted(folder.glob(f"*/{CONFIG}"))]
        seeds = f"; its runs are in {', '.join(runs[:3])}" if runs else ""
        raise UserError(f"{folder} holds no run: there is no {CONFIG}{seeds}")
    saved = read_config(folder)
    if not allow_code:
        refuse_code(folder, saved, "if you trust it, say allow_code=True, or --allow_code on the command line")
    facts = read_dataset(folder)
    forget_changed()
    entry = find_method(saved["method"])
    config = typed(saved, folder / CONFIG)
    for field, its_range in ranges().items():
        if field.startswith("model."):  # the network is built from these
            its_range.check(f"{folder / CONFIG}: {field}", config.model[field.partition(".")[2]])
    if config.encoder.adapters.rank and "weights" in facts:
        _check_weights(config.encoder, facts)
    heads, backbone = entry.heads_of(config), backbone_of(config)
    network = build_network(config, facts, kind_of(facts), heads, entry.embedding, backbone=backbone)
    if any(map(is_own, (config.method, config.model.name))) and (changed := changed_files(folder)):
        say(f"warning: {folder} was trained with another {', '.join(changed)}")
    model = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    if checkpoint == BEST and not saved["data"]["validation"]:
        raise UserError(f"{folder} has no best checkpoint: validation images choose it, as with data.validation=500")
    place = folder / (BEST if checkpoint == BEST else CHECKPOINTS)
    restored = Checkpoints(place).restore(State(None, model), part=True)
    for line in restored.passed_over:
        say(f"warning: {line}; the model is that of round {restored.round}")
    trained = restored.state.model

    def outputs(images):
        found = network.predict(trained, images)
        return jax.nn.softmax(found.logits), network.embeddings(found)

    class_names = tuple(facts.get("class_names") or map(str, range(facts["num_classes"])))
    encode = _encoding(config.encoder, facts) if "encoded_images" in facts else None
    of_model = restored.round, network, trained, jax.jit(outputs)
    return Predictor(facts, class_names, *of_model, config.data.fit, encode)


def _check_weights(options: ConfigDict, facts: Mapping[str, Any]) -> None:
    weights = expanded(options.weights)
    if checksum(weights) != facts["weights"]:
        raise UserError(f"{weights} are not the weights that the model was trained with")


def _encoding(options: ConfigDict, facts: Mapping[str, Any]) -> Callable[[Any], np.ndarray]:
    """Makes `Predictor.encode`. It reads the weights with the first images, since features need no weights file."""

    @functools.cache
    def read() -> Callable[[jax.Array], jax.Array]:
        features_of = frozen(options)
        _check_weights(options, facts)
        return features_of

    def encode(images: Any) -> np.ndarray:
        images = KINDS[IMAGE].given(images, {"image_shape": facts["encoded_images"]})
        return in_batches(read(), images, ENCODED_TOGETHER)

    return encode


def in_batches(function: Callable[[jax.Array], Any], examples: np.ndarray, size: int) -> Any:
    """A function's results for all examples, computed in padded batches of this size: leaves [B, ...]."""
    found = []
    for start in range(0, len(examples), size):
        chunk = examples[start : start + size]
        padded = np.pad(chunk, [(0, size - len(chunk))] + [(0, 0)] * (chunk.ndim - 1))
        found.append(jax.device_get(function(jax.device_put(padded))))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(examples)], *found)


class Predicted(NamedTuple):
    """Predictions for the examples of a file or a folder."""

    prediction: Prediction  # for B examples
    files: list[str] | None  # of each example, relative to the folder; None if the input is not a folder
    true_labels: np.ndarray | None  # int32 [B], -1 if unknown; None if there are no labels
    of_images: bool = True
    class_names: tuple[str, ...] = ()
    in_training: int = 0  # how many of them are in the training set, if that can be read and there are labels

    @property
    def labelled(self) -> int:
        """How many images have a label."""
        return 0 if self.true_labels is None else int(np.sum(self.true_labels >= 0))

    @property
    def accuracy(self) -> float | None:
        """The share of labelled images that are classified correctly; None if no image has a label."""
        right = np.sum(self.prediction.labels == self.true_labels)
        return float(right / self.labelled) if self.labelled else None


def predict_file(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    npz: str = "",
    images: str = "",
    key: str = "",
    allow_code: bool = False,
    csv: str = "",
    checkpoint: str = NEWEST,
) -> Predicted:
    """Classifies the examples of an npz or csv file, or the images of a folder, and writes the predictions.

    Args:
        workdir: the folder of a run.
        out: the file to write: NAME.csv with a line for each example, or NAME.npz with `labels`, `classes`,
            `probabilities`, `embeddings` and `class_names`, and `files` and `true_labels` if these are known.
        npz: an npz file; labels are read from `labels`, `y` or `y_test`, depending on the name of the images' array.
        images: a folder, FOLDER/IMAGE, or with labels FOLDER/CLASS/IMAGE.
        key: name of the images' array in the npz file; by default `images`, `x`, `x_test`, `test_images`, or the only
            array.
        allow_code, checkpoint: see `load`.
        csv: a csv or parquet file, for models of tables and texts; labels are read from the label column of the
            training data.

    Raises:
        UserError: see `load`, `Predictor`, `read_arrays` and `load_pictures`; or a label is not a class of the model;
            or `out` has another suffix, is the file that is read, or cannot be written.
    """
    given = [place for place in (npz, images, csv) if place]
    if not (workdir and out and len(given) == 1):
        raise UserError("predict takes --workdir=RUN, one of --npz=FILE, --images=FOLDER, --csv=FILE, and --out=FILE")
    path = expanded(out)
    if path.suffix not in (".csv", ".npz") or path.resolve() == expanded(given[0]).resolve():
        raise UserError(f"--out={path} must end in .csv or .npz, and not be the file that is read")
    predictor = load(workdir, allow_code, checkpoint)
    if images and predictor.image_shape is None:
        raise UserError(f"--images is for images, but the model takes {predictor.kind.noun}")
    if csv:
        inputs, files, labels = _of_csv(predictor, csv)
    else:
        inputs, files, labels = _of_folder(predictor, images) if images else _of_npz(predictor, npz, key)
    of_images = predictor.are_images(inputs)
    found = Predicted(predictor(inputs), files, labels, of_images, predictor.class_names)
    if found.labelled:
        found = found._replace(in_training=num_in_training(inputs, predictor.facts, of_images, workdir))
    with writing(path):
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
    return found


def _as_csv(predictor: Predictor, found: Predicted) -> str:
    """A line for each example: its file or number, the predicted class, its probability, the true class if known."""
    prediction, labels, names = found.prediction, found.true_labels, predictor.class_names
    columns: dict[str, Any] = {
        "image" if found.of_images else "row": found.files or range(len(prediction.labels)),
        "class": prediction.classes,
        "probability": [f"{probability:.6g}" for probability in prediction.probabilities.max(axis=1)],
    }
    if labels is not None:
        columns["true class"] = [names[label] if label >= 0 else "" for label in labels]
    return as_csv(columns)


def _of_folder(predictor: Predictor, folder: str) -> tuple[np.ndarray, list[str], np.ndarray | None]:
    """A folder's images, their files, and their labels if the folder has a subfolder for each class, or a table."""
    names = predictor.class_names
    found = load_pictures(folder, predictor.facts, predictor.image_shape, predictor.fit, names)
    labels = None if found.labels is None else read_labels(found.labels, f"the labels of {folder}", names).codes
    return found.images, found.files, labels


def _of_csv(predictor: Predictor, path: str) -> tuple[Any, None, np.ndarray | None]:
    """The inputs of a csv or parquet file, and their labels if it has the label column of the training data."""
    facts, columns = predictor.facts, read_columns(path, "csv")
    of_text, of_labels = facts.get("text_column"), facts.get("label_column", "")
    if kind_name(facts) != "table" and not of_text:
        raise UserError(f"--csv is for models of csv files; this one takes its {predictor.kind.noun} by --npz")
    if of_text and of_text not in columns:
        raise UserError(f"{path} has no column {of_text!r}, that of the texts{known_are(of_text, columns)}")
    labels = None
    if of_labels in columns:
        labels = read_labels(values_of(columns[of_labels]), f"{path}: {of_labels}", predictor.class_names).codes
    return as_texts(columns[of_text]) if of_text else encode(columns, facts, path), None, labels


# Name of the images' array in a file -> name of its labels' array.
_LABELS_OF = {"images": "labels", "x": "y", **dict(zip(KEYS[::2], KEYS[1::2])),
              **dict(zip(MEDMNIST_KEYS[::2], MEDMNIST_KEYS[1::2]))}  # fmt: skip


def _of_npz(predictor: Predictor, path: str, key: str) -> tuple[np.ndarray, None, np.ndarray | None]:
    """An npz file's images, and their labels if it has any."""
    names = [key] if key else names_in(path, "npz")
    usual = [name for name in ("images", "x", "x_test", "test_images") if name in names]
    if not usual and len(names) != 1:
        raise UserError(f"{path} holds {', '.join(names)}; say which are the images: --key=NAME")
    key = (usual or names)[0]
    others = dict.fromkeys((_LABELS_OF.get(key, "labels"), *_LABELS_OF.values()))
    of_labels = next((name for name in others if name in names_in(path, "npz") and name != key), "")
    arrays = read_arrays(path, (key,), "npz", optional=(of_labels,))
    if not of_labels:
        return arrays[key], None, None
    labels = arrays[of_labels]
    return arrays[key], None, known_labels(path, of_labels, labels, arrays[key], predictor.class_names)
