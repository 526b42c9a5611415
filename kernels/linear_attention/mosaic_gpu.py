"""Causal linear attention on a Hopper GPU by a kernel of Pallas's Mosaic backend; the backward pass is that of chunked.

It stands beside the kernels of ``pallas_gpu``, whose backend JAX has deprecated, and is never picked: no card has run
it. docs/gpu.md has what a port of the other kernels would take.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax import Array

from .. import device
from ..dispatch import Call
from ..partition import by_batch_and_heads
from ..state import State
from .chunked import chunked
from .tuning import ChunkSizes

CHUNK = 64
"""C: the rows of a product of the matrix units, and tokens of a chunk."""
WIDTHS = (64, 128)
"""M and D: shared memory is arranged in columns of 64."""
HOPPER = re.compile(r"\bG?H\d")
"""In the kind of a device, such as NVIDIA H200 or NVIDIA GH200 480GB."""


def refuses(call: Call) -> str | None:
    """Why this kernel does not support a call; None if it does."""
    try:
        from . import mosaic_kernel as mosaic_kernel
    except ImportError as error:
        return f"jax {jax.__version__} lacks the backend of this kernel ({error})"
    if device.platform() != "gpu" and jax.sharding.get_abstract_mesh().size > 1:
        return "without a GPU it is interpreted, on one device"
    if device.platform() == "gpu" and not HOPPER.search(device.kind()):
        return f"it supports Hopper GPUs, and this is {device.kind()}"
    if not call.causal:
        return "it supports only causal=True; for causal=False choose implementation='chunked'"
    if call.segments or call.log_decay:
        return f"it does not support {'segment_ids_BT' if call.segments else 'log_decay_BTH'}"
    if call.chunk_size not in (None, CHUNK):
        return f"chunk_size={call.chunk_size}; it supports {CHUNK}"
    for name, x in call.heads.items():
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}; it supports bfloat16"
        if x.shape[3] not in WIDTHS:
            return f"{name} has width {x.shape[3]}; it supports widths of {' and '.join(map(str, WIDTHS))}"
    return None


def mosaic_gpu(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: None, *, causal: bool,
               normalize: bool, log_decay_BTH: None = None) -> tuple[Array, State]:
    """Linear attention by the kernel of ``mosaic_kernel``. Without a GPU it is interpreted, with races detected.

    Args:
        q_BTHM: φ(q); M 64 or 128, bfloat16. T is padded to whole chunks of 64.
        k_BTHM: φ(k).
        v_BTHD: values; D 64 or 128.
        initial: S₀ and z₀, float32.
        runs_BT: segments are not supported; :func:`refuses` has the other conditions.
        causal: must be True.
        normalize: divide by the sum of weights.
        log_decay_BTH: a decay is not supported.
    """
    return _attend(q_BTHM, k_BTHM, v_BTHD, initial, normalize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, normalize: bool) -> tuple[Array, State]:
    y_BTHD, s_BHMD, z_BHM = by_batch_and_heads(
        functools.partial(_forward, normalize), ["bthm", "bthm", "bthd", "bhmd", "bhm"], ["bthd", "bhmd", "bhm"])(
            q_BTHM, k_BTHM, v_BTHD, *initial)
    return y_BTHD, State(s_BHMD, z_BHM)


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, normalize):
    return _attend(q_BTHM, k_BTHM, v_BTHD, initial, normalize), (q_BTHM, k_BTHM, v_BTHD, initial)


def _attend_backward(normalize, inputs, gradients):
    def attend(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State) -> tuple[Array, State]:
        return chunked(q_BTHM, k_BTHM, v_BTHD, initial, None, causal=True, normalize=normalize,
                       chunk_sizes=ChunkSizes(CHUNK, CHUNK))

    return jax.vjp(attend, *inputs)[1](gradients)


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(normalize: bool, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, s_BHMD: Array, z_BHM: Array
             ) -> tuple[Array, Array, Array]:
    # Importing the backend takes 0.4 s, which nobody else should wait for.
    from . import mosaic_kernel

    T = q_BTHM.shape[1]
    padding = ((0, 0), (0, -T % CHUNK), (0, 0), (0, 0))  # keys of 0 add nothing to the state
    q_BTHM, k_BTHM, v_BTHD = (jnp.pad(x, padding) for x in (q_BTHM, k_BTHM, v_BTHD))
    y_BTHD, end_s_BHMD, end_z_BHM = mosaic_kernel.launch(q_BTHM, k_BTHM, v_BTHD, s_BHMD, z_BHM, C=CHUNK,
                                                         normalize=normalize, interpreted=device.interprets_kernels())
    return y_BTHD[:, :T], end_s_BHMD, end_z_BHM
