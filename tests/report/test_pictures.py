"""Single pictures: what is drawn, from counts and predictions by hand."""

import numpy as np

from fedjax_ssl.records.lines import METRICS, read_rounds, to_line
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report import style
from fedjax_ssl.report.figures import MOST_COLUMNS, by_client, class_accuracy, confusion, to_plane, who_holds_what
from fedjax_ssl.run.observe.summary import to_record
from fedjax_ssl.run.observe.trackers import curves
from fedjax_ssl.run.wire import Traffic
from tests.helpers.reports import COUNTS

AT_SERVER = COUNTS | {"server": np.array([2, 1]), "labelled": np.zeros((3, 2), int)}


def test_the_picture_of_clients_shows_which_images_have_labels():
    def drawn(counts):
        with style.styled():
            figure = who_holds_what(counts, ["cat", "dog"])
        heats = {axes.get_title(): axes.images[0].get_array() for axes in figure.axes if axes.images}
        (bars,) = (axes for axes in figure.axes if axes.containers)
        return heats, {bar.get_label(): [(p.get_x(), p.get_width()) for p in bar] for bar in bars.containers}

    heats, bars = drawn(COUNTS)
    assert list(heats) == ["Images at each client", "Those of them that have labels"]
    for title, name in zip(heats, ("clients", "labelled")):
        np.testing.assert_array_equal(heats[title].filled(0), COUNTS[name].T)
        np.testing.assert_array_equal(heats[title].mask, COUNTS[name].T == 0)  # grey, unlike one image
    assert bars == {
        "the training set": [(0, 9), (0, 8)],
        "at clients, with labels": [(0, 1), (0, 3)],
        "at clients, without labels": [(1, 8), (3, 4)],
    }
    for kind in ("unlabelled", "unknown"):
        figure = who_holds_what(COUNTS | {kind: np.array([1, 2, 3])}, ["cat", "dog"], "rows")
        titles = {axes.get_title() for axes in figure.axes}
        assert {"Rows at each client", "22 rows at 3 clients,\nlabels: 4 at clients, 0 at the server"} <= titles
    heats, bars = drawn(AT_SERVER)
    assert list(heats) == ["Images at each client"]
    assert bars == {
        "the training set": [(0, 9), (0, 8)],
        "at clients, without labels": [(0, 9), (0, 7)],
        "at the server, with labels": [(9, 2), (7, 1)],
    }
    _, bars = drawn(AT_SERVER | {"validation": np.array([1, 3])})
    assert bars["held out for validation"] == [(11, 1), (8, 3)]


def test_the_picture_of_many_clients_counts_those_that_have_so_many_images():
    rng = np.random.default_rng(0)
    clients = np.stack([rng.integers(0, 3, MOST_COLUMNS + 1), rng.zipf(1.5, MOST_COLUMNS + 1).clip(max=500)], axis=1)
    counts = AT_SERVER | {"clients": clients, "labelled": np.zeros_like(clients)}
    with style.styled():
        figure = who_holds_what(counts, ["cat", "dog"])
    axes = next(axes for axes in figure.axes if axes.get_title() == "Images at each client")
    (mesh,) = axes.collections
    shown, edges = mesh.get_array().filled(0), mesh.get_coordinates()[0, :, 0]
    for own, row in zip(clients.T, shown):
        for low, high, number in zip(edges, edges[1:], row):
            assert number == sum(low < have < high for have in own)
        assert row.sum() == sum(own > 0)  # every client with an image of the class is in a column
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"] and axes.get_xscale() == "log"
    figure = who_holds_what({**counts, "clients": clients[1:], "labelled": counts["labelled"][1:]}, ["cat", "dog"])
    assert next(axes.images for axes in figure.axes if axes.get_title() == "Images at each client")  # one by one


def test_the_pictures_of_classes_show_percent_of_each_class():
    """Of four cats three are right, of two dogs one; the eel is taken for a cat."""
    shown = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 0, 0]), ["cat", "dog", "eel"]
    with style.styled():
        matrix, bars = confusion(*shown).axes[0], class_accuracy(*shown).axes[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), [[75, 25, 0], [50, 50, 0], [100, 0, 0]])
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("classified as", "class")
    cells = {(0, 0): "75", (1, 0): "25", (0, 1): "50", (1, 1): "50", (0, 2): "100"}  # (column, row)
    assert {text.get_position(): text.get_text() for text in matrix.texts} == cells
    assert [bar.get_width() for bar in bars.patches] == [75, 50, 0]
    np.testing.assert_allclose(bars.lines[0].get_xdata(), 100 * 4 / 7)


def test_embeddings_that_are_equal_or_few_have_places_too():
    """t-SNE would crash."""
    for collapsed in (np.zeros((40, 8)), np.ones((40, 8)), np.random.default_rng(0).uniform(1, 9, (40, 1))):
        assert to_plane(collapsed).shape == (40, 2) and np.ptp(to_plane(collapsed)) <= 1
    assert to_plane(np.ones((2, 5))).shape == (2, 2) and np.isfinite(to_plane(np.zeros((1, 1)))).all()


def test_a_number_of_each_client_is_in_the_records_and_a_curve_of_its_own(tmp_path):
    """Client 1 never has one, and client 2 only after the first round."""
    traffic, given = Traffic(1, 0, 0, 0, 0, 1, 1), [[0.75, np.nan, np.nan], [0.5, np.nan, 0.25]]
    metrics = [{"round": 1 + number, "uploads": 1, "weight": of_round} for number, of_round in enumerate(given)]
    lines = [to_record({name: np.array(value) for name, value in of.items()}, traffic) for of in metrics]
    (tmp_path / METRICS).write_text("".join(map(to_line, lines)))
    run = RunRecords(tmp_path, {}, read_rounds(tmp_path / METRICS).lines, [], None)
    assert [line["weight"] for line in run.metrics] == [[0.75, None, None], [0.5, None, 0.25]]
    assert curves(run.metrics[-1]).keys() == {"uploads", "bytes/down", "bytes/up"}
    (values,) = run.by_client().values()
    np.testing.assert_array_equal(values, given)
    with style.styled():
        first, third = by_client(run.values("round"), values, "weight").axes[0].lines
    assert [line.get_label() for line in (first, third)] == ["client 0", "client 2"]
    assert (first.get_xydata().tolist(), third.get_xydata().tolist()) == ([[1, 0.75], [2, 0.5]], [[2, 0.25]])
