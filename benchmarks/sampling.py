"""Time to draw one token after a short and a long text: does sampling slow down as it goes?

    python -m benchmarks.sampling --positions 1024,8192 --modes softmax,chunked --json sampling.json
    python -m benchmarks.sampling --sizes 124M,1558M --positions 1024,16384,65536,524288 --batches 1,32 --picture s.png

Through the sampler that ``sample.py`` uses, from models without positions, which go on for ever. What decoding keeps of
the text before is filled with random numbers: no text is read. A size is one of GPT-2's, with softplus features;
without ``--sizes`` the model is that of ``--width``, ``--layers``, ``--heads`` and ``--vocabulary``. The modes take
turns, and so do positions where they all fit into memory; figures are medians.

``bandwidth`` is the share of the memory's bandwidth, by data sheet, that reading what a token needs takes: every
parameter once, in the number format of the products, and the state, or the keys and values that are filled, of each
sequence. The last column is the time at a position over that of the same mode at the first position named: 1 where the
cost does not grow with what was drawn before. A case that does not fit into memory is a row with ``error``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import picture, report
from benchmarks.train_step import CASE_SECONDS, SIZES, model_config, sizes
from configs.schema import ConfigError, ModelConfig
from models.gpt import GPT
from models.sampler import TOKENS_PER_CALL, Sampler

CALLS_PER_SAMPLE = 4
"""Pieces of text in a sample, drawn one after the other without a wait between."""
TOGETHER_BYTES = 2**30
"""All positions take turns where what they keep is no more than this."""
HEADINGS = ("size", "batch", "position", "mode", "ms/token", "fastest", "samples", "tokens/s", "bandwidth",
            "× first position")


@dataclass
class Row:
    """One mode at one position, as the JSON file has it; times are of a token of every sequence, in milliseconds."""

    mode: str
    """As it was named on the command line."""
    position: int
    """Tokens before the first one drawn."""
    batch: int = 1
    """Sequences at once."""
    size: str | None = None
    """Name in ``SIZES``; None: the flags'."""
    milliseconds: float | None = None
    """Median of the samples."""
    tokens_per_second: float | None = None
    """Of all sequences together."""
    bytes_read: int | None = None
    """Parameters and what decoding keeps, read for a token of every sequence."""
    bandwidth: float | None = None
    """Share of the device's; None where it is not known."""
    ratio: float | None = None
    """Time over that of the mode at the first position."""
    samples: list[float] = field(default_factory=list)
    error: str | None = None


def bytes_read(model: GPT, position: int, batch: int) -> int:
    """What has to be read for a token of each of ``batch`` sequences that have seen ``position`` tokens."""
    products = jnp.dtype(model.config.dtype).itemsize
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    layers = jax.eval_shape(lambda: model.init_cache(1, 1)).layers
    kept = 0
    for block, cache in zip(model.blocks, layers, strict=True):
        width = next(leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
                     if jnp.issubdtype(leaf.dtype, jnp.floating))
        kept += block.attention.state_bytes(position) * width // 4  # it counts four bytes a number
    return parameters * products + batch * kept


def measure(samplers: dict[str, Sampler], positions: Sequence[int], batch: int, repeats: int, *,
            seconds: float = CASE_SECONDS, size: str | None = None) -> list[Row]:
    """The rows of a batch: every sampler at every position, by turns.

    Args:
        samplers: by mode, as it was named.
        positions: tokens that stand before.
        batch: sequences at once.
        repeats: samples of each.
        seconds: about how long the samples of a case may take.
        size: name of the size.
    """
    rows = {(mode, position): Row(mode, position, batch, size) for position in positions for mode in samplers}
    kept = {(mode, position): bytes_read(sampler.model, position, batch) for mode, sampler in samplers.items()
            for position in positions}
    together = sum(kept.values()) <= TOGETHER_BYTES
    for group in [positions] if together else [[position] for position in positions]:
        cases: dict[tuple[str, int], Callable[[], Any]] = {}
        for mode, position in [case for case in rows if case[1] in group]:
            row = rows[mode, position]
            row.bytes_read = kept[mode, position]
            try:
                report.check_memory(row.bytes_read)
                calls = CALLS_PER_SAMPLE * (repeats + 3)  # three warm up
                cases[mode, position] = _sample(samplers[mode].continuation(position, samples=batch, calls=calls))
                jax.block_until_ready(cases[mode, position]())
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                cases.pop((mode, position), None)
                row.error = str(error).partition("\n")[0]
        timed = report.time_by_turns(cases, repeats, sample_seconds=0, seconds=seconds)
        for case, samples in timed.items():
            _fill(rows[case], [sample / CALLS_PER_SAMPLE / TOKENS_PER_CALL for sample in samples])
    for (mode, _), row in rows.items():
        first = rows[mode, positions[0]].milliseconds
        row.ratio = row.milliseconds / first if row.milliseconds and first else None
    return list(rows.values())


def _sample(draw_piece: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    def sample() -> jax.Array:
        for _ in range(CALLS_PER_SAMPLE - 1):
            draw_piece()
        return draw_piece()

    return sample


def _fill(row: Row, samples: list[float]) -> None:
    token, peak = median(samples), report.peak()
    row.samples = [1e3 * sample for sample in samples]
    row.milliseconds = 1e3 * token
    row.tokens_per_second = row.batch / token
    if peak is not None and row.bytes_read is not None:
        row.bandwidth = row.bytes_read / token / peak.bandwidth


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    times = ("–", "–", "–", "–")
    if row.milliseconds is not None:
        times = (f"{row.milliseconds:.3f}", f"{min(row.samples):.3f}", str(len(row.samples)),
                 f"{row.tokens_per_second:,.0f}")
    return [row.size or "", str(row.batch), f"{row.position:,}", row.mode, *times,
            "–" if row.bandwidth is None else f"{row.bandwidth:.1%}", "–" if row.ratio is None else f"{row.ratio:.2f}"]


def draw(path: Path, rows: Sequence[Row], device: str) -> None:
    """Time of a token against position, a panel a size and batch, with what was published at batch 1."""
    panels = []
    for size, batch in dict.fromkeys((row.size, row.batch) for row in rows):
        curves: dict[str, dict[float, float | None]] = {}
        for row in rows:
            if (row.size, row.batch) == (size, batch):
                curves.setdefault(row.mode, {})[row.position] = row.milliseconds
        known = picture.published("sampling", "models").get(size, {}) if batch == 1 else {}
        others: dict[str, picture.Curve] = {mode: known[name] for mode in curves
                                            if (name := mode.partition(":")[0]) in known}
        title = f"{size or ''} batch {batch}".strip()
        panels.append(picture.Panel(curves, title=title, x="tokens before", y="milliseconds a token",
                                    published=others))
    picture.draw_panels(path, panels, title=f"Sampling on {device}")


@report.stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 for failures."""
    options = _options(argv)
    report.use_whole_memory()
    contents = report.origin("benchmarks.sampling", options)
    rows: list[Row] = []
    try:
        report.check_output(options.json)
        report.check_output(options.picture, "--picture")
        configs = {size: {mode: _config(mode, size, options) for mode in options.modes} for size in sizes(options)}
        for size, modes in configs.items():
            samplers = {mode: Sampler(GPT(config, sizes(options)[size].vocabulary, rngs=nnx.Rngs(0)))
                        for mode, config in modes.items()}
            for batch in options.batches:
                print(f"{size or 'model'}, batch {batch} …", file=sys.stderr)
                rows += measure(samplers, options.positions, batch, options.repeats,
                                seconds=options.seconds_per_case, size=size)
                report.keep(options.json, contents | {"rows": [asdict(row) for row in rows]})
        if options.picture is not None and report.has_matplotlib():
            draw(options.picture, rows, contents["device"])
    except (ConfigError, NotImplementedError) as error:
        print(report.message(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(report.message(error), file=sys.stderr)
        return 1
    print(f"{contents['device']}; {next(iter(configs.values()))[options.modes[0]].dtype}")
    print(report.table(HEADINGS, [cells(row) for row in rows]))
    for row in rows:
        if row.error is not None:
            print(f"{row.mode} at {row.position:,}, batch {row.batch}: {row.error}", file=sys.stderr)
    return 0 if any(row.error is None for row in rows) else 1


def _config(mode: str, size: str | None, options: argparse.Namespace) -> ModelConfig:
    features = "softplus" if options.sizes else None  # as published for linear GPT-2
    config = model_config(mode, max(options.positions), sizes(options)[size], dtype=options.dtype, features=features)
    return replace(config, positions="none")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.model_parser("benchmarks.sampling", __doc__)
    parser.add_argument("--sizes", type=report.names, help=f"GPT-2's, with commas between, of {','.join(SIZES)}")
    parser.add_argument("--positions", type=report.positives, default=(128, 8192),
                        help="how many tokens there are before, with commas between (128,8192)")
    parser.add_argument("--batches", type=report.positives, default=(1,), help="sequences at once, with commas (1)")
    parser.add_argument("--seconds-per-case", type=float, default=CASE_SECONDS,
                        help="about how long the samples of a case may take (%(default)g)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
