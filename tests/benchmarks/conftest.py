"""The setting of every test of the benchmarks."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def allow_rank_promotion() -> Iterator[None]:
    """Flax adds biases of one dimension to its projections."""
    with jax.numpy_rank_promotion("allow"):
        yield
