"""A residual connection over time: every few epochs a model is drawn back to a record of itself (CBAFed)."""

from typing import Any

import jax

from fedjax_ssl.learning.trees import where


def drawn_back(
    model: Any, record: Any, epoch: jax.Array, weight: jax.Array | float, every: int, is_over: jax.Array | bool = True
) -> tuple[Any, Any]:
    """The model and the record behind epoch e: (weight record + model) / (weight + 1) if `every` divides e > 0.

    Args:
        model, record: pytrees of the same form, statistics of normalisation included.
        epoch: int32 [], e.
        weight: of the record against the model's 1.
        every: epochs from one such mean to the next.
        is_over: bool [], whether the epoch is; else nothing changes.
    """
    is_due = is_over & (epoch > 0) & (epoch % every == 0)
    mean = jax.tree.map(lambda old, new: (weight * old + new) / (weight + 1), record, model)
    return where(is_due, mean, model), where(is_due, mean, record)
