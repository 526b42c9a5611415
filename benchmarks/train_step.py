"""Time and memory of a training step of each mode: forward pass, backward pass and AdamW update, as in ``train.py``.

    python -m benchmarks.train_step --contexts 512,1024,2048,4096,8192 --modes softmax,chunked --json step.json
    python -m benchmarks.train_step --sizes 124M,355M,774M,1558M --contexts 1024,8192,65536,524288 --picture step.png
    python -m benchmarks.train_step --sizes 124M --contexts 1024 --tokens 524288 --accumulate 16

A mode may name its form and options: ``softmax:materialised``, ``linear:recurrent``, ``reformer:rounds=4``. The modes
take turns at each context; one that does not fit into memory beside the others is timed alone. Figures are medians. A
size is one of GPT-2's, with softplus features. Without ``--sizes`` the model is that of ``--width``, ``--layers``,
``--heads`` and ``--vocabulary``. ``--peer nanogpt=PATH`` adds nanoGPT's training step on torch, which has to be
installed; PATH is its ``model.py`` or the folder of it.

Utilisation is the model's floating-point operations over the peak of the device by its data sheet: 6 per parameter and
token, and three times those of the attention's forward pass. Recomputed ones do not count. "× softmax" is the time of
the first softmax mode over that of a mode. Lines below the table say at which context two modes take the same time. A
case that does not fit into memory, is not supported or would take too long is a row with ``error`` and without times.
"""

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import nanogpt, picture, report, timing
from configs.schema import Config, ModelConfig, TrainConfig
from data.loader import Batch
from models import gpt
from models.mode_text import mode_config
from models.parameters import count_parameters
from support.command import status
from support.errors import ConfigError
from support.ranges import Count, Positive
from training import accounting
from training.abstract_step import step_and_shapes
from training.environment import peak_bytes
from training.optimizer import model_optimizer
from training.step import StepMetrics, abstract_model, initial_state


class Size(NamedTuple):
    layers: int
    heads: int
    width: int
    vocabulary: int


GPT2_VOCABULARY = 50_304
"""50,257 tokens, padded to a multiple of 64."""
SIZES = {
    "124M": Size(12, 12, 768, GPT2_VOCABULARY),
    "355M": Size(24, 16, 1024, GPT2_VOCABULARY),
    "774M": Size(36, 20, 1280, GPT2_VOCABULARY),
    "1558M": Size(48, 25, 1600, GPT2_VOCABULARY),
}
"""Those of GPT-2, by name."""


@dataclass(kw_only=True)
class SizeOptions(report.PictureOptions):
    """The flags that ``benchmarks.sampling`` has too."""

    modes: tuple[str, ...] = ("softmax", "chunked")
    """Attention modes, each with its form or options if need be, such as reformer:rounds=4."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype."""
    width: Count = 256
    """Width of the model."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads."""
    vocabulary: Count = 257
    """Tokens in the vocabulary."""
    repeats: Count = 20
    """Samples of each case."""
    sizes: tuple[Literal["124M", "355M", "774M", "1558M"], ...] = ()
    """Sizes of GPT-2, in place of those flags."""
    seconds_per_case: Positive = 60.0
    """About how long the samples of a case may take."""


@dataclass(kw_only=True)
class Options(SizeOptions):
    contexts: tuple[Count, ...] = (512, 1024, 2048, 4096, 8192)
    """Sequence lengths."""
    tokens: Count | None = None
    """Tokens in a step, at least one sequence. None: 4096; with --sizes one sequence."""
    accumulate: Count = 1
    """Parts of the batch, one after the other."""
    remat: Literal["none", "names", "block", "auto"] = "auto"
    """As train.remat: what the backward pass recomputes; auto: the least that fits."""
    peer: str | None = None
    """nanogpt=PATH: time nanoGPT's step too."""


@dataclass
class Row(timing.ModeRow):
    """One mode at one context; times are of a step. ``ratio`` is the time of the first softmax mode over this time."""

    context: int
    batch: int
    """Sequences in a step."""
    size: str | None = None
    """Key of ``SIZES``; None: by the flags."""
    accumulate: int = 1
    remat: str | None = None
    """As ``train.remat``."""
    flops: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None
    """Share of the peak of one device in the compute dtype; None if the peak is unknown."""
    compile_seconds: float | None = None
    """On a GPU with autotuning, unless it is cached."""

    @property
    def form(self) -> str:
        """The implementation, rematerialisation, and whether it was timed alone."""
        remat = f", remat {self.remat}" * (self.remat in ("block", "names"))
        return (self.implementation or "") + remat + ", alone" * self.alone


TABLE = report.columns(
    ("size", lambda row: row.size or "", ""), ("context", "context", ","), ("mode", "mode", ""),
    ("implementation", "form", ""), ("ms/step", "milliseconds", ",.1f"), ("fastest", "fastest", ",.1f"),
    ("samples", "count", ""), ("tokens/s", "tokens_per_second", ",.0f"), ("utilisation", "utilisation", ".1%"),
    ("peak MiB", "mebibytes", ",.1f"),
    ("compile s", "compile_seconds", ".0f"), ("× softmax", "ratio", ".2f"))


class Step:
    """The training step of a config, compiled, on random tokens.

    Raises:
        NotImplementedError: the device does not support the implementation.
        MemoryError, jax.errors.JaxRuntimeError: the device has too little memory.
    """

    def __init__(self, config: Config, vocabulary_size: int):
        shape = (2, config.train.batch_size, config.model.context)
        tokens = np.random.default_rng(0).integers(0, vocabulary_size, shape, dtype=np.int32)
        self._batch = Batch(*jax.device_put(tuple(tokens)))
        self._learning_rate = jnp.float32(config.optimizer.learning_rate)
        step, arguments = step_and_shapes(config, vocabulary_size)
        lowered = step.lower(*arguments)
        start = time.monotonic()
        self._compiled = lowered.compile()
        self.compile_seconds = time.monotonic() - start
        self.peak_bytes = peak_bytes(self._compiled)
        timing.check_memory(self.peak_bytes)
        # Array by array, without jit: XLA takes long to compile the initialisation of a large model as one program.
        transform = model_optimizer(config.optimizer, abstract_model(config, vocabulary_size))
        self._state = initial_state(config, vocabulary_size, transform)

    def __call__(self) -> StepMetrics:
        """Starts one update; its metrics."""
        self._state, metrics = self._compiled(self._state, self._batch, self._learning_rate)
        return metrics


def sizes(options: SizeOptions) -> dict[str | None, Size]:
    """The sizes that the flags give, by name."""
    if options.sizes:
        return {name: SIZES[name] for name in options.sizes}
    return {None: Size(options.layers, options.heads, options.width, options.vocabulary)}


def model_config(mode: str, context: int, size: Size, *, dtype: Any, features: str | None = None) -> ModelConfig:
    """The model of a mode and a size.

    Args:
        mode: as on the command line.
        context: of the model.
        size: of the model.
        dtype: as in :class:`ModelConfig`.
        features: feature map, for modes that have one; None, the mode's default.

    Raises:
        ConfigError: an unknown mode, or the sizes do not match.
    """
    name, config = mode_config(mode, defaults={} if features is None else {"feature_map": features})
    return gpt.resolve_config(ModelConfig(
        layers=size.layers, heads=size.heads, width=size.width, context=context, dtype=dtype, attention=(name,),
        modes={name: config}))


def model_flops(config: Config, vocabulary_size: int) -> float:
    """Floating-point operations of a step; see :func:`training.accounting.flops_per_token`."""
    parameters = count_parameters(abstract_model(config, vocabulary_size))
    per_token = accounting.flops_per_token(config.to_dict(), {"parameters": parameters})
    assert per_token is not None  # of a mode that is here
    return per_token * config.train.batch_size * config.model.context


def measure(configs: Mapping[str, Config], size: str | None, options: Options, predictor: timing.CostPredictor,
            peer: Path | None = None) -> list[Row]:
    """The rows of one size and context: the steps of all modes, timed in turns.

    Args:
        configs: by mode, as on the command line.
        size: name of the size.
        options: the flags.
        predictor: has the shorter contexts.
        peer: nanoGPT's ``model.py``, if its step is timed too.
    """
    cases: dict[str, tuple[Row, Callable[[], Callable[[], Any]]]] = {}
    vocabulary_size = sizes(options)[size].vocabulary
    for mode, config in configs.items():
        attention = abstract_model(config, vocabulary_size).blocks[0].attention
        row = Row(config.model.context, config.train.batch_size, size, config.train.accumulate, mode=mode,
                  implementation=timing.form(attention.implementation(jnp.dtype(config.model.dtype))),
                  flops=model_flops(config, vocabulary_size))
        row.error = predictor.refusal((size, mode), row.flops or 0)
        cases[mode] = row, functools.partial(_prepare, config, vocabulary_size, row, options.remat)
    config = next(iter(configs.values()))
    if peer is not None:
        cases["nanogpt"] = (Row(config.model.context, config.train.batch_size, size, mode="nanogpt"),
                            functools.partial(nanogpt.make_step, peer, config, vocabulary_size))
    timing.time_cases(cases, options.repeats, seconds=options.seconds_per_case)
    rows = {name: row for name, (row, _) in cases.items()}
    softmax = next((row.milliseconds for mode, row in rows.items()
                    if mode.startswith("softmax") and row.milliseconds is not None), None)
    peak = accounting.peak_flops(config.model.dtype, 1)
    for mode, row in rows.items():
        predictor.learn((size, mode), row.flops or 0, f"{row.context:,}", row)
        row.ratio = timing.ratio(softmax, row.milliseconds)
        row.tokens_per_second = timing.ratio(1e3 * row.batch * row.context, row.milliseconds)
        speed = timing.ratio(row.flops and 1e3 * row.flops, row.milliseconds)
        row.utilisation = timing.ratio(speed, peak)
    return list(rows.values())


def _prepare(config: Config, vocabulary_size: int, row: Row, remat: str) -> Step:
    """The step; with ``auto``, with the first rematerialisation whose planned memory fits.

    Raises:
        as :class:`Step`.
    """
    choices = ("none", "names", "block") if remat == "auto" else (remat,)
    for choice in choices:
        try:
            step = Step(replace(config, train=replace(config.train, remat=choice)), vocabulary_size)
        except MemoryError:
            if choice == choices[-1]:
                raise
        else:
            row.remat, row.peak_bytes, row.compile_seconds = choice, step.peak_bytes, step.compile_seconds
            return step
    raise AssertionError


def panels(rows: Sequence[Row]) -> list[picture.Panel]:
    """Time of a step against context, a panel for each size, with published times of the same attention."""
    found = []
    for size in dict.fromkeys(row.size for row in rows):
        others: dict[str, picture.Curve] = {}
        known = picture.published("training_step", "models").get(size, {})
        size_rows = [row for row in rows if row.size == size]
        for row in size_rows:
            name = row.mode.partition(":")[0]
            if name == "softmax":
                name += ":materialised" if row.implementation == "materialised" else ":cudnn"
            if name in known and known[name] not in others.values():
                others[row.label] = known[name]
        found.append(picture.Panel(picture.curves(size_rows, "label", "context", "milliseconds"), title=size or "",
                                   x="context (tokens)", y="milliseconds a training step", published=others))
    return found


def crossings(rows: Sequence[Row]) -> list[str]:
    """Where the times of two modes cross, with log time linear in log tokens between measured contexts."""
    found = []
    for size in dict.fromkeys(row.size for row in rows):
        curves: Any = picture.curves([row for row in rows if row.size == size and row.milliseconds], "label", "context",
                                     "milliseconds")
        for (one, first), (other, second) in itertools.combinations(curves.items(), 2):
            gaps = {context: math.log(first[context] / second[context]) for context in sorted({*first} & {*second})}
            at = [a * (b / a) ** (gaps[a] / (gaps[a] - gaps[b])) for a, b in itertools.pairwise(gaps)
                  if (gaps[a] < 0) != (gaps[b] < 0)]
            where = "cross at about " + " and ".join(f"{float(f'{x:.2g}'):,.0f}" for x in at) if at else (
                f"do not cross from {min(gaps):,} to {max(gaps):,}" if len(gaps) > 1 else None)
            found += [f"{size}: " * (size is not None) + f"{one} and {other} {where} tokens"] * (where is not None)
    return found


def make_config(mode: str, context: int, size: Size, options: Options) -> Config:
    """The run whose step is timed.

    Raises:
        ConfigError: an unknown mode, or flags that contradict each other.
    """
    tokens = options.tokens or (context if options.sizes else 4096)
    batch = max(context, tokens) // context
    if batch % options.accumulate:
        raise ConfigError(f"--accumulate {options.accumulate}: does not divide the batch, {batch} at context {context}")
    features = "softplus" if options.sizes else None  # as published for linear GPT-2
    return Config(model=model_config(mode, context, size, dtype=options.dtype, features=features),
                  train=TrainConfig(batch_size=batch, accumulate=options.accumulate))


@functools.partial(report.Benchmark, module="benchmarks.train_step", options=Options, tables=TABLE, panels=panels,
                   title="A training step")
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    if options.peer:
        timing.share_device()
    peer = nanogpt.find(options.peer) if options.peer else None
    configs = {(name, context): {mode: make_config(mode, context, size, options) for mode in options.modes}
               for name, size in sizes(options).items() for context in options.contexts}
    if peer is not None:
        options.peer = f"nanogpt={peer.name}"  # without its folder, which does not affect the figures
    results.model = next(iter(configs.values()))[options.modes[0]].model.dtype
    predictor = timing.CostPredictor(options.seconds_per_case)
    for (name, context), modes in configs.items():
        status(f"{name or 'model'} at context {context:,} …")
        results.add(*measure(modes, name, options, predictor, peer))
    results.remarks += crossings(results.rows["rows"])


if __name__ == "__main__":
    sys.exit(main())
