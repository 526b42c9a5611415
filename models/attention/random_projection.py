"""Random directions that a mode holds and has drawn anew on a schedule."""

from collections.abc import Callable

from flax import nnx
from jax import Array, lax


class RandomProjection(nnx.Variable):
    """Random directions, which the heads of a layer share: no parameter, and drawn anew by the training step only."""

    def resample(self, step: Array, every: int, draw: Callable[[], Array]) -> None:
        """Draw them anew if it is time to, before update ``step``, from 0: every so many updates, or never if 0."""
        if every:
            last = self[...]
            self[...] = lax.cond((step > 0) & (step % every == 0), draw, lambda: last)
