"""Causal linear attention on a TPU: the launches of its kernels, forward and backward.

The kernels in ``tpu_kernels`` scan chunks with the state in VMEM: attention form inside the chunk, recurrent form
across chunks. The backward pass saves q, k, v and the denominator.

The layout: arrays stay (B, T, lanes), whose lanes are heads side by side, so that nothing is transposed in memory. A
TPU computes on 128 lanes: two heads of up to 64 share a block, with the state as a matrix of two blocks on the
diagonal. A head's part of a product over all lanes is that with the lanes of the other head set to zero, which takes
the matrix unit as long as a product over 64 lanes. The grid is (B, groups of heads, chunks), and the last axis runs in
order on one core.

Katharopoulos et al., "Transformers are RNNs", 2020; Hua et al., "Transformer Quality in Linear Time", 2022 (chunks).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import device
from ..chunks import Chunks
from ..decay import sums_after, sums_through
from ..dispatch import Call, refuses_heads
from ..partition import by_batch_and_heads
from ..remat import save_for_backward
from ..state import EPSILON, State
from .tpu_kernels import Gradients, Sums, Tokens, key_gradient_kernel, output_kernel, query_gradient_kernel
from .tuning import ChunkSizes

LANES = 128
WIDEST = 256
"""Greatest M and D."""
CHUNKS = (128, 256)
"""Chunk sizes: multiples of the lanes, along which a row of scores lies."""
DTYPES = ("float32", "bfloat16")
INTERPRETER = pltpu.InterpretParams()
"""How the kernels are interpreted without a TPU: with uninitialised memory that is not a number."""


def detecting_races() -> pltpu.InterpretParams:
    """The same, and a race of two accesses to memory is an error."""
    return pltpu.InterpretParams(detect_races=True)


def refuses(call: Call) -> str | None:
    """Why these kernels do not support a call; None if they do."""
    if not call.causal:
        return "it supports only causal=True; for causal=False choose implementation='chunked'"
    if call.chunk_size not in (None, *CHUNKS):
        return f"chunk_size={call.chunk_size}; it supports {', '.join(map(str, CHUNKS))}"
    return refuses_heads(call, dict.fromkeys(DTYPES, WIDEST))


def pallas_tpu(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
               normalize: bool, chunk_sizes: ChunkSizes, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Linear attention by the kernels of ``tpu_kernels``. Without a TPU they are interpreted, slowly, for tests.

    Args:
        q_BTHM: φ(q); M from 1 to 256. Widths are padded to 64, 128 or 256, and T to whole chunks.
        k_BTHM: φ(k).
        v_BTHD: values; D from 1 to 256.
        initial: S₀ and z₀.
        runs_BT: segments (``kernels/segments.py``).
        causal: must be True; :func:`refuses` has the other conditions.
        normalize: divide by the sum of weights.
        chunk_sizes: C of both passes.
        log_decay_BTH: g ≤ 0, the log of the factor on the previous state; 0 on padding.
    """
    return _attend(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, chunk_sizes.forward, normalize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize):
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize)[0]


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize):
    y_BTHD, s_BHMD, z_BHM, denominator_BTH = by_batch_and_heads(
        functools.partial(_forward, C, normalize), ["bthm", "bthm", "bthd", "bt", "bth", "bhmd", "bhm"],
        ["bthd", "bhmd", "bhm", "bth"])(q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, *initial)
    y_BTHD, denominator_BTH = save_for_backward((y_BTHD, denominator_BTH))
    return (y_BTHD, State(s_BHMD, z_BHM)), (q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, *initial, denominator_BTH)


def _attend_backward(C, _, saved, gradients):
    dy_BTHD, dend = gradients
    dq_BTHM, dk_BTHM, dv_BTHD, dlog_decay_BTH, ds_BHMD, dz_BHM = by_batch_and_heads(
        functools.partial(_backward, C),
        ["bthm", "bthm", "bthd", "bt", "bth", "bhmd", "bhm", "bth", "bthd", "bhmd", "bhm"],
        ["bthm", "bthm", "bthd", "bth", "bhmd", "bhm"])(*saved, dy_BTHD, *dend)
    return dq_BTHM, dk_BTHM, dv_BTHD, State(ds_BHMD, dz_BHM), None, dlog_decay_BTH


_attend.defvjp(_attend_forward, _attend_backward)


class _Layout(NamedTuple):
    """Sizes of a call. A block has P heads of padded width W side by side, in L lanes; there are G blocks."""

    B: int
    T: int
    H: int
    M: int
    D: int
    C: int

    @classmethod
    def of(cls, C: int, q_BTHM: Array, v_BTHD: Array) -> "_Layout":
        B, T, H, M = q_BTHM.shape
        return cls(B, T, H, M, v_BTHD.shape[3], C)

    @property
    def W(self) -> int:
        return next(width for width in (64, 128, 256) if max(self.M, self.D) <= width)

    @property
    def P(self) -> int:
        return max(1, LANES // self.W)

    @property
    def L(self) -> int:
        return self.P * self.W

    @property
    def G(self) -> int:
        return -(-self.H // self.P)

    @property
    def N(self) -> int:
        return -(-self.T // self.C)

    def pad(self, x_BTH: Array, width: int | None = None) -> Array:
        """(B, T, H, …) with zeros to whole chunks, whole groups and, of vectors, to a width."""
        sizes = (self.B, self.N * self.C, self.G * self.P, *([] if width is None else [width]))
        return jnp.pad(x_BTH, [(0, size - old) for size, old in zip(sizes, x_BTH.shape, strict=True)])

    def vectors(self, x_BTHM: Array) -> Array:
        """(B, T, H, M) as (B, T, G·L)."""
        return self.pad(x_BTHM, self.W).reshape(self.B, -1, self.G * self.L)

    def heads(self, x_BTL: Array, width: int) -> Array:
        """The inverse of :meth:`vectors`."""
        return x_BTL.reshape(self.B, -1, self.G * self.P, self.W)[:, : self.T, : self.H, :width]

    def scalars(self, x_BTH: Array) -> Array:
        """(B, T, H) as (B, G, T, P)."""
        return self.pad(x_BTH).reshape(self.B, -1, self.G, self.P).swapaxes(1, 2)

    def of_heads(self, x_BGTP: Array) -> Array:
        """The inverse of :meth:`scalars`."""
        return x_BGTP.swapaxes(1, 2).reshape(self.B, -1, self.G * self.P)[:, : self.T, : self.H]

    def blocks(self, state: Sequence[Array]) -> tuple[Array, Array]:
        """States as (B, G, L, L), with the heads on the diagonal, and (B, G, 1, L)."""
        s_BHMD, z_BHM = state
        heads, W = self.G * self.P, self.W
        s_BHWW = jnp.pad(s_BHMD, [(0, 0), (0, heads - self.H), (0, W - self.M), (0, W - self.D)])
        s_BGPWW = s_BHWW.reshape(self.B, self.G, self.P, W, W)
        own_PP = jnp.eye(self.P, dtype=s_BHMD.dtype)[None, None, :, None, :, None]
        s_BGPWPW = s_BGPWW[:, :, :, :, None] * own_PP
        z_BHW = jnp.pad(z_BHM, [(0, 0), (0, heads - self.H), (0, W - self.M)])
        return s_BGPWPW.reshape(self.B, self.G, self.L, self.L), z_BHW.reshape(self.B, self.G, 1, self.L)

    def states(self, s_BGLL: Array, z_BGL: Array) -> tuple[Array, Array]:
        """The inverse of :meth:`blocks`."""
        s_BGPWPW = s_BGLL.reshape(self.B, self.G, self.P, self.W, self.P, self.W)
        s_BHWW = jnp.stack([s_BGPWPW[:, :, p, :, p] for p in range(self.P)], axis=2).reshape(
            self.B, -1, self.W, self.W)
        return (s_BHWW[:, : self.H, : self.M, : self.D],
                z_BGL.reshape(self.B, -1, self.W)[:, : self.H, : self.M])


class _Launch(NamedTuple):
    """Launches a kernel over the chunks of all groups, forwards or backwards."""

    layout: _Layout
    reverse: bool = False

    def __call__(self, name: str, kernel: Callable[..., None], inputs: Any, outputs: Any) -> Any:
        """The outputs, given as shapes.

        The dimensions of an array tell what a program has of it: (B, T, G·L) vectors of its chunk and group, (B, T, 1)
        and (B, 1, T) of its chunk, (B, G, T, P) scalars of both, (B, G, N, …) what there is for a chunk, and (B, G, …)
        what there is for a sequence.
        """
        lay = self.layout

        def spec(x: Any) -> pl.BlockSpec:
            def at(*index: Any) -> Callable[..., Any]:
                def place(b: Any, g: Any, n: Any) -> tuple[Any, ...]:
                    chunk = lay.N - 1 - n if self.reverse else n
                    return tuple({"b": b, "g": g, "n": chunk}.get(axis, 0) for axis in index)
                return place

            tokens = lay.N * lay.C
            if x.ndim == 3 and x.shape[1] == tokens:
                return pl.BlockSpec((1, lay.C, min(lay.L, x.shape[2])),
                                    at("b", "n", "g" if x.shape[2] > 1 else None))
            if x.ndim == 3:
                return pl.BlockSpec((1, 1, lay.C), at("b", None, "n"))
            if x.ndim == 5:
                return pl.BlockSpec((1, 1, 1, *x.shape[3:]), at("b", "g", "n", None, None))
            if x.shape[3] == lay.P:
                return pl.BlockSpec((1, 1, lay.C, lay.P), at("b", "g", "n", None))
            return pl.BlockSpec((1, 1, *x.shape[2:]), at("b", "g", None, None))

        flat, structure = jax.tree.flatten((inputs, outputs))
        results, out_structure = jax.tree.flatten(outputs)

        def program(*refs: Any) -> None:
            *blocks, s, z = refs
            kernel(lay.P, *jax.tree.unflatten(structure, blocks), Sums(s, z))

        sums = [pltpu.VMEM((lay.L, lay.L), jnp.float32), pltpu.VMEM((1, lay.L), jnp.float32)]
        given = flat[: len(flat) - len(results)]
        found = pl.pallas_call(
            program, grid=(lay.B, lay.G, lay.N), in_specs=[spec(x) for x in given],
            out_specs=[spec(x) for x in results], out_shape=results, scratch_shapes=sums,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=False if device.platform() == "tpu" else INTERPRETER, name=f"linear_attention_{name}")(*given)
        return jax.tree.unflatten(out_structure, found)


def _tokens(lay: _Layout, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
            log_decay_BTH: Array | None) -> Tokens:
    """The inputs of all kernels."""
    x = Tokens(*map(lay.vectors, (q_BTHM, k_BTHM, v_BTHD)))
    chunks = None
    reads = writes = keeps = jnp.ones((lay.B, lay.N, lay.C, lay.G * lay.P), jnp.float32)
    if runs_BT is not None:
        runs_BT = jnp.pad(runs_BT, [(0, 0), (0, lay.N * lay.C - lay.T)], constant_values=-1)
        x = x._replace(runs_column=runs_BT[:, :, None], runs_row=runs_BT[:, None])
        chunks = Chunks.of(runs_BT.reshape(lay.B, lay.N, lay.C).swapaxes(0, 1))
    if log_decay_BTH is not None:
        log_decay_BNCH = lay.pad(log_decay_BTH).reshape(lay.B, lay.N, lay.C, -1)
        x = x._replace(log_decay=lay.scalars(log_decay_BTH))
        through = jnp.exp(sums_through(log_decay_BNCH, 2))
        reads, writes, keeps = through, jnp.exp(sums_after(log_decay_BNCH, 2)), through
    if chunks is None and log_decay_BTH is None:
        return x
    keeps_BNH = keeps[:, :, -1]
    if chunks is not None:
        assert chunks.reads_NBC is not None
        assert chunks.writes_NBC is not None
        assert chunks.keeps_NB is not None
        reads = jnp.where(chunks.reads_NBC.swapaxes(0, 1)[..., None], reads, 0)
        writes = jnp.where(chunks.writes_NBC.swapaxes(0, 1)[..., None], writes, 0)
        keeps_BNH = jnp.where(chunks.keeps_NB.T[..., None], keeps_BNH, 0)

    def scalars(x_BNCH: Array) -> Array:
        return x_BNCH.reshape(lay.B, -1, lay.G, lay.P).swapaxes(1, 2)

    keeps_BGNP = keeps_BNH.reshape(lay.B, lay.N, lay.G, lay.P).swapaxes(1, 2)
    return x._replace(reads=scalars(reads), writes=scalars(writes),
                      keeps=jnp.repeat(keeps_BGNP, lay.W, axis=3)[:, :, :, None])


def _shape(like: Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or like.shape, like.dtype)


def _forward(C: int, normalize: bool, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
             log_decay_BTH: Array | None, s_BHMD: Array, z_BHM: Array) -> tuple[Array | None, ...]:
    """y, the final sums and, where y is divided by it, the denominator."""
    lay = _Layout.of(C, q_BTHM, v_BTHD)
    x = _tokens(lay, q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH)
    first = Sums(*lay.blocks((s_BHMD, z_BHM)))
    denominator = _shape(first.s, lay.B, lay.G, lay.N * lay.C, lay.P) if normalize else None
    y, denominator, last = _Launch(lay)("forward", _of_pairs(output_kernel), (x, first), (
        _shape(x.v), denominator, Sums(*map(_shape, first))))
    return (lay.heads(y, lay.D), *lay.states(*last), None if denominator is None else lay.of_heads(denominator))


def _of_pairs(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel of P, inputs, outputs and sums, each a tuple of its own."""
    return lambda P, inputs, outputs, sums: kernel(P, *inputs, *outputs, sums)


def _backward(C: int, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
              log_decay_BTH: Array | None, s_BHMD: Array, z_BHM: Array, denominator_BTH: Array | None, dy_BTHD: Array,
              ds_BHMD: Array, dz_BHM: Array) -> tuple[Array | None, ...]:
    """The gradients of q, k, v, the log decay and the initial sums."""
    lay = _Layout.of(C, q_BTHM, v_BTHD)
    x = _tokens(lay, q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH)
    first = Sums(*lay.blocks((s_BHMD, z_BHM)))
    by_token = _shape(first.s, lay.B, lay.G, lay.N * lay.C, lay.P)
    u_BTHD = dy_BTHD
    if denominator_BTH is not None:
        r_BTH = 1 / (denominator_BTH + EPSILON)
        u_BTHD, x = (dy_BTHD * r_BTH[..., None]).astype(v_BTHD.dtype), x._replace(r=lay.scalars(r_BTH))
    x = x._replace(u=lay.vectors(u_BTHD))
    decays = log_decay_BTH is not None
    wanted: dict[str, Any] = {"q": _shape(x.q), "e": None if x.r is None else by_token}
    if decays:
        wanted |= {"reads": by_token, "states": Sums(_shape(first.s, lay.B, lay.G, lay.N, lay.L, lay.L),
                                                     _shape(first.s, lay.B, lay.G, lay.N, 1, lay.L))}
    of_q, = _Launch(lay)("query_gradient", _of_pairs(query_gradient_kernel), (x, first), (Gradients(**wanted),))
    x = x._replace(r=None, e=of_q.e)
    if decays:
        x = x._replace(s=of_q.states.s, z=of_q.states.z)
    dend = Sums(*lay.blocks((ds_BHMD, dz_BHM)))
    wanted = {"k": _shape(x.k), "v": _shape(x.v)}
    if decays:
        wanted |= {"inside": by_token, "writes": by_token, "keeps": _shape(first.s, lay.B, lay.G, lay.N, 1, lay.L)}
    of_k, dfirst = _Launch(lay, reverse=True)("key_gradient", _of_pairs(key_gradient_kernel), (x, dend), (
        Gradients(**wanted), Sums(*map(_shape, first))))
    dlog_decay_BTH = _decay_gradient(lay, of_q.reads, of_k) if decays else None
    return (lay.heads(of_q.q, lay.M), lay.heads(of_k.k, lay.M), lay.heads(of_k.v, lay.D), dlog_decay_BTH,
            *lay.states(*dfirst))


def _decay_gradient(lay: _Layout, reads_BGTP: Array, of_k: Gradients) -> Array:
    """Sums of the terms over the tokens that a log decay is between."""
    inside, reads, writes = (x.reshape(lay.B, lay.G, lay.N, lay.C, lay.P) for x in (
        of_k.inside, reads_BGTP, of_k.writes))
    keeps = of_k.keeps.reshape(lay.B, lay.G, lay.N, 1, lay.P, lay.W).sum(axis=5)
    before = jnp.cumsum(jnp.pad(writes[:, :, :, :-1], [(0, 0)] * 3 + [(1, 0), (0, 0)]), axis=3)
    total = inside + lax.cumsum(reads, axis=3, reverse=True) + before + keeps
    return lay.of_heads(total.reshape(lay.B, lay.G, -1, lay.P))
