"""Cards: their memory and whether a program fits it, and the rates by which the time of a program is estimated."""

from collections.abc import Mapping
from dataclasses import dataclass

from compilation.launches import Launch

MEMORY = {
    "h200": 143_771,
    "h100-80gb": 81_559,
    "a100-80gb": 81_920,
    "a100-40gb": 40_960,
    "rtx4090": 24_564,
    "l4": 23_034,
}
"""In MiB, as ``nvidia-smi`` shows it."""
TPU_MEMORY = {"v5e": 16_384}
"""In MiB, of a TPU."""
JAX_SHARE = 0.75
"""Share of the memory that jax reserves by default."""
MOST_SHARE = 0.95
"""Share that jax can reserve: the driver and the libraries need the rest."""


@dataclass(frozen=True)
class Rates:
    """What a card does in a second, and how long a launch takes."""

    memory: float
    """Bytes a second that a kernel reads or writes."""
    cache: float
    """Bytes a second from the second-level cache, where several programs of a kernel read the same."""
    operations: Mapping[str, float]
    """Operations per second of products, by dtype."""
    launch: float
    """Seconds from one launch to the next at least."""
    graph_launch: float
    """The same inside a CUDA graph."""
    clock: float | None = None
    """Cycles a second of a TPU."""

    def seconds(self, launch: Launch) -> float:
        """Of a launch, once."""
        work = launch.work
        if work.cycles is not None and self.clock is not None:
            return work.cycles / self.clock
        products = sum(count / self.operations.get(name, self.operations["f32"])
                       for name, count in work.operations.items())
        return max(work.memory / self.memory, work.moved / self.cache, products,
                   self.graph_launch if launch.in_graph else self.launch)

    def limit(self, memory: float, operations: float) -> float:
        """Least seconds of a program that reads and writes so many bytes and multiplies in bfloat16."""
        return max(memory / self.memory, operations / self.operations["bf16"])

    def __str__(self) -> str:
        if self.clock is not None:
            return (f"{self.clock / 1e9:g} GHz for the compiler's cycles, {self.memory / 1e12:g} TB/s and "
                    f"{self.operations['bf16'] / 1e12:g} TFLOP/s in bfloat16 for kernels")
        return (f"{self.memory / 1e12:g} TB/s ({self.cache / 1e12:g} from the cache), "
                f"{self.operations['bf16'] / 1e12:g} TFLOP/s in bfloat16, {self.launch * 1e6:g} µs a launch "
                f"({self.graph_launch * 1e6:g} in a CUDA graph)")


V5E_HERTZ = 1.5e9
"""Cycles a second of a v5e, by 197 TFLOP/s in four units of 128 × 128."""
RATES = {
    # Of 4.8 TB/s and 989 TFLOP/s on the data sheet, what large copies and products reach; TF32 has half the speed, and
    # three products of it a sixth. The cache: as measured on an H100.
    "h200": Rates(4.0e12, 5.5e12, {"bf16": 650e12, "f16": 650e12, "f32": 325e12, "f32x3": 325e12 / 3, "f64": 60e12},
                  3e-6, 1.5e-6),
    # Of the data sheet; a float32 product is six in bfloat16.
    "v5e": Rates(819e9, 819e9, {"bf16": 197e12, "f32": 197e12 / 6}, 0.0, 0.0, clock=V5E_HERTZ),
}
"""By name: a GPU has a description in ``targets``."""


def memory_of(card: str) -> int:
    """Bytes of memory of a card."""
    return (MEMORY | TPU_MEMORY)[card] * 2**20


def verdict(peak: int, card: str) -> str:
    """Whether a peak fits a card."""
    if peak <= (MOST_SHARE if card in TPU_MEMORY else JAX_SHARE) * memory_of(card):
        return "fits"
    if peak <= MOST_SHARE * memory_of(card):
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE} in the environment"
    return "does not fit"


def verdicts(peak: int, card: str) -> str:
    """A TPU, or all GPUs, by verdict, in a line."""
    found: dict[str, list[str]] = {}
    for name in [card] if card in TPU_MEMORY else MEMORY:
        found.setdefault(verdict(peak, name), []).append(name)
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in found.items())


def missing_bytes(peak: int, card: str) -> float:
    """By how much a program exceeds the memory of a card; negative if it fits."""
    return peak - MOST_SHARE * memory_of(card)
