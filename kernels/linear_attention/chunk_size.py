"""The chunk length of a call, for every form with chunks."""

from typing import Any

from .. import device
from ..gpu.products import block_width, operand_dtype
from .tuning import ChunkSizes, kernel_chunk_sizes

CHUNK = 64
"""C of ``chunked``, except on a TPU, and of the count of FLOPs on every device. It balances the quadratic part inside a
chunk and the traffic of the states."""
BLOCK = 256
"""C of ``blockwise``, whose work does not depend on it."""
TPU_CHUNKS = {"chunked": 256, "pallas_tpu": 128}
"""On a TPU. With chunks of 64, 128 and 256, both passes of ``chunked`` at 8,192 tokens take 5.7, 2.9 and 2.8 ms on a
v5e, by the compiler's cycles. 128 is the side of the matrix unit."""
DEFAULTS = {"chunked": CHUNK, "blockwise": BLOCK}


def pick_chunk_sizes(implementation: str, q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, chunk_size: int | None = None, *,
                     segments: bool = False) -> ChunkSizes | None:
    """C of the forward and of the backward pass on the device that is traced for. None: the form has no chunks.

    Args:
        implementation: a name in ``IMPLEMENTATIONS``.
        q_BTHM: queries, or their shape and dtype.
        k_BTHM: keys, or the same.
        v_BTHD: values, or the same.
        chunk_size: the requested size; None picks the fastest.
        segments: whether the call has segments.
    """
    T = q_BTHM.shape[1]
    if implementation.startswith("pallas_gpu"):
        return kernel_chunk_sizes(T, block_width(q_BTHM.shape[3]), block_width(v_BTHD.shape[3]),
                                  operand_dtype(q_BTHM, k_BTHM, v_BTHD), chunk_size, segments=segments)
    if implementation == "pallas_tpu":
        C = chunk_size or TPU_CHUNKS[implementation]
        return ChunkSizes(C, C)
    if implementation not in DEFAULTS:
        return None
    defaults = DEFAULTS | TPU_CHUNKS if device.platform() == "tpu" else DEFAULTS
    C = min(T, chunk_size or defaults[implementation])
    return ChunkSizes(C, C)
