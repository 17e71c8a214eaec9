"""Reads a compiled program's text: its computations, how often each runs, and its cost."""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


class Instruction(NamedTuple):
    """An instruction."""

    name: str
    type: str  # of its result, as in the text
    opcode: str  # such as 'fusion'
    line: str  # the whole line

    def attribute(self, pattern: str, otherwise: str = "") -> str:
        """The first group of a pattern in the line."""
        found = re.search(pattern, self.line)
        return found.group(1) if found else otherwise

    @property
    def op_name(self) -> str:
        """The scopes and JAX's operation that it comes from."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate; 0 if there is none."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"', "0"))

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each array of the result."""
        return [(dtype, tuple(map(int, filter(None, sides.split(","))))) for dtype, sides in _ARRAY.findall(self.type)]

    @property
    def convolution(self) -> str:
        """Its kind, such as 'convolution 3x3' or 'BackwardFilter 3x3 in 10 groups'; '' for other instructions."""
        cudnn = self.attribute(r'custom_call_target="__cudnn\$conv(\w+)"')
        if self.opcode != "convolution" and not cudnn:
            return ""
        window = self.attribute(r"window=\{size=([\dx]+)")
        if "x" not in window:  # one axis: a batch of products
            return "matrix product"
        groups = [self.attribute(rf"{kind}_group_count=(\d+)", "1") for kind in ("feature", "batch")]
        words = [f" in {number} {kind}groups" for number, kind in zip(groups, ("", "batch ")) if number != "1"]
        return f"{cudnn or 'convolution'} {window}{''.join(words)}"


class Program:
    """A compiled program's text.

    Args:
        text: from `jax.stages.Compiled.as_text`.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        inside = None
        for line in text.splitlines():
            if (header := _COMPUTATION.match(line)) is not None:
                inside = self.computations.setdefault(header.group(2), [])
                self.entry = header.group(2) if header.group(1) else self.entry
            elif inside is not None and (found := _INSTRUCTION.match(line)) is not None:
                inside.append(Instruction(*found.groups(), line))

    def walk(self, computation: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """The instructions in the order of their runs, and how often each runs.

        Loops of unknown length count once, and so does every branch of a condition. A fusion is one instruction.

        Args:
            computation: where to begin; None: with the whole program.
            times: how often it runs.
        """
        for instruction in self.computations[computation or self.entry]:
            yield instruction, times
            if instruction.opcode == "while":
                trips = int(instruction.attribute(r'known_trip_count"?:\{"?n"?:"(\d+)"', "1"))
                yield from self.walk(instruction.attribute(r"body=%?([\w.\-]+)"), times * trips)
            elif instruction.opcode == "conditional":
                for name in re.findall(r"%?([\w.\-]+)", instruction.attribute(r"branch_computations=\{([^}]*)\}")):
                    yield from self.walk(name, times)
            elif instruction.opcode in ("call", "async-start"):
                name = instruction.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)")
                if name in self.computations:
                    yield from self.walk(name, times)

    def parts(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, or the instructions inside a fusion."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for part in self.computations.get(instruction.attribute(r"calls=%?([\w.\-]+)"), []):
            yield from self.parts(part)

    def convolutions(self, computation: str | None = None) -> dict[str, int]:
        """The number of convolutions of each kind, see `Instruction.convolution`; one in a loop counts once."""
        inside = (part for one, _ in self.walk(computation) for part in self.parts(one))
        return dict(collections.Counter(kind for part in inside if (kind := part.convolution)).most_common())

    def collectives(self) -> dict[str, int]:
        """Kind -> number; a collective in a loop of unknown length counts once.

        A collective that is spread over concurrent operations has an instruction in each, all with one channel.
        """
        found = collections.Counter()
        channels: set[str] = set()
        for one, times in self.walk():
            for part in self.parts(one):
                kind, channel = part.opcode.removesuffix("-start"), part.attribute(r"channel_id=(\d+)")
                if kind in COLLECTIVES and channel not in channels:
                    channels.update({channel} - {""})
                    found[kind] += times
        return dict(found)

    def copies_of(self, dtype: str, shape: tuple[int, ...]) -> list[str]:
        """Names of instructions whose results have an array's size and dtype, but are not the array."""
        same = ("parameter", "bitcast", "get-tuple-element", "tuple", "while", "call", "conditional")
        return [
            one.name
            for one, _ in self.walk()
            if one.opcode not in same and any(d == dtype and math.prod(s) == math.prod(shape) for d, s in one.arrays)
        ]
