"""Time and memory of a training step, mode against mode: forward, backward and AdamW update, as ``train.py`` makes it.

    python -m benchmarks.train_step --contexts 512,1024,2048,4096,8192 --modes softmax,chunked --json step.json

A mode may carry its form: ``softmax:materialised``, ``softmax:blockwise``, ``linear:recurrent``. The modes take turns
at each context; figures are medians. The last column says how many times as fast as the first softmax mode a mode is.
The file has the table's rows with every sample, and the device, versions, commit and command that they come from. A
case that does not fit into memory, or that this device does not support, is a row with ``error`` and without times.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import report
from configs.schema import Config, ConfigError, ModelConfig, TrainConfig
from data.loader import Batch
from models import attention, gpt
from training.environment import write_json
from training.optimizer import make_optimizer
from training.step import StepMetrics, TrainState, initial_state, make_model, make_train_step, model_graph

FORM_OPTIONS = ("form", "kernel")
"""What modes call the option that names how they are computed."""
HEADINGS = ("context", "mode", "implementation", "ms/step", "fastest", "tokens/s", "peak MiB", "× softmax")


@dataclass
class Row:
    """One mode at one context, as the JSON file has it; times are of a step, in milliseconds."""

    mode: str
    """As it was named on the command line."""
    implementation: str | None
    context: int
    batch: int
    """Sequences in a step."""
    milliseconds: float | None = None
    """Median of the samples."""
    tokens_per_second: float | None = None
    ratio: float | None = None
    """Time of the first softmax mode at this context over the time of this one."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries of the step, as the compiler plans them."""
    samples: list[float] = field(default_factory=list)
    error: str | None = None


class Step:
    """The training step of a config, compiled, on random tokens.

    Raises:
        NotImplementedError: an implementation that this device or input does not have.
        MemoryError: more memory is needed than a CPU has left.
        jax.errors.JaxRuntimeError: the same on other devices.
    """

    def __init__(self, config: Config, vocabulary_size: int):
        transform = make_optimizer(config.optimizer)

        def initial() -> TrainState:
            return initial_state(config, vocabulary_size, transform)

        shape = (2, config.train.batch_size, config.model.context)
        tokens = np.random.default_rng(0).integers(0, vocabulary_size, shape, dtype=np.int32)
        self._batch = Batch(*jax.device_put(tuple(tokens)))
        self._learning_rate = jnp.float32(config.optimizer.learning_rate)
        step = make_train_step(model_graph(config, vocabulary_size), config, transform)
        lowered = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(initial), self._batch, self._learning_rate)
        self._compiled = lowered.compile()
        self.peak_bytes = report.peak_bytes(self._compiled)
        report.check_memory(self.peak_bytes)
        self._state = jax.jit(initial)()

    def __call__(self) -> StepMetrics:
        """Starts one update; its metrics."""
        self._state, metrics = self._compiled(self._state, self._batch, self._learning_rate)
        return metrics


def mode_config(text: str) -> tuple[str, Any]:
    """The mode and its ``Config`` that ``NAME`` or ``NAME:FORM`` stands for.

    Raises:
        ConfigError: no such mode, or no such form of it.
    """
    name, colon, form = text.partition(":")
    if name not in attention.modes():
        raise ConfigError(f"--modes {text}: there is no mode {name!r}; there are {', '.join(attention.modes())}")
    config = attention.load(name).Config
    if not colon:
        return name, config()
    option = next((option.name for option in fields(config) if option.name in FORM_OPTIONS), None)
    forms = _names(get_type_hints(config)[option]) if option else []
    if option is None or form not in forms:
        raise ConfigError(f"--modes {text}: {name} has no form {form!r}; it has {', '.join(forms) or 'only one'}")
    return name, config(**{option: form})


def _names(hint: Any) -> list[str]:
    """The strings in a type such as ``Literal["a", "b"] | None``."""
    return [hint] if isinstance(hint, str) else [name for part in get_args(hint) for name in _names(part)]


def model_config(mode: str, context: int, options: argparse.Namespace) -> ModelConfig:
    """The model of a mode, with the sizes that the flags give.

    Raises:
        ConfigError: sizes that do not go together, or an unknown mode.
    """
    name, mode_options = mode_config(mode)
    return gpt.check(ModelConfig(
        layers=options.layers, heads=options.heads, width=options.width, context=context, dtype=options.dtype,
        attention=(name,), modes={name: mode_options}))


def implementation(config: Config, vocabulary_size: int) -> str | None:
    """Which form the first layer's attention takes on this device; None where its mode has only one."""
    block = nnx.eval_shape(lambda: make_model(config, vocabulary_size)).blocks[0]
    return block.attention.implementation(block.dtype)


def measure(configs: dict[str, Config], vocabulary_size: int, repeats: int) -> list[Row]:
    """The rows of one context: every mode's step, timed by turns.

    Args:
        configs: by mode, as it was named.
        vocabulary_size: V.
        repeats: samples of each.
    """
    rows, steps = {}, {}
    for mode, config in configs.items():
        row = rows[mode] = Row(mode, implementation(config, vocabulary_size), config.model.context,
                               config.train.batch_size)
        try:
            step = Step(config, vocabulary_size)
            row.peak_bytes = step.peak_bytes
            jax.block_until_ready(step())
        except (MemoryError, jax.errors.JaxRuntimeError, NotImplementedError) as error:
            row.error = str(error).partition("\n")[0]
        else:
            steps[mode] = step
    samples = report.time_by_turns(steps, repeats)
    softmax = next((median(samples[mode]) for mode in steps if mode.partition(":")[0] == "softmax"), None)
    for mode in steps:
        row, seconds = rows[mode], median(samples[mode])
        row.samples = [1e3 * sample for sample in samples[mode]]
        row.milliseconds = 1e3 * seconds
        row.tokens_per_second = row.batch * row.context / seconds
        row.ratio = None if softmax is None else softmax / seconds
    return list(rows.values())


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    memory = "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}"
    ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
    times = ("–", "–", "–")
    if row.milliseconds is not None:
        times = (f"{row.milliseconds:,.1f}", f"{min(row.samples):,.1f}", f"{row.tokens_per_second:,.0f}")
    return [f"{row.context:,}", row.mode, row.implementation or "", *times, memory, ratio]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 where nothing could be measured."""
    options = _options(argv)
    try:
        report.check_output(options.json)
        configs = {context: {
            mode: Config(model=model_config(mode, context, options),
                         train=TrainConfig(batch_size=max(context, options.tokens) // context))
            for mode in options.modes} for context in options.contexts}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    contents = report.origin("benchmarks.train_step", options)
    rows: list[Row] = []
    try:
        for context, modes in configs.items():
            print(f"context {context:,} …", file=sys.stderr)
            rows += measure(modes, options.vocabulary, options.repeats)
            if options.json is not None:
                write_json(options.json, contents | {"rows": [asdict(row) for row in rows]})
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{contents['device']}; {configs[options.contexts[0]][options.modes[0]].model.dtype}")
    print(report.table(HEADINGS, [cells(row) for row in rows]))
    for row in rows:
        if row.error is not None:
            print(f"{row.mode} at {row.context:,}: {row.error}", file=sys.stderr)
    return 0 if any(row.error is None for row in rows) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.model_parser("benchmarks.train_step", __doc__)
    parser.add_argument("--contexts", type=report.positives, default=(512, 1024, 2048, 4096, 8192),
                        help="sequence lengths, with commas between (512,1024,2048,4096,8192)")
    parser.add_argument("--tokens", type=report.positive, default=4096,
                        help="tokens in a step, where the context is not longer (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
