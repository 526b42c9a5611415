"""The delta rule on a GPU: the launches of its kernels, forward and backward.

The backward pass saves the inputs and recomputes systems and states. No atomics: results are deterministic. The
kernels are in ``gpu_kernels``.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..dispatch import Call, refuses_heads
from ..gpu.chunks import ChunkMask
from ..gpu.launch import Grid, chunk_mask, decay_gradient, pad_heads, pad_runs, pad_scalars, pad_state
from ..gpu.products import COLUMN_TILE, LaunchConfig, Tiles
from ..partition import by_batch_and_heads
from ..remat import save_for_backward
from . import gpu_kernels
from .gpu_kernels import DecayWrites, Inputs, KeyGradient, Pairs, QueryGradient, Scan

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
    """The delta rule by these kernels, for log decays that are 0 on padding. Without a GPU they are interpreted, which
    is slow and for tests."""
    return _attend(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH)


class _Padded(NamedTuple):
    """A call's inputs, padded with zeros to whole chunks and blocks."""

    q: Array
    k: Array
    v: Array
    beta: Array
    mask: ChunkMask

    @classmethod
    def of(cls, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, runs_BT: Array | None,
           log_decay_BTH: Array | None) -> "_Padded":
        beta_BHT = pad_scalars(beta_BTH, CHUNK)
        assert beta_BHT is not None
        mask = chunk_mask(pad_runs(runs_BT, CHUNK), pad_scalars(log_decay_BTH, CHUNK), CHUNK)
        return cls(pad_heads(q_BTHM, CHUNK), pad_heads(k_BTHM, CHUNK), pad_heads(v_BTHD, CHUNK), beta_BHT, mask)

    @property
    def narrow(self) -> bool:
        """Whether there are registers to load operands ahead of their use."""
        return self.q.shape[3] <= COLUMN_TILE and self.q.dtype == jnp.bfloat16

    def grid(self, rows: Array, columns: Array, *, tile: int, warps: int) -> Grid:
        """One program per chunk, for a state of these rows and columns. Products are in float32."""
        config = LaunchConfig.of(Tiles(CHUNK, tile, warps, stages=1), self.beta)
        return Grid.of("delta_rule", config, CHUNK, self.mask, rows, columns)

    def scan_grid(self) -> Grid:
        """One program per sequence, head and tile of the state's columns. Narrow tiles make more programs of the
        sequential part."""
        tiles = Tiles(CHUNK, 32 if self.narrow else 16, warps=4, stages=2 if self.narrow else 1)
        return Grid.of("delta_rule", LaunchConfig.of(tiles, self.beta), self.q.shape[1], self.mask, self.q, self.v)

    def output_grid(self) -> Grid:
        """One program per chunk and tile of D."""
        return self.grid(self.q, self.v, tile=COLUMN_TILE, warps=4 if self.q.shape[3] <= COLUMN_TILE else 8)

    def inverse(self) -> Array:
        """(1 + A)⁻¹ of every chunk, (B, H, N, C, C)."""
        grid = self.grid(self.k, self.k, tile=self.k.shape[3], warps=4)
        lower = grid.launch(gpu_kernels.system_kernel, "system",
                            [Inputs(k=grid.reads("bthW", self.k), beta=grid.reads("bht", self.beta))],
                            grid.writes("bhnCC"))
        grid = self.grid(self.k, self.k, tile=self.k.shape[3], warps=1)._replace(mask=ChunkMask())
        return grid.launch(gpu_kernels.inverse_kernel, "inverse", [grid.reads("bhnCC", lower)], grid.writes("bhnCC"))

    def scan(self, inverse: Array, initial_BHMD: Array) -> Scan:
        """The states before the chunks, U, and the final state."""
        grid = self.scan_grid()
        inputs = Inputs(k=grid.reads("bthW", self.k), v=grid.reads("bthU", self.v), beta=grid.reads("bht", self.beta))
        return grid.launch(
            gpu_kernels.states_kernel, "states",
            [inputs, grid.reads("bhnCC", inverse), grid.reads("bhWU", pad_state(initial_BHMD))], _scan_outputs(grid))


def _scan_outputs(grid: Grid) -> Scan:
    return Scan(grid.writes("bhnWU"), grid.writes("bthU"), grid.writes("bhWU"))


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def _attend(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH):
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH)[0]


_INPUTS = "bthm", "bthm", "bthd", "bth", "bhmd", "bt", "bth"


def _attend_forward(*inputs):
    y_BTHD, end_BHMD = by_batch_and_heads(_forward, _INPUTS, ["bthd", "bhmd"])(*inputs)
    return (save_for_backward(y_BTHD), end_BHMD), inputs


def _attend_backward(inputs, gradients):
    *dinputs, dlog_decay_BTH = by_batch_and_heads(
        _backward, [*_INPUTS, "bthd", "bhmd"], ["bthm", "bthm", "bthd", "bth", "bhmd", "bth"])(*inputs, *gradients)
    return *dinputs, None, dlog_decay_BTH


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
             runs_BT: Array | None, log_decay_BTH: Array | None) -> tuple[Array, Array]:
    """y and the final state."""
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    x = _Padded.of(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH)
    past = x.scan(x.inverse(), initial_BHMD)
    grid = x.output_grid()
    y = grid.launch(gpu_kernels.output_kernel, "output",
                    [Inputs(grid.reads("bthW", x.q), grid.reads("bthW", x.k)),
                     Scan(grid.reads("bhnWU", past.states), grid.reads("bthU", past.rows), None)],
                    grid.writes("bthU", x.v.dtype))
    return y[:, :T, :, :D], past.end[:, :, :M, :D]


def _backward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
              runs_BT: Array | None, log_decay_BTH: Array | None, dy_BTHD: Array, dend_BHMD: Array
              ) -> tuple[Array | None, ...]:
    """Gradients of q, k, v, β, the initial state and, if present, the decay."""
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    x = _Padded.of(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH)
    dy, decays = pad_heads(dy_BTHD, CHUNK), log_decay_BTH is not None
    inverse = x.inverse()
    forward = x.scan(inverse, initial_BHMD)

    grid = x.output_grid()
    local = grid.launch(gpu_kernels.local_gradient_kernel, "local_gradient",
                        [Inputs(grid.reads("bthW", x.q), grid.reads("bthW", x.k), dy=grid.reads("bthU", dy))],
                        grid.writes("bthU"))
    grid = x.scan_grid()
    backward: Scan = grid.launch(
        gpu_kernels.state_gradients_kernel, "state_gradients",
        [Inputs(grid.reads("bthW", x.q), grid.reads("bthW", x.k), beta=grid.reads("bht", x.beta),
                dy=grid.reads("bthU", dy)),
         grid.reads("bhnCC", inverse), grid.reads("bthU", local), grid.reads("bhWU", pad_state(dend_BHMD))],
        _scan_outputs(grid))

    grid = x.grid(x.k, x.v, tile=x.v.shape[3], warps=8)
    pairs: Pairs = grid.launch(
        gpu_kernels.pairs_kernel, "pairs",
        [Inputs(grid.reads("bthW", x.q if decays else None), grid.reads("bthW", x.k), grid.reads("bthU", x.v),
                grid.reads("bht", x.beta), grid.reads("bthU", dy)),
         grid.reads("bthU", forward.rows), grid.reads("bthU", backward.rows)],
        Pairs(grid.writes("bhnCC"), grid.writes("bhnCC"), grid.writes("bthU", x.v.dtype), grid.writes("bht"),
              grid.writes("bht") if decays else None))

    # From here on tiles are of M: the states' rows are the columns of the grid.
    grid = x.grid(x.v, x.k, tile=COLUMN_TILE, warps=8)
    dq: QueryGradient = grid.launch(
        gpu_kernels.query_gradient_kernel, "dq",
        [Inputs(grid.reads("bthU", x.q if decays else None), grid.reads("bthU", x.k), dy=grid.reads("bthW", dy)),
         grid.reads("bhnUW", forward.states), grid.reads("bhnCC", pairs.dqueries)],
        QueryGradient(grid.writes("bthU", x.k.dtype), grid.writes("ubht") if decays else None))
    grid = x.grid(x.v, x.k, tile=COLUMN_TILE // 2, warps=8)
    dk: KeyGradient = grid.launch(
        gpu_kernels.key_gradient_kernel, "dk",
        [Inputs(grid.reads("bthU", x.q), grid.reads("bthU", x.k), beta=grid.reads("bht", x.beta)),
         *(Scan(grid.reads("bhnUW", scan.states), grid.reads("bthW", scan.rows), None) for scan in (forward, backward)),
         Pairs(grid.reads("bhnCC", pairs.dqueries), grid.reads("bhnCC", pairs.dkeys))],
        KeyGradient(grid.writes("bthU", x.k.dtype), grid.writes("ubht"),
                    DecayWrites(grid.writes("ubht"), grid.writes("ubhn")) if decays else None))
    reads_BHT = dk.reads.sum(axis=0)
    dbeta_BTH = (pairs.dbeta - reads_BHT).transpose(0, 2, 1)[:, :T]
    dlog_decay_BTH = None
    if dk.decay is not None:
        behind_BHT, across_BHN = (terms.sum(axis=0) for terms in dk.decay)
        inside_BHT = pairs.inside + dq.reads.sum(axis=0) - x.beta * reads_BHT
        dlog_decay_BTH = decay_gradient(inside_BHT, behind_BHT, across_BHN)[:, :T]
    return (dq.dq[:, :T, :, :M], dk.dk[:, :T, :, :M], pairs.dv[:, :T, :, :D], dbeta_BTH.astype(beta_BTH.dtype),
            backward.end[:, :, :M, :D], dlog_decay_BTH)
