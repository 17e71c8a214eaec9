"""A folder of images by class: pixels as Pillow has them, the order of everything, and the errors one by one."""

import os
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import decoded, load_dataset
from tests.helpers.partitions import data_config
from tests.helpers.runs import files_of_at_most

pytestmark = pytest.mark.usefixtures("caches")


def load(path, **fields):
    return load_dataset(data_config(source="folder", path=str(path), **fields))


def pixels(seed, height=6, width=6, channels=(3,)):
    return np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def write_split(root):
    """Two classes, two training images and a test image each; names and classes are written out of their order."""
    names = ["train/dog/b.png", "train/cat/2.png", "test/dog/x.png"]
    names += ["train/cat/10.PNG", "train/dog/a.bmp", "test/cat/x.png"]
    written = {name: pixels(seed) for seed, name in enumerate(names)}
    for name, array in written.items():
        save(root / name, array)
    return written


def test_train_and_test_folders_pixel_by_pixel(tmp_path):
    written = write_split(tmp_path / "pets")
    (tmp_path / "pets" / "README.txt").write_text("beside the classes")
    (tmp_path / "pets" / "train" / "labels.csv").write_text("beside the classes")
    (tmp_path / "pets" / "train" / ".hidden").mkdir()
    (tmp_path / "pets" / "train" / "cat" / ".DS_Store").write_text("hidden")
    (tmp_path / "pets" / "train" / "cat" / "Thumbs.db").write_text("of a file manager")
    pets = load(tmp_path / "pets", flip=True)
    assert pets.x_train.dtype == pets.x_test.dtype == np.uint8
    assert pets.y_train.dtype == pets.y_test.dtype == np.int32
    names = ["train/cat/10.PNG", "train/cat/2.png", "train/dog/a.bmp", "train/dog/b.png"]
    np.testing.assert_array_equal(pets.x_train, [written[name] for name in names])
    np.testing.assert_array_equal(pets.x_test, [written["test/cat/x.png"], written["test/dog/x.png"]])
    assert pets.y_train.tolist() == [0, 0, 1, 1] and pets.y_test.tolist() == [0, 1]
    assert (pets.name, pets.num_classes, pets.class_names, pets.flip) == ("pets", 2, ("cat", "dog"), True)
    assert len(pets.mean) == len(pets.std) == 3
    assert load(tmp_path / "pets").flip is False


def test_images_without_a_label_are_beside_train_and_test(tmp_path):
    written = write_split(tmp_path)
    for seed, name in ((11, "b.png"), (10, "a.png")):
        written[name] = pixels(seed)
        save(tmp_path / "unlabelled" / name, written[name])
    data = load(tmp_path)
    assert data.y_train.tolist() == [0, 0, 1, 1, -1, -1] and data.y_test.tolist() == [0, 1]
    np.testing.assert_array_equal(data.x_train[4:], [written["a.png"], written["b.png"]])
    np.testing.assert_array_equal(data.x_test, [written["test/cat/x.png"], written["test/dog/x.png"]])
    assert data.class_names == ("cat", "dog")


def test_images_are_cut_square_in_the_middle_and_resized(tmp_path):
    for name, shape in {"train/a/wide": (10, 17), "train/b/high": (15, 8), "test/a/large": (40, 40)}.items():
        save(tmp_path / f"{name}.png", pixels(0, *shape))
    data = load(tmp_path, image_size=8)
    assert data.x_train.shape == (2, 8, 8, 3)
    for image, file, box in (
        (data.x_train[0], "train/a/wide.png", (3, 0, 13, 10)),
        (data.x_train[1], "train/b/high.png", (0, 3, 8, 11)),
        (data.x_test[0], "test/a/large.png", (0, 0, 40, 40)),
    ):
        expected = Image.open(tmp_path / file).crop(box).resize((8, 8), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(image, np.asarray(expected))
    stretched = load(tmp_path, image_size=8, fit="stretch")
    expected = Image.open(tmp_path / "train/a/wide.png").resize((8, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(stretched.x_train[0], np.asarray(expected))
    # Nothing is resized where nothing has to be, and antialiased where much is: a fine chessboard becomes grey.
    np.testing.assert_array_equal(data.x_train[1], pixels(0, 15, 8)[3:11])
    board = np.indices((40, 40)).sum(0) % 2 * 255
    save(tmp_path / "test" / "a" / "large.png", board.astype(np.uint8))
    assert np.abs(load(tmp_path, image_size=8).x_test.astype(int) - 127).max() < 16


def test_every_kind_of_pixel(tmp_path):
    grey = pixels(0, channels=())
    deep = grey.astype(np.uint16) * 256 + 77
    bits = Image.fromarray(grey).point(lambda value: 255 * (value > 127), mode="1")
    save(tmp_path / "train" / "a" / "1.png", grey)
    save(tmp_path / "train" / "a" / "2.png", deep)
    save(tmp_path / "train" / "a" / "3.tif", deep.astype(np.int32))
    save(tmp_path / "train" / "a" / "4.png", np.stack([grey, 255 - grey], -1))  # grey and alpha
    save(tmp_path / "train" / "b" / "1.gif", grey)
    bits.save(tmp_path / "train" / "b" / "2.png")
    save(tmp_path / "test" / "a" / "1.pgm", grey)
    data = load(tmp_path)
    assert data.x_train.shape == (6, 6, 6, 1)
    for row in range(5):
        np.testing.assert_array_equal(data.x_train[row, ..., 0], grey)
    np.testing.assert_array_equal(data.x_train[5, ..., 0], np.where(grey > 127, 255, 0))
    # One image in colour makes colours of all.
    colours = pixels(1)
    palette = Image.fromarray(colours).quantize(16)
    palette.save(tmp_path / "train" / "b" / "3.gif")
    save(tmp_path / "train" / "b" / "4.png", np.dstack([colours, grey]))  # with an alpha channel
    data = load(tmp_path)
    assert data.x_train.shape == (8, 6, 6, 3) and data.x_test.shape == (1, 6, 6, 3)
    np.testing.assert_array_equal(data.x_train[1], np.repeat(grey[..., np.newaxis], 3, -1))
    np.testing.assert_array_equal(data.x_train[6], np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(data.x_train[7], colours)


def test_photographs_are_turned_upright(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held on its side: show it a quarter turn clockwise
    image = pixels(0, 8, 16)
    save(tmp_path / "test" / "a" / "1.webp", image, lossless=True, exif=turned)
    save(tmp_path / "train" / "a" / "1.png", pixels(1, 16, 8))
    save(tmp_path / "train" / "b" / "1.jpg", pixels(2, 8, 16), exif=turned)
    data = load(tmp_path)
    np.testing.assert_array_equal(data.x_test[0], np.rot90(image, -1))
    assert data.x_train.shape == (2, 16, 8, 3)


def test_photographs_of_two_pictures_are_the_first(tmp_path):
    """As telephones write them: MPO in a file called .jpg."""
    for place, level in (("train/a", 100), ("train/b", 150), ("test/a", 200)):
        first = Image.fromarray(np.full((6, 6, 3), level, np.uint8))
        (tmp_path / place).mkdir(parents=True)
        first.save(tmp_path / place / "1.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (6, 6))])
    assert b"MPF" in (tmp_path / "test" / "a" / "1.jpg").read_bytes()
    assert np.abs(load(tmp_path).x_test.astype(int) - 200).max() < 3


def expect_line(path, parts, **options):
    with pytest.raises(UserError) as error:
        load(path, **options)
    message = str(error.value)
    assert "\n" not in message, message
    for part in parts:
        assert str(part) in message, message


def test_a_path_that_is_no_folder(tmp_path):
    expect_line("", ["data.path is empty", "--config.data.path=FOLDER"])
    expect_line(tmp_path / "absent", [tmp_path / "absent", "does not exist", "FOLDER/CLASS/IMAGE"])
    file = save(tmp_path / "image.png", pixels(0))
    expect_line(file, [file, "is a file, not a folder"])
    (tmp_path / "empty").mkdir()
    expect_line(tmp_path / "empty", ["no class's folder", "at least 2"])


# What is done to the split of two classes -> what the line names, as paths in it, and words.
BROKEN = {
    "no test folder": (lambda root: (root / "test").rename(root / "other"), ["test"], ["has a folder train but no"]),
    "empty class": (lambda root: (root / "train" / "cow").mkdir(), ["train/cow"], ["is empty; add images, or remove"]),
    "class in test alone": (
        lambda root: save(root / "test" / "cow" / "1.png", pixels(0)),
        ["test/cow", "train"],
        ["must have folders of classes", "'cow'"],
    ),
    "one class": (
        lambda root: [(root / split / "dog").rename(root / f"{split}_dog") for split in ("train", "test")],
        [],
        ["one class, cat; a classifier needs at least 2"],
    ),
    "an image without a class": (
        lambda root: save(root / "train" / "1.png", pixels(0)), ["train/1.png", "train/CLASS"], ["in no class's folder"]
    ),
    "no image by its name": (
        lambda root: (root / "train" / "cat" / "1.txt").write_text("x"), ["train/cat/1.txt"], [".jpeg", "remove it"]
    ),
    "an image cut short": (
        lambda root: (root / "test" / "cat" / "x.png").write_bytes((root / "test" / "cat" / "x.png").read_bytes()[:99]),
        ["test/cat/x.png"],
        ["cannot be read as an image (", "replace or remove it"],
    ),
    "a pipe": (lambda root: os.mkfifo(root / "test" / "cat" / "y.png"), ["test/cat/y.png"], ["is not an image file"]),
    "a format that Pillow gives to another program": (
        lambda root: Image.new("RGB", (6, 6)).save(root / "train" / "cat" / "1.png", "EPS"),
        ["train/cat/1.png"],
        ["cannot be read as an image of BMP, GIF, JPEG, PNG"],
    ),
    "a small file of very many pixels": (
        lambda root: Image.new("1", (10_000, 9_500)).save(root / "train" / "cat" / "1.png"),
        ["train/cat/1.png"],
        ["exceeds limit"],
    ),
    "numbers that are not pixels": (
        lambda root: save(root / "train" / "cat" / "1.tif", np.zeros((6, 6), np.float32)),
        ["train/cat/1.tif"],
        ["not whole numbers"],
    ),
    "other sizes": (
        lambda root: save(root / "test" / "dog" / "y.png", pixels(0, 6, 7)),
        ["test/dog/y.png", "train/cat/10.PNG"],
        ["7 x 6 pixels", "6 x 6", "--config.data.image_size=N"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_as_it_should_be(tmp_path, case):
    break_it, paths, words = BROKEN[case]
    write_split(tmp_path)
    break_it(tmp_path)
    expect_line(tmp_path, [*(tmp_path / path for path in paths), *words])


def test_a_changed_image_is_one_line_and_no_warning(tmp_path, recwarn):
    write_split(tmp_path)
    path = save(tmp_path / "train" / "cat" / "1.png", pixels(0))
    content = bytearray(path.read_bytes())
    # Of the pixels' checksum, which Pillow does not look at when it loads them.
    content[content.index(b"IEND") - 5] ^= 1
    path.write_bytes(content)
    with Image.open(path) as image:
        image.load()
    expect_line(tmp_path, [path, "checksum"])
    path.unlink()
    path = save(tmp_path / "train" / "cat" / "1.tif", pixels(0))
    content = path.read_bytes()
    path.write_bytes(content[: -len(content) // 3])
    expect_line(tmp_path, [path, "cannot be read"])
    assert not recwarn.list


def test_what_does_not_fit_into_the_cache_is_refused(tmp_path, monkeypatch):
    write_split(tmp_path)
    expect_line(tmp_path, [tmp_path, "6 images", "180.0 GB", "50 GB", "smaller data.image_size"], image_size=10**5)
    monkeypatch.setattr(decoded, "MOST_CACHE_BYTES", 6 * 6 * 6 * 3 - 1)
    expect_line(tmp_path, ["6 x 6 pixels", "data.image_size"])
    monkeypatch.setattr(decoded, "private_cache", lambda name, most: None)  # then the memory must hold them
    expected = load(tmp_path).x_train
    assert expected.shape == (4, 6, 6, 3) and not isinstance(expected, np.memmap)
    monkeypatch.setattr(decoded, "MAX_BYTES", 6 * 6 * 6 * 3 - 1)
    expect_line(tmp_path, ["6 x 6 pixels", "data.image_size"])


def test_images_are_decoded_once(tmp_path, monkeypatch):
    write_split(tmp_path)
    told = []
    config = data_config(source="folder", path=str(tmp_path), image_size=4)
    first = load_dataset(config, told.append)
    assert [line.rpartition(": ")[2] for line in told] == ["6 of 6"]
    before = os.stat(first.x_train.filename)
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "read_image", None)
        again = load(tmp_path, image_size=4)
    assert isinstance(again.x_train, np.memmap)
    after = os.stat(again.x_train.filename)  # a run that has it mapped must not see a change
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    monkeypatch.setattr(decoded, "private_cache", lambda name, most: None)
    np.testing.assert_array_equal(again.x_train, load(tmp_path, image_size=4).x_train)


def flip(file):
    content = bytearray(file.read_bytes())
    content[300] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a flipped bit": lambda file, other: flip(file),
    "another file": lambda file, other: file.write_bytes(other.read_bytes()),
    "a cut": lambda file, other: os.truncate(file, 300),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_of_the_cache_is_decoded_anew(tmp_path, damage, capsys):
    """Also one of another folder with images of the same size."""
    write_split(tmp_path / "one")
    for number, name in enumerate(written := write_split(tmp_path / "two")):
        save(tmp_path / "two" / name, pixels(50 + number))
    right = load(tmp_path / "one")
    before = right.x_train.tolist(), right.x_test.tolist()
    damage(*(pathlib.Path(load(tmp_path / name).x_train.filename) for name in ("one", "two")))
    capsys.readouterr()
    found = load(tmp_path / "one")
    assert (found.x_train.tolist(), found.x_test.tolist()) == before and len(written) == 6
    assert re.fullmatch(r"warning: \S+\.npy: .*; the images of \S+one are decoded again\n", capsys.readouterr().err)
    load(tmp_path / "one")
    assert capsys.readouterr().err == ""


def test_a_changed_image_is_decoded_anew(tmp_path):
    write_split(tmp_path)
    before = np.array(load(tmp_path).x_train)
    save(tmp_path / "train" / "cat" / "2.png", 255 - before[1])
    os.utime(tmp_path / "train" / "cat" / "2.png", (1, 1))
    np.testing.assert_array_equal(load(tmp_path).x_train[1], 255 - before[1])


def test_a_full_disk_is_one_line(tmp_path):
    write_split(tmp_path)
    with files_of_at_most(200):
        expect_line(tmp_path, ["File too large", "make room", "XDG_CACHE_HOME"])
    assert load(tmp_path).x_train.shape == (4, 6, 6, 3)
