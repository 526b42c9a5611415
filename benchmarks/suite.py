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

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import attention, report
from benchmarks.picture import published
from support.command import status
from support.errors import ConfigError
from support.files import write_text
from training.environment import compilation_cache, git_commit

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/on_a_gpu_test.py")
"""Where tests for a GPU are; others may import what is not installed beside one."""
TEST_PROCESSES = 4
CASE_SECONDS = 6.0
"""How long the samples of a case may take, unless a flag says otherwise."""
LEAST_SECONDS = 10.0
"""A step that has less is left out: a process alone takes seconds to start."""
MARGIN = 15.0
"""Seconds that a step with a limit of its own may need above it, for what is being compiled."""
TEST_RESULTS = "correctness.xml"
TUNED = "tuning.json"
"""What tuning finds, in the folder: a table as that of the kernels."""
QUICK = "`--quick`: tiny sizes. The figures say that everything runs, and nothing of how fast it is."
HEADINGS = ("figure", "measured", "target", "met", "published", "unit", "samples")

# Targets on an H200.
STEP_TARGETS = {("124M", "chunked", 1024): 6.0, ("124M", "chunked", 8192): 18.0, ("124M", "chunked", 65_536): 110.0,
                ("124M", "chunked", 524_288): 900.0, ("1558M", "chunked", 16_384): 320.0}
"""By size, mode and context."""
SAMPLING_TARGETS = {("124M", "chunked", None): 0.2, ("1558M", "chunked", None): 1.2, ("124M", "softmax", 65_536): 1.2}
"""By size, mode and position; None: any."""
KERNEL_TARGETS = {"B1 T8192 H96 D128": 1.3, "B2 T16384 H16 D128": 0.75, "B4 T2048 H16 D128": 0.35,
                  "B8 T1024 H8 D64": 0.2}
"""Forward and backward."""
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
    limited: bool = False
    """Whether it takes ``--minutes``."""


@dataclass
class Outcome:
    """How a step ended."""

    seconds: float = 0.0
    error: str | None = None


def steps(quick: bool, seconds_per_case: float = CASE_SECONDS, gpu: bool = True) -> list[Step]:
    """What can be run, in order: what has a target comes first."""
    def words(module: str, full: str, tiny: str, modes: str = "chunked") -> tuple[str, ...]:
        return (f"benchmarks.{module}", *(tiny if quick else full).split(), "--modes", modes,
                "--seconds-per-case", f"{seconds_per_case:g}")

    def call(name: str, weight: float, full: str, *modes: str) -> Step:
        tiny = "contexts --contexts 32 --heads 2 --head-width 16 --dtype bfloat16 --repeats 3 --passes both"
        return Step(name, weight, (*words("attention", full, tiny, ",".join(modes)), "--one-process"), limited=True)

    # Most of the time is XLA's: 1 to 4 s for an attention call, 10 to 25 s for a training step of 12 layers, a minute
    # for one of 48. What fits only with blocks computed again is asked for so at once: to see that it does not fit
    # otherwise, it is compiled. Tuning has what is left; what it finds is better in a command of its own.
    tiny = "--width 16 --layers 1 --heads 2 --repeats 3"
    step, short = "train_step", f"--contexts 32,64 --tokens 64 {tiny}"
    kernels = ("chunked:pallas_gpu", "chunked:chunked") if gpu else ("chunked:chunked",)
    tests = ("pytest", "-q", "-m", "gpu and not thorough" if quick else "gpu", *(str(ROOT / path) for path in TESTS))
    return [
        Step("correctness", 260, tests),
        call("kernel", 70, "kernel --passes both,forward", *kernels),
        Step("train_step", 110, words(step, "--sizes 124M --contexts 1024,8192,65536", short)),
        Step("sampling", 80, words("sampling", "--sizes 124M --positions 1024,65536,524288",
                                   f"--positions 32,64 {tiny}", "chunked,softmax")),
        Step("train_step_long", 50, words(step, "--sizes 124M --contexts 524288 --remat names",
                                          f"--contexts 64 --tokens 64 --remat names {tiny}")),
        Step("utilisation", 45, words(step, f"--sizes 124M --contexts 1024 --tokens {2**19} --accumulate 16",
                                      f"--contexts 32 --tokens 64 --accumulate 2 {tiny}")),
        Step("train_step_1558M", 110, words(step, "--sizes 1558M --contexts 16384",
                                            f"--contexts 32 --tokens 32 {tiny}")),
        Step("sampling_1558M", 65, words("sampling", "--sizes 1558M --positions 1024,65536", f"--positions 32 {tiny}")),
        call("fla", 30, "kernel --passes both", kernels[0], *attention.FLA),
        Step("train_step_softmax", 60, words(step, "--sizes 124M --contexts 1024,8192,65536", short, "softmax")),
        call("attention", 40, "contexts --passes both --contexts 1024,8192,65536,524288",
             *attention.default_modes("contexts", gpu)),
        Step("sampling_32", 20, words("sampling", "--sizes 124M --positions 16384 --batches 32",
                                      f"--positions 32 --batches 2 {tiny}", "chunked,softmax")),
        Step("tune", 20, ("benchmarks.tune", *(("--dry-run",) if quick else ("--lengths", "long,short"))),
             limited=True)]


def run(step: Step, out: Path, seconds: float) -> Outcome:
    """A step in a process of its own; what it prints goes to a log."""
    command, cache = [sys.executable, "-m", *step.command], compilation_cache()
    environment = os.environ | ({} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache})
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
        command += ["--out", str(out / TUNED)]
    if step.limited:
        command += ["--minutes", str(max(1.0, seconds - MARGIN) / 60)]
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
    files = _files(out)
    rows = {name: contents["rows"] for name, contents in files.items()}
    found = [*_test_figures(out / TEST_RESULTS), *_kernel_figures(rows.get("kernel", [])),
             *_fla_figures(rows.get("fla", []))]
    found += [figure for name in ("train_step", "train_step_long", "train_step_softmax", "train_step_1558M",
                                  "utilisation") for row in rows.get(name, [])
              for figure in _model_figures(row, "training_step", STEP_TARGETS, row["context"], "ms", "FLOPs",
                                           f"{name}: {{}}, {{}}, {row['batch']} × {row['context']:,} tokens")]
    found += [figure for name in ("sampling", "sampling_1558M", "sampling_32") for row in rows.get(name, [])
              for figure in _model_figures(row, "sampling", SAMPLING_TARGETS, row["position"], "ms/token", "bandwidth",
                                           f"{name}: {{}}, {{}}, batch {row['batch']} at {row['position']:,}")]
    found += [Figure(f"attention: {row['mode']}, {row['context']:,} tokens, forward + backward", row["milliseconds"],
                     samples=len(row["samples"])) for row in rows.get("attention", [])]
    found += [Figure(f"tune: {shape['shape']} {row['dtype']}: best over defaults",
                     shape["both"]["best"] / shape["both"]["default"], unit="×")
              for row in files.get("tune", {}).get("chosen", []) for shape in row["measured"]["shapes"]]
    return found


def _files(out: Path) -> dict[str, dict[str, Any]]:
    """What the steps have written, by step."""
    return {step.name: json.loads(path.read_text()) for step in steps(False)
            if (path := out / f"{step.name}.json").exists()}


def _model_figures(row: Mapping[str, Any], kind: str, targets: Mapping[Any, float], place: int, unit: str, share: str,
                   label: str) -> list[Figure]:
    """Of a whole model at a context or position; targets and what was published are of one sequence."""
    size, mode, single = row["size"] or "small model", row["mode"], row["batch"] == 1
    known = published(kind, "models").get(size, {})
    others = known.get("softmax:cudnn" if (kind, mode) == ("training_step", "softmax") else mode, {})
    target = targets.get((size, mode, place), targets.get((size, mode, None)))
    found = [Figure(label.format(size, mode), row["milliseconds"], target if single else None,
                    others.get(place) if single else None, unit, len(row["samples"]))]
    reached = row.get("utilisation", row.get("bandwidth"))
    if reached is not None:
        found.append(Figure(f"{found[0].name}, share of {share}", 100 * reached, unit="% of peak"))
    return found


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


def _by_shape(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Forward and backward passes by the shape of the call."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["passes"] == "both":
            found.setdefault("B{batch} T{context} H{heads} D{head_width}".format(**row), []).append(row)
    return found


def _kernel_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    found, known = [], published("kernel", "shapes")
    for name, of_shape in _by_shape(rows).items():
        best = min((row for row in of_shape if row["milliseconds"]), key=lambda row: row["milliseconds"],
                   default={"mode": "not measured", "milliseconds": None, "samples": ()})
        other = min((one["both"] for one in known.get(name, {}).values()), default=None)
        found.append(Figure(f"kernel: {name}, forward + backward, {best['mode']}", best["milliseconds"],
                            KERNEL_TARGETS.get(name), other, samples=len(best["samples"])))
    return found


def _fla_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Our times over those of flash-linear-attention on the same tensors, with its normaliser and without."""
    return [Figure(f"fla: {name} over {row['mode']} ({row['implementation']})", ours / row["milliseconds"], FLA_TARGET,
                   unit="×")
            for name, of_shape in _by_shape(rows).items()
            for ours in [row["milliseconds"] for row in of_shape if row["mode"].startswith("chunked")][:1]
            for row in of_shape if ours and row["milliseconds"] and row["mode"].startswith("fla")]


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


@functools.partial(report.Benchmark, module="benchmarks.suite", json=False, flags={
    "out": report.flag("folder for logs, JSON files, pictures and summary.md", type=Path, required=True),
    "minutes": report.flag("time for all of it", 9.0, float),
    "only": report.flag("steps, with commas between (all): " + ", ".join(step.name for step in steps(False)),
                        type=report.names),
    "seconds-per-case": report.flag("about how long the samples of a case may take", CASE_SECONDS, float),
    "quick": report.flag("tiny sizes: whether it runs, not how fast", False)})
def main(options: Namespace, results: report.Results) -> int:
    """Runs the steps that the flags name; returns 1 if a test fails or the tests were not done."""
    start, found = time.monotonic(), backend()
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


def _wanted(options: Namespace, backend: str | None) -> list[Step]:
    known = {step.name: step for step in steps(options.quick, options.seconds_per_case, backend == "gpu")}
    for name in options.only or ():
        if name not in known:
            raise ConfigError(f"--only {name}: expected names of {', '.join(known)}, with commas between")
    for flag, value in (("--minutes", options.minutes), ("--seconds-per-case", options.seconds_per_case)):
        if value <= 0:
            raise ConfigError(f"{flag} {value:g}: expected a number above 0")
    if not attention.fla_installed() or backend != "gpu":
        if "fla" in (options.only or ()):
            raise ConfigError("--only fla: it needs an NVIDIA GPU and the packages flash-linear-attention and torch")
        known.pop("fla", None)
    return [step for name, step in known.items() if not options.only or name in options.only]


if __name__ == "__main__":
    sys.exit(main())
