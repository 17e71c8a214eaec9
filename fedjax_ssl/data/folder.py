"""Loads a user's data set from a folder of images, and checks it.

    FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE; training images without a label in FOLDER/unlabelled/IMAGE
    FOLDER/CLASS/IMAGE, without a test set, see `labels.divide`
    CLIENT/CLASS/IMAGE or CLASS/CLIENT/IMAGE in place of CLASS/IMAGE, and FOLDER/unlabelled/CLIENT/IMAGE;
        `data.client_column` says which of both levels is the clients, or `data.domain_column` which is the domains
    FOLDER/metadata.csv, or one in FOLDER/train and one in FOLDER/test, as Hugging Face's imagefolder has them: the
        columns file_name, label and client

Rows are in the order of metadata.csv. Without it they are sorted by class, client and file name, and those without a
label are last. Names are compared by code points ('B' comes before 'a', and '10' before '2'), so the order is the same
on every machine.
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, printable, say
from fedjax_ssl.data.arrays import MAX_BYTES, existing_path
from fedjax_ssl.data.decoded import check_size, decode_once, depth_of, read_image
from fedjax_ssl.data.labels import divide, has_no_label, read_labels
from fedjax_ssl.data.owners import read_names, read_owners
from fedjax_ssl.data.tables import check_columns, read_columns, values_of
from fedjax_ssl.data.values import in_order, same

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
METADATA = "metadata.csv"
FIRST, SECOND = "first", "second"  # which level of folders is the clients: values of `data.client_column`

_OF_FILE_MANAGERS = ("Thumbs.db", "desktop.ini")  # written by file managers


class Image(NamedTuple):
    """An image file; names have no byte that is not UTF-8."""

    file: pathlib.Path
    label: str  # '': it has none
    client: str = ""  # '': none is named, as of the domain
    domain: str = ""


def load_folder(config: Any, tell: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Loads a data set from a folder of images, whose hidden files are ignored, by the fields of the `data` section.

    Images become RGB, or grey if all of them are grey, with 8 bits per channel, see `depth_of`, and without
    transparency. They are rotated according to their EXIF orientation. Of animations the first picture is used.
    `tell` is called with a line about the progress of decoding. The result has the fields of `Dataset` except the name,
    `mean`, `std` and `flip`; -1 means no label.

    Raises a UserError if the folder is missing, has another layout, or is larger than the cache; a file is not an
    image; or sizes differ and `image_size` is 0.
    """
    root = existing_path(config.path, "data.path", "folder", "a folder of images by class, FOLDER/CLASS/IMAGE")
    if _tables(root):
        column = config.label_column or "label"
        train, test = _listed(root, column, config.client_column, config.domain_column)
        declared, where = None, f"{root / METADATA}: {column}"
    else:
        if config.label_column:
            raise UserError(f"data.label_column={config.label_column} is for a {METADATA}, which {root} does not have")
        train, test = _in_folders(root, config.client_column, config.domain_column)
        declared, where = in_order({same(image.label) for image in train if image.label}), f"the folders of {root}"
        if len(declared) < 2:
            has = f"images of one class, {declared[0]}" if declared else "no class's folder"
            raise UserError(f"{root} has {has}; a classifier needs at least 2 classes, {root}/CLASS/IMAGE")
    labels, names = read_labels([image.label for image in train], where, declared)
    clients, rows = [image.client for image in train], np.arange(len(train))
    if test is None:
        rows, of_test = divide(labels, names, str(root))
        train, test, y_test = [train[row] for row in rows], [train[row] for row in of_test], labels[of_test]
    else:
        y_test = read_labels([image.label for image in test], where, names).codes
        test, y_test = [image for image, label in zip(test, y_test) if label >= 0], y_test[y_test >= 0]
    domains = tuple(
        read_names([image.domain for image in part], range(len(part)), f"{where}, domains", "domain")
        for part in (train, test)
        if config.domain_column
    )
    files = [image.file for image in (*train, *test)]
    images, bits, row_sums = decode_once(files, known_files(files, root), root, config.image_size, config.fit, tell)
    return {
        "x_train": images[: len(train)],
        "y_train": labels[rows],
        "x_test": images[len(train) :],
        "y_test": y_test,
        "num_classes": len(names),
        "class_names": names,
        "owners": read_owners(clients, rows, f"{where}, clients") if any(clients) else None,
        "domains": domains,
        "row_sums": row_sums,
        "files": tuple(tuple(name_in(root, image.file) for image in part) for part in (train, test)),
        "details": {**({"bits": bits} if bits else {}), **({"label_column": column} if _tables(root) else {})},
    }


def known_files(files: Sequence[pathlib.Path], root: pathlib.Path) -> str:
    """What identifies files: their names, sizes and times."""
    lines = [str(root.resolve())]
    for file in files:
        found = file.stat()
        lines.append(f"{os.path.relpath(file, root)} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}")
    return "\n".join(lines)


def name_in(root: pathlib.Path, file: pathlib.Path) -> str:
    """A file's path inside a folder, for people and for text files."""
    return printable(file.relative_to(root).as_posix())


class Pictures(NamedTuple):
    """Images of a folder as inputs for a trained model."""

    images: np.ndarray  # uint8 [B, H, W, C]
    files: list[str]  # path of each image, relative to the folder
    labels: list[str] | None  # each image's label, '' if it has none; None if no image has any


def load_pictures(
    path: str, facts: Mapping[str, Any], image_shape: tuple[int, int, int], fit: str, classes: Sequence[str]
) -> Pictures:
    """Reads FOLDER/IMAGE, or a folder with labels as `load_folder` has it, as inputs for a model.

    Args:
        path, fit: the folder, and see `read_image`.
        facts: of the training data.
        image_shape: (height, width, channels) of the model's inputs. If it is square, images are resized as in
            `load_folder`; otherwise they must have this size. With one channel they become grey.
        classes: names of the model's classes. Of two levels of folders, the one that has them is the labels.

    Raises:
        UserError: the folder is missing, empty or too large for memory, or holds something else; or both levels of
            folders have names of classes.
    """
    root = existing_path(path, "images", "folder", "a folder of images, FOLDER/IMAGE or FOLDER/CLASS/IMAGE")
    height, width, channels = image_shape
    if _tables(root):
        train, test = _listed(root, facts.get("label_column", ""), "", needs_label=False)
        found = [*train, *(test or ())]
    elif any(entry.is_dir() for entry in _entries(root)):
        levels = _levels(root)
        of_classes = [{same(name) for name in of if not has_no_label(name)} <= set(classes) for of in _names(levels)]
        if levels[0][0] and all(of_classes):
            raise UserError(f"{root}: both levels of folders have names of classes; give {root}/CLASS/IMAGE")
        found = [_image(*level, SECOND if of_classes[0] else FIRST) for level in levels]
    else:
        found = [Image(file, "") for file in _images(root)]
    check_size((len(found), *image_shape), root, MAX_BYTES, "")
    bits = facts.get("bits") or depth_of([image.file for image in found])
    images = np.empty((len(found), *image_shape), np.uint8)
    for row, (file, *_) in enumerate(found):
        image = read_image(file, "L" if channels == 1 else "RGB", height if height == width else 0, fit, bits)
        if image.shape != image_shape:
            size = f"{image.shape[1]} x {image.shape[0]}"
            raise UserError(f"{file} has {size} pixels; the model takes {width} x {height}")
        images[row] = image
    names, labels = [name_in(root, image.file) for image in found], [image.label for image in found]
    return Pictures(images, names, labels if any(labels) else None)


Split = tuple[list[Image], list[Image] | None]  # images for training and for testing; None: there is no test set


def _tables(root: pathlib.Path) -> list[pathlib.Path]:
    """The files metadata.csv of a folder."""
    return [folder / METADATA for folder in (root, root / "train", root / "test") if (folder / METADATA).exists()]


def _listed(root: pathlib.Path, label: str, client: str, domain: str = "", needs_label: bool = True) -> Split:
    """The images in metadata.csv; the columns of labels and of clients are `label` and `client` or the usual ones."""
    found: list[Image] = []
    for table in _tables(root):
        columns, path = read_columns(str(table), "data.path"), str(table)
        label, client = (
            name or (usual if usual in columns else "") for name, usual in ((label, "label"), (client, "client"))
        )
        own_label = label if needs_label or label in columns else ""
        own_client = client if client in columns or root / "test" not in table.parents else ""  # tests need no client
        named = {"path": "file_name", "label_column": own_label, "client_column": own_client, "domain_column": domain}
        check_columns(columns, path, *((field, name) for field, name in named.items() if name))
        words = [values_of(columns[name]) if name else [""] * len(columns) for name in (own_label, own_client, domain)]
        for row, (name, *of_image) in enumerate(zip(columns["file_name"], *words), start=1):
            file = table.parent / name
            if not file.is_file() or not file.resolve().is_relative_to(root.resolve()):
                raise UserError(f"{table}: row {row} names {file}, which is no file in {root}; correct or remove it")
            found.append(Image(file, *of_image))
    listed = {image.file for image in found}
    if len(listed) < len(found):
        raise UserError(f"{_tables(root)[0]} has {len(found) - len(listed)} images more than once; name each once")
    split = {image.file.relative_to(root).parts[0] for image in found}
    folders = ("train", "test") if {"train", "test"} <= split else ("",)
    others = [
        file for folder in folders for file in sorted((root / folder).rglob("*"))
        if file.suffix.lower() in SUFFIXES and file not in listed and not file.name.startswith(".")
    ]  # fmt: skip
    if others:
        what = "add rows, with an empty label if they have none, or remove them"
        raise UserError(f"{len(others)} images are in no row of {METADATA}, such as {others[0]}; {what}")
    if len(folders) == 1:
        return found, None
    parts = [[image for image in found if image.file.relative_to(root).parts[0] == folder] for folder in folders]
    if left_out := len(found) - len(parts[0]) - len(parts[1]):
        say(f"{left_out:,} images of {root / METADATA} are neither in train nor in test, and are left out")
    return parts[0], parts[1]


def _in_folders(root: pathlib.Path, clients: str, domains: str) -> Split:
    """The images in folders of classes, or of classes and clients or domains.

    `clients` and `domains` are `FIRST`, `SECOND` or ''; if both are the same level, each client is a domain.
    """
    level = clients or domains
    if domains not in ("", level):
        raise UserError(f"data.client_column={clients} and data.domain_column={domains} leave no level for the classes")

    def named(images: list[Image]) -> list[Image]:
        images = sorted(images, key=lambda image: (not image.label, image.label, image.client, image.file.name))
        return [image._replace(client=image.client * bool(clients), domain=image.client * bool(domains))
                for image in images]  # fmt: skip

    present = [name for name in ("train", "test") if (root / name).is_dir()]
    is_divided = len(present) == 2
    if len(present) == 1:
        absent = "test" if present == ["train"] else "train"
        raise UserError(
            f"{root} has a folder {present[0]} but no {absent}; add {root / absent}/CLASS/IMAGE, or move the classes "
            f"from {root / present[0]} to {root}, where every fifth image is for the test"
        )
    of_classes = root / "train" if is_divided else root
    levels = _levels(of_classes, unlabelled=False)
    _check_level(root, levels, level, "clients" if clients or not domains else "domains")
    train = [_image(*names, level) for names in levels]
    inside = [entry for parent in dict.fromkeys((root, of_classes)) for entry in _entries(parent)]
    for folder in (entry for entry in inside if entry.is_dir() and has_no_label(entry.name)):
        own = [entry for entry in _entries(folder) if entry.is_dir()]
        train += [Image(file, "", printable(entry.name)) for entry in own for file in _images(entry)]
        train += [] if own else [Image(file, "") for file in _images(folder)]
    if not is_divided:
        return named(train), None
    test = [_image(*names, level) for names in _levels(root / "test")]
    known = {same(image.label) for image in train}
    unknown = [image for image in test if same(image.label) not in known and image.label]
    if unknown or not any(image.label for image in test):
        line = f"; {unknown[0].label!r}, as in {unknown[0].file}, is none" if unknown else ""
        raise UserError(f"{root / 'test'} must have folders of classes that {of_classes} has{line}")
    return named(train), named(test)


Level = tuple[str, str, pathlib.Path]  # the names of an image's two folders, '' and one if it has one, and its file


def _levels(folder: pathlib.Path, unlabelled: bool = True) -> list[Level]:
    """The images in a folder's folders, or all in the folders of these; with or without its folder 'unlabelled'."""
    found: list[Level] = []
    for outer in (each for each in _folders(folder) if unlabelled or not has_no_label(each.name)):
        if any(entry.is_dir() for entry in _entries(outer)):
            found += [(outer.name, inner.name, image) for inner in _folders(outer) for image in _images(inner)]
        else:
            found += [("", outer.name, image) for image in _images(outer)]
    shallow = [image for outer, _, image in found if not outer]
    if shallow and len(shallow) < len(found):
        deep = next(image for outer, _, image in found if outer)
        what = f"bring all images to {folder}/CLASS/IMAGE or {folder}/CLIENT/CLASS/IMAGE"
        raise UserError(f"{deep} is in two folders, {shallow[0]} in one; {what}")
    return found


def _check_level(root: pathlib.Path, levels: list[Level], level: str, what: str) -> None:
    """Raises a UserError unless `level` names one of two levels of folders, or is '' if there is one. Says both.

    `what` that level is: 'clients' or 'domains'.
    """
    field = f"data.{what.removesuffix('s')}_column"
    if not levels or not levels[0][0]:
        if level:
            has = f"one level of folders, the classes, and no {METADATA}"
            raise UserError(f"{field}={level}, but {root} has {has}")
        return
    outer, inner = _names(levels)
    if level not in (FIRST, SECOND):
        has = f"two levels of folders, {_few(outer)} and inside of these {_few(inner)}"
        raise UserError(f"{root} has {has}; which are the {what}? --config.{field}={FIRST} or {SECOND}")
    groups, of_class = (outer, inner) if level == FIRST else (inner, outer)
    of_class = [name for name in of_class if not has_no_label(name)]
    say(f"{root} has {len(groups)} {what}, {_few(groups)}, and the classes {_few(of_class)}")


def _names(levels: list[Level]) -> list[list[str]]:
    """The names of the outer and of the inner folders."""
    return [list(dict.fromkeys(map(printable, of))) for of in list(zip(*levels))[:2]]


def _few(names: Sequence[str]) -> str:
    return ", ".join([f"{name:.40}" for name in names[:3]] + ["..."] * (len(names) > 3))


def _image(outer: str, inner: str, file: pathlib.Path, clients: str) -> Image:
    label, client = (outer, inner) if clients == SECOND and outer else (inner, outer)
    return Image(file, "" if has_no_label(label) else printable(label), printable(client))


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders in a folder; raises a UserError for an image beside them."""
    entries = _entries(folder)
    for entry in entries:
        if entry.suffix.lower() in SUFFIXES and not entry.is_dir():
            raise UserError(f"the image {entry} is in no class's folder; move it to {folder}/CLASS, or remove it")
    return [entry for entry in entries if entry.is_dir()]


def _images(folder: pathlib.Path) -> list[pathlib.Path]:
    """The images of one folder; raises a UserError for any other entry, so that nothing is skipped silently."""
    images = _entries(folder)
    for entry in images:
        if not entry.is_file() or entry.suffix.lower() not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise UserError(f"{entry} is not an image file by its name; known: {known}; convert or remove it")
    if not images:
        raise UserError(f"the folder {folder} is empty; add images, or remove it")
    return images


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """The entries of a folder except hidden files, sorted by name."""
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be listed ({first_line(error)}); make it readable") from error
    return sorted((e for e in entries if e.name not in _OF_FILE_MANAGERS), key=lambda entry: entry.name)
