"""The one command for whenever a GPU is at hand: are the kernels right here, and how fast is what matters most?

    python -m benchmarks.suite --out results/h200 --minutes 9
    python -m benchmarks.suite --out results/quick --minutes 3 --quick

Without a GPU it runs too: then the plain JAX form stands in for the kernel, and every figure is of the processor.

First the kernels of every op are held against the definition in float64 on this device, outputs and gradients, and
twice for equal bits, and what draws a token against the parallel form; then a call with more
elements than an int32 counts, where there is memory for it, against the same in two parts. Then come the most telling
cases of the three benchmarks, each step in a process of its own with a share of the time: what one does not use goes to
those after it, and one that fails or is not done in time is written down and stops no other. Last, ``benchmarks.tune``
has what time is left, for ``DIR/tuning.json``; the table that the kernels read stays as it is. What is compiled is kept
where ``train.py`` keeps it, so that a second run has more time to measure; with ``--only`` and a longer
``--seconds-per-case`` slow cases get more samples, or are tried at all. Where the files are no git checkout,
``LINEARGPT_COMMIT`` says which commit they are of.

DIR gets a log, a JSON file and, where matplotlib is installed, a picture of each step as soon as there is something to
write, and ``summary.md``: every figure beside its target on an H200 and what was published on an H100. Needs jax, flax,
optax, numpy and jaxtyping alone. Exit code 1 if the kernel is wrong here or not all of its cases were tried.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import attention, report
from benchmarks.picture import draw_panels, published
from configs.schema import ModelConfig
from kernels import cases as op_cases
from kernels import device
from kernels.cases import WORSE_THAN_PLAIN, error_of, faults_of
from kernels.linear_attention import State, linear_attention
from kernels.linear_attention.cases import SCHEDULES, LinearAttentionCase, make_suite_case
from models.gpt import GPT, Cache, resolve_config
from support.command import status
from support.errors import ConfigError
from support.files import write_json, write_text
from training.environment import compilation_cache, git_commit

LARGE_TOKENS, LARGE_PERIOD = 2**22 + 2**14, 4099
"""T of a call of 8 heads of 64 that has more than 2**31 elements, and after how many tokens its inputs repeat: a prime
number, so that an address that is off by a power of two finds other numbers."""
COMPARED_TOKENS = 4096
"""Its last ones are looked at."""
CASE_SECONDS = 6.0
"""How long the samples of a case may take, unless a flag says otherwise."""
LEAST_SECONDS = 10.0
"""A step that has less is left out: a process alone takes seconds to start."""
TUNING_MARGIN = 15.0
"""Seconds that tuning may need above those that it is given, for the candidate that is being compiled."""
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
        Step("correctness", 130, ("benchmarks.suite", "--worker", "correctness")),
        Step("kernel", 70, ("benchmarks.suite", "--worker", "kernel")),
        Step("train_step", 110, (train, "--modes", "chunked", *step_contexts)),
        Step("sampling", 80, (sampling, "--modes", "chunked,softmax", *(
            ("--positions", "32,64", *tiny) if quick else ("--positions", "1024,65536,524288", *small)))),
        Step("train_step_long", 50, (train, "--modes", "chunked", "--remat", "block", *(
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
    command = [sys.executable, "-m", *step.command, "--json", str(out / f"{step.name}.json")]
    if importlib.util.find_spec("matplotlib") and step.name not in ("correctness", "utilisation", "tune"):
        command += ["--picture", str(out / f"{step.name}.png")]
    if step.name == "tune":
        command += ["--out", str(out / TUNED), "--minutes", str(max(1.0, seconds - TUNING_MARGIN) / 60)]
    if "--worker" in step.command:
        command += ["--out", str(out), "--minutes", str(seconds / 60)]
    cache = compilation_cache()
    environment = os.environ | ({} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache})
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


# The kernels against the definition.


TOKEN = make_suite_case(1, 101, 4, 64, 64, "float32")
"""The last of these tokens is drawn as a sampler does: on a GPU by the kernels of a single token …"""
TOKEN_DTYPES = ("float32", "bfloat16")
"""… in these number formats."""
DRAWN = "a drawn token"
"""What its rows have for an implementation; their bounds are their own."""


def cases(quick: bool) -> list[op_cases.Case]:
    """What the kernels are tried on, of all ops."""
    return op_cases.find_cases("suite-quick" if quick else "suite")


def implementations(case: op_cases.Case) -> tuple[str | None, ...]:
    """What is tried here: the kernels, or without a GPU the plain JAX form, where the case names one."""
    return case.implementations if device.platform() == "gpu" or case.plain is None else (case.plain,)


def check(case: op_cases.Case) -> list[dict[str, Any]]:
    """The rows of a case, by implementation: errors of outputs and gradients, their bound, and what is wrong."""
    rows = [_row(case, name) for name in implementations(case)]
    try:
        expected = op_cases.run_reference(case)
        plain: dict[str, float] | None = None
        if device.platform() == "gpu" and case.plain is not None and case.dtype == "bfloat16":
            found = op_cases.run(case, case.plain)()
            plain = {name: error_of(found[name], x) for name, x in expected.items()}
    except Exception as error:  # whatever goes wrong is the finding
        return [row | {"wrong": [_line(error)]} for row in rows]
    for row in rows:
        try:
            with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
                kernel = op_cases.run(case, row["implementation"])
                found, again = kernel(), kernel()
            row["errors"] = {name: error_of(found[name], x) for name, x in expected.items()}
            row["plain_errors"] = plain
            row["wrong"] = faults_of(case, row["errors"], plain)
            row["wrong"] += [f"{name}: other bits in a second run" for name in found
                             if not np.array_equal(found[name].astype(np.float64), again[name].astype(np.float64),
                                                   equal_nan=True)]
        except Exception as error:
            row["wrong"].append(_line(error))
    return rows


def _row(case: op_cases.Case, implementation: str | None) -> dict[str, Any]:
    return {"op": case.op, "case": case.name, "dtype": case.dtype, "implementation": implementation,
            "bound": case.tolerance, "errors": {}, "plain_errors": None, "wrong": [], "skipped": None}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def large_case(tokens: int = LARGE_TOKENS) -> LinearAttentionCase:
    """A call with more than 2**31 elements."""
    return make_suite_case(1, tokens, 8, 64, 64, "bfloat16")


class Large:
    """A call whose elements an int32 does not count, against the same call in two parts.

    Compiled at once; nothing is on the device before :meth:`check`.

    Args:
        implementation: as ``linear_attention`` names it.
        tokens: T; even.
    """

    def __init__(self, implementation: str, tokens: int = LARGE_TOKENS):
        self.case = large_case(tokens)
        self._implementation = implementation
        x_BTHD = jax.ShapeDtypeStruct((1, tokens, 8, 64), jnp.bfloat16)
        self._programs = [jax.jit(program).lower(*[x_BTHD] * 4).compile() for program in (self._whole, self._resumed)]

    def check(self) -> dict[str, Any]:
        """The row."""
        row = _row(self.case, self._implementation)
        needed, limit = max(report.peak_bytes(program) or 0 for program in self._programs), report.device_memory()
        if limit is not None and needed > limit:
            return row | {"skipped": f"needs {needed / 2**30:.0f} GiB, the device has {limit / 2**30:.0f}"}
        inputs = jax.jit(self._inputs)()
        whole, resumed = ({name: np.asarray(x, np.float64) for name, x in program(*inputs).items()}
                          for program in self._programs)
        row["errors"] = {name: error_of(x, resumed[name]) for name, x in whole.items()}
        row["wrong"] = [f"{name}: {error:.1e} from the run in two parts" for name, error in row["errors"].items()
                        if not error <= row["bound"]]
        return row

    def _inputs(self) -> tuple[jax.Array, ...]:
        tokens_T = jnp.arange(self.case.T) % LARGE_PERIOD
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, dy = (jax.random.normal(key, (1, LARGE_PERIOD, 8, 64)) for key in keys)
        return tuple(x.astype(jnp.bfloat16)[:, tokens_T] for x in (jax.nn.softplus(q), jax.nn.softplus(k), v, dy))

    def _whole(self, q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        return self._from(q, k, v, dy, None)

    def _resumed(self, q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        half = self.case.T // 2
        _, state = linear_attention(q[:, :half], k[:, :half], v[:, :half], implementation=self._implementation)
        return self._from(q[:, half:], k[:, half:], v[:, half:], dy[:, half:], state)

    def _from(self, q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array,
              state: State | None) -> dict[str, jax.Array]:
        y, backward, final = jax.vjp(
            lambda q, k, v: linear_attention(q, k, v, initial_state=state, implementation=self._implementation),
            q, k, v, has_aux=True)
        last = {name: x[:, -COMPARED_TOKENS:]
                for name, x in zip(("y", "dq", "dk", "dv"), (y, *backward(dy)), strict=True)}
        return last | {"final s": final.s_BHMD, "final z": final.z_BHM}


def token_row(dtype: str) -> dict[str, Any]:
    """The row of a token that is drawn after others: its logits, by what decoding keeps, against those of the whole
    text in parallel form, in float32; in bfloat16 beside the error of the parallel form itself."""
    row = _row(replace(TOKEN, dtype=dtype), DRAWN)
    try:
        with jax.default_matmul_precision("highest"):
            expected_V, _ = _last_logits("float32", in_turns=False)
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            (found_V, again_V), (plain_V, _) = (_last_logits(dtype, in_turns=turns) for turns in (True, False))
        error, plain = error_of(found_V, expected_V), error_of(plain_V, expected_V)
        row["errors"] = {"logits": error}
        if dtype != "float32":
            row |= {"plain_errors": {"logits": plain}, "bound": WORSE_THAN_PLAIN * plain}
        row["wrong"] = [f"logits: {error:.1e}, the parallel form {plain:.1e}"] if not error <= row["bound"] else []
        if not np.array_equal(found_V, again_V, equal_nan=True):
            row["wrong"].append("logits: other bits in a second run")
    except Exception as error:  # whatever goes wrong is the finding
        row["wrong"].append(_line(error))
    return row


def _last_logits(dtype: Any, *, in_turns: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of the token after the last, twice; ``in_turns``: of all tokens but one, and then of one."""
    config = ModelConfig(layers=2, heads=TOKEN.H, width=TOKEN.H * TOKEN.D, context=TOKEN.T,
                         dtype=dtype, attention=("chunked", "softmax"), initial_scale=0.1)
    graph, state = nnx.split(GPT(resolve_config(config), 257, rngs=nnx.Rngs(0)))
    tokens_BT = jax.random.randint(jax.random.key(1), (1, TOKEN.T), 0, 257)

    @jax.jit
    def whole(state: Any, tokens_BT: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens_BT)[:, -1]

    @jax.jit
    def extended(state: Any, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        model = nnx.merge(graph, state)
        x_BTE, cache = model.forward(tokens_BT, cache)
        return model.logits(x_BTE[:, -1:])[:, 0], cache

    def last_logits() -> np.ndarray:
        if not in_turns:
            return np.asarray(whole(state, tokens_BT)[0], np.float64)
        cache = nnx.merge(graph, state).init_cache(1, TOKEN.T)
        _, cache = extended(state, tokens_BT[:, :-1], cache)
        return np.asarray(extended(state, tokens_BT[:, -1:], cache)[0][0], np.float64)

    return last_logits(), last_logits()


def large_row(compiled: Future[Large] | None, implementation: str | None) -> dict[str, Any]:
    """The row of a :class:`Large` call; skipped, with the reason, where there is not the memory for it."""
    row = _row(large_case(), implementation)
    if compiled is None:
        return row | {"skipped": "more than 2**31 elements are for a GPU, and not for --quick"}
    try:
        return compiled.result().check()
    except Exception as error:
        memory = attention.reason(error).startswith("out of memory")
        return row | ({"skipped": _line(error)} if memory else {"wrong": [_line(error)]})


# What the processes of the suite's own steps do.


def work(options: argparse.Namespace) -> int:
    """A step of the suite's own, which writes its JSON file as it goes.

    Returns:
        1 where something is wrong or was not tried, or nothing could be measured, else 0.
    """
    report.use_whole_device()
    if options.worker == "fla":
        report.share_device()
    contents = report.origin("benchmarks.suite", argparse.Namespace(
        worker=options.worker, quick=options.quick, seconds_per_case=options.seconds_per_case))
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * options.minutes - LEAST_SECONDS

    def keep(more: list[dict[str, Any]]) -> None:
        rows.extend(more)
        write_json(options.json, contents | {"rows": rows})

    if options.worker == "correctness":
        # In the file from the start: rows that are missing in the end were not tried, for whatever reason.
        contents["planned"] = (sum(len(implementations(case)) for case in cases(options.quick))
                               + len(implementations(large_case())) + len(TOKEN_DTYPES))
        keep([])
        _try_kernels(options.quick, until, keep)
        return 1 if len(rows) < contents["planned"] or any(row["wrong"] for row in rows) else 0
    measured: list[attention.Row] = []
    # A shape that is not begun in time is a row that says so, and so is a call that by smaller ones takes too long.
    for found in attention.measure_here(attention_cases(options.worker, options.quick), 3 if options.quick else 20,
                                        seconds_per_case=options.seconds_per_case,
                                        total_seconds=until - time.monotonic()):
        measured += found
        keep([asdict(row) for row in found])
        for row in found:
            print(row.label, attention.shape_name(row), row.passes, row.milliseconds, row.error, flush=True)
    measured.sort(key=lambda row: row.context if row.part == "contexts" else 0)
    if options.picture is not None and report.has_matplotlib():
        part = "contexts" if options.worker == "attention" else "kernel"
        title = f"One attention call, {measured[0].dtype}, {contents['device']}"
        draw_panels(options.picture, attention.panels(part, measured), title=title)
    return 0 if any(row.error is None for row in measured) else 1


def _try_kernels(quick: bool, until: float, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """The rows of all cases that are begun in time; side by side, for most of the time is the compiler's."""
    for dtype in TOKEN_DTYPES:
        if time.monotonic() < until:
            row = token_row(dtype)
            keep([row])
            _print_checked(row)
    every = cases(quick)
    left_out = 0
    with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)) // 2))) as pool:
        large: dict[str | None, Future[Large]] = {} if device.platform() != "gpu" or quick else {
            name: pool.submit(Large, name) for name in SCHEDULES}
        for found in pool.map(lambda case: check(case) if time.monotonic() < until else None, every):
            left_out += found is None
            keep(found or [])
            for row in found or []:
                _print_checked(row)
        # One after the other, and not beside anything else: they take most of the memory.
        for name in implementations(large_case()):
            if time.monotonic() > until:
                print("no time left for more than 2**31 elements")
                break
            row = large_row(large.get(name), name)
            keep([row])
            _print_checked(row)
    if left_out:
        print(f"no time left for {left_out} of {len(every)} cases")


def _print_checked(row: dict[str, Any]) -> None:
    worst = max(row["errors"].values(), default=float("nan"))
    called = f"{row['op']} {row['case']} {row['implementation'] or 'picked'}"
    print(f"{called}: {worst:.1e}", "; ".join(row["wrong"]), row["skipped"] or "", flush=True)


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
    incomplete: str | None = None
    """In place of ``yes``: why that cannot be said."""


def figures(out: Path) -> list[Figure]:
    """What the steps' files say, most important first; steps that wrote nothing have no lines."""
    found: list[Figure] = []
    files = _files(out)
    rows = {name: contents["rows"] for name, contents in files.items()}
    checked = [row for row in rows.get("correctness", []) if not row["skipped"]]
    if "correctness" in files:
        untried = files["correctness"]["planned"] - len(rows["correctness"])
        kernel = " and ".join(dict.fromkeys(row["implementation"] or row["op"] for row in checked)) or "kernel"
        found.append(Figure(f"correctness: cases of {kernel} that are wrong, of {len(checked)} tried"
                            + (f", {untried} not tried" if untried else ""),
                            sum(bool(row["wrong"]) for row in checked) if checked else None, 0, unit="cases",
                            incomplete="not all tried" if untried else None))
    tried = [row for row in checked if row["implementation"] != DRAWN and row["errors"]]
    for dtype, bound in dict.fromkeys((row["dtype"], row["bound"]) for row in tried):
        errors = [error for row in tried if (row["dtype"], row["bound"]) == (dtype, bound)
                  for error in row["errors"].values()]
        found.append(Figure(f"correctness: largest error, {dtype}", max(errors), bound, unit="RMS/RMS"))
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
        exact = figure.unit == "RMS/RMS"
        form, met = ".1e" if exact else ".4g", "–"
        if figure.target is not None and (judged or exact or figure.unit == "cases"):
            met = "not measured" if figure.value is None else "no" if figure.value > figure.target else (
                figure.incomplete or "yes")
        value, target, other = ("–" if x is None else format(x, form)
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
    """Runs the steps that the flags name; returns 1 if the kernel is wrong or not all of it was tried."""
    options = _options(arguments)
    if options.worker is not None:
        return work(options)
    start = time.monotonic()
    found = backend()
    wanted = _wanted(options, found)
    report.make_folder(options.out)
    names = [f"{step.name}.{suffix}" for step in steps(options.quick) for suffix in ("json", "png", "log")]
    for name in (*names, TUNED):  # of an earlier run
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
