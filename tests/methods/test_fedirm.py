"""FedIRM's mean of relation matrices, and what it refuses; tests/official/fedirm.py has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.dry_run import dry_run
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.runs import SMALL, make_fedanchor_config
from tests.helpers.small_problem import federation, small_problem
from tests.helpers.tiny_methods import make_config

FIELDS = {"data.labels": "some_clients", "model.normalisation": "group"}
GIVEN = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])


def test_the_server_has_the_mean_over_clients_with_labels():
    """Of four uploads one has no labels, one is not accepted, and one has taken twice as many steps."""
    data = federation([[0, 1, 1, 0, 0], [-1] * 7, [-1] * 3])
    method = METHODS["fedirm"].factory(small_problem("fedirm"))
    state = method.init(data, jax.random.key(0))
    assert not np.any(method.broadcast(state, data, jax.random.key(0)).extra["relations"])
    told = np.stack([GIVEN, 2 * GIVEN[::-1], GIVEN[:, ::-1], GIVEN.T]).astype(np.float32)
    uploads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state.model)

    def after(state, labelled, accepted):
        upload = Upload(uploads, {"relations": jnp.asarray(told), "labelled": jnp.float32(labelled)})
        sizes = jnp.full(4, 5)
        received = Received(upload, jnp.array(accepted), jnp.arange(4), None, sizes, sizes)
        return method.aggregate(state, data, received, jax.random.key(0))[0]

    state = after(state, [3, 3, 0, 3], [True, True, True, False])
    np.testing.assert_allclose(state.server["relations"], (GIVEN + GIVEN[::-1]) / 2, atol=1e-6)
    kept = after(state, [0, 0, 0, 3], [True, True, True, False])
    np.testing.assert_array_equal(kept.server["relations"], state.server["relations"])


def test_relations_travel_without_noise_so_privacy_is_refused():
    config = make_config("fedirm")
    config.update_from_flattened_dict({
        "privacy.noise": 0.5, "aggregation.clip_norm": 1.0, "model.normalisation": "group",
    })  # fmt: skip
    with pytest.raises(UserError, match=r"^privacy.noise with fedirm: .*relations") as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_it_needs_no_field_besides_its_name():
    """As in `--config.method=fedirm`: its threshold is then its own, 0.3."""
    config = make_fedanchor_config(**SMALL, method="fedirm", **FIELDS)
    assert config.confidence.threshold is None and "FLOP" in dry_run(config)
