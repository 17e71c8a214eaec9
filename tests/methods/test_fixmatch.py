"""FixMatch with a server in parallel: what it refuses; tests/official/fixmatch.py has whole rounds."""

import pytest

from fedjax_ssl import UserError
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.validation import validate
from tests.helpers.small_problem import small_problem


def build(**fields):
    problem = small_problem("fixmatch", **{"confidence.threshold": 0.6, **fields})
    validate(problem.config)
    return problem, METHODS["fixmatch"].factory(problem)


@pytest.mark.parametrize(("fields", "line"), [
    ({"data.labels": "clients"}, r"trains a server with labels, which has none here"),
    ({"personal_parts": ("classifier",)}, r"is not for fixmatch.server='parallel', whose server has its own model"),
])  # fmt: skip
def test_what_a_server_in_parallel_cannot_have_is_refused(fields, line):
    with pytest.raises(UserError, match=line):
        build(**{"fixmatch.server": "parallel", **fields})
