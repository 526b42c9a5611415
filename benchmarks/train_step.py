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

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
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
from training.step import (
    StepMetrics,
    TrainState,
    abstract_model,
    initial_state,
    jit_step,
    make_train_step,
)

FORM_OPTIONS = ("form", "kernel")
"""What modes call the option that names how they are computed."""
HEADINGS = ("size", "context", "mode", "implementation", "ms/step", "fastest", "samples", "tokens/s", "utilisation",
            "peak MiB", "compile s", "× softmax")
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
class Row:
    """One mode at one context, as the JSON file has it; times are of a step, in milliseconds."""

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
    """As ``train.remat`` has it: what was recomputed in the backward pass to save memory."""
    flops: float | None = None
    """Floating-point operations of a step that the model asks for."""
    milliseconds: float | None = None
    """Median of the samples."""
    tokens_per_second: float | None = None
    utilisation: float | None = None
    """Share of what one device could do in the model's number format; None where its peak is not known."""
    ratio: float | None = None
    """Time of the first softmax mode at this context over the time of this one."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries of the step, as the compiler plans them."""
    compile_seconds: float | None = None
    """On a GPU with the choice of products (autotuning), unless that is cached."""
    samples: list[float] = field(default_factory=list)
    alone: bool = False
    """Timed by itself, not by turns: beside the others there was no memory for it."""
    error: str | None = None


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
        lowered = lowered_step(config, vocabulary_size)
        start = time.monotonic()
        self._compiled = lowered.compile()
        self.compile_seconds = time.monotonic() - start
        self.peak_bytes = report.peak_bytes(self._compiled)
        report.check_memory(self.peak_bytes)
        limit = report.device_memory()
        if self.peak_bytes is not None and limit is not None and self.peak_bytes > limit:
            raise MemoryError(f"needs {self.peak_bytes / 2**30:.1f} GiB, the device has {limit / 2**30:.1f}")
        self._state = like_new(initial_shapes(config, vocabulary_size))

    def __call__(self) -> StepMetrics:
        """Starts one update; its metrics."""
        self._state, metrics = self._compiled(self._state, self._batch, self._learning_rate)
        return metrics


def lowered_step(config: Config, vocabulary_size: int) -> jax.stages.Lowered:
    """The training step of a config, before it is compiled."""
    shape = config.train.batch_size, config.model.context
    batch = jax.eval_shape(lambda: Batch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32)))
    model = abstract_model(config, vocabulary_size)
    step = make_train_step(model, config, make_optimizer(config.optimizer, decay_mask(model)))
    return jit_step(step, model, deterministic=config.train.deterministic).lower(
        initial_shapes(config, vocabulary_size), batch, jax.ShapeDtypeStruct((), jnp.float32))


def initial_shapes(config: Config, vocabulary_size: int) -> TrainState:
    """The shapes of what a run begins with."""
    transform = make_optimizer(config.optimizer, decay_mask(abstract_model(config, vocabulary_size)))
    return jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform))


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


def sizes(options: argparse.Namespace) -> dict[str | None, Size]:
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


def measure(configs: dict[str, Config], vocabulary_size: int, repeats: int, *, seconds: float = CASE_SECONDS,
            remat: str = "none", size: str | None = None, before: Sequence[Row] = (),
            peers: dict[str, Callable[[], Any]] | None = None) -> list[Row]:
    """The rows of one context: every mode's step, timed by turns; those that do not fit beside others alone.

    Args:
        configs: by mode, as it was named.
        vocabulary_size: V.
        repeats: samples of each.
        seconds: about how long the samples of a mode may take: a long step has fewer; one that by ``before`` would
            take longer than that alone is not run.
        remat: as ``train.remat``, or ``auto``: the first of ``none``, ``names`` and ``block`` that fits.
        size: name of the size.
        before: rows of shorter contexts.
        peers: other people's steps, by name, timed beside ours.
    """
    rows, samples, crowded = _by_turns(configs, vocabulary_size, repeats, seconds=seconds, remat=remat, size=size,
                                       before=before, peers=peers)
    for mode in crowded:
        alone = _by_turns({mode: configs[mode]}, vocabulary_size, repeats, seconds=seconds, remat=remat, size=size)
        rows, samples = rows | alone[0], samples | alone[1]
        rows[mode].alone = True
    for name, peer in (peers or {}).items():
        if name not in samples:  # ours had no memory, which is not its fault
            samples |= report.time_by_turns({name: peer}, repeats, seconds=seconds)
            rows[name].alone = True
    softmax = next((median(samples[mode]) for mode in rows if mode in samples and mode.partition(":")[0] == "softmax"),
                   None)
    peak = accounting.peak()
    for mode, its_samples in samples.items():
        row, median_seconds = rows[mode], median(its_samples)
        row.samples = [1e3 * sample for sample in its_samples]
        row.milliseconds = 1e3 * median_seconds
        row.tokens_per_second = row.batch * row.context / median_seconds
        row.ratio = None if softmax is None else softmax / median_seconds
        limit = None if peak is None or mode not in configs else peak.flops.get(configs[mode].model.dtype)
        if limit is not None and row.flops is not None:
            row.utilisation = row.flops / median_seconds / limit
    return list(rows.values())


def _by_turns(configs: dict[str, Config], vocabulary_size: int, repeats: int, *, seconds: float, remat: str,
              size: str | None, before: Sequence[Row] = (), peers: dict[str, Callable[[], Any]] | None = None,
              ) -> tuple[dict[str, Row], dict[str, list[float]], list[str]]:
    """Rows without their times, the samples in seconds, and the modes for which there was no memory beside others."""
    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], Any]] = {}
    crowded: list[str] = []
    for mode, config in configs.items():
        row = rows[mode] = Row(mode, report.form(implementation(config, vocabulary_size)), config.model.context,
                               config.train.batch_size, size, config.train.accumulate,
                               flops=model_flops(config, vocabulary_size))
        row.error = _too_long(row, before, seconds)
        for choice in () if row.error else ("none", "names", "block") if remat == "auto" else (remat,):
            row.error, row.remat = None, choice
            try:
                steps[mode] = _ready(replace(config, train=replace(config.train, remat=choice)), vocabulary_size, row)
                break
            except NotImplementedError as error:
                row.error = str(error).partition("\n")[0]
                break
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                row.error = str(error).partition("\n")[0]
                if steps and isinstance(error, jax.errors.JaxRuntimeError):
                    crowded.append(mode)
                    break
    for name, step in (peers or {}).items():
        config = next(iter(configs.values()))
        rows[name] = Row(name, None, config.model.context, config.train.batch_size, size)
        steps[name] = step
    try:
        return rows, report.time_by_turns(steps, repeats, seconds=seconds), crowded
    except jax.errors.JaxRuntimeError as error:
        ours = [mode for mode in steps if mode in configs]
        for mode in ours:
            rows[mode].error = str(error).partition("\n")[0]
        return rows, {}, [*(ours if len(steps) > 1 else ()), *crowded]


def _ready(config: Config, vocabulary_size: int, row: Row) -> Step:
    """A step that ran once.

    Raises:
        as :class:`Step`.
    """
    step = Step(config, vocabulary_size)
    row.peak_bytes, row.compile_seconds = step.peak_bytes, step.compile_seconds
    jax.block_until_ready(step())
    return step


def _too_long(row: Row, before: Sequence[Row], seconds: float) -> str | None:
    """Why a case is not run: that the same mode at a shorter context says that a single step would take too long."""
    same = [other for other in before if (other.mode, other.size) == (row.mode, row.size) and other.milliseconds]
    if not same or row.flops is None:
        return None
    longest = max(same, key=lambda other: other.context)
    assert longest.milliseconds is not None
    assert longest.flops is not None
    predicted = longest.milliseconds / 1e3 * row.flops / longest.flops
    return None if predicted <= seconds else (
        f"a step would take about {predicted:,.0f} s, by that at {longest.context:,}: more than --seconds-per-case "
        f"{seconds:g}")


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    memory = "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}"
    compiling = "–" if row.compile_seconds is None else f"{row.compile_seconds:.0f}"
    ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
    utilisation = "–" if row.utilisation is None else f"{row.utilisation:.1%}"
    times = ("–", "–", "–", "–")
    if row.milliseconds is not None:
        times = (f"{row.milliseconds:,.1f}", f"{min(row.samples):,.1f}", str(len(row.samples)),
                 f"{row.tokens_per_second:,.0f}")
    form = "".join([row.implementation or "", f", remat {row.remat}" * (row.remat in ("block", "names")),
                    ", alone" * row.alone])
    return [row.size or "", f"{row.context:,}", row.mode, form, *times, utilisation, memory, compiling, ratio]


def draw(path: Path, rows: Sequence[Row], device: str) -> None:
    """Time of a step against context, a panel a size, with what was published of the same attention."""
    panels = []
    for size in dict.fromkeys(row.size for row in rows):
        curves: dict[str, dict[float, float | None]] = {}
        others: dict[str, picture.Curve] = {}
        known = picture.published("training_step", "models").get(size, {})
        for row in rows:
            if row.size != size:
                continue
            label = row.mode + ", interpreted" * (row.implementation or "").endswith(", interpreted")
            curves.setdefault(label, {})[row.context] = row.milliseconds
            name = "chunked" if row.mode.startswith("chunked") else row.mode
            if row.mode.startswith("softmax"):
                name = "softmax:materialised" if row.implementation == "materialised" else "softmax:cudnn"
            if name in known and known[name] not in others.values():
                others[label] = known[name]
        panels.append(picture.Panel(curves, title=size or "", x="context (tokens)", y="milliseconds a training step",
                                    published=others))
    picture.draw_panels(path, panels, title=f"A training step on {device}")


def command(arguments: Sequence[str]) -> int:
    """Measures what the flags say; returns 1 where nothing could be measured."""
    options = _options(arguments)
    report.use_whole_device()
    if options.peer:
        report.share_device()
    report.check_output(options.json)
    report.check_output(options.picture, "--picture")
    model = nanogpt.find(options.peer) if options.peer else None
    configs = {(size, context): {mode: _config(mode, context, sizes(options)[size], options)
                                 for mode in options.modes}
               for size in sizes(options) for context in options.contexts}
    python = options.peer_python or sys.executable
    if model is not None:
        # Where things lie says nothing about numbers.
        options.peer, options.peer_python = f"nanogpt={model.name}", None
    contents = report.origin("benchmarks.train_step", options)
    rows: list[Row] = []
    for (size, context), modes in configs.items():
        status(f"{size or 'model'} at context {context:,} …")
        vocabulary_size = sizes(options)[size].vocabulary
        with contextlib.ExitStack() as stack:
            peers: dict[str, Callable[[], Any]] = {}
            if model is not None:
                config = next(iter(modes.values()))
                try:
                    peers["nanogpt"] = stack.enter_context(nanogpt.Peer(
                        model, config, vocabulary_size, python))
                except nanogpt.PeerError as error:
                    rows.append(Row("nanogpt", None, context, config.train.batch_size, size, error=str(error)))
            rows += measure(modes, vocabulary_size, options.repeats, seconds=options.seconds_per_case,
                            remat=options.remat, size=size, before=rows, peers=peers)
        report.keep(options.json, contents | {"rows": [asdict(row) for row in rows]})
    if options.picture is not None and report.has_matplotlib():
        draw(options.picture, rows, contents["device"])
    print(f"{contents['device']}; {next(iter(configs.values()))[options.modes[0]].model.dtype}")
    print(report.table(HEADINGS, [cells(row) for row in rows]))
    for row in rows:
        if row.error is not None:
            status(f"{row.mode} at {row.context:,}: {row.error}")
    return 0 if any(row.error is None for row in rows) else 1


def _config(mode: str, context: int, size: Size, options: argparse.Namespace) -> Config:
    tokens = options.tokens or (context if options.sizes else 4096)
    batch = options.batch or max(context, tokens) // context
    if batch % options.accumulate:
        raise ConfigError(f"--accumulate {options.accumulate}: does not divide the batch, {batch} at context {context}")
    features = "softplus" if options.sizes else None  # as published for linear GPT-2
    return Config(model=model_config(mode, context, size, dtype=options.dtype, features=features),
                  train=TrainConfig(batch_size=batch, accumulate=options.accumulate))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = report.model_parser("benchmarks.train_step", __doc__)
    parser.add_argument("--sizes", type=report.names, help=f"GPT-2's, with commas between, of {','.join(SIZES)}")
    parser.add_argument("--contexts", type=report.positives, default=(512, 1024, 2048, 4096, 8192),
                        help="sequence lengths, with commas between (512,1024,2048,4096,8192)")
    parser.add_argument("--tokens", type=report.positive, help="tokens in a step, where the context is not longer "
                        "(4096; with --sizes one sequence)")
    parser.add_argument("--batch", type=report.positive, help="sequences in a step, in place of --tokens")
    parser.add_argument("--accumulate", type=report.positive, default=1,
                        help="parts that the batch is taken in, one after the other (%(default)s)")
    parser.add_argument("--remat", choices=("none", "names", "block", "auto"), default="auto",
                        help="as train.remat: what to recompute in the backward pass; auto: what the memory asks for")
    parser.add_argument("--seconds-per-case", type=float, default=CASE_SECONDS,
                        help="about how long the samples of a case may take (%(default)g)")
    parser.add_argument("--peer", help="nanogpt=PATH: time nanoGPT's step too")
    parser.add_argument("--peer-python", help="the Python that has torch (this one)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.train_step", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
