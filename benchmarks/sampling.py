"""Time to draw one token after a short and a long text: does sampling slow down as it goes?

    python -m benchmarks.sampling --positions 128,8192 --modes softmax,chunked --json sampling.json

One sequence, through the sampler that ``sample.py`` uses, from models without positions, which go on for ever. The
cases take turns; figures are medians. The last column is the time at a position over that of the same mode at the
first position named: 1 where the cost does not grow with what was drawn before.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
from flax import nnx

from benchmarks import report
from benchmarks.train_step import model_config
from configs.schema import ConfigError
from models.gpt import GPT
from models.sampler import TOKENS_PER_CALL, Sampler, Sampling
from training.environment import write_json


@dataclass
class Row:
    """One mode at one position, as the JSON file has it; times are of a token, in milliseconds."""

    mode: str
    """As it was named on the command line."""
    position: int
    """Tokens before the first one drawn."""
    milliseconds: float
    """Median of the samples."""
    tokens_per_second: float
    ratio: float
    """Time over that of the mode at the first position."""
    samples: list[float]


def measure(samplers: dict[str, Sampler], positions: Sequence[int], vocabulary_size: int, repeats: int) -> list[Row]:
    """The rows: every sampler at every position, by turns.

    Args:
        samplers: by mode, as it was named.
        positions: lengths of the random prompts.
        vocabulary_size: V.
        repeats: samples of each, of ``TOKENS_PER_CALL`` tokens.
    """
    prompt_T = np.random.default_rng(0).integers(0, vocabulary_size, max(positions), dtype=np.int32)
    # Each case's samples are the next pieces of one sequence; the first two, with the prompt in them, warm up.
    pieces = {(mode, position): sampler.generate(prompt_T[:position], Sampling(),
                                                 max_new_tokens=(2 + repeats) * TOKENS_PER_CALL)
              for mode, sampler in samplers.items() for position in positions}
    samples = report.time_by_turns({case: piece.__next__ for case, piece in pieces.items()}, repeats, sample_seconds=0)
    rows = []
    for (mode, position), seconds in samples.items():
        token = median(seconds) / TOKENS_PER_CALL
        first = median(samples[mode, positions[0]]) / TOKENS_PER_CALL
        rows.append(Row(mode, position, 1e3 * token, 1 / token, token / first,
                        [1e3 * s / TOKENS_PER_CALL for s in seconds]))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 for failures."""
    options = _options(argv)
    contents = report.origin("benchmarks.sampling", options)
    try:
        report.check_output(options.json)
        configs = {mode: replace(model_config(mode, max(options.positions), options), positions="none")
                   for mode in options.modes}
        samplers = {mode: Sampler(GPT(config, options.vocabulary, rngs=nnx.Rngs(0)))
                    for mode, config in configs.items()}
        rows = measure(samplers, options.positions, options.vocabulary, options.repeats)
        print(f"{contents['device']}; {configs[options.modes[0]].dtype}")
        print(report.table(("position", "mode", "ms/token", "tokens/s", "× first position"), [
            [f"{row.position:,}", row.mode, f"{row.milliseconds:.3f}", f"{row.tokens_per_second:,.0f}",
             f"{row.ratio:.2f}"] for row in rows]))
        if options.json is not None:
            write_json(options.json, contents | {"rows": [asdict(row) for row in rows]})
    except (ConfigError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.model_parser("benchmarks.sampling", __doc__)
    parser.add_argument("--positions", type=report.positives, default=(128, 8192),
                        help="how many tokens there are before, with commas between (128,8192)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
