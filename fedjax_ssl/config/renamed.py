"""Fields of earlier versions: their names of today, for messages and for the configurations of old runs."""

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
    "data.num_anchors": "data.server_labels",
    "data.anchors": "data.server_draw",
}
METHODS = {"anchors_only": "server_only"}


def translated(old: dict[str, Any]) -> dict[str, Any]:
    """A configuration of an earlier version with the names of today; of today's version it is what it was.

    Args:
        old: nested dicts, as a run's folder has them.

    Raises:
        UserError: a section is none.
    """
    return _with_confidence(_with_server_labels(old))


def _with_server_labels(old: dict[str, Any]) -> dict[str, Any]:
    names = {name.removeprefix("data."): new.removeprefix("data.") for name, new in RENAMED.items() if "data." in name}
    new = {**old, "method": METHODS.get(old["method"], old["method"])} if "method" in old else dict(old)
    if isinstance(old.get("data"), dict):
        new["data"] = {names.get(name, name): value for name, value in old["data"].items()}
    return new


def _with_confidence(old: dict[str, Any]) -> dict[str, Any]:
    if "threshold" not in old or "confidence" in old:
        return old
    threshold, trainer = old["threshold"], old.get("trainer", {})
    for section, value in {"threshold": threshold, "trainer": trainer}.items():
        if not isinstance(value, dict):
            raise UserError(f"{section} is {value!r}, and no section of fields")
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
