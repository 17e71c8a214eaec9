"""A method of a few numbers and a backbone without weights, for tests of files, signals, output, reports and sweeps.

A run of it has everything that a run has: uploads, checkpoints, records with the names of FedAnchor's metrics. A client
adds noise of its own key to the model, so each round has other figures, and a resumed run must know where it was. Its
program compiles in a second, and later runs of the same shapes take well under a second, see `compile_program`.

In a process of its own a test names it by its path: `--config.method={STUB} --config.model.name={STUB_BACKBONE}`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.data.labels import LABELS
from fedjax_ssl.engine import Broadcast, Finished, Jobs, Method, Phase, State, Upload
from fedjax_ssl.methods import Entry
from tests.helpers.runs import ROOT, make_fedanchor_config

STUB = f"{ROOT / 'tests' / 'helpers' / 'stub.py'}:stub"
STUB_BACKBONE = f"{ROOT / 'tests' / 'helpers' / 'stub.py'}:StubBackbone"
# What its clients record beside counts and test figures; losses fall with the rounds.
METRICS = {
    "client_loss": 2.0, "fix_loss": 1.2, "mix_loss": 0.8, "contrastive_loss": 0.6, "pseudo_label_accuracy": 0.7,
    "pseudo_label_accuracy_anchor_head": 0.7, "pseudo_label_accuracy_classification_head": 0.4,
    "qualified_accuracy": 0.75, "qualified_per_client": 30.0, "qualified_share": 0.9, "score_gap": 0.2,
}  # fmt: skip


class StubBackbone(nn.Module):
    """Every eighth number of an input, times a weight: [B, n / 8]."""

    normalisation: str = "none"

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * inputs.reshape(len(inputs), -1)[:, 3::8].astype(jnp.float32)


def stub(problem):
    """A method whose clients add noise to the model; it reads neither images nor labels."""

    def noisy(model, key):
        leaves, structure = jax.tree.flatten(model)
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten([x + 0.2 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)])

    def prepare(received, data, cohort, previous):
        return Jobs(jnp.ones_like(cohort.clients), jnp.int32(0) * cohort.clients)

    def finish(received, work, model, steps):
        falls = {name: value / received.extra for name, value in METRICS.items() if name.endswith("_loss")}
        return Finished(Upload(model), {}, {**jax.tree.map(jnp.float32, METRICS), **falls})

    phase = Phase(
        prepare=prepare,
        start=lambda received, data, work, own: received.model,
        step=lambda received, data, work, model, number, key: noisy(model, key),
        finish=finish,
    )

    def aggregate(state, data, received, key):
        counted = received.accepted.astype(jnp.float32)
        shares = counted / jnp.maximum(jnp.sum(counted), 1)
        params = jax.tree.map(
            lambda rows, old: jnp.where(jnp.any(received.accepted), jnp.tensordot(shares, rows, 1), old),
            received.uploads.model.params,
            state.model.params,
        )
        return state._replace(model=state.model._replace(params=params)), {
            "update_norm": jnp.float32(0.2),
            "common_direction": jnp.float32(0.5),
        }

    return Method(
        init=lambda data, key: State(jnp.int32(0), problem.network.init(key)),
        broadcast=lambda state, data, key: Broadcast(state.model, jnp.float32(0.1), state.round + 1.0),
        phases=(phase,),
        aggregate=aggregate,
        server_after=lambda state, data, key: (state, {"server_loss": 2.0 / (state.round + 1.0)}),
        statistics=lambda state, data, clients, key: state,
    )


stub = Entry(stub, title="Stub", settings=LABELS, needs_labels=False, confidence=())


def make_stub_config(**overrides):
    """The tiny run of `tests.helpers.runs` with the stub: four rounds, checkpoints after the second and the fourth."""
    fields = {"method": STUB, "model.name": STUB_BACKBONE, "model.normalisation": "none", "augment.flavour": "none"}
    return make_fedanchor_config(**{**fields, **overrides})
