"""Floating-point operations of a training step, counted from shapes, against the products in the compiled program.

    python -m benchmarks.count_operations
    python -m benchmarks.count_operations --modes softmax:materialised,linear:cumsum --context 512

"counted" is what ``metrics.jsonl`` and utilisation go by (training/accounting.py): 6 a parameter and token, and three
times the attention's forward pass. "found" is of the program that XLA made of loss and gradient, without optimizer, for
this device: two operations for each multiplication of a product (``dot``, ``convolution``), of a fusion or a call as
often as it is called, of a loop's body as often as it runs (XLA's own cost analysis takes a body once). A product
made of elementwise multiplications is found too: an outer product, and one whose terms are summed in the same fusion.

The program computes what the count leaves out: pairs above the diagonal, logits and blocks computed again in the
backward pass. It does not compute all that is counted: biases and norms are no products. Not found are the sums of
elementwise operations, and what a kernel of its own does; "calls" says how many of such the program has, and "loops"
how many loops of which the compiler does not know how often they run, whose body then counts once.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import itertools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import report
from benchmarks.train_step import Size, mode_config
from configs.schema import EncoderConfig, ModelConfig
from kernels.cross_entropy import cross_entropy
from models import attention, encoder, gpt
from models.encoder import Classifier
from models.gpt import GPT
from support.command import status
from support.errors import ConfigError
from training import accounting

HEADINGS = ("mode", "mask", "counted", "found", "found / counted", "calls", "loops")
CHECKED = (("softmax:materialised", False), ("linear:cumsum", True))
"""Forms that compute what is counted and no more, and whether with a causal mask."""

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass
class Products:
    """What the products of a program come to."""

    operations: int = 0
    """Two for each multiplication."""
    calls: int = 0
    """Custom calls, whose operations are not known."""
    unbounded_loops: int = 0
    """Loops whose trip count is not known; the body counts once."""

    def add(self, other: "Products", times: int = 1) -> None:
        """``other`` so many times over."""
        self.operations += times * other.operations
        self.calls += times * other.calls
        self.unbounded_loops += other.unbounded_loops


@dataclass
class _Instruction:
    shape: tuple[int, ...]
    opcode: str
    text: str
    operands: list[str] = field(default_factory=list)


def products(program: str) -> Products:
    """Of a compiled program's text, as ``jax.stages.Compiled.as_text`` gives it.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, here = None, None
    for line in program.splitlines():
        header = _HEADER.match(line)
        if header:
            here = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif here is not None and (found := _INSTRUCTION.match(line)):
            instruction = _parsed(found[3])
            if instruction is not None:
                here[found[2]] = instruction
    if entry is None:
        raise ValueError("the text is no program: it has no entry computation")
    done: dict[str, Products] = {}

    def total(name: str) -> Products:
        if name in done:
            return done[name]
        counted = Products()
        for instruction in computations[name].values():
            counted.operations += _operations(instruction, computations[name], computations)
            counted.calls += instruction.opcode == "custom-call"
            called = _CALLED.findall(instruction.text)
            branches = [total(branch.strip().lstrip("%")) for branches in _BRANCHES.findall(instruction.text)
                        for branch in branches.split(",")]
            if branches:  # one of them runs
                counted.add(max(branches, key=lambda branch: branch.operations))
            times = 1
            if instruction.opcode == "while":
                trips = _TRIPS.search(instruction.text)
                times = int(trips[1]) if trips else 1
                counted.unbounded_loops += trips is None
            for other in called:
                counted.add(total(other), times)
        done[name] = counted
        return counted

    return total(entry)


def _parsed(text: str) -> _Instruction | None:
    opcode = _OPCODE.search(text)
    if opcode is None:
        return None
    shape = _SHAPE.search(text[:opcode.start() + 1])
    inside = text[opcode.end():].split(")", 1)[0]
    return _Instruction(_dimensions(shape[1]) if shape else (), opcode[1], text,
                        re.findall(r"%([\w.\-]+)", inside))


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _operations(instruction: _Instruction, others: dict[str, _Instruction],
                computations: dict[str, dict[str, _Instruction]]) -> int:
    size = math.prod(instruction.shape)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
        left = others[instruction.operands[0]].shape
        return 2 * size * math.prod(left[axis] for axis in _dimensions(contracted[1] if contracted else ""))
    if instruction.opcode == "convolution":
        # The kernel's shape, but for the axis of output features, is what each output is a sum over.
        kernel = others[instruction.operands[1]].shape
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
        assert labels is not None
        return 2 * size * math.prod(n for n, label in zip(kernel, labels[1], strict=True) if label != "o")
    if instruction.opcode == "multiply":
        return 2 * size if _is_outer(instruction, others) else 0
    if instruction.opcode == "reduce" and any("add" in names for names in _called_opcodes(instruction, computations)):
        factor = _source(instruction.operands[0], others)
        if factor is not None and factor.opcode == "multiply" and not _is_outer(factor, others):
            return 2 * math.prod(factor.shape)
    return 0


def _is_outer(instruction: _Instruction, others: dict[str, _Instruction]) -> bool:
    """Whether a multiplication is one of two arrays, each of which lacks a dimension that the other has."""
    kept = []
    for name in instruction.operands:
        source = _source(name, others)
        is_broadcast = source is not None and source.opcode == "broadcast"
        dimensions = re.search(r"dimensions=\{([\d,]*)\}", source.text) if source and is_broadcast else None
        kept.append(set(_dimensions(dimensions[1])) if dimensions else set(range(len(instruction.shape))))
    return len(kept) == 2 and not kept[0] <= kept[1] and not kept[1] <= kept[0]


def _source(name: str, others: dict[str, _Instruction]) -> _Instruction | None:
    """What an operand is, before its number format or layout is changed."""
    source = others.get(name)
    while source is not None and source.opcode in ("convert", "copy") and source.operands:
        source = others.get(source.operands[0])
    return source


def _called_opcodes(instruction: _Instruction, computations: dict[str, dict[str, _Instruction]]) -> list[set[str]]:
    return [{inner.opcode for inner in computations.get(name, {}).values()}
            for name in _CALLED.findall(instruction.text)]


@dataclass
class Row:
    """One mode, as the JSON file has it; operations are of a step's forward and backward pass."""

    mode: str
    """As it was named on the command line."""
    causal: bool
    """Whether with a causal mask; else an encoder's."""
    counted: float
    """From shapes."""
    found: int
    """In the compiled program."""
    ratio: float
    """The latter over the former."""
    calls: int
    """Custom calls, whose operations were not found."""
    loops: int
    """Loops whose body counts once, for how often it runs is not known."""


def count(mode: str, size: Size, *, context: int, batch: int, dtype: Any = "float32", causal: bool = True) -> Row:
    """A mode's operations, both ways.

    Args:
        mode: ``NAME`` or ``NAME:FORM``.
        size: of the model.
        context: T.
        batch: B.
        dtype: number format.
        causal: False: a classifier on an encoder, which has no mask.

    Raises:
        NotImplementedError: a form that this device does not have, or that has not this mask.
        ConfigError: sizes that do not go together, or an unknown mode.
    """
    name, options = mode_config(mode)
    sizes: dict[str, Any] = {"layers": size.layers, "heads": size.heads, "width": size.width, "context": context,
                             "dtype": dtype, "attention": (name,), "modes": {name: options}}
    config: Any = (gpt.resolve_config(ModelConfig(**sizes)) if causal else
                   encoder.resolve_config(EncoderConfig(**sizes, mlp_width=4 * size.width, pooling="mean")))
    kind: Any = GPT if causal else Classifier
    model = nnx.eval_shape(lambda: kind(config, size.vocabulary, rngs=nnx.Rngs(0)))
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)

    def loss(parameters: Any, variables: Any, tokens_BT: jax.Array) -> jax.Array:
        found: Any = nnx.merge(graph, parameters, variables)
        if not causal:
            return found.forward(tokens_BT).sum()
        x_BTE, _ = found.forward(tokens_BT)
        x_BTE, head_VE = found.head_operands(x_BTE)
        return cross_entropy(x_BTE, head_VE, tokens_BT)

    tokens_BT = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    program = jax.jit(jax.value_and_grad(loss)).lower(parameters, variables, tokens_BT).compile().as_text()
    assert program is not None
    found = products(program)
    number = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    per_token = accounting.flops_per_token(
        {"model": asdict(config)}, {"parameters": number, "vocabulary_size": size.vocabulary})
    assert per_token is not None
    counted = per_token * batch * context
    return Row(mode, causal, counted, found.operations, found.operations / counted, found.calls,
               found.unbounded_loops)


def command(arguments: Sequence[str]) -> int:
    """Counts what the flags say; returns 1 where nothing could be counted."""
    options = _options(arguments)
    report.use_whole_device()
    report.check_output(options.json)
    size = Size(options.layers, options.heads, options.width, options.vocabulary)
    contents = report.origin("benchmarks.count_operations", options)
    modes = options.modes or tuple(dict.fromkeys((*(mode for mode, _ in CHECKED), *attention.modes())))
    for mode in modes:
        mode_config(mode)  # one that there is not stops before any work
    rows: list[Row] = []
    for mode, causal in itertools.product(modes, (True, False)):
        try:
            rows.append(count(mode, size, context=options.context, batch=options.batch, dtype=options.dtype,
                              causal=causal))
        except (ConfigError, NotImplementedError) as error:
            status(f"{mode}, {'causal' if causal else 'no mask'}: {error}")
        report.keep(options.json, contents | {"rows": [asdict(row) for row in rows]})
    print(report.table(HEADINGS, [cells(row) for row in rows]))
    return 0 if rows else 1


def cells(row: Row) -> list[str]:
    """A row of the table."""
    return [row.mode, "causal" if row.causal else "none", f"{row.counted:.4g}", f"{row.found:.4g}", f"{row.ratio:.3f}",
            str(row.calls), str(row.loops)]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.count_operations", description=__doc__,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=report.names,
                        help="modes, or MODE:FORM, with commas between (all, and the two forms that are checked)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="number format of the products (%(default)s)")
    for name, default, meaning in (
            ("width", 256, "width of the model"), ("layers", 2, "transformer blocks"), ("heads", 4, "attention heads"),
            ("vocabulary", 512, "tokens in the vocabulary"), ("context", 256, "length of a sequence"),
            ("batch", 2, "sequences in a step")):
        parser.add_argument(f"--{name}", type=report.positive, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.count_operations", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
