"""The tables of Long Range Arena, measured on this machine, with the published rows beside.

    python -m lra.table efficiency --out lra/results/efficiency_cpu --layers 2 --batch 1
    python -m lra.table efficiency --out efficiency --rows softmax,linear --lengths 1000,4000 --shape released
    python -m lra.table efficiency --out memory --lengths 1000,4000,16000 --memory-only

``efficiency``: steps a second and memory of a whole training step on byte text, a process a case, written as NAME.json,
NAME.md and, where matplotlib is installed, NAME.png after every length. Cases are compared with materialised softmax,
which the published table has, at the same length; ``softmax`` alone is fused. A case that does not fit into memory, or
takes too long, says so in its place.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.picture import Panel, draw_panels
from configs.schema import ConfigError
from lra.efficiency import ROWS, SHAPES, Case, Result, in_process
from training.environment import write_json, write_text

PUBLISHED = Path(__file__).parent / "published.json"
BASELINE = "softmax:materialised"
LENGTHS = (1000, 2000, 3000, 4000, 8000, 16000)


def efficiency(cases: Mapping[int, Sequence[Case]], options: argparse.Namespace) -> list[Result]:
    """Measure all cases, length by length, and write the table after each."""
    results: list[Result] = []
    origin = report.origin("lra.table efficiency", argparse.Namespace(**{
        name: value for name, value in vars(options).items() if name not in ("part", "limit")}))
    for tokens, of_length in cases.items():
        for case in of_length:
            print(f"{case.row} at {tokens:,} …", file=sys.stderr)
            results.append(in_process(case, options.limit))
        contents = origin | {"rows": [asdict(result) for result in results]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out.with_suffix(".json"), contents)
        write_text(options.out.with_suffix(".md"), markdown(results, origin))
        report.kept(options.out.with_suffix(".json"), f"{len(results)} rows")
    if report.has_matplotlib():
        draw(options.out.with_suffix(".png"), results, origin["device"])
    return results


def markdown(results: Sequence[Result], origin: Mapping[str, Any]) -> str:
    """The table: rows as published, a column a length, ours and then what was published."""
    published = json.loads(PUBLISHED.read_text())["efficiency"]
    lengths = list(dict.fromkeys(result.tokens for result in results))
    found = {(result.row, result.tokens): result for result in results}
    rows = list(dict.fromkeys(result.row for result in results))
    first = results[0]
    shape = SHAPES[first.shape]
    text = [f"# Long Range Arena: efficiency, {first.shape} shape", "",
            f"Measured on {origin['device']}, jax {origin['versions']['jax']}, {first.dtype}; sequences a step: "
            f"{first.sequences}; {first.layers or shape.layers} layers of {shape.heads} heads, width {shape.width}, "
            f"MLP {shape.mlp_width}:", "", f"    {origin['command']} --out NAME", "",
            f"Published: {published['source']}. {published['notes']}", ""]
    headings = ["", *(f"{tokens:,}" for tokens in lengths), f"published, {published['tokens']:,}"]
    base = published["rows"]["softmax"]

    def lines(cell: Any, others: Any) -> list[str]:
        body = [[f"`{row}`", *(cell(found[row, tokens]) for tokens in lengths),
                 "" if (entry := _published(published, row)) is None else others(entry)] for row in rows]
        return ["| " + " | ".join(line) + " |" for line in (headings, ["---", *["---:"] * (len(headings) - 1)], *body)]

    def speed(result: Result) -> str:
        if result.steps_per_second is None:
            return reason(result)
        return f"{result.steps_per_second:.3g}{times(faster(result, found))}"

    def memory(result: Result) -> str:
        if result.peak_bytes is None:
            return reason(result)
        return f"{result.peak_bytes / 1e9:.2f}{times(smaller(result, found))}"

    if not first.memory_only:
        text += ["## Steps a second (times materialised softmax)", "", *lines(speed, lambda row: (
            f"{row['steps_per_second']:.1f} ({row['steps_per_second'] / base['steps_per_second']:.1f}×)")), ""]
    text += ["## Memory of a step, GB (times less than materialised softmax)", "", *lines(memory, lambda row: (
        f"{row['gigabytes']:.2f} ({base['gigabytes'] / row['gigabytes']:.1f}×)")), ""]
    slopes = {row: slope([found[row, tokens] for tokens in lengths]) for row in rows}
    if any(value is not None for value in slopes.values()):
        text += ["## How memory grows", "", "The exponent of the length between the two longest that are known: 1 is "
                 "linear, 2 quadratic.", "", "| | exponent |", "| --- | ---: |",
                 *(f"| `{row}` | {value:.2f} |" for row, value in slopes.items() if value is not None), ""]
    faults = [f"- `{row}`: {entry['faulty']}." for row in rows
              if (entry := _published(published, row)) is not None and "faulty" in entry]
    if faults:
        text += ["Published rows that were measured with released code that differs from the paper it names:", "",
                 *faults, ""]
    return "\n".join(text)


def _published(published: Mapping[str, Any], row: str) -> dict[str, Any] | None:
    """What was published of a row; there, softmax is materialised."""
    return published["rows"].get({BASELINE: "softmax", "softmax": None}.get(row, row))


def faster(result: Result, found: Mapping[tuple[str, int], Result]) -> float | None:
    """How many times the steps a second of materialised softmax at this length; None where one of both has none."""
    base = found.get((BASELINE, result.tokens))
    if base is None or base.steps_per_second is None or result.steps_per_second is None:
        return None
    return result.steps_per_second / base.steps_per_second


def smaller(result: Result, found: Mapping[tuple[str, int], Result]) -> float | None:
    """How many times less memory than materialised softmax; None where one of both is not known."""
    base = found.get((BASELINE, result.tokens))
    return None if base is None or not base.peak_bytes or not result.peak_bytes else base.peak_bytes / result.peak_bytes


def slope(results: Sequence[Result]) -> float | None:
    """The exponent with which memory grows between the two longest lengths that it is known of."""
    known = sorted((result.tokens, result.peak_bytes) for result in results if result.peak_bytes)
    if len(known) < 2:
        return None
    (a, before), (b, after) = known[-2:]
    return math.log(after / before) / math.log(b / a)


def times(value: float | None) -> str:
    """`` (5.6×)``, or nothing."""
    return "" if value is None else f" ({value:.1f}×)"


def reason(result: Result) -> str:
    """Why there is no figure, in a word or two."""
    error = result.error or ""
    if "memory" in error.lower() or "EXHAUSTED" in error or "MemoryError" in error:
        return "out of memory"
    return "too long" if error.startswith("not done") else "failed"


def draw(path: Path, results: Sequence[Result], device: str) -> None:
    """Speed and memory against length."""
    def curves(value: Any) -> dict[str, dict[Any, float | None]]:
        found: dict[str, dict[Any, float | None]] = {}
        for result in results:
            found.setdefault(result.row, {})[result.tokens] = value(result)
        return {row: curve for row, curve in found.items() if any(y is not None for y in curve.values())}

    panels = [Panel(curves(lambda result: result.peak_bytes and result.peak_bytes / 1e9), x="length (tokens)",
                    y="memory of a step (GB)")]
    if not results[0].memory_only:
        panels.insert(0, Panel(curves(lambda result: result.steps_per_second), x="length (tokens)",
                               y="steps a second"))
    draw_panels(path, panels, title=f"Long Range Arena: a step on byte text, {results[0].shape} shape, {device}")


@report.stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 where nothing could be measured."""
    options = _options(argv)
    report.use_whole_memory()
    try:
        report.check_output(options.out.with_suffix(".json"), "--out") if options.out.parent.is_dir() else None
        cases = {tokens: [Case(row, tokens, options.shape, options.layers, options.batch, options.dtype, options.steps,
                               options.seconds, options.memory_only) for row in options.rows]
                 for tokens in options.lengths}
        for case in (case for of_length in cases.values() for case in of_length):
            case.config()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        results = efficiency(cases, options)
    except OSError as error:
        print(report.message(error), file=sys.stderr)
        return 1
    print(options.out.with_suffix(".md").read_text())
    for result in results:
        if result.error is not None:
            print(f"{result.row} at {result.tokens:,}: {result.error}", file=sys.stderr)
    return 0 if any(result.error is None for result in results) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lra.table", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_subparsers(dest="part", required=True, metavar="efficiency").add_parser(
        "efficiency", allow_abbrev=False, help="speed and memory against length")
    part.add_argument("--out", type=Path, required=True, help="NAME of the files to write, without a suffix")
    part.add_argument("--rows", type=report.names, default=tuple(ROWS), help=f"of {','.join(ROWS)} (all)")
    part.add_argument("--lengths", type=report.positives, default=LENGTHS,
                      help=f"tokens, with commas between ({','.join(map(str, LENGTHS))})")
    part.add_argument("--shape", default="paper", help=f"{' or '.join(SHAPES)} (%(default)s)")
    part.add_argument("--layers", type=report.positive, help="in place of the shape's")
    part.add_argument("--batch", type=report.positive, help="sequences a step, in place of the shape's")
    part.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                      help="number format of the products (%(default)s)")
    part.add_argument("--steps", type=report.positive, default=20, help="steps timed of each case (%(default)s)")
    part.add_argument("--seconds", type=float, default=60.0,
                      help="about how long they may take: slow ones are fewer (%(default)g)")
    part.add_argument("--limit", type=float, default=600.0, help="seconds a case may take in all (%(default)g)")
    part.add_argument("--memory-only", action="store_true", help="compile, and run nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
