"""Data sources: the embedded digits, npz and npy files and their errors one by one."""

import pickle
import zipfile

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.sources import channel_statistics, feature_statistics
from tests.helpers import partitions


def data_config(source="npz", path="", **fields):
    return partitions.data_config(source=source, path=str(path), **fields)


def small_arrays(height=5, width=6, channels=(3,), num_train=9, num_test=4):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (num_train, height, width, *channels), np.uint8),
        "y_train": np.arange(num_train) % 3,
        "x_test": rng.integers(0, 256, (num_test, height, width, *channels), np.uint8),
        "y_test": np.arange(num_test) % 3,
    }


def write(folder, **changes):
    """Writes the small npz with some arrays replaced, or left out where None."""
    arrays = {key: value for key, value in (small_arrays() | changes).items() if value is not None}
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def test_digits():
    digits = load_dataset(data_config("digits"))
    assert digits.x_train.shape == (1437, 8, 8, 1) and digits.x_test.shape == (360, 8, 8, 1)
    assert digits.x_train.dtype == np.uint8 and digits.y_train.dtype == digits.y_test.dtype == np.int32
    assert digits.num_classes == 10 and digits.name == "digits" and not digits.flip
    assert digits.class_names == tuple("0123456789")
    # 0 .. 16 became 0 .. 255, all values distinct.
    values = np.unique(digits.x_train)
    assert len(values) == 17 and values[0] == 0 and values[-1] == 255
    # Stratified to within one example of a fifth of every class.
    total = np.bincount(digits.y_train) + np.bincount(digits.y_test)
    assert np.abs(np.bincount(digits.y_test) - total / 5).max() < 1
    # A split: the multiset of all images is that of scikit-learn.
    original = load_digits()
    ours = np.concatenate([digits.x_train, digits.x_test]).reshape(1797, 64).astype(float) / 255 * 16
    labels = np.concatenate([digits.y_train, digits.y_test])
    key = lambda images, labels: sorted(map(tuple, np.column_stack([np.round(images), labels]).astype(int)))  # noqa: E731
    assert key(ours, labels) == key(original.data, original.target)
    normalised = (digits.x_train / 255 - digits.mean) / digits.std
    assert abs(normalised.mean()) < 1e-12 and abs(normalised.std() - 1) < 1e-12
    raw = load_dataset(data_config("digits", normalisation="none"))
    assert raw.mean == (0.0,) and raw.std == (1.0,)
    np.testing.assert_array_equal(raw.x_train, digits.x_train)


def test_statistics_of_a_constant_channel_divide_by_one():
    images = np.random.default_rng(0).integers(0, 256, (3000, 4, 4, 3), np.uint8)
    images[..., 1] = 77
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(np.array(std)[[0, 2]], (images / 255).std((0, 1, 2))[[0, 2]], rtol=1e-12)
    assert std[1] == 1.0


def test_statistics_of_features_are_over_all_of_their_views(tmp_path):
    views = np.random.default_rng(0).normal(size=(50, 3, 4)).astype(np.float32)
    views[:, :, 1] = 7.0  # constant
    views[:, 0, 2] *= 1e-4  # almost constant in the plain views, as many of an encoder's features are on MNIST
    labels = np.arange(50) % 2
    np.savez(tmp_path / "f.npz", x_train=views, y_train=labels, x_test=views[:8, 0], y_test=labels[:8])
    dataset, rows = load_dataset(data_config(path=tmp_path / "f.npz")), views.reshape(-1, 4).astype(np.float64)
    np.testing.assert_allclose(dataset.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(np.array(dataset.std)[[0, 2, 3]], rows.std(axis=0)[[0, 2, 3]], rtol=1e-12)
    assert dataset.std[1] == 1.0
    mean, together = feature_statistics(views, of_one_unit=True)
    np.testing.assert_allclose(together, [np.sqrt(rows.var(axis=0).mean())] * 4, rtol=1e-12)
    assert mean == dataset.mean and np.square((rows - mean) / together).sum(axis=1).mean() == pytest.approx(4)
    assert feature_statistics(np.ones((3, 2, 4), np.float32), of_one_unit=True)[1] == (1.0,) * 4


@pytest.mark.parametrize(("channels", "label_dtype"), [((), np.uint8), ((3,), np.int64)])
def test_npz_round_trip(tmp_path, channels, label_dtype):
    arrays = small_arrays(channels=channels)
    arrays = {key: v.astype(label_dtype) if key[0] == "y" else v for key, v in arrays.items()}
    np.savez(tmp_path / "mine.npz", **arrays)
    dataset = load_dataset(data_config(path=tmp_path / "mine.npz", flip=True))
    count = channels[0] if channels else 1
    for name, given in arrays.items():
        found = getattr(dataset, name)
        assert found.dtype == (np.uint8 if name[0] == "x" else np.int32)
        np.testing.assert_array_equal(found, given.reshape(*given.shape[:3], count) if name[0] == "x" else given)
    assert dataset.num_classes == 3 and dataset.flip is True and dataset.name == "mine"
    assert dataset.class_names == ("0", "1", "2") and len(dataset.mean) == len(dataset.std) == count
    assert load_dataset(data_config(path=tmp_path / "mine.npz")).flip is False


def write_medmnist(folder, channels=(), **changes):
    """The small arrays as MedMNIST lays them out: grey images have no channel axis, labels a second one of one."""
    small = small_arrays(channels=channels)
    names = {"x_train": "train_images", "y_train": "train_labels", "x_test": "test_images", "y_test": "test_labels"}
    arrays = {
        name: small[key] if key[0] == "x" else small[key].astype(np.uint8)[:, None] for key, name in names.items()
    }
    arrays |= {"val_images": 255 - small["x_train"], "val_labels": np.full((9, 1), 7, np.uint8)}
    arrays = {key: value for key, value in (arrays | changes).items() if value is not None}
    np.savez_compressed(folder / "bloodmnist.npz", **arrays)
    return folder / "bloodmnist.npz", small


@pytest.mark.parametrize("channels", [(), (3,)])
def test_a_file_of_medmnist_without_its_validation_images(tmp_path, channels):
    path, small = write_medmnist(tmp_path, channels)
    for config in (data_config(path=path), data_config("medmnist/bloodmnist", tmp_path)):
        dataset = load_dataset(config)
        assert dataset.num_classes == 3 and dataset.name == "bloodmnist" and len(dataset.mean) == (channels or (1,))[0]
        for name, expected in small.items():
            np.testing.assert_array_equal(np.reshape(getattr(dataset, name), expected.shape), expected)


def test_bad_files_of_medmnist(tmp_path):
    path, _ = write_medmnist(tmp_path, test_labels=None)
    expect_line(path, ["no test_labels", "must hold train_images, train_labels, test_images, test_labels"])
    with pytest.raises(UserError, match=r"pathmnist\.npz does not exist; download it from medmnist"):
        load_dataset(data_config("medmnist/pathmnist", tmp_path))


ZEROS = np.zeros
BAD_ARRAYS = {
    "missing keys": ({"x_train": None, "y_train": None}, ["no x_train, y_train", "holds x_test, y_test"]),
    "float images": ({"x_train": ZEROS((9, 5, 6, 3), np.float32)}, ["x_train is float32", "images are uint8"]),
    "channels": ({"x_train": ZEROS((9, 5, 6, 4), np.uint8)}, ["(9, 5, 6, 4)", "C = 1 or 3"]),
    "shapes differ": ({"x_test": ZEROS((4, 6, 6, 3), np.uint8)}, ["[5, 6, 3]", "[6, 6, 3]"]),
    "images and features": ({"x_test": ZEROS((4, 5), np.float32)}, ["x_train has images", "x_test features"]),
    "lengths differ": ({"y_train": ZEROS(8, int)}, ["y_train is int64 (8,)", "9 labels, one for each"]),
    "no pixels": ({"x_train": ZEROS((9, 0, 6, 3), np.uint8)}, ["x_train is uint8 (9, 0, 6, 3)"]),
    "signals of 32 steps": (
        {"x_train": ZEROS((9, 32, 2), np.float32), "x_test": ZEROS((4, 32, 2), np.float32)},
        ["x_test has 32 views of each example", "x_test[:, 0]", "save 32 x 2 numbers as [N, 64]"],
    ),
    "pickled objects": ({"y_train": np.array([{}] * 9, dtype=object)}, ["it holds Python objects"]),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_npz_with_bad_arrays(tmp_path, case):
    changes, parts = BAD_ARRAYS[case]
    expect_line(write(tmp_path, **changes), parts)


def expect_line(path, parts, source="npz", given=None):
    with pytest.raises(UserError) as error:
        load_dataset(data_config(source, given or path))
    message = str(error.value)
    assert "\n" not in message and str(path) in message and "pickle" not in message.replace(str(path), "")
    for part in parts:
        assert part in message


def test_npz_file_that_is_none(tmp_path):
    expect_line("", ["data.path is empty", "--config.data.path=FILE"])
    expect_line(tmp_path / "absent.npz", ["does not exist"])
    expect_line("x" * 150 + "/" + "y" * 5000, ["cannot be read"])
    expect_line(tmp_path, ["is a folder"])
    for content in (b"not an archive\nat all", b"", pickle.dumps({"x_train": 1})):
        (tmp_path / "file.npz").write_bytes(content)
        expect_line(tmp_path / "file.npz", ["cannot be read as an npz file", "np.savez"])


def test_npz_that_is_cut_or_damaged(tmp_path):
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    expect_line(path, ["cannot be read as an npz file"])
    position = content.index(small_arrays()["x_train"].tobytes())
    path.write_bytes(content[:position] + bytes([content[position] ^ 255]) + content[position + 1 :])
    expect_line(path, ["cannot be read as an npz file (Bad CRC", "x_train"])
    path = write(tmp_path, x_train=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", b"GIF89a and so on")
    expect_line(path, ["x_train is |S16"])


def save(folder, **changes):
    """The small arrays as npy files; bytes are written as they are."""
    for key, value in (small_arrays() | changes).items():
        if isinstance(value, bytes):
            (folder / f"{key}.npy").write_bytes(value)
        else:
            np.save(folder / f"{key}.npy", value)
    return folder


def test_npy_files_are_mapped_and_equal_an_npz(tmp_path):
    (tmp_path / "data").mkdir()
    arrays = {"y_train": np.array([0, 1, 2, -1, 0, 1, 2, 0, 1], np.int8)}
    one = load_dataset(data_config("npz", write(tmp_path, **arrays), flip=True))
    other = load_dataset(data_config("npy", save(tmp_path / "data", **arrays), flip=True))
    for name, value in one._asdict().items():
        np.testing.assert_array_equal(getattr(other, name), value)
    assert isinstance(other.x_train, np.memmap) and other.x_train.filename == tmp_path / "data" / "x_train.npy"
    assert not isinstance(other.y_train, np.memmap)


def test_npy_folder_that_is_none(tmp_path):
    expect_line(tmp_path / "absent", ["does not exist", "x_train.npy"], "npy")
    expect_line(write(tmp_path), ["is a file, not a folder"], "npy")
    images = small_arrays()["x_train"]
    for value in (b"", b"GIF89a and so on", pickle.dumps([1]), np.array([{}] * 9, dtype=object)):
        expect_line(save(tmp_path, x_train=value) / "x_train.npy", ["cannot be read"], "npy", tmp_path)
    whole = (save(tmp_path) / "x_train.npy").read_bytes()
    expect_line(save(tmp_path, x_train=whole[:-50]) / "x_train.npy", ["cannot be read"], "npy", tmp_path)
    expect_line(save(tmp_path, x_train=images[:8]), ["y_train is int64 (9,)", "8 labels, one for each"], "npy")
    (tmp_path / "x_train.npy").unlink()
    expect_line(tmp_path / "x_train.npy", ["does not exist"], "npy", tmp_path)


def test_a_home_folder_that_nobody_has(tmp_path, monkeypatch):
    """It was a traceback; one that is known is resolved."""
    expect_line("~nosuchuser/x.npz", ["'~nosuchuser/x.npz' begins with a home folder that is not known"])
    monkeypatch.setenv("HOME", str(write(tmp_path).parent))
    assert len(load_dataset(data_config(path="~/data.npz")).x_train)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"image_size": 32}, "image_size=32 is for data.source=folder or datasets; npz does not read it"),
        ({"client_column": "who"}, "client_column=who is for data.source=csv or datasets or folder; npz"),
    ],
)
def test_a_field_that_the_source_would_ignore(tmp_path, fields, line):
    with pytest.raises(UserError, match=line):
        load_dataset(data_config(path=write(tmp_path), **fields))
