"""TensorFlow Datasets without TensorFlow: archives in the original formats, served on localhost.

Download, verification, unpacking, preparation and reading run for real, on tiny data sets.
"""

import gzip
import hashlib
import http.server
import io
import struct
import sys
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest
import scipy.io

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.tfds import _STAND_IN, _quiet
from tests.helpers.partitions import data_config

TRAIN, TEST = 40, 10


def load(source):
    return load_dataset(data_config(source=source))


def random_images(rng, count, size, channels):
    return rng.integers(0, 256, (count, size, size, channels), np.uint8)


def cifar_bytes(images, labels):
    rows = [labels.astype(np.uint8)[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)]
    return np.concatenate(rows, axis=1).tobytes()


def tar_gz(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def idx_images(images):
    return gzip.compress(struct.pack(">IIII", 2051, len(images), 28, 28) + images.tobytes())


def idx_labels(labels):
    return gzip.compress(struct.pack(">II", 2049, len(labels)) + labels.astype(np.uint8).tobytes())


class Site:
    """A web server on localhost that holds a few files and counts what is asked of it."""

    def __init__(self):
        self.files = {}
        self.requests = 0
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                site.requests += 1
                content = site.files.get(self.path.rsplit("/", 1)[-1])
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def checksums(self):
        """What TFDS has on record for the files, as TFDS has it."""
        from tensorflow_datasets.core.download.checksums import UrlInfo

        return {
            self.url + name: UrlInfo(len(content), hashlib.sha256(content).hexdigest(), name)
            for name, content in self.files.items()
        }

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    yield site
    site.close()


def builder_class(name):
    with _quiet():
        import tensorflow_datasets as tfds

        return tfds.builder_cls(name.split("/")[0])


def serve_cifar10(name, site, monkeypatch):
    rng = np.random.default_rng(0)
    builder = builder_class(name)
    train, test = random_images(rng, TRAIN, 32, 3), random_images(rng, TEST, 32, 3)
    y_train, y_test = rng.integers(0, 10, TRAIN), rng.integers(0, 10, TEST)
    members = {"batches.meta.txt": "\n".join("abcdefghij").encode(), "test_batch.bin": cifar_bytes(test, y_test)}
    for part in range(5):
        rows = slice(part * TRAIN // 5, (part + 1) * TRAIN // 5)
        members[f"data_batch_{part + 1}.bin"] = cifar_bytes(train[rows], y_train[rows])
    archive = "cifar.tar.gz"
    site.files[archive] = tar_gz({f"cifar-10-batches-bin/{member}": content for member, content in members.items()})
    facts = builder._cifar_info.fget
    monkeypatch.setattr(builder, "_cifar_info", property(lambda self: facts(self)._replace(url=site.url + archive)))
    monkeypatch.setattr(builder, "url_infos", site.checksums())
    return train, y_train, test, y_test


def serve_emnist(name, site, monkeypatch):
    rng = np.random.default_rng(0)
    builder = builder_class(name)
    train, test = random_images(rng, TRAIN, 28, 1), random_images(rng, TEST, 28, 1)
    y_train, y_test = rng.integers(0, 10, TRAIN), rng.integers(0, 10, TEST)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for part, images, labels in (("train", train, y_train), ("test", test, y_test)):
            prefix = f"gzip/emnist-byclass-{part}"
            # As published: each image transposed.
            archive.writestr(f"{prefix}-images-idx3-ubyte.gz", idx_images(images.swapaxes(1, 2).copy()))
            archive.writestr(f"{prefix}-labels-idx1-ubyte.gz", idx_labels(labels))
    site.files["gzip.zip"] = file.getvalue()
    by_class = next(config for config in builder.BUILDER_CONFIGS if config.name == "byclass")
    monkeypatch.setattr(by_class, "train_examples", TRAIN)
    monkeypatch.setattr(by_class, "test_examples", TEST)
    monkeypatch.setattr(builder, "URL", site.url + "gzip.zip")
    monkeypatch.setattr(builder, "url_infos", site.checksums())
    return train, y_train, test, y_test


def serve_svhn(name, site, monkeypatch):
    from tensorflow_datasets.core import shuffle

    rng = np.random.default_rng(0)
    builder = builder_class(name)
    sets = {}
    for split, count in ("train", TRAIN), ("test", TEST), ("extra", 5):
        images, labels = random_images(rng, count, 32, 3), rng.integers(0, 10, count)
        sets[split] = images, labels
        file = io.BytesIO()
        # As published: the images last to vary, and 10 for the digit 0.
        mat = {"X": images.transpose(1, 2, 3, 0), "y": np.where(labels == 0, 10, labels)[:, np.newaxis]}
        scipy.io.savemat(file, mat)
        site.files[f"{split}_32x32.mat"] = file.getvalue()
    monkeypatch.setattr(sys.modules[builder.__module__], "URL", site.url)
    monkeypatch.setattr(builder, "url_infos", site.checksums())
    # The real set is larger than what TFDS shuffles in memory: it goes through files.
    monkeypatch.setattr(shuffle, "MAX_MEM_BUFFER_SIZE", 10_000)
    return *sets["train"], *sets["test"]


SERVE = {"cifar10": serve_cifar10, "emnist/byclass": serve_emnist, "svhn_cropped": serve_svhn}


def rows_as_set(images, labels):
    return {(image.tobytes(), int(label)) for image, label in zip(images, labels)}


@pytest.mark.parametrize("name", SERVE)
def test_download_prepare_and_read_without_tensorflow(name, site, tmp_path, monkeypatch, capsys):
    x_train, y_train, x_test, y_test = SERVE[name](name, site, monkeypatch)
    first = load(name)
    assert first.x_train.dtype == first.x_test.dtype == np.uint8
    assert first.y_train.dtype == first.y_test.dtype == np.int32
    if name == "emnist/byclass":  # TFDS does not record their official order.
        assert rows_as_set(first.x_train, first.y_train) == rows_as_set(x_train, y_train)
        assert rows_as_set(first.x_test, first.y_test) == rows_as_set(x_test, y_test)
        assert len(first.x_train) == TRAIN and len(first.x_test) == TEST
    else:
        np.testing.assert_array_equal(first.x_train, x_train)
        np.testing.assert_array_equal(first.y_train, y_train)
        np.testing.assert_array_equal(first.x_test, x_test)
        np.testing.assert_array_equal(first.y_test, y_test)
    ends = {"cifar10": ("a", "j"), "emnist/byclass": ("0", "z")}.get(name, ("0", "9"))
    assert len(first.class_names) == first.num_classes == (62 if name == "emnist/byclass" else 10)
    assert (first.class_names[0], first.class_names[-1]) == ends and first.flip == (name == "cifar10")
    assert len(first.mean) == len(first.std) == first.x_train.shape[-1]
    assert "tensorflow" not in sys.modules
    assert not any(vars(module).get("tf") is _STAND_IN for module in list(sys.modules.values()))  # nothing is lent
    assert capsys.readouterr().out == ""

    # What is prepared is read again with the server down, in the same order.
    site.close()
    second = load(name)
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)


def expect_line(*parts):
    with pytest.raises(UserError) as error:
        load("cifar10")
    message = str(error.value)
    assert "\n" not in message
    for part in ("cifar10", "--config.data.source=npz --config.data.path=FILE", *parts):
        assert part in message


def test_what_cannot_be_downloaded_or_read_is_named_and_can_be_had_again(site, tmp_path, monkeypatch):
    serve_cifar10("cifar10", site, monkeypatch)
    intact = site.files.pop("cifar.tar.gz")
    expect_line("127.0.0.1", "404")
    site.files["cifar.tar.gz"] = intact[: len(intact) // 2]
    expect_line("NonMatchingChecksumError")
    assert not list(tmp_path.glob("cifar10/*"))
    site.files["cifar.tar.gz"] = intact
    assert len(load("cifar10").x_train) == TRAIN
    (record,) = tmp_path.glob("cifar10/*/*train.array_record*")
    record.write_bytes(record.read_bytes()[:100])
    expect_line(str(tmp_path))
    site.close()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "other"))
    start = time.monotonic()
    expect_line("127.0.0.1", "ConnectionError")
    assert time.monotonic() - start < 15
