"""The tables of Long Range Arena, measured on this machine, with the published rows beside.

    python -m lra.table efficiency --out lra/results/efficiency_cpu --layers 2 --batch 1
    python -m lra.table efficiency --out efficiency --rows softmax,linear --lengths 1000,4000 --shape released
    python -m lra.table efficiency --out memory --lengths 1000,4000,16000 --memory-only
    python -m lra.table accuracy runs/listops-* --out lra/results/accuracy

``efficiency``: steps a second and memory of a whole training step on byte text, a process a case, written as NAME.json,
NAME.md and, where matplotlib is installed, NAME.png after every length. Cases are compared with materialised softmax,
which the published table has, at the same length; ``softmax`` alone is fused. A case that does not fit into memory, or
takes too long, says so in its place.

``accuracy``: that of runs of ``lra.train`` on the test split (lra.accuracy), written as the same files.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from benchmarks import report
from benchmarks.picture import Panel, draw_panels
from lra import accuracy
from lra.efficiency import SHAPES, Case, Result, in_process, table_rows
from support.command import status
from support.files import write_json, write_text

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
            status(f"{case.row} at {tokens:,} …")
            results.append(in_process(case, options.limit))
        write_json(named(options.out, ".json"), origin | {"rows": [asdict(result) for result in results]})
        write_text(named(options.out, ".md"), markdown(results, origin))
        report.kept(named(options.out, ".json"), f"{len(results)} rows")
        if report.has_matplotlib():
            draw(named(options.out, ".png"), results, origin["device"])
    return results


def named(path: Path, suffix: str) -> Path:
    """NAME.suffix, whatever dots are in NAME."""
    return path.with_name(path.name + suffix)


def markdown(results: Sequence[Result], origin: Mapping[str, Any]) -> str:
    """The table, ours and then as published."""
    published = json.loads(PUBLISHED.read_text())["efficiency"]
    lengths = list(dict.fromkeys(result.tokens for result in results))
    found = {(result.row, result.tokens): result for result in results}
    rows = list(dict.fromkeys(result.row for result in results))
    others = {row: entry for row in rows if (entry := _published(published, row)) is not None}
    first, base = results[0], published["rows"]["softmax"]
    compared = f" ({{}} {BASELINE})" if BASELINE in rows else ""
    shape = SHAPES[first.shape]
    text = [f"# Long Range Arena: efficiency, {first.shape} shape", "",
            f"Measured on {origin['device']}, jax {origin['versions']['jax']}, {first.dtype}; sequences a step: "
            f"{first.sequences}; {first.layers or shape.layers} layers of {shape.heads} heads, width {shape.width}, "
            f"MLP {shape.mlp_width}:", "", f"    {origin['command']} --out NAME", "",
            f"Published: {published['source']}. {published['notes']}", ""]

    def ours(cell: Any) -> list[str]:
        return _lines(["", *(f"{tokens:,}" for tokens in lengths)],
                      [[f"`{row}`", *(cell(found[row, tokens]) for tokens in lengths)] for row in rows])

    def theirs(quantity: str, style: str, *, inverse: bool) -> list[str]:
        body = [[f"`{row}`", *(
            f"{value:{style}} ({(base[quantity][at] / value) if inverse else (value / base[quantity][at]):.1f}×)"
            for at, value in entry[quantity].items())] for row, entry in others.items()]
        return _lines(["published", *(f"{int(at):,}" for at in base[quantity])], body)

    def speed(result: Result) -> str:
        if result.steps_per_second is None:
            return reason(result)
        return f"{result.steps_per_second:.3g}{times(faster(result, found))}"

    def memory(result: Result) -> str:
        if result.peak_bytes is None:
            return reason(result)
        return f"{result.peak_bytes / 1e9:.2f}{times(smaller(result, found))}"

    if not first.memory_only:
        text += [f"## Steps a second{compared.format('times')}", "", *ours(speed), "",
                 *theirs("steps_per_second", ".1f", inverse=False), ""]
        spreads = [(result.quartiles[1] - result.quartiles[0]) * result.steps_per_second for result in results
                   if result.quartiles is not None and result.steps_per_second is not None]
        if spreads:
            text += [f"Of the median step; the middle half of a case's steps spans {100 * median(spreads):.0f} % of it "
                     f"in the median case, {100 * max(spreads):.0f} % at most.", ""]
    text += [f"## Memory of a step, GB{compared.format('times less than')}", "",
             "What the compiler plans for arguments, outputs and temporaries, also where that does not fit.", "",
             *ours(memory), "", *theirs("gigabytes", ".2f", inverse=True), ""]
    slopes = {row: slope([found[row, tokens] for tokens in lengths]) for row in rows}
    if any(value is not None for value in slopes.values()):
        text += ["## How memory grows", "", "The slope of its logarithm over that of the length: 1 is linear, 2 "
                 "quadratic, less where parameters weigh more than what grows.", "",
                 *_lines(["", "exponent"], [[f"`{row}`", f"{x:.2f}"] for row, x in slopes.items() if x is not None]),
                 ""]
    text += ["## Options of the rows", "", *(f"- `{row}`: {_options_of(found[row, lengths[0]])}." for row in rows), ""]
    if any("released" in entry for entry in others.values()):
        text += ["Released code that differs from the paper it names; whether published figures came from it is not "
                 "known:", "", *(f"- `{row}`: {entry['released']}." for row, entry in others.items()
                                 if "released" in entry), ""]
    return "\n".join(text)


def _lines(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---", *["---:"] * (len(headings) - 1)], *body)]


def _options_of(case: Case) -> str:
    (options,) = case.config().modes.values()
    return ", ".join(f"{name} {value}" for name, value in vars(options).items())


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
    """The exponent with which memory grows: a straight line through its logarithms, by least squares."""
    known = [(math.log(result.tokens), math.log(result.peak_bytes)) for result in results if result.peak_bytes]
    if len(known) < 2:
        return None
    return linear_regression(*zip(*known, strict=True)).slope


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
    """Speed and memory against length, and both as times those of materialised softmax, the published ones dashed."""
    published = json.loads(PUBLISHED.read_text())["efficiency"]["rows"]
    found = {(result.row, result.tokens): result for result in results}
    rows = list(dict.fromkeys(result.row for result in results))

    def curves(value: Callable[[Result], float | None]) -> dict[str, dict[Any, float | None]]:
        drawn = {row: {result.tokens: value(result) for result in results if result.row == row} for row in rows}
        return {row: curve for row, curve in drawn.items() if any(y is not None for y in curve.values())}

    def others(quantity: str, *, inverse: bool) -> dict[str, dict[Any, float | None]]:
        base = published["softmax"][quantity]
        return {row: {int(at): base[at] / y if inverse else y / base[at] for at, y in published[row][quantity].items()}
                for row in rows if row in published and row != "softmax"}

    label = "length (tokens)"
    panels = [Panel(curves(lambda result: result.peak_bytes and result.peak_bytes / 1e9), x=label,
                    y="memory of a step (GB)"),
              Panel(curves(lambda result: smaller(result, found)), x=label, y="times less than materialised softmax",
                    published=others("gigabytes", inverse=True))]
    if not results[0].memory_only:
        panels = [Panel(curves(lambda result: result.steps_per_second), x=label, y="steps a second"),
                  Panel(curves(lambda result: faster(result, found)), x=label, y="times materialised softmax",
                        published=others("steps_per_second", inverse=False)), *panels]
    draw_panels(path, panels, title=f"Long Range Arena: a step on byte text, {results[0].shape} shape, {device}")


def command(arguments: Sequence[str]) -> int:
    """Makes the table that the flags name; returns 1 where nothing could be measured, or a run had to be left out."""
    options = _options(arguments)
    report.make_folder(options.out.parent)
    report.check_output(named(options.out, ".json"), "--out")
    return _accuracy(options) if options.part == "accuracy" else _efficiency(options)


def _efficiency(options: argparse.Namespace) -> int:
    report.share_device()  # the memory is for the processes that measure
    report.use_whole_device()
    cases = {tokens: [Case(row, tokens, options.shape, options.layers, options.batch, options.dtype, options.steps,
                           options.seconds, options.memory_only) for row in options.rows]
             for tokens in options.lengths}
    for case in (case for of_length in cases.values() for case in of_length):
        case.config()
    results = efficiency(cases, options)
    print(named(options.out, ".md").read_text())
    for result in results:
        if result.error is not None:
            status(f"{result.row} at {result.tokens:,}: {result.error}")
    return 0 if any(result.error is None for result in results) else 1


def positive_seconds(text: str) -> float:
    """A flag's value: a number above 0."""
    if not 0 < float(text) < math.inf:
        raise ValueError(text)
    return float(text)


def _accuracy(options: argparse.Namespace) -> int:
    runs, left_out = accuracy.load_all(options.runs)
    accuracy.say_left_out(left_out)
    if not runs:
        return 1
    published = json.loads(PUBLISHED.read_text())["accuracy"]
    origin = report.origin("lra.table accuracy", argparse.Namespace(), [str(path) for path in options.runs])
    text = accuracy.markdown(runs, published, origin)
    write_json(named(options.out, ".json"), accuracy.contents(runs, origin) | {"published": published})
    write_text(named(options.out, ".md"), text)
    if report.has_matplotlib():
        accuracy.draw(named(options.out, ".png"), runs, published)
    print(text)
    return 1 if left_out else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lra.table", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="efficiency|accuracy")
    part = parts.add_parser("accuracy", allow_abbrev=False, help="accuracy of runs of lra.train")
    part.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    part.add_argument("--out", type=Path, required=True, help="NAME of the files to write, without a suffix")
    part = parts.add_parser("efficiency", allow_abbrev=False, help="speed and memory against length")
    part.add_argument("--out", type=Path, required=True, help="NAME of the files to write, without a suffix")
    part.add_argument("--rows", type=report.names,
                      help=f"of {BASELINE} and the modes that see the whole sequence (all); a wrong one lists them")
    part.add_argument("--lengths", type=report.positives, default=LENGTHS,
                      help=f"tokens, with commas between ({','.join(map(str, LENGTHS))})")
    part.add_argument("--shape", default="paper", help=f"{' or '.join(SHAPES)} (%(default)s)")
    part.add_argument("--layers", type=report.positive, help="in place of the shape's")
    part.add_argument("--batch", type=report.positive, help="sequences a step, in place of the shape's")
    part.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                      help="number format of the products (%(default)s)")
    part.add_argument("--steps", type=report.positive, default=20, help="steps timed of each case (%(default)s)")
    part.add_argument("--seconds", type=positive_seconds, default=60.0,
                      help="about how long they may take: slow ones are fewer (%(default)g)")
    part.add_argument("--limit", type=positive_seconds, default=600.0,
                      help="seconds a case may take in all (%(default)g)")
    part.add_argument("--memory-only", action="store_true", help="compile, and run nothing")
    options = parser.parse_args(arguments)
    if options.part == "efficiency" and options.rows is None:
        options.rows = tuple(table_rows())  # not before: it makes a layer of each mode
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("lra.table", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
