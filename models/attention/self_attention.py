"""Base class of attention modes: projections, heads, rotary positions, and ``LayerOptions``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels import cpu
from kernels.gated_norm import gated_norm, gated_norm_wide, rms_norm
from kernels.head_tiles import has_tiles
from kernels.layer_norm import Norm, Sum
from kernels.mixed_precision import wide
from kernels.projection import project, project_each
from kernels.recurrent_step import Computed, Input, Step, has_kernel
from kernels.segments import Order
from kernels.short_convolution import (
    convolve_heads,
    convolve_token,
    has_sequence_kernel,
    has_token_kernel,
    short_convolution,
)
from models.attention.layer_options import layer_options
from models.parameters import Axis, declare, own_parameters

INITIAL_SCALE = 0.02
"""Standard deviation of GPT-2's initial weights; models rescale them to ``initial_scale``."""

DecodeState = Literal["none", "constant", "window", "growing"]

FIRST_BIAS = {"sigmoid": 0.0, "silu": 1.2784645}
"""Initial bias of an output gate, at which it is 1: 2 sigmoid(0), silu(1.278…)."""


class Linear(nnx.Linear):
    """``nnx.Linear`` with GPT-2's initialisation; its output has the dtype of its input."""

    exact: bool = False
    """Never store its weights in a lower precision."""
    transposed: bool = False
    """The weight is stored as (F, E)."""

    def __init__(self, inputs: int, outputs: int, *, axes: tuple[Axis, Axis], shared: bool = False, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, kernel_init=nnx.initializers.normal(INITIAL_SCALE), rngs=rngs,
                         kernel_metadata=declare(*axes, decays=True, shared=shared),
                         bias_metadata=declare(axes[1], decays=False, shared=shared))

    def __call__(self, x: Array, onto_BTF: Array | None = None) -> Any:
        return project(x, *self.parameters, onto_BTF=onto_BTF)

    @property
    def parameters(self) -> tuple[Array, Array]:
        """Weight, (E, F), and bias."""
        assert self.bias is not None
        w = self.kernel[...]
        return w.T if self.transposed else w, self.bias[...]


class LayerCache(NamedTuple):
    """Cache of a layer with a short convolution."""

    mode: Any
    """The mode's own cache."""
    inputs_BPF: tuple[Array, ...]
    """The last P = K − 1 valid inputs of the convolution of each projection."""


class SelfAttention(nnx.Module):
    """Multi-head self-attention around a mode's :meth:`mix`.

    A mode is a subclass named ``Attention`` in its own file.

    Args:
        config: the mode's ``Config``.
        heads: H.
        head_width: D.
        width: E.
        max_length: maximum sequence length.
        rngs: a stream forked for this module, so that shared parameters start equal in all modes.
    """

    causal: bool = True
    """Whether the mode can be causal."""
    bidirectional: bool = False
    """Whether the mode can be bidirectional."""
    decode_state: DecodeState = "none"
    """Growth of the decode state with the number of tokens; none: the mode has no cached decode."""
    prefix_exact: bool = True
    """An output never depends on later tokens, not even through bucketing."""
    rotary: bool = True
    """Whether queries and keys are rotated, if the model's positions are rotary."""
    block_diagonal: bool = False
    """Whether a sequence splits into parts that never attend to each other, in any number of layers."""
    counts_places: bool = False
    """Whether :meth:`attend` counts places in a row rather than tokens. It then gets rows with all padding at the
    end."""
    length_fields: tuple[str, ...] = ()
    """Options that count tokens and are limited to the context."""
    implementation_fields: tuple[str, ...] = ()
    """Options that change only the implementation."""
    init_from_projection: Mapping[str, str] = MappingProxyType({})
    """Projections initialised as a copy of another one, also with ``--init-from`` a run without them."""
    fixed_length: bool = False
    """Whether the mode has parameters for exactly ``max_length`` tokens."""
    splits_context: bool = False
    """Whether devices that share a sequence (``mesh.context``) exchange as much at any context, if causal. Otherwise
    they gather the sequence in each layer."""
    step_kernels: tuple[str, ...] = ()
    """Name prefixes of the GPU kernels in a training step, for ``make gpu-check``."""
    decode_kernels: tuple[str, ...] = ()
    """Name prefixes of the GPU kernels in a decoding step."""
    recurrent: bool = False
    """Whether the mode has :meth:`step`."""

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        self.config = config
        self.heads, self.head_width, self.width, self.max_length = heads, head_width, width, max_length
        self.query, self.key, self.value = (
            Linear(width, heads * head_width, axes=("width", "heads"), shared=True, rngs=rngs) for _ in range(3))
        self.output = Linear(heads * head_width, width, axes=("heads", "width"), shared=True, rngs=rngs)
        parts = self.parts = layer_options(config)
        if parts.short_conv:
            # Initialised as the identity: the last tap is the token's own.
            first_KF = jnp.zeros((parts.short_conv, heads * head_width)).at[-1].set(1)
            self.query_taps_KF, self.key_taps_KF, self.value_taps_KF = (
                nnx.Param(first_KF + 0, **declare(None, "heads", decays=False)) for _ in range(3))
        if parts.output_norm != "none":
            self.output_scale_HD = nnx.Param(jnp.ones((heads, head_width)), **declare("heads", None, decays=False))
        if parts.output_gate != "none":
            self.gate = Linear(width, heads * head_width, axes=("width", "heads"), rngs=rngs)
            # Initialised as a factor of 1: random gates take hundreds of steps to open.
            assert self.gate.bias is not None
            self.gate.kernel[...] = jnp.zeros_like(self.gate.kernel[...])
            self.gate.bias[...] = jnp.full_like(self.gate.bias[...], FIRST_BIAS[parts.output_gate])

    def packs(self, causal: bool) -> bool:
        """Whether a row may have several segments; if not, a row is one segment followed by padding."""
        return True

    # Defined by modes.

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        """Attention over a whole sequence: y_BTHD."""
        raise NotImplementedError(f"{self.name} defines no mix")

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Any:
        """The empty decode state, a pytree."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Any, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Any]:
        """Attention of T more tokens, of which the first ``lengths_B`` of each row enter the cache: y_BTHD, cache."""
        raise NotImplementedError(f"attention mode {self.name!r} has no cached decode")

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        """Floating-point operations of :meth:`mix`, forward, for ``tokens`` tokens in sequences of ``context``.

        With a causal mask only visible pairs count, half of the square, whatever the form computes.
        """
        raise NotImplementedError(f"{self.name} defines no flops")

    def state_bytes(self, context: int) -> int:
        """Size of the decode state per sequence after ``context`` tokens, in bytes at float32."""
        missing = "has no cached decode" if self.decode_state == "none" else "does not define state_bytes"
        raise NotImplementedError(f"attention mode {self.name!r} {missing}")

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        """Name of the form that computes :meth:`mix` on this device, for reports; None if there is only one.

        ``segments``: whether rows have several segments or padding.
        """
        return None

    # Optional for modes with a state of constant size: few launches for a token on a GPU.

    @property
    def step_gates(self) -> Sequence[Linear]:
        """Projections of the layer's input to one number a head, whose results :meth:`step` takes."""
        return ()

    def step(self, q: Input, k: Input, v: Input, cache: Any, gates: Sequence[Array],
             output: Computed | None) -> tuple[Step, Any]:
        """:meth:`extend` by one token that enters the cache in every row, with the layer's convolution, activation,
        norms and output gate, by :func:`kernels.recurrent_step.recurrent_step`.

        Args:
            q, k, v: results of the projections, and what precedes the mode.
            cache: the mode's own.
            gates: results of :attr:`step_gates`, (B, 1, H), float32.
            output: what follows the mode.

        Returns:
            The step, and the mode's new cache.
        """
        raise NotImplementedError(f"{self.name} defines no step")

    # Overridden by modes with other projections, or with more than ``mix``.

    @property
    def projections(self) -> Sequence[Linear]:
        """The projections of the layer's input, for :meth:`queries_keys_values`."""
        return self.query, self.key, self.value

    def queries_keys_values(self, projected: Sequence[Array], *, x_BTE: Array,
                            positions_BT: Array | None) -> tuple[Array, Array, Array]:
        """q_BTHD, k_BTHD and v_BTHD from the :attr:`projections` of x, after convolution, activation and norm; rotated
        if positions are given."""
        q_BTHD, k_BTHD, v_BTHD = map(self.split_heads, projected)
        if positions_BT is not None:
            q_BTHD, k_BTHD = rotate(q_BTHD, positions_BT), rotate(k_BTHD, positions_BT)
        return q_BTHD, k_BTHD, v_BTHD

    def attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Any, *, x_BTE: Array, causal: bool,
               positions_BT: Array | None, segment_ids_BT: Array | None,
               lengths_B: Array | None) -> tuple[Array, Any]:
        """y_BTHD and the cache: :meth:`mix` without a cache, else :meth:`extend`."""
        if cache is None:
            return self.mix(q_BTHD, k_BTHD, v_BTHD, x_BTE=x_BTE, causal=causal, segment_ids_BT=segment_ids_BT), None
        return self.extend(q_BTHD, k_BTHD, v_BTHD, cache, x_BTE=x_BTE, lengths_B=lengths_B)

    # Shared by all modes.

    @property
    def own_parameters(self) -> int:
        """Number of parameters besides the shared projections; :meth:`flops` counts their operations."""
        return own_parameters(self)

    def layer_cache(self, batch: int, max_length: int, dtype: Any) -> Any:
        """The empty cache of :meth:`forward`: the mode's cache and that of a short convolution, if any."""
        cache, K = self.init_cache(batch, max_length, dtype), self.parts.short_conv
        if not K:
            return cache
        width = self.heads * self.head_width
        return LayerCache(cache, tuple(jnp.zeros((batch, K - 1, width), dtype) for _ in self.projections))

    def layer_flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        """:meth:`flops`, including convolution and output gate."""
        width, parts = self.heads * self.head_width, self.parts
        gate = 2 * self.width * width if parts.output_gate != "none" else 0
        return (self.flops(tokens, context, causal=causal)
                + tokens * (gate + 2 * parts.short_conv * len(self.projections) * width))

    def layer_state_bytes(self, context: int) -> int:
        """:meth:`state_bytes`, including the cache of the convolution."""
        kept = max(0, self.parts.short_conv - 1) * len(self.projections)
        return self.state_bytes(context) + 4 * kept * self.heads * self.head_width

    @property
    def name(self) -> str:
        """Name of the mode and of its file."""
        return type(self).__module__.rpartition(".")[2]

    def forward(self, x_BTE: Float[Array, "B T E"] | Sum, cache: Any = None, *, norm: Norm | None = None,
                residual: bool = False, causal: bool = True,
                positions_BT: Int[Array, "B T"] | None = None, segment_ids_BT: Int[Array, "B T"] | None = None,
                packed: bool = True, lengths_B: Int[Array, " B"] | None = None,
                ) -> tuple[Float[Array, "B T E"] | Sum, Any]:
        """Attention over whole sequences or, with a cache, over T more tokens.

        Includes LayerNorm and residual sum, so that one token needs few launches on a GPU.

        Args:
            x_BTE: the tokens.
            cache: result of :meth:`layer_cache` or an earlier call; None: whole sequences.
            norm: LayerNorm of x, if any.
            residual: whether to add the result to x.
            causal: whether attention is causal; always true with a cache.
            positions_BT: rotary positions of queries and keys, if any.
            segment_ids_BT: segment ids of whole sequences; None: each row is one segment.
            packed: whether rows may have several segments, or padding before a token. False: each row is one segment
                followed by padding.
            lengths_B: with a cache, number of new tokens of each row that enter it; None: all.

        Returns:
            The result, on a GPU possibly a ``Sum`` that the next LayerNorm adds, and the cache with the new tokens, or
            None.

        Raises:
            NotImplementedError: the mode does not support the mask, a cache, or packed rows.
        """
        if not (self.causal if causal else self.bidirectional):
            raise NotImplementedError(f"attention mode {self.name!r} "
                                      + ("is bidirectional and cannot be causal" if causal else
                                         "is causal and cannot be bidirectional"))
        if segment_ids_BT is not None and packed and not self.packs(causal):
            raise NotImplementedError(f"attention mode {self.name!r} cannot separate the segments of a row; expected "
                                      "rows of one segment followed by padding, with packed=False")
        if not self.rotary:
            positions_BT = None
        if self.parts.short_conv and not causal:
            raise NotImplementedError(f"attention mode {self.name!r} with a short convolution sees the past only")
        takes_step = (self.recurrent and cache is not None and positions_BT is None and lengths_B is None
                      and has_kernel(x_BTE, self.head_width, self.head_width, self.parts.short_conv))
        gates = [self.gate] if self.parts.output_gate != "none" else []
        linears = *self.projections, *gates
        convolves = (self.parts.short_conv > 0 and cache is None and segment_ids_BT is None
                     and has_sequence_kernel(x_BTE, self._taps[0]))
        # Kernels add the biases of what they read, which XLA would write to memory for them.
        adds_bias = [*[convolves] * len(self.projections), *[has_tiles(x_BTE)] * len(gates)]
        residual_BTE, x_BTE, projected = project_each(
            x_BTE, [(linear.parameters[0], None) if of_kernel else linear.parameters
                    for linear, of_kernel in zip(linears, adds_bias, strict=True)], norm=norm,
            wide=[gate.parameters for gate in self.step_gates] if takes_step else ())
        onto_BTE = residual_BTE if residual else None
        projected, step_gates = projected[:len(linears)], projected[len(linears):]
        gate_BTF = projected.pop() if gates else None
        if takes_step:
            y_BTHD, cache = self._step(projected, gate_BTF, cache, step_gates)
            return self.output(y_BTHD.reshape(*x_BTE.shape[:2], -1), onto_BTE), cache
        inputs_BPF: tuple[Array, ...] | None = None
        if convolves:
            projected = [convolve_heads(x_BTF, linear.parameters[1], taps_KF, self.heads, finish)
                         for x_BTF, linear, taps_KF, finish in zip(projected, self.projections, self._taps,
                                                                   self._finish, strict=True)]
        elif self.parts.short_conv:
            past = cache.inputs_BPF if cache is not None else None
            projected, inputs_BPF = self._convolve(projected, past, segment_ids_BT, lengths_B)
            cache = None if cache is None else cache.mode
        else:
            projected = self._activate(projected)
        q_BTHD, k_BTHD, v_BTHD = self.queries_keys_values(projected, x_BTE=x_BTE, positions_BT=positions_BT)
        order = None
        if packed and self.counts_places and segment_ids_BT is not None:
            order = Order.first(segment_ids_BT >= 0)
            q_BTHD, k_BTHD, v_BTHD, positions_BT, segment_ids_BT = jax.tree.map(
                order.of, (q_BTHD, k_BTHD, v_BTHD, positions_BT, segment_ids_BT))
            x_BTE = order.of(x_BTE)
        y_BTHD, cache = self.attend(q_BTHD, k_BTHD, v_BTHD, cache, x_BTE=x_BTE, causal=causal,
                                    positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, lengths_B=lengths_B)
        y_BTHD = y_BTHD if order is None else order.undone(y_BTHD)
        if inputs_BPF is not None:
            cache = LayerCache(cache, inputs_BPF)
        if self._has_output_parts:
            bias_F = self.gate.parameters[1] if gates and adds_bias[-1] else None
            gate_BTHD, bias_HD = (None if x is None else self.split_heads(x) for x in (gate_BTF, bias_F))
            y_BTHD = gated_norm(y_BTHD, self._output_scale, gate_BTHD, bias_HD, activation=self.parts.output_gate)
        return self.output(y_BTHD.reshape(*x_BTE.shape[:2], -1), onto_BTE), cache

    def _step(self, projected: Sequence[Array], gate_BTF: Array | None, cache: Any,
              step_gates: Sequence[Array]) -> tuple[Array, Any]:
        """:meth:`step` with all that the layer has around it: y_BTHD and the layer's cache."""
        q, k, v = (Input(self.split_heads(x_BTF), self._activate_head(*of_projection))
                   for x_BTF, of_projection in zip(projected, self._activations, strict=True))
        of_mode = cache
        if self.parts.short_conv:
            of_mode = cache.mode
            q, k, v = (x._replace(taps_KHD=self.split_heads(taps_KF), before_BPHD=self.split_heads(before_BPF))
                       for x, taps_KF, before_BPF in zip((q, k, v), self._taps, cache.inputs_BPF, strict=True))
        output = None
        if self._has_output_parts:
            output = Computed(functools.partial(gated_norm_wide, activation=self.parts.output_gate,
                                                width=self.head_width),
                              (self._output_scale, None if gate_BTF is None else self.split_heads(gate_BTF)))
        step, of_mode = self.step(q, k, v, of_mode, step_gates, output)
        if self.parts.short_conv:
            of_mode = LayerCache(of_mode, tuple(x_BPHD.reshape(*x_BPHD.shape[:2], -1)
                                                for x_BPHD in step.before_BPHD if x_BPHD is not None))
        return step.y_BTHD, of_mode

    @property
    def _taps(self) -> list[Array]:
        """Of the short convolutions of queries, keys and values."""
        return [taps_KF[...] for taps_KF in (self.query_taps_KF, self.key_taps_KF, self.value_taps_KF)]

    @property
    def _has_output_parts(self) -> bool:
        """Whether anything is between the mode and the output projection."""
        return (self.parts.output_norm, self.parts.output_gate) != ("none", "none")

    @property
    def _output_scale(self) -> Array | None:
        return self.output_scale_HD[...] if self.parts.output_norm != "none" else None

    def _activate_head(self, activation: str, norm: str) -> Callable[[Array], Array]:
        """Activation and norm of heads, in float32."""
        return functools.partial(_activated_wide, activation=activation, norm=norm, width=self.head_width)

    def split_heads(self, x_BTF: Array) -> Array:
        """x_BTHD of what a projection gives, or of anything else with its channels."""
        return x_BTF.reshape(*x_BTF.shape[:-1], self.heads, self.head_width)

    def _convolve(self, projected: Sequence[Array], past: tuple[Array, ...] | None, segment_ids_BT: Array | None,
                  lengths_B: Array | None) -> tuple[list[Array], tuple[Array, ...] | None]:
        """Convolution, activation and norm of each projection and, where there is a past, the last inputs of it that
        count."""
        taps = self._taps
        if past is None:
            return self._activate([short_convolution(x_BTF, taps_KF, segment_ids_BT=segment_ids_BT)
                                   for x_BTF, taps_KF in zip(projected, taps, strict=True)]), None
        if lengths_B is None and has_token_kernel(projected[0], taps[0]):
            return convolve_token(projected, taps, past, heads=self.heads, finish=self._finish)
        convolved = [short_convolution(x_BTF, taps_KF, before_BPF=before_BPF)
                     for x_BTF, taps_KF, before_BPF in zip(projected, taps, past, strict=True)]
        return self._activate(convolved), tuple(_last(before_BPF, x_BTF, lengths_B)
                                                for before_BPF, x_BTF in zip(past, projected, strict=True))

    @property
    def _finish(self) -> list[Callable[[Array], Array]]:
        """Activation and norm of a head of queries, keys and values, in float32."""
        return [self._activate_head(*of_projection) for of_projection in self._activations]

    @property
    def _activations(self) -> tuple[tuple[str, str], ...]:
        """Activation and norm of queries, keys and values."""
        activation, norm = self.parts.qk_activation, self.parts.qk_norm
        return (activation, norm), (activation, norm), (activation, "none")

    def _activate(self, projected: Sequence[Array]) -> list[Array]:
        """Activation and norm of each projection."""
        if (self.parts.qk_activation, self.parts.qk_norm) == ("none", "none"):
            return list(projected)
        return [_activated(self.split_heads(x_BTF), *of_projection).reshape(x_BTF.shape)
                for x_BTF, of_projection in zip(projected, self._activations, strict=True)]


def _activated_wide(x: Array, *, activation: str, norm: str, width: int) -> Array:
    """Activation and norm of heads, (…, D) or zero-padded, in float32 or better."""
    x = jax.nn.silu(x) if activation == "silu" else x
    return x if norm == "none" else rms_norm(x, width if norm == "rms" else 1)


# Elementwise, in float32 or better: the backward pass computes them again rather than keep what is between.
@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def _activated(x_BTHD: Array, activation: str, norm: str) -> Array:
    """Queries, keys or values after activation and norm."""
    x = _activated_wide(wide(x_BTHD), activation=activation, norm=norm, width=x_BTHD.shape[-1])
    return cpu.compute_once(x.astype(x_BTHD.dtype))


def _last(before_BPF: Array, x_BTF: Array, lengths_B: Array | None) -> Array:
    """The last P tokens of ``before_BPF`` and the first ``lengths_B`` of x."""
    P = before_BPF.shape[1]
    both_BSF = jnp.concatenate([before_BPF, x_BTF.astype(before_BPF.dtype)], axis=1)
    if lengths_B is None:
        return both_BSF[:, x_BTF.shape[1]:]
    return jax.vmap(lambda x_SF, start: jax.lax.dynamic_slice_in_dim(x_SF, start, P))(both_BSF, lengths_B)


def rotate(x_BTHD: Float[Array, "B T H D"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T H D"]:
    """Rotary positions, D even: rotates pairs (x_d, x_{d + D/2}) by t · 10000^(−2d/D). Su et al., "RoFormer", 2021.

    t is below 2^32, including int32 after overflow.
    """
    half = x_BTHD.shape[-1] // 2
    angle_BTHD = angles(positions_BT, half)[:, :, None]
    cos_BTHD, sin_BTHD = cpu.compute_once((jnp.cos(angle_BTHD), jnp.sin(angle_BTHD)))  # not in every head
    a, b = x_BTHD[..., :half].astype(jnp.float32), x_BTHD[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos_BTHD - b * sin_BTHD, a * sin_BTHD + b * cos_BTHD], axis=-1).astype(x_BTHD.dtype)


def angles(positions_BT: Int[Array, "B T"], pairs: int) -> Float[Array, "B T D"]:
    """t · 10000^(−d/pairs) for d below ``pairs``, from −π to π, with an absolute error of 1e-6 at any t.

    float32 cannot represent the product: at position 10^7 it is off by a radian. Angles are integers instead, 2^32 per
    turn, whose overflow drops whole turns. Positions are processed byte by byte, so that the rounding error of the rate
    does not grow with them.
    """
    turns_D = 10_000.0 ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    t_BT1 = positions_BT.astype(jnp.uint32)[..., None]
    angle_BTD = jnp.zeros((*positions_BT.shape, pairs), jnp.uint32)
    for shift in (0, 8, 16, 24):
        rate_D = np.round(turns_D * 2.0**shift % 1 * 2**32).astype(np.uint64).astype(np.uint32)
        angle_BTD += (t_BT1 >> shift & 255) * rate_D[None, None]
    return jax.lax.bitcast_convert_type(angle_BTD, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
