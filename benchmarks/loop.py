"""What share of the bare step's speed the loop of ``train.py`` reaches, with its data, metrics and progress bar.

    python -m benchmarks.loop --recipe configs/quickstart.py --attention chunked --steps 200 --json loop.json

Trains in a temporary folder and compares the tokens per second between two lines of ``metrics.jsonl``, so many steps
apart and with no evaluation or checkpoint between them, with those of the same step called in a bare loop just before
and just after. Further flags are those of ``train.py``, such as ``--model.context 1024``.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import jax

from benchmarks import report
from benchmarks.train_step import Step
from support.errors import INTERRUPTED

WARM_UP_STEPS = 10
"""Steps of the run before the first line that counts."""


def bare_seconds(step: Step, steps: int) -> float:
    """Time of so many steps in a row, waited for at the end."""
    metrics = jax.block_until_ready(step())
    start = time.perf_counter()
    for _ in range(steps):
        metrics = step()
    jax.block_until_ready(metrics)
    return time.perf_counter() - start


def rates(metrics: Path) -> dict[str, float]:
    """Tokens per second of a run after its warm-up, by its training clock and by its wall clock."""
    lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["split"] == "train"]
    first, last = lines[WARM_UP_STEPS - 1], lines[-1]
    tokens = last["tokens"] - first["tokens"]
    return {"tokens_per_second": tokens / (last["train_seconds"] - first["train_seconds"]),
            "wall_tokens_per_second": tokens / (last["wall_seconds"] - first["wall_seconds"])}


def command(arguments: Sequence[str]) -> int:
    """Measures what the flags say; returns the exit code of ``train.py`` where it fails."""
    options, more = _options(arguments)
    report.use_whole_device()
    # Here, not above: the other benchmarks do without the packages that train.py needs.
    import train
    from data.prepare import ensure
    from data.token_files import TokenFiles

    total = WARM_UP_STEPS + options.steps
    flags = [options.recipe, "--attention", options.attention, "--train.steps", str(total), "--train.minutes", "None",
             "--train.eval-every", str(total), "--checkpoint.every-steps", str(total),
             "--optimizer.warmup-steps", str(total // 10), *more]
    report.check_output(options.json)
    config = train.parse(flags).config
    vocabulary_size = TokenFiles.open(ensure(config.data)).vocabulary_size
    contents = report.origin("benchmarks.loop", options, more)
    half = -(-options.steps // 2)
    tokens = 2 * half * config.train.batch_size * config.model.context
    step, rows = Step(config, vocabulary_size), []
    for _ in range(options.rounds):
        before = bare_seconds(step, half)
        with tempfile.TemporaryDirectory() as directory:
            code = train.main([*flags, "--run-dir", f"{directory}/run"])
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code:
                return code
            row = rates(Path(directory, "run", "metrics.jsonl"))
        bare = tokens / (before + bare_seconds(step, half))
        rows.append(row | {"bare_tokens_per_second": bare, "ratio": row["tokens_per_second"] / bare,
                           "wall_ratio": row["wall_tokens_per_second"] / bare})
        report.keep(options.json, contents | {"model": config.to_dict()["model"],
                                              "ratio": median(row["ratio"] for row in rows), "rows": rows})
    print(f"{contents['device']}; {options.attention}, context {config.model.context:,}, {config.model.dtype}")
    print(report.table(
        ("", "loop tokens/s", "by wall clock", "bare tokens/s", "ratio", "by wall clock"),
        [[f"round {n}", *(f"{row[name]:,.0f}" for name in (
            "tokens_per_second", "wall_tokens_per_second", "bare_tokens_per_second")),
          f"{row['ratio']:.3f}", f"{row['wall_ratio']:.3f}"] for n, row in enumerate(rows, 1)]))
    print(f"the loop reaches {median(row['ratio'] for row in rows):.1%} of the bare step's speed")
    return 0


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="configs/quickstart.py", help="%(default)s")
    parser.add_argument("--attention", default="chunked", help="mode (%(default)s)")
    parser.add_argument("--steps", type=report.positive, default=200, help="steps that count (%(default)s)")
    parser.add_argument("--rounds", type=report.positive, default=1, help="comparisons (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.loop", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
