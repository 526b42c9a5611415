"""Images a second, generated a pixel at a time: with a decode state, and without one.

    python -m benchmarks.images --json images.json --picture images.png
    python -m benchmarks.images --recipe configs/cifar10.py --modes linear,softmax --batches 1

The model of ``--recipe`` has random weights. A sample is a batch of whole images, from the sampler of
``sample.py``; modes take turns. Figures are medians. ``MODE:uncached`` computes the whole prefix again for each pixel.
It is timed with 32, 64, 128, … and all tokens before the pixel, without sampling it; a sample is the sum over all
pixels, interpolated linearly between those, and constant before 32 tokens.

``published`` are the images a second of "Transformers are RNNs" (Katharopoulos et al., 2020), on a GPU.
``× softmax`` is the speed relative to that of the mode ``softmax`` with the same batch.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from benchmarks import picture, report, timing
from benchmarks.recipes import recipe_model
from models.gpt import GPT
from sampling.sampler import TOKENS_PER_CALL, Sampler, Sampling
from support.command import status
from support.ranges import Count

UNCACHED = ":uncached"
"""End of a mode's name on the command line."""


@dataclass
class Row(timing.ModeRow):
    """One mode with one batch; ``milliseconds`` are of a whole batch of images, ``ratio`` relative to softmax."""

    batch: int
    """Images at once."""
    images_per_second: float | None = None
    published: float | None = None
    pixel_milliseconds: dict[int, float] = field(default_factory=dict)
    """Milliseconds for a pixel of every image, by the number of tokens before it."""


TABLE = report.columns(
    ("batch", "batch", ""), ("mode", "mode", ""), ("s/batch", lambda row: row.milliseconds and row.milliseconds / 1e3,
                                                   ".2f"),
    ("samples", "count", ""), ("images/s", "images_per_second", ".3g"),
    ("× softmax", lambda row: row.ratio and 1 / row.ratio, ".2f"), ("published images/s", "published", "g"))


def positions(context: int) -> list[int]:
    """Numbers of tokens before the pixels whose time is reported: 32, 64, 128, … and ``context``."""
    return [*(TOKENS_PER_CALL << i for i in range(context.bit_length()) if TOKENS_PER_CALL << i < context), context]


def sample_images(sampler: Sampler, batch: int) -> Float[np.ndarray, " calls"]:
    """Samples a batch of whole images and returns the seconds of each ``TOKENS_PER_CALL`` pixels."""
    clock = [time.perf_counter()]
    separator, context = sampler.model.vocab_size - 1, sampler.model.config.context
    for _ in sampler.generate(np.array([separator]), Sampling(temperature=1.0), max_new_tokens=context, samples=batch,
                              past_last=True):
        clock.append(time.perf_counter())
    return np.diff(clock)


def uncached_pixel(model: GPT, position: int, batch: int) -> Callable[[], jax.Array]:
    """A function that computes the logits of a pixel from all ``position`` tokens before it."""
    graph, state = nnx.split(model)
    tokens_BT = jnp.zeros((batch, position), jnp.int32)

    @jax.jit
    def logits(state: Any, tokens_BT: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return model.logits(model.forward(tokens_BT)[0][:, -1:])

    return lambda: logits(state, tokens_BT)


def measure(models: Mapping[str, GPT], batch: int, repeats: int, published: Mapping[str, float]) -> list[Row]:
    """The rows of a batch, from the models and the published images a second, by mode."""
    rows = {mode: Row(batch, mode=mode, published=published.get(mode)) for mode in models}
    cases: dict[Any, tuple[timing.Row, Callable[[], Callable[[], Any]]]] = {}
    calls: dict[str, list[np.ndarray]] = {mode: [] for mode in models}
    for mode, model in models.items():
        if mode.endswith(UNCACHED):
            for position in positions(model.config.context):
                cases[mode, position] = timing.Row(), functools.partial(uncached_pixel, model, position, batch)
        else:
            def prepare(model: GPT = model, seen: list[np.ndarray] = calls[mode]) -> Callable[[], None]:
                sampler = Sampler(model, excluded=model.vocab_size - 1)
                return lambda: seen.append(sample_images(sampler, batch))

            cases[mode, None] = rows[mode], prepare
    timing.time_cases(cases, repeats, sample_seconds=0)
    for mode, row in rows.items():
        context = models[mode].config.context
        if mode.endswith(UNCACHED):
            at = positions(context)
            timed = [cases[mode, position][0] for position in at]
            row.error = next((case.error for case in timed if case.error is not None), None)
            row.pixel_milliseconds = {position: case.milliseconds for position, case in zip(at, timed, strict=True)
                                      if case.milliseconds is not None}
            if row.error is None:
                row.fill([np.interp(np.arange(1, context + 1), at, milliseconds).sum() / 1e3
                          for milliseconds in zip(*(case.samples for case in timed), strict=True)])
        elif row.samples:
            seconds = np.median(calls[mode][-len(row.samples):], axis=0)
            pixels = np.minimum(TOKENS_PER_CALL, context - TOKENS_PER_CALL * np.arange(len(seconds)))
            row.pixel_milliseconds = {at: float(1e3 * (seconds / pixels)[min(at // TOKENS_PER_CALL, len(seconds) - 1)])
                                      for at in positions(context)}
        row.images_per_second = row.milliseconds and 1e3 * batch / row.milliseconds
    for row in rows.values():
        row.ratio = timing.ratio(row.milliseconds, rows["softmax"].milliseconds if "softmax" in rows else None)
    return list(rows.values())


def panels(rows: Sequence[Row]) -> list[picture.Panel]:
    """Time of a pixel against its position, a panel for each batch."""
    return [picture.Panel({row.mode: row.pixel_milliseconds for row in rows if row.batch == batch},
                          title=f"batch {batch}", x="tokens before", y="milliseconds a pixel of every image")
            for batch in dict.fromkeys(row.batch for row in rows)]


@dataclass(kw_only=True)
class Options(report.PictureOptions):
    recipe: Path = Path("configs/mnist.py")
    """Recipe of images whose model is taken."""
    modes: tuple[str, ...] = ("linear", "softmax", "softmax:uncached")
    """Attention modes, each with its form or options if need be; MODE:uncached: without a decode state."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype."""
    vocabulary: Count = 257
    """Levels of a pixel, and the separator."""
    batches: tuple[Count, ...] = (1, 16)
    """Images at once."""
    repeats: Count = 5
    """Samples of each case."""


@functools.partial(report.Benchmark, module="benchmarks.images", options=Options, tables=TABLE, panels=panels,
                   title="Images by pixels")
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    configs = {mode: recipe_model(options.recipe, mode.removesuffix(UNCACHED), dtype=options.dtype)
               for mode in options.modes}
    results.model = next(iter(configs.values())).dtype
    models = {mode: GPT(config, options.vocabulary, rngs=nnx.Rngs(0)) for mode, config in configs.items()}
    known = picture.published("images", "models").get(options.recipe.stem, {})
    for batch in options.batches:
        status(f"{options.recipe.stem}, batch {batch} …")
        results.add(*measure(models, batch, options.repeats, known))


if __name__ == "__main__":
    sys.exit(main())
