"""The one command for whenever a GPU is at hand: are the kernels right here, and how fast is what matters most?

    python -m benchmarks.suite --out results/h200 --minutes 9
    python -m benchmarks.suite --out results/quick --minutes 3 --quick

Without a GPU it runs too: then the plain JAX form stands in for the kernel, every figure is of the processor, and the
tests are skipped.

First ``pytest -m gpu`` tells whether the kernels, whole training steps and drawn tokens are right on this device. Then
come the most telling cases of the benchmarks, each step in a process of its own with a share of the time: what one does
not use goes to those after it, and one that fails or is not done in time is written down and stops no other. Last,
``benchmarks.tune`` has what time is left, for ``DIR/tuning.json``; the table that the kernels read stays as it is. What
is compiled is kept where ``train.py`` keeps it, so that a second run has more time to measure; with ``--only`` and a
longer ``--seconds-per-case`` slow cases get more samples, or are tried at all. Where the files are no git checkout,
``LINEARGPT_COMMIT`` says which commit they are of.

DIR gets a log, a JSON file (of the tests, XML) and, where matplotlib is installed, a picture of each step as soon as
there is something to write, and ``summary.md``: every figure beside its target on an H200 and what was published on an
H100. Needs jax, flax, optax, numpy and jaxtyping, and pytest for the first step. Exit code 1 if a test fails or the
tests are not done in time.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax

from benchmarks import attention, report
from benchmarks.picture import draw_panels, published
from support.command import status
from support.errors import ConfigError
from support.files import write_json, write_text
from training.environment import compilation_cache, git_commit

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/on_a_gpu_test.py")
"""Where tests for a GPU are; others may import what is not installed beside one."""
TEST_PROCESSES = 4
CASE_SECONDS = 6.0
"""How long the samples of a case may take, unless a flag says otherwise."""
LEAST_SECONDS = 10.0
"""A step that has less is left out: a process alone takes seconds to start."""
TUNING_MARGIN = 15.0
"""Seconds that tuning may need above those that it is given, for the candidate that is being compiled."""
TEST_RESULTS = "correctness.xml"
TUNED = "tuning.json"
"""What tuning finds, in the folder: a table as that of the kernels."""
QUICK = "`--quick`: tiny sizes. The figures say that everything runs, and nothing of how fast it is."
HEADINGS = ("figure", "measured", "target", "met", "published", "unit", "samples")

# Targets on an H200, by context, by size, by shape.
STEP_TARGETS = {1024: 6.0, 8192: 18.0, 65_536: 110.0, 524_288: 900.0}
LARGE_STEP_TARGET = 320.0
SAMPLING_TARGETS = {"124M": 0.2, "1558M": 1.2}
SOFTMAX_SAMPLING_TARGET = 1.2
"""At a position of 65,536, 124M."""
KERNEL_TARGETS = {(1, 8192, 96, 128): 1.3, (2, 16_384, 16, 128): 0.75, (4, 2048, 16, 128): 0.35, (8, 1024, 8, 64): 0.2}
"""Forward and backward, by B, T, H, D."""
FLA_TARGET = 0.6
"""Of fla's time in the same run."""


@dataclass(frozen=True)
class Step:
    """A part of the suite: a command of its own that writes a JSON file."""

    name: str
    weight: float
    """Its share of the time, beside those of the steps after it."""
    command: tuple[str, ...]
    """Words after ``python -m``; those for the output files are added."""


@dataclass
class Outcome:
    """How a step ended."""

    seconds: float = 0.0
    error: str | None = None


def steps(quick: bool, seconds_per_case: float = CASE_SECONDS) -> list[Step]:
    """What can be run, in order: what has a target comes first."""
    train, sampling = "benchmarks.train_step", "benchmarks.sampling"
    short = ("--seconds-per-case", f"{seconds_per_case:g}")
    tiny = ("--width", "16", "--layers", "1", "--heads", "2", "--repeats", "3") if quick else ()
    small = ("--sizes", "124M", *short)
    # Most of the time is XLA's: 1 to 4 s for an attention call, 10 to 25 s for a training step of 12 layers, a minute
    # for one of 48. What fits only with blocks computed again is asked for so at once: to see that it does not fit
    # otherwise, it is compiled. Tuning has what is left; what it finds is better in a command of its own.
    step_contexts = (("--contexts", "32,64", "--tokens", "64", *tiny) if quick else
                     ("--contexts", "1024,8192,65536", *small))
    found = [
        Step("correctness", 260, ("pytest", "-q", "-m", "gpu and not thorough" if quick else "gpu",
                                  *(str(ROOT / path) for path in TESTS))),
        Step("kernel", 70, ("benchmarks.suite", "--worker", "kernel")),
        Step("train_step", 110, (train, "--modes", "chunked", *step_contexts)),
        Step("sampling", 80, (sampling, "--modes", "chunked,softmax", *(
            ("--positions", "32,64", *tiny) if quick else ("--positions", "1024,65536,524288", *small)))),
        Step("train_step_long", 50, (train, "--modes", "chunked", "--remat", "names", *(
            ("--contexts", "64", "--tokens", "64", *tiny) if quick else ("--contexts", "524288", *small)))),
        Step("utilisation", 45, (train, "--modes", "chunked", *(
            ("--contexts", "32", "--tokens", "64", "--accumulate", "2", *tiny) if quick else
            ("--contexts", "1024", "--tokens", str(2**19), "--accumulate", "16", *small)))),
        Step("train_step_1558M", 110, (train, "--modes", "chunked", *(
            ("--contexts", "32", "--tokens", "32", *tiny) if quick else
            ("--sizes", "1558M", "--contexts", "16384", *short)))),
        Step("sampling_1558M", 65, (sampling, "--modes", "chunked", *(
            ("--positions", "32", *tiny) if quick else ("--sizes", "1558M", "--positions", "1024,65536", *short)))),
        Step("fla", 30, ("benchmarks.suite", "--worker", "fla")),
        Step("train_step_softmax", 60, (train, "--modes", "softmax", *step_contexts)),
        Step("attention", 40, ("benchmarks.suite", "--worker", "attention")),
        Step("sampling_32", 20, (sampling, "--modes", "chunked,softmax", *(
            ("--positions", "32", "--batches", "2", *tiny) if quick else
            ("--positions", "16384", "--batches", "32", *small)))),
        Step("tune", 20, ("benchmarks.tune", *(("--dry-run",) if quick else ("--lengths", "long,short")))),
    ]
    own = (*short, *(("--quick",) if quick else ()))
    return [replace(step, command=(*step.command, *own)) if "--worker" in step.command else step for step in found]


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """A step in a process of its own; what it prints goes to a log."""
    command = [sys.executable, "-m", *step.command]
    environment = dict(os.environ)
    if step.name == "correctness":
        command += ["--junitxml", str(out / TEST_RESULTS)]
        if importlib.util.find_spec("xdist"):
            command += ["-n", str(TEST_PROCESSES), "--dist", "loadgroup"]
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    else:
        command += ["--json", str(out / f"{step.name}.json")]
        if importlib.util.find_spec("matplotlib") and step.name not in ("utilisation", "tune"):
            command += ["--picture", str(out / f"{step.name}.png")]
    if step.name == "tune":
        command += ["--out", str(out / TUNED), "--minutes", str(max(1.0, seconds - TUNING_MARGIN) / 60)]
    if "--worker" in step.command:
        command += ["--out", str(out), "--minutes", str(seconds / 60)]
    cache = compilation_cache()
    environment |= {} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache}
    start = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            code = process.wait(seconds)
            error = None if code == 0 else f"exit code {code}: {_last_line(out / f'{step.name}.log')}"
        except subprocess.TimeoutExpired:
            error = f"not done after {seconds:.0f} s"
        finally:
            process.kill()
            process.wait()
    return Outcome(time.monotonic() - start, error)


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# What the processes of the suite's own steps do.


def work(options: argparse.Namespace) -> int:
    """A step of the suite's own, which writes its JSON file as it goes.

    Returns:
        1 where nothing could be measured, else 0.
    """
    report.use_whole_device()
    if options.worker == "fla":
        report.share_device()
    contents = report.origin("benchmarks.suite", argparse.Namespace(
        worker=options.worker, quick=options.quick, seconds_per_case=options.seconds_per_case))
    until = time.monotonic() + 60 * options.minutes - LEAST_SECONDS

    measured: list[attention.Row] = []
    # A shape that is not begun in time is a row that says so, and so is a call that by smaller ones takes too long.
    for found in attention.measure_here(attention_cases(options.worker, options.quick), 3 if options.quick else 20,
                                        seconds_per_case=options.seconds_per_case,
                                        total_seconds=until - time.monotonic()):
        measured += found
        write_json(options.json, contents | {"rows": [asdict(row) for row in measured]})
        for row in found:
            print(row.label, attention.shape_name(row), row.passes, row.milliseconds, row.error, flush=True)
    measured.sort(key=lambda row: row.context if row.part == "contexts" else 0)
    if options.picture is not None and report.has_matplotlib():
        part = "contexts" if options.worker == "attention" else "kernel"
        title = f"One attention call, {measured[0].dtype}, {contents['device']}"
        draw_panels(options.picture, attention.panels(part, measured), title=title)
    return 0 if any(row.error is None for row in measured) else 1


def attention_cases(worker: str, quick: bool) -> list[Any]:
    """The cases of ``benchmarks.attention`` for a step, the most telling shapes first."""
    gpu = jax.default_backend() == "gpu"
    shapes = [(1, 32, 2, 16)] if quick else list(KERNEL_TARGETS)
    if worker == "kernel":
        linear = [mode for mode in attention.default_modes("kernel", gpu) if mode.startswith("chunked")]
        kernels = [mode for mode in linear if mode != "chunked:chunked"] or linear
        return [attention.Case("kernel", mode, T, passes, batch=B, heads=H, head_width=D, dtype="bfloat16")
                for passes, modes in (("both", linear), ("forward", kernels)) for B, T, H, D in shapes
                for mode in modes]
    if worker == "fla":  # its own tuning takes long, and nothing of ours is to wait for it
        return [attention.Case("kernel", mode, T, "both", batch=B, heads=H, head_width=D, dtype="bfloat16")
                for B, T, H, D in shapes for mode in ("chunked:pallas_gpu", *attention.FLA)]
    forms = attention.default_modes("contexts", gpu)
    telling = [mode for mode in forms if mode.startswith("chunked") or mode == ("softmax:cudnn" if gpu else
                                                                                "softmax:blockwise")]
    # All forms at one context only, and that last.
    contexts = {32: telling, 64: forms} if quick else {1024: telling, 65_536: telling, 524_288: telling, 8192: forms}
    return [attention.Case("contexts", mode, context, "both", dtype="bfloat16" if gpu else "float32")
            for context, modes in contexts.items() for mode in modes]


# The summary.


@dataclass
class Figure:
    """A line of the summary."""

    name: str
    value: float | None
    target: float | None = None
    published: float | None = None
    unit: str = "ms"
    samples: int | None = None
    """Of which ``value`` is the median."""


def figures(out: Path) -> list[Figure]:
    """What the steps' files say, most important first; steps that wrote nothing have no lines."""
    found = _test_figures(out / TEST_RESULTS)
    files = _files(out)
    rows = {name: contents["rows"] for name, contents in files.items()}
    found += _kernel_figures(rows.get("kernel", []))
    found += _fla_figures(rows.get("fla", []))
    known = published("training_step", "models")
    for name in ("train_step", "train_step_long", "train_step_softmax", "train_step_1558M", "utilisation"):
        for row in rows.get(name, []):
            size, mode, context = row["size"] or "small model", row["mode"], row["context"]
            single = row["batch"] == 1
            target = None
            if single and mode == "chunked":
                target = {"124M": STEP_TARGETS.get(context),
                          "1558M": LARGE_STEP_TARGET if context == 16_384 else None}.get(size)
            other = known.get(size, {}).get("softmax:cudnn" if mode == "softmax" else mode, {}).get(context)
            label = f"{name}: {size}, {mode}, {row['batch']} × {context:,} tokens"
            found.append(Figure(label, row["milliseconds"], target, other if single else None,
                                samples=len(row["samples"])))
            if row["utilisation"] is not None:
                found.append(Figure(f"{label}, share of FLOPs", 100 * row["utilisation"], unit="% of peak"))
    known = published("sampling", "models")
    for name in ("sampling", "sampling_1558M", "sampling_32"):
        for row in rows.get(name, []):
            size, mode, position, single = row["size"] or "small model", row["mode"], row["position"], row["batch"] == 1
            target = SAMPLING_TARGETS.get(size) if mode == "chunked" else None
            if (mode, size, position) == ("softmax", "124M", 65_536):
                target = SOFTMAX_SAMPLING_TARGET
            other = known.get(size, {}).get(mode, {}).get(position)
            label = f"{name}: {size}, {mode}, batch {row['batch']} at {position:,}"
            found.append(Figure(label, row["milliseconds"], target if single else None, other if single else None,
                                "ms/token", len(row["samples"])))
            if row["bandwidth"] is not None:
                found.append(Figure(f"{label}, share of bandwidth", 100 * row["bandwidth"], unit="% of peak"))
    found += [Figure(f"attention: {row['mode']}, {row['context']:,} tokens, forward + backward", row["milliseconds"],
                     samples=len(row["samples"])) for row in rows.get("attention", [])]
    for row in files.get("tune", {}).get("chosen", []):
        for shape in row["measured"]["shapes"]:
            both = shape["both"]
            found.append(Figure(f"tune: {shape['shape']} {row['dtype']}: best over defaults",
                                both["best"] / both["default"], unit="×"))
    return found


def _files(out: Path) -> dict[str, dict[str, Any]]:
    """What the steps have written, by step."""
    return {step.name: json.loads(path.read_text()) for step in steps(False)
            if (path := out / f"{step.name}.json").exists()}


def _test_figures(path: Path) -> list[Figure]:
    """Tests that fail; none where they were not done."""
    results = ElementTree.parse(path).getroot().find("testsuite") if path.exists() else None
    if results is None:
        return []
    tests, failures, errors, skipped = (int(results.get(name, "0")) for name in ("tests", "failures", "errors",
                                                                                 "skipped"))
    ran = tests - skipped
    return [Figure(f"correctness: tests that fail, of {ran} for a GPU, {skipped} skipped",
                   failures + errors if ran else None, 0, unit="tests")]


def _kernel_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    found: list[Figure] = []
    known = published("kernel", "shapes")
    shapes = dict.fromkeys((row["batch"], row["context"], row["heads"], row["head_width"]) for row in rows
                           if row["passes"] == "both")
    for B, T, H, D in shapes:
        timed = [row for row in rows if row["passes"] == "both" and row["milliseconds"]
                 and (row["batch"], row["context"], row["heads"], row["head_width"]) == (B, T, H, D)]
        name = f"B{B} T{T} H{H} D{D}"
        best = min(timed, key=lambda row: row["milliseconds"], default={"mode": "not measured", "samples": ()})
        other = min((one["both"] for one in known.get(name, {}).values()), default=None)
        found.append(Figure(f"kernel: {name}, forward + backward, {best['mode']}", best.get("milliseconds"),
                            KERNEL_TARGETS.get((B, T, H, D)), other, samples=len(best["samples"])))
    return found


def _fla_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Our times over those of flash-linear-attention on the same tensors, with its normaliser and without."""
    found: list[Figure] = []
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "B{batch} T{context} H{heads} D{head_width}".format(**row)
        if row["milliseconds"]:
            called = f" ({row['implementation']})" if row["mode"].startswith("fla") else ""
            times.setdefault(name, {})[row["mode"] + called] = row["milliseconds"]
    for name, of_modes in times.items():
        ours = next((time for mode, time in of_modes.items() if mode.startswith("chunked")), None)
        found += [Figure(f"fla: {name} over {mode}", ours / time, FLA_TARGET, unit="×")
                  for mode, time in of_modes.items() if ours is not None and mode.startswith("fla")]
    return found


def write_summary(out: Path, outcomes: dict[str, Outcome], remarks: Sequence[str] = ()) -> str:
    """Writes ``summary.md``, with remarks above its table, and returns the table as text."""
    where = next(iter(_files(out).values()), {"device": "unknown device", "versions": {}})
    judged = "H200" in where["device"]
    lines = []
    for figure in figures(out):
        met = "–"
        if figure.target is not None and (judged or figure.unit == "tests"):
            met = "not measured" if figure.value is None else "no" if figure.value > figure.target else "yes"
        value, target, other = ("–" if x is None else format(x, ".4g")
                                for x in (figure.value, figure.target, figure.published))
        lines.append([figure.name, value, target, met, other, figure.unit,
                      "–" if figure.samples is None else str(figure.samples)])
    text = [f"# {where['device']}", "",
            f"jax {where['versions'].get('jax', '?')}, commit {git_commit()}. Targets are those on an H200; what was "
            "published was measured on an H100. Times are medians of so many samples; every one is in the JSON file "
            "of its step. Figures begin with the name of their step.", "",
            *(line for remark in remarks for line in (remark, "")),
            "| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 1),
            *("| " + " | ".join(line) + " |" for line in lines), "", "| step | seconds | ended |", "|---|---:|---|",
            *(f"| {name} | {outcome.seconds:.0f} | {(outcome.error or 'well').replace('|', '/')} |"
              for name, outcome in outcomes.items())]
    write_text(out / "summary.md", "\n".join(text) + "\n")
    return report.table(HEADINGS, lines)


def backend() -> str | None:
    """What jax finds, asked in another process: this one must not take a GPU's memory; None where jax fails."""
    ended = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], capture_output=True,
                           text=True, check=False)
    return ended.stdout.strip() or None


def notes(found: str | None, quick: bool) -> list[str]:
    """What a reader of the figures has to know, of the backend and the sizes."""
    no_gpu = (f"jax finds no GPU here: the figures are of a {(found or '').upper()}, and the plain JAX form `chunked` "
              "stands in for the kernel. `make test` holds the kernel to its definition in interpret mode, `make "
              "gpu-check` compiles it.")
    return [*([] if found in ("gpu", None) else [no_gpu]), *([QUICK] if quick else [])]


def command(arguments: Sequence[str]) -> int:
    """Runs the steps that the flags name; returns 1 if a test fails or the tests were not done."""
    options = _options(arguments)
    if options.worker is not None:
        return work(options)
    start = time.monotonic()
    found = backend()
    wanted = _wanted(options, found)
    report.make_folder(options.out)
    names = [f"{step.name}.{suffix}" for step in steps(options.quick) for suffix in ("json", "png", "log")]
    for name in (*names, TEST_RESULTS, TUNED):  # of an earlier run
        (options.out / name).unlink(missing_ok=True)
    told = notes(found, options.quick)
    for remark in told:
        status(remark)
    outcomes: dict[str, Outcome] = {}
    text = ""
    for i, step in enumerate(wanted):
        left = 60 * options.minutes - (time.monotonic() - start)
        share = left * step.weight / sum(later.weight for later in wanted[i:])
        status(f"{step.name}: {share:.0f} s at most …")
        try:
            outcomes[step.name] = run(step, options.out, share) if share >= LEAST_SECONDS else Outcome(
                error="no time left")
        except KeyboardInterrupt:
            outcomes[step.name] = Outcome(error="interrupted")
            write_summary(options.out, outcomes, told)
            report.kept(options.out / "summary.md", "the steps so far")
            raise
        if outcomes[step.name].error:
            status(f"{step.name}: {outcomes[step.name].error}")
        text = write_summary(options.out, outcomes, told)
    print(text)
    return 1 if "correctness" in outcomes and outcomes["correctness"].error else 0


def _wanted(options: argparse.Namespace, backend: str | None) -> list[Step]:
    known = {step.name: step for step in steps(options.quick, options.seconds_per_case)}
    for name in options.only or ():
        if name not in known:
            raise ConfigError(f"--only {name}: expected names of {', '.join(known)}, with commas between")
    if options.minutes <= 0:
        raise ConfigError(f"--minutes {options.minutes:g}: expected a number above 0")
    if options.seconds_per_case <= 0:
        raise ConfigError(f"--seconds-per-case {options.seconds_per_case:g}: expected a number above 0")
    if not attention.fla_installed() or backend != "gpu":
        if "fla" in (options.only or ()):
            raise ConfigError("--only fla: it needs an NVIDIA GPU and the packages flash-linear-attention and torch")
        known.pop("fla", None)
    return [step for name, step in known.items() if not options.only or name in options.only]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, JSON files, pictures and summary.md")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it (%(default)g)")
    parser.add_argument("--only", type=report.names, help="steps, with commas between (all): "
                        + ", ".join(step.name for step in steps(False)))
    parser.add_argument("--seconds-per-case", type=float, default=CASE_SECONDS,
                        help="about how long the samples of a case may take (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    for name in ("worker", "json", "picture"):
        parser.add_argument(f"--{name}", type=str if name == "worker" else Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.suite", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
