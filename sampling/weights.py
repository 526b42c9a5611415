"""The arrays of a model as the products of a token read them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kernels import device
from models.block import Linear, linears
from models.gpt import GPT
from models.heads import Head, TiedHead

Arrays = tuple[Any, Float[Array, "V E"] | None]
"""The state of the model, and the weight of a tied head if it is a copy of the embedding in another dtype."""


def to_product_weights(model: GPT) -> tuple[Any, Arrays]:
    """The graph of a model, and its arrays with the weights of projections and head in the compute dtype, which halves
    the bytes to read, and on a GPU transposed, (F, E), for the kernels of one token."""
    model = nnx.clone(model)  # a merge of the split model would share its variables
    dtype = jnp.dtype(model.config.dtype)
    for linear in _projections(model):
        w_EF = linear.kernel[...].astype(dtype)
        linear.kernel.set_value(w_EF.T if _transposes() else w_EF)  # [...] = would keep the dtype
    embedding_VE = model.token_embedding.embedding[...]
    is_copied = isinstance(model.head, TiedHead) and embedding_VE.dtype != dtype
    graph, state = nnx.split(model)
    return graph, (state, embedding_VE.astype(dtype) if is_copied else None)


def from_product_weights(graph: Any, arrays: Arrays) -> tuple[GPT, Head]:
    """The model and its head. In a compiled function weights that are transposed here and again in a kernel's call are
    not copied."""
    state, head_VE = arrays
    model = nnx.merge(graph, state, copy=True)
    if _transposes():
        for linear in _projections(model):
            linear.kernel.set_value(linear.kernel[...].T)
    head = model.head
    return model, head if head_VE is None else dataclasses.replace(head, weight_VE=head_VE)


def _transposes() -> bool:
    return device.platform() == "gpu"


def _projections(model: GPT) -> Iterator[Linear]:
    """All but those whose products are float32 whatever the compute dtype."""
    exact = [weight.w_EF for block in model.blocks for weight in block.attention.head_weights if weight.exact]
    return (linear for linear in linears(model) if linear is not model.head_projection
            and all(linear.kernel[...] is not w_EF for w_EF in exact))
