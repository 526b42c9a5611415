"""Gates computed from the layer's input: decays and write strengths.

Each has a value per token and head, a decay also per channel, in float32 for any compute dtype, since log decays are
summed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kernels.projection import project_to_float32
from models.attention.layer_options import LayerOptions
from models.attention.recurrence import Gate
from models.attention.self_attention import Linear
from models.parameters import declare
from support.ranges import Count, Natural

RATES = 1.0, 16.0
STEPS = 1e-3, 0.1
FORGET_TEMPERATURE = 16
DecayInit = Literal["channel", "head"]


@dataclass(frozen=True)
class RecurrentOptions(LayerOptions):
    """Options of the modes with a decaying state of constant size, with all layer options on."""

    short_conv: Natural = 4
    qk_activation: Literal["none", "silu"] = "silu"
    qk_norm: Literal["none", "l2", "rms"] = "l2"
    output_norm: Literal["none", "rms"] = "rms"
    output_gate: Literal["none", "sigmoid", "silu"] = "sigmoid"
    rotary: bool = False
    """Apply rotary positions to queries and keys, if the model's positions are rotary."""
    chunk_size: Count | None = None
    """Chunk length. None: the fastest on this device."""


class HeadGate(Linear):
    """A number for each token and head: a function of a linear map of the layer's input."""

    from_gate: ClassVar[Callable[..., Array]]
    """The function, elementwise, of the result of the linear map and of :attr:`constants_H`."""

    def __init__(self, width: int, heads: int, *, bias: float = 0.0, rngs: nnx.Rngs):
        super().__init__(width, heads, axes=("width", "heads"), rngs=rngs)
        assert self.bias is not None
        self.bias[...] = jnp.full(heads, bias, jnp.float32)

    @property
    def constants_H(self) -> tuple[Array, ...]:
        """Parameters of the function, one for each head."""
        return ()

    def __call__(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
        """The number of each token and head, in float32 or better."""
        gate_BTH = project_to_float32(x_BTE, *self.parameters)
        return self.from_gate(gate_BTH, *(constant_H[None, None] for constant_H in self.constants_H))

    @property
    def data(self) -> Gate:
        """The same as data, for :class:`Recurrence`."""
        return Gate(*self.parameters, self.constants_H, self.from_gate)


class WriteStrength(HeadGate):
    """β of a token, from 0 to 1: sigmoid(w(x))."""

    from_gate = staticmethod(jax.nn.sigmoid)


class WideWriteStrength(HeadGate):
    """β of a token, from 0 to 2: 2 sigmoid(w(x)).

    With β above 1 a write changes the sign of what its key reads, without which no state can alternate: Grazzi, Siems,
    Zela, Franke, Hutter, Pontil: "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", 2024.
    """

    @staticmethod
    def from_gate(gate: Array) -> Array:
        return 2 * jax.nn.sigmoid(gate)


WRITE_STRENGTHS = {1: WriteStrength, 2: WideWriteStrength}
"""By the largest β."""


class ForgetGate(HeadGate):
    """A log decay, g ≤ 0: log sigmoid(a(x) + b)."""

    from_gate = staticmethod(jax.nn.log_sigmoid)


class InputDecay(HeadGate):
    """The log decay of Mamba-2: −exp(A) softplus(a(x) + b), with A per head and linear a.

    At initialisation exp(A) is uniform in ``RATES``, and softplus(b) log-uniform in ``STEPS``. Dao, Gu: "Transformers
    are SSMs", 2024.
    """

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        super().__init__(width, heads, rngs=rngs)
        assert self.bias is not None
        self.log_rate_H, self.bias[...] = initial_decay(heads, heads, rngs)

    @staticmethod
    def from_gate(gate: Array, log_rate: Array) -> Array:
        return -jnp.exp(log_rate) * jax.nn.softplus(gate)

    @property
    def constants_H(self) -> tuple[Array, ...]:
        return self.log_rate_H[...],


def initial_decay(heads: int, biases: int, rngs: nnx.Rngs) -> tuple[nnx.Param, Array]:
    """A and b of :class:`InputDecay`."""
    rates_H = jax.random.uniform(rngs.params(), (heads,), jnp.float32, *RATES)
    steps = jnp.exp(jax.random.uniform(rngs.params(), (biases,), jnp.float32, *np.log(STEPS).tolist()))
    return nnx.Param(jnp.log(rates_H), **declare("heads", decays=False)), jnp.log(jnp.expm1(steps))


class LowRank(Linear):
    """A product with a matrix of low rank: a projection to ``rank`` numbers, then this one."""

    def __init__(self, width: int, rank: int, outputs: int, *, rngs: nnx.Rngs):
        super().__init__(rank, outputs, axes=(None, "heads"), rngs=rngs)
        self.down = Linear(width, rank, axes=("width", None), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return super().__call__(self.down(x))

    def without_bias(self, x: Array) -> Array:
        return super().without_bias(self.down(x))

    def flops(self, tokens: int) -> int:
        return super().flops(tokens) + self.down.flops(tokens)


class ChannelGate(LowRank):
    """A number for each token and channel: a function of a linear map of low rank of the layer's input."""

    def __init__(self, width: int, rank: int, heads: int, head_width: int, *, rngs: nnx.Rngs):
        super().__init__(width, rank, heads * head_width, rngs=rngs)
        self.heads = heads

    def gate(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H D"]:
        """a(x) + b, in float32 or better."""
        return project_to_float32(self.down(x_BTE), *self.parameters).reshape(*x_BTE.shape[:2], self.heads, -1)


class ChannelForgetGate(ChannelGate):
    """A log decay per channel, g ≤ 0: log sigmoid(a(x) + b) / 16.

    Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023.
    """

    def __call__(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H D"]:
        return jax.nn.log_sigmoid(self.gate(x_BTE)) / FORGET_TEMPERATURE


class ChannelDecay(ChannelGate):
    """A log decay per channel: that of :class:`InputDecay`, with A per head and b per channel.

    Kimi Team: "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025. There b starts with a value of its
    own in each channel; with ``initial`` head, in each head.
    """

    def __init__(self, width: int, rank: int, heads: int, head_width: int, *, initial: DecayInit = "channel",
                 rngs: nnx.Rngs):
        super().__init__(width, rank, heads, head_width, rngs=rngs)
        assert self.bias is not None
        values = heads * head_width if initial == "channel" else heads
        self.log_rate_H, bias = initial_decay(heads, values, rngs)
        self.bias[...] = jnp.repeat(bias, heads * head_width // values)

    def __call__(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H D"]:
        return InputDecay.from_gate(self.gate(x_BTE), self.log_rate_H[...][None, None, :, None])


def fixed_log_decay(heads: int) -> Float[np.ndarray, " H"]:
    """log(1 − 2^(−5−h)) of head h. Sun et al., "Retentive Network", 2023."""
    return np.log1p(-(2.0 ** (-5 - np.arange(heads)))).astype(np.float32)
