"""What every attention mode shares: the q, k, v and output projections, heads, and rotary positions."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kernels import cpu
from kernels.layer_norm import Norm
from kernels.projection import project, project_each
from models.parameters import Axis, declare, own_parameters

INITIAL_SCALE = 0.02
"""Standard deviation of GPT-2's initial weights; the model scales them to its ``initial_scale``."""

DecodeState = Literal["none", "constant", "window", "growing"]


class Linear(nnx.Linear):
    """``nnx.Linear`` with GPT-2's initialisation; its output has the number format of its input."""

    exact: bool = False
    """Its weights are never kept in a shorter format than they are trained in."""

    def __init__(self, inputs: int, outputs: int, *, axes: tuple[Axis, Axis], shared: bool = False, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, kernel_init=nnx.initializers.normal(INITIAL_SCALE), rngs=rngs,
                         kernel_metadata=declare(*axes, decays=True, shared=shared),
                         bias_metadata=declare(axes[1], decays=False, shared=shared))

    def __call__(self, x: Array, onto_BTF: Array | None = None) -> Array:
        return project(x, *self.parameters, onto_BTF=onto_BTF)

    @property
    def parameters(self) -> tuple[Array, Array]:
        """Weight and bias."""
        assert self.bias is not None
        return self.kernel[...], self.bias[...]


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
    length_fields: tuple[str, ...] = ()
    """Options that count tokens, and need not be more than the sequence has."""
    implementation_fields: tuple[str, ...] = ()
    """Options that change how its function is computed, and nothing else."""
    init_from_projection: Mapping[str, str] = MappingProxyType({})
    """Projections that begin as another one's copy: taken from it where a run to begin with does not have them."""
    fixed_length: bool = False
    """It has parameters for ``max_length`` tokens, and none beyond."""
    packs_with: str | None = None
    """Flags of ``train.py`` with which it packs, where it could and does not."""
    step_kernels: tuple[str, ...] = ()
    """How the names of our GPU kernels begin that a training step of it has; ``make gpu-check`` looks for them."""
    decode_kernels: tuple[str, ...] = ()
    """The same of a token that it draws."""

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        self.config = config
        self.heads, self.head_width, self.width, self.max_length = heads, head_width, width, max_length
        self.query, self.key, self.value = (
            Linear(width, heads * head_width, axes=("width", "heads"), shared=True, rngs=rngs) for _ in range(3))
        self.output = Linear(heads * head_width, width, axes=("heads", "width"), shared=True, rngs=rngs)

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

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        """Floating-point operations of the mixing alone, forward, for ``tokens`` tokens in sequences of ``context``.

        Of a causal mask those of the pairs that are seen count, half of the square, whatever the form computes.
        """
        raise NotImplementedError(f"{self.name} defines no flops")

    def state_bytes(self, context: int) -> int:
        """Bytes per sequence, at float32, that decoding keeps after ``context`` tokens."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        """Which form computes :meth:`mix` on this device, for pages and tables; None where there is only one.

        ``segments``: whether the rows have any, or padding.
        """
        return None

    # A mode whose projections are others, or that has more to do than to mix, overrides these.

    @property
    def projections(self) -> Sequence[Linear]:
        """What the layer's input is multiplied with for :meth:`queries_keys_values`."""
        return self.query, self.key, self.value

    def queries_keys_values(self, projected: Sequence[Array], *, x_BTE: Array,
                            positions_BT: Array | None) -> tuple[Array, Array, Array]:
        """q_BTHD, k_BTHD and v_BTHD, rotated where positions are given, of the :attr:`projections` of x."""
        q_BTHD, k_BTHD, v_BTHD = map(self.split_heads, projected)
        if positions_BT is not None:
            q_BTHD, k_BTHD = rotate(q_BTHD, positions_BT), rotate(k_BTHD, positions_BT)
        return q_BTHD, k_BTHD, v_BTHD

    def attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Any, *, x_BTE: Array, causal: bool,
               positions_BT: Array | None, segment_ids_BT: Array | None,
               lengths_B: Array | None) -> tuple[Array, Any]:
        """y_BTHD and the cache: :meth:`mix` where there is no cache, else :meth:`extend`."""
        if cache is None:
            return self.mix(q_BTHD, k_BTHD, v_BTHD, x_BTE=x_BTE, causal=causal, segment_ids_BT=segment_ids_BT), None
        return self.extend(q_BTHD, k_BTHD, v_BTHD, cache, x_BTE=x_BTE, lengths_B=lengths_B)

    # The rest is shared.

    @property
    def own_parameters(self) -> int:
        """How many the mode has beside the projections that all share: :meth:`flops` counts what is done with them."""
        return own_parameters(self)

    @property
    def name(self) -> str:
        """The mode's name: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    def forward(self, x_BTE: Float[Array, "B T E"], cache: Any = None, *, norm: Norm | None = None,
                onto_BTE: Float[Array, "B T E"] | None = None, causal: bool = True,
                positions_BT: Int[Array, "B T"] | None = None, segment_ids_BT: Int[Array, "B T"] | None = None,
                lengths_B: Int[Array, " B"] | None = None) -> tuple[Float[Array, "B T E"], Any]:
        """Attention over whole sequences or, with a cache, over T more tokens of sequences whose past is in it.

        LayerNorm and residual sum are made here, so that one token takes few launches on a GPU.

        Args:
            x_BTE: the tokens.
            cache: as :meth:`init_cache` or an earlier call returned it; None: there is no past.
            norm: LayerNorm of x; None: none.
            onto_BTE: what the result is added to; None: nothing.
            causal: a token sees no later one. With a cache it never does.
            positions_BT: queries and keys are rotated by them; None: they are not.
            segment_ids_BT: of whole sequences; None: each row is one segment.
            lengths_B: with a cache, how many of the new tokens of each row enter it; None: all.

        Returns:
            The result, and the cache with the new tokens, or None.

        Raises:
            NotImplementedError: a mask, a cache or a row of several segments that the mode cannot do.
        """
        if not (self.causal if causal else self.bidirectional):
            raise NotImplementedError(f"attention mode {self.name!r} "
                                      + ("sees the whole sequence and cannot be causal" if causal else
                                         "sees the past only and cannot look in both directions"))
        if segment_ids_BT is not None and not self.packs(causal):
            self._check_segments(segment_ids_BT)
        x_BTE, projected = project_each(x_BTE, [linear.parameters for linear in self.projections], norm=norm)
        q_BTHD, k_BTHD, v_BTHD = self.queries_keys_values(projected, x_BTE=x_BTE, positions_BT=positions_BT)
        y_BTHD, cache = self.attend(q_BTHD, k_BTHD, v_BTHD, cache, x_BTE=x_BTE, causal=causal,
                                    positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, lengths_B=lengths_B)
        return self.output(y_BTHD.reshape(*x_BTE.shape[:2], -1), onto_BTE), cache

    def split_heads(self, x_BTF: Array) -> Array:
        """x_BTHD of what a projection gives."""
        return x_BTF.reshape(*x_BTF.shape[:2], self.heads, self.head_width)

    def _check_segments(self, segment_ids_BT: Array) -> None:
        """Raises where a row is not one segment and padding after it.

        Inside ``jax.jit`` ids that are arguments are not known, and the rule is the caller's to keep.
        """
        if isinstance(segment_ids_BT, Tracer):
            return
        ids_BT = np.asarray(segment_ids_BT)
        if np.any((ids_BT[:, 1:] != ids_BT[:, :-1]) & (ids_BT[:, 1:] >= 0)):
            raise NotImplementedError(f"attention mode {self.name!r} cannot keep the segments of a row apart; expected "
                                      "one in each row, and padding after it")


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
