"""A federation of numbers for the engine's own tests: the model is one number, an image one pixel.

`python -m tests.helpers.toy_federation DEVICES` prints the results of the same rounds on several devices; JAX fixes
their number when it starts.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.devices import AXIS
from fedjax_ssl.config import base_config
from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.engine.interface import (
    Broadcast,
    Finished,
    Jobs,
    Method,
    Phase,
    Problem,
    Received,
    Selection,
    State,
    Upload,
)
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from tests.helpers.federations import put_federation

CLIENTS = [[4, 1], [7], [0, 9, 3], [], [8, 2, 6]]  # rows of the image table
TRUTH = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1])


def federation(clients=CLIENTS, visible=None, num_images=10, seed=5):
    """One-pixel images with the value 10 times their row; labels are hidden, except those in the dict `visible`."""
    labels = np.full(num_images, -1, np.int32)
    for row, label in (visible or {}).items():
        labels[row] = label
    images = (10 * np.arange(num_images)).astype(np.uint8).reshape(num_images, 1, 1, 1)
    return put_federation(images, labels, clients, test_labels=(0, 1, 1, 1), seed=seed)


class OneNumber:
    """Predicts class 1 for every image if the model's number is above 0."""

    normalisation = "group"

    def predict(self, model, images):
        score = jnp.broadcast_to(model.params["classifier"], (len(images),))
        return Outputs(jnp.stack([-score, score], axis=1), {}, score[:, None])


def problem(clients_per_round=3, **fields):
    """The toy problem; `fields` set others by dotted names."""
    config = base_config()
    sizes = {"num_clients": len(CLIENTS), "clients_per_round": clients_per_round, "eval_batch_size": 4}
    config.update_from_flattened_dict({**sizes, **fields})
    return Problem(config, OneNumber(), None, None, num_classes=2)


def toy_state(**server):
    """Each client remembers 100 times its number, for changes by steps and for changes by labelling."""
    memory = 100 * jnp.arange(len(CLIENTS))
    clients = {"trained": memory.astype(jnp.float32), "labelled": memory}
    return State(jnp.int32(0), Model({"classifier": jnp.float32(1)}, {}), server, clients)


def toy_phase(in_turns=False):
    """Adds 1 + client in each step. A client with a true entry in `extra` sends NaN, one without examples nothing.

    It also remembers its row's number in the draw, or in its turn.
    """

    def prepare(received, data, cohort, previous):
        rows = jnp.arange(len(cohort.clients))
        fails = received.extra[rows + (len(rows) * cohort.group if in_turns else 0)]
        work = {"client": cohort.clients, "row": rows, "fails": fails, "personal": cohort.personal}
        steps = data.client_size[cohort.clients]
        own = {"labelled": cohort.own["labelled"] + 1 + rows}
        return Jobs(steps, work, own)

    def start(received, data, work, own):
        return {"x": received.model.params["classifier"], "trained": own["trained"]}

    def step(received, data, work, carry, index, key):
        return {"x": carry["x"] + 1 + work["client"], "trained": carry["trained"] + 10 + work["row"]}

    def finish(received, work, carry, num_steps):
        sent = jnp.where(work["fails"], jnp.nan, carry["x"])
        told = {"client": work["client"], "personal": work["personal"]}
        model = Model({"classifier": sent}, ())
        return Finished(Upload(model, told), {"trained": carry["trained"]}, {"steps": num_steps.astype(jnp.float32)})

    return Phase(prepare, start, step, finish)


def toy_method(turns=1, **others):
    """The draw and the failures are data in `State.server`, so all tests of a method share its program.

    `State.server` also stores what the server received.
    """

    def aggregate(state, data, received: Received, key):
        seen = {name: value for name, value in received._asdict().items() if value is not None}
        return state._replace(server={**state.server, "received": seen}), {}

    fields = {
        "init": lambda data, key: toy_state(),
        "broadcast": lambda state, data, key: Broadcast(state.model, jnp.float32(1), state.server["fails"]),
        "phases": (toy_phase(in_turns=turns > 1),),
        "aggregate": aggregate,
        "statistics": lambda state, data, clients, key: state,
        "select": lambda state, data, key: Selection(state.server["draw"], state.server.get("group"), turns),
    }
    return Method(**{**fields, **others})


def run(round_fn, clients, fails=None, data=None, **server):
    """A round of the toy method with this draw; returns (state, RoundResult)."""
    fails = jnp.array(fails or [False] * len(clients))
    state = toy_state(draw=jnp.array(clients, jnp.int32), fails=fails, **server)
    return round_fn(state, federation() if data is None else data, jnp.array(TRUTH))


# Client 4 three times; the last upload or the last two are dropped. Four devices order the rows differently: the draw's
# fifth job is the second of the first device, and comes before the second device's second job.
DRAWS = [
    ([4, 2, 4, 4, 2, 2], [False] * 6),
    ([4, 2, 4, 4, 2, 2], [False, False, False, False, False, True]),
    ([4, 2, 4, 4, 2, 2], [False, False, False, False, True, True]),
]


# The jobs of a draw that are not done are others than those that send NaN.
FAILING = {"availability.never": 0.6, "attack.kind": "sign_flip"}

TURNS = 3  # the same rows as three turns of two


def memories(round_fn):
    """The clients' memories after a round of each draw."""
    states = [run(round_fn, *draw)[0] for draw in DRAWS]
    return [{name: np.asarray(leaf).tolist() for name, leaf in state.clients.items()} for state in states]


def arrivals(round_fn):
    """The accepted rows of each draw if client 4 attacks: (client, number), sorted."""
    data, found = federation()._replace(attackers=Attackers(jnp.arange(5) == 4)), []
    for draw in DRAWS:
        received = run(round_fn, *draw, data=data)[0].server["received"]
        rows = zip(received["clients"], received["uploads"].model.params["classifier"], received["accepted"])
        found.append(sorted([int(client), float(number)] for client, number, accepted in rows if accepted))
    return found


def failing_round():
    """The round of `arrivals`, jitted."""
    return jax.jit(make_round(problem(**FAILING), toy_method(), lanes=1))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    with jax.set_mesh(mesh):
        rounds = [make_round(problem(), toy_method(turns), lanes=1) for turns in (1, TURNS)]
        found = [memories(jax.jit(round_fn)) for round_fn in rounds]
        print(json.dumps([*found, arrivals(failing_round())]))


if __name__ == "__main__":
    main()
