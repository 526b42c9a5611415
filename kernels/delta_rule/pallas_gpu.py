"""The delta rule on a GPU: the launches of its kernels, forward and backward.

The backward pass saves the inputs and recomputes systems and states. No atomics: results are deterministic. The
kernels are in ``gpu_kernels``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..dispatch import Call, refuses_heads
from ..linear_attention.gpu_launch import Block, Grid, links_of, split_chunks
from ..linear_attention.gpu_parts import SLAB, Cut, Links
from ..linear_attention.pallas_gpu import block_width
from ..linear_attention.tuning import Tiles
from ..partition import by_batch_and_heads
from ..remat import kept
from . import gpu_kernels
from .gpu_kernels import DecayParts

CHUNK = 64
WIDEST = {"bfloat16": 128, "float16": 64, "float32": 64}
"""Greatest M and D by dtype; wider heads spill registers."""


def refuses(call: Call) -> str | None:
    """Why these kernels do not support a call; None if they do."""
    if call.chunk_size not in (None, CHUNK):
        return f"chunk_size={call.chunk_size}; it supports {CHUNK}"
    return refuses_heads(call, WIDEST, "in this dtype ")


def pallas_gpu(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
               runs_BT: Array | None, *, log_decay_BTH: Array | None = None) -> tuple[Array, Array]:
    """The delta rule by these kernels. Without a GPU they are interpreted, which is slow and for tests."""
    y_BTHD, end_BHMD = _attend(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH)
    return y_BTHD, end_BHMD


class _Launches(NamedTuple):
    """The inputs of a call, padded to whole chunks and blocks, and what its launches share."""

    q: Array
    k: Array
    v: Array
    beta_BHT: Array
    links: Links

    @classmethod
    def of(cls, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, runs_BT: Array | None,
           log_decay_BTH: Array | None) -> "_Launches":
        tokens = (0, -q_BTHM.shape[1] % CHUNK)
        by_head = None if log_decay_BTH is None else jnp.pad(log_decay_BTH, ((0, 0), tokens, (0, 0))).transpose(0, 2, 1)
        if runs_BT is not None:
            runs_BT = jnp.pad(runs_BT, ((0, 0), tokens), constant_values=-1)
        return cls(fill(q_BTHM), fill(k_BTHM), fill(v_BTHD),
                   jnp.pad(beta_BTH.astype(jnp.float32), ((0, 0), tokens, (0, 0))).transpose(0, 2, 1),
                   links_of(runs_BT, by_head, CHUNK))

    @property
    def carried(self) -> int:
        """Columns of a state that a program carries: narrow tiles make more programs of the sequential part."""
        return 32 if self.narrow else 16

    @property
    def narrow(self) -> bool:
        """Whether there are registers to load operands ahead of their use."""
        return self.q.shape[3] <= SLAB and self.q.dtype == jnp.bfloat16

    @property
    def chunks(self) -> int:
        return self.q.shape[1] // CHUNK

    def grid(self, rows: Array, columns: Array, *, tile: int, warps: int, scan: bool = False) -> Grid:
        """One program per chunk, or with ``scan`` per sequence. Products are in float32."""
        stages = 2 if scan and self.narrow else 1
        cut = Cut.of(Tiles(CHUNK, tile, warps, stages), self.beta_BHT)
        return Grid.of(cut, self.q.shape[1] if scan else CHUNK, self.links, rows, columns, "delta_rule")

    def systems(self, grid: Grid, given: Any = None) -> Block:
        """A C × C matrix for each chunk; an output unless given."""
        B, _, H, _ = self.q.shape
        if given is None:
            given = _output(B, H, self.chunks, CHUNK, CHUNK)
        return Block(given, pl.BlockSpec((None, None, grid.span // CHUNK, CHUNK, CHUNK),
                                         lambda u, h, s, b: (b, h, s, 0, 0)))

    def states(self, grid: Grid, given: Any = None, *, of_rows: bool = False) -> Block:
        """A tile of the state for each chunk, of its columns or of its rows; an output unless given."""
        (B, _, H, M), D = self.q.shape, self.v.shape[3]
        if given is None:
            given = _output(B, H, self.chunks, M, D)
        each, tile = grid.span // CHUNK, grid.tile
        if of_rows:
            return Block(given, pl.BlockSpec((None, None, each, tile, D), lambda u, h, s, b: (b, h, s, u, 0)))
        return Block(given, pl.BlockSpec((None, None, each, M, tile), lambda u, h, s, b: (b, h, s, 0, u)))

    def number_by_tile(self, grid: Grid) -> Block:
        """An output with one scalar per tile and chunk."""
        B, _, H, _ = self.q.shape
        return Block(_output(grid.columns // grid.tile, B, H, self.chunks),
                     pl.BlockSpec((None, None, None, grid.span // CHUNK), lambda u, h, s, b: (u, b, h, s)))

    def state(self, grid: Grid, given: Any = None) -> Block:
        """A tile of the initial or the final state; an output unless given."""
        B, _, H, M = self.q.shape
        if given is None:
            given = _output(B, H, M, self.v.shape[3])
        return Block(given, pl.BlockSpec((None, None, M, grid.tile), lambda u, h, s, b: (b, h, 0, u)))

    def inverse(self) -> Array:
        """(1 + A)⁻¹ of every chunk."""
        grid = self.grid(self.k, self.k, tile=self.k.shape[3], warps=4)
        lower = grid.launch(gpu_kernels.system_kernel, "system",
                            {"k": grid.whole(self.k), "beta": grid.column(self.beta_BHT)},
                            {"lower": self.systems(grid)})["lower"]
        grid = self.grid(self.k, self.k, tile=self.k.shape[3], warps=1)._replace(links=Links())
        return grid.launch(gpu_kernels.inverse_kernel, "inverse",
                           {"lower": self.systems(grid, lower)},
                           {"inverse": self.systems(grid)})["inverse"]

    def scan(self, inverse: Array, initial_BHMD: Array) -> dict[str, Array]:
        """The states before the chunks, U, and the final state."""
        grid = self.grid(self.k, self.v, tile=self.carried, warps=4, scan=True)
        return grid.launch(
            gpu_kernels.states_kernel, "states",
            {"k": grid.whole(self.k), "v": grid.tiled(self.v), "beta": grid.column(self.beta_BHT),
             "inverse": self.systems(grid, inverse), "start": self.state(grid, initial_BHMD)},
            {"states": self.states(grid),
             "written": grid.tiled(_output(*self.v.shape)), "end": self.state(grid)})


def _output(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def fill(x_BTHW: Array) -> Array:
    """x padded with zeros to whole chunks and a whole block of width."""
    _, T, _, W = x_BTHW.shape
    return jnp.pad(x_BTHW, ((0, 0), (0, -T % CHUNK), (0, 0), (0, block_width(W) - W)))


def _fill_state(state_BHMD: Array) -> Array:
    M, D = state_BHMD.shape[2:]
    return jnp.pad(state_BHMD, ((0, 0), (0, 0), (0, block_width(M) - M), (0, block_width(D) - D)))


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def _attend(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH):
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH)[0]


def _links(runs_BT: Array | None, log_decay_BTH: Array | None) -> dict[str, Array]:
    """Runs and log decays by the letters of their dimensions."""
    links = {"bt": runs_BT, "bth": log_decay_BTH}
    return {letters: x for letters, x in links.items() if x is not None}


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH):
    links = _links(runs_BT, log_decay_BTH)

    def forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, *given):
        given = dict(zip(links, given, strict=True))
        return _forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, given.get("bt"), given.get("bth"))

    results = by_batch_and_heads(forward, ["bthm", "bthm", "bthd", "bth", "bhmd", *links], ["bthd", "bhmd"])(
        q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, *links.values())
    y_BTHD, end_BHMD = results
    return (kept(y_BTHD), end_BHMD), (q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, links)


def _attend_backward(saved, gradients):
    q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, links = saved

    def backward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, dy_BTHD, dend_BHMD, *given):
        given = dict(zip(links, given, strict=True))
        return _backward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, given.get("bt"), given.get("bth"), dy_BTHD,
                         dend_BHMD)

    results = by_batch_and_heads(
        backward, ["bthm", "bthm", "bthd", "bth", "bhmd", "bthd", "bhmd", *links],
        ["bthm", "bthm", "bthd", "bth", "bhmd", *["bth"] * ("bth" in links)],
    )(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, *gradients, *links.values())
    return *results[:5], None, results[5] if "bth" in links else None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
             runs_BT: Array | None, log_decay_BTH: Array | None) -> tuple[Array, Array]:
    """y and the final state."""
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    launches = _Launches.of(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH)
    found = launches.scan(launches.inverse(), _fill_state(initial_BHMD))
    q, k, v = launches.q, launches.k, launches.v
    grid = launches.grid(q, v, tile=SLAB, warps=4 if q.shape[3] <= SLAB else 8)
    y = grid.launch(
        gpu_kernels.output_kernel, "output",
        {"q": grid.whole(q), "k": grid.whole(k), "written": grid.tiled(found["written"]),
         "states": launches.states(grid, found["states"])},
        {"y": grid.tiled(jax.ShapeDtypeStruct(v.shape, v.dtype))})["y"]
    return y[:, :T, :, :D], found["end"][:, :, :M, :D]


def _backward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
              runs_BT: Array | None, log_decay_BTH: Array | None, dy_BTHD: Array, dend_BHMD: Array
              ) -> tuple[Array, ...]:
    """Gradients of q, k, v, β, the initial state and, if present, the decay."""
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    launches = _Launches.of(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH)
    q, k, v, beta, _ = launches
    dy, decays = fill(dy_BTHD), log_decay_BTH is not None
    inverse = launches.inverse()
    found = launches.scan(inverse, _fill_state(initial_BHMD))

    grid = launches.grid(q, v, tile=SLAB, warps=4 if q.shape[3] <= SLAB else 8)
    local = grid.launch(gpu_kernels.local_gradient_kernel, "local_gradient",
                        {"q": grid.whole(q), "k": grid.whole(k), "dy": grid.tiled(dy)},
                        {"local": grid.tiled(_output(*v.shape))})["local"]
    grid = launches.grid(q, v, tile=launches.carried, warps=4, scan=True)
    like_k = jax.ShapeDtypeStruct(k.shape, k.dtype)
    errors = grid.tiled(_output(*v.shape))
    after = grid.launch(
        gpu_kernels.state_gradients_kernel, "state_gradients",
        {"q": grid.whole(q), "k": grid.whole(k), "dy": grid.tiled(dy), "beta": grid.column(beta),
         "inverse": launches.systems(grid, inverse), "local": grid.tiled(local),
         "start": launches.state(grid, _fill_state(dend_BHMD))},
        {"gradients": launches.states(grid), "errors": errors,
         "end": launches.state(grid)})

    grid = launches.grid(k, v, tile=v.shape[3], warps=8)
    written, column = grid.tiled(found["written"]), grid.column(_output(*beta.shape))
    pairs = grid.launch(
        gpu_kernels.pairs_kernel, "pairs",
        {"q": grid.whole(q) if decays else None, "k": grid.whole(k), "v": grid.tiled(v), "dy": grid.tiled(dy),
         "beta": grid.column(beta), "written": written, "errors": grid.tiled(after["errors"])},
        {"dqueries": launches.systems(grid), "dkeys": launches.systems(grid),
         "dv": grid.tiled(jax.ShapeDtypeStruct(v.shape, v.dtype)), "dbeta": column,
         "inside": column if decays else None})

    # From here on tiles are of M.
    grid = launches.grid(v, k, tile=SLAB, warps=8)
    dqueries, dkeys = (launches.systems(grid, pairs[name]) for name in ("dqueries", "dkeys"))
    states = launches.states(grid, found["states"], of_rows=True)
    of_queries = grid.launch(
        gpu_kernels.query_gradient_kernel, "dq",
        {"q": grid.tiled(q) if decays else None, "k": grid.tiled(k), "dy": grid.whole(dy), "states": states,
         "dqueries": dqueries},
        {"dq": grid.tiled(like_k), "reads": grid.column_by_tile() if decays else None})
    grid = launches.grid(v, k, tile=SLAB // 2, warps=8)
    dqueries, dkeys = (launches.systems(grid, pairs[name]) for name in ("dqueries", "dkeys"))
    states = launches.states(grid, found["states"], of_rows=True)
    of_keys = grid.launch(
        gpu_kernels.key_gradient_kernel, "dk",
        {"q": grid.tiled(q), "k": grid.tiled(k), "beta": grid.column(beta), "written": grid.whole(found["written"]),
         "errors": grid.whole(after["errors"]), "states": states,
         "gradients": launches.states(grid, after["gradients"], of_rows=True), "dqueries": dqueries, "dkeys": dkeys},
        {"dk": grid.tiled(like_k), "reads": grid.column_by_tile(),
         "decay": DecayParts(grid.column_by_tile(), launches.number_by_tile(grid)) if decays else None})
    reads_BHT = of_keys["reads"].sum(axis=0)
    dbeta_BTH = (pairs["dbeta"] - reads_BHT).transpose(0, 2, 1)[:, :T]
    results = (of_queries["dq"][:, :T, :, :M], of_keys["dk"][:, :T, :, :M], pairs["dv"][:, :T, :, :D],
               dbeta_BTH.astype(beta_BTH.dtype), after["end"][:, :, :M, :D])
    if not decays:
        return results
    dlog_decay_BHT = _decay_gradient(pairs["inside"] + of_queries["reads"].sum(axis=0) - beta * reads_BHT,
                                     *(x.sum(axis=0) for x in of_keys["decay"]))
    dlog_decay_BTH = dlog_decay_BHT.transpose(0, 2, 1)[:, :T]
    if runs_BT is not None:
        dlog_decay_BTH = jnp.where(runs_BT[:, :, None] < 0, 0.0, dlog_decay_BTH)
    return *results, dlog_decay_BTH


def _decay_gradient(from_here_BHT: Array, writes_BHT: Array, across_BHN: Array) -> Array:
    """dg_t = Σ_{j<t≤i} P_ij, (B, H, T), with P_ij the weight of a pair times its gradient. Pairs with a token in the
    chunk of t and pairs across the chunk are summed separately."""
    from_here_BHNC, behind_BHNC = split_chunks(from_here_BHT, CHUNK), split_chunks(writes_BHT, CHUNK)
    sums_BHNC = (lax.cumsum(from_here_BHNC, axis=3, reverse=True) + jnp.cumsum(behind_BHNC, axis=3) - behind_BHNC
                 + across_BHN[..., None])
    return sums_BHNC.reshape(from_here_BHT.shape)
