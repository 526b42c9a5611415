"""The memory of a layer's gradient is linear in the tokens, by the compiler's plan."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import attention

pytestmark = pytest.mark.thorough

BOTH = ("bigbird", "local", "longformer", "performer", "reformer", "sparse")
ENCODERS = ("linformer", "sinkhorn")  # a matrix of at most 256² elements, beside what is linear


@pytest.mark.parametrize(("mode", "causal"), [*((mode, causal) for mode in BOTH for causal in (True, False)),
                                              *((mode, False) for mode in ENCODERS)])
def test_memory_of_the_gradient_is_linear(mode, causal):
    def temporary(tokens: int) -> int:
        module = attention.load(mode)
        layer = nnx.eval_shape(lambda: module.Attention(module.Config(), heads=2, head_width=16, width=32,
                                                        max_length=16_384, rngs=nnx.Rngs(0)))
        graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

        def loss(parameters, rest, x_BTE, segment_ids_BT):
            return nnx.merge(graph, parameters, rest).forward(
                x_BTE, causal=causal, segment_ids_BT=segment_ids_BT, packed=layer.supports_segments(causal))[0].sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 2))).lower(
            parameters, rest, jax.ShapeDtypeStruct((1, tokens, 32), jnp.float32),
            jax.ShapeDtypeStruct((1, tokens), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16_384) < 2.3 * temporary(8_192)
