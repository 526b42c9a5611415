"""Parses the text of a compiled program, from ``jax.stages.Compiled.as_text``, and counts its products."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4,
         "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
"""Of an element, by XLA's name of the dtype. Tokens and opaque values have no size."""

COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "collective-broadcast")
"""The bytes of their results count."""
REDUCE_SCATTER = "reduce-scatter"
"""The bytes of its operands count."""

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Shape(NamedTuple):
    """Shape and dtype of an array."""

    dtype: str
    """XLA's name, such as ``bf16``."""
    dimensions: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    opcode: str
    outputs: tuple[Shape, ...]
    """The parts of a tuple, or one shape."""
    operands: tuple[str, ...]
    """Names of instructions."""
    inside: str
    """The text in the parentheses; for a parameter its number."""
    attributes: str
    """The text after the parentheses."""
    is_root: bool

    @property
    def shape(self) -> Shape:
        """The first output."""
        return self.outputs[0] if self.outputs else Shape("", ())

    @property
    def bytes(self) -> int:
        """Size of the outputs."""
        return sum(shape.bytes for shape in self.outputs)

    @cached_property
    def called(self) -> list[str]:
        """The computations that it calls, without the branches of a conditional."""
        return _CALLED.findall(self.attributes)

    @cached_property
    def branches(self) -> list[str]:
        """The branches of a conditional."""
        return [name.strip().lstrip("%") for names in _BRANCHES.findall(self.attributes) for name in names.split(",")]

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate for a TPU; None if there is none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    def dimensions(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as ``lhs_contracting_dims``; empty if it is missing."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return _numbers(found[1]) if found else ()


Computation = dict[str, Instruction]
"""Its instructions by name, in order."""


@dataclass(frozen=True)
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str
    """Name of the entry computation."""
    _products: dict[str, "Products"] = field(default_factory=dict, repr=False)

    @property
    def products(self) -> "Products":
        """The products of the whole program."""
        return self.products_of(self.entry)

    def products_of(self, name: str) -> "Products":
        """The products of a computation and of those that it calls."""
        if name in self._products:
            return self._products[name]
        counted = Products()
        here = self.computations[name]
        for instruction in here.values():
            counted.by_dtype += self.operations_of(instruction, here)
            counted.calls += instruction.opcode == "custom-call"
            if instruction.branches:  # one of them runs
                counted.add(max(map(self.products_of, instruction.branches), key=lambda branch: branch.operations))
            trips = self.trips(instruction)
            counted.unbounded_loops += trips is None
            for other in instruction.called:
                counted.add(self.products_of(other), trips or 1)
        self._products[name] = counted
        return counted

    @cached_property
    def is_for_tpu(self) -> bool:
        """Whether the compiler has written its estimates for a TPU into it."""
        return any(one.cycles is not None for here in self.computations.values() for one in here.values())

    @property
    def collectives(self) -> Counter[str]:
        """Bytes that a device exchanges, by kind of collective."""
        return self._collectives_of(self.entry)

    def _collectives_of(self, name: str) -> Counter[str]:
        counted = Counter[str]()
        here = self.computations[name]
        for instruction in here.values():
            if instruction.opcode.removesuffix("-start") == REDUCE_SCATTER:
                counted[REDUCE_SCATTER] += sum(here[name].bytes for name in instruction.operands)
            elif instruction.opcode.removesuffix("-done") in COLLECTIVES:
                counted[instruction.opcode.removesuffix("-done")] += instruction.bytes
            called = [] if instruction.opcode in ("async-update", "async-done") else instruction.called
            for found in [*map(self._collectives_of, called),
                          max(map(self._collectives_of, instruction.branches), key=Counter.total, default=Counter())]:
                times = self.trips(instruction) or 1
                counted.update({kind: times * size for kind, size in found.items()})
        return counted

    def trips(self, instruction: Instruction) -> int | None:
        """How often an instruction computes what it calls: the trip count of a loop, None if unknown; 1 for others.

        A program for a TPU does not state trip counts. There it is the limit of a loop whose condition is a comparison
        with a constant, as jax writes loops of known length: they count from 0 by 1.
        """
        if instruction.opcode != "while":
            return 1
        found = _TRIPS.search(instruction.attributes)
        if found is not None:
            return int(found[1])
        name = re.search(r"condition=%?([\w.\-]+)", instruction.attributes)
        condition = self.computations.get(name[1], {}) if name is not None else {}
        root = next((one for one in condition.values() if one.is_root), None)
        if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        limit = condition.get(root.operands[-1])
        return int(limit.inside) if limit is not None and limit.opcode == "constant" else None

    def operations_of(self, instruction: Instruction, here: Computation) -> Counter[str]:
        """Operations of an instruction's products by dtype, without those of the computations that it calls.

        Args:
            instruction: any.
            here: its computation.
        """
        size = instruction.shape.elements
        if instruction.opcode == "dot":
            left = here[instruction.operands[0]].shape
            terms = math.prod(left.dimensions[axis] for axis in instruction.dimensions("lhs_contracting_dims"))
            return Counter({left.dtype: 2 * size * terms})
        if instruction.opcode == "convolution":
            return _of_convolution(instruction, here)
        if instruction.opcode == "multiply" and _is_outer(instruction, here):
            return Counter({instruction.shape.dtype: 2 * size})
        if instruction.opcode == "reduce" and self._adds(instruction):
            factor = _source(instruction.operands[0], here)
            if factor is not None and factor.opcode == "multiply" and not _is_outer(factor, here):
                return Counter({factor.shape.dtype: 2 * factor.shape.elements})
        return Counter()

    def _adds(self, instruction: Instruction) -> bool:
        return any(inner.opcode == "add" for name in instruction.called
                   for inner in self.computations.get(name, {}).values())


@dataclass
class Products:
    """The products of a program: ``dot``, ``convolution``, and elementwise multiplications that are outer products or
    are summed in the same fusion."""

    by_dtype: Counter[str] = field(default_factory=Counter)
    """Operations by dtype of the operands: two for each multiplication."""
    calls: int = 0
    """Custom calls, whose operations are unknown."""
    unbounded_loops: int = 0
    """Loops with an unknown trip count; the body counts once."""

    @property
    def operations(self) -> int:
        """Of all dtypes."""
        return self.by_dtype.total()

    def add(self, other: "Products", times: int = 1) -> None:
        """Adds ``other`` a number of times."""
        for name, operations in other.by_dtype.items():
            self.by_dtype[name] += times * operations
        self.calls += times * other.calls
        self.unbounded_loops += other.unbounded_loops


def read_program(text: str) -> Program:
    """Parses the text of a compiled program.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, here = None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            here = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif here is not None and (found := _INSTRUCTION.match(line)):
            instruction = _parsed(found[2], found[3], is_root=bool(found[1]))
            if instruction is not None:
                here[found[2]] = instruction
    if entry is None:
        raise ValueError("the text is no program: it has no entry computation")
    return Program(computations, entry)


def _parsed(name: str, text: str, *, is_root: bool) -> Instruction | None:
    opcode = _OPCODE.search(text)
    if opcode is None:
        return None
    end = _closing(text, opcode.end())
    inside = text[opcode.end():end]
    shapes = tuple(Shape(dtype, _numbers(sizes)) for dtype, sizes in _SHAPE.findall(text[:opcode.start() + 1]))
    return Instruction(name, opcode[1], shapes, tuple(re.findall(r"%([\w.\-]+)", inside)), inside, text[end + 1:],
                       is_root)


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one before ``start``."""
    depth = 1
    for place in re.finditer(r"[()]", text[start:]):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return start + place.start()
    return len(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _of_convolution(instruction: Instruction, here: Computation) -> Counter[str]:
    """Operations of a convolution: two for each input feature of the kernel, at each position of the window that meets
    an element of the input and not padding.

    A compiler for a TPU writes products of batches as convolutions over the axes of the batch: the input is dilated and
    the window moves so that each output meets one element.
    """
    inputs, kernel = (here[name].shape for name in instruction.operands)
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert found is not None
    of_input, of_kernel, of_output = (dict(zip(labels, shape.dimensions, strict=True)) for labels, shape in zip(
        found.groups(), (inputs, kernel, instruction.shape), strict=True))
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    options = dict(part.split("=") for part in window[1].split()) if window is not None else {}
    pairs = of_output["b"] * of_output["f"] * of_kernel["i"]
    for axis in range(len(of_kernel) - 2):
        stride, before, input_step, kernel_step = (
            int(options[name].split("x")[axis].split("_")[0]) if name in options else default
            for name, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1)))
        starts, steps = stride * np.arange(of_output[str(axis)]), kernel_step * np.arange(of_kernel[str(axis)])
        at = starts[:, None] + steps - before
        pairs *= int(np.sum((at >= 0) & (at < input_step * of_input[str(axis)]) & (at % input_step == 0)))
    return Counter({kernel.dtype: 2 * pairs})


def _is_outer(instruction: Instruction, here: Computation) -> bool:
    """Whether each operand of a multiplication varies along a dimension that the other does not."""
    carried = [_carried_dimensions(name, here, len(instruction.shape.dimensions)) for name in instruction.operands]
    return len(carried) == 2 and not carried[0] <= carried[1] and not carried[1] <= carried[0]


def _carried_dimensions(name: str, here: Computation, count: int) -> set[int]:
    """The dimensions along which an operand varies."""
    source = _source(name, here)
    if source is None or source.opcode != "broadcast" or "dimensions={" not in source.attributes:
        return set(range(count))
    return set(source.dimensions("dimensions"))


def _source(name: str, here: Computation) -> Instruction | None:
    """The source of an operand, before conversions of dtype or layout."""
    source = here.get(name)
    while source is not None and source.opcode in ("convert", "copy") and source.operands:
        source = here.get(source.operands[0])
    return source


def users(name: str, here: Computation) -> Sequence[Instruction]:
    """The instructions with an operand of this name."""
    return [instruction for instruction in here.values() if name in instruction.operands]
