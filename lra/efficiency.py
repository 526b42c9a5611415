"""Speed and memory of every attention on byte text: one case in a process of its own, for ``lra.table efficiency``.

A case is a classifier of Long Range Arena's byte-level text, at one length: forward pass, backward pass and AdamW
update on random bytes. Memory is what the compiler plans for arguments, outputs and temporaries, the same in every run;
time is the median of steps after three that warm up.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import functools
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

from benchmarks import report
from configs.schema import EncoderConfig, OptimizerConfig
from models import attention
from models.encoder import Classifier, resolve_config
from support.errors import ConfigError
from training.optimizer import decay_mask, make_optimizer
from training.step import StepMetrics, jit_step, make_update, state_of

MODULE = "lra.efficiency"
BYTES = 257
"""Vocabulary of byte text: 0 is padding."""
WARM_UP_STEPS = 3


class Shape(NamedTuple):
    """A model's sizes, in Long Range Arena's terms."""

    layers: int
    heads: int
    width: int
    mlp_width: int
    batch: int


SHAPES = {"paper": Shape(6, 8, 512, 2048, 32), "released": Shape(4, 4, 256, 1024, 32)}
"""Of the byte-level text task: the paper's appendix, and the configuration in the released code."""

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"block_size": 50},
    "sparse": {"block_size": 50, "summary": 10},
    "performer": {"features": None},
}
"""Options of modes where Long Range Arena's differ from the modes' own; features None: as many as a head is wide."""


@functools.cache
def table_rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Rows of the table: mode and options. Softmax with all its scores, then every mode that an encoder can have.

    ``softmax`` is fused: cuDNN's kernel on a GPU, elsewhere ours.
    """
    found = attention.encoder_modes()
    first = sorted(found, key=lambda mode: (mode != "softmax", mode))
    return {"softmax:materialised": ("softmax", {"form": "materialised"})} | {
        mode: (mode, OPTIONS.get(mode, {})) for mode in first}


@dataclass(frozen=True)
class Case:
    """One row of the table at one length."""

    row: str
    """Name in :func:`table_rows`."""
    tokens: int
    """T, the CLS token not counted."""
    shape: str = "paper"
    """Name in ``SHAPES``."""
    layers: int | None = None
    """In place of the shape's."""
    batch: int | None = None
    """In place of the shape's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int = 20
    """Steps that are timed."""
    seconds: float = 60.0
    """About how long they may take: slow ones are fewer, three at least."""
    memory_only: bool = False
    """Compile, and run nothing."""

    def config(self) -> EncoderConfig:
        """The classifier.

        Raises:
            ConfigError: no such row or shape, or sizes that do not go together.
        """
        for what, name, known in (("--rows", self.row, table_rows()), ("--shape", self.shape, SHAPES)):
            if name not in known:
                raise ConfigError(f"{what} {name}: expected one of {', '.join(known)}")
        shape, (mode, options) = SHAPES[self.shape], table_rows()[self.row]
        head_width = shape.width // shape.heads
        options = {name: head_width if name == "features" and value is None else value
                   for name, value in options.items()}
        return resolve_config(EncoderConfig(
            layers=self.layers or shape.layers, heads=shape.heads, width=shape.width, mlp_width=shape.mlp_width,
            pooling="mean" if attention.load(mode).Attention.block_diagonal else "cls",  # CLS would see its own block
            context=self.tokens, classes=2, dtype=self.dtype, attention=(mode,), modes={mode: options}))


@dataclass(frozen=True)
class Result(Case):
    """A case and what was measured of it; times are in seconds."""

    sequences: int = 0
    """In a step."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries, as the compiler plans them."""
    device_peak_bytes: int | None = None
    """Peak of the device's allocator; None on a CPU."""
    resident_bytes: int | None = None
    """Peak resident size of the process, interpreter and compiler included; only on a CPU."""
    steps_per_second: float | None = None
    """Of the median step."""
    quartiles: tuple[float, float] | None = None
    """Seconds of the step a quarter of the way from the fastest, and from the slowest."""
    samples: list[float] = field(default_factory=list)
    error: str | None = None
    """Out of memory is a result."""


class Examples(NamedTuple):
    """A batch of byte texts."""

    tokens_BT: Int[Array, "B T"]
    labels_B: Int[Array, " B"]


def loss_sum(model: Classifier, batch: Examples, _: Array) -> tuple[Array, Array]:
    """The sum of cross-entropies in nats, and of how many examples."""
    losses_B = optax.softmax_cross_entropy_with_integer_labels(model.forward(batch.tokens_BT), batch.labels_B)
    return losses_B.sum(), jnp.int32(len(losses_B))


def compiled_step(config: EncoderConfig, batch: int) -> tuple[Any, Any, Examples]:
    """The training step, compiled; its initial state, to be called for; a batch of random bytes."""
    model = nnx.eval_shape(lambda: Classifier(config, BYTES, rngs=nnx.Rngs(0)))
    transform = make_optimizer(OptimizerConfig(), decay_mask(model))

    def initial() -> Any:
        return state_of(Classifier(config, BYTES, rngs=nnx.Rngs(0)), transform)

    random = np.random.default_rng(0)
    examples = Examples(jnp.asarray(random.integers(1, BYTES, (batch, config.context), dtype=np.int32)),
                        jnp.asarray(random.integers(0, 2, batch, dtype=np.int32)))
    step = jit_step(make_update(model, loss_sum, transform, seed=0), model)
    compiled = step.lower(jax.eval_shape(initial), examples, jnp.float32(1e-3)).compile()
    return compiled, jax.jit(initial), examples


def measure(case: Case) -> Result:
    """Compile a case, run it, and say what it took. What does not fit has its planned memory, and an ``error``.

    Raises:
        ConfigError: as :meth:`Case.config`.
    """
    config = case.config()
    sequences = case.batch or SHAPES[case.shape].batch
    given: dict[str, Any] = asdict(case) | {"sequences": sequences}
    compiled, initial, examples = compiled_step(config, sequences)
    planned = report.peak_bytes(compiled)
    if case.memory_only:
        return Result(**given, peak_bytes=planned)
    try:
        report.check_memory(planned)
        samples = _time_steps(compiled, initial(), examples, case)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return Result(**given, peak_bytes=planned, error=f"{type(error).__name__}: {error}".partition("\n")[0])
    low, middle, high = (float(x) for x in np.quantile(samples, (0.25, 0.5, 0.75)))
    stats = jax.devices()[0].memory_stats() or {}
    on_cpu = jax.default_backend() == "cpu"
    return Result(**given, peak_bytes=planned, device_peak_bytes=stats.get("peak_bytes_in_use"),
                  resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if on_cpu else None,
                  steps_per_second=1 / middle, quartiles=(low, high), samples=samples)


def _time_steps(compiled: Any, state: Any, examples: Examples, case: Case) -> list[float]:
    def step(state: Any) -> tuple[Any, StepMetrics]:
        return jax.block_until_ready(compiled(state, examples, jnp.float32(1e-3)))

    took = 0.0
    for _ in range(WARM_UP_STEPS):
        start = time.perf_counter()
        state, metrics = step(state)
        took = time.perf_counter() - start
        if not np.isfinite(metrics.loss):
            raise FloatingPointError(f"the loss is {metrics.loss}")
    samples = []
    for _ in range(min(case.steps, max(report.LEAST_SAMPLES, int(case.seconds / max(took, 1e-6))))):
        start = time.perf_counter()
        state, _ = step(state)
        samples.append(time.perf_counter() - start)
    return samples


def in_process(case: Case, limit: float) -> Result:
    """:func:`measure` in a process of its own that may take ``limit`` seconds; what goes wrong is in ``error``."""
    found: dict[str, Any] = {"sequences": case.batch or SHAPES[case.shape].batch} | asdict(case)
    measured = report.in_process(MODULE, asdict(case), limit)
    if "peak_bytes" not in measured and not case.memory_only:  # too long, or killed: what was planned tells the memory
        planned = report.in_process(MODULE, asdict(replace(case, memory_only=True)), limit)
        found["peak_bytes"] = planned.get("peak_bytes")
    return Result(**found | measured)


def command(arguments: Sequence[str]) -> None:
    """The process of one case."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--case", required=True, type=json.loads, help="a case, as JSON")
    case: Mapping[str, Any] = parser.parse_args(arguments).case
    print(json.dumps(asdict(measure(Case(**case)))))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark(MODULE, command, arguments)


if __name__ == "__main__":
    sys.exit(main())
