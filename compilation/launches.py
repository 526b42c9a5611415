"""The launches of a compiled program: bytes and operations of each kernel, copy and library call.

A fusion counts by its inside: of a slice the bytes that are read, of an update in place those that are written. The
body of a loop counts as often as it runs. The compiled program does not describe Pallas kernels. They are read from the
traced program, by grid and blocks.

Of a program for a TPU, launches are the instructions of which the compiler has estimated the cycles, and Pallas
kernels. The others are copies that run beside them. Bytes are those of the kernels: of the others many stay in VMEM.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compilation.program import Computation, Instruction, Program, Shape, users

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "opt-barrier", "copy-done", "async-done", "fusion-done", "call-done"}
"""Instructions that launch nothing."""
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int32": "s32", "uint32": "u32",
           "int8": "s8", "uint8": "u8", "bool": "pred"}
"""XLA's names of dtypes, by those of jax."""
PALLAS = ("__gpu$xla.gpu.triton", "tpu_custom_call")
"""Targets of the custom calls that are Pallas kernels, on a GPU and on a TPU."""
CUDNN_ATTENTION = "__cudnn$fmha"


@dataclass(frozen=True)
class Work:
    """Memory traffic and operations of a launch."""

    read: int = 0
    """Bytes, each counted once."""
    written: int = 0
    moved: int = 0
    """Bytes that all programs of a kernel read and write by its blocks; repeated ones come from the cache."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """Of products by dtype; ``f32x3`` is float32 in three products of TF32."""
    cycles: int | None = None
    """The compiler's estimate for a TPU."""

    @property
    def memory(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or library call."""

    name: str
    """Name of the instruction."""
    group: str
    """Description that similar launches share."""
    count: int
    """Number of launches."""
    work: Work
    """Of each launch."""
    in_graph: bool
    """Whether it is in a CUDA graph."""


class PallasCall(NamedTuple):
    """Key of a call of a Pallas kernel. Variants of one kernel may differ in their results alone."""

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


def launches(program: Program, kernels: Mapping[PallasCall, Work], graphed: set[str]) -> list[Launch]:
    """The launches of a program.

    Args:
        program: for a GPU or a TPU.
        kernels: as :func:`pallas_kernels` finds them.
        graphed: as :func:`read_graphed` finds them.
    """
    return list(_walk(program, program.entry, 1, kernels, graphed))


def _walk(program: Program, name: str, times: int, kernels: Mapping[PallasCall, Work],
          graphed: set[str]) -> Iterator[Launch]:
    here = program.computations[name]
    for instruction in here.values():
        if instruction.opcode in FREE:
            continue
        if instruction.opcode == "while":
            body, = re.findall(r"body=%?([\w.\-]+)", instruction.attributes)
            yield from _walk(program, body, times * (program.trips(instruction) or 1), kernels, graphed)
        elif instruction.opcode == "conditional":  # the branch with the most bytes counts
            branches = [list(_walk(program, branch, times, kernels, graphed))
                        for branch in instruction.branches or instruction.called]
            yield from max(branches, key=lambda found: sum(
                launch.count * launch.work.memory for launch in found))
        elif instruction.opcode in ("call", "async-start", "call-start"):
            for called in instruction.called:
                yield from _walk(program, called, times, kernels, graphed)
        elif not program.is_for_tpu or instruction.cycles is not None or _is_pallas(instruction):
            group, work = _work(program, instruction, here, kernels)
            if instruction.cycles is not None:
                work = Work(operations=work.operations, cycles=instruction.cycles)
            yield Launch(instruction.name, group, times, work, instruction.name in graphed)


def _work(program: Program, instruction: Instruction, here: Computation,
          kernels: Mapping[PallasCall, Work]) -> tuple[str, Work]:
    """Group and work of an instruction."""
    where = _where(instruction)
    operands = {name: here[name].bytes for name in instruction.operands if name in here}
    plain = f"{re.sub(r'[._]*[0-9]+', '', instruction.name)}: {where}"
    if instruction.opcode in ("fusion", "fusion-start"):
        called = instruction.called[0]
        read = sum(max(_read(program, called, i, operands[name])
                       for i, other in enumerate(instruction.operands) if other == name) for name in operands)
        written = _written(program, called)
        return plain, Work(read, written, read + written, dict(program.products_of(called).by_dtype))
    if _is_pallas(instruction):
        shapes = tuple(here[name].shape for name in instruction.operands)
        for call, work in kernels.items():
            if (call.operands, call.results) == (shapes, instruction.outputs) and re.search(rf"\b{call.name}\b", where):
                return call.name, work
        plain = f"a kernel that was not found: {where}"
    read, written, operations = sum(operands.values()), instruction.bytes, Counter[str]()
    if instruction.opcode == "custom-call" and CUDNN_ATTENTION in instruction.attributes:
        plain, operations = _cudnn_attention(instruction, here)
    elif instruction.opcode == "custom-call" and "gemm" in instruction.attributes:
        written, operations = instruction.shape.bytes, _gemm(instruction, here)  # the other outputs are workspace
    elif instruction.opcode == "dot":
        operations = program.operations_of(instruction, here)
    elif instruction.opcode in ("dynamic-slice", "slice", "gather"):
        read = written
    elif instruction.opcode in ("dynamic-update-slice", "scatter"):
        read = written = here[instruction.operands[2 if instruction.opcode == "scatter" else 1]].bytes
    return plain, Work(read, written, read + written, dict(operations))


def _is_pallas(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and any(target in instruction.attributes for target in PALLAS)


def _where(instruction: Instruction) -> str:
    """The end of the path of an instruction in the source, and whether it is in the backward pass."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    if found is None:
        return "of the compiler"
    path = found[1].replace("\\'", "'")
    parts = [part for part in path.split("/") if part not in ("while", "body", "closed_call", "eval_jaxpr",
                                                              "rematted_computation", "checkpoint", "cond")]
    label = re.sub(r"\b(jit|jvp|transpose|vmap)\(", "(", " ".join(parts[1:][-2:])).replace("(", "").replace(")", "")
    return (" ".join(label.split()) or "the step") + (", backward" if "transpose(" in path else "")


def _read(program: Program, name: str, index: int, whole: int) -> int:
    """Bytes that a fusion reads of an operand."""
    here = program.computations[name]
    parameter = next((instruction for instruction in here.values()
                      if instruction.opcode == "parameter" and instruction.inside.strip() == str(index)), None)
    if parameter is None:
        return whole
    total, waiting = 0, [(parameter, user) for user in users(parameter.name, here)]
    while waiting:
        source, user = waiting.pop()
        is_first = user.operands[0] == source.name
        if user.opcode == "bitcast":
            waiting += [(user, after) for after in users(user.name, here)]
        elif user.opcode in ("dynamic-slice", "slice", "gather") and is_first:
            total += user.bytes
        elif user.opcode == "fusion":
            total += _read(program, user.called[0], user.operands.index(source.name), whole)
        elif not (user.opcode in ("dynamic-update-slice", "scatter") and is_first):
            return whole
    return min(whole, total)


def _written(program: Program, name: str) -> int:
    """Bytes that a fusion writes."""
    here = program.computations[name]

    def of(instruction: Instruction) -> int:
        if instruction.opcode == "bitcast" and instruction.operands[0] in here:
            return of(here[instruction.operands[0]])
        if instruction.opcode == "dynamic-update-slice":
            return here[instruction.operands[1]].bytes
        if instruction.opcode == "scatter":
            return here[instruction.operands[2]].bytes
        if instruction.opcode == "tuple":
            return sum(of(here[operand]) for operand in instruction.operands)
        if instruction.opcode == "fusion":
            return _written(program, instruction.called[0])
        return instruction.bytes

    return of(next(instruction for instruction in here.values() if instruction.is_root))


def _cudnn_attention(instruction: Instruction, here: Computation) -> tuple[str, Counter[str]]:
    """cuDNN's attention: two products of T × S scores in the forward pass, five in the backward pass, and half of each
    with a causal mask."""
    (B, T, H, D), S = here[instruction.operands[0]].shape.dimensions, here[instruction.operands[1]].shape.dimensions[1]
    is_backward, is_causal = "Backward" in instruction.attributes, '"CAUSAL"' in instruction.attributes
    operations = 2 * (5 if is_backward else 2) * B * H * T * S * D // (2 if is_causal else 1)
    return (f"cuDNN's attention{', backward' if is_backward else ''}",
            Counter({here[instruction.operands[0]].shape.dtype: operations}))


def _gemm(instruction: Instruction, here: Computation) -> Counter[str]:
    """A product of cuBLAS."""
    left = here[instruction.operands[0]].shape
    axes = re.search(r'lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    terms = math.prod(left.dimensions[int(axis)] for axis in re.findall(r"\d+", axes[1] if axes else ""))
    return Counter({left.dtype: 2 * instruction.shape.elements * terms})


def pallas_kernels(traced: Any) -> dict[PallasCall, Work]:
    """The Pallas kernels of a traced program, ``jax.jit(function).trace(…).jaxpr``."""
    found: dict[PallasCall, Work] = {}
    for equation in _equations(traced):
        if equation.primitive.name == "pallas_call":
            shapes = (tuple(_shape(x.aval) for x in arrays) for arrays in (equation.invars, equation.outvars))
            found[PallasCall(str(equation.params["name"]), *shapes)] = _pallas_work(equation)
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those that it calls, without the inside of kernels."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for called in _called(equation):
                yield from _equations(called)


def _called(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one


def _pallas_work(equation: Any) -> Work:
    """The work of a kernel whose programs read and write whole blocks."""
    mapping = equation.params["grid_mapping"]
    programs = math.prod(mapping.grid)
    inputs, outputs = (tuple(_shape(x.aval) for x in arrays) for arrays in (equation.invars, equation.outvars))
    blocks = [math.prod(_sizes(block.block_shape)) for block in mapping.block_mappings]
    arrays = (*inputs, *outputs)[-len(blocks):]  # the first arguments may be indices, which have no blocks
    moved = sum(programs * elements * shape.bytes // max(1, shape.elements)
                for elements, shape in zip(blocks, arrays, strict=True))
    operations: Counter[str] = Counter()
    _add_operations(equation.params["jaxpr"], programs, operations)
    return Work(sum(shape.bytes for shape in inputs), sum(shape.bytes for shape in outputs), moved, dict(operations))


def _sizes(block_shape: Any) -> list[int]:
    """Sizes of a block, 1 along squeezed axes."""
    return [size if isinstance(size, int) else getattr(size, "block_size", 1) for size in block_shape]


def _add_operations(jaxpr: Any, times: int, operations: Counter[str]) -> None:
    """Adds the operations of a kernel's products. A loop of unknown length counts once."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            left, out = (x.aval for x in (equation.invars[0], equation.outvars[0]))
            (axes, _), _ = equation.params["dimension_numbers"]
            name = DTYPES.get(jnp.dtype(left.dtype).name, "")
            if equation.params["precision"] == jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3:
                name = "f32x3"
            operations[name] += 2 * times * math.prod(out.shape) * math.prod(left.shape[axis] for axis in axes)
        for called in _called(equation):
            _add_operations(called, times * equation.params.get("length", 1), operations)


def _shape(aval: Any) -> Shape:
    name = jnp.dtype(aval.dtype).name
    return Shape(DTYPES.get(name, name), tuple(aval.shape))


def read_graphed(dump: Path) -> set[str]:
    """Names of the instructions in CUDA graphs, from a dump of the compiler; see
    :meth:`compilation.target.Target.compile`."""
    names: dict[int, str] = {}
    for path in dump.glob("*thunk_metadata.txt"):
        for part in path.read_text().split("thunk_metadata {"):
            name, number = (re.search(pattern, part) for pattern in (r'profile_annotation: "([^"]*)"',
                                                                     r"thunk_id: (\d+)"))
            if name is not None and number is not None:
                names[int(number[1])] = name[1]
    found: set[str] = set()
    for path in dump.glob("*thunk_sequence_after_thunk_passes.txt"):
        graph: int | None = None
        for indent, number, kind in re.findall(r"^( *)(\d+): (k\w+)", path.read_text(), re.MULTILINE):
            if graph is not None and len(indent) <= graph:
                graph = None
            if graph is not None and int(number) in names:
                found.add(names[int(number)])
            if kind == "kCommandBuffer" and graph is None:
                graph = len(indent)
    return found
