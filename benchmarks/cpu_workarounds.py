"""The gain of each workaround of ``kernels/cpu.py``: the time without it over the time with all of them.

    python -m benchmarks.cpu_workarounds --json workarounds.json
    python -m benchmarks.cpu_workarounds --measure steps --modes chunked --contexts 4096

``steps`` are whole training steps. ``tokens`` are sampled with GPT-2's vocabulary, greedily and with top-k. The program
with all workarounds and those without one of them take turns. A workaround that does not change the program has no row.
``process`` are the workarounds that configure a process: processes take turns with the training step of the last mode
and context.

Times are those of the processor, of all threads, which other work on the machine does not affect. The ratio is one of
medians. Its 95 % interval is by bootstrap over the rounds (Efron, "Bootstrap Methods", 1979).
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import report, timing
from benchmarks.train_step import Size, Step, model_config
from configs.schema import Config, ModelConfig, TrainConfig
from kernels import cpu, device
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling, Settings, sample_token
from support.command import status
from support.errors import BenchmarkError, ConfigError
from support.ranges import Count
from training.abstract_step import step_and_shapes

VOCABULARY, GPT2_VOCABULARY = 257, 50_257
STEP_TOKENS = 4096
"""Tokens of a training step, or one sequence if that is longer."""
STEPS_OF_A_PROCESS = 5
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "top-k 40": Sampling(top_k=40)}
ALL = "all"
"""Name of the program with every workaround."""
RESAMPLES = 2000


@dataclass
class Row(timing.Row):
    """A program in one case; times are of the processor, per step, or per call for tokens."""

    without: str
    """Name of the workaround in ``kernels/cpu.py`` that it lacks, or ``ALL`` for the program with all of them."""
    measure: str
    """As in ``Options``."""
    case: str
    ratio: float | None = None
    """Time over that with all workarounds."""
    interval: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return f"{self.measure}: {self.case}, without {self.without}"


def compare(measure: str, case: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The rows of one case, from the samples of each program by the missing workaround, or ``ALL``."""
    rows, base = [], np.asarray(seconds[ALL])
    rounds = np.random.default_rng(0).integers(0, len(base), (RESAMPLES, len(base)))
    for name, samples in seconds.items():
        row = Row(name, measure, case)
        row.fill(samples)
        if name != ALL:
            ratios = np.median(np.asarray(samples)[rounds], axis=1) / np.median(base[rounds], axis=1)
            low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
            row.ratio, row.interval = median(samples) / median(seconds[ALL]), (low, high)
        rows.append(row)
    return rows


def time_programs(lower: Callable[[], jax.stages.Lowered], make: Callable[[], Callable[[], Any]], rounds: int,
                  **given: Any) -> dict[str, list[float]]:
    """Seconds per call of the program with every workaround, and of each different program without one of them.

    Args:
        lower: traces and lowers what the workarounds are to change.
        make: compiles the program and returns the call.
        rounds: samples of each.
        given: as in :func:`benchmarks.timing.time_by_turns`.
    """
    program, runs = lower().as_text(), {ALL: make()}
    for workaround in cpu.WORKAROUNDS:
        with cpu.without(workaround):
            if lower().as_text() != program:
                runs[workaround.__name__] = make()
    return timing.time_by_turns(runs, rounds, clock=time.process_time, **given)


def lower_step(config: Config) -> jax.stages.Lowered:
    """The training step, traced anew."""
    step, arguments = step_and_shapes(config, VOCABULARY)
    return step.lower(*arguments)


def lower_sampling() -> jax.stages.Lowered:
    """Sampling a token from its logits, traced anew."""
    logits_BV, keys_B = jnp.zeros((1, GPT2_VOCABULARY)), jax.random.split(jax.random.key(0), 1)
    settings = Settings(*map(jnp.asarray, (0.0, 0, 1.0, 0.0, 1.0)))
    return jax.jit(lambda: sample_token(logits_BV, logits_BV > 0, keys_B, settings)).lower()


def make_sampling(config: ModelConfig, sampling: Sampling) -> Callable[[], Any]:
    """A call that samples ``TOKENS_PER_CALL`` tokens."""
    sampler = Sampler(GPT(config, GPT2_VOCABULARY, rngs=nnx.Rngs(0)))
    generation = sampler.generate(np.zeros(1, np.int32), sampling, max_new_tokens=2**30)
    next(generation)
    return lambda: next(generation)


def measure_process(case: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of a training step, each the median of a process of its own.

    Raises:
        BenchmarkError: a process failed.
    """
    names = [workaround.__name__ for workaround in cpu.PROCESS_WORKAROUNDS
             if device.has_fast_bfloat16() or workaround is not cpu.use_widest_vectors]
    samples: dict[str, list[float]] = {name: [] for name in (ALL, *names)}
    for _ in range(rounds):
        for name in samples:
            found = timing.in_process("benchmarks.cpu_workarounds", {**case, "without": name})
            if "error" in found:
                raise BenchmarkError(found["error"])
            samples[name].append(found["seconds"])
    return samples


def measure_case(case: dict[str, Any]) -> dict[str, float]:
    """The result of a process of :func:`measure_process`."""
    without = case.pop("without")
    with cpu.without(*(workaround for workaround in cpu.PROCESS_WORKAROUNDS if workaround.__name__ == without)):
        cpu.configure_process()
    step = Step(make_config(**case), VOCABULARY)
    samples = timing.time_by_turns({ALL: step}, STEPS_OF_A_PROCESS, sample_seconds=0, clock=time.process_time)
    return {"seconds": median(samples[ALL])}


def make_config(mode: str, context: int, layers: int, width: int, dtype: Any) -> Config:
    """A model like the quickstart's, and a step of ``STEP_TOKENS`` tokens.

    Raises:
        ConfigError: as :func:`benchmarks.train_step.model_config`.
    """
    model = model_config(mode, context, Size(layers, 4, width, VOCABULARY), dtype=dtype, features="softplus")
    return Config(model=replace(model, positions="rotary"),
                  train=TrainConfig(batch_size=max(1, STEP_TOKENS // context)))


@dataclass(kw_only=True)
class Options(report.Options):
    measure: tuple[Literal["steps", "tokens", "process"], ...] = ("steps", "tokens", "process")
    """What to measure."""
    modes: tuple[str, ...] = ("softmax", "chunked")
    """Attention modes, each with its form or options if need be, such as reformer:rounds=4."""
    contexts: tuple[Count, ...] = (1024, 4096)
    """Sequence lengths."""
    width: Count = 128
    """Width of the model."""
    layers: Count = 2
    """Transformer blocks."""
    repeats: Count = 20
    """Rounds of steps and tokens."""
    processes: Count = 5
    """Rounds of processes."""


@functools.partial(
    report.Benchmark, module="benchmarks.cpu_workarounds", options=Options, measure_case=measure_case,
    tables=report.columns(
        ("measured", lambda row: f"{row.measure}: {row.case}", ""), ("without", "without", ""),
        ("ms", "milliseconds", ",.1f"), ("rounds", "count", ""), ("ratio", "ratio", ".3f"),
        ("95 % interval", lambda row: row.interval and "{:.3f} to {:.3f}".format(*row.interval), "")))
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    if device.platform() != "cpu":
        raise ConfigError(f"requires a CPU: this device is a {device.platform()}")
    dtypes = ("float32", "bfloat16") if device.has_fast_bfloat16() else ("float32",)
    sizes: dict[str, Any] = {"layers": options.layers, "width": options.width}
    cases = {f"{mode}, context {context}, {dtype}": sizes | {"mode": mode, "context": context, "dtype": dtype}
             for dtype in dtypes for mode in options.modes for context in options.contexts}
    configs = {name: make_config(**case) for name, case in cases.items()}
    sampled = make_config("chunked", min(options.contexts), options.layers, options.width, dtypes[-1]).model
    last, case = list(cases.items())[-1]
    measured = {
        "steps": {name: functools.partial(
            time_programs, functools.partial(lower_step, config), functools.partial(Step, config, VOCABULARY),
            options.repeats, sample_seconds=0) for name, config in configs.items()},
        "tokens": {f"chunked, {name}": functools.partial(
            time_programs, lower_sampling, functools.partial(make_sampling, sampled, sampling), options.repeats)
            for name, sampling in SAMPLINGS.items()},
        "process": {last: functools.partial(measure_process, case, options.processes)}}
    for name in options.measure:
        for case_name, measure in measured[name].items():
            status(f"{name}: {case_name} …")
            results.add(*compare(name, case_name, measure()))


if __name__ == "__main__":
    sys.exit(main())
