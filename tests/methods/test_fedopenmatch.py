"""FedOpenMatch's report counts the labels that its one-vs-all head accepts; against NumPy."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client import Examples
from fedjax_ssl.engine import Jobs, Phase, Report
from fedjax_ssl.methods.fedopenmatch import ONE_VS_ALL, with_inliers
from tests.helpers.small_problem import (
    CLASSES,
    SmallNetwork,
    federation,
    pixels_of,
    prepare,
    sent_down,
    small_problem,
    statistics_of,
)

LEAST = 0.6


def test_labels_that_the_head_rejects_do_not_count():
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1]])
    problem = small_problem(
        "fedopenmatch", SmallNetwork(ONE_VS_ALL, head_dim=CLASSES), **{"fedopenmatch.inlier": LEAST}
    )
    labels = np.arange(10)[None] % CLASSES

    def confident(received, data, cohort, previous):
        examples = Examples.of(data, cohort)
        return Jobs(jnp.ones(1, jnp.int32), (), Report(jnp.asarray(labels), examples.present.at[0, 1].set(False)))

    received = sent_down(problem)
    job = prepare(with_inliers(problem, Phase(confident, None, None, None)), received, data, 0)
    model, rows = received.model, np.asarray(data.client_index)[0, :9]
    kernel, bias = (
        np.asarray(model.params[part][name]) for part, name in ((ONE_VS_ALL, "kernel"), ("backbone", "bias"))
    )
    z = (pixels_of(data, rows) - statistics_of(model)) @ kernel + 0.1 * bias.sum()
    accepted = 1 / (1 + np.exp(-z[np.arange(9), labels[0, :9]])) >= LEAST
    accepted |= np.asarray(data.visible_labels)[rows] >= 0  # visible labels count whatever the head says
    accepted[1] = False  # it was not confident
    assert 3 < accepted.sum() < 8
    np.testing.assert_array_equal(job.report.qualified, [*accepted, False])
