"""Tests the kernels on a GPU and measures what has a target, all in one command and within a given time.

    python -m benchmarks.suite --out results/h200 --minutes 9
    python -m benchmarks.suite --out results/quick --minutes 3 --quick

The first step is ``pytest -m gpu``. The others are the most important cases of the benchmarks, and ``benchmarks.tune``
with the time that is left. Each step is a process of its own with a share of the time. Time that a step does not use
goes to the steps after it. A step that fails or runs out of time is recorded and does not stop the others. The table of
the kernels stays as it is: tuning writes ``DIR/tuning.json``. Compiled programs are cached where ``train.py`` caches
them, so that a second run has more time to measure. Without a git checkout, ``LINEARGPT_COMMIT`` gives the commit.

DIR gets, for each step, its output (``.txt``), its log, a JSON file and, if matplotlib is installed, a picture.
``summary.md`` has the targets on an H200 beside what was measured, what was published for an H100, and the tables of
the steps. Without a GPU the tests are skipped, and plain JAX replaces the kernels. The packages needed are jax, flax,
optax, numpy and jaxtyping, and pytest for the first step. The exit code is 1 if a test fails or the tests do not end.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.picture import published
from support.command import status
from support.files import write_text
from training.environment import compilation_cache, git_commit

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/on_a_gpu_test.py")
"""Where the tests for a GPU are; other tests may import packages that a GPU machine lacks."""
TEST_PROCESSES = 4
LEAST_SECONDS = 10.0
"""A step with less time is left out: starting a process takes seconds."""
MARGIN = 15.0
"""Seconds that a step with ``--minutes`` may run past them, for a compilation under way."""
TUNED = "tuning.json"
TINY_MODEL = "--width 16 --layers 1 --heads 2 --repeats 3"
QUICK = {"attention": "contexts --contexts 32 --heads 2 --head-width 16 --dtype bfloat16 --repeats 3 --passes both",
         "train_step": f"--contexts 32,64 --tokens 64 {TINY_MODEL}", "sampling": f"--positions 32,64 {TINY_MODEL}"}
"""Flags of each benchmark with ``--quick``."""


@dataclass(frozen=True)
class Step:
    """A step of the suite, which is a process of its own."""

    name: str
    weight: float
    """Its share of the time, relative to the steps after it."""
    module: str
    flags: str = ""


# Compiling takes most of the time: 1 to 4 s for an attention call, 10 to 25 s for a training step of 12 layers, a
# minute for one of 48 layers. --remat is given where a step fits only with it, which saves the compilation of others.
STEPS = {step.name: step for step in (
    Step("correctness", 260, "pytest"),
    Step("kernel", 100, "attention", "kernel --passes both,forward"),
    Step("train_step", 110, "train_step", "--sizes 124M --contexts 1024,8192,65536 --modes chunked"),
    Step("sampling", 80, "sampling", "--sizes 124M --positions 1024,65536,524288 --modes chunked,softmax"),
    Step("train_step_long", 50, "train_step", "--sizes 124M --contexts 524288 --modes chunked --remat names"),
    Step("utilisation", 45, "train_step",
         f"--sizes 124M --contexts 1024 --tokens {2**19} --accumulate 16 --modes chunked"),
    Step("train_step_1558M", 110, "train_step", "--sizes 1558M --contexts 16384 --modes chunked"),
    Step("sampling_1558M", 65, "sampling", "--sizes 1558M --positions 1024,65536 --modes chunked"),
    Step("train_step_softmax", 60, "train_step", "--sizes 124M --contexts 1024,8192,65536 --modes softmax"),
    Step("attention", 40, "attention", "contexts --passes both --contexts 1024,8192,65536,524288"),
    Step("sampling_32", 20, "sampling", "--sizes 124M --positions 16384 --batches 32 --modes chunked,softmax"),
    Step("tune", 20, "tune", "--lengths long,short"))}


@dataclass(frozen=True)
class Target:
    """A target on an H200 for the rows of a step."""

    step: str
    row: Mapping[str, Any]
    """Fields of the rows that it holds for."""
    most: float
    published: float | None = None
    """Measured by others on an H100."""
    field: str = "milliseconds"


def targets() -> list[Target]:
    """The targets, with the published times of the same cases."""
    steps, tokens = published("training_step", "models"), published("sampling", "models")
    found = [Target(step, {"size": size, "mode": "chunked", "context": context}, most,
                    steps[size]["chunked"].get(context))
             for step, size, context, most in (
                 ("train_step", "124M", 1024, 6.0), ("train_step", "124M", 8192, 18.0),
                 ("train_step", "124M", 65_536, 110.0), ("train_step_long", "124M", 524_288, 900.0),
                 ("train_step_1558M", "1558M", 16_384, 320.0))]
    found += [Target(step, {"size": size, "mode": mode, "position": position}, most, tokens[size][mode].get(position))
              for step, size, mode, position, most in (
                  ("sampling", "124M", "chunked", 1024, 0.2), ("sampling", "124M", "chunked", 65_536, 0.2),
                  ("sampling", "124M", "chunked", 524_288, 0.2), ("sampling_1558M", "1558M", "chunked", 1024, 1.2),
                  ("sampling_1558M", "1558M", "chunked", 65_536, 1.2), ("sampling", "124M", "softmax", 65_536, 1.2))]
    for (B, T, H, D), most in (((1, 8192, 96, 128), 1.3), ((2, 16_384, 16, 128), 0.75), ((4, 2048, 16, 128), 0.35),
                               ((8, 1024, 8, 64), 0.2)):
        call = {"batch": B, "context": T, "heads": H, "head_width": D, "mode": "chunked:pallas_gpu", "passes": "both"}
        others = published("kernel", "shapes", f"B{B} T{T} H{H} D{D}").values()
        found += [Target("kernel", call, most, min(times["both"] for times in others)),
                  Target("kernel", call, 0.6, field="times_fla")]
    return found


@dataclass
class Outcome:
    """How a step ended."""

    seconds: float = 0.0
    error: str | None = None


def command_of(step: Step, out: Path, seconds: float, seconds_per_case: float, quick: bool) -> list[str]:
    """The command line of a step."""
    python = [sys.executable, "-m"]
    if step.module == "pytest":
        marks = "gpu and not thorough" if quick else "gpu"
        workers = ["-n", str(TEST_PROCESSES), "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
        return [*python, "pytest", "-q", "-m", marks, *workers,
                *(str(ROOT / path) for path in TESTS)]
    command = [*python, f"benchmarks.{step.module}", *(QUICK[step.module] if quick else step.flags).split(),
               "--json", str(out / f"{step.name}.json")]
    if step.module in ("attention", "tune"):
        command += ["--minutes", str(max(1.0, seconds - MARGIN) / 60)]
    if step.module == "tune":
        return [*command, "--out", str(out / TUNED)]
    if importlib.util.find_spec("matplotlib"):
        command += ["--picture", str(out / f"{step.name}.png")]
    return [*command, "--seconds-per-case", f"{seconds_per_case:g}"]


def run(step: Step, command: list[str], out: Path, seconds: float) -> Outcome:
    """Runs a step in a process of its own."""
    environment, cache = dict(os.environ), compilation_cache()
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    if step.module == "pytest":  # several processes share the device
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start, error = time.monotonic(), None
    text, log = (out / f"{step.name}.{suffix}" for suffix in ("txt", "log"))
    with text.open("w") as stdout, log.open("w") as stderr:
        try:
            ended = subprocess.run(command, stdout=stdout, stderr=stderr, env=environment, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            error = f"not done after {seconds:.0f} s"
        else:
            if ended.returncode:
                lines = [line for path in (text, log) for line in path.read_text(errors="replace").splitlines() if line]
                error = f"exit code {ended.returncode}: {lines[-1] if lines else 'no output'}"
    return Outcome(time.monotonic() - start, error)


def summarize(out: Path, outcomes: Mapping[str, Outcome], quick: bool = False) -> str:
    """Writes ``summary.md``; returns its table of targets."""
    files = {name: json.loads(path.read_text()) for name in STEPS if (path := out / f"{name}.json").exists()}
    origin = next(iter(files.values()), {"device": "unknown device", "versions": {}})
    on_target = "H200" in origin["device"]
    lines = []
    for target in targets():
        for row in files.get(target.step, {}).get("rows", ()):
            value = row.get(target.field)
            if value is not None and all(row[name] == wanted for name, wanted in target.row.items()):
                what = ", ".join(str(x) for x in target.row.values())
                lines.append([f"{target.step}: {what}" + " over fla" * (target.field == "times_fla"), f"{value:.4g}",
                              f"{target.most:g}", ("no" if value > target.most else "yes") if on_target else "–",
                              "–" if target.published is None else f"{target.published:.4g}"])
    headings = ("figure (milliseconds; over fla: ratio)", "measured", "target", "met", "published")
    text = [f"# {origin['device']}", "",
            f"jax {origin['versions'].get('jax', '?')}, commit {git_commit()}. Targets are for an H200, published "
            "times from an H100. Times are medians; the JSON files have every sample.", "",
            *(("Tiny sizes (`--quick`): the figures say nothing about speed.", "") if quick else ()),
            *report.markdown(headings, lines), "",
            *report.markdown(("step", "seconds", "ended"), [
                [name, f"{outcome.seconds:.0f}", (outcome.error or "well").replace("|", "/")]
                for name, outcome in outcomes.items()])]
    for name in outcomes:
        if (path := out / f"{name}.txt").exists():
            text += ["", f"## {name}", "", "```", path.read_text(errors="replace").strip(), "```"]
    write_text(out / "summary.md", "\n".join(text) + "\n")
    return report.table(headings, lines)


@functools.partial(report.Benchmark, module="benchmarks.suite", json=False, flags={
    "out": report.flag("folder for the files", type=Path, required=True),
    "minutes": report.flag("time for all steps", 9.0),
    "only": report.flag("steps to run", tuple(STEPS), choices=tuple(STEPS)),
    "seconds-per-case": report.flag("about how long the samples of a case may take", 6.0),
    "quick": report.flag("tiny sizes, to see that everything runs", False)})
def main(options: Namespace, _: report.Results) -> int:
    """Runs the steps; returns 1 if a test fails or the tests do not end."""
    start, out = time.monotonic(), options.out
    report.make_folder(out)
    files = (f"{step}.{suffix}" for step in STEPS for suffix in ("json", "png", "txt", "log"))
    for name in (*files, TUNED):
        (out / name).unlink(missing_ok=True)  # from an earlier run
    wanted = [step for step in STEPS.values() if step.name in options.only
              and not (options.quick and step.module == "tune")]
    outcomes: dict[str, Outcome] = {}
    table = ""
    for i, step in enumerate(wanted):
        left = 60 * options.minutes - (time.monotonic() - start)
        share = left * step.weight / sum(later.weight for later in wanted[i:])
        status(f"{step.name}: {share:.0f} s at most …")
        outcomes[step.name] = Outcome(error="interrupted" if share >= LEAST_SECONDS else "no time left")
        try:
            if share >= LEAST_SECONDS:
                command = command_of(step, out, share, options.seconds_per_case, options.quick)
                outcomes[step.name] = run(step, command, out, share)
        finally:
            table = summarize(out, outcomes, options.quick)
            report.kept(out / "summary.md", "the steps so far")
        if outcomes[step.name].error:
            status(f"{step.name}: {outcomes[step.name].error}")
    print(table)
    return 1 if "correctness" in outcomes and outcomes["correctness"].error else 0


if __name__ == "__main__":
    sys.exit(main())
