"""Numbers that only fall: lines by room, fields, refusals, floors, arrows between rooms, words, a reader's cost.

tests/size.json has the numbers that were reached. If one is smaller now, `python -m benchmarks.size --write` notes it.
Raising one needs a reason in the commit's message. The compiled programs are held by `CompileBudget`, see conftest.py.
"""

import json

from tests.helpers.size import HELD, measure

NOT_HELD = ("tests: lines",)  # a new test needs no reason


def flat(numbers):
    by_room = {f"lines of {room}": lines for room, lines in numbers["lines by room"].items()}
    return {name: number for name, number in {**numbers, **by_room}.items() if isinstance(number, int)}


def larger(found, held):
    """What is larger than it was; a new room is."""
    pairs = {name: (number, held.get(name, 0)) for name, number in found.items() if name not in NOT_HELD}
    return [f"{name}: {now}, was {before}" for name, (now, before) in pairs.items() if now > before]


def test_no_number_has_risen():
    found = flat(measure())
    assert found["fields"] > 100 and found["words by hand"] > 10_000 and found["fixmatch: files"] > 3
    assert larger(found, flat(json.loads(HELD.read_text()))) == []
