"""The TPU kernels of causal linear attention: the output, and the gradients of queries, and of keys and values.

With q and k for φ(q) and φ(k), S and z the sums of k_j v_jᵀ and of k_j before a chunk, i and j tokens of the chunk, and
the decays of ``decay.Decays`` (1 without a decay): a_ij inside the chunk, b_i of reads, c_j of writes, f of the state,

    d_i = b_i z·q_i + Σ_{j≤i} a_ij q_i·k_j      r_i = 1 / (d_i + ε), or 1 without normalisation
    y_i = r_i (b_i Sᵀ q_i + Σ_{j≤i} a_ij (q_i·k_j) v_j)      S ← f S + Σ_j c_j k_j v_jᵀ      z ← f z + Σ_j c_j k_j

and with u_i = r_i dy_i and, backwards from the last chunk, dS and dz the gradients of the sums after the chunk,

    N_i = b_i S u_i + Σ_{j≤i} a_ij (u_i·v_j) k_j      e_i = −r_i q_i·N_i
    dq_i = N_i + e_i (b_i z + Σ_{j≤i} a_ij k_j)
    dk_j = c_j (dS v_j + dz) + Σ_{i≥j} a_ij (u_i·v_j + e_i) q_i      dv_j = c_j dSᵀ k_j + Σ_{i≥j} a_ij (q_i·k_j) u_i
    dS ← f dS + Σ_i b_i q_i u_iᵀ      dz ← f dz + Σ_i b_i e_i q_i

e is −dy·y, from N and not from the rounded y, so that its rounding errors are those of N and cancel in dq along q. With
a decay few tokens read a state, and the errors of a sum over them average out less: there the e of dk, dz and the decay
is the sum of the products before they are rounded.
Segments are zeros: a_ij between two segments, b_i where token i is not in the run of S, c_j where the run of token j
has ended behind the chunk, and f where the run of S has.

A kernel is one program: a chunk of one sequence, of the heads that share a block of lanes. Its arguments are blocks of
memory, or None where the variant has none; ``pallas_tpu`` has their layout.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..state import EPSILON


class Tokens(NamedTuple):
    """What a kernel reads of a chunk; None where the variant has none."""

    q: Any
    k: Any
    v: Any
    runs_column: Any = None
    runs_row: Any = None
    log_decay: Any = None
    """g."""
    reads: Any = None
    """b."""
    writes: Any = None
    """c."""
    keeps: Any = None
    """f, in the lanes of each head."""
    u: Any = None
    r: Any = None
    e: Any = None
    s: Any = None
    """S and z before the chunk, which the query kernel writes for the gradient of a decay."""
    z: Any = None


class Sums(NamedTuple):
    """S and z, or their gradients."""

    s: Any
    z: Any


class Gradients(NamedTuple):
    """What a kernel writes of the gradients of a chunk."""

    q: Any = None
    e: Any = None
    reads: Any = None
    """b_i ∂L/∂b_i."""
    states: Sums | None = None
    k: Any = None
    v: Any = None
    inside: Any = None
    """Σ_{j<t≤i} a_ij ∂L/∂a_ij."""
    writes: Any = None
    """c_j ∂L/∂c_j."""
    keeps: Any = None
    """f ∂L/∂f, in parts by lane."""


class _Chunk:
    """The blocks of a chunk in a kernel, and products of them."""

    def __init__(self, P: int, x: Tokens):
        self.P, self.x = P, x
        self.q, self.k, self.v = (ref[0] for ref in (x.q, x.k, x.v))
        self.C, self.L = self.q.shape
        row, column = (lax.broadcasted_iota(jnp.int32, (self.C, self.C), axis) for axis in (0, 1))
        self.is_past = column <= row
        self.is_before = column < row
        self.visible = self.is_past
        if x.runs_row is not None:
            runs_row = x.runs_row[0]
            self.visible &= (x.runs_column[0] == runs_row) & (runs_row >= 0)
        self._lanes = lax.broadcasted_iota(jnp.int32, (1, self.L), 1) // (self.L // P)

    def product(self, x: Array, y: Array, axes: tuple[int, int]) -> Array:
        """Float32 products over an axis of each."""
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), precision=precision,
                               preferred_element_type=jnp.float32)

    def of_head(self, x_CL: Array, p: int) -> Array:
        """x, and zeros in the lanes of other heads."""
        return x_CL if self.P == 1 else jnp.where(self._lanes == p, x_CL, jnp.zeros_like(x_CL))

    def on_diagonal(self, x_LL: Array) -> Array:
        """x, and zeros between two heads."""
        if self.P == 1:
            return x_LL
        rows = lax.broadcasted_iota(jnp.int32, (self.L, 1), 0) // (self.L // self.P)
        return jnp.where(rows == self._lanes, x_LL, 0)

    def column(self, ref: Any, p: int) -> Array | float:
        """A scalar of each token for head p, (C, 1)."""
        return 1.0 if ref is None else ref[0, 0, :, p : p + 1]

    def in_lanes(self, ref: Any) -> Array | float:
        """A scalar of each token in the lanes of its head, (C, L)."""
        if ref is None:
            return 1.0
        lanes = jnp.broadcast_to(ref[0, 0, :, 0:1], (self.C, self.L))
        for p in range(1, self.P):
            lanes = jnp.where(self._lanes == p, ref[0, 0, :, p : p + 1], lanes)
        return lanes

    def weights(self, p: int) -> Array:
        """a_ij for head p; 0 where j > i, and between segments."""
        if self.x.log_decay is None:
            return self.visible.astype(jnp.float32)
        # Σ_{j<t≤i} g_t, a sum of its own terms: see decay.py.
        after = jnp.where(self.is_before, self.x.log_decay[0, 0, :, p : p + 1], 0.0)
        sums = self.product(self.is_past.astype(jnp.float32), after, (1, 0))
        return jnp.where(self.visible, jnp.exp(sums), 0.0)

    def scaled(self, x_CL: Array, scale: Array | float) -> Array:
        return x_CL if isinstance(scale, float) else (x_CL * scale).astype(x_CL.dtype)

    def spread(self, x_C1: Array, p: int) -> Array:
        """A scalar of each token in the lanes of head p, and zeros in others."""
        return self.of_head(jnp.broadcast_to(x_C1, (self.C, self.L)), p)

    def add_to(self, sums: Sums) -> None:
        """S and z behind the chunk."""
        writes = self.scaled(self.k, self.in_lanes(self.x.writes))
        kept_s, kept_z = self.kept(sums)
        sums.s[...] = kept_s + self.on_diagonal(self.product(writes, self.v, (0, 0)))
        sums.z[...] = kept_z + jnp.sum(writes.astype(jnp.float32), axis=0, keepdims=True)

    def kept(self, sums: Sums) -> tuple[Array, Array]:
        """f S and f z."""
        keeps = 1.0 if self.x.keeps is None else self.x.keeps[0, 0, 0]
        return sums.s[...] * keeps, sums.z[...] * keeps


def _start(sums: Sums, first: Sums) -> None:
    """Sets the sums before the first chunk of a scan."""
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sums.s[...] = first.s[0, 0]
        sums.z[...] = first.z[0, 0]


def _finish(sums: Sums, last: Sums) -> None:
    """Writes the sums behind the last chunk of a scan."""
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        last.s[0, 0] = sums.s[...]
        last.z[0, 0] = sums.z[...]


def output_kernel(P: int, x: Tokens, first: Sums, y: Any, denominator: Any, last: Sums, sums: Sums) -> None:
    """y, d, and the sums behind the chunk."""
    _start(sums, first)
    chunk = _Chunk(P, x)
    S, z = sums.s[...], sums.z[...]
    numerator = chunk.product(chunk.q, S.astype(chunk.q.dtype), (1, 0)) * chunk.in_lanes(x.reads)
    read = chunk.q.astype(jnp.float32) * z
    divisor = jnp.zeros((chunk.C, chunk.L), jnp.float32)
    for p in range(P):
        scores = chunk.product(chunk.of_head(chunk.q, p), chunk.k, (1, 1)) * chunk.weights(p)
        numerator += chunk.product(scores.astype(chunk.v.dtype), chunk.of_head(chunk.v, p), (1, 0))
        if denominator is not None:
            d = (jnp.sum(scores, axis=1, keepdims=True)
                 + chunk.column(x.reads, p) * jnp.sum(chunk.of_head(read, p), axis=1, keepdims=True))
            denominator[0, 0, :, p : p + 1] = d
            divisor += chunk.spread(d, p)
    y[0] = (numerator if denominator is None else numerator / (divisor + EPSILON)).astype(y.dtype)
    chunk.add_to(sums)
    _finish(sums, last)


def query_gradient_kernel(P: int, x: Tokens, first: Sums, out: Gradients, sums: Sums) -> None:
    """dq, e and, for the gradient of a decay, b_i ∂L/∂b_i and the sums before the chunk."""
    _start(sums, first)
    chunk = _Chunk(P, x)
    u = x.u[0]
    S, z = sums.s[...], sums.z[...]
    reads = chunk.in_lanes(x.reads)
    from_state = chunk.product(u, S.astype(u.dtype), (1, 1)) * reads
    N = from_state
    keys = jnp.broadcast_to(z, N.shape) * reads
    from_total = keys
    q = chunk.q.astype(jnp.float32)
    pairs = []
    for p in range(P):
        weights, k = chunk.weights(p), chunk.of_head(chunk.k, p)
        scores = chunk.product(chunk.of_head(u, p), chunk.v, (1, 1)) * weights
        N += chunk.product(scores.astype(chunk.k.dtype), k, (1, 0))
        if x.r is not None:
            keys += chunk.product(weights.astype(chunk.k.dtype), k, (1, 0))
            if out.states is not None:
                plain = chunk.product(chunk.of_head(chunk.q, p), chunk.k, (1, 1))
                pairs.append(jnp.sum(plain * scores, axis=1, keepdims=True))
    if x.r is not None:
        e_lanes = exact_lanes = jnp.zeros_like(N)
        for p in range(P):
            r = chunk.column(x.r, p)
            e = -r * jnp.sum(chunk.of_head(q * N, p), axis=1, keepdims=True)
            e_lanes += chunk.spread(e, p)
            if pairs:
                e = -r * (pairs[p] + jnp.sum(chunk.of_head(q * from_state, p), axis=1, keepdims=True))
                exact_lanes += chunk.spread(e, p)
            out.e[0, 0, :, p : p + 1] = e
        N += e_lanes * keys
        from_state += exact_lanes * from_total
    out.q[0] = N.astype(out.q.dtype)
    if out.states is not None:
        for p in range(P):
            out.reads[0, 0, :, p : p + 1] = jnp.sum(chunk.of_head(q * from_state, p), axis=1, keepdims=True)
        out.states.s[0, 0, 0] = S
        out.states.z[0, 0, 0] = z
    chunk.add_to(sums)


def key_gradient_kernel(P: int, x: Tokens, first: Sums, out: Gradients, last: Sums, sums: Sums) -> None:
    """dk, dv, the gradients of the sums before the chunk and, for that of a decay, its other terms."""
    _start(sums, first)
    chunk = _Chunk(P, x)
    u = x.u[0]
    dS, dz = sums.s[...], sums.z[...]
    writes = chunk.in_lanes(x.writes)
    behind = (chunk.product(chunk.v, dS.astype(chunk.v.dtype), (1, 1)) + dz) * writes
    dk = behind
    dv = chunk.product(chunk.k, dS.astype(chunk.k.dtype), (1, 0)) * writes
    for p in range(P):
        weights, q = chunk.weights(p), chunk.of_head(chunk.q, p)
        plain = chunk.product(q, chunk.k, (1, 1))
        dplain = chunk.product(chunk.of_head(u, p), chunk.v, (1, 1))
        if x.e is not None:
            dplain += chunk.column(x.e, p)
        dk += chunk.product((dplain * weights).astype(chunk.q.dtype), q, (0, 0))
        dv += chunk.product((plain * weights).astype(u.dtype), chunk.of_head(u, p), (0, 0))
        if out.inside is not None:
            # Of pairs with token t between them; a difference of sums over all pairs would not be exact.
            upto = chunk.product(chunk.is_past.astype(jnp.float32), plain * dplain * weights, (0, 0))
            out.inside[0, 0, :, p : p + 1] = jnp.sum(jnp.where(chunk.is_before, upto, 0.0), axis=1, keepdims=True)
            k = chunk.k.astype(jnp.float32)
            out.writes[0, 0, :, p : p + 1] = jnp.sum(chunk.of_head(k * behind, p), axis=1, keepdims=True)
    out.k[0] = dk.astype(out.k.dtype)
    out.v[0] = dv.astype(out.v.dtype)
    kept_s, kept_z = chunk.kept(sums)
    if out.keeps is not None:
        out.keeps[0, 0, 0] = jnp.sum(kept_s * x.s[0, 0, 0], axis=0, keepdims=True) + kept_z * x.z[0, 0, 0]
    reading = chunk.scaled(chunk.q, chunk.in_lanes(x.reads))
    sums.s[...] = kept_s + chunk.on_diagonal(chunk.product(reading, u, (0, 0)))
    total = kept_z
    if x.e is not None:
        total += jnp.sum(chunk.q.astype(jnp.float32) * (chunk.in_lanes(x.reads) * chunk.in_lanes(x.e)), axis=0,
                         keepdims=True)
    sums.z[...] = total
    _finish(sums, last)
