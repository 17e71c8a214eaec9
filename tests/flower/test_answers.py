"""The bridge to Flower: impossible answers, as a broken or malicious node would send them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import TrainingError, UserError
from fedjax_ssl.data.content import WORDS
from fedjax_ssl.flower.settings import digest, run_config
from fedjax_ssl.flower.views import facts_text, outline
from tests.helpers.flower_run import needs_flower, settings

TWO = {"clients": [0, 2], "sizes": [5, 7], "labelled": [5, 0], "digest": "0123", "classes": [2, 0, 3]}
ODD_HELLOS = {
    "another configuration": {"digest": "0124"},
    "no such client": {"clients": [0, 3]},
    "twice": {"clients": [2, 2]},
    "no list": {"clients": 0},
    "no whole number": {"sizes": [5.0, 7.0]},
    "beyond int32": {"sizes": [5, 2**31]},
    "too few": {"sizes": [5]},
    "more labels than images": {"labelled": [6, 0]},
    "a class too many": {"classes": [2, 0, 3, 0]},
    "more labels than labelled images": {"classes": [2, 2**31 - 1, 3]},
}


@needs_flower
def test_hellos_that_cannot_be(capsys):
    """They are refused, and the node is left out: a line says why. The other node is taken, and later a new node for
    the same clients.
    """
    from flwr.app import ConfigRecord

    from fedjax_ssl.flower import roster as of_roster
    from fedjax_ssl.flower.answers import read_hello
    from tests.helpers.flower_by_hand import GridByHand

    assert read_hello({"node": TWO}, "0123", 3, 3) == ([0, 2], [5, 7], [5, 0], [2, 0, 3])
    assert read_hello({"node": TWO}, "0123", 3, 0).classes == []
    for odd in [{"node": {**TWO, **change}} for change in ODD_HELLOS.values()] + [{}, {"node": {"digest": "0123"}}]:
        with pytest.raises(UserError):
            read_hello(odd, "0123", 3, 3)

    run = settings(num_clients=3)
    own = digest(run_config(run))
    grid = GridByHand(run, [{"partition-id": 1}, {"clients": "0,2"}])
    negative = {"clients": [-1, 2], "sizes": [5, 7], "labelled": [5, 0], "digest": own, "classes": [5] + [0] * 9}
    for odd in (ConfigRecord(negative), arrays(clients=[0, 2])):

        def change(node, kind, content, odd=odd):
            if node == 101:
                content["node"] = odd

        grid.change = change
        roster = of_roster.Roster(grid, 3, own, "{}", wait=0.0, timeout=1.0, num_classes=10)
        with pytest.raises(TrainingError, match="2 of num_clients = 3 clients have no node: 0, 2; start"):
            roster.wait_for_all()
        taken, left_out = capsys.readouterr().err.splitlines()
        assert taken == "clients 1 are at node 100"
        assert left_out.startswith("node 101 is not taken: ")
        assert roster.nodes_of([1]) == {100: [0]}

    grid.contexts[102] = GridByHand(run, 2 * [{}] + [{"clients": "0,2"}]).contexts[102]
    roster.wait_for_all()
    assert roster.nodes_of([0, 1, 2]) == {100: [1], 102: [0, 2]}
    assert capsys.readouterr().err == "clients 0, 2 are at node 102\n"
    of_roster.say("\x1b[2J of a node\n")
    assert capsys.readouterr().err == "\\x1b[2J of a node\\n\n"


@needs_flower
def test_a_restarted_node_of_the_same_id_is_asked_again(tmp_path, monkeypatch, capsys):
    """Flower derives a registered node's id from its key. A client whose node has gone has none."""
    from fedjax_ssl.flower import client
    from fedjax_ssl.flower import roster as of_roster
    from tests.helpers.flower_by_hand import GridByHand

    images = tmp_path / "mine.npz"
    np.savez(images, images=np.zeros((5, 8, 8, 1), np.uint8))
    run = settings()
    good = GridByHand(run, [{"partition-id": 0, "data": str(images)}, {"partition-id": 1}]).contexts
    wrong = GridByHand(run, [{}, {"partition-id": 1, "data": "nowhere.npz"}]).contexts[101]
    grid = GridByHand(run, [])
    grid.contexts |= {100: good[100], 101: wrong}
    facts = facts_text(outline(run_config(run)))
    roster = of_roster.Roster(grid, 2, digest(run_config(run)), facts, 0.0, 1.0)

    def restarted(node, context):
        grid.contexts[node] = context
        grid._nodes.clear()
        roster.welcome()
        return roster.nodes_of([0, 1])

    assert restarted(101, wrong) == {100: [0]}
    assert restarted(101, good[101]) == {100: [0]}  # soon after
    monkeypatch.setattr(of_roster, "AGAIN_SECONDS", 0.0)
    del grid.contexts[101]
    roster.welcome()
    assert restarted(101, wrong) == {100: [0]}
    assert restarted(101, good[101]) == {100: [0], 101: [1]}
    roster.wait_for_all()

    # Restarted with a mistake, it has no clients until it fits.
    grid.contexts[101] = wrong
    grid._nodes.clear()
    assert roster.send({101: {}}, "train", 1) == {}
    assert restarted(101, wrong) == {100: [0]}
    assert restarted(101, good[101]) == {100: [0], 101: [1]}

    # Restarted during a round, it does not know the server's images.
    good[100].state.clear()
    grid._nodes.clear()
    asked = len(grid.asked)
    assert roster.send({100: {}}, "train", 1) == {}
    assert "it was restarted" in capsys.readouterr().err
    assert restarted(100, good[100]) == {100: [0], 101: [1]} and grid.asked[asked:] == [100, 100]
    assert client.FACTS in good[100].state

    del grid.contexts[100]
    with pytest.raises(TrainingError, match="1 of num_clients = 2 clients have no node: 0"):
        roster.wait_for_all()


@needs_flower
def test_nodes_that_do_not_fit(monkeypatch, capsys):
    """A node that is not taken gets no clients and is not asked again soon; restarted, it is another node.

    No node can take the clients of one that is connected. No line tells the late answer of a node that has gone.
    """
    from fedjax_ssl.flower import roster as of_roster
    from tests.helpers.flower_by_hand import GridByHand

    run = settings()
    grid = GridByHand(run, [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 1, "data": "nowhere.npz"}])
    grid.contexts[101].run_config["overrides"] += " --config.seed=9"
    roster = of_roster.Roster(grid, 2, digest(run_config(run)), "{}", 0.0, 1.0)
    with pytest.raises(TrainingError, match="1 of num_clients = 2 clients have no node: 1; start flower-supernode"):
        roster.wait_for_all()
    said = capsys.readouterr().err
    assert "node 101 is not taken: it has another configuration" in said and "data=nowhere.npz does not exist" in said

    other = json.dumps({"content": dict.fromkeys(WORDS, "of another copy of the data set")})
    of_roster.Roster(GridByHand(run, [{"partition-id": 0}]), 2, digest(run_config(run)), other, 0.0, 1.0).welcome()
    assert "node 100 is not taken: it cannot say who it is: its data set is not the server's" in capsys.readouterr().err

    # Three nodes come; the answers of two arrive only in the next round, when the third one has gone.
    fitting = GridByHand(run, [{"partition-id": 0}, {"partition-id": 1}]).contexts
    grid.contexts |= {103: fitting[100], 104: fitting[101], 105: grid.contexts[102]}
    grid.lost = {103, 105}
    roster.wait_for_all()
    del grid.contexts[105]
    grid.lost = set()
    capsys.readouterr()
    for _ in range(2):
        roster.welcome()
        assert roster.nodes_of([0, 1]) == {100: [0], 104: [1]}
    assert capsys.readouterr().err == "node 103 is not taken: client 0 is at node 100, which is connected\n"
    del grid.contexts[100]
    roster.welcome()
    assert roster.nodes_of([0, 1]) == {100: [0], 104: [1]}  # 103 was asked a moment ago
    assert grid.asked == [100, 101, 102, 103, 104, 105]
    monkeypatch.setattr(of_roster, "AGAIN_SECONDS", 0.0)
    roster._ask_at[103] = 0.0  # as if a minute had passed
    roster.welcome()
    assert roster.nodes_of([0, 1]) == {103: [0], 104: [1]}


def arrays(**named):
    """An ArrayRecord with arrays named as in `to_record`."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({f"['{name}']": Array(np.asarray(value)) for name, value in named.items()})


@needs_flower
def test_uploads_and_figures_that_cannot_be():
    from flwr.app import Array, ArrayRecord

    from fedjax_ssl.flower.answers import Figures, Reply, read_reply
    from fedjax_ssl.flower.messages import to_record

    good = {"w": np.array([1, 2], jnp.bfloat16), "n": np.int32(3)}
    told = Figures(*map(np.int32, (6, 5, 4, 3)), (({"loss": np.float32("nan")}, np.bool_(True)),))
    like = Reply(told, good)
    reply = read_reply({"upload-1": arrays(**good), "figures-1": to_record(told)}, 1, 5, like, 6, 2)
    chex.assert_trees_all_equal(reply, Reply(told, good))
    assert read_reply({"figures-1": to_record(told), "upload-0": arrays(**good)}, 1, 5, like, 6, 2).upload is None

    garbled = ArrayRecord({**arrays(**good), "['n']": Array("int32", (), "numpy.ndarray", b"no array")})
    pickled = ArrayRecord({**arrays(**good), "['n']": Array("int32", (), "pickle", b"")})
    odd_uploads = [
        arrays(w=good["w"]),
        arrays(**good, more=1),
        arrays(**{**good, "w": np.zeros(3, "V3")}),  # not bfloat16
        arrays(**{**good, "w": np.array([[1, 2]], jnp.bfloat16)}),
        arrays(**{**good, "n": np.zeros(1, np.int32)}),  # NumPy would broadcast it
        arrays(**{**good, "n": 3.0}),
        garbled,
        pickled,
        dict.fromkeys(garbled, 1.0),  # a MetricRecord
    ]
    odd_figures = [
        told._replace(num_steps=()),
        *(told._replace(num_examples=odd) for odd in (5.0, np.int64(5), np.int32([5]))),
        *(told._replace(num_examples=np.int32(odd)) for odd in (-1, 2**31 - 1, 6, 4)),  # the first answer said 5
        *(told._replace(num_qualified=np.int32(odd)) for odd in (-1, 6)),
        *(told._replace(num_steps=np.int32(odd)) for odd in (-1, 2**30)),  # of two jobs the sum would be negative
        *(told._replace(metrics=(({"loss": odd}, np.bool_(True)),)) for odd in (np.float32([0.5]), np.float64(0.5))),
        *(told._replace(turn=odd) for odd in (np.int32(5), 6.0, ())),
    ]
    for odd in (
        *({"upload-0": odd, "figures-0": to_record(told)} for odd in odd_uploads),
        *({"upload-0": arrays(**good), "figures-0": to_record(odd)} for odd in odd_figures),
        {"upload-0": arrays(**good)},
    ):
        with pytest.raises(UserError):
            read_reply(odd, 0, 5, like, 6, 2)


@needs_flower
def test_statistics_that_cannot_be():
    from fedjax_ssl.flower.answers import read_statistics
    from fedjax_ssl.flower.messages import to_record
    from fedjax_ssl.server.statistics import Sums

    like = {"mean": np.zeros(2, np.float32), "var": np.zeros(2, np.float32)}
    good = {"mean": np.float32([-1, 2]), "var": np.float32([0, 3])}

    def read(sums, count, expected=2):
        count = np.float32(count) if isinstance(count, float) else count
        return read_statistics({"sums-1": to_record(Sums(sums, count))}, 1, like, expected)

    chex.assert_trees_all_equal(read(good, 2.0), Sums(good, np.float32(2)))
    odd_sums = ({"mean": odd} for odd in (np.float32([np.inf, 0]), np.zeros(1, np.float32), np.zeros(2)))
    odd_counts = (-1.0, 0.0, 0.5, 1.0, 3.0, 1e12, float("nan"), float("inf"), np.float32([2]), 2, ())
    for sums, count in (
        *((good, odd) for odd in odd_counts),
        *(({**good, **odd}, 2.0) for odd in odd_sums),
        ({**good, "var": np.float32([-1, 1])}, 2.0),
        ({**good, "var": np.float32([1, 3e38])}, 2.0),  # the sum of two would be infinite
        ({**good, "mean": np.float32([1, -3e38])}, 2.0),
        ({**good, "mean": np.float32([1, np.nan])}, 2.0),
    ):
        with pytest.raises(UserError):
            read(sums, count)
    assert read(jax.tree.map(np.zeros_like, good), 0.0, expected=0).count == 0
    with pytest.raises(UserError):
        read(good, 0.0, expected=0)
    total = read({"mean": np.float32([2e12, -2e12]), "var": np.float32([0, 2e24])}, 2.0).total
    assert np.isfinite(np.float32(1e9) * total["var"]).all()
    with pytest.raises(UserError):
        read_statistics({}, 0, like, 2)
