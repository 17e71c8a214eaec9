"""Many rounds as one program, for one run or several at once: seeds, or settings that differ in numbers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData, seed_axes
from fedjax_ssl.engine.interface import State
from fedjax_ssl.engine.round import RoundFunction, RoundResult
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import where_rows


def over_seeds(round_fn: RoundFunction) -> RoundFunction:
    """Makes a round for several seeds at once.

    States, results and the data that differ between seeds (see `seed_axes`) have a leading axis. The clients of all
    seeds share the lanes. All seeds are at the same round of equally many, see `measure_if_due`.
    """
    axes = State._make((None, 0, 0, 0, 0))

    def rounds(states: State, data: FederatedData, hidden_labels: jax.Array) -> tuple[State, RoundResult]:
        once = {name: number[0] for name, number in data.numbers.items() if name == "num_rounds"}
        of_numbers = {name: None if name in once else 0 for name in data.numbers}
        in_axes = axes, seed_axes(data)._replace(numbers=of_numbers), None
        together = jax.vmap(round_fn, in_axes=in_axes, out_axes=(axes, 0))
        data = data._replace(numbers={**data.numbers, **once})
        after, result = together(states._replace(round=states.round[0]), data, hidden_labels)
        return after._replace(round=jnp.broadcast_to(after.round, states.round.shape)), result

    return rounds


class Best(NamedTuple):
    """The model with the largest figure of a dispatch's rounds, the first of equals; of several seeds with an axis."""

    figure: jax.Array  # float32 []; -1 before a round has it
    model: Model

    def after(self, name: str, model: Model, result: RoundResult) -> "Best":
        """The better one of this and the model after a round, by the metric `name` of its result."""
        figure = jnp.where(result.lacks.get(name, False), -1.0, result.metrics[name])
        return where_rows(figure > self.figure, Best(figure, model), self)


class Dispatch(NamedTuple):
    """The result of a dispatch: several rounds in one call of the compiled program."""

    state: State  # after the last round that ran
    results: RoundResult  # leaves [capacity, ...]; the first `rounds_done` entries are filled
    rounds_done: jax.Array  # int32 []
    healthy: jax.Array  # bool [], whether the last round was healthy for every seed, see `RoundResult`
    best: Best | None = None  # of these rounds, if it is kept


# (state, data, hidden labels, int32 [] number of rounds) -> the result.
DispatchFunction = Callable[[State, FederatedData, jax.Array, jax.Array], Dispatch]


def make_dispatch(round_fn: RoundFunction, capacity: int, best_by: str = "") -> DispatchFunction:
    """Makes a program of up to `capacity` rounds. Their number is traced, so another number needs no recompilation.

    It ends early if a round leaves a non-finite model, or if every upload of a round was dropped. `best_by` is the
    metric by which the best model of these rounds is kept; '': none is kept.
    """

    round_fn = jax.jit(round_fn)  # traced once, here and in the loop

    def dispatch(state: State, data: FederatedData, hidden_labels: jax.Array, num_rounds) -> Dispatch:
        shapes = jax.eval_shape(round_fn, state, data, hidden_labels)[1]
        buffer = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), shapes)

        def body(so_far: Dispatch) -> Dispatch:
            state, result = round_fn(so_far.state, data, hidden_labels)
            buffer = jax.tree.map(lambda all_, one: all_.at[so_far.rounds_done].set(one), so_far.results, result)
            best = so_far.best and so_far.best.after(best_by, state.model, result)
            return Dispatch(state, buffer, so_far.rounds_done + 1, jnp.all(result.healthy), best)

        def goes_on(so_far: Dispatch) -> jax.Array:
            return (so_far.rounds_done < jnp.minimum(num_rounds, capacity)) & so_far.healthy

        best = Best(jnp.full_like(shapes.metrics[best_by], -1.0), state.model) if best_by else None
        return jax.lax.while_loop(goes_on, body, Dispatch(state, buffer, jnp.int32(0), jnp.bool_(True), best))

    return dispatch
