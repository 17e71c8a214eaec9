"""Today's names for fields of earlier versions, for messages and for the configurations of old runs."""

from typing import Any

from fedjax_ssl.errors import UserError

_RULES = {"fixmatch": "fixed", "acr": "fixed"}  # `trainer.name` -> `confidence.kind`; the others kept their names
_MEMORIES = {"per_round": "round", "persistent": "run"}  # `trainer.counters` -> `confidence.memory`
_BY_TRAINER = ("fedavg_semi", "semianagg", "isofed", "twin_sight")  # methods that read `trainer`, others `threshold`
_MOVED = (
    "momentum",
    "warm_up",
    "fairness_weight",
    "quantile",
    "level_cap",
    "clamp_least",
    "clamp_most",
    "uniform_alignment",
    "n_sigma",
)
RENAMED = {
    **{f"threshold.{name}": f"confidence.{name}" for name in ("kind", "share", "momentum", "debias")},
    **{f"trainer.{name}": f"confidence.{name}" for name in _MOVED},
    "trainer.counters": "confidence.memory",
}
METHODS = {"anchors_only": "server_only"}
_IN_PLACE = {  # same section and meaning
    "data.num_anchors": "data.server_labels",
    "data.anchors": "data.server_draw",
    "aggregation.malicious_share": "aggregation.byzantine_share",
}
RENAMED |= _IN_PLACE
# Earlier switches for bugs of a method's public code -> their value with the bug. Now METHOD.replica is the only one.
REPLICAS = {
    "fedcon.consistency_with": "itself",
    "fedcon.student": "persistent",
    "fedlabel.accumulate_gradients": True,
    "fedu.alias_first_target": True,
    "fedema.alias_first_target": True,
    "twin_sight.divisor": "xor",
}
RENAMED |= {field: f"{field.partition('.')[0]}.replica" for field in REPLICAS}
GONE = {"trainer.histogram": "counts"}  # removed fields -> the only value that still exists


def translated(old: dict[str, Any]) -> dict[str, Any]:
    """Translates a configuration of an earlier version to today's names; one of today's version stays the same.

    Args:
        old: nested dicts, as a run's folder has them.

    Raises:
        UserError: a section of the configuration is something else, or the run did what the library no longer does.
    """
    return _with_replica(_with_confidence(_with_new_names(_without_gone(old))))


def _taken(config: dict[str, Any], field: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """(a copy without the field, the field's section in it, [its value]); the list is empty if there is no field."""
    section, _, name = field.partition(".")
    own = config.get(section)
    if not isinstance(own, dict) or name not in own:
        return config, {}, []
    rest = {other: value for other, value in own.items() if other != name}
    return {**config, section: rest}, rest, [own[name]]


def _with_new_names(old: dict[str, Any]) -> dict[str, Any]:
    new = {**old, "method": METHODS.get(old["method"], old["method"])} if "method" in old else old
    for field, today in _IN_PLACE.items():
        new, section, values = _taken(new, field)
        for value in values:
            section[today.partition(".")[2]] = value
    return new


def _without_gone(old: dict[str, Any]) -> dict[str, Any]:
    new = old
    for field, left in GONE.items():
        new, _, values = _taken(new, field)
        if values not in ([], [left]):
            raise UserError(f"{field} is gone: it is always {left!r} now, and this run had something else")
    return new


def _with_replica(old: dict[str, Any]) -> dict[str, Any]:
    new = old
    for field, of_bug in REPLICAS.items():
        new, section, values = _taken(new, field)
        for value in values:
            has_bug = value == of_bug
            if section.setdefault("replica", has_bug) != has_bug:
                name = field.partition(".")[0]
                raise UserError(f"{name}.replica is for all bugs of its code at once, and this run has one of them")
    return new


def _with_confidence(old: dict[str, Any]) -> dict[str, Any]:
    """Converts the sections `threshold` and `trainer` to `confidence`."""
    if "threshold" not in old or "confidence" in old:
        return old
    threshold, trainer = old["threshold"], old.get("trainer", {})
    for section, value in {"threshold": threshold, "trainer": trainer}.items():
        if not isinstance(value, dict):
            raise UserError(f"{section} is {value!r}, but must be a section of fields")
    new = {name: value for name, value in old.items() if name != "threshold"}
    confidence = {name: threshold[name] for name in ("share", "debias") if name in threshold}
    confidence |= {name: trainer[name] for name in _MOVED if name in trainer}
    if old.get("method") in _BY_TRAINER:
        name, counters = trainer.get("name", "flexmatch"), trainer.get("counters", "per_round")
        confidence["kind"] = _RULES.get(str(name), name)
        confidence["memory"] = _MEMORIES.get(str(counters), counters)
    else:
        confidence["kind"] = threshold.get("kind", "fixed")
        if confidence["kind"] == "freematch":
            confidence |= {"memory": "run", "momentum": threshold.get("momentum", 0.9)}
    kept = {name: value for name, value in trainer.items() if f"trainer.{name}" not in RENAMED}
    if "name" in kept:
        kept["name"] = "acr" if kept["name"] == "acr" else "confidence"
    return {**new, "confidence": confidence, "trainer": kept}
