"""Gates computed from the layer's input: decays and write strengths.

Each has a value per token and head, in float32 for any compute dtype, since log decays are summed.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kernels.projection import project_wide
from kernels.recurrent_step import Computed
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import Linear
from models.parameters import declare
from support.ranges import Count, Natural

RATES = 1.0, 16.0
STEPS = 1e-3, 0.1


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
    """A linear function of the layer's input for each head, computed by :func:`read`."""

    def __init__(self, width: int, heads: int, *, bias: float = 0.0, rngs: nnx.Rngs):
        super().__init__(width, heads, axes=("width", "heads"), rngs=rngs)
        assert self.bias is not None
        self.bias[...] = jnp.full(heads, bias, jnp.float32)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the gate."""
        return 2 * tokens * self.in_features * self.out_features


def read(x_BTE: Float[Array, "B T E"], *gates: HeadGate) -> list[Float[Array, "B T H"]]:
    """The value of each gate for each token and head, in float32 or better."""
    return project_wide(x_BTE, [gate.parameters for gate in gates])


class ForgetGate(HeadGate):
    """A log decay: log sigmoid of a linear function of the input."""

    def log_decay(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
        """g ≤ 0."""
        return jax.nn.log_sigmoid(read(x_BTE, self)[0])


class InputDecay(HeadGate):
    """The log decay of Mamba-2: −exp(A) softplus(a(x) + b), with A per head and linear a.

    At initialisation exp(A) is uniform in ``RATES``, and softplus(b) log-uniform in ``STEPS``. Dao, Gu: "Transformers
    are SSMs", 2024.
    """

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        super().__init__(width, heads, rngs=rngs)
        assert self.bias is not None
        rates_H = jax.random.uniform(rngs.params(), (heads,), jnp.float32, *RATES)
        steps_H = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, *np.log(STEPS).tolist()))
        self.log_rate_H = nnx.Param(jnp.log(rates_H), **declare("heads", decays=False))
        self.bias[...] = jnp.log(jnp.expm1(steps_H))

    def log_decay(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T H"]:
        """g ≤ 0."""
        return self.of(read(x_BTE, self)[0])

    def of(self, gate_BTH: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """g ≤ 0, of what was read."""
        return input_decay(gate_BTH, self.log_rate_H[...][None, None])

    def computed(self, gate_BTH: Float[Array, "B 1 H"]) -> Computed:
        """The same of one token, computed where it is used."""
        return Computed(input_decay, (gate_BTH, self.log_rate_H[...]))


def input_decay(gate: Array, log_rate: Array) -> Array:
    """−exp(A) softplus(a(x) + b)."""
    return -jnp.exp(log_rate) * jax.nn.softplus(gate)


def fixed_log_decay(heads: int) -> Float[np.ndarray, " H"]:
    """log(1 − 2^(−5−h)) of head h. Sun et al., "Retentive Network", 2023."""
    return np.log1p(-(2.0 ** (-5 - np.arange(heads)))).astype(np.float32)
