"""Speed and memory of every attention on byte text: ``python -m lra.table efficiency``.

A case is a training step of a classifier for Long Range Arena's byte-level text, at one length: forward pass, backward
pass and AdamW update on random bytes, in its own process. Memory is the compiler's plan for arguments, outputs and
temporaries, which is the same in every run. Time is the median step after a warm-up.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import functools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

from benchmarks import report
from benchmarks.modes import HELP, mode_config, split_mode
from benchmarks.picture import Panel, curves
from configs.schema import EncoderConfig, OptimizerConfig
from models import attention
from models.encoder import Classifier, resolve_config
from support.command import status
from support.errors import ConfigError
from training.optimizer import decay_mask, make_optimizer
from training.step import jit_step, make_update, state_of

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
    """A mode for encoders, with its form and options: see :mod:`benchmarks.modes`."""
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
            raise ConfigError(f"--shape {self.shape}: expected one of {', '.join(SHAPES)}")
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


class Examples(NamedTuple):
    """A batch of byte texts."""

    tokens_BT: Int[Array, "B T"]
    labels_B: Int[Array, " B"]


def loss_sum(model: Classifier, batch: Examples, _: Array) -> tuple[Array, Array]:
    """The sum of cross-entropies in nats, and the number of examples."""
    losses_B = optax.softmax_cross_entropy_with_integer_labels(model.forward(batch.tokens_BT), batch.labels_B)
    return losses_B.sum(), jnp.int32(len(losses_B))


def compiled_step(config: EncoderConfig, batch: int) -> tuple[Any, Any, Examples]:
    """The compiled training step; a function that makes its initial state; a batch of random bytes."""
    model = nnx.eval_shape(lambda: Classifier(config, BYTES, rngs=nnx.Rngs(0)))
    transform = make_optimizer(OptimizerConfig(), decay_mask(model))

    def initial() -> Any:
        return state_of(Classifier(config, BYTES, rngs=nnx.Rngs(0)), transform)

    random = np.random.default_rng(0)
    examples = Examples(jnp.asarray(random.integers(1, BYTES, (batch, config.context), dtype=np.int32)),
                        jnp.asarray(random.integers(0, 2, batch, dtype=np.int32)))
    step = jit_step(make_update(model, loss_sum, transform, seed=0), model)
    compiled = step.lower(jax.eval_shape(initial), examples, jnp.float32(1e-3)).compile()
    return compiled, jax.jit(initial), examples


def measure(case: Case) -> Result:
    """Compiles a case, runs it, and measures it. A case that does not fit has its planned memory, and an ``error``.

    Raises:
        ConfigError: as :meth:`Case.config`.
    """
    config = case.config()
    sequences = case.batch or SHAPES[case.shape].batch
    compiled, initial, examples = compiled_step(config, sequences)
    planned = report.peak_bytes(compiled)
    found = Result(**asdict(case), sequences=sequences, peak_bytes=planned)
    if case.memory_only:
        return found
    try:
        report.check_memory(planned)
        samples = _time_steps(compiled, initial(), examples, case)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return replace(found, error=f"{type(error).__name__}: {error}".partition("\n")[0])
    low, middle, high = (float(x) for x in np.quantile(samples, (0.25, 0.5, 0.75)))
    return replace(found, steps_per_second=1 / middle, quartiles=(low, high), samples=samples)


def _time_steps(compiled: Any, state: Any, examples: Examples, case: Case) -> list[float]:
    metrics: Any = None

    def step() -> Array:
        nonlocal state, metrics
        state, metrics = compiled(state, examples, jnp.float32(1e-3))
        return metrics.loss

    (samples,) = report.time_by_turns({case: step}, case.steps, sample_seconds=0, seconds=case.seconds).values()
    if not np.isfinite(metrics.loss):
        raise FloatingPointError(f"the loss is {metrics.loss}")
    return samples


def in_process(case: Case, limit: float) -> Result:
    """:func:`measure` in a new process with a limit of ``limit`` seconds; failures are in ``error``."""
    found: dict[str, Any] = {"sequences": case.batch or SHAPES[case.shape].batch} | asdict(case)
    measured = report.in_process(MODULE, asdict(case), limit)
    if "peak_bytes" not in measured and not case.memory_only:  # too slow, or killed: the plan has the memory
        planned = report.in_process(MODULE, asdict(replace(case, memory_only=True)), limit)
        found["peak_bytes"] = planned.get("peak_bytes")
    return Result(**found | measured)


def markdown(results: Sequence[Result], origin: Mapping[str, Any]) -> str:
    """The table, with the published rows below ours."""
    published = json.loads(PUBLISHED.read_text())["efficiency"]
    rows, lengths, found = by_row_and_length(results)
    # There, softmax is materialised.
    others = {row: entry for row in rows
              if (entry := published["rows"].get({BASELINE: "softmax", "softmax": None}.get(row, row))) is not None}
    first, base = results[0], published["rows"]["softmax"]
    compared = f" ({{}} {BASELINE})" if BASELINE in rows else ""
    shape = SHAPES[first.shape]
    text = [f"# Long Range Arena: efficiency, {first.shape} shape", "",
            f"Measured on {origin['device']}, jax {origin['versions']['jax']}, {first.dtype}; sequences per step: "
            f"{first.sequences}; {first.layers or shape.layers} layers of {shape.heads} heads, width {shape.width}, "
            f"MLP {shape.mlp_width}:", "", f"    {origin['command']} --out NAME", "",
            f"Published: {published['source']}. {published['notes']}", ""]

    def ours(cell: Any) -> list[str]:
        return report.markdown(["", *(f"{tokens:,}" for tokens in lengths)],
                               [[f"`{row}`", *(cell(found[row, tokens]) for tokens in lengths)] for row in rows])

    def theirs(quantity: str, style: str, *, inverse: bool) -> list[str]:
        body = [[f"`{row}`", *(
            f"{value:{style}} ({(base[quantity][at] / value) if inverse else (value / base[quantity][at]):.1f}×)"
            for at, value in entry[quantity].items())] for row, entry in others.items()]
        return report.markdown(["published", *(f"{int(at):,}" for at in base[quantity])], body)

    def speed(result: Result) -> str:
        if result.steps_per_second is None:
            return reason(result)
        return f"{result.steps_per_second:.3g}{times(faster(result, found))}"

    def memory(result: Result) -> str:
        if result.peak_bytes is None:
            return reason(result)
        return f"{result.peak_bytes / 1e9:.2f}{times(smaller(result, found))}"

    if not first.memory_only:
        text += [f"## Steps per second{compared.format('times')}", "", *ours(speed), "",
                 *theirs("steps_per_second", ".1f", inverse=False), ""]
        spreads = [(result.quartiles[1] - result.quartiles[0]) * result.steps_per_second for result in results
                   if result.quartiles is not None and result.steps_per_second is not None]
        if spreads:
            text += ["From the median step. The interquartile range of a case is "
                     f"{100 * median(spreads):.0f} % of the median step in the median case, "
                     f"{100 * max(spreads):.0f} % at most.", ""]
    text += [f"## Memory per step, GB{compared.format('times less than')}", "",
             "Memory planned by the compiler for arguments, outputs and temporaries, even if it does not fit.", "",
             *ours(memory), "", *theirs("gigabytes", ".2f", inverse=True), ""]
    text += ["## Options of the rows", "", *(f"- `{row}`: {_options_of(found[row, lengths[0]])}." for row in rows), ""]
    if any("released" in entry for entry in others.values()):
        text += ["Released code that differs from the paper it names; whether published figures came from it is not "
                 "known:", "", *(f"- `{row}`: {entry['released']}." for row, entry in others.items()
                                 if "released" in entry), ""]
    return "\n".join(text)


def _options_of(case: Case) -> str:
    (options,) = case.config().modes.values()
    return ", ".join(f"{name} {value}" for name, value in vars(options).items())


def by_row_and_length(results: Sequence[Result]) -> tuple[list[str], list[int], dict[tuple[str, int], Result]]:
    """The rows, the lengths, and the results by row and length."""
    return (list(dict.fromkeys(result.row for result in results)), list(dict.fromkeys(
        result.tokens for result in results)), {(result.row, result.tokens): result for result in results})


def over_baseline(result: Result, found: Mapping[tuple[str, int], Result], name: str) -> float | None:
    """A figure relative to materialised softmax at this length; None if either is unknown."""
    base = found.get((BASELINE, result.tokens))
    figure, of_base = getattr(result, name), None if base is None else getattr(base, name)
    return figure / of_base if figure and of_base else None


def faster(result: Result, found: Mapping[tuple[str, int], Result]) -> float | None:
    """Steps per second relative to materialised softmax."""
    return over_baseline(result, found, "steps_per_second")


def smaller(result: Result, found: Mapping[tuple[str, int], Result]) -> float | None:
    """Memory of materialised softmax relative to this."""
    ratio = over_baseline(result, found, "peak_bytes")
    return ratio and 1 / ratio


def times(value: float | None) -> str:
    """`` (5.6×)``, or nothing."""
    return "" if value is None else f" ({value:.1f}×)"


def reason(result: Result) -> str:
    """Why there is no figure, in a word or two."""
    error = result.error or ""
    if "memory" in error.lower() or "EXHAUSTED" in error or "MemoryError" in error:
        return "out of memory"
    return "too long" if error.startswith("not done") else "failed"


def panels(results: Sequence[Result]) -> list[Panel]:
    """Speed and memory against length, absolute and relative to materialised softmax, with published rows dashed."""
    published = json.loads(PUBLISHED.read_text())["efficiency"]["rows"]
    rows, _, found = by_row_and_length(results)

    def others(quantity: str, *, inverse: bool) -> dict[str, dict[Any, float | None]]:
        base = published["softmax"][quantity]
        return {row: {int(at): base[at] / y if inverse else y / base[at] for at, y in published[row][quantity].items()}
                for row in rows if row in published and row != "softmax"}

    def panel(y: str, value: str | Callable[[Result], float | None], quantity: str = "", *,
              inverse: bool = False) -> Panel:
        return Panel(curves(results, "row", "tokens", value), x="length (tokens)", y=y,
                     published=others(quantity, inverse=inverse) if quantity else {})

    speed = [panel("steps per second", "steps_per_second"),
             panel("times materialised softmax", lambda result: faster(result, found), "steps_per_second")]
    return [*([] if results[0].memory_only else speed),
            panel("memory per step (GB)", lambda result: result.peak_bytes and result.peak_bytes / 1e9),
            panel("times less than materialised softmax", lambda result: smaller(result, found), "gigabytes",
                  inverse=True)]


@functools.partial(
    report.Benchmark, module="lra.table efficiency", files=True, answer=lambda case: asdict(measure(Case(**case))),
    panels=panels, title="Long Range Arena: a step on byte text", tables=report.columns(), flags={
        "rows": report.flag(f"modes that see the whole sequence, each {HELP} ({BASELINE} and all modes)",
                            type=report.names),
        "lengths": report.flag("tokens, with commas between", (1000, 2000, 3000, 4000, 8000, 16000)),
        "shape": report.flag(" or ".join(SHAPES), "paper"),
        "layers": report.flag("in place of the shape's", type=report.positive),
        "batch": report.flag("sequences per step, in place of the shape's", type=report.positive),
        "dtype": report.flag("compute dtype", "float32", choices=("float32", "bfloat16")),
        "steps": report.flag("steps timed of each case", 20),
        "seconds": report.flag("about how long they may take: slow ones are fewer", 60.0),
        "limit": report.flag("seconds a case may take in all", 600.0),
        "memory-only": report.flag("compile, and run nothing", False)})
def main(options: Namespace, results: report.Results) -> None:
    """All cases, length by length."""
    report.share_device()  # leave the memory to the measuring processes
    report.use_whole_device()
    if options.rows is None:
        options.rows = tuple(table_rows())  # only now: it makes a layer of each mode
    cases = {tokens: [Case(row, tokens, options.shape, options.layers, options.batch, options.dtype, options.steps,
                           options.seconds, options.memory_only) for row in options.rows]
             for tokens in options.lengths}
    for case in (case for of_length in cases.values() for case in of_length):
        case.config()
    limit, options.limit = options.limit, None
    results.model = f"{options.shape} shape"
    for tokens, of_length in cases.items():
        for case in of_length:
            status(f"{case.row} at {tokens:,} …")
            results.add(in_process(case, limit))
        results.write_text(markdown(results.rows["rows"], results.origin))


if __name__ == "__main__":
    sys.exit(main())
