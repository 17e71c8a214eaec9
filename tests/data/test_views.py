"""Views of a federation: a round's clients alone, with the ids of the whole federation."""

import itertools
import os

import jax
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import Dataset, Partition
from fedjax_ssl.data.federated import hold, put_whole, table_width
from fedjax_ssl.data.views import MOST_ENTRIES, Views, widths_of

SIZES = (3, 0, 5, 2, 1, 4)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])


def held_federation(**bound):
    """Six clients, three images at the server, two for validation; image i has i in all its pixels, label i % 3."""
    number = sum(SIZES) + 5
    rows = np.random.default_rng(0).permutation(number).astype(np.int32)
    server, validation, at_clients = rows[:3], rows[3:5], rows[5:]
    images = np.tile(np.arange(number, dtype=np.uint8)[:, None, None, None], (1, 2, 2, 1))
    labels = (np.arange(number) % 3).astype(np.int32)
    dataset = Dataset("small", images, labels, images[:4], labels[:4], 3, (0.5,), (0.2,), flip=False)
    clients = [at_clients[first:last] for first, last in itertools.pairwise(OFFSETS)]
    return hold(dataset, Partition(server, clients, validation_index=validation), seed=7, **bound)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_view_has_the_images_and_labels_of_its_clients_and_nothing_else_of_them(on_device):
    held = held_federation(reveal_labels=True)
    whole, whole_hidden = put_whole(held)
    views = Views(held, (2, 5), 3, on_device)
    for clients, width in (([1, 3, 4], 2), ([0, 2], 5), ([], 2), ([2, 4, 5], 5)):
        clients = np.array(clients, np.int64)
        assert views.width_for(clients) == width
        view, hidden = views.of(clients, width)
        assert view.client_index.shape == (3, width) and len(view.ids) == 3
        for client in clients:
            present = np.arange(width) < held.sizes[client]
            rows, expected = view.rows_of(client)[present], held.rows_of(client)
            np.testing.assert_array_equal(view.inputs[rows], whole.inputs[expected])
            np.testing.assert_array_equal(view.visible_labels[rows], whole.visible_labels[expected])
            np.testing.assert_array_equal(hidden[rows], whole_hidden[expected])
        for name in ("server_index", "validation_index"):
            mine, theirs = getattr(view, name), getattr(whole, name)
            np.testing.assert_array_equal(view.inputs[mine], whole.inputs[theirs])
            np.testing.assert_array_equal(view.visible_labels[mine], whole.visible_labels[theirs])
            np.testing.assert_array_equal(hidden[mine], whole_hidden[theirs])
        for name in ("client_size", "labelled_size", "test_inputs", "test_labels", "seed"):
            np.testing.assert_array_equal(getattr(view, name), getattr(whole, name))
        # What clients tell before the first round is data of the view, for each seed its own.
        np.testing.assert_array_equal(view.given_labels, np.bincount(held.hidden_labels[held.rows], minlength=3))
        # Programs are compiled for these shapes before any view is made.
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (view, hidden))
        assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), views.shapes(width))
        if not on_device:
            assert len(view.inputs) == 5 + {2: 3, 5: 12}[width]  # 0, 2 and 1 images; or 3, 5 and 4
    with pytest.raises(UserError, match=r"the measure 'shots' reads the images of all clients .* set eval_measures"):
        view.at_clients("the measure 'shots'", "eval_measures without 'shots'")


@pytest.mark.parametrize("hosts", [2, 5])
def test_each_of_several_hosts_reads_a_part_of_the_images(hosts):
    held = held_federation()
    views = Views(held, (5,), 3, on_device=False)
    whole, _ = views.of(np.array([0, 2]), 5)
    parts = [views.of(np.array([0, 2]), 5, (index, hosts))[0].inputs for index in range(hosts)]
    assert len({len(part) for part in parts}) == 1 and hosts * (len(parts[0]) - 1) < len(whole.inputs)
    np.testing.assert_array_equal(views.joined(5, np.concatenate(parts)), whole.inputs)


def test_a_usual_federation_has_one_width():
    assert widths_of(np.array([3, 90, 5]), 2) == (96,)  # rounded up, see `table_width`
    assert widths_of(np.array([89, 90]), 2) == (90,)
    assert widths_of(np.zeros(3, int), 2) == (1,)


def test_a_heavy_tail_has_narrow_widths_that_serve_half_and_most_of_the_rounds():
    generator = np.random.default_rng(0)
    sizes = np.minimum(generator.zipf(2.0, 100_000), 5_000)
    assert len(sizes) * sizes.max() > MOST_ENTRIES
    narrow, middle, widest = widths_of(sizes, 10)
    assert widest == table_width(sizes)
    largest = np.array([sizes[generator.choice(len(sizes), 10, replace=False)].max() for _ in range(2_000)])
    assert 0.45 < (largest <= narrow).mean() < 0.6  # at least a half: sizes are whole numbers
    assert 0.93 < (largest <= middle).mean() < 0.97


def test_a_run_begins_with_the_images_of_small_clients_and_with_rows_for_the_largest():
    held = held_federation()
    views = Views(held, (2, 5), 3, on_device=False)
    first, _ = views.first()
    np.testing.assert_array_equal(first.ids, [1, 3, 4])
    assert first.client_index.shape == (3, 5) and len(first.inputs) == len(views.of(np.array([1]), 2)[0].inputs)


def test_a_file_of_images_that_changes_or_goes_away_is_one_line(tmp_path):
    held = held_federation()
    np.save(tmp_path / "images.npy", held.inputs)
    on_disk = held._replace(inputs=np.load(tmp_path / "images.npy", mmap_mode="r"))
    views = Views(on_disk, (5,), 3, on_device=False)
    clients = np.array([0, 2])
    before, _ = views.of(clients, 5)
    np.testing.assert_array_equal(before.inputs, Views(held, (5,), 3, on_device=False).of(clients, 5)[0].inputs)
    os.utime(tmp_path / "images.npy", (1, 1))
    with pytest.raises(UserError, match=r"images.npy has changed since .* put the old file back"):
        views.of(clients, 5)
    (tmp_path / "images.npy").unlink()
    with pytest.raises(UserError, match=r"images\.npy has changed"):
        views.of(clients, 5)
