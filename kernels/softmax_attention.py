"""Softmax attention in three forms: the device's flash kernel, blockwise in plain JAX, and materialised.

    y_t = Σ_{s≤t} exp(q_t·k_s / √D) v_s / Σ_{s≤t} exp(q_t·k_s / √D)

The blockwise form is flash attention written with ``lax`` loops, for devices that have no such kernel: an online
softmax over blocks of keys, blocks above the diagonal skipped, scores computed again in the backward pass, memory
linear in T.

Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018; Dao: "FlashAttention-2", 2023, algorithms 1, 2.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels import device, softmax_decode
from kernels.segments import runs_of, visible

IMPLEMENTATIONS = ("materialised", "blockwise", "cudnn")
QUERY_BLOCK = KEY_BLOCK = 128
"""Tokens in a block: its scores stay in a CPU's second-level cache. Of 128 to 1,024 the fastest forward and backward
at contexts 1,024 and 4,096 on two CPU cores."""
CACHE_BLOCK = 512
"""Keys of a cache read at once, where a block meets one query and is cheap."""
CACHE_BLOCK_CPU = 256
"""The same on a CPU; it divides the other. Fewer keys are read past the last one."""
_HIDDEN = -1e30  # finite: a block in which a row sees nothing must not make ∞ − ∞


def softmax_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTHD: Float[Array, "B T H D"],
    v_BTHD: Float[Array, "B T H D"],
    *,
    causal: bool = True,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Softmax attention with scale 1/√D. The softmax is float32 whatever the inputs are; y has their dtype.

    Args:
        q_BTHD: queries.
        k_BTHD: keys.
        v_BTHD: values.
        causal: see keys at or before the query only.
        segment_ids_BT: tokens see their own segment, a run of equal ids; −1 is padding, seen by nobody, whose y is 0.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Raises:
        ValueError: shapes that do not agree, or no implementation of that name.
        NotImplementedError: a named implementation cannot do what is asked.
    """
    for name, x, shape in (("k_BTHD", k_BTHD, q_BTHD.shape), ("v_BTHD", v_BTHD, q_BTHD.shape),
                           ("segment_ids_BT", segment_ids_BT, q_BTHD.shape[:2])):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; expected {shape}, from q_BTHD of shape {q_BTHD.shape}")
    name = implementation or pick_implementation(q_BTHD.dtype, q_BTHD.shape[3], segments=segment_ids_BT is not None)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: there is {', '.join(IMPLEMENTATIONS)}")
    if name == "cudnn":
        return _cudnn(q_BTHD, k_BTHD, v_BTHD, causal=causal, segments=segment_ids_BT is not None)
    runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
    y_BTHD = (_materialised if name == "materialised" else _blockwise)(q_BTHD, k_BTHD, v_BTHD, runs_BT, causal)
    return y_BTHD if runs_BT is None else jnp.where((runs_BT >= 0)[:, :, None, None], y_BTHD, 0)


def pick_implementation(dtype: jnp.dtype, head_width: int, *, segments: bool = False) -> str:
    """What ``implementation=None`` means on the default device."""
    return "cudnn" if _cudnn_refusal(dtype, head_width, segments) is None else "blockwise"


def cached_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BHSD: Float[Array, "B H S D"],
    v_BHSD: Float[Array, "B H S D"],
    position_B: Int[Array, " B"],
) -> Float[Array, "B T H D"]:
    """Causal attention to a cache: query t of row b stands at position_B[b] + t among the keys.

    Reads only what is filled. Not differentiable. S is at most ``CACHE_BLOCK``, or a multiple of it. One token at a
    time has kernels of its own on a GPU, where a loop whose length the host does not know waits at every turn.

    Raises:
        ValueError: shapes that do not agree, or a cache of another size.
    """
    (B, T, H, D), S = q_BTHD.shape, k_BHSD.shape[2]
    for name, x, shape in (("k_BHSD", k_BHSD, (B, H, S, D)), ("v_BHSD", v_BHSD, (B, H, S, D)),
                           ("position_B", position_B, (B,))):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; expected {shape}, from q_BTHD of shape {q_BTHD.shape}")
    if S > CACHE_BLOCK and S % CACHE_BLOCK:
        raise ValueError(f"k_BHSD has room for {S} keys; expected a multiple of {CACHE_BLOCK}")
    if device.platform() == "gpu" and softmax_decode.refuses(q_BTHD, k_BHSD, v_BHSD) is None:
        return softmax_decode.softmax_decode(q_BTHD, k_BHSD, v_BHSD, position_B)
    rows = min(T, QUERY_BLOCK)
    block = min(S, CACHE_BLOCK_CPU) if device.platform() == "cpu" else min(S, CACHE_BLOCK)
    if S % block:  # a cache below CACHE_BLOCK may have any size
        block = S
    q_BHTD = _pad(q_BTHD.swapaxes(1, 2), rows)
    last = jnp.max(position_B)

    def mask(t_T, s_S):
        return s_S[None, None, None, :] <= position_B[:, None, None, None] + t_T[None, None, :, None]

    def key_blocks(i):
        return 0, jnp.minimum((last + (i + 1) * rows - 1) // block + 1, S // block)

    y_BHTD, _ = _forward(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block)
    return y_BHTD[:, :, :T].swapaxes(1, 2)


def _cudnn_refusal(dtype: jnp.dtype, head_width: int, segments: bool) -> str | None:
    if device.platform() != "gpu":
        return f"it needs an NVIDIA GPU, and the default device is a {device.platform()}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if head_width % 8 or head_width > 128:
        return f"it takes head widths up to 128 that 8 divides, not {head_width}"
    return "it is called without segments here" if segments else None


def _cudnn(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, causal: bool, segments: bool) -> Array:
    refusal = _cudnn_refusal(q_BTHD.dtype, q_BTHD.shape[3], segments)
    if refusal is not None:
        raise NotImplementedError(f"implementation='cudnn': {refusal}")
    return jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=causal, implementation="cudnn")


def _materialised(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool) -> Array:
    """The definition: all T × T scores at once."""
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, preferred_element_type=dtype) / math.sqrt(D)
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores_BHTS, _HIDDEN)
    if runs_BT is not None:
        scores_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], scores_BHTS, _HIDDEN)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)


def _blockwise(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool) -> Array:
    T = q_BTHD.shape[1]
    rows, block = min(T, QUERY_BLOCK), min(T, KEY_BLOCK)
    q_BHTD = _pad(q_BTHD.swapaxes(1, 2), rows)
    k_BHSD, v_BHSD = (_pad(x.swapaxes(1, 2), block) for x in (k_BTHD, v_BTHD))
    query_runs_BT, key_runs_BS = (None, None) if runs_BT is None else (
        jnp.pad(runs_BT, ((0, 0), (0, padded - T)), constant_values=-1)
        for padded in (q_BHTD.shape[2], k_BHSD.shape[2]))
    return _flash(q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, causal, T, rows, block)[:, :, :T].swapaxes(1, 2)


def _pad(x_BHTD: Array, multiple: int) -> Array:
    return jnp.pad(x_BHTD, ((0, 0), (0, 0), (0, -x_BHTD.shape[2] % multiple), (0, 0)))


def _take(x: Array, i: Array, size: int, axis: int = 2) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _mask(query_runs_BT: Array | None, key_runs_BS: Array | None, causal: bool,
          T: int) -> Callable[[Array, Array], Array]:
    """mask(t_T, s_S) for the positions of a block, to broadcast against (B, H, rows, block)."""

    def mask(t_T, s_S):
        shown = (s_S[None, :] <= t_T[:, None]) if causal else (s_S[None, :] < T)
        shown = shown[None, None]
        if query_runs_BT is not None and key_runs_BS is not None:
            shown &= visible(lax.dynamic_slice_in_dim(query_runs_BT, t_T[0], t_T.shape[0], 1),
                             lax.dynamic_slice_in_dim(key_runs_BS, s_S[0], s_S.shape[0], 1))[:, None]
        return shown

    return mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _flash(q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, causal, T, rows, block):
    return _flash_forward(q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, causal, T, rows, block)[0]


def _flash_forward(q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, causal, T, rows, block):
    blocks = k_BHSD.shape[2] // block

    def key_blocks(i):
        return 0, ((i + 1) * rows - 1) // block + 1 if causal else blocks

    mask = _mask(query_runs_BT, key_runs_BS, causal, T)
    y_BHTD, logsumexp_BHT = _forward(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block)
    return y_BHTD, (q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, y_BHTD, logsumexp_BHT)


def _forward(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block):
    """y and the logarithm of its denominator, a block of queries at a time."""
    B, H, T, D = q_BHTD.shape
    dtype = jnp.promote_types(jnp.float32, q_BHTD.dtype)
    scale = 1 / math.sqrt(D)

    def query_block(i):
        q_BHtD = _take(q_BHTD, i, rows)
        t_T = i * rows + jnp.arange(rows)

        def key_block(j, carry):
            y_BHtD, total_BHt, most_BHt = carry
            scores_BHts = jnp.einsum("bhtd,bhsd->bhts", q_BHtD, _take(k_BHSD, j, block), preferred_element_type=dtype)
            scores_BHts = jnp.where(mask(t_T, j * block + jnp.arange(block)), scores_BHts * scale, _HIDDEN)
            new_most_BHt = jnp.maximum(most_BHt, scores_BHts.max(axis=-1))
            weights_BHts = jnp.exp(scores_BHts - new_most_BHt[..., None])
            shrink_BHt = jnp.exp(most_BHt - new_most_BHt)
            added_BHtD = jnp.einsum("bhts,bhsd->bhtd", weights_BHts.astype(v_BHSD.dtype), _take(v_BHSD, j, block),
                                    preferred_element_type=dtype)
            return (y_BHtD * shrink_BHt[..., None] + added_BHtD, total_BHt * shrink_BHt + weights_BHts.sum(axis=-1),
                    new_most_BHt)

        start = (jnp.zeros((B, H, rows, D), dtype), jnp.zeros((B, H, rows), dtype),
                 jnp.full((B, H, rows), _HIDDEN, dtype))
        first, end = key_blocks(i)
        y_BHtD, total_BHt, most_BHt = lax.fori_loop(first, end, key_block, start)
        return (y_BHtD / total_BHt[..., None]).astype(v_BHSD.dtype), most_BHt + jnp.log(total_BHt)

    y_NBHtD, logsumexp_NBHt = lax.map(query_block, jnp.arange(T // rows))
    return (jnp.moveaxis(y_NBHtD, 0, 2).reshape(B, H, T, -1), jnp.moveaxis(logsumexp_NBHt, 0, 2).reshape(B, H, T))


def _flash_backward(causal, T, rows, block, saved, dy_BHTD):
    """Key blocks outside, query blocks inside, so that only dq is added up in memory."""
    q_BHTD, k_BHSD, v_BHSD, query_runs_BT, key_runs_BS, y_BHTD, logsumexp_BHT = saved
    dtype = logsumexp_BHT.dtype
    scale = 1 / math.sqrt(q_BHTD.shape[3])
    mask = _mask(query_runs_BT, key_runs_BS, causal, T)
    query_blocks = q_BHTD.shape[2] // rows
    dot_BHT = jnp.sum(dy_BHTD.astype(dtype) * y_BHTD.astype(dtype), axis=-1)

    def key_block(dq_BHTD, j):
        k_BHsD, v_BHsD = _take(k_BHSD, j, block), _take(v_BHSD, j, block)
        s_S = j * block + jnp.arange(block)

        def query_block(i, carry):
            dq_BHTD, dk_BHsD, dv_BHsD = carry
            q_BHtD, dy_BHtD = _take(q_BHTD, i, rows), _take(dy_BHTD, i, rows)
            scores_BHts = jnp.einsum("bhtd,bhsd->bhts", q_BHtD, k_BHsD, preferred_element_type=dtype) * scale
            weights_BHts = jnp.where(mask(i * rows + jnp.arange(rows), s_S),
                                     jnp.exp(scores_BHts - _take(logsumexp_BHT, i, rows)[..., None]), 0)
            dweights_BHts = jnp.einsum("bhtd,bhsd->bhts", dy_BHtD, v_BHsD, preferred_element_type=dtype)
            dscores_BHts = (weights_BHts * (dweights_BHts - _take(dot_BHT, i, rows)[..., None])).astype(q_BHTD.dtype)
            dq_BHtD = jnp.einsum("bhts,bhsd->bhtd", dscores_BHts, k_BHsD, preferred_element_type=dtype)
            dk_BHsD += jnp.einsum("bhts,bhtd->bhsd", dscores_BHts, q_BHtD, preferred_element_type=dtype)
            dv_BHsD += jnp.einsum("bhts,bhtd->bhsd", weights_BHts.astype(dy_BHTD.dtype), dy_BHtD,
                                  preferred_element_type=dtype)
            dq_BHTD = lax.dynamic_update_slice_in_dim(dq_BHTD, _take(dq_BHTD, i, rows) + dq_BHtD, i * rows, 2)
            return dq_BHTD, dk_BHsD, dv_BHsD

        start = (dq_BHTD, jnp.zeros(k_BHsD.shape, dtype), jnp.zeros(v_BHsD.shape, dtype))
        first = j * block // rows if causal else 0
        dq_BHTD, dk_BHsD, dv_BHsD = lax.fori_loop(first, query_blocks, query_block, start)
        return dq_BHTD, ((dk_BHsD * scale).astype(k_BHSD.dtype), dv_BHsD.astype(v_BHSD.dtype))

    dq_BHTD, (dk_NBHsD, dv_NBHsD) = lax.scan(key_block, jnp.zeros(q_BHTD.shape, dtype),
                                             jnp.arange(k_BHSD.shape[2] // block))
    dk_BHSD, dv_BHSD = (jnp.moveaxis(x, 0, 2).reshape(k_BHSD.shape) for x in (dk_NBHsD, dv_NBHsD))
    return (dq_BHTD * scale).astype(q_BHTD.dtype), dk_BHSD, dv_BHSD, None, None


_flash.defvjp(_flash_forward, _flash_backward)
