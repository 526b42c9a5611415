"""cuDNN's flash attention through jax."""

import jax
import jax.numpy as jnp
from jax import Array

from .. import device
from ..dispatch import Call


def refuses(call: Call) -> str | None:
    """Why it does not support a call on the device that is traced for; None if it does."""
    q_BTHD = call.heads["q_BTHD"]
    if device.platform() != "gpu":
        return f"it needs an NVIDIA GPU; the default device is a {device.platform()}"
    if q_BTHD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it supports bfloat16 and float16, not {q_BTHD.dtype}"
    if q_BTHD.shape[3] % 8 or q_BTHD.shape[3] > 128:
        return f"it supports head widths that are multiples of 8, up to 128, not {q_BTHD.shape[3]}"
    if call.log_decay:
        return "it does not support log decays, except as a T × T bias"
    return "it does not support segments here" if call.segments else None


def cudnn(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: None, causal: bool, window: int | None = None,
          log_decay_BTH: None = None) -> Array:
    """Attention without segments and decays."""
    del runs_BT, log_decay_BTH
    return jax.nn.dot_product_attention(
        q_BTHD, k_BTHD, v_BTHD, is_causal=causal, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0))
