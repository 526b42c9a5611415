"""What every attention mode shares: the q, k, v and output projections, heads, and rotary positions."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels import cpu
from kernels.layer_norm import Norm, normed
from kernels.projection import project, project_each

INITIAL_SCALE = 0.02
"""Standard deviation of GPT-2's initial weights; the model scales them to its ``initial_scale``."""

DecodeState = Literal["none", "constant", "window", "growing"]


class Linear(nnx.Linear):
    """``nnx.Linear`` with GPT-2's initialisation; its output has the number format of its input."""

    exact: bool = False
    """Its weights are never kept in a shorter format than they are trained in."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, kernel_init=nnx.initializers.normal(INITIAL_SCALE), rngs=rngs)

    def __call__(self, x: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return project(x, *self.parameters)

    @property
    def parameters(self) -> tuple[Array, Array]:
        """Weight and bias."""
        assert self.bias is not None
        return self.kernel[...], self.bias[...]


def project_with(linears: Sequence[Linear], x: Array, *, norm: Norm | None = None,
                 activation: Callable[[Array], Array] | None = None, onto_BTF: Array | None = None) -> list[Array]:
    """:func:`project_each` with the weights and biases of these."""
    parameters = [linear.parameters for linear in linears]
    return project_each(x, *zip(*parameters, strict=True), norm=norm, activation=activation, onto_BTF=onto_BTF)


class SelfAttention(nnx.Module):
    """Multi-head self-attention around a mode's :meth:`mix`.

    A mode is a subclass named ``Attention`` in a file of its own.

    Args:
        config: the mode's own ``Config``.
        heads: H.
        head_width: D.
        width: E.
        max_length: the longest sequence the model is made for.
        rngs: a stream forked for this module alone, so that what modes share starts equal in all of them.
    """

    causal: bool = True
    """It can see the past only."""
    bidirectional: bool = False
    """It can see the whole sequence."""
    decode_state: DecodeState = "none"
    """How what decoding keeps grows with the tokens seen; none: the mode has no cached decode."""
    prefix_exact: bool = True
    """An output never depends on later tokens, not even through bucketing."""
    block_diagonal: bool = False
    """It cuts a sequence into parts that never see each other, in however many layers."""
    implementation_fields: tuple[str, ...] = ()
    """Options that change how its function is computed, and nothing else."""
    init_from_projection: Mapping[str, str] = MappingProxyType({})
    """Projections that begin as another one's copy: taken from it where a run to begin with does not have them."""
    fixed_length: bool = False
    """It has parameters for ``max_length`` tokens, and none beyond."""
    packs_with: str | None = None
    """Flags of ``train.py`` with which it packs, where it could and does not."""

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        self.config = config
        self.heads, self.head_width, self.width, self.max_length = heads, head_width, width, max_length
        self.query = Linear(width, heads * head_width, rngs=rngs)
        self.key = Linear(width, heads * head_width, rngs=rngs)
        self.value = Linear(width, heads * head_width, rngs=rngs)
        self.output = Linear(heads * head_width, width, rngs=rngs)

    def packs(self, causal: bool) -> bool:
        """Whether segments can stand side by side in a row; where not, a row is one segment, and padding after it."""
        return True

    # A mode defines these.

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        """Attention over a whole sequence: y_BTHD."""
        raise NotImplementedError(f"{self.name} defines no mix")

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Any:
        """What decoding keeps, a pytree, before the first token."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Any, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Any]:
        """T more tokens, of which the first ``lengths_B`` of each row enter the cache: y_BTHD and the cache."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def flops(self, tokens: int, context: int) -> int:
        """Floating-point operations of the mixing alone, forward, for ``tokens`` tokens in sequences of ``context``."""
        raise NotImplementedError(f"{self.name} defines no flops")

    def state_bytes(self, context: int) -> int:
        """Bytes per sequence, at float32, that decoding keeps after ``context`` tokens."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        """Which form computes :meth:`mix` on this device, for pages and tables; None where there is only one.

        ``segments``: whether the rows have any, or padding.
        """
        return None

    # The rest is shared.

    @property
    def own_parameters(self) -> int:
        """How many the mode has beside the projections that all share: :meth:`flops` counts what is done with them."""
        shared = ("query", "key", "value", "output")
        return sum(leaf.size for path, leaf in nnx.to_flat_state(nnx.state(self, nnx.Param)) if path[0] not in shared)

    @property
    def name(self) -> str:
        """The mode's name: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    def __call__(self, x_BTE: Float[Array, "B T E"], *, causal: bool = True,
                 positions_BT: Int[Array, "B T"] | None = None,
                 segment_ids_BT: Int[Array, "B T"] | None = None) -> Float[Array, "B T E"]:
        """Attention over a whole sequence; queries and keys are rotated where ``positions_BT`` is given.

        Raises:
            NotImplementedError: a mask that the mode cannot do.
        """
        if not (self.causal if causal else self.bidirectional):
            raise NotImplementedError(f"attention mode {self.name!r} "
                                      + ("sees the whole sequence and cannot be causal" if causal else
                                         "sees the past only and cannot look in both directions"))
        q_BTHD, k_BTHD, v_BTHD = self.project(x_BTE, positions_BT)
        y_BTHD = self.mix(q_BTHD, k_BTHD, v_BTHD, x_BTE=x_BTE, causal=causal, segment_ids_BT=segment_ids_BT)
        return self.output(y_BTHD.reshape(*x_BTE.shape[:2], -1))

    def decode(self, x_BTE: Float[Array, "B T E"], cache: Any, *, norm: Norm | None = None,
               onto_BTE: Float[Array, "B T E"] | None = None, positions_BT: Int[Array, "B T"] | None = None,
               lengths_B: Int[Array, " B"] | None = None) -> tuple[Float[Array, "B T E"], Any]:
        """T more tokens of sequences whose past is in ``cache``: of norm(x), added to ``onto``, where these are given.

        Block and attention are not told apart here, so that one token takes few launches on a GPU.
        """
        if type(self).project is SelfAttention.project:
            q_BTHD, k_BTHD, v_BTHD = self._heads_of(
                project_with((self.query, self.key, self.value), x_BTE, norm=norm), positions_BT)
        else:
            q_BTHD, k_BTHD, v_BTHD = self.project(normed(x_BTE, norm), positions_BT)
        y_BTHD, cache = self.extend(q_BTHD, k_BTHD, v_BTHD, cache, x_BTE=normed(x_BTE, norm), lengths_B=lengths_B)
        y_BTF = y_BTHD.reshape(*x_BTE.shape[:2], -1)
        return project_with([self.output], y_BTF, onto_BTF=onto_BTE)[0], cache

    def project(self, x_BTE: Array, positions_BT: Array | None) -> tuple[Array, Array, Array]:
        """q_BTHD, k_BTHD and v_BTHD, rotated where positions are given."""
        return self._heads_of([linear(x_BTE) for linear in (self.query, self.key, self.value)], positions_BT)

    def _heads_of(self, projected: Sequence[Array], positions_BT: Array | None) -> tuple[Array, Array, Array]:
        q_BTHD, k_BTHD, v_BTHD = (y_BTF.reshape(*y_BTF.shape[:2], self.heads, self.head_width) for y_BTF in projected)
        if positions_BT is not None:
            q_BTHD, k_BTHD = rotate(q_BTHD, positions_BT), rotate(k_BTHD, positions_BT)
        return q_BTHD, k_BTHD, v_BTHD


def rotate(x_BTHD: Float[Array, "B T H D"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T H D"]:
    """Rotary positions, D even: pairs (x_d, x_{d + D/2}) turned by t · 10000^(−2d/D). Su et al., "RoFormer", 2021.

    t is below 2^32, int32 that has run over included.
    """
    half = x_BTHD.shape[-1] // 2
    angle_BTHD = angles(positions_BT, half)[:, :, None]
    cos_BTHD, sin_BTHD = cpu.compute_once((jnp.cos(angle_BTHD), jnp.sin(angle_BTHD)))  # and not in every head
    a, b = x_BTHD[..., :half].astype(jnp.float32), x_BTHD[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos_BTHD - b * sin_BTHD, a * sin_BTHD + b * cos_BTHD], axis=-1).astype(x_BTHD.dtype)


def angles(positions_BT: Int[Array, "B T"], pairs: int) -> Float[Array, "B T D"]:
    """t · 10000^(−d/pairs) for d below ``pairs``, from −π to π, to 1e-6 at any t.

    float32 could not hold the product: at position 10^7 it is off by a radian. Here angles are whole numbers, 2^32 to a
    turn, whose overflow leaves out whole turns. A position is taken byte by byte, or the rounding of the rate to such a
    number would grow with it.
    """
    turns_D = 10_000.0 ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    t_BT1 = positions_BT.astype(jnp.uint32)[..., None]
    angle_BTD = jnp.zeros((*positions_BT.shape, pairs), jnp.uint32)
    for shift in (0, 8, 16, 24):
        rate_D = np.round(turns_D * 2.0**shift % 1 * 2**32).astype(np.uint64).astype(np.uint32)
        angle_BTD += (t_BT1 >> shift & 255) * rate_D[None, None]
    return jax.lax.bitcast_convert_type(angle_BTD, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
