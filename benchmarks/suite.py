"""Tests the kernels on a GPU and measures what has a target, all in one command and within a given time.

    python -m benchmarks.suite --out results/h200 --minutes 9
    python -m benchmarks.suite --out results/quick --minutes 3 --quick

The first step is ``pytest --gpu``. The others are the most important cases of the benchmarks. Each step is a process
of its own with a part of the time. Time that a step does not use goes to the steps after it. A step that fails or runs
out of time is recorded and does not stop the others. Compiled programs are cached where ``train.py`` caches them, so
that a second run has more time to measure. Without a git checkout, ``LINEARGPT_COMMIT`` gives the commit.

DIR gets, for each step, its output (``.txt``), its log and a JSON file. ``summary.md`` has the targets on an H200
beside what was measured, what was published for an H100, and the tables of the steps. Without a GPU the tests are
skipped, and plain JAX replaces the kernels. The packages needed are jax, flax, optax, numpy, jaxtyping and tyro, and
pytest for the first step. The exit code is 1 if a test fails or the tests do not end.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import report
from benchmarks.picture import published
from support.command import status
from support.files import write_text
from support.ranges import Positive
from training.environment import compilation_cache, git_commit

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 10.0
"""A step with less time is left out: starting a process takes seconds."""
TESTS = "-q tests/kernels tests/on_a_gpu_test.py --gpu -p no:benchmark"
"""Where the tests for a GPU are; other tests may import packages that a GPU machine lacks. pytest-benchmark warns of
several workers, and our pytest turns warnings into errors."""
TINY_MODEL = "--width 16 --layers 1 --heads 2 --repeats 3"
QUICK = {"attention": "contexts --contexts 32 --heads 2 --head-width 16 --dtype bfloat16 --repeats 3 --passes both",
         "train_step": f"--contexts 32,64 --tokens 64 {TINY_MODEL}", "sampling": f"--positions 32,64 {TINY_MODEL}"}
"""Flags of each benchmark with ``--quick``."""


class Step(NamedTuple):
    """A process of the suite."""

    module: str
    flags: str
    weight: float
    """Its part of the time, relative to the steps after it."""


# Compiling takes most of the time: 1 to 4 s for an attention call, 15 s for a training step of 12 layers, a minute for
# one of 48 layers; the first step of a context a minute more, in which XLA times candidates for its products. --remat
# is given where a step fits only with it, which saves the compilation of others.
STEPS = {
    "correctness": Step("pytest", "", 260),
    "kernel": Step("attention", "kernel --passes both,forward", 100),
    "train_step": Step("train_step", "--sizes 124M --contexts 1024,8192,65536 --modes chunked", 110),
    "sampling": Step("sampling", "--sizes 124M --positions 1024,65536,524288 --modes chunked,softmax", 80),
    "train_step_long": Step("train_step", "--sizes 124M --contexts 524288 --modes chunked --remat names", 50),
    "utilisation": Step("train_step", f"--sizes 124M --contexts 1024 --tokens {2**19} --accumulate 16 --modes chunked",
                        45),
    "train_step_1558M": Step("train_step", "--sizes 1558M --contexts 16384 --modes chunked", 110),
    "sampling_1558M": Step("sampling", "--sizes 1558M --positions 1024,65536 --modes chunked", 65),
    "train_step_softmax": Step("train_step", "--sizes 124M --contexts 1024,8192,65536 --modes softmax", 60),
    "attention": Step("attention", "contexts --passes both --contexts 1024,8192,65536,524288", 40),
    "sampling_32": Step("sampling", "--sizes 124M --positions 16384 --batches 32 --modes chunked,softmax", 20)}


class Target(NamedTuple):
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


def command_of(name: str, out: Path, seconds_per_case: float, quick: bool) -> list[str]:
    step, python = STEPS[name], [sys.executable, "-m"]
    if step.module == "pytest":
        workers = ["-n", "4", "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
        return [*python, "pytest", *TESTS.split(), *(["-m", "not thorough"] if quick else []), *workers]
    return [*python, f"benchmarks.{step.module}", *(QUICK[step.module] if quick else step.flags).split(),
            "--seconds-per-case", f"{seconds_per_case:g}", "--json", str(out / f"{name}.json")]


def run(name: str, command: list[str], out: Path, seconds: float) -> str:
    """Runs a step in a process of its own; how it ended."""
    environment, cache = dict(os.environ), compilation_cache()
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    if name == "correctness":  # several processes use the device
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    text, log = (out / f"{name}.{suffix}" for suffix in ("txt", "log"))
    with text.open("w") as stdout, log.open("w") as stderr:
        try:
            ended = subprocess.run(command, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT, timeout=seconds,
                                   check=False)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
    lines = [line for path in (text, log) for line in path.read_text(errors="replace").splitlines() if line]
    return "passed" if not ended.returncode else (
        f"exit code {ended.returncode}: {lines[-1] if lines else 'no output'}")


def summarize(out: Path, outcomes: Mapping[str, str], quick: bool = False) -> str:
    """Writes ``summary.md``; returns its table of targets."""
    files = {name: json.loads(path.read_text()) for name in STEPS if (path := out / f"{name}.json").exists()}
    origin = next(iter(files.values()), {"device": "unknown device", "versions": {}})
    lines = []
    for target in targets():
        for row in files.get(target.step, {}).get("rows", ()):
            value = row.get(target.field)
            if value is not None and all(row[name] == wanted for name, wanted in target.row.items()):
                what = ", ".join(str(x) for x in target.row.values())
                met = ("no" if value > target.most else "yes") if "H200" in origin["device"] else "–"
                lines.append([f"{target.step}: {what}" + " over fla" * (target.field == "times_fla"), f"{value:.4g}",
                              f"{target.most:g}", met, "–" if target.published is None else f"{target.published:.4g}"])
    headings = ("figure (milliseconds; over fla: ratio)", "measured", "target", "met", "published")
    text = [f"# {origin['device']}", "",
            f"jax {origin['versions'].get('jax', '?')}, commit {git_commit()}. Targets are for an H200, published "
            "times from an H100. Times are medians; the JSON files have every sample.", "",
            *(("Tiny sizes (`--quick`): the figures show nothing about speed.", "") if quick else ()),
            *report.markdown(headings, lines), "",
            *report.markdown(("step", "ended"), [[name, ended.replace("|", "/")] for name, ended in outcomes.items()])]
    for name in outcomes:
        if (path := out / f"{name}.txt").exists():
            text += ["", f"## {name}", "", "```", path.read_text(errors="replace").strip(), "```"]
    write_text(out / "summary.md", "\n".join(text) + "\n")
    return report.table(headings, lines)


@dataclass(kw_only=True)
class Options:
    out: Path
    """Folder for the files."""
    minutes: Positive = 9.0
    """Time for all steps."""
    only: tuple[Literal[*STEPS], ...] = tuple(STEPS)  # pyright: ignore[reportInvalidTypeForm]
    """Steps to run."""
    seconds_per_case: Positive = 6.0
    """About how long the samples of a case may take."""
    quick: bool = False
    """Tiny sizes, to see that everything runs."""


@functools.partial(report.Benchmark, module="benchmarks.suite", options=Options)
def main(options: Options, _: report.Results) -> int:
    """Runs the steps; returns 1 if a test fails or the tests do not end."""
    start, out = time.monotonic(), options.out.absolute()
    report.make_folder(out)
    for name in STEPS:
        for suffix in ("json", "txt", "log"):
            (out / f"{name}.{suffix}").unlink(missing_ok=True)  # from an earlier run
    outcomes: dict[str, str] = {}
    table = ""
    for i, name in enumerate(options.only):
        left = 60 * options.minutes - (time.monotonic() - start)
        limit = left * STEPS[name].weight / sum(STEPS[later].weight for later in options.only[i:])
        status(f"{name}: {limit:.0f} s at most …")
        outcomes[name] = "interrupted" if limit >= LEAST_SECONDS else "no time left"
        try:
            if limit >= LEAST_SECONDS:
                command = command_of(name, out, options.seconds_per_case, options.quick)
                outcomes[name] = run(name, command, out, limit)
        finally:
            table = summarize(out, outcomes, options.quick)
            report.record_saved(options.out / "summary.md", "the steps so far")
        status(f"{name}: {outcomes[name]}")
    print(table)
    return 1 if outcomes.get("correctness", "passed") != "passed" else 0


if __name__ == "__main__":
    sys.exit(main())
