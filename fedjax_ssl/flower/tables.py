"""Which tables of images and labels a stage reads as a whole, where a side of a federation has only its own rows."""

from typing import Any

from jax.extend.core import Literal

from fedjax_ssl.run.dependence import Trace

TABLES = ("inputs", "visible_labels")
ROWS = ("gather", "dynamic_slice")  # take of their first argument what the others name


def used_whole(traced: Trace) -> list[str]:
    """The tables that a stage reads otherwise than by named rows, such as a mask or a mean of all rows.

    Where the rows' numbers come from is not looked at.

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
            continue  # it was traced for its shape alone
        read.update(var for var in equation.invars if not isinstance(var, Literal))
        given = [not isinstance(var, Literal) and var in tables for var in equation.invars]
        if not any(given) or (equation.primitive.name in ROWS and not any(given[1:])):
            continue
        # The condition of a loop has its constants before the body's. The branches of a condition, and a loop's body,
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
