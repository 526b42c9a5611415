"""Samples far beyond the training context: time per token, and memory.

    python -m benchmarks.endless --tokens 100000 --json endless.json --picture endless.png

The untrained model of a recipe samples tokens as ``sample.py`` does. Each mode with each kind of positions is a process
of its own, which records the time per token and its resident memory, or the memory in use of a GPU. A mode with a
growing cache samples ``--growing-tokens`` at most. For each of its points it starts anew, with a cache for no more
tokens. ``late/early`` is the median of the last fifth of the windows over that of the second fifth, because
the first one warms up. For a growing mode it is the last point over the first. ``eval.py`` has the loss at contexts
beyond that of training.
"""

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from benchmarks import picture, report, timing
from benchmarks.recipes import recipe_model
from configs.schema import ModelConfig
from kernels import cpu
from models import attention, gpt
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from support.command import status
from support.ranges import Count

WINDOWS = 50
"""Points of the curve of a mode with a state of constant size."""
LEAST_GROWING = 1024
"""Tokens of the first point of a growing mode; each further one has twice as many."""


@dataclass
class Row:
    """A mode at a position, as in the JSON file."""

    mode: str
    positions: str
    position: int | None = None
    """Tokens sampled so far."""
    milliseconds: float | None = None
    """Mean per token since the row before; for a growing mode over the last eighth."""
    resident_bytes: int | None = None
    """Memory of the process, or the memory in use of a GPU."""
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.positions}"

    @property
    def mebibytes(self) -> float | None:
        return self.resident_bytes and self.resident_bytes / 2**20


def sample_tokens(case: dict[str, Any]) -> dict[str, Any]:
    """The result of a process: position, milliseconds per token and resident bytes of each window.

    Args:
        case: ``model``, the fields of a :class:`ModelConfig`, ``vocabulary``, ``tokens`` and ``windows``.
    """
    cpu.configure_process()
    config = gpt.resolve_config(ModelConfig(**case["model"] | {"attention": tuple(case["model"]["attention"])}))
    sampler = Sampler(GPT(config, case["vocabulary"], rngs=nnx.Rngs(0)))
    sampler.warm_up(1, case["tokens"])
    found: list[tuple[int, float, int | None]] = []
    sampled, before, start = 0, 0, time.perf_counter()
    for piece_BT in sampler.generate(np.zeros(1, np.int64), Sampling(), max_new_tokens=case["tokens"]):
        sampled += piece_BT.shape[1]
        if sampled * case["windows"] >= (len(found) + 1) * case["tokens"]:
            now = time.perf_counter()
            found.append((sampled, 1e3 * (now - start) / (sampled - before), resident_bytes()))
            before, start = sampled, now
    return {"windows": found}


def resident_bytes() -> int | None:
    """Memory of this process, or the memory in use of a GPU; None if unknown."""
    if (stats := jax.devices()[0].memory_stats()) is not None:
        return stats.get("bytes_in_use")
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


def measure(mode: str, config: ModelConfig, vocabulary: int, tokens: int, growing_tokens: int) -> list[Row]:
    """The rows of a mode, as on the command line, with one kind of positions."""
    (name,) = config.attention
    if attention.abstract(name, config.modes[name], head_width=config.width // config.heads, width=config.width,
                          max_length=config.context).decode_state != "growing":
        return _sample(mode, config, vocabulary, tokens, WINDOWS)
    rows, length = [], min(LEAST_GROWING, growing_tokens)
    while length <= growing_tokens:
        rows += _sample(mode, config, vocabulary, length, 8)[-1:]
        length *= 2
    return rows


def _sample(mode: str, config: ModelConfig, vocabulary: int, tokens: int, windows: int) -> list[Row]:
    status(f"{mode}, {config.positions} positions, {tokens:,} tokens …")
    found = timing.in_process("benchmarks.endless", {
        "model": asdict(config), "vocabulary": vocabulary, "tokens": tokens, "windows": windows})
    if "error" in found:
        return [Row(mode, config.positions, error=found["error"])]
    return [Row(mode, config.positions, *window) for window in found["windows"]]


def growth(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Medians of the second and of the last fifth, and their ratio; of few values, of a growing mode, the first and the
    last. None if they are unknown."""
    fifth = len(values) // 5
    if None in values:
        return None, None, None
    early, late = (median(values[fifth:2 * fifth]), median(values[-fifth:])) if fifth > 1 else (values[0], values[-1])
    return early, late, late / early


def summary(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A line for each mode and kind of positions."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row.error is None:
            curves.setdefault(row.name, []).append(row)
    return [(curve[0].mode, curve[0].positions, curve[-1].position, *growth([row.milliseconds for row in curve]),
             *growth([row.mebibytes for row in curve])) for curve in curves.values()]


TABLE = report.columns(
    ("mode", 0, ""), ("positions", 1, ""), ("tokens", 2, ","), ("ms/token early", 3, ".3f"), ("late", 4, ".3f"),
    ("late/early", 5, ".2f"), ("MiB early", 6, ",.0f"), ("late", 7, ",.0f"), ("late/early", 8, ".2f"), summary=summary)


def panels(rows: Sequence[Row]) -> list[picture.Panel]:
    """Time per token and resident memory against position."""
    return [picture.Panel({name: _by_power(curve) for name, curve in picture.curves(
                [row for row in rows if row.error is None], "name", "position", value).items()},
                          x="tokens sampled", y=y)
            for y, value in (("milliseconds a token", "milliseconds"), ("resident MiB", "mebibytes"))]


def _by_power(points: picture.Curve) -> picture.Curve:
    """The medians of the points up to each power of two."""
    groups: dict[int, list[float]] = {}
    known = {x: y for x, y in points.items() if y is not None}
    for x, y in known.items():
        groups.setdefault(min(1 << (x - 1).bit_length(), max(known)), []).append(y)
    return {x: median(ys) for x, ys in groups.items()}


@dataclass(kw_only=True)
class Options(report.PictureOptions):
    recipe: Path = Path("configs/quickstart.py")
    """Recipe of the model."""
    modes: tuple[str, ...] = ("chunked", "softmax")
    """Attention modes, each with its form or options if need be, such as reformer:rounds=4."""
    positions: tuple[Literal["rotary", "none"], ...] = ("rotary", "none")
    """Kinds of positions: those without a last one."""
    tokens: Count = 100_000
    """Tokens to sample."""
    growing_tokens: Count = 16_384
    """Tokens to sample with a growing cache."""
    vocabulary: Count = 257
    """Tokens in the vocabulary."""


@functools.partial(report.Benchmark, module="benchmarks.endless", options=Options, tables=TABLE, panels=panels,
                   title="Sampling without end", measure_case=sample_tokens)
def main(options: Options, results: report.Results) -> None:
    cpu.configure_process()
    timing.share_device()
    configs = [(mode, recipe_model(options.recipe, mode, positions=positions))
               for mode in options.modes for positions in options.positions]
    results.model = configs[0][1].dtype
    for mode, config in configs:
        results.add(*measure(mode, config, options.vocabulary, options.tokens, options.growing_tokens))


if __name__ == "__main__":
    sys.exit(main())
