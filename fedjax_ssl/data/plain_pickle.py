"""Reads numbers, texts, lists, tuples, dicts and NumPy arrays from a pickle without running it.

A pickle is a program. Python's own reader calls whatever functions it names, and NumPy's functions may treat an
attacker's bytes as pointers. This reader calls nothing. It accepts only the few names below and refuses all others.
"""

import pickletools
from typing import Any

import numpy as np

MAX_BYTES = 200_000_000

_OF_NUMPY = ("numpy.core", "numpy._core")  # the second since NumPy 2
_DTYPE, _CLASS, _ENCODE, _DICT = "numpy dtype", "numpy ndarray", "_codecs encode", "collections OrderedDict"
_EMPTY_ARRAYS, _NUMBERS = ([f"{core}.multiarray {name}" for core in _OF_NUMPY] for name in ("_reconstruct", "scalar"))
_NO_BYTES = "__builtin__ bytes"  # before protocol 3
_BUFFERS = [f"{core}.numeric _frombuffer" for core in _OF_NUMPY]
_KNOWN = {_DTYPE, _CLASS, _ENCODE, _DICT, _NO_BYTES, *_EMPTY_ARRAYS, *_NUMBERS, *_BUFFERS}
_KINDS = {sign + size for sign in "iu" for size in "1248"}

_VALUES = {  # opcodes that contain their value
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "BYTEARRAY8",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OF_ITEMS = {"TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"}  # they use everything above the last mark


class Array:
    """An array of whole numbers.

    Attributes:
        values: int64 [n], flattened.
    """

    values = np.zeros(0, np.int64)  # until the pickle provides them


class _Name(str):
    """'MODULE NAME' of a function that the pickle calls."""


class _Kind:
    """A dtype of integers."""

    def __init__(self, name: str):
        self.name, self.order = name, "<"


def read_plain(content: bytes) -> Any:
    """Reads the plain data in a pickle of any protocol: lists, tuples, dicts with number or text keys, and `Array`s.

    Raises:
        Exception: (of any type) the pickle contains or names something else, or is damaged.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has {len(content)} bytes, but at most {MAX_BYTES} are read")
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        name, items = opcode.name, []
        if name in _OF_ITEMS:
            place = marks.pop()
            items = stack[place:]
            del stack[place:]
        if name in _VALUES:
            stack.append(argument)
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("EMPTY_LIST", "LIST"):
            stack.append(items)
        elif name in ("EMPTY_DICT", "DICT"):
            stack.append(_put({}, items))
        elif name == "TUPLE":
            stack.append(tuple(items))
        elif name in _TUPLES:
            place = len(stack) - _TUPLES[name]
            stack[place:] = [tuple(stack[place:])]
        elif name in ("APPEND", "APPENDS"):
            items = items if name == "APPENDS" else [stack.pop()]
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            value, key = ([], []) if name == "SETITEMS" else ([stack.pop()], [stack.pop()])
            _put(_of(dict, stack[-1]), items + key + value)
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(name))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_known(argument))
        elif name == "STACK_GLOBAL":
            function, module = _of(str, stack.pop()), _of(str, stack.pop())
            stack.append(_known(f"{module} {function}"))
        elif name == "REDUCE":
            arguments = _of(tuple, stack.pop())
            stack.append(_made(_of(_Name, stack.pop()), arguments))
        elif name == "BUILD":
            state = _of(tuple, stack.pop())
            _complete(stack[-1], state)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the opcode {name}, which plain data have not")
    return stack.pop()


def _known(name: str) -> _Name:
    if name not in _KNOWN:
        raise ValueError(f"it names {name.replace(' ', '.', 1):.80}")
    return _Name(name)


def _made(name: _Name, arguments: tuple[Any, ...]) -> Any:
    """A placeholder for the result of a call."""
    if name == _DTYPE and arguments[0] in _KINDS:
        return _Kind(arguments[0])
    if name in _EMPTY_ARRAYS:
        return Array()  # `_complete` sets its numbers
    if name in _NUMBERS:
        kind, content = arguments
        (value,) = _numbers(content, kind, ())
        return int(value)
    if name in _BUFFERS:
        content, kind, shape, _ = arguments
        made = Array()
        made.values = _numbers(content, kind, shape)
        return made
    if name == _ENCODE and arguments[1:] in ((), ("latin1",)):
        return _of(str, arguments[0]).encode("latin1")
    if name in (_DICT, _NO_BYTES) and not arguments:
        return {} if name == _DICT else b""
    raise ValueError(f"it calls {name.replace(' ', '.', 1)} with something that is not a whole number")


def _complete(made: Any, state: tuple[Any, ...]) -> None:
    """Sets a dtype's byte order or an array's numbers."""
    if isinstance(made, _Kind) and state[1] in ("<", ">", "|", "="):
        made.order = state[1]
    elif isinstance(made, Array):
        _, shape, kind, by_column, content = state
        if by_column and len(shape) > 1:
            raise ValueError("it has a table by columns")
        made.values = _numbers(content, kind, shape)
    else:
        raise ValueError("it builds something that is not an array")


def _numbers(content: Any, kind: Any, shape: tuple[Any, ...]) -> np.ndarray:
    if isinstance(content, str):  # from Python 2
        content = content.encode("latin1")
    content = _of(bytes | bytearray, content)
    values = np.frombuffer(content, np.dtype(_of(_Kind, kind).order + kind.name)).astype(np.int64)
    count = 1
    for side in _of(tuple, shape):
        count *= _of(int, side)
    if count != len(values):
        raise ValueError(f"it has an array of {len(values)} numbers for {count}")
    return values


def _put(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """Adds alternating keys and values; keys must be texts or numbers, as others could be nested without limit."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, int | str):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        target[key] = value
    return target


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", str(kind)).strip("_").lower()
        raise ValueError(f"it has a {type(value).__name__} in the place of a {wanted}")
    return value
