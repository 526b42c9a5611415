"""Sampling far past the training context: time and memory stay what they are, and the text stays as good or does not.

    python -m benchmarks.endless --tokens 100000 --json endless.json --picture endless.png
    python -m benchmarks.endless --tokens 100000 --runs runs/rotary runs/none --context 65536 --picture endless.png

Draws so many tokens from the model of a recipe, untrained, through the sampler that ``sample.py`` uses, each mode with
each kind of positions in a process of its own, and notes the time of a token and the resident memory of the process (on
a GPU that of the device) as it goes. A mode whose cache grows (softmax) draws ``--growing-tokens`` at most, from the
start for each point, with a cache for no more. ``late/early`` is the median of the last fifth of the windows over that
of the second fifth, for the first one warms up: 1 where neither time nor memory grows. Of a growing mode it is the last
point over the first.

``--runs`` adds the loss of trained runs by position, on the val split of their corpus, at a context that may be many
times that of training; a ring marks the bin that ends at the context of training.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import picture, report
from configs.schema import ModelConfig, load_recipe
from kernels import cpu
from models import attention, gpt
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from support.command import status
from support.errors import ConfigError

WINDOWS = 50
"""Of a mode with a state of constant size: as many points of its curve."""
LEAST_GROWING = 1024
"""Tokens of the first point of a growing mode, whose points are powers of two."""
HEADINGS = ("mode", "positions", "tokens", "ms/token early", "late", "late/early", "MiB early", "late", "late/early")


@dataclass
class Row:
    """A mode at a position, as the JSON file has it."""

    mode: str
    positions: str
    position: int | None = None
    """Tokens drawn before and up to here."""
    milliseconds: float | None = None
    """Of a token, on average since the row before; of a growing mode over the last eighth."""
    resident_bytes: int | None = None
    """Of the whole process; on a GPU what is in use of its memory."""
    error: str | None = None


def draw_tokens(case: dict[str, Any]) -> dict[str, Any]:
    """What a process does: draw ``tokens`` tokens; position, milliseconds a token and resident bytes of each window.

    Args:
        case: ``model``, the fields of a :class:`ModelConfig`, ``vocabulary``, ``tokens`` and ``windows``.
    """
    config = gpt.resolve_config(ModelConfig(**case["model"] | {"attention": tuple(case["model"]["attention"])}))
    sampler = Sampler(GPT(config, case["vocabulary"], rngs=nnx.Rngs(0)))
    sampler.warm_up(1, case["tokens"])
    found: list[tuple[int, float, int | None]] = []
    drawn, before, start = 0, 0, time.perf_counter()
    for piece_BT in sampler.generate(np.zeros(1, np.int64), Sampling(), max_new_tokens=case["tokens"]):
        drawn += piece_BT.shape[1]
        if drawn * case["windows"] >= (len(found) + 1) * case["tokens"]:
            now = time.perf_counter()
            found.append((drawn, 1e3 * (now - start) / (drawn - before), resident_bytes()))
            before, start = drawn, now
    return {"windows": found}


def resident_bytes() -> int | None:
    """Of this process, on a GPU in the device's memory; None where neither says."""
    if (stats := jax.devices()[0].memory_stats()) is not None:
        return stats.get("bytes_in_use")
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


def measure(config: ModelConfig, vocabulary: int, tokens: int, growing_tokens: int) -> list[Row]:
    """The rows of a mode with a kind of positions."""
    (mode,) = config.attention
    if attention.abstract(mode, config.modes[mode], head_width=config.width // config.heads, width=config.width,
                          max_length=config.context).decode_state != "growing":
        return _draw(config, vocabulary, tokens, WINDOWS)
    rows, length = [], min(LEAST_GROWING, growing_tokens)
    while length <= growing_tokens:
        rows += _draw(config, vocabulary, length, 8)[-1:]
        length *= 2
    return rows


def _draw(config: ModelConfig, vocabulary: int, tokens: int, windows: int) -> list[Row]:
    (mode,) = config.attention
    status(f"{mode}, {config.positions} positions, {tokens:,} tokens …")
    found = report.in_process("benchmarks.endless", {
        "model": asdict(config), "vocabulary": vocabulary, "tokens": tokens, "windows": windows})
    if "error" in found:
        return [Row(mode, config.positions, error=found["error"])]
    return [Row(mode, config.positions, *window) for window in found["windows"]]


def losses(run_dir: Path, context: int | None, windows: int) -> dict[str, Any]:
    """Loss by position of a run on its val split.

    Args:
        run_dir: the run.
        context: tokens that the model sees at once; None, sixteen times those of training.
        windows: so many of them.

    Raises:
        ConfigError: no such run, or one that has no positions for the context.
        RunError, CheckpointError, DataError: the run or its corpus cannot be read.
    """
    # Here, not above: the rest does without the packages that they need.
    from data.loader import open_corpora
    from training import evaluation
    from training.run import load_model

    run = load_model(run_dir)
    trained = run.config.model.context
    context = context or 16 * trained
    corpora = open_corpora(run.config.data)
    evaluation.check_contexts(run.model, corpora, [context])
    entry = evaluation.evaluate(run.model, corpora, contexts=[context], windows=(), tokens=windows * context,
                                tokens_at_once=context, packing=run.config.data.packing,
                                progress=lambda line: status(f"{run_dir.name}: {line}"))[0].figures
    return {"run": run_dir.name, "step": run.step, "attention": ",".join(run.config.model.attention),
            "positions": run.config.model.positions, "trained_context": trained, "context": context,
            "losses": entry["positions"]}


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the second fifth and of the last fifth; of few values, which are of a growing mode, first and last."""
    fifth = len(values) // 5
    return (median(values[fifth:2 * fifth]), median(values[-fifth:])) if fifth > 1 else (values[0], values[-1])


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The printed table, a line for each mode and kind of positions."""
    lines = []
    for curve in _curves(rows):
        times, memory = growth([row.milliseconds for row in curve]), growth([row.resident_bytes or 0 for row in curve])
        lines.append([curve[0].mode, curve[0].positions, f"{curve[-1].position:,}",
                      f"{times[0]:.3f}", f"{times[1]:.3f}", f"{times[1] / times[0]:.2f}",
                      *(("–", "–", "–") if not memory[0] else (
                          f"{memory[0] / 2**20:,.0f}", f"{memory[1] / 2**20:,.0f}", f"{memory[1] / memory[0]:.2f}"))])
    return lines


def draw(path: Path, rows: Sequence[Row], runs: Sequence[dict[str, Any]], device: str) -> None:
    """Time of a token and resident memory against position, and the loss of the runs."""
    times: dict[str, picture.Curve] = {}
    memory: dict[str, picture.Curve] = {}
    for curve in _curves(rows):
        name = f"{curve[0].mode}, {curve[0].positions}"
        times[name] = _by_power({row.position: row.milliseconds for row in curve})
        memory[name] = _by_power({row.position: row.resident_bytes / 2**20 for row in curve if row.resident_bytes})
    x = "tokens drawn"
    panels = [picture.Panel(times, x=x, y="milliseconds a token"), picture.Panel(memory, x=x, y="resident MiB")]
    if runs:
        names = [f"{run['run']} ({run['attention']}, {run['positions']})" for run in runs]
        seen = [{bin["last"]: bin["loss"] for bin in run["losses"]} for run in runs]
        panels.append(picture.Panel(
            dict(zip(names, seen, strict=True)), x="tokens of context seen", y="loss (nats a token)",
            marked={name: run["trained_context"] for name, run in zip(names, runs, strict=True)}))
    picture.draw_panels(path, panels, title=f"Sampling without end on {device}")


def _curves(rows: Sequence[Row]) -> list[list[Any]]:
    """The rows of each mode and kind of positions, without those that failed."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.error is None:
            curves.setdefault((row.mode, row.positions), []).append(row)
    return list(curves.values())


def _by_power(points: dict[int, float]) -> picture.Curve:
    """The medians of the points up to each power of two, which is what the axis shows."""
    groups: dict[int, list[float]] = {}
    for x, y in points.items():
        groups.setdefault(1 << (x - 1).bit_length(), []).append(y)
    last = max(points, default=0)
    return {min(x, last): median(ys) for x, ys in groups.items()}


def command(arguments: Sequence[str]) -> int:
    """Measures what the flags say; returns 1 where nothing could be measured."""
    options = _options(arguments)
    cpu.configure_process()
    report.share_device()
    if options.case is not None:
        # One line of JSON is the last of what this prints.
        print(json.dumps(draw_tokens(json.loads(options.case))))
        return 0
    runs, options.runs = options.runs, ",".join(run.name for run in options.runs) or None
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    report.check_output(options.json)
    report.check_output(options.picture, "--picture")
    configs = [_config(mode, positions, options) for mode in options.modes for positions in options.positions]
    contents = report.origin("benchmarks.endless", options)
    for run in runs:
        found.append(losses(run, options.context, options.windows))
    for config in configs:
        rows += measure(config, options.vocabulary, options.tokens, options.growing_tokens)
        report.keep(options.json, contents | {"rows": [asdict(row) for row in rows], "runs": found})
    if options.picture is not None and report.has_matplotlib():
        draw(options.picture, rows, found, contents["device"])
    print(f"{contents['device']}; {configs[0].dtype}")
    print(report.table(HEADINGS, table(rows)))
    for run in found:
        print(f"{run['run']}: {run['attention']}, {run['positions']} positions, trained at {run['trained_context']:,}; "
              + ", ".join(f"{bin['loss']:.3f} at {bin['last']:,}" for bin in run["losses"] if bin["last"] >= 64))
    for row in rows:
        if row.error is not None:
            status(f"{row.mode}, {row.positions} positions: {row.error}")
    return 0 if _curves(rows) else 1


def _config(mode: str, positions: str, options: argparse.Namespace) -> ModelConfig:
    if positions not in ("rotary", "none"):
        raise ConfigError(f"--positions {positions}: expected rotary or none, which go on without end")
    return gpt.resolve_config(replace(load_recipe(options.recipe, mode).model, positions=positions))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endless", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("configs/quickstart.py"),
                        help="recipe whose model is drawn from (%(default)s)")
    parser.add_argument("--modes", type=report.names, default=("chunked", "softmax"),
                        help="modes, with commas between (chunked,softmax)")
    parser.add_argument("--positions", type=report.names, default=("rotary", "none"),
                        help="kinds of positions, with commas between (rotary,none)")
    parser.add_argument("--tokens", type=report.positive, default=100_000, help="tokens to draw (%(default)s)")
    parser.add_argument("--growing-tokens", type=report.positive, default=16_384,
                        help="tokens to draw where the cache grows (%(default)s)")
    parser.add_argument("--vocabulary", type=report.positive, default=257,
                        help="tokens in the vocabulary (%(default)s)")
    parser.add_argument("--runs", type=Path, nargs="+", default=(), metavar="RUN", help="trained runs")
    parser.add_argument("--context", type=report.positive, help="tokens that they see at once (16 times training's)")
    parser.add_argument("--windows", type=report.positive, default=4,
                        help="windows of so many tokens that they are evaluated on (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--picture", type=Path, help="PNG or SVG to draw, where matplotlib is installed")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.endless", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
