"""cuDNN's flash attention through jax."""

import jax
import jax.numpy as jnp
from jax import Array

from .. import device


def refuses(dtype: jnp.dtype, head_width: int, segments: bool, log_decay: bool = False) -> str | None:
    """Why it does not support a call on the device that is traced for; None if it does."""
    if device.platform() != "gpu":
        return f"it needs an NVIDIA GPU; the default device is a {device.platform()}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it supports bfloat16 and float16, not {dtype}"
    if head_width % 8 or head_width > 128:
        return f"it supports head widths that are multiples of 8, up to 128, not {head_width}"
    if log_decay:
        return "it does not support log decays, except as a T × T bias"
    return "it does not support segments here" if segments else None


def cudnn(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, causal: bool, window: int | None = None) -> Array:
    """Attention without segments."""
    return jax.nn.dot_product_attention(
        q_BTHD, k_BTHD, v_BTHD, is_causal=causal, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0))
