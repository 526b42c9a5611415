"""Time and memory of a training step, mode against mode: forward, backward and AdamW update, as ``train.py`` makes it.

    python -m benchmarks.train_step --contexts 512,1024,2048,4096,8192 --modes softmax,chunked --json step.json
    python -m benchmarks.train_step --sizes 124M,355M,774M,1558M --contexts 1024,8192,65536,524288 --picture step.png
    python -m benchmarks.train_step --sizes 124M --contexts 1024 --tokens 524288 --accumulate 16

A mode may carry its form: ``softmax:materialised``, ``chunked:pallas_gpu``, ``linear:recurrent``. The modes take turns
at each context, but for one that does not fit into memory beside the others ("alone"); figures are medians. A size is
one of GPT-2's, with softplus features; without ``--sizes`` the model is that of ``--width``, ``--layers``, ``--heads``
and ``--vocabulary``. ``--peer nanogpt=PATH`` times nanoGPT's own step beside ours, in this Python or, with
``--peer-python``, in another that has torch; PATH is its ``model.py``, or the folder that has it.

Utilisation is the model's floating-point operations, 6 a parameter and token and three times those of the attention's
forward pass, over what the device could do at most by its data sheet; recomputed ones do not count. The last column
says how many times as fast as the first softmax mode a mode is. The file has the table's rows with every sample, and
the device, versions, commit and command that they come from. A case that does not fit into memory, that this device
does not support, or that would take too long, is a row with ``error`` and without times.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import contextlib
import functools
import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import nanogpt, picture, report
from configs.schema import Config, ModelConfig, TrainConfig
from data.loader import Batch
from models import attention, gpt
from models.attention.self_attention import INITIAL_SCALE
from support.command import status
from support.errors import ConfigError
from training import accounting
from training.optimizer import decay_mask, make_optimizer
from training.step import StepMetrics, TrainState, abstract_model, initial_state, jit_step, make_train_step

FORM_OPTIONS = ("form", "kernel")
"""What modes call the option that names how they are computed."""
CASE_SECONDS = 60.0
"""How long the samples of a case may take, unless a flag says otherwise."""


class Size(NamedTuple):
    """What a model's speed depends on beside its context and its attention."""

    layers: int
    heads: int
    width: int
    vocabulary: int


GPT2_VOCABULARY = 50_304
"""50,257 tokens, filled up to a multiple of 64 for the device's products."""
SIZES = {
    "124M": Size(12, 12, 768, GPT2_VOCABULARY),
    "355M": Size(24, 16, 1024, GPT2_VOCABULARY),
    "774M": Size(36, 20, 1280, GPT2_VOCABULARY),
    "1558M": Size(48, 25, 1600, GPT2_VOCABULARY),
}
"""GPT-2's, by name."""


@dataclass
class Row(report.Row):
    """One mode at one context; times are of a step."""

    mode: str
    """As it was named on the command line."""
    implementation: str | None
    context: int
    batch: int
    """Sequences in a step."""
    size: str | None = None
    """Name in ``SIZES``; None: the flags'."""
    accumulate: int = 1
    """Parts that the batch was taken in."""
    remat: str | None = None
    """As ``train.remat``: what the backward pass recomputes to save memory."""
    flops: float | None = None
    """Floating-point operations of a step that the model asks for."""
    tokens_per_second: float | None = None
    utilisation: float | None = None
    """Share of what one device could do in the model's number format; None where its peak is not known."""
    ratio: float | None = None
    """Time of the first softmax mode at this context over the time of this one."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries of the step, as the compiler plans them."""
    compile_seconds: float | None = None
    """On a GPU with the choice of products (autotuning), unless that is cached."""

    @property
    def name(self) -> str:
        """Of the case."""
        return f"{self.mode} at {self.context:,}"

    @property
    def label(self) -> str:
        """Of a curve."""
        return self.mode + ", interpreted" * (self.implementation or "").endswith(", interpreted")

    @property
    def form(self) -> str:
        """How the mode was computed."""
        remat = f", remat {self.remat}" * (self.remat in ("block", "names"))
        return (self.implementation or "") + remat + ", alone" * self.alone


TABLE = report.columns(
    ("size", lambda row: row.size or "", ""), ("context", "context", ","), ("mode", "mode", ""),
    ("implementation", "form", ""), ("ms/step", "milliseconds", ",.1f"), ("fastest", "fastest", ",.1f"),
    ("samples", "count", ""), ("tokens/s", "tokens_per_second", ",.0f"), ("utilisation", "utilisation", ".1%"),
    ("peak MiB", lambda row: row.peak_bytes and row.peak_bytes / 2**20, ",.1f"),
    ("compile s", "compile_seconds", ".0f"), ("× softmax", "ratio", ".2f"))


class Step:
    """The training step of a config, compiled, on random tokens.

    Raises:
        NotImplementedError: an implementation that this device or input does not have.
        MemoryError: more memory is needed than the device has.
        jax.errors.JaxRuntimeError: the same on other devices.
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
        self.peak_bytes = report.peak_bytes(self._compiled)
        report.check_memory(self.peak_bytes)
        limit = report.device_memory()
        if self.peak_bytes is not None and limit is not None and self.peak_bytes > limit:
            raise MemoryError(f"needs {self.peak_bytes / 2**30:.1f} GiB, the device has {limit / 2**30:.1f}")
        self._state = like_new(arguments[0])

    def __call__(self) -> StepMetrics:
        """Starts one update; its metrics."""
        self._state, metrics = self._compiled(self._state, self._batch, self._learning_rate)
        return metrics


def step_and_shapes(config: Config, vocabulary_size: int) -> tuple[jax.stages.Wrapped, tuple[TrainState, Batch, Any]]:
    """The training step of a config under ``jax.jit``, and the shapes of its arguments."""
    model = abstract_model(config, vocabulary_size)
    transform = make_optimizer(config.optimizer, decay_mask(model))
    step = jit_step(make_train_step(model, config, transform), model, deterministic=config.train.deterministic)
    tokens_BT: Any = jax.ShapeDtypeStruct((config.train.batch_size, config.model.context), jnp.int32)
    state = jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform))
    return step, (state, Batch(tokens_BT, tokens_BT), jax.ShapeDtypeStruct((), jnp.float32))


def like_new(shapes: TrainState) -> TrainState:
    """A state like one at the beginning of training, drawn array by array.

    As one program it would take XLA long to compile, and the time of a step hardly depends on the numbers.
    """
    keys = (jax.random.fold_in(jax.random.key(0), number) for number in itertools.count())

    def drawn(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.tree_util.keystr(path[-1:], simple=True) == "scale":  # a LayerNorm's
            return jnp.ones(x.shape, x.dtype)
        return INITIAL_SCALE * jax.random.normal(next(keys), x.shape, x.dtype)

    def random(x: jax.ShapeDtypeStruct) -> jax.Array:
        """What a mode draws for itself, and its counts."""
        return (jax.random.normal(next(keys), x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else
                jnp.zeros(x.shape, x.dtype))

    return TrainState(jax.tree.map_with_path(drawn, shapes.parameters), jax.tree.map(random, shapes.variables),
                      jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.optimizer))


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


def sizes(options: Namespace) -> dict[str | None, Size]:
    """The sizes that the flags name, by name.

    Raises:
        ConfigError: a name that is not in ``SIZES``.
    """
    for name in options.sizes or ():
        if name not in SIZES:
            raise ConfigError(f"--sizes {name}: expected one of {', '.join(SIZES)}")
    if options.sizes is None:
        return {None: Size(options.layers, options.heads, options.width, options.vocabulary)}
    return {name: SIZES[name] for name in options.sizes}


def model_config(mode: str, context: int, size: Size, *, dtype: Any, features: str | None = None) -> ModelConfig:
    """The model of a mode and a size.

    Args:
        mode: as it is named on the command line.
        context: of the model.
        size: of the model.
        dtype: as in :class:`ModelConfig`.
        features: feature map, of a mode that has one; None, the mode's own choice.

    Raises:
        ConfigError: sizes that do not go together, or an unknown mode.
    """
    name, mode_options = mode_config(mode)
    if features is not None and hasattr(mode_options, "feature_map"):
        mode_options = replace(mode_options, feature_map=features)
    return gpt.resolve_config(ModelConfig(
        layers=size.layers, heads=size.heads, width=size.width, context=context, dtype=dtype, attention=(name,),
        modes={name: mode_options}))


def model_flops(config: Config, vocabulary_size: int) -> float:
    """Floating-point operations of a step; see :func:`training.accounting.flops_per_token`."""
    model = abstract_model(config, vocabulary_size)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    per_token = accounting.flops_per_token(config.to_dict(), {"parameters": parameters})
    assert per_token is not None  # of a mode that is here
    return per_token * config.train.batch_size * config.model.context


def implementation(config: Config, vocabulary_size: int) -> str | None:
    """Which form the first layer's attention takes on this device; None where its mode has only one."""
    model = abstract_model(config, vocabulary_size)
    return model.blocks[0].attention.implementation(jnp.dtype(model.config.dtype))


def measure(configs: Mapping[str, Config], vocabulary_size: int, repeats: int, *, seconds: float = CASE_SECONDS,
            remat: str = "none", size: str | None = None, outlook: report.Outlook | None = None,
            peers: Mapping[str, Callable[[], Callable[[], Any]]] | None = None) -> list[Row]:
    """The rows of one context: the steps of all modes, timed in turns.

    Args:
        configs: by mode, as it was named.
        vocabulary_size: V.
        repeats: samples of each.
        seconds: about how long the samples of a mode may take: a long step has fewer.
        remat: as ``train.remat``, or ``auto``: the first of ``none``, ``names`` and ``block`` that fits.
        size: name of the size.
        outlook: what shorter contexts showed.
        peers: what makes other people's steps, by name; they are timed beside ours.
    """
    outlook = outlook or report.Outlook(seconds)
    cases: dict[str, tuple[Row, Callable[[], Callable[[], Any]]]] = {}
    for mode, config in configs.items():
        row = Row(mode, report.form(implementation(config, vocabulary_size)), config.model.context,
                  config.train.batch_size, size, config.train.accumulate, flops=model_flops(config, vocabulary_size))
        row.error = outlook.refusal((size, mode), row.flops or 0)
        choices = ("none", "names", "block") if remat == "auto" else (remat,)
        cases[mode] = row, functools.partial(_prepare, config, vocabulary_size, row, choices,
                                             crowded=len(configs) + len(peers or ()) > 1)
    config = next(iter(configs.values()))
    for name, peer in (peers or {}).items():
        cases[name] = Row(name, None, config.model.context, config.train.batch_size, size), peer
    report.time_cases(cases, repeats, seconds=seconds)
    rows = {name: row for name, (row, _) in cases.items()}
    softmax = next((row.milliseconds for mode, row in rows.items()
                    if mode.partition(":")[0] == "softmax" and row.milliseconds is not None), None)
    peak = accounting.peak()
    for mode, row in rows.items():
        outlook.learn((size, mode), row.flops or 0, f"{row.context:,}", row)
        if row.milliseconds is not None:
            row.tokens_per_second = 1e3 * row.batch * row.context / row.milliseconds
            row.ratio = softmax and softmax / row.milliseconds
            most = None if peak is None or row.flops is None else peak.flops.get(config.model.dtype)
            if most is not None and row.flops is not None:
                row.utilisation = 1e3 * row.flops / row.milliseconds / most
    return list(rows.values())


def _prepare(config: Config, vocabulary_size: int, row: Row, choices: Sequence[str], crowded: bool) -> Step:
    """A step that ran once, with the first choice of what to recompute that fits.

    Raises:
        as :class:`Step`.
    """
    for choice in choices:
        try:
            step = Step(replace(config, train=replace(config.train, remat=choice)), vocabulary_size)
            jax.block_until_ready(step())
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            # Beside others there may be too little memory, and alone enough.
            if choice == choices[-1] or (crowded and not row.alone and isinstance(error, jax.errors.JaxRuntimeError)):
                raise
        else:
            row.remat, row.peak_bytes, row.compile_seconds = choice, step.peak_bytes, step.compile_seconds
            return step
    raise AssertionError


def panels(rows: Sequence[Row]) -> list[picture.Panel]:
    """Time of a step against context, a panel a size, with what was published of the same attention."""
    found = []
    for size in dict.fromkeys(row.size for row in rows):
        others: dict[str, picture.Curve] = {}
        known = picture.published("training_step", "models").get(size, {})
        of_size = [row for row in rows if row.size == size]
        for row in of_size:
            name = row.mode.partition(":")[0]
            if name == "softmax":
                name += ":materialised" if row.implementation == "materialised" else ":cudnn"
            if name in known and known[name] not in others.values():
                others[row.label] = known[name]
        found.append(picture.Panel(picture.curves(of_size, "label", "context", "milliseconds"), title=size or "",
                                   x="context (tokens)", y="milliseconds a training step", published=others))
    return found


def make_config(mode: str, context: int, size: Size, options: Namespace) -> Config:
    """The run whose step is timed.

    Raises:
        ConfigError: an unknown mode, or flags that do not go together.
    """
    tokens = options.tokens or (context if options.sizes else 4096)
    batch = options.batch or max(context, tokens) // context
    if batch % options.accumulate:
        raise ConfigError(f"--accumulate {options.accumulate}: does not divide the batch, {batch} at context {context}")
    features = "softplus" if options.sizes else None  # as published for linear GPT-2
    return Config(model=model_config(mode, context, size, dtype=options.dtype, features=features),
                  train=TrainConfig(batch_size=batch, accumulate=options.accumulate))


SIZE_FLAGS = report.model_flags() | {
    "sizes": report.flag(f"GPT-2's, with commas between, of {','.join(SIZES)}", type=report.names),
    "seconds-per-case": report.flag("about how long the samples of a case may take", CASE_SECONDS),
    "peer-python": report.flag("the Python that has the packages of --peer (this one)")}
"""Those of ``benchmarks.sampling`` too."""


@functools.partial(
    report.Benchmark, module="benchmarks.train_step", tables=TABLE, panels=panels, title="A training step",
    flags=SIZE_FLAGS | {
        "contexts": report.flag("sequence lengths, with commas between", (512, 1024, 2048, 4096, 8192)),
        "tokens": report.flag("tokens in a step, where the context is not longer (4096; with --sizes one sequence)",
                              type=report.positive),
        "batch": report.flag("sequences in a step, in place of --tokens", type=report.positive),
        "accumulate": report.flag("parts that the batch is taken in, one after the other", 1),
        "remat": report.flag("as train.remat: what to recompute in the backward pass; auto: what the memory asks for",
                             "auto", choices=("none", "names", "block", "auto")),
        "peer": report.flag("nanogpt=PATH: time nanoGPT's step too")})
def main(options: Namespace, results: report.Results) -> None:
    """The modes take turns at every size and context."""
    report.use_whole_device()
    if options.peer:
        report.share_device()
    model = nanogpt.find(options.peer) if options.peer else None
    configs = {(size, context): {mode: make_config(mode, context, sizes(options)[size], options)
                                 for mode in options.modes}
               for size in sizes(options) for context in options.contexts}
    python = options.peer_python or sys.executable
    if model is not None:
        # Where things lie says nothing about numbers.
        options.peer, options.peer_python = f"nanogpt={model.name}", None
    results.model = next(iter(configs.values()))[options.modes[0]].model.dtype
    outlook = report.Outlook(options.seconds_per_case)
    for (size, context), modes in configs.items():
        status(f"{size or 'model'} at context {context:,} …")
        vocabulary_size = sizes(options)[size].vocabulary
        with contextlib.nullcontext() if model is None else nanogpt.Peer(
                model, modes[options.modes[0]], vocabulary_size, python) as peer:
            results.add(*measure(
                modes, vocabulary_size, options.repeats, seconds=options.seconds_per_case, remat=options.remat,
                size=size, outlook=outlook, peers={} if peer is None else {"nanogpt": peer.start}))


if __name__ == "__main__":
    sys.exit(main())
