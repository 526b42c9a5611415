"""Speed of the arms of the standings: training at several contexts, and sampling after short and long texts.

    python -m benchmarks.standings_speeds --rungs XS --json benchmarks/results/standings/S1/speeds-XS.json

At each context all arms of a rung take turns, so that they share the noise of the machine; figures are medians. A step
has the tokens of the rung's, at least one sequence. Runs of the standings train under other load, so that their clocks
do not compare: seconds in the tables are tokens by these speeds.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flax import nnx

from benchmarks import report, timing
from benchmarks.sampling import CALLS_PER_SAMPLE, continuation
from benchmarks.train_step import Step
from configs.schema import Config
from data.documents import BYTES
from models.gpt import GPT
from sampling.sampler import TOKENS_PER_CALL, Sampler
from support.command import status
from support.errors import ConfigError
from support.ranges import Count, Positive


@dataclass(kw_only=True)
class Options(report.Options):
    arms: tuple[str, ...] = ()
    """Arms of the standings, or modes. Empty: at each size those with a row."""
    rungs: tuple[str, ...] = ()
    """Sizes. Empty: all."""
    contexts: tuple[Count, ...] = (1024, 4096, 16384)
    """Contexts of training."""
    positions: tuple[Count, ...] = (128, 8192)
    """Tokens before those that are sampled."""
    repeats: Count = 8
    """Samples of each case."""
    seconds_per_case: Positive = 20.0
    """About how long the samples of a case may take."""


@dataclass(kw_only=True)
class Row(timing.ModeRow):
    """One arm; ``mode`` is its name. Times are of a training step or of a sampled token."""

    rung: str
    context: int | None = None
    """Of training; None of sampling."""
    position: int | None = None
    """Tokens before; None of training."""
    tokens_per_second: float | None = None


TABLE = report.columns(
    ("rung", "rung", ""), ("arm", "mode", ""), ("context", "context", ","), ("tokens before", "position", ","),
    ("ms", "milliseconds", ".3f"), ("fastest", "fastest", ".3f"), ("samples", "count", ""),
    ("tokens/s", "tokens_per_second", ",.0f"))


def sequences_of(config: Config, context: int) -> int:
    """Sequences of a context in a step with the tokens of a config's, at least one."""
    return max(1, config.train.batch_size * config.model.context // context)


def training(rung: str, configs: Mapping[str, Config], context: int, options: Options) -> list[Row]:
    """The rows of a rung at a context of training; configs by arm."""
    cases: dict[str, tuple[Row, Callable[[], Callable[[], Any]]]] = {}
    for arm, config in configs.items():
        config = replace(config, model=replace(config.model, context=context), train=replace(
            config.train, batch_size=sequences_of(config, context)))
        cases[arm] = Row(mode=arm, rung=rung, context=context), partial(Step, config, BYTES.size)
    timing.time_cases(cases, options.repeats, seconds=options.seconds_per_case)
    for arm, (row, _) in cases.items():
        row.tokens_per_second = timing.ratio(1e3 * context * sequences_of(configs[arm], context), row.milliseconds)
    return [row for row, _ in cases.values()]


def sampling(rung: str, configs: Mapping[str, Config], position: int, options: Options) -> list[Row]:
    """The rows of a rung of a token after ``position`` others; configs by arm."""
    def prepare(config: Config) -> Callable[[], Any]:
        model = GPT(replace(config.model, positions="none"), BYTES.size, rngs=nnx.Rngs(0))
        draw = continuation(Sampler(model), position, calls=CALLS_PER_SAMPLE)
        return lambda: [draw() for _ in range(CALLS_PER_SAMPLE)][-1]

    cases = {arm: (Row(mode=arm, rung=rung, position=position), partial(prepare, config))
             for arm, config in configs.items()}
    timing.time_cases(cases, options.repeats, sample_seconds=0, seconds=options.seconds_per_case)
    for row, _ in cases.values():
        if row.samples:
            row.fill([sample / 1e3 / CALLS_PER_SAMPLE / TOKENS_PER_CALL for sample in row.samples])
            row.tokens_per_second = timing.ratio(1e3, row.milliseconds)
    return [row for row, _ in cases.values()]


def configs_of(options: Options) -> dict[str, dict[str, Config]]:
    """The configs by rung and arm.

    Raises:
        ConfigError: there is no such arm or rung.
    """
    from benchmarks.standings import protocol_config
    from comparison.standings import RUNGS, VERSION, Place
    from comparison.standings_rows import RESULTS, rows_of

    found, rows = {}, rows_of(RESULTS / VERSION)
    for rung in options.rungs or RUNGS:
        if rung not in RUNGS:
            raise ConfigError(f"--rungs {rung}: no such rung; expected {', '.join(RUNGS)}")
        arms = options.arms or [arm for arm, row in rows.items() if arm == row["row"] and rung in row["rungs"]]
        if arms:
            found[rung] = {arm: protocol_config(Place(rung, arm, 1e-3, 0)) for arm in arms}
    return found


@partial(report.Benchmark, module="benchmarks.standings_speeds", options=Options, tables=TABLE)
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    for rung, configs in configs_of(options).items():
        for context in options.contexts:
            status(f"{rung} at context {context:,} …")
            results.add(*training(rung, configs, context, options))
        for position in options.positions:
            status(f"{rung}, sampling after {position:,} tokens …")
            results.add(*sampling(rung, configs, position, options))


if __name__ == "__main__":
    sys.exit(main())
