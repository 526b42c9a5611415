"""Base class of attention modes: projections, heads, rotary positions, and ``LayerOptions``."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels.gated_norm import gated_norm
from kernels.project_heads import HeadWeights, project_heads
from kernels.projection import project
from models.attention.layer_options import LayerOptions, layer_options
from models.attention.recurrence import Recurrence
from models.attention.rotary import rotate
from models.parameters import Axis, declare, own_parameters
from support.errors import ConfigError

INITIAL_SCALE = 0.02
"""Standard deviation of GPT-2's initial weights; models rescale them to ``initial_scale``."""

StateGrowth = Literal["none", "constant", "window", "growing"]

OPEN_GATE_BIAS = {"sigmoid": 0.0, "silu": 1.2784645}
"""Initial bias of an output gate, with which it multiplies by 1: 2 sigmoid(0), silu(1.278…)."""


class Linear(nnx.Linear):
    """``nnx.Linear`` with GPT-2's initialisation; its output has the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, *, axes: tuple[Axis, Axis], shared: bool = False, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, kernel_init=nnx.initializers.normal(INITIAL_SCALE), rngs=rngs,
                         kernel_metadata=declare(*axes, decays=True, shared=shared),
                         bias_metadata=declare(axes[1], decays=False, shared=shared))

    def __call__(self, x: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return project(x, *self.parameters)

    def without_bias(self, x: Array) -> Array:
        """The product with the weight."""
        return project(x, self.kernel[...], None)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the product."""
        return 2 * tokens * self.in_features * self.out_features

    @property
    def parameters(self) -> tuple[Array, Array]:
        """Weight, (E, F), and bias."""
        assert self.bias is not None
        return self.kernel[...], self.bias[...]


def open_gate(gate: Linear, activation: Literal["sigmoid", "silu"]) -> None:
    """Initialises an output gate as a factor of 1: random gates take hundreds of steps to open."""
    assert gate.bias is not None
    gate.kernel[...] = jnp.zeros_like(gate.kernel[...])
    gate.bias[...] = jnp.full_like(gate.bias[...], OPEN_GATE_BIAS[activation])


def initial_taps(options: LayerOptions, channels: int, rngs: nnx.Rngs) -> list[Float[Array, "K F"]]:
    """The taps of the short convolutions of queries, keys and values. The last is that of the token itself."""
    shape = options.short_conv, channels
    if options.conv_init == "normal":
        return [INITIAL_SCALE * jax.random.normal(rngs.params(), shape) for _ in range(3)]
    return [jnp.zeros(shape).at[-1].set(1) for _ in range(3)]


class LayerCache(NamedTuple):
    """The decode state of a layer."""

    mode_state: Any
    """That of the mode."""
    history: tuple[Float[Array, "B P F"], ...]
    """The last P = K − 1 inputs of the short convolution of queries, keys and values; empty without one."""


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
    decode_state: StateGrowth = "none"
    """Growth of the decode state with the number of tokens; none: the mode has no cached decode."""
    prefix_exact: bool = True
    """An output never depends on later tokens, not even through bucketing."""
    rotary: bool = True
    """Whether queries and keys are rotated, if the model's positions are rotary."""
    block_diagonal: bool = False
    """Whether a sequence splits into parts that never attend to each other, in any number of layers."""
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

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        self.config = config
        self.heads, self.head_width, self.width, self.max_length = heads, head_width, width, max_length
        self.query, self.key, self.value = (
            Linear(width, heads * head_width, axes=("width", "heads"), shared=True, rngs=rngs) for _ in range(3))
        self.output = Linear(heads * head_width, width, axes=("heads", "width"), shared=True, rngs=rngs)
        options = self.options = layer_options(config)
        if options.short_conv:
            self.query_taps_KF, self.key_taps_KF, self.value_taps_KF = (
                nnx.Param(taps_KF, **declare(None, "heads", decays=False))
                for taps_KF in initial_taps(options, heads * head_width, rngs))
        if options.output_norm != "none":
            self.output_scale_HD = nnx.Param(jnp.ones((heads, head_width)), **declare("heads", None, decays=False))
        if options.output_gate != "none":
            self.gate = Linear(width, heads * head_width, axes=("width", "heads"), rngs=rngs)
            open_gate(self.gate, options.output_gate)

    def forward(self, x_BTE: Float[Array, "B T E"], cache: LayerCache | None = None, *, causal: bool = True,
                positions_BT: Int[Array, "B T"] | None = None, segment_ids_BT: Int[Array, "B T"] | None = None,
                packed: bool = True, lengths_B: Int[Array, " B"] | None = None,
                ) -> tuple[Float[Array, "B T E"], LayerCache | None]:
        """The layer's output for x, and the cache with x, or None without a cache.

        Args:
            x_BTE: whole sequences or, with a cache, the next T tokens.
            cache: result of :meth:`layer_cache` or an earlier call.
            causal: whether a token sees only itself and earlier tokens; always true with a cache.
            positions_BT: positions of the tokens, if they are rotary.
            segment_ids_BT: segment ids of whole sequences, −1 on padding; None: each row is one segment.
            packed: whether rows may have several segments, or padding before a token.
            lengths_B: with a cache, number of new tokens of each row that enter it; None: all.

        Raises:
            NotImplementedError: the mode does not support the mask, a cache, or packed rows.
            ConfigError: the sequence is longer than the mode's parameters.
        """
        self.check_inputs(x_BTE, causal, several_segments=packed and segment_ids_BT is not None)
        (q_BTHD, k_BTHD, v_BTHD), history = self.heads_of(x_BTE, cache, segment_ids_BT, lengths_B)
        positions_BT = positions_BT if self.rotary else None
        if positions_BT is not None:
            q_BTHD, k_BTHD = rotate(q_BTHD, positions_BT), rotate(k_BTHD, positions_BT)
        y_BTHD, state = self.attend(q_BTHD, k_BTHD, v_BTHD, None if cache is None else cache.mode_state, x_BTE=x_BTE,
                                    causal=causal, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT,
                                    lengths_B=lengths_B)
        y_BTE = self.output(self.gated(y_BTHD, x_BTE))
        return y_BTE, None if history is None else LayerCache(state, history)

    def check_inputs(self, x_BTE: Array, causal: bool, *, several_segments: bool) -> None:
        """Raises the errors of :meth:`forward`."""
        if self.fixed_length and x_BTE.shape[1] > self.max_length:
            raise ConfigError(f"attention mode {self.name!r} was given {x_BTE.shape[1]} tokens; expected at most "
                              f"model.context, {self.max_length}")
        if not (self.causal if causal else self.bidirectional):
            raise NotImplementedError(f"attention mode {self.name!r} "
                                      + ("is bidirectional and cannot be causal" if causal else
                                         "is causal and cannot be bidirectional"))
        if several_segments and not self.supports_segments(causal):
            raise NotImplementedError(f"attention mode {self.name!r} cannot separate the segments of a row; expected "
                                      "rows of one segment followed by padding, with packed=False")
        if self.options.short_conv and not causal:
            raise NotImplementedError(f"attention mode {self.name!r} with a short convolution sees the past only")

    def heads_of(self, x_BTE: Array, cache: LayerCache | None, segment_ids_BT: Array | None, lengths_B: Array | None,
                 ) -> tuple[tuple[Array, Array, Array], tuple[Array, ...] | None]:
        """q_BTHD, k_BTHD and v_BTHD before rotation, and the history of the next cache."""
        heads, history = project_heads(x_BTE, self.head_weights, heads=self.heads,
                                       before=None if cache is None else cache.history,
                                       segment_ids_BT=segment_ids_BT, lengths_B=lengths_B)
        return self.queries_keys_values(heads), history

    def gated(self, y_BTHD: Array, x_BTE: Array) -> Array:
        """y_BTF, F = H · D, after norm and gate."""
        options, scale_HD, gate_BTHD, bias_HD = self.options, None, None, None
        if options.output_norm != "none":
            scale_HD = self.output_scale_HD[...]
        if options.output_gate != "none":
            gate_BTHD = self.gate.without_bias(x_BTE).reshape(y_BTHD.shape)  # gated_norm adds the bias
            bias_HD = self.gate.parameters[1].reshape(y_BTHD.shape[2:])
        if (options.output_norm, options.output_gate) != ("none", "none"):
            y_BTHD = gated_norm(y_BTHD, scale_HD, gate_BTHD, bias_HD, activation=options.output_gate)
        return y_BTHD.reshape(*y_BTHD.shape[:2], -1)

    def supports_segments(self, causal: bool) -> bool:
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

        With a causal mask only visible pairs count, half of the square, whatever the form computes. Chunks have
        the length in the config, or else a fixed default: the count does not depend on the device.
        """
        raise NotImplementedError(f"{self.name} defines no flops")

    def state_bytes(self, context: int) -> int:
        """Size of the decode state per sequence of at most ``context`` tokens, in bytes at float32, without counts."""
        cache = jax.eval_shape(lambda: self.init_cache(1, context, jnp.float32))
        return sum(4 * x.size for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating))

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        """Name of the form that computes :meth:`mix` on this device, for reports; None if there is only one.

        ``segments``: whether rows have several segments or padding.
        """
        return None

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence that :meth:`extend` computes for one token, for sampling in few launches; None: another."""
        return None

    # Overridden by modes with other projections, or with more than ``mix``.

    @property
    def head_weights(self) -> Sequence[HeadWeights]:
        """The projections of the layer's input, for :meth:`queries_keys_values`."""
        options, taps = self.options, [None] * 3
        if options.short_conv:
            taps = [taps_KF[...] for taps_KF in (self.query_taps_KF, self.key_taps_KF, self.value_taps_KF)]
        norms = options.qk_norm, options.qk_norm, "none"
        return [HeadWeights(*linear.parameters, taps_KF, options.qk_activation, norm)
                for linear, taps_KF, norm in zip((self.query, self.key, self.value), taps, norms, strict=True)]

    def queries_keys_values(self, heads: Sequence[Array]) -> tuple[Array, Array, Array]:
        """q_BTHD, k_BTHD and v_BTHD, from the heads of :attr:`head_weights`."""
        q_BTHD, k_BTHD, v_BTHD = heads
        return q_BTHD, k_BTHD, v_BTHD

    def attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, state: Any, *, x_BTE: Array, causal: bool,
               positions_BT: Array | None, segment_ids_BT: Array | None,
               lengths_B: Array | None) -> tuple[Array, Any]:
        """y_BTHD and the mode's decode state: :meth:`mix` without a state, else :meth:`extend`."""
        if state is None:
            return self.mix(q_BTHD, k_BTHD, v_BTHD, x_BTE=x_BTE, causal=causal, segment_ids_BT=segment_ids_BT), None
        return self.extend(q_BTHD, k_BTHD, v_BTHD, state, x_BTE=x_BTE, lengths_B=lengths_B)

    # Shared by all modes.

    @property
    def own_parameters(self) -> int:
        """Number of parameters besides the shared projections; :meth:`flops` counts their operations."""
        return own_parameters(self)

    def layer_cache(self, batch: int, max_length: int, dtype: Any) -> LayerCache:
        """The empty cache of :meth:`forward`."""
        K, F = self.options.short_conv, self.heads * self.head_width
        history = tuple(jnp.zeros((batch, K - 1, F), dtype) for _ in range(3)) if K else ()
        return LayerCache(self.init_cache(batch, max_length, dtype), history)

    def layer_flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        """:meth:`flops`, including the convolutions of queries, keys and values, and the output gate."""
        F = self.heads * self.head_width
        gate = self.gate.flops(tokens) if self.options.output_gate != "none" else 0
        return self.flops(tokens, context, causal=causal) + gate + tokens * 3 * 2 * self.options.short_conv * F

    def layer_state_bytes(self, context: int) -> int:
        """:meth:`state_bytes`, including the history of the convolutions."""
        history = 3 * max(0, self.options.short_conv - 1) * self.heads * self.head_width
        return self.state_bytes(context) + 4 * history

    @property
    def name(self) -> str:
        """Name of the mode and of its file."""
        return type(self).__module__.rpartition(".")[2]
