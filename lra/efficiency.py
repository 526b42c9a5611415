"""Speed and memory of every attention on byte text: ``python -m lra.table efficiency``.

A case is a training step of a classifier for Long Range Arena's byte-level text, at one length: forward pass, backward
pass and AdamW update on random bytes, in its own process. Memory is the compiler's plan for arguments, outputs and
temporaries, which is the same in every run. Time is the median step after a warm-up.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from benchmarks import report, timing
from benchmarks.picture import Panel, curves
from configs.schema import EncoderConfig, LraConfig, TaskConfig, TrainConfig
from lra.tasks import Dataset, Split
from models import attention
from models.encoder import resolve_config
from models.mode_text import mode_config, split_mode
from support.command import status
from support.errors import ConfigError
from support.files import read_json
from support.ranges import Count, Positive
from training.environment import peak_bytes
from training.objectives.classification import Classification
from training.objectives.examples import compiled_step

MODULE = "lra.efficiency"
BYTES = 257
"""Vocabulary of byte text: 0 is padding."""
PUBLISHED = Path(__file__).parent / "published.json"
BASELINE = "softmax:materialised"


class Shape(NamedTuple):
    """A model's sizes, in Long Range Arena's terms."""

    layers: int
    heads: int
    width: int
    mlp_width: int
    batch: int


SHAPES = {"paper": Shape(6, 8, 512, 2048, 32), "released": Shape(4, 4, 256, 1024, 32)}
"""Sizes for the byte-level text task: those of the paper's appendix, and of the released code."""

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"block_size": 50},
    "sparse": {"block_size": 50, "summary": 10},
    "synthesizer": {"kind": "factorised", "k": 32},
}
"""Long Range Arena's options of modes where they differ from the defaults; the Performer has as many features as the
head is wide."""


def table_rows() -> list[str]:
    """Rows of the table: materialised softmax, then every mode for encoders.

    ``softmax`` is fused: cuDNN's kernel on a GPU, elsewhere ours.
    """
    return [BASELINE, *sorted(attention.encoder_modes(), key=lambda mode: (mode != "softmax", mode))]


@dataclass(frozen=True)
class Case:
    """One row of the table at one length."""

    row: str
    """A mode for encoders, with its form and options: see :mod:`models.mode_text`."""
    tokens: int
    """T, without the CLS token."""
    shape: str = "paper"
    """Name in ``SHAPES``."""
    layers: int | None = None
    """Replaces the shape's."""
    batch: int | None = None
    """Replaces the shape's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 20
    """Number of timed steps."""
    seconds: float = 60.0
    """Approximate time limit for them: slow cases have fewer steps, at least three."""
    memory_only: bool = False
    """Compile without running."""

    def config(self) -> EncoderConfig:
        """The config of the classifier.

        Raises:
            ConfigError: the row or shape is unknown, or sizes do not match.
        """
        if self.shape not in SHAPES:
            raise ConfigError(f"shape is {self.shape}; expected one of {', '.join(SHAPES)}")
        shape = SHAPES[self.shape]
        options = OPTIONS | {"performer": {"features": shape.width // shape.heads}}
        mode, config = mode_config(self.row, flag="--rows", known=attention.encoder_modes(),
                                   defaults=options.get(split_mode(self.row)[0]))
        return resolve_config(EncoderConfig(
            layers=self.layers or shape.layers, heads=shape.heads, width=shape.width, mlp_width=shape.mlp_width,
            pooling="mean" if attention.load(mode).Attention.block_diagonal else "cls",  # CLS would see its own block
            context=self.tokens, classes=2, dtype=self.dtype, attention=(mode,), modes={mode: config}))


@dataclass(frozen=True)
class Result(Case):
    """A case and its measurements; times are in seconds."""

    sequences: int = 0
    """Sequences per step."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries, as planned by the compiler."""
    steps_per_second: float | None = None
    """At the median time of a step."""
    quartiles: tuple[float, float] | None = None
    """First and third quartile of the time of a step, in seconds."""
    samples: list[float] = field(default_factory=list)
    error: str | None = None
    """Out of memory is a result."""

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"{self.row} at {self.tokens:,}"

    @property
    def gigabytes(self) -> float | None:
        """``peak_bytes`` in GB."""
        return None if self.peak_bytes is None else self.peak_bytes / 1e9


class Quantity(NamedTuple):
    """What is measured of a row at a length, here and in the published table."""

    field: str
    """Its name in :class:`Result` and in the published rows."""
    heading: str
    axis: str
    times: str
    """What a ratio to materialised softmax is called."""
    formats: tuple[str, str]
    """Of ours, and of the published."""
    less: bool
    """Whether less of it is better."""

    def ratio(self, value: float | None, base: float | None) -> float | None:
        """By how many times ``value`` is better than ``base``; None if either is unknown."""
        if not value or not base:
            return None
        return base / value if self.less else value / base


SPEED = Quantity("steps_per_second", "Steps per second", "steps per second", "times", (".3g", ".1f"), less=False)
MEMORY = Quantity("gigabytes", "Memory per step, GB", "memory per step (GB)", "times less than", (".2f", ".2f"),
                  less=True)


def objective(case: Case) -> Classification:
    """The classifier of a case on random bytes, one batch of them; raises as :meth:`Case.config`."""
    model, random = case.config(), np.random.default_rng(0)
    batch = case.batch or SHAPES[case.shape].batch
    tokens_BT = random.integers(1, BYTES, (batch, case.tokens), dtype=np.int32)
    split = Split((tokens_BT,), (np.full(batch, case.tokens, np.int32),), random.integers(0, 2, batch, dtype=np.int32))
    config = LraConfig(model=model, data=TaskConfig(task="text"), train=TrainConfig(batch_size=batch))
    return Classification(config, Dataset({"train": split}, BYTES, 2, {}, "", ()))


def measure(case: Case) -> Result:
    """Compiles a case, runs it, and measures it. A case that does not fit has its planned memory, and an ``error``.

    Raises:
        ConfigError: as :meth:`Case.config`.
    """
    classifier = objective(case)
    compiled, begin = compiled_step(classifier)
    planned = peak_bytes(compiled)
    found = Result(**asdict(case), sequences=classifier.counts["train"], peak_bytes=planned)
    if case.memory_only:
        return found
    try:
        timing.check_memory(planned)
        step = begin()
        (samples,) = timing.time_by_turns({case: step}, case.steps, sample_seconds=0, seconds=case.seconds).values()
        loss = float(step())
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return replace(found, error=f"{type(error).__name__}: {error}".partition("\n")[0])
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    low, middle, high = (float(x) for x in np.quantile(samples, (0.25, 0.5, 0.75)))
    return replace(found, steps_per_second=1 / middle, quartiles=(low, high), samples=samples)


def in_process(case: Case, limit: float) -> Result:
    """:func:`measure` in a new process with a limit of ``limit`` seconds; failures are in ``error``."""
    found: dict[str, Any] = {"sequences": case.batch or SHAPES[case.shape].batch} | asdict(case)
    measured = timing.in_process(MODULE, asdict(case), limit)
    if "peak_bytes" not in measured and not case.memory_only:  # too slow, or killed: the plan has the memory
        planned = timing.in_process(MODULE, asdict(replace(case, memory_only=True)), limit)
        found["peak_bytes"] = planned.get("peak_bytes")
    return Result(**found | measured)


def ratios(results: Sequence[Result], quantity: Quantity) -> Callable[[Result], float | None]:
    """The ratio of a result to that of materialised softmax at its length."""
    base = {result.tokens: getattr(result, quantity.field) for result in results if result.row == BASELINE}
    return lambda result: quantity.ratio(getattr(result, quantity.field), base.get(result.tokens))


def published_of(rows: Sequence[str], published: Mapping[str, Any]) -> dict[str, Any]:
    """The published rows of ours; there, softmax is materialised."""
    names = {row: {BASELINE: "softmax", "softmax": None}.get(row, row) for row in rows}
    return {row: published[name] for row, name in names.items() if name in published}


def markdown(results: Sequence[Result], origin: Mapping[str, Any]) -> str:
    """The table, with the published rows below ours."""
    published = read_json(PUBLISHED)["efficiency"]
    found = {(result.row, result.tokens): result for result in results}
    rows, lengths = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    others = published_of(rows, published["rows"])
    first, base = results[0], published["rows"]["softmax"]
    shape = SHAPES[first.shape]
    text = [f"# Long Range Arena: efficiency, {first.shape} shape", "",
            f"Measured on {origin['device']}, jax {origin['versions']['jax']}, {first.dtype}; sequences per step: "
            f"{first.sequences}; {first.layers or shape.layers} layers of {shape.heads} heads, width {shape.width}, "
            f"MLP {shape.mlp_width}:", "", f"    {origin['command']} --out NAME", "",
            f"Published: {published['source']}. {published['notes']}", ""]

    def cell(value: float, style: str, ratio: float | None) -> str:
        return f"{value:{style}}" + ("" if ratio is None else f" ({ratio:.1f}×)")

    def section(quantity: Quantity, *remark: str) -> list[str]:
        (style, published_style), ratio = quantity.formats, ratios(results, quantity)

        def ours(result: Result) -> str:
            value = getattr(result, quantity.field)
            return reason(result) if value is None else cell(value, style, ratio(result))

        def theirs(entry: Mapping[str, float]) -> list[str]:
            return [cell(value, published_style, quantity.ratio(value, base[quantity.field][at]))
                    for at, value in entry.items()]

        compared = f" ({quantity.times} {BASELINE})" if BASELINE in rows else ""
        return [f"## {quantity.heading}{compared}", "", *remark,
                *report.markdown(["", *(f"{tokens:,}" for tokens in lengths)],
                                 [[f"`{row}`", *(ours(found[row, tokens]) for tokens in lengths)] for row in rows]), "",
                *report.markdown(["published", *(f"{int(at):,}" for at in base[quantity.field])],
                                 [[f"`{row}`", *theirs(entry[quantity.field])] for row, entry in others.items()]), ""]

    if not first.memory_only:
        text += section(SPEED)
        spreads = [(result.quartiles[1] - result.quartiles[0]) * result.steps_per_second for result in results
                   if result.quartiles is not None and result.steps_per_second is not None]
        if spreads:
            text += ["From the median step. The interquartile range of a case is "
                     f"{100 * median(spreads):.0f} % of the median step in the median case, "
                     f"{100 * max(spreads):.0f} % at most.", ""]
    text += section(MEMORY, "Memory planned by the compiler for arguments, outputs and temporaries, even if it does "
                    "not fit.", "")
    text += ["## Options of the rows", "", *(f"- `{row}`: {_options_of(found[row, lengths[0]])}." for row in rows), ""]
    if any("released" in entry for entry in others.values()):
        text += ["Released code that differs from the paper it names; whether published figures came from it is not "
                 "known:", "", *(f"- `{row}`: {entry['released']}." for row, entry in others.items()
                                 if "released" in entry), ""]
    return "\n".join(text)


def _options_of(case: Case) -> str:
    (options,) = case.config().modes.values()
    return ", ".join(f"{name} {value}" for name, value in vars(options).items())


def reason(result: Result) -> str:
    """Why there is no figure, in a word or two."""
    error = result.error or ""
    if "memory" in error.lower() or "EXHAUSTED" in error or "MemoryError" in error:
        return "out of memory"
    return "too long" if error.startswith("not done") else "failed"


def panels(results: Sequence[Result]) -> list[Panel]:
    """Speed and memory against length, absolute and relative to materialised softmax, with published rows dashed."""
    published = read_json(PUBLISHED)["efficiency"]["rows"]
    others = published_of([result.row for result in results if result.row != BASELINE], published)
    found = []
    for quantity in (MEMORY,) if results[0].memory_only else (SPEED, MEMORY):
        base = published["softmax"][quantity.field]
        dashed = {row: {int(at): quantity.ratio(value, base[at]) for at, value in entry[quantity.field].items()}
                  for row, entry in others.items()}
        found += [Panel(curves(results, "row", "tokens", quantity.field), x="length (tokens)", y=quantity.axis),
                  Panel(curves(results, "row", "tokens", ratios(results, quantity)), x="length (tokens)",
                        y=f"{quantity.times} materialised softmax", published=dashed)]
    return found


@dataclass(kw_only=True)
class Options(report.NamedFiles):
    """The flags."""

    rows: tuple[str, ...] = ()
    """Modes that see the whole sequence, each with its form or options if need be. Empty: softmax:materialised and all
    modes."""
    lengths: tuple[Count, ...] = (1000, 2000, 3000, 4000, 8000, 16000)
    """Tokens."""
    shape: Literal["paper", "released"] = "paper"
    """Sizes of the model."""
    layers: Count | None = None
    """In place of the shape's."""
    batch: Count | None = None
    """Sequences per step, in place of the shape's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype."""
    steps: Count = 20
    """Steps timed of each case."""
    seconds: Positive = 60.0
    """About how long they may take: slow ones are fewer."""
    limit: Positive = 600.0
    """Seconds a case may take in all."""
    memory_only: bool = False
    """Compile, and run nothing."""


@functools.partial(
    report.Benchmark, module="lra.table efficiency", options=Options, tables=report.columns(), panels=panels,
    title="Long Range Arena: a step on byte text", measure_case=lambda case: asdict(measure(Case(**case))))
def main(options: Options, results: report.Results) -> None:
    """All cases, length by length."""
    timing.share_device()  # leave the memory to the measuring processes
    timing.use_whole_device()
    # The default only now: it makes a layer of each mode.
    options.rows = options.rows or tuple(table_rows())
    cases = [Case(row, tokens, options.shape, options.layers, options.batch, options.dtype, options.steps,
                  options.seconds, options.memory_only) for tokens in options.lengths for row in options.rows]
    for case in cases:
        case.config()
    results.model = f"{options.shape} shape"
    for case in cases:
        status(f"{case.row} at {case.tokens:,} …")
        results.add(in_process(case, options.limit))
        if case.row == options.rows[-1]:
            results.write_markdown(markdown(results.rows["rows"], results.origin))


if __name__ == "__main__":
    sys.exit(main())
