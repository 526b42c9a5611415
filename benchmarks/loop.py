"""The speed of the loop of ``train.py``, with its data, metrics and progress bar, relative to that of the bare step.

    python -m benchmarks.loop --recipe configs/quickstart.py --attention chunked --steps 200 --json loop.json

Trains in a temporary folder. The loop's tokens per second are those between two lines of ``metrics.jsonl`` without an
evaluation or a checkpoint between them. The same step is called in a bare loop just before and just after. Further
flags are those of ``train.py``, such as ``--model.context 1024``.
"""

import functools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks import report, timing
from benchmarks.recipes import parse_words
from benchmarks.train_step import Step
from support.errors import INTERRUPTED
from support.ranges import Count

WARM_UP_STEPS = 10
"""Steps before the first line that counts."""


def rates(metrics: Path) -> dict[str, float]:
    """Tokens per second of a run after its warm-up, by training time and by wall time."""
    lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["split"] == "train"]
    first, last = lines[WARM_UP_STEPS - 1], lines[-1]
    tokens = last["tokens"] - first["tokens"]
    return {"tokens_per_second": tokens / (last["train_seconds"] - first["train_seconds"]),
            "wall_tokens_per_second": tokens / (last["wall_seconds"] - first["wall_seconds"])}


@dataclass(kw_only=True)
class Options(report.Options):
    recipe: str = "configs/quickstart.py"
    """Recipe of the run."""
    attention: str = "chunked"
    """Attention mode."""
    steps: Count = 200
    """Steps that count."""


@functools.partial(
    report.Benchmark, module="benchmarks.loop", options=Options, passes_on=True, tables=report.columns(
        ("loop tokens/s", "tokens_per_second", ",.0f"),
        ("by wall clock", "wall_tokens_per_second", ",.0f"),
        ("bare tokens/s", "bare_tokens_per_second", ",.0f"), ("ratio", "ratio", ".3f"),
        ("by wall clock", "wall_ratio", ".3f")))
def main(options: Options, results: report.Results) -> int | None:
    """Times the bare step, the loop and the bare step again; returns the exit code of ``train.py`` if it fails."""
    timing.use_whole_device()
    # Here, because they require packages that a GPU machine may lack.
    import train
    from data.prepare import ensure
    from data.token_files import TokenFiles

    total = WARM_UP_STEPS + options.steps
    flags = [options.recipe, "--attention", options.attention, "--train.steps", str(total), "--train.minutes", "None",
             "--train.eval-every", str(total), "--checkpoint.every-steps", str(total),
             "--optimizer.warmup-steps", str(total // 10), *results.train_flags]
    config = parse_words(flags, None)
    half = -(-options.steps // 2)
    step = Step(config, TokenFiles.open(ensure(config.data)).vocabulary_size)
    jax.block_until_ready(step())
    before = timing.seconds_a_call(step, half)
    with tempfile.TemporaryDirectory() as directory:
        code = train.main([*flags, "--run-dir", f"{directory}/run"])
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            return code
        row = rates(Path(directory, "run", "metrics.jsonl"))
    jax.block_until_ready(step())
    bare = 2 * config.train.batch_size * config.model.context / (before + timing.seconds_a_call(step, half))
    ratio = row["tokens_per_second"] / bare
    results.more = {"model": config.to_dict()["model"], "ratio": ratio}
    results.add(row | {"bare_tokens_per_second": bare, "ratio": ratio,
                       "wall_ratio": row["wall_tokens_per_second"] / bare})
    results.model = f"{options.attention}, context {config.model.context:,}, {config.model.dtype}"
    results.remarks.append(f"the loop reaches {ratio:.1%} of the bare step's speed")
    return None


if __name__ == "__main__":
    sys.exit(main())
