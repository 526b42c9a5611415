"""Time to sample a token after a short and after a long text.

    python -m benchmarks.sampling --positions 1024,8192 --modes softmax,chunked --json sampling.json
    python -m benchmarks.sampling --sizes 124M,1558M --positions 1024,16384,65536,524288 --batches 1,32 --picture s.png
    python -m benchmarks.sampling --recipe configs/quickstart.py --batches 1,16 --prompt 16384 --peer transformers

The sampler is that of ``sample.py``. The models have no positions, so that no text is too long. The cache is filled
with random numbers, and no text is read. Every sample is of the same 128 tokens after the position. A size is one of
GPT-2's, with softplus features. Without ``--sizes`` the model is that of ``--width``, ``--layers``, ``--heads`` and
``--vocabulary``, or that of ``--recipe``, with its own positions. The modes and positions of a batch take turns; a case
that does not fit into memory beside the others is timed alone. Figures are medians.

``bandwidth`` is the fraction of the memory bandwidth, by data sheet, that a token needs for reading every parameter
once, in the dtype of the products, and the state or the filled keys and values of each sequence. ``× first position``
is the time over that of the same mode at the first position named. ``× first batch`` is the tokens per second over
those at the first batch named. A case that does not fit into memory is a row with ``error``.

``--prompt N`` adds, for each mode, the time to read N tokens against that to sample as many. ``--peer transformers``
times softmax GPT-2 of the same size in the package ``transformers``, which has to be installed with torch.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import picture, report, timing, transformers_gpt2
from benchmarks.recipes import recipe_model
from benchmarks.train_step import SizeOptions, model_config, sizes
from configs.schema import ModelConfig
from models.gpt import GPT
from models.parameters import count_parameters
from sampling.sampler import TOKENS_PER_CALL, DecodeState, Sampler, Sampling
from support.command import status
from support.errors import ConfigError
from support.ranges import Count
from training import accounting

CALLS_PER_SAMPLE = 4
"""Calls in a sample, without a wait between them; every sample begins at the same position."""


@dataclass(kw_only=True)
class Options(SizeOptions):
    recipe: Path | None = None
    """Recipe whose model is taken, such as configs/quickstart.py."""
    positions: tuple[Count, ...] = (128, 8192)
    """How many tokens there are before."""
    batches: tuple[Count, ...] = (1,)
    """Sequences at once."""
    prompt: Count | None = None
    """Time to read a prompt of so many tokens too."""
    peer: Literal["transformers"] | None = None
    """Time its GPT-2 too."""


@dataclass
class Row(timing.ModeRow):
    """One mode at one position; times are of a token of every sequence.

    ``ratio`` is the time over that of the mode at the first position, with the same batch.
    """

    position: int
    """Tokens before the first one sampled."""
    batch: int
    """Sequences at once."""
    size: str | None = None
    """Key of ``SIZES`` or name of the recipe; None: by the flags."""
    tokens_per_second: float | None = None
    """Of all sequences together."""
    bytes_read: int | None = None
    """Parameters and caches, read for a token of every sequence."""
    bandwidth: float | None = None
    """Share of the peak of the device; None if that is unknown."""
    batch_ratio: float | None = None
    """Tokens per second over those of the mode with the first batch, at the same position."""


TABLES = {
    "rows": report.columns(
        ("size", lambda row: row.size or "", ""), ("batch", "batch", ""), ("position", "position", ","),
        ("mode", "mode", ""), ("ms/token", "milliseconds", ".3f"), ("fastest", "fastest", ".3f"),
        ("samples", "count", ""), ("tokens/s", "tokens_per_second", ",.0f"), ("bandwidth", "bandwidth", ".1%"),
        ("× first position", "ratio", ".2f"), ("× first batch", "batch_ratio", ".2f")),
    "prompts": report.columns(
        ("size", lambda row: row["size"] or "", ""), ("mode", "mode", ""), ("prompt", "tokens", ","),
        ("s", "seconds", ".3f"), ("s one by one", "one_by_one_seconds", ".2f"), ("times as fast", "ratio", ".1f"))}


def bytes_read(model: GPT, position: int, batch: int) -> int:
    """Bytes read for a token of each of ``batch`` sequences after ``position`` tokens."""
    products = jnp.dtype(model.config.dtype).itemsize
    parameters = count_parameters(model)
    layers = jax.eval_shape(lambda: model.init_cache(1, 1)).layers
    state_bytes = 0
    for block, cache in zip(model.blocks, layers, strict=True):
        width = next(leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
                     if jnp.issubdtype(leaf.dtype, jnp.floating))
        state_bytes += block.attention.layer_state_bytes(position) * width // 4  # it counts four bytes a number
    return parameters * products + batch * state_bytes


def continuation(sampler: Sampler, position: int, *, calls: int, samples: int = 1) -> Callable[[], jax.Array]:
    """Draws after ``position`` tokens without reading any.

    The cache is filled with random numbers from 0 to 1, and its counts of tokens with ``position``. A growing cache has
    room for the sampled tokens and no more.

    Args:
        sampler: of the model.
        position: tokens before, the same in every row.
        calls: of the returned function, after which it starts at ``position`` again.
        samples: B.

    Returns:
        A function that starts to sample the next ``TOKENS_PER_CALL`` tokens of every row and returns them, (B, T),
        without waiting for the device.

    Raises:
        ConfigError: the model has no positions for so many tokens.
    """
    model, room = sampler.model, position + calls * TOKENS_PER_CALL
    if sampler.max_length is not None and sampler.max_length < room:
        raise ConfigError(f"{room:,} tokens are more than the {sampler.max_length:,} that the model has positions for")

    def fill() -> DecodeState:
        key = jax.random.key(0)
        leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: model.init_cache(samples, room)))
        filled = [jax.random.uniform(jax.random.fold_in(key, n), x.shape, x.dtype) if jnp.issubdtype(
            x.dtype, jnp.floating) else jnp.zeros(x.shape, x.dtype) for n, x in enumerate(leaves)]
        logits_BV = jax.random.normal(key, (samples, model.vocab_size))
        return back(DecodeState(logits_BV, jax.tree.unflatten(structure, filled), jnp.zeros(logits_BV.shape, bool)))

    @functools.partial(jax.jit, donate_argnums=0)
    def back(state: DecodeState) -> DecodeState:
        return jax.tree.map(lambda x: jnp.full_like(x, position) if jnp.issubdtype(x.dtype, jnp.integer) else x,
                            state)

    carry, decode = sampler.start(fill()), sampler.decoder(Sampling(), samples)
    sampled = 0

    def sample_tokens() -> jax.Array:
        nonlocal carry, sampled
        if sampled == calls:
            carry, sampled = (back(carry[0]), carry[1]), 0
        sampled += 1
        _, tokens_BT, *following = decode(*carry, TOKENS_PER_CALL)
        carry = following[0], following[1]
        return tokens_BT

    return sample_tokens


def measure(samplers: Mapping[str, Sampler], size: str | None, batch: int, options: Options) -> list[Row]:
    """The rows of a batch: all positions of the samplers, by mode, in turns."""
    def prepare(sampler: Sampler, row: Row) -> Callable[[], jax.Array]:
        timing.check_memory(row.bytes_read)
        sample_tokens = continuation(sampler, row.position, samples=batch, calls=CALLS_PER_SAMPLE)
        jax.block_until_ready(sample_tokens())
        return lambda: [sample_tokens() for _ in range(CALLS_PER_SAMPLE)][-1]

    rows = [Row(position, batch, size, mode=mode, bytes_read=bytes_read(sampler.model, position, batch))
            for position in options.positions for mode, sampler in samplers.items()]
    timing.time_cases({(row.mode, row.position): (row, functools.partial(prepare, samplers[row.mode], row))
                       for row in rows}, options.repeats, sample_seconds=0, seconds=options.seconds_per_case)
    for row in rows:
        _fill(row, [sample / 1e3 / CALLS_PER_SAMPLE / TOKENS_PER_CALL for sample in row.samples])
    return rows


def measure_prompt(sampler: Sampler, tokens: int) -> dict[str, float]:
    """Seconds to read a prompt of so many tokens through the sampler, in chunks, and to sample as many."""
    prompt_T = np.random.default_rng(0).integers(sampler.model.vocab_size, size=tokens)
    samples = timing.time_by_turns({"": lambda: sampler.encode(prompt_T, reserve=1)}, timing.LEAST_SAMPLES,
                                   sample_seconds=0)
    sampler.warm_up(1, tokens)
    reading, drawing = median(samples[""]), _sampling_seconds(sampler, tokens)
    return {"seconds": reading, "one_by_one_seconds": drawing, "ratio": drawing / reading}


def _sampling_seconds(sampler: Sampler, tokens: int) -> float:
    return timing.seconds_a_call(lambda: list(sampler.generate(
        np.zeros(1, np.int64), Sampling(), max_new_tokens=tokens)), 1)


def measure_peer(config: ModelConfig, vocabulary: int, size: str | None, batch: int, options: Options) -> list[Row]:
    """The rows of GPT-2 in ``transformers`` with the sizes of a model."""
    rows = [Row(position, batch, size, mode="transformers") for position in options.positions]
    for row in rows:
        status(f"{row.name} …")
        try:
            _fill(row, transformers_gpt2.measure(config, vocabulary, row.position, batch, options.repeats))
        except Exception as error:  # from another project
            row.error = timing.reason(error)
    return rows


def _fill(row: Row, seconds: Sequence[float]) -> None:
    if seconds:
        row.fill(seconds)
        token, peak = median(seconds), accounting.peak()
        row.tokens_per_second = row.batch / token
        row.bandwidth = timing.ratio(row.bytes_read and row.bytes_read / token, peak and peak.bandwidth)


def compare(rows: Sequence[Row]) -> None:
    """Fills in the figures relative to the first position and the first batch."""
    firsts: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        first_position = firsts.setdefault((row.size, row.mode, row.batch, "position"), row)
        row.ratio = timing.ratio(row.milliseconds, first_position.milliseconds)
        first_batch = firsts.setdefault((row.size, row.mode, row.position, "batch"), row)
        row.batch_ratio = timing.ratio(row.tokens_per_second, first_batch.tokens_per_second)


def panels(rows: Sequence[Row], _: Sequence[Any]) -> list[picture.Panel]:
    """Time of a token against position, a panel for each size and batch, with published times at batch 1."""
    found = []
    for size, batch in dict.fromkeys((row.size, row.batch) for row in rows):
        curves = picture.curves([row for row in rows if (row.size, row.batch) == (size, batch)], "mode", "position",
                                "milliseconds")
        known = picture.published("sampling", "models").get(size, {}) if batch == 1 else {}
        others = {mode: known[name] for mode in curves if (name := mode.partition(":")[0]) in known}
        found.append(picture.Panel(curves, title=f"{size or ''} batch {batch}".strip(), x="tokens before",
                                   y="milliseconds a token", published=others))
    return found


def make_configs(options: Options) -> dict[tuple[str | None, int], dict[str, ModelConfig]]:
    """The models by name of the size and vocabulary, and by mode.

    Raises:
        ConfigError: an unknown mode, or flags that contradict each other.
    """
    if options.recipe is not None:
        if options.sizes:
            raise ConfigError("--recipe and --sizes: expected one of them")
        return {(options.recipe.stem, options.vocabulary): {
            mode: recipe_model(options.recipe, mode, dtype=options.dtype) for mode in options.modes}}
    features = "softplus" if options.sizes else None  # as published for linear GPT-2
    return {(name, size.vocabulary): {
        mode: replace(model_config(mode, max(options.positions), size, dtype=options.dtype, features=features),
                      positions="none") for mode in options.modes} for name, size in sizes(options).items()}


@functools.partial(report.Benchmark, module="benchmarks.sampling", options=Options, tables=TABLES, panels=panels,
                   title="Sampling")
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    if options.peer:
        timing.share_device()
        results.origin["versions"] |= {name: version(name) for name in transformers_gpt2.PACKAGES
                                       if importlib.util.find_spec(name) is not None}
    configs = make_configs(options)
    results.model = next(iter(configs.values()))[options.modes[0]].dtype

    def add(rows: Sequence[Row]) -> None:
        compare([*results.rows["rows"], *rows])
        results.add(*rows)

    for (size, vocabulary), modes in configs.items():
        samplers = {mode: Sampler(GPT(config, vocabulary, rngs=nnx.Rngs(0))) for mode, config in modes.items()}
        for batch in options.batches:
            status(f"{size or 'model'}, batch {batch} …")
            add(measure(samplers, size, batch, options))
            if options.peer:
                add(measure_peer(next(iter(modes.values())), vocabulary, size, batch, options))
        if options.prompt is not None:
            for mode, sampler in samplers.items():
                status(f"{mode}, a prompt of {options.prompt:,} tokens …")
                results.add({"mode": mode, "tokens": options.prompt, "size": size,
                             **measure_prompt(sampler, options.prompt)}, table="prompts")


if __name__ == "__main__":
    sys.exit(main())
