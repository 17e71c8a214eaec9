"""Writes ham10000.npz, the skin lesions for configs/semianagg_isic.py; see docs/how_to/own_data.md.

python examples/ham10000.py    # in a folder with HAM10000_metadata.csv and the folder HAM10000 of all images
"""

import csv
import pathlib

import numpy as np
from PIL import Image
from sklearn.model_selection import train_test_split

CLASSES, SIDE = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"), 224


def read(names: list[str]) -> np.ndarray:
    """Reads the images with these names, uint8 [N, SIDE, SIDE, 3]."""
    files = [pathlib.Path("HAM10000") / f"{name}.jpg" for name in names]
    small = [Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR) for file in files]
    return np.stack([np.asarray(image) for image in small])


def main() -> None:
    """Splits the table's rows, a fifth of each class for testing, and writes the file."""
    with open("HAM10000_metadata.csv", newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    names, labels = [row["image_id"] for row in rows], [CLASSES.index(row["dx"]) for row in rows]
    train, test, y_train, y_test = train_test_split(names, labels, test_size=0.2, stratify=labels, random_state=0)
    np.savez("ham10000.npz", x_train=read(train), y_train=y_train, x_test=read(test), y_test=y_test)


if __name__ == "__main__":
    main()
