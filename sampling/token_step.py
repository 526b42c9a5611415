"""One token of a model on a GPU, in about five launches a layer.

A launch costs one or two microseconds, as much as reading a weight, and ``GPT.forward`` of one token takes some thirty
a layer. Here a layer is a LayerNorm with the projections after it, the recurrence or the attention to the cache, the
output projection onto the residual stream, and the two products of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.gelu import gelu
from kernels.gpu import has_kernel
from kernels.layer_norm import Norm, layer_norm
from kernels.project_heads import project_heads
from kernels.projection.token import project_token
from kernels.recurrent_step import HeadOutput, PerHead, TokenInput, recurrent_step, supports
from models.attention.recurrence import Gate, Recurrence
from models.attention.rotary import rotate
from models.attention.self_attention import LayerCache, Linear, SelfAttention
from models.block import Block
from models.gpt import GPT, Cache
from models.heads import Head, TiedHead


def token_step(model: GPT, head: Head) -> Callable[[Array, Cache], tuple[Array, Cache]]:
    """The step of :meth:`TokenStep.of`, or ``GPT.forward`` and ``logits`` where there is none."""
    def forward(tokens_B1: Array, cache: Cache) -> tuple[Array, Cache]:
        x_B1E, cache = model.forward(tokens_B1, cache)
        return head.logits(x_B1E)[:, 0], cache

    return TokenStep.of(model, head) or forward


@dataclass(frozen=True)
class TokenStep:
    """Equal to ``GPT.forward`` and ``logits`` of one token a row, up to rounding. Not differentiable."""

    model: GPT
    head: Head

    @classmethod
    def of(cls, model: GPT, head: Head) -> "TokenStep | None":
        """The fused step where there are kernels for it, on one GPU; elsewhere None.

        Args:
            model: with the weights of its projections in the compute dtype. Kernels read them transposed: where they
                are transposed arrays, nothing is copied.
            head: the model's head, with its weight in the compute dtype.
        """
        return cls(model, head) if has_kernel(one_device=True) else None

    def __call__(self, tokens_B1: Int[Array, "B 1"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
        """The logits of the token after these, float32, and the cache with them."""
        positions_B1 = cache.position_B[:, None]
        rotations_B1 = positions_B1 if self.model.config.positions == "rotary" else None
        x_B1E, layers = self.model.embed(tokens_B1, positions_B1), []
        for block, layer_cache in zip(self.model.blocks, cache.layers, strict=True):
            x_B1E, layer_cache = _block(block, x_B1E, layer_cache, rotations_B1)
            layers.append(layer_cache)
        return self._logits(x_B1E)[:, 0], Cache(cache.position_B + 1, tuple(layers))

    def _logits(self, x_B1E: Array) -> Array:
        if not isinstance(self.head, TiedHead):
            return self.head.logits(x_B1E)
        return project_token(x_B1E, [self.head.weight_VE.T], norm=self.head.norm, dtypes=[jnp.float32])[0]


def _block(block: Block, x_B1E: Array, cache: LayerCache, rotations_B1: Array | None) -> tuple[Array, LayerCache]:
    """``Block.forward``."""
    layer, norm, recurrence = block.attention, block.attention_norm.parameters, block.attention.recurrence
    rotations_B1 = rotations_B1 if layer.rotary else None
    if recurrence is not None and rotations_B1 is None and supports(layer.head_width, layer.options.short_conv):
        y_B1F, cache = _recur(layer, recurrence, norm, x_B1E, cache)
    else:
        y_B1F, cache = _attend(layer, norm, x_B1E, cache, rotations_B1)
    x_B1E = _add_projection(x_B1E, y_B1F, layer.output)
    w_EF, bias_F = block.mlp.hidden.parameters
    hidden_B1F, = project_token(x_B1E, [w_EF], [bias_F], norm=block.mlp_norm.parameters, activation=gelu)
    return _add_projection(x_B1E, hidden_B1F, block.mlp.output), cache


def _add_projection(x_B1E: Array, y_B1F: Array, linear: Linear) -> Array:
    w_FE, bias_E = linear.parameters
    return project_token(y_B1F, [w_FE], [bias_E], onto_B1F=x_B1E)[0]


def _attend(layer: SelfAttention, norm: Norm, x_B1E: Array, cache: LayerCache,
            rotations_B1: Array | None) -> tuple[Array, LayerCache]:
    """A layer's heads by its own ``extend``: what the output projection takes, and the cache."""
    heads, history = project_heads(x_B1E, layer.head_weights, heads=layer.heads, before=cache.history, norm=norm)
    assert history is not None
    q_B1HD, k_B1HD, v_B1HD = layer.queries_keys_values(heads)
    if rotations_B1 is not None:
        q_B1HD, k_B1HD = rotate(q_B1HD, rotations_B1), rotate(k_B1HD, rotations_B1)
    # Few modes read it. Elsewhere the compiler drops it.
    normed_B1E = layer_norm(x_B1E, *norm)
    y_B1HD, state = layer.attend(q_B1HD, k_B1HD, v_B1HD, cache.mode_state, x_BTE=normed_B1E, causal=True,
                                 positions_BT=rotations_B1, segment_ids_BT=None, lengths_B=None)
    return layer.gated(y_B1HD, normed_B1E), LayerCache(state, history)


def _recur(layer: SelfAttention, recurrence: Recurrence, norm: Norm, x_B1E: Array,
           cache: LayerCache) -> tuple[Array, LayerCache]:
    """The same by one step of the layer's recurrence, with everything between its projections."""
    options, weights = layer.options, layer.head_weights
    has_gate, gates = options.output_gate != "none", (recurrence.decay, recurrence.write)
    parameters = [weight[:2] for weight in weights] + ([layer.gate.parameters] if has_gate else [])
    # Decays and write strengths are float32, whatever the compute dtype.
    dtypes = [norm.dtype] * len(parameters) + [jnp.float32] * 2
    parameters += [gate[:2] for gate in gates if isinstance(gate, Gate)]
    q_B1F, k_B1F, v_B1F, *rest = project_token(x_B1E, *zip(*parameters, strict=True), norm=norm,
                                               dtypes=dtypes[:len(parameters)])
    projected = iter(rest)

    def split(x: Array | None) -> Any:
        return None if x is None else x.reshape(*x.shape[:-1], layer.heads, -1)

    def per_head(gate: Gate | np.ndarray | None) -> PerHead | None:
        if isinstance(gate, Gate):
            return PerHead((next(projected), *gate.constants_H), gate.function)
        return None if gate is None else PerHead((jnp.asarray(gate),))

    q, k, v = (TokenInput(split(x_B1F), weight.activation, weight.norm, split(weight.taps_KF), split(before_BPF))
               for x_B1F, weight, before_BPF in zip((q_B1F, k_B1F, v_B1F), weights, cache.history or (None,) * 3,
                                                    strict=True))
    output, has_norm = None, options.output_norm != "none"
    if has_norm or has_gate:
        output = HeadOutput(layer.output_scale_HD[...] if has_norm else None,
                            split(next(projected)) if has_gate else None, options.output_gate)
    log_decay, beta = map(per_head, gates)
    (s_BHMD, *sum_of_keys), structure = jax.tree.flatten(cache.mode_state)
    step = recurrent_step(q, k, v, s_BHMD, *sum_of_keys, feature=recurrence.feature, log_decay=log_decay, beta=beta,
                          epsilon=recurrence.epsilon, output=output)
    state = structure.unflatten([x for x in (step.s_BHMD, step.z_BHM) if x is not None])
    history = tuple(x_BPHD.reshape(*x_BPHD.shape[:2], -1) for x_BPHD in step.before_BPHD if x_BPHD is not None)
    return step.y_BTHD.reshape(*step.y_BTHD.shape[:2], -1), LayerCache(state, history)
