"""A round's line: bytes of clients that are absent or do not answer."""

import numpy as np
import pytest

from fedjax_ssl.run.observe.summary import to_record
from fedjax_ssl.run.observe.wire import Traffic


@pytest.mark.parametrize(("turns", "counts", "down", "up"), [
    (1, {}, 4 * 100 + 5 * 7, 2 * 10 + 5 * 3),
    (1, {"cohort_size": 3}, 3 * 100 + 4 * 7, 2 * 10 + 4 * 3),  # one of four rows has no client
    (1, {"answers": 2}, 4 * 100 + 5 * 7, 2 * 10 + 3 * 3),  # two of four clients hear, but send nothing
    (1, {"cohort_size": 3, "answers": 2}, 3 * 100 + 4 * 7, 2 * 10 + 3 * 3),
    (2, {"answers": 2}, 4 * 100 + 5 * 7, 2 * 10 + 5 * 3),  # they may have answered in another turn
])  # fmt: skip
def test_who_is_not_asked_or_does_not_answer_sends_no_statistics(turns, counts, down, up):
    """Four jobs of 100 bytes down and 10 up; five clients exchange statistics, each of 7 bytes down and 3 up."""
    traffic = Traffic(jobs=4, down=100, up=10, statistics_down=35, statistics_up=15, asked=5, turns=turns)
    metrics = {name: np.array(value) for name, value in {"round": 1, "uploads": 2, **counts}.items()}
    line = to_record(metrics, traffic)
    assert (line["bytes_down"], line["bytes_up"]) == (down, up)
