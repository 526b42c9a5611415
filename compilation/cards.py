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

    def seconds(self, launch: Launch) -> float:
        """Of a launch, once."""
        work = launch.work
        products = sum(count / self.operations.get(name, self.operations["f32"])
                       for name, count in work.operations.items())
        return max(work.memory / self.memory, work.moved / self.cache, products,
                   self.graph_launch if launch.in_graph else self.launch)

    def limit(self, memory: float, operations: float) -> float:
        """Least seconds of a program that reads and writes so many bytes and multiplies in bfloat16."""
        return max(memory / self.memory, operations / self.operations["bf16"])

    def __str__(self) -> str:
        return (f"{self.memory / 1e12:g} TB/s ({self.cache / 1e12:g} from the cache), "
                f"{self.operations['bf16'] / 1e12:g} TFLOP/s in bfloat16, {self.launch * 1e6:g} µs a launch "
                f"({self.graph_launch * 1e6:g} in a CUDA graph)")


RATES = {
    # Of 4.8 TB/s and 989 TFLOP/s on the data sheet, what large copies and products reach; TF32 has half the speed, and
    # three products of it a sixth. The cache: as measured on an H100.
    "h200": Rates(4.0e12, 5.5e12, {"bf16": 650e12, "f16": 650e12, "f32": 325e12, "f32x3": 325e12 / 3, "f64": 60e12},
                  3e-6, 1.5e-6),
}
"""By the name of the description in ``targets``."""


def verdict(peak: int, card_bytes: int) -> str:
    """Whether a peak fits a card."""
    if peak <= JAX_SHARE * card_bytes:
        return "fits"
    if peak <= MOST_SHARE * card_bytes:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE} in the environment"
    return "does not fit"


def verdicts(peak: int) -> str:
    """The cards by verdict, in a line."""
    cards: dict[str, list[str]] = {}
    for card, mebibytes in MEMORY.items():
        cards.setdefault(verdict(peak, mebibytes * 2**20), []).append(card)
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in cards.items())


def missing_bytes(peak: int, card: str) -> float:
    """By how much a program exceeds the memory of a card; negative if it fits."""
    return peak - MOST_SHARE * MEMORY[card] * 2**20
