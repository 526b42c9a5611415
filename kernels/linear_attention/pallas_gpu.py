"""Causal linear attention on a GPU: the launches of its kernels, forward and backward.

The kernels in ``gpu_kernels`` scan spans of tokens in chunks with the state in registers: attention form inside the
chunk, recurrent form across chunks. The normaliser is the row sum of the same scores plus φ(q)·z, so no sum of keys per
token reaches memory. Where a state is small, as for GPT-2 in bfloat16, one scan computes the gradients of φ(k) and v:
their states are each other's transpose.

Two schedules differ in the length of a span. *Serial*: one span, the whole sequence; for many heads or short sequences.
*Parallel*: many concurrent spans; for few heads and long sequences. A first launch sums what each span adds to the
state, and each program then sums the earlier spans, which spares the launches that would carry the state.
``tuning.plan`` chooses the schedule and the number of spans by the bytes that programs move. As many programs run at a
time as the registers allow, and the last wave should be nearly full.

The backward pass saves q, k, v, the denominator and what each span adds to the state, and recomputes the states of
chunks. No atomics: results are deterministic.

Katharopoulos et al., "Transformers are RNNs", 2020 (the gradients: equations 13 to 15); Hua et al., "Transformer
Quality in Linear Time", 2022 (chunks); Beck et al., "Tiled Flash Linear Attention", 2025 (spans of chunks).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .. import device
from ..dispatch import Call, refuses_heads
from ..gpu.chunks import Sums
from ..gpu.launch import Grid, chunk_mask, decay_gradient, pad_heads, pad_runs, pad_scalars, pad_state
from ..gpu.products import LaunchConfig, Tiles, block_width, operand_dtype
from ..partition import by_batch_and_heads
from ..remat import save_for_backward
from ..state import EPSILON, State
from . import gpu_kernels
from .gpu_kernels import DecayWrites, Inputs, KeyGradient, Output, QueryGradient
from .tuning import ChunkSizes, Plan, plan, plan_with_decay, tiles_with_decay

WIDEST = 256
"""Greatest M and D."""
WIDEST_WITH_DECAY = 128
"""Wider heads with a decay spill registers."""
CHUNKS = (16, 32, 64, 128)
"""Chunk sizes: the matrix units and Triton's blocks take powers of two, of at least 16."""
JOINED = 64 * 64
"""Elements of a bfloat16 state up to which a program has registers for two gradients."""
DTYPES = ("float32", "bfloat16", "float16")


def pallas_gpu(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
               normalize: bool, chunk_sizes: ChunkSizes, schedule: Literal["serial", "parallel"] | None = None,
               log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Linear attention by the kernels of this folder. Without a GPU they are interpreted, which is slow and for tests.

    float16 is multiplied as TF32, which has its precision and a wider range: sums of keys soon overflow float16. A
    gradient beyond float16's range, such as that of a query whose weights are all zero, is infinite.

    Args:
        q_BTHM: φ(q); M from 1 to 256. Widths are padded to a power of two, T to whole chunks.
        k_BTHM: φ(k).
        v_BTHD: values; D from 1 to 256.
        initial: S₀ and z₀.
        runs_BT: segments (``kernels/segments.py``).
        causal: must be True; :func:`refuses` has the other conditions.
        normalize: divide by the sum of weights.
        chunk_sizes: C of each pass, powers of two.
        schedule: ``serial`` or ``parallel``; None picks by B·H, T and the device.
        log_decay_BTH: g ≤ 0, the log of the factor on the previous state; 0 on padding.
    """
    return attend(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize,
                  Planner(chunk_sizes, schedule, segments=runs_BT is not None, decay=log_decay_BTH is not None),
                  log_decay_BTH)


class Planner(NamedTuple):
    """Makes the plan of a call. Equal planners compare equal, as jax's cache requires."""

    chunk_sizes: ChunkSizes
    schedule: Literal["serial", "parallel"] | None
    segments: bool
    decay: bool = False

    def __call__(self, B: int, T: int, H: int, M: int, D: int, dtype: jnp.dtype) -> Plan:
        if self.decay:
            return plan_with_decay(B, T, H, M, D, dtype, self.chunk_sizes, self.schedule)
        return plan(B, T, H, M, D, dtype, self.chunk_sizes, self.schedule, segments=self.segments)


def refuses(call: Call) -> str | None:
    """Why these kernels do not support a call; None if they do."""
    if not call.causal:
        return "it supports only causal=True; for causal=False choose implementation='chunked'"
    refusal = refuses_heads(call, dict.fromkeys(DTYPES, WIDEST_WITH_DECAY if call.log_decay else WIDEST),
                            "with a decay " if call.log_decay else "")
    if refusal is not None:
        return refusal
    # Longer chunks spill registers.
    operand = operand_dtype(*call.heads.values())
    M, D = call.heads["q_BTHM"].shape[3], call.heads["v_BTHD"].shape[3]
    most = 64 if max(M, D) > 128 or operand != jnp.bfloat16 else CHUNKS[-1]
    if call.log_decay:
        most = min(tiles.chunk for tiles in tiles_with_decay(M, D, operand))
    if call.chunk_size is not None and (call.chunk_size not in CHUNKS or call.chunk_size > most):
        return (f"chunk_size={call.chunk_size}; for these widths and dtypes it supports "
                f"{', '.join(str(C) for C in CHUNKS if most >= C)}")
    return None


MakePlan = Callable[[int, int, int, int, int, jnp.dtype], Plan]
"""(B, T, H, M, D, dtype of the operands) ↦ the plan."""


def _chosen(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, make_plan: MakePlan) -> Plan:
    """One plan for all devices, as if each had its part of the sequences and heads, so that the sums of spans that the
    forward pass saves have one shape."""
    B, T, H, M = q_BTHM.shape
    return make_plan(-(-B * H // device.count()), T, 1, block_width(M), block_width(v_BTHD.shape[3]),
                     operand_dtype(q_BTHM, k_BTHM, v_BTHD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, normalize: bool,
           make_plan: MakePlan, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """:func:`pallas_gpu` with a given plan."""
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan, log_decay_BTH)[0]


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan, log_decay_BTH):
    chosen = _chosen(q_BTHM, k_BTHM, v_BTHD, make_plan)
    y_BTHD, s_BHMD, z_BHM, *saved = by_batch_and_heads(
        functools.partial(_forward, chosen, normalize), ["bthm", "bthm", "bthd", "bt", "bth", "bhmd", "bhm"],
        ["bthd", "bhmd", "bhm", *_SAVED])(q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, *initial)
    y_BTHD, saved = save_for_backward((y_BTHD, saved))
    return (y_BTHD, State(s_BHMD, z_BHM)), (q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, *initial, *saved)


_SAVED = "bht", "bhspq", "bhsp"
"""Letters of what the forward pass saves: the denominator, and the sums of the spans, or None."""


def _attend_backward(normalize, make_plan, saved, gradients):
    dy_BTHD, dend = gradients
    q_BTHM, k_BTHM, v_BTHD, *_ = saved
    chosen = _chosen(q_BTHM, k_BTHM, v_BTHD, make_plan)
    dq_BTHM, dk_BTHM, dv_BTHD, dlog_decay_BTH, ds_BHMD, dz_BHM = by_batch_and_heads(
        functools.partial(_backward, chosen),
        ["bthm", "bthm", "bthd", "bt", "bth", "bhmd", "bhm", *_SAVED, "bthd", "bhmd", "bhm"],
        ["bthm", "bthm", "bthd", "bth", "bhmd", "bhm"])(*saved, dy_BTHD, *dend)
    return dq_BTHM, dk_BTHM, dv_BTHD, State(ds_BHMD, dz_BHM), None, dlog_decay_BTH


attend.defvjp(_attend_forward, _attend_backward)


class _Padded(NamedTuple):
    """A call's inputs, padded with zeros to whole spans and blocks."""

    x: Inputs
    initial: State
    runs_BT: Array | None
    log_decay_BHT: Array | None
    plan: Plan

    @classmethod
    def of(cls, chosen: Plan, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
           log_decay_BTH: Array | None, s_BHMD: Array, z_BHM: Array) -> "_Padded":
        return cls(Inputs(*(pad_heads(x, chosen.span) for x in (q_BTHM, k_BTHM, v_BTHD))),
                   _pad_sums(s_BHMD, z_BHM), pad_runs(runs_BT, chosen.span), pad_scalars(log_decay_BTH, chosen.span),
                   chosen)

    def grid(self, tiles: Tiles, rows: Array, columns: Array) -> Grid:
        """The grid for a state of these rows and columns."""
        return Grid.of("linear_attention", LaunchConfig.of(tiles, *self.x[:3]), self.plan.span,
                       chunk_mask(self.runs_BT, self.log_decay_BHT, tiles.chunk), rows, columns)


def _pad_sums(s_BHMD: Array, z_BHM: Array) -> State:
    return State(pad_state(s_BHMD), jnp.pad(z_BHM, ((0, 0), (0, 0), (0, block_width(z_BHM.shape[2]) - z_BHM.shape[2]))))


def _transposed(state: State | None) -> Any:
    """States with rows and columns exchanged."""
    return None if state is None else State(state.s_BHMD.swapaxes(-2, -1), state.z_BHM)


def _forward(chosen: Plan, normalize: bool, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
             log_decay_BTH: Array | None, s_BHMD: Array, z_BHM: Array) -> tuple[Array | None, ...]:
    """y, the final sums, the denominator (B, H, T) where y is divided by it, and what each span adds to the sums."""
    T, M, D = q_BTHM.shape[1], q_BTHM.shape[3], v_BTHD.shape[3]
    padded = _Padded.of(chosen, q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, s_BHMD, z_BHM)
    (q, k, v, *_), start = padded.x, padded.initial
    grid = padded.grid(chosen.forward, k, v)
    inputs = Inputs(k=grid.reads("bthW", k), v=grid.reads("bthU", v))
    updates = None
    if chosen.schedule == "parallel":
        updates = State(*grid.launch(gpu_kernels.states_kernel, "states", [inputs], grid.end(of_rows=True)))
    out: Output = grid.launch(
        gpu_kernels.output_kernel, "forward",
        [inputs._replace(q=grid.reads("bthW", q)),
         grid.before(start, updates, of_rows=True, total=normalize or updates is None)],
        Output(grid.writes("bthU", v.dtype), grid.writes("bht") if normalize else None,
               grid.end(of_rows=True) if updates is None else None))
    end = _only_span(out.end) if updates is None else grid.end_of_sequence(start, updates)
    return (out.y[:, :T, :, :D], end.s_BHMD[:, :, :M, :D], end.z_BHM[:, :, :M],
            out.denominator[:, :, :T] if normalize else None, *(updates or (None, None)))


def _backward(chosen: Plan, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
              log_decay_BTH: Array | None, s_BHMD: Array, z_BHM: Array, denominator_BHT: Array | None,
              update_s_BHSPQ: Array | None, update_z_BHSP: Array | None, dy_BTHD: Array, ds_BHMD: Array, dz_BHM: Array
              ) -> tuple[Array | None, ...]:
    """Gradients of q, k, v, the decay and the initial sums, from what the forward pass saves and those of its results.

    The updates are what each span adds; None in the serial schedule.
    """
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    padded = _Padded.of(chosen, q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay_BTH, s_BHMD, z_BHM)
    updates = None if update_s_BHSPQ is None or update_z_BHSP is None else State(update_s_BHSPQ, update_z_BHSP)
    r = None
    if denominator_BHT is not None:
        r = jnp.pad(1 / (denominator_BHT + EPSILON), ((0, 0), (0, 0), (0, padded.x.q.shape[1] - T)))
    padded = padded._replace(x=padded.x._replace(dy=pad_heads(dy_BTHD, chosen.span), r=r))
    dq, e, reads, states = _query_gradient(padded, updates)
    padded = padded._replace(x=padded.x._replace(e=e))
    dk, dv, dinitial, writes = _key_and_value_gradients(padded, _pad_sums(ds_BHMD, dz_BHM), states)
    dlog_decay_BTH = None
    if log_decay_BTH is not None and reads is not None and writes is not None:
        inside, behind, across = (x.sum(axis=0) for x in writes)
        dlog_decay_BTH = decay_gradient(reads - inside, behind, across)[:, :T].astype(log_decay_BTH.dtype)
    return (dq[:, :T, :, :M], dk[:, :T, :, :M], dv[:, :T, :, :D], dlog_decay_BTH,
            dinitial.s_BHMD[:, :, :M, :D], dinitial.z_BHM[:, :, :M])


def _query_gradient(padded: _Padded, updates: State | None
                    ) -> tuple[Array, Array | None, Array | None, Sums | None]:
    """dφ(q); e where y is normalised; and with a decay the reads, and S and z before each chunk."""
    x, r = padded.x, padded.x.r
    grid = padded.grid(padded.plan.queries, x.v, x.k)
    decays = padded.log_decay_BHT is not None

    def launch(name: str, e: Array | None = None, *, dq: bool, makes_e: bool) -> QueryGradient:
        inputs = Inputs(
            grid.reads("bthU", x.q if makes_e or decays else None), grid.reads("bthU", x.k), grid.reads("bthW", x.v),
            grid.reads("bthW", x.dy), grid.reads("bht", r), grid.reads("bht", e))
        before = grid.before(_transposed(padded.initial), _transposed(updates), total=dq and (r is not None or decays))
        return grid.launch(gpu_kernels.query_gradient_kernel, name, [inputs, before], QueryGradient(
            grid.writes("bthU", x.q.dtype) if dq else None, grid.writes("ubht") if makes_e else None,
            grid.writes("ubht") if dq and decays and grid.config.operand == jnp.bfloat16 else None,
            Sums(grid.writes("bhnWU"), grid.writes("bhnU")) if dq and decays else None))

    if r is None or grid.tile == grid.columns:
        out = launch("dq", dq=True, makes_e=r is not None or decays)
        e = None if out.e is None else out.e.sum(axis=0)
    else:
        e = launch("e", dq=False, makes_e=True).e.sum(axis=0)
        out = launch("dq", e, dq=True, makes_e=False)
    reads = None
    if out.reads is not None:
        reads = out.reads.sum(axis=0)
    elif decays and e is not None:
        reads = -e if r is None else -EPSILON * r * e
    return out.dq, None if r is None else e, reads, out.states


def _key_and_value_gradients(padded: _Padded, after: State, states: Sums | None
                             ) -> tuple[Array, Array, State, DecayWrites | None]:
    """dφ(k), dv, the gradient of the initial sums from that of the final sums, and terms of the decay's gradient."""
    x = padded.x
    grid = padded.grid(padded.plan.backward, x.dy, x.q)
    inputs = Inputs(grid.reads("bthU", x.q), dy=grid.reads("bthW", x.dy), r=grid.reads("bht", x.r),
                    e=grid.reads("bht", x.e))
    updates = None
    if padded.plan.schedule == "parallel":
        updates = State(*grid.launch(gpu_kernels.state_gradients_kernel, "state_gradients", [inputs], grid.end()))
    joined = (grid.tile == grid.columns and grid.config.operand == jnp.bfloat16
              and x.q.shape[3] * x.v.shape[3] <= JOINED)
    decay = None
    if states is not None:
        states = Sums(grid.reads("bhnWU", states.state), grid.reads("bhnU", states.total))
        decay = DecayWrites(grid.writes("ubht"), grid.writes("ubht"), grid.writes("ubhn"))
    out: KeyGradient = grid.launch(
        gpu_kernels.key_gradient_kernel, "dk_dv" if joined else "dk",
        [inputs._replace(k=grid.reads("bthU", x.k if joined or states is not None else None),
                         v=grid.reads("bthW", x.v)),
         grid.before(_transposed(after), updates, reverse=True), states],
        KeyGradient(grid.writes("bthU", x.k.dtype), grid.writes("bthW", x.v.dtype) if joined else None,
                    grid.end() if updates is None else None, decay))
    dinitial = _transposed(_only_span(out.end) if updates is None else
                           grid.end_of_sequence(_transposed(after), updates, reverse=True))
    if joined:
        return out.dk, out.dv, dinitial, out.decay
    grid = padded.grid(padded.plan.backward, x.q, x.dy)
    dv = grid.launch(
        gpu_kernels.value_gradient_kernel, "dv",
        [Inputs(grid.reads("bthW", x.q), grid.reads("bthW", x.k), dy=grid.reads("bthU", x.dy),
                r=grid.reads("bht", x.r)),
         grid.before(after, _transposed(updates), total=False, reverse=True)], grid.writes("bthU", x.v.dtype))
    return out.dk, dv, dinitial, out.decay


def _only_span(end: Sums | None) -> State:
    assert end is not None
    return State(*(x[:, :, 0] for x in end))
