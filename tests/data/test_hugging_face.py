"""Data sets of Hugging Face's `datasets` on the disk: pixels, labels, clients, and what is wrong with them."""

import io
import os
import shutil

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import decoded, load_dataset
from tests.helpers.partitions import data_config

pytestmark = pytest.mark.usefixtures("caches")

FEATURES = datasets.Features(
    {"img": datasets.Image(), "label": datasets.ClassLabel(names=["tree", "bird"]), "writer": datasets.Value("string")}
)


def pixels(seed):
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)


def png(seed):
    file = io.BytesIO()
    Image.fromarray(pixels(seed)).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


def split_of(first, labels, writers):
    rows = {"img": [png(first + row) for row in range(len(labels))], "label": labels, "writer": writers}
    return datasets.Dataset.from_dict(rows, features=FEATURES)


def load(path, **fields):
    return load_dataset(data_config(source="datasets", path=str(path), **fields))


def both():
    train = split_of(0, [1, 0, -1, 1, 0], ["2", "10", "2", "9", "10"])
    return datasets.DatasetDict(train=train, test=split_of(50, [0, -1, 1], ["a", "b", "c"]))


def test_a_saved_data_set_and_its_parquet_files_are_the_same_and_decoded_once(tmp_path, monkeypatch):
    both().save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    for name, split in both().items():
        split.to_parquet(tmp_path / "files" / f"{name}-00000-of-00001.parquet")
    for path in (tmp_path / "saved", tmp_path / "files"):
        found = load(path, client_column="writer", partition="natural", flip=True)
        np.testing.assert_array_equal(found.x_train, np.stack([pixels(row) for row in range(5)]))
        np.testing.assert_array_equal(found.x_test, np.stack([pixels(50), pixels(52)]))  # one has no label
        assert found.y_train.tolist() == [1, 0, -1, 1, 0] and found.y_test.tolist() == [0, 1]
        assert found.class_names == ("tree", "bird") and found.num_classes == 2 and found.flip
        assert found.owners.tolist() == [0, 2, 0, 1, 2]  # the clients 2, 9, 10
        assert isinstance(found.x_train, np.memmap) and found.name == path.name
    monkeypatch.setattr(decoded, "read_image", None)
    assert load(tmp_path / "saved").x_train.shape == (5, 6, 5, 3)


def test_images_are_known_by_their_files_whatever_is_in_memory(tmp_path, monkeypatch):
    """`datasets` may be told by the environment to read small files whole; a format that was saved is not kept."""
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 10**9)
    for first in (0, 100):
        split = split_of(first, [0, 1] * 5, ["a"] * 10)
        split.set_format(columns=["img"])
        split.save_to_disk(tmp_path / str(first))
        np.testing.assert_array_equal(load(tmp_path / str(first)).x_train[0], pixels(first + 2))


@pytest.mark.parametrize("relative", [True, False])
def test_parquet_files_may_hold_paths(tmp_path, relative):
    """As `Dataset.to_parquet` writes a data set that was made from paths, and pandas a column of dicts."""
    folder, labels = tmp_path / "scans", [0, 1] * 5
    folder.mkdir()
    for row in range(10):
        Image.fromarray(pixels(row)).save(folder / f"{row}.png")
    paths = [f"scans/{row}.png" if relative else str(folder / f"{row}.png") for row in range(10)]
    file = tmp_path / "one.parquet"
    if relative:
        pandas.DataFrame({"img": [{"bytes": None, "path": path} for path in paths], "label": labels}).to_parquet(file)
    else:
        features = datasets.Features({name: FEATURES[name] for name in ("img", "label")})
        datasets.Dataset.from_dict({"img": paths, "label": labels}, features=features).to_parquet(file)
    found = load(file, label_column="label")
    rows = [2, 3, 4, 5, 6, 7, 8, 9]  # every fifth of a class, from the first on, is for testing
    np.testing.assert_array_equal(found.x_train, np.stack([pixels(row) for row in rows]))
    assert found.files == (tuple(paths[row] for row in rows), (paths[0], paths[1]))
    shutil.copytree(folder, tmp_path / "whole" / "scans")
    shutil.copy(file, tmp_path / "whole" / "train.parquet")
    np.testing.assert_array_equal(load(tmp_path / "whole", label_column="label").x_test, found.x_test)
    texts = pandas.DataFrame({"file": paths, "mask": ["none"] * 10, "label": labels})  # names in place of structs
    texts.to_parquet(tmp_path / "texts.parquet")
    again = load(tmp_path / "texts.parquet", label_column="label")
    np.testing.assert_array_equal(again.x_train, found.x_train)
    assert again.files == found.files
    texts.assign(mask=paths).to_parquet(tmp_path / "texts.parquet")
    with pytest.raises(UserError, match="has the columns of images file, mask, but needs one"):
        load(tmp_path / "texts.parquet", label_column="label")
    Image.fromarray(pixels(99)).save(folder / "4.png")
    os.utime(folder / "4.png", (1, 1))
    np.testing.assert_array_equal(load(file, label_column="label").x_train[2], pixels(99))  # not from the cache
    (folder / "7.png").unlink()
    with pytest.raises(UserError, match=r"row 8 of train of .*7\.png, which is no file here"):
        load(file, label_column="label")


def test_files_of_a_validation_set_are_neither_for_training_nor_for_testing(tmp_path, capsys):
    for first, name in ((0, "train-0"), (20, "eval-0"), (40, "test-0"), (60, "validation-0")):
        split_of(first, [0, 1], ["a", "b"]).to_parquet(tmp_path / f"{name}.parquet")
    for _ in range(2):
        found = load(tmp_path)
        np.testing.assert_array_equal(found.x_train, [pixels(0), pixels(1)])
        np.testing.assert_array_equal(found.x_test, [pixels(40), pixels(41)])
        assert "2 parquet files are neither for training nor for testing" in capsys.readouterr().err
        for name in ("train", "test"):  # folders of the splits in place of names
            if not (tmp_path / name).exists():
                (tmp_path / name).mkdir()
                (tmp_path / f"{name}-0.parquet").rename(tmp_path / name / "0.parquet")
    (tmp_path / "test" / "0.parquet").unlink()
    split_of(0, [0, 1] * 5, ["a", "b"] * 5).to_parquet(tmp_path / "train" / "0.parquet")
    np.testing.assert_array_equal(load(tmp_path).x_test, [pixels(0), pixels(1)])  # every fifth of each class
    named = {"Train": split_of(0, [0, 1], ["a", "b"]), "Test": split_of(40, [0, 1], ["a", "b"])}
    datasets.DatasetDict({**named, "eval": split_of(20, [0, 1], ["a", "b"])}).save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    np.testing.assert_array_equal(load(tmp_path / "saved").x_test, [pixels(40), pixels(41)])
    assert "saved: eval is neither for training nor for testing, and is left out" in capsys.readouterr().err
    split_of(0, [0, 1], ["a", "b"]).to_parquet(tmp_path / "train-test.PARQUET")
    with pytest.raises(UserError, match=r"train-test\.PARQUET has the words of test and train"):
        load(tmp_path)


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path):
    both().save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved" / "train").glob("*.arrow"))
    arrow.unlink()
    os.mkfifo(arrow)
    with pytest.raises(UserError, match="is not a file; remove it"):
        load(tmp_path / "saved")


def test_what_is_wrong_is_one_line(tmp_path):
    def says(path, *words, **fields):
        with pytest.raises(UserError) as caught:
            load(path, **fields)
        assert all(str(word) in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value

    both().save_to_disk(tmp_path / "saved")
    says("", "data.path is empty")
    says(tmp_path / "none", "does not exist")
    says("x" * 5000, "cannot be read: File name too long")
    split_of(0, [0, 1] * 5, ["a", None] * 5).save_to_disk(tmp_path / "no_client")
    says(tmp_path / "no_client", "'' in row 2 names no client", client_column="writer")
    says(tmp_path, "cannot be read as a folder of save_to_disk, or parquet files")
    says(tmp_path / "saved", "no column 'speaker' (data.client_column)", client_column="speaker")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and nothing more")
    says(tmp_path / "cut.parquet", "cannot be read as")
    both()["train"].remove_columns("img").to_parquet(tmp_path / "plain.parquet")
    says(tmp_path / "plain.parquet", "no column of images", "writer")
    both()["train"].map(lambda row: row, remove_columns="label").to_parquet(tmp_path / "unknown.parquet")
    says(tmp_path / "unknown.parquet", "data.label_column is empty")
    arrow = next((tmp_path / "saved" / "train").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[: arrow.stat().st_size // 2])
    says(tmp_path / "saved", "saved")
    broken = split_of(0, [0, 1] * 5, ["a"] * 10).to_dict()
    broken["img"][3] = {"bytes": b"no image", "path": None}
    datasets.Dataset.from_dict(broken, features=FEATURES).save_to_disk(tmp_path / "broken")
    says(tmp_path / "broken", "row 4 of train of", "cannot be read as an image")
