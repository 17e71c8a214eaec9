"""Folders of clients, metadata.csv, names in other encodings, and 12 bits in 16: against NumPy and `datasets`."""

import itertools
import json
import os
import pathlib
import re
import struct
import zlib

import datasets
import numpy as np
import pytest
from PIL import Image

from fedjax_ssl import UserError, load, train
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.decoded import read_image
from fedjax_ssl.data.folder import load_pictures
from fedjax_ssl.data.unknown import set_apart
from fedjax_ssl.serve.export import export_run
from fedjax_ssl.serve.predictor import predict_file
from tests.helpers.partitions import data_config
from tests.helpers.stub import make_stub_config

pytestmark = pytest.mark.usefixtures("caches")


def read(path, source="folder", **fields):
    return load_dataset(data_config(source=source, path=str(path), **fields))


def save(path, value):
    """An image of 4 x 4 pixels of one grey level; returns its level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(path)
    return value


def levels(images):
    return images[:, 0, 0, 0].tolist()


def refuses(path, *words, **fields):
    with pytest.raises(UserError) as caught:
        read(path, **fields)
    assert all(str(word) in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


HOSPITALS = {"north": {"benign": 3, "malignant": 5}, "south": {"benign": 2, "unlabelled": 4}, "west": {"malignant": 1}}


def hospitals(root, swapped=False):
    """CLIENT/CLASS/IMAGE; the level of an image tells its client (10, 20, 30) and its number."""
    for place, (client, classes) in enumerate(HOSPITALS.items(), start=1):
        for label, number in classes.items():
            for row in range(number):
                folder = root / label / client if swapped else root / client / label
                level = 40 * place + 8 * (label == "malignant") + 20 * (label == "unlabelled") + row
                save(folder / f"{row}.png", level)
    return root


def test_folders_of_clients_hold_folders_of_classes(tmp_path, capsys):
    """Rows are sorted by class, client and name; every fifth image of a class is for testing."""
    data = read(hospitals(tmp_path / "scans"), partition="natural", client_column="first")
    assert data.class_names == ("benign", "malignant")
    assert levels(data.x_train) == [41, 42, 80, 81, 49, 50, 51, 52, 100, 101, 102, 103]
    assert data.y_train.tolist() == [0] * 4 + [1] * 4 + [-1] * 4
    assert data.owners.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert levels(data.x_test) == [40, 48, 128] and data.y_test.tolist() == [0, 1, 1]
    assert data.files[1] == ("north/benign/0.png", "north/malignant/0.png", "west/malignant/0.png")
    assert data.files[0][3] == "south/benign/1.png" and len(data.files[0]) == 12
    line = f"{tmp_path / 'scans'} has 3 clients, north, south, west, and the classes benign, malignant\n"
    assert capsys.readouterr().err == line


def test_a_folder_of_unlabelled_images_beside_clients_is_no_client(tmp_path):
    for folder in ("unlabelled/south", "unlabelled/east"):  # with clients inside, one of which has no other image
        save(hospitals(tmp_path) / folder / "a.png", 200)
    data = read(tmp_path, partition="natural", client_column="first")
    assert data.class_names == ("benign", "malignant") and data.y_train.tolist()[-2:] == [-1, -1]
    assert levels(data.x_train)[-1] == 200 and len(set(data.owners)) == 3


def test_train_test_and_unlabelled_may_have_clients(tmp_path):
    hospitals(tmp_path / "train")
    save(tmp_path / "unlabelled" / "south" / "a.png", 200)
    save(tmp_path / "test" / "benign" / "a.png", 210)
    data = read(tmp_path, partition="natural", client_column="first")
    assert len(data.x_train) == 16 and levels(data.x_train)[-1] == 200 and data.owners.tolist()[-1] == 1
    assert levels(data.x_test) == [210] and data.y_test.tolist() == [0]


@pytest.mark.parametrize("swapped", [False, True])
def test_which_level_of_a_full_grid_is_the_clients_must_be_said(tmp_path, swapped):
    """Every class has every client: both readings are possible, and none is taken silently."""
    for number, (client, label) in enumerate(itertools.product(("ann", "ben"), ("cat", "dog"))):
        for row in range(2):
            folder = tmp_path / label / client if swapped else tmp_path / client / label
            save(folder / f"{row}.png", 10 * number + row)
    refuses(tmp_path, "two levels of folders", "which are the clients?", "client_column=first or second")
    data = read(tmp_path, partition="natural", client_column="second" if swapped else "first")
    assert data.class_names == ("cat", "dog") and levels(data.x_test) == [0, 10]
    assert levels(data.x_train) == [1, 20, 21, 11, 30, 31] and data.owners.tolist() == [0, 1, 1, 0, 1, 1]


def test_folders_that_do_not_tell_what_they_are(tmp_path):
    """Patients of one class each, a folder around the classes, images beside folders, three levels."""
    for name in ("cat/ann", "cat/ben", "dog/cleo"):
        save(tmp_path / "patients" / name / "1.png", 1)
    refuses(tmp_path / "patients", "cat, dog and inside of these ann, ben, cleo", "client_column=first or second")
    data = read(hospitals(tmp_path / "all" / "scans"), client_column="first", partition="natural")
    assert data.class_names == ("benign", "malignant")
    save(tmp_path / "around" / "data" / "cat" / "1.png", 1)
    save(tmp_path / "all" / "scans" / "east" / "1.png", 1)
    refuses(tmp_path / "all" / "scans", "is in two folders", tmp_path / "all" / "scans" / "east" / "1.png")
    save(tmp_path / "deep" / "a" / "b" / "c" / "1.png", 1)
    refuses(tmp_path / "deep", tmp_path / "deep" / "a" / "b" / "c", "is not an image file")
    refuses(tmp_path / "around" / "data", "has one level of folders", client_column="first", partition="natural")
    refuses(tmp_path / "patients", "data.label_column=dx is for a metadata.csv", label_column="dx")


def test_metadata_as_hugging_face_has_it(tmp_path):
    """Rows in the table's order, a row without a label, clients; read by `datasets` for comparison."""
    rows = [("b.png", "bird", "2"), ("sub/a.png", "ant", "10"), ("c.png", "", "2")]
    rows += [(f"{n}.png", "ant" if n % 2 else "bird", "10") for n in range(10)]
    for number, (name, _, _) in enumerate(rows):
        save(tmp_path / name, 10 + number)
    table = "\n".join(",".join(row) for row in [("file_name", "label", "client"), *rows])
    (tmp_path / "metadata.csv").write_text(table)
    data = read(tmp_path, partition="natural")
    test_rows = [0, 1, 11, 12]  # of bird 0, 3, 5, 7, 9, 11 and ant 1, 4, 6, 8, 10, 12 the first and the sixth
    train_rows = [row for row in range(13) if row not in test_rows]
    reference = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train")
    by_level = {np.asarray(row["image"])[0, 0].item(): row for row in reference}
    assert levels(data.x_train) == [10 + row for row in train_rows] and levels(data.x_test) == [10, 11, 21, 22]
    for level, label, owner in zip(levels(data.x_train), data.y_train, data.owners):
        expected = by_level[level]
        assert (label < 0 and expected["label"] is None) or data.class_names[label] == expected["label"]
        assert ("2", "10")[owner] == str(expected["client"])
    assert data.files == tuple(tuple(rows[row][0] for row in own) for own in (train_rows, test_rows))
    renamed = table.replace("label", "dx").replace("client", "site")
    (tmp_path / "metadata.csv").write_text(renamed)
    again = read(tmp_path, partition="natural", label_column="dx", client_column="site")
    assert again.y_train.tolist() == data.y_train.tolist() and again.owners.tolist() == data.owners.tolist()
    refuses(tmp_path, "no column 'label' (data.label_column)", "dx")


def test_metadata_with_a_test_set(tmp_path):
    for number, name in enumerate(["train/a.png", "train/b.png", "test/a.png", "val/a.png"]):
        save(tmp_path / name, number)
    (tmp_path / "metadata.csv").write_text("file_name,label\ntest/a.png,y\ntrain/b.png,y\ntrain/a.png,x\nval/a.png,x\n")
    whole = read(tmp_path)
    assert levels(whole.x_train) == [1, 0] and levels(whole.x_test) == [2] and whole.y_test.tolist() == [1]
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label,client\nb.png,y,1\na.png,x,2\n")
    (tmp_path / "test" / "metadata.csv").write_text("file_name,label\na.png,y\n")
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(read(tmp_path), name), getattr(whole, name))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("file_name,label\na.png,x\nb.png,y\n", ["1 images are in no row of metadata.csv, such as", "c.png"]),
        ("file_name,label\na.png,x\nb.png,y\nc.png,x\nd.png,y\n", ["row 4 names", "d.png, which is no file in"]),
        ("file_name,label\na.png,x\nb.png,y\n../outside.png,x\n", ["row 3 names", "outside.png"]),
        ("file_name,label\na.png,x\nb.png,y\nc.png,x\na.png,y\n", ["1 images more than once"]),
        ("name,label\na.png,x\n", ["no column 'file_name'", "name, label"]),
        ("file_name,label,client\na.png,x,\nb.png,y,1\nc.png,,1\n" + "d{}.png,x,1\n" * 4, ["names no client"]),
    ],
)
def test_a_table_that_does_not_fit_its_images(tmp_path, table, words):
    for name in ("scans/a.png", "scans/b.png", "scans/c.png", "outside.png"):
        save(tmp_path / name, 1)
    for row in range(table.count("{}")):
        save(tmp_path / "scans" / f"d{row}.png", 1)
    (tmp_path / "scans" / "metadata.csv").write_text(table.format(*range(4)))
    refuses(tmp_path / "scans", *words)


def grey(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def deep_folder(root, arrays):
    """Images by class, the last of each for testing."""
    for number, values in enumerate(arrays):
        grey(root / ("test" if number < 2 else "train") / "ab"[number % 2] / f"{number}.png", values)
    return root


def in_order(data):
    """The images as `deep_folder` got them."""
    rows = dict(zip((*data.files[0], *data.files[1]), (*data.x_train, *data.x_test)))
    return [rows[name][..., 0] for name in sorted(rows, key=lambda name: int(pathlib.Path(name).stem))]


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_the_higher_8_of_the_bits_that_are_used(tmp_path, bits, capsys):
    """One image is of true 8 bits: it stays as it is."""
    rng = np.random.default_rng(bits)
    arrays = [rng.integers(0, 2**bits, (16, 16)).astype(np.uint16) for _ in range(6)]
    arrays[3][0, 0] = 2**bits - 1
    arrays.append(rng.integers(0, 256, (16, 16)).astype(np.uint8))
    data = read(deep_folder(tmp_path, arrays))
    for found, values in zip(in_order(data), arrays):
        np.testing.assert_array_equal(found, values >> (bits - 8 if values.dtype == np.uint16 else 0))
    assert data.details["bits"] == bits
    line = capsys.readouterr().err
    assert f"6 images of 16 bits per channel have values of {bits} bits" in line and "warning" not in line
    again = read(tmp_path)
    assert again.details == data.details and not capsys.readouterr().err  # from the cache
    assert isinstance(again.x_train, np.memmap)


@pytest.mark.parametrize("saturated", [False, True])
def test_dark_images_among_bright_ones_are_told(tmp_path, saturated, capsys):
    """One image of 16 bits among those of 12, or one such pixel in each: 15 grey levels are left of the others."""
    arrays = [np.full((16, 16), 2**12 - 1, np.uint16) for _ in range(6)]
    for values in arrays if saturated else arrays[2:3]:
        values[(0, 0) if saturated else ...] = 2**16 - 1
    read(deep_folder(tmp_path, arrays))
    line = capsys.readouterr().err
    assert "warning: 6 images" in line and f"16 grey levels are left of {5 + saturated} dark ones, such as " in line


def test_colours_of_16_bits_use_all_of_them_or_are_refused(tmp_path):
    """Pillow reads the higher byte of each; PNG by hand, since Pillow does not write it."""

    def png(path, values):
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
        parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
        chunk = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk))

    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 2**16, (4, 4, 3)) for name in ("train/a", "train/b", "test/a")}
    for name, own in values.items():
        own[0, 0] = 2**16 - 1
        png(tmp_path / "full" / name / "1.png", own)
        png(tmp_path / "half" / name / "1.png", own >> 4)
    data = read(tmp_path / "full")
    np.testing.assert_array_equal(data.x_train[0], values["train/a"] >> 8)
    refuses(tmp_path / "half", "1.png has 16 bits per channel, but the images need 12 of them", "8 bits per channel")


@pytest.mark.test_all
def test_a_run_keeps_depth_names_and_labels_for_predict(tmp_path, capsys):
    """Names with a byte that is not UTF-8, also of the whole folder; predict reads this folder as training did."""
    rng = np.random.default_rng(0)
    strange = os.fsdecode(b"caf\xe9")
    scans = tmp_path / strange
    for client in ("north", "south"):
        for label in (strange, "plain"):
            for row in range(5):
                folder = scans / client / label
                grey(folder / f"{row}.png", rng.integers(0, 2**12, (8, 8)).astype(np.uint16))
    grey(scans / "north" / strange / f"{strange}.png", np.full((8, 8), 2**12 - 1, np.uint16))
    fields = {"source": "folder", "path": str(scans), "client_column": "first", "labels": "clients"}
    settings = {f"data.{name}": value for name, value in fields.items()}
    config = make_stub_config(num_rounds=1, num_clients=2, clients_per_round=2, **settings)
    train(config, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "dataset.json").read_text())
    assert facts["name"] == "caf\\udce9" and facts["class_names"] == ["caf\\udce9", "plain"] and facts["bits"] == 12
    assert "north/caf\\udce9/caf\\udce9.png" in facts["files"]["test"]
    data = load_dataset(config.data)
    assert [len(part) for part in data.files] == [len(data.x_train), len(data.x_test)]
    found = predict_file(tmp_path / "run", tmp_path / "out.csv", images=str(scans), allow_code=True)
    lines = (tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 22 and any(line.startswith("north/caf\\udce9/caf\\udce9.png,") for line in lines)
    expected = load(tmp_path / "run", allow_code=True)(np.concatenate([data.x_train, data.x_test]))
    by_name = dict(zip((*data.files[0], *data.files[1]), expected.probabilities))
    np.testing.assert_allclose([by_name[name] for name in found.files], found.prediction.probabilities, atol=1e-6)
    by_name = dict(zip((*data.files[0], *data.files[1]), (*data.y_train, *data.y_test)))
    assert [by_name[name] for name in found.files] == found.true_labels.tolist()
    grey(tmp_path / "bright" / "1.png", np.full((8, 8), 2**14, np.uint16))
    with pytest.raises(UserError, match=r"1\.png .*pixels from 16384 to 16384; 12 bits are read"):
        predict_file(tmp_path / "run", tmp_path / "out.csv", images=str(tmp_path / "bright"), allow_code=True)
    export_run(tmp_path / "run", tmp_path / "m.safetensors", "safetensors", allow_code=True)
    assert b"north" not in (tmp_path / "m.safetensors").read_bytes()  # names of files stay in the run's folder


def test_names_of_files_stay_with_their_images_when_a_class_is_unknown(tmp_path):
    for place, label in enumerate("abc"):
        for row in range(10):
            save(tmp_path / label / f"{row}.png", 20 * place + row)
    data = set_apart(read(tmp_path), data_config(unknown_classes=(1,)))
    assert data.files[1] == ("a/0.png", "a/5.png", "c/0.png", "c/5.png") and levels(data.x_test) == [0, 5, 40, 45]


def test_predict_takes_a_table_without_labels_and_two_levels_that_tell(tmp_path):
    """The names of files are kept; folders of clients and of classes are told by the classes' names."""
    facts, shape = {"label_column": "dx", "bits": 0}, (4, 4, 1)
    for number, name in enumerate(["b.png", "a.png"]):
        save(tmp_path / "new" / name, number)
    (tmp_path / "new" / "metadata.csv").write_text("file_name,age\nb.png,40\na.png,50\n")
    found = load_pictures(str(tmp_path / "new"), facts, shape, "crop", ("x", "y"))
    assert found.files == ["b.png", "a.png"] and levels(found.images) == [0, 1] and found.labels is None
    (tmp_path / "new" / "metadata.csv").write_text("file_name,dx\nb.png,y\na.png,\n")
    assert load_pictures(str(tmp_path / "new"), facts, shape, "crop", ("x", "y")).labels == ["y", ""]
    for swapped in (False, True):
        folder = hospitals(tmp_path / str(swapped), swapped)
        found = load_pictures(str(folder), {}, shape, "crop", ("benign", "malignant"))
        for file, label in zip(found.files, found.labels):
            assert label == next((name for name in ("benign", "malignant") if name in file), "")
    save(tmp_path / "same" / "x" / "y" / "1.png", 1)
    with pytest.raises(UserError, match="both levels of folders have names of classes"):
        load_pictures(str(tmp_path / "same"), {}, shape, "crop", ("x", "y"))


def test_tiffs_that_are_turned_and_whose_white_is_0(tmp_path):
    """Pillow mixes up the rows of the first, and does not invert 16 bits, as it does 8."""
    grey, path = np.random.default_rng(0).integers(0, 2**16, (12, 6), np.uint16), tmp_path / "1.tif"
    for tags, expected in (({274: 6}, np.rot90(grey, -1)), ({262: 0}, 2**16 - 1 - grey)):
        Image.fromarray(grey).save(path, tiffinfo=tags)
        np.testing.assert_array_equal(read_image(path, "L", 0, "crop", 16)[..., 0], expected >> 8)


def test_a_tiff_of_planes_of_16_bits(tmp_path):
    planes, path = np.random.default_rng(0).integers(0, 2**16, (3, 4, 6), np.uint16), tmp_path / "1.tif"
    Image.fromarray(planes.reshape(12, 6)).save(path, tiffinfo={277: 1, 278: 4})  # three strips, for three colours
    content = path.read_bytes()
    for tag, old, new in ((257, 12, 4), (262, 1, 2), (277, 1, 3), (284, 1, 2)):
        start = re.escape(struct.pack("<H", tag)) + b"..\1\0\0\0"
        content = re.sub(b"(?<=%s)%c" % (start, old), b"%c" % new, content, count=1, flags=re.DOTALL)
    path.write_bytes(content)
    np.testing.assert_array_equal(read_image(path, "RGB", 0, "crop", 16), np.moveaxis(planes, 0, -1) >> 8)
