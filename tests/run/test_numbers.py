"""Numbers of the configuration are arguments of the programs: another value compiles nothing and is used."""

import json

import jax
import numpy as np
import pytest

from fedjax_ssl import UserError, train
from fedjax_ssl.config import add_section, numbers_of
from fedjax_ssl.methods import register
from fedjax_ssl.run import programs
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.train import train_together
from tests.helpers.runs import make_fedanchor_config
from tests.helpers.stub import make_stub_config, stub
from tests.helpers.tiny_methods import build, make_config

pytestmark = pytest.mark.test_all
OWN = """
import jax.numpy as jnp

from fedjax_ssl.methods import METHODS, Entry, Section, is_on, real

KIND = "{kind}"


def defaults():
    section = Section()
    section.weight = real(0.5, least=0)
    return section


def own_method(problem):
    weight = problem.config.own.weight
    if (weight > 0.3) if KIND == "branches" else is_on(weight):
        return METHODS["server_only"].factory(problem)
    return None


own = Entry(own_method, defaults=defaults)
"""


def text_of(config):
    with use_machine(config) as machine:
        return programs.lower_dispatch(machine, [build(config)]).as_text()


def test_no_number_is_in_a_program():
    config = make_config("fedanchor")
    config.update_from_flattened_dict(
        {"schedule": "cosine", "aggregation.optimizer": "fedadam", "aggregation.clip_norm": 1.0, "privacy.noise": 1.0,
         "client.proximal": 0.1}
    )  # fmt: skip
    numbers = numbers_of(config)
    assert {"client.learning_rate", "num_rounds", "fedanchor.temperature", "client.proximal"} <= numbers.keys()
    assert "data.alpha" not in numbers  # it decides who has which images
    others = {name: value + 1 if isinstance(value, int) else 0.9 * value for name, value in numbers.items()}
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(others)
    assert text_of(changed) == text_of(config)


def test_configurations_that_train_together_end_as_alone(tmp_path):
    """Numbers of the server's training, of labelling and of the clients' steps."""
    configs = [make_config("fedanchor") for _ in range(2)]
    for config, rate, threshold, decay in zip(configs, (0.02, 0.05), (0.3, 0.6), (1e-3, 1e-2)):
        config.update_from_flattened_dict(
            {"num_rounds": 2, "seeds": (3,), "client.learning_rate": rate, "server.learning_rate": rate / 2,
             "confidence.threshold": threshold, "client.weight_decay": decay, "server.pretrain_epochs": 1}
        )  # fmt: skip
    alone = [train(config, tmp_path / f"alone_{number}")[0] for number, config in enumerate(configs)]
    folders = [tmp_path / "one", tmp_path / "other"]
    together = train_together(configs, folders)
    for one, other in zip(alone, together):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), one, other)
    first, second = (jax.tree.leaves(state.model.params) for state in together)
    assert max(float(np.max(np.abs(a - b))) for a, b in zip(first, second)) > 1e-2
    for number, folder in enumerate(folders):
        one, other = (
            [json.loads(line) for line in (place / "seed_3" / "metrics.jsonl").read_text().splitlines()]
            for place in (tmp_path / f"alone_{number}", folder)
        )
        assert [line["round"] for line in other] == [1, 2]
        for a, b in zip(one, other):
            assert a.keys() == b.keys()
            np.testing.assert_allclose([a[key] for key in a], [b[key] for key in a], rtol=1e-3, atol=1e-4)


def test_what_decides_a_program_shares_none(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(programs, "_KEPT", {})
    monkeypatch.setattr(programs, "MOST_KEPT", 1)

    def shares(**fields):
        train(make_stub_config(num_rounds=1, **fields), tmp_path / str(len(list(tmp_path.iterdir()))))
        return "compiled before" in capfd.readouterr().err

    assert not shares() and shares(**{"client.learning_rate": 0.5})
    assert not shares(**{"availability.never": 0.3}) and shares(**{"availability.never": 0.1})
    assert not shares()  # only the last one was kept
    with jax.default_matmul_precision("highest"):
        assert not shares()


def test_a_registered_method_may_change_while_its_name_stays(tmp_path, capfd, monkeypatch, registry):
    """As a cell of a notebook does that is run again; several seeds of one call still share a program."""
    monkeypatch.setattr(programs, "_KEPT", {})
    register("mine", stub)
    for number in range(2):
        train(make_stub_config(method="mine", num_rounds=1, seeds=(0, 1)), tmp_path / str(number))
        assert capfd.readouterr().err.count("compiled before") == 1


def test_a_method_that_branches_on_a_number_is_told_in_one_line(tmp_path):
    for kind in ("switches", "branches"):
        (tmp_path / f"{kind}.py").write_text(OWN.format(kind=kind))

    def built(kind):
        build_experiment(add_section(make_fedanchor_config(method=f"{tmp_path}/{kind}.py:own")))

    built("switches")
    with pytest.raises(UserError, match=r"line 17 of .*branches.py needs a value .* is_on\(number\).* static=True"):
        built("branches")
