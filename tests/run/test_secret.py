"""The secret of a private run: who has it, where it is, and what does not show it. The stub's rounds cost nothing."""

import functools
import shutil
import stat

import chex
import jax
import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import read_secret
from fedjax_ssl.records.workdir import SECRET
from fedjax_ssl.report.model_card import model_card
from fedjax_ssl.run.train import train_together
from fedjax_ssl.serve.export import export_run
from tests.helpers.stub import make_stub_config

PRIVATE = {"privacy.noise": 1.0, "aggregation.clip_norm": 0.1, "checkpoint_every": 2, "log.report": False}
config = functools.partial(make_stub_config, **PRIVATE)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a private run that stands at round 2."""
    folder = tmp_path_factory.mktemp("private") / "run"
    train(config(num_rounds=2), folder)
    return folder


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def differ(one, other):
    return any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (one.model.params, other.model.params))))


@pytest.mark.test_all
def test_a_resumed_run_has_the_same_secret_and_every_other_run_another(begun, tmp_path):
    """Two copies of a run end alike; a run of the same seed does not, although nothing else is drawn otherwise."""
    again, twin = (train(config(), copied(begun, tmp_path / name)) for name in ("again", "twin"))
    chex.assert_trees_all_equal(again, twin)
    fresh = train(config(), tmp_path / "fresh")
    assert differ(again, fresh) and read_secret(begun) == read_secret(tmp_path / "again")
    assert len({read_secret(begun), read_secret(tmp_path / "fresh")}) == 2 and len(read_secret(begun)) == 32


def test_nobody_else_reads_the_secret_and_nothing_else_shows_it(begun, tmp_path, capfd):
    folder = copied(begun, tmp_path / "run")
    own = config(**{"log.report": True, "log.tensorboard": True})
    train(own, folder)
    assert stat.S_IMODE((folder / SECRET).stat().st_mode) == 0o600
    (tmp_path / "hub").mkdir()
    export_run(folder, tmp_path / "hub" / "model", "hub", allow_code=True)
    said, secret = "".join(capfd.readouterr()), read_secret(folder)
    shown = (secret, secret.hex().encode(), np.frombuffer(secret, "<u4").astype("<i8").tobytes())
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != SECRET]
    assert len(others) > 20 and secret.hex() not in said
    assert not [path for path in others for form in shown if form in path.read_bytes()]


@pytest.mark.test_all
def test_seeds_and_rows_that_train_together_have_secrets_of_their_own(tmp_path):
    train(config(seeds=(0, 1), num_rounds=1), tmp_path / "seeds")
    rows = [config(**{"num_rounds": 1, "client.learning_rate": rate}) for rate in (0.01, 0.02)]
    one, other = train_together(rows, [tmp_path / "a", tmp_path / "b"])
    folders = [tmp_path / "seeds" / "seed_0", tmp_path / "seeds" / "seed_1", tmp_path / "a", tmp_path / "b"]
    assert len(set(map(read_secret, folders))) == 4 and differ(one, other)


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
def test_a_run_without_its_own_secret_is_not_resumed(begun, tmp_path, damage):
    """With another one its last rounds would be published again with other noise."""
    folder = copied(begun, tmp_path / "run")
    if damage == "missing":
        (folder / SECRET).unlink()
    elif damage == "cut":
        (folder / SECRET).write_text((folder / SECRET).read_text()[:-9])
    else:
        train(config(num_rounds=1), tmp_path / "other")
        shutil.copy(tmp_path / "other" / SECRET, folder / SECRET)
    before = (folder / "metrics.jsonl").read_bytes()
    words = "the run's secret is not what the checkpoint" if damage == "another" else "cannot read the secret of the"
    with pytest.raises(UserError, match=words) as error:
        train(config(), folder)
    assert "\n" not in str(error.value) and (folder / "metrics.jsonl").read_bytes() == before


def test_reproducible_runs_follow_from_the_seed_and_say_so(tmp_path):
    own = functools.partial(config, **{"privacy.reproducible": True})
    first, again = (train(own(), tmp_path / name) for name in ("first", "again"))
    chex.assert_trees_all_equal(first, again)
    assert differ(first, train(own(seed=1), tmp_path / "other")) and not (tmp_path / "first" / SECRET).exists()
    card = model_card(read_run(tmp_path / "first"))
    assert "only if nobody knows the seed" in card and "seed 0 |" in card


def test_a_card_of_a_private_run_has_what_its_guarantee_covers(begun, tmp_path):
    """Not the seed, the command that may name it, clients' accuracies, nor what depends on how many took part."""
    folder = copied(begun, tmp_path / "run")
    train(config(seed=0), folder)
    run = read_run(folder)
    shown = (
        model_card(run),
        model_card(run._replace(config={**run.config, "privacy": {**run.config["privacy"], "noise": 0.0}})),
    )
    for words in ("seed 0", "| command |", "| communication |", "| training set |", "| worst client"):
        assert words not in shown[0], words
        assert words in shown[1] or words == "| worst client", words
    assert (
        "-differential privacy by this run alone; the guarantees of further runs on the same clients add up" in shown[0]
    )
    assert not any(words in shown[0] for words in run.client_figures())
