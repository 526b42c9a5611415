"""Random directions of a mode, redrawn on a schedule."""

from collections.abc import Callable

from flax import nnx
from jax import Array, lax


class RandomProjection(nnx.Variable):
    """Random directions shared by the heads of a layer. Not a parameter; only the training step redraws them."""

    def resample(self, step: Array, every: int, make: Callable[[], Array]) -> None:
        """Redraw the directions before update ``step``, counted from 0, if it is a multiple of ``every``; 0: never."""
        if every:
            last = self[...]
            self[...] = lax.cond((step > 0) & (step % every == 0), make, lambda: last)
