"""The page of claims is made from the committed records; its differences and verdicts follow from them."""

import importlib
import itertools
import re

import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.sweep import Sweep


@pytest.fixture
def claims(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "docs"))
    return importlib.import_module("claims")


def test_each_claim_names_rows_and_measures_of_boards_or_its_cost(claims):
    found = claims.load()
    shared = importlib.import_module("board_records")
    sweeps = {}
    for claim in found["claim"]:
        assert {"paper", "where", "says"} < claim.keys() and ("runs" in claim) != ("cost" in claim), claim["says"]
        assert claim.keys() <= {"paper", "where", "says", "points", "runs", "reason", "cost"}, claim["says"]
        assert claim.get("reason", "") in ("", *found["reason"]), claim["says"]
    for name, reason in found["reason"].items():
        assert not re.search(r"\d\d\.\d", reason.get("why", "")), f"{name} has a figure that is in no record"
    for claim in [*found["claim"], *found["reason"].values()]:
        for run in claims.each_board([*claim.get("runs", ()), *claim.get("tried", ())]):
            assert run.keys() <= {"on", "board", "row", "than", "measure", "than_measure", "than_board", "less"}
            for name in {"board", "than_board", "less"} & run.keys():
                place, _, board = run[name].rpartition("/")
                boards = claims.LEADERBOARD if place else claims.BOARDS
                sweeps.setdefault(run[name], shared.load_sweep(f"{boards.sweep}:{board}"))
                assert place == "leaderboard" or board in found["core_minutes"]
            columns = re.findall(r"\{(\w+)\}", run["row"] + run["than"])
            assert claims.MEASURES.keys() >= set(columns)
            row, than = (re.sub(r"\{\w+\}", "1", run[name]) for name in ("row", "than"))
            assert row in sweeps[run["board"]].methods, run
            assert than in sweeps[run.get("than_board", run["board"])].methods, run
            for name in {"measure", "than_measure"} & run.keys():
                assert run[name] in (*claims.MEASURES, "MB", "seconds", claims.DISTANCES)
    assert {claim["paper"] for claim in found["claim"]} > set(claims.SEEDS)


def test_the_verdict_is_that_of_the_papers_order_and_of_the_interval(claims):
    draws = np.random.default_rng(0).normal(size=5)
    for mean, spread, points in itertools.product(
        (-3.0, -0.3, 0.0, 0.3, 0.8, 3.0), (0.1, 0.5, 2.0), (None, 0.0, 0.5, 6.0)
    ):
        values = mean + spread * (draws - draws.mean())
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        if points == 0:
            expected = "holds" if max(-low, high) <= 1 else "cannot be told" if low <= 0 <= high else "does not hold"
        elif low > 0:
            expected = "holds"
        else:
            small = points == 6.0 and high < 1
            expected = "does not hold" if high < 0 or small else "cannot be told"
        assert claims.verdict(list(values), points) == expected


def record(claims, method, seed, at, **more):
    cells = dict.fromkeys(claims.BOARDS.columns(), "1") | {"chosen": "", "labels right": ""}
    return {**cells, "method": method, "seed": str(seed), "accuracies": f"{at - 1} {at + 1}", **more}


ROWS = ("A", "B", "A, 1", "A, 2")


@pytest.fixture
def written(claims, tmp_path, monkeypatch):
    """Writes records of the boards `near` and `far`, and returns the page of some comparisons."""
    shared = importlib.import_module("board_records")
    common = {"num_clients": 9, "clients_per_round": 3, "data.alpha": 0.5}
    sweep = Sweep("x.py", dict.fromkeys(ROWS, ""), common=common, seeds=(0, 1, 2, 3, 4))
    for module in (shared, claims):
        monkeypatch.setattr(module, "load_sweep", lambda name: sweep)
    monkeypatch.setattr(shared, "LAST", 2)
    monkeypatch.setattr(claims, "BOARDS", claims.BOARDS._replace(folder=tmp_path))
    runs = [
        {"row": "A", "than": "B"},
        {"row": "A", "than": "B", "less": "far"},
        {"row": "A", "than": "A", "than_board": "far"},
        {"row": "A", "than": "A", "measure": "labels right", "than_measure": "passing"},
        {"row": "A", "than": "B", "measure": "distances"},
        {"row": "A", "than": "A, {heaviest}"},
    ]
    runs = [{**run, "on": ["near"]} for run in runs]
    claim = {"paper": "FedIL", "where": "Table 9", "says": "A beats B.", "points": 3.0, "runs": runs, "reason": "far"}
    reasons = {"far": {"tried": [{"row": "A", "than": "B", "on": ["far"]}]}}
    found = {"title": {}, "core_minutes": {"near": 7, "far": 8}, "claim": [claim], "reason": reasons}
    monkeypatch.setattr(claims, "load", lambda: found)

    def page(boards):
        for name, lines in boards.items():
            rows = [",".join(f'"{cell}"' for cell in line.values()) for line in lines]
            (tmp_path / f"{name}.csv").write_text("\n".join([",".join(claims.BOARDS.columns()), *rows]))
        return claims.page()

    return page


def test_a_figure_that_does_not_follow_from_the_records_is_found(claims, written):
    draws = np.random.default_rng(1).normal(size=(3, 4, 5)).round(3) + np.array([[70.0], [60.0], [65.0], [62.0]])
    heaviest = (1, 2, 2, 1, 2)
    boards = {
        name: [
            record(
                claims,
                row,
                seed,
                accuracy,
                **{"labels right": f"{draws[2, place, seed]:.3f}", "heaviest": str(heaviest[seed])},
            )
            for place, row in enumerate(ROWS)
            for seed, accuracy in enumerate(draws[number, place])
        ]
        for number, name in enumerate(("near", "far"))
    }
    page = " ".join(written(boards).split())  # lists are wrapped
    near, far, labels = draws[0, 0] - draws[0, 1], draws[1, 0] - draws[1, 1], draws[2, 0] - 1.0
    distances = np.abs(draws[0] - np.median(draws[0], axis=1, keepdims=True))
    without = draws[0, 0] - [draws[0, 1 + client, seed] for seed, client in enumerate(heaviest)]
    for values in (near, near - far, draws[0, 0] - draws[1, 0], labels, distances[0] - distances[1], without):
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert f"| {values.mean():+.2f} ± {(high - low) / 2:.2f} |" in page
    places = np.argsort(-draws[0].mean(axis=1))
    shown = "; ".join(f"{ROWS[place]} {draws[0, place].mean():.1f}" for place in places)
    assert f"| `near` | 3 of 9, alpha 0.5 | {shown} | 1 | - |" in page
    swapped = [{**line, "method": {"A": "B", "B": "A"}.get(line["method"], line["method"])} for line in boards["near"]]
    assert "A beats B.*" not in page
    half = stats.ttest_1samp(far, 0).confidence_interval(0.95).high - far.mean()
    tried = f"* *A beats B.* {claims.UNKNOWN} Tried: A minus B, `far`: {far.mean():+.2f} ± {half:.2f}."
    assert tried in " ".join(written({**boards, "near": swapped}).split())
    assert f"* *A beats B.* {claims.UNKNOWN}{claims.UNTRIED}\n" in written(
        {"near": swapped, "far": boards["far"][:5]}
    )  # no B
    changed = [{**boards["near"][0], "accuracies": "60 61"}, *boards["near"][1:]]
    assert " ".join(written({**boards, "near": changed}).split()) != page
    with pytest.raises(UserError, match="runs of 1 and 2 tries"):
        written({"near": [{**boards["near"][0], "tries": "2"}, *boards["near"][1:]]})


def test_configs_say_what_is_gained_at_our_scale(claims):
    for path in claims.CONFIGS:
        text = path.read_text(encoding="utf-8")
        assert claims.GAIN.search(text) or path.stem == "quickstart_text", path  # no board has texts
        assert claims.with_gain(text) == text, f"{path}: run docs/claims.py"


def test_the_committed_records_make_a_page(claims):
    page = claims.page()
    assert all(f"## {name}, [arXiv" in page for name in claims.SEEDS)
    assert all(f"| `{board}` | " in page for board in claims.load()["core_minutes"])
    assert set(claims.BOARDS.recorded()) <= claims.load()["core_minutes"].keys()
