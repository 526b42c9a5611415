"""Splash attention, JAX's flash attention for TPUs, which skips blocks that the mask hides."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from .. import device
from ..dispatch import Call, refuses_heads

BLOCKS = (512, 256, 128)
"""Lengths of blocks of queries and of keys; T is padded to a multiple of the last."""
DTYPES = ("float32", "bfloat16")
WIDEST = 256


def refuses(call: Call) -> str | None:
    """Why it does not support a call; None if it does."""
    if call.log_decay:
        return "it does not support log decays"
    if call.window is not None and call.segments:  # its window counts padding inside of a segment
        return "it does not support a window with segments"
    return refuses_heads(call, dict.fromkeys(DTYPES, WIDEST))


def splash(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool,
           window: int | None = None, log_decay_BTH: None = None) -> Array:
    """Attention without decays. Without a TPU the kernel is interpreted, which is slow and for tests."""
    del log_decay_BTH
    (B, T, H, D), dtype = q_BTHD.shape, q_BTHD.dtype
    padding = -T % BLOCKS[-1]
    size = T + padding
    block = next(block for block in BLOCKS if size % block == 0)
    if runs_BT is None and padding and not causal:  # a causal mask hides padding, which is last
        runs_BT = jnp.zeros((B, T), jnp.int32)
    ids = None
    if runs_BT is not None:
        runs_BT = jnp.pad(runs_BT, [(0, 0), (0, padding)], constant_values=-1)
        ids = kernel.SegmentIds(runs_BT, runs_BT)
    mask = masks.FullMask((size, size))
    if causal:
        mask = masks.CausalMask((size, size)) if window is None else masks.LocalMask((size, size), (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():
        attend = kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=1, interpret=device.platform() != "tpu",
            block_sizes=kernel.BlockSizes(
                block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
                block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block))
    q, k, v = (jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]).swapaxes(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    y_BHTD: Any = jax.vmap(attend)((q * D**-0.5).astype(dtype), k, v, segment_ids=ids)
    return y_BHTD.swapaxes(1, 2)[:, :T]
