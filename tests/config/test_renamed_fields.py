"""Fields of earlier versions: messages for their overrides, and configurations of old runs."""

import json

import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.config import apply_arguments, complete, flatten, override
from fedjax_ssl.config.renamed import GONE, RENAMED, REPLICAS
from fedjax_ssl.fields import shared_fields

# The two sections with the defaults of the previous version.
THRESHOLD = {"kind": "fixed", "share": 0.5, "momentum": 0.9, "debias": "none"}
TRAINER = {
    "name": "flexmatch", "threshold": 0.95, "counters": "per_round", "labels_from": "received",
    "accepted": "trained_on", "warm_up": True, "momentum": 0.999, "fairness_weight": 0.01, "quantile": 0.0,
    "level_cap": 1.0, "clamp_least": 0.0, "clamp_most": 1.0, "uniform_alignment": True, "n_sigma": 2.0,
    "strength": 2.0, "estimate_from": 6, "estimate_momentum": 0.99, "histogram": "counts",
}  # fmt: skip


def old_config(method, threshold=None, trainer=None):
    """The configuration of a run of the previous version."""
    config = json.loads(json.dumps(apply_arguments(base_config(), method).to_dict()))
    del config["confidence"]
    return {**config, "threshold": {**THRESHOLD, **(threshold or {})}, "trainer": {**TRAINER, **(trainer or {})}}


@pytest.mark.parametrize(
    ("method", "threshold", "trainer", "changed"),
    [
        ("semifl", {}, {}, {}),
        ("fedanchor", {"kind": "share", "share": 0.3}, {}, {"kind": "share", "share": 0.3}),
        ("fixmatch", {"kind": "freematch"}, {}, {"kind": "freematch", "memory": "run", "momentum": 0.9}),
        ("sage", {"debias": "app_u"}, {"name": "softmatch"}, {"debias": "app_u"}),  # debias is not read by sage
        ("semianagg", {}, {}, {"kind": "flexmatch"}),
        ("fedavg_semi", {"debias": "app_u"}, {"name": "softmatch", "counters": "persistent", "n_sigma": 3.0},
         {"kind": "softmatch", "memory": "run", "n_sigma": 3.0, "debias": "app_u"}),
        ("twin_sight", {}, {"name": "fixmatch", "threshold": 0.8}, {"kind": "fixed"}),
        ("isofed", {}, {"name": "acr"}, {"kind": "fixed"}),
    ],
)  # fmt: skip
def test_an_old_configuration_has_the_names_of_today(method, threshold, trainer, changed):
    found = complete(old_config(method, threshold, trainer))
    assert "threshold" not in found and set(found) == set(base_config())
    assert found["confidence"] == {**shared_fields().config().confidence.to_dict(), **changed}
    assert found["trainer"]["name"] == ("acr" if trainer.get("name") == "acr" else "confidence")
    assert found["trainer"]["threshold"] == trainer.get("threshold", 0.95)
    assert set(found["trainer"]) == set(base_config().trainer)
    assert complete(found) == found


def test_an_old_section_that_is_none_is_one_line():
    for broken in ({"threshold": 3}, {"trainer": []}, {"threshold": {"kind": {}}}):
        with pytest.raises(UserError, match=r"^(threshold|trainer|confidence\.kind) is "):
            complete({**old_config("fixmatch"), **broken})


@pytest.mark.parametrize("field", RENAMED)
def test_an_override_by_an_old_name_is_told_the_new_one(field):
    assert RENAMED[field] in flatten(base_config().to_dict())
    with pytest.raises(UserError, match=rf"^config\.{field} is config\.{RENAMED[field]} now$"):
        override(base_config(), [f"--config.{field}=1"])


def test_a_field_that_has_another_name_keeps_its_value():
    config = json.loads(json.dumps(base_config().to_dict()))
    assert config["aggregation"].pop("byzantine_share") == 0.2
    old = {**config, "aggregation": {**config["aggregation"], "malicious_share": 0.3}}
    assert complete(old)["aggregation"] == {**config["aggregation"], "byzantine_share": 0.3}


@pytest.mark.parametrize("field", REPLICAS)
def test_an_old_switch_for_a_bug_is_the_replica_of_its_method(field):
    section, _, name = field.partition(".")
    config = json.loads(json.dumps(base_config().to_dict()))
    del config[section]["replica"]
    of_section = {other.partition(".")[2]: bug for other, bug in REPLICAS.items() if other.startswith(f"{section}.")}
    without = {other: "no bug" if isinstance(bug, str) else False for other, bug in of_section.items()}
    for switches, expected in ((of_section, True), (without, False)):
        found = complete({**config, section: {**config[section], **switches}})
        assert found[section]["replica"] is expected and name not in found[section]
    if len(of_section) > 1:
        with pytest.raises(UserError, match=rf"^{section}\.replica is for all bugs"):
            complete({**config, section: {**config[section], **without, name: of_section[name]}})


def test_a_field_that_went_is_told_and_left_out_of_old_configurations():
    config = json.loads(json.dumps(base_config().to_dict()))
    for field, left in GONE.items():
        section, _, name = field.partition(".")
        assert complete({**config, section: {**config[section], name: left}}) == config
        with pytest.raises(UserError, match=rf"^{field} is gone: it is always '{left}'"):
            complete({**config, section: {**config[section], name: "another"}})
        with pytest.raises(UserError, match=rf"^config\.{field} is gone: it is always '{left}'$"):
            override(base_config(), [f"--config.{field}=1"])
