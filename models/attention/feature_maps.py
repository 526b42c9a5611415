"""Feature maps φ of linear attention: elementwise, at least 0, so that weights and their sums are too."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FeatureMap = Literal["elu", "relu", "softplus", "exp"]

FEATURE_MAPS: dict[FeatureMap, Callable[[Array], Array]] = {
    "elu": lambda x: jax.nn.elu(x) + 1,  # Katharopoulos et al., "Transformers are RNNs", 2020
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,  # Buckman and Gelada, "Linear Transformers Are Faster", 2024
    "exp": jnp.exp,
}


def features(name: FeatureMap, x_BTHD: Float[Array, "B T H D"]) -> Float[Array, "B T H M"]:
    """φ(x), computed in float32 and returned in x's number format."""
    dtype = jnp.promote_types(jnp.float32, x_BTHD.dtype)
    return FEATURE_MAPS[name](x_BTHD.astype(dtype)).astype(x_BTHD.dtype)
