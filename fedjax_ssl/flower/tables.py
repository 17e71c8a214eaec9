"""Finds tables of images and labels that a stage reads as a whole, though a side has only its own rows."""

from typing import Any

from jax.extend.core import Literal

from fedjax_ssl.run.dependence import Trace

TABLES = ("inputs", "visible_labels")
ROWS = ("gather", "dynamic_slice")  # operations that read rows of their first argument, at indices from the others


def used_whole(traced: Trace) -> list[str]:
    """The tables that a stage reads other than by row indices, such as with a mask or a mean over all rows.

    It does not check where the indices come from.

    Args:
        traced: of the stage, whose second argument is the federation's data.
    """
    jaxpr, paths = traced
    return [name for name in TABLES if _is_used_whole(jaxpr, [path == f"[1].{name}" for path in paths])]


def _is_used_whole(jaxpr: Any, is_table: list[bool]) -> bool:
    tables = {var for var, is_one in zip(jaxpr.invars, is_table) if is_one}
    read = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    if tables & read:
        return True
    for equation in reversed(jaxpr.eqns):
        if read.isdisjoint(equation.outvars):
            continue  # only its shape is used
        read.update(var for var in equation.invars if not isinstance(var, Literal))
        given = [not isinstance(var, Literal) and var in tables for var in equation.invars]
        if not any(given) or (equation.primitive.name in ROWS and not any(given[1:])):
            continue
        # A loop's first arguments are constants of its condition. The body of a loop and the branches of a condition
        # take the last arguments; other calls take all.
        of_condition = equation.params.get("cond_nconsts", 0)
        inner = [
            getattr(one, "jaxpr", one)
            for name, value in equation.params.items()
            for one in (value if isinstance(value, tuple) else (value,))
            if hasattr(one, "eqns") and name != "cond_jaxpr"
        ]
        if any(given[:of_condition]) or not inner:
            return True
        if any(_is_used_whole(each, given[-len(each.invars) :]) for each in inner):
            return True
    return False
