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
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..dispatch import Call, refuses_heads
from ..partition import by_batch_and_heads
from ..remat import kept
from ..state import EPSILON, State
from . import gpu_kernels
from .gpu_kernels import DecayWrites
from .gpu_launch import Grid, links_of, split_chunks
from .gpu_parts import Cut, Links, Sums, operand_dtype
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


def block_width(width: int) -> int:
    """The width of a block: a power of two that the matrix units take."""
    return max(16, pl.next_power_of_2(width))


class _Padded(NamedTuple):
    """A call's inputs, padded with zeros to whole spans and blocks."""

    q: Array
    k: Array
    v: Array
    initial: State
    runs_BT: Array | None
    log_decay_BHT: Array | None
    plan: Plan

    @classmethod
    def of(cls, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
           log_decay_BTH: Array | None, chosen: Plan) -> "_Padded":
        T, M, D = q_BTHM.shape[1], block_width(q_BTHM.shape[3]), block_width(v_BTHD.shape[3])
        if log_decay_BTH is not None:
            log_decay_BTH = log_decay_BTH.astype(jnp.float32)
            if runs_BT is not None:
                log_decay_BTH = jnp.where(runs_BT[:, :, None] < 0, 0.0, log_decay_BTH)
            log_decay_BTH = jnp.pad(log_decay_BTH, ((0, 0), (0, -T % chosen.span), (0, 0)))
        if runs_BT is not None:
            runs_BT = jnp.pad(runs_BT, ((0, 0), (0, -T % chosen.span)), constant_values=-1)
        return cls(_fill(q_BTHM, M, chosen), _fill(k_BTHM, M, chosen), _fill(v_BTHD, D, chosen),
                   _fill_state(initial, M, D), runs_BT,
                   None if log_decay_BTH is None else log_decay_BTH.transpose(0, 2, 1), chosen)

    def links(self, chunk: int) -> Links:
        """Segments and decay of the call, in chunks of this length."""
        return links_of(self.runs_BT, self.log_decay_BHT, chunk)

    @property
    def serial(self) -> bool:
        return self.plan.schedule == "serial"


def _fill(x_BTHW: Array, width: int, chosen: Plan) -> Array:
    _, T, _, W = x_BTHW.shape
    return jnp.pad(x_BTHW, ((0, 0), (0, -T % chosen.span), (0, 0), (0, width - W)))


def _fill_state(state: State, M: int, D: int) -> State:
    rows, columns = (0, M - state.s_BHMD.shape[2]), (0, D - state.s_BHMD.shape[3])
    return State(jnp.pad(state.s_BHMD, ((0, 0), (0, 0), rows, columns)), jnp.pad(state.z_BHM, ((0, 0), (0, 0), rows)))


def _turned(state: State) -> State:
    """States with rows and columns exchanged."""
    return State(state.s_BHMD.swapaxes(-2, -1), state.z_BHM)


MakePlan = Callable[[int, int, int, int, int, jnp.dtype], Plan]
"""(B, T, H, M, D, dtype of the operands) ↦ the plan."""


def _chosen(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, make_plan: MakePlan) -> Plan:
    """One plan for all devices, as if each had its share of sequences and heads, so that the sums of spans saved by the
    forward pass have one shape."""
    B, T, H, M = q_BTHM.shape
    return make_plan(-(-B * H // device.count()), T, 1, block_width(M), block_width(v_BTHD.shape[3]),
                     operand_dtype(q_BTHM, k_BTHM, v_BTHD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, normalize: bool,
           make_plan: MakePlan, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """:func:`pallas_gpu` with a given plan."""
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan, log_decay_BTH)[0]


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan, log_decay_BTH):
    links = {"bt": runs_BT, "bth": log_decay_BTH}
    links = {letters: x for letters, x in links.items() if x is not None}
    chosen = _chosen(q_BTHM, k_BTHM, v_BTHD, make_plan)

    def forward(q_BTHM, k_BTHM, v_BTHD, s_BHMD, z_BHM, *given):
        given = dict(zip(links, given, strict=True))
        return _forward(q_BTHM, k_BTHM, v_BTHD, State(s_BHMD, z_BHM), given.get("bt"), given.get("bth"), normalize,
                        chosen)

    y_BTHD, s_BHMD, z_BHM, *results = by_batch_and_heads(
        forward, ["bthm", "bthm", "bthd", "bhmd", "bhm", *links],
        ["bthd", "bhmd", "bhm", *_letters_saved(chosen, normalize)],
    )(q_BTHM, k_BTHM, v_BTHD, *initial, *links.values())
    y_BTHD, results = kept((y_BTHD, results))
    return (y_BTHD, State(s_BHMD, z_BHM)), (q_BTHM, k_BTHM, v_BTHD, initial, links, results)


def _letters_saved(chosen: Plan, normalize: bool) -> list[str]:
    """Letters of the denominator and of the spans' sums, which the forward pass saves."""
    return ["bht"] * normalize + ["bhnpq", "bhnp"] * (chosen.schedule == "parallel")


def _attend_backward(normalize, make_plan, saved, gradients):
    q_BTHM, k_BTHM, v_BTHD, initial, links, results = saved
    dy_BTHD, dend = gradients
    chosen = _chosen(q_BTHM, k_BTHM, v_BTHD, make_plan)
    letters = _letters_saved(chosen, normalize)

    def backward(q_BTHM, k_BTHM, v_BTHD, dy_BTHD, s_BHMD, z_BHM, ds_BHMD, dz_BHM, *given):
        found = dict(zip([*letters, *links], given, strict=True))
        updates = State(found["bhnpq"], found["bhnp"]) if "bhnp" in found else None
        return _backward(q_BTHM, k_BTHM, v_BTHD, State(s_BHMD, z_BHM), found.get("bt"), found.get("bth"),
                         found.get("bht"), updates, dy_BTHD, State(ds_BHMD, dz_BHM), chosen)

    dq_BTHM, dk_BTHM, dv_BTHD, ds_BHMD, dz_BHM, *dlog_decay = by_batch_and_heads(
        backward,
        ["bthm", "bthm", "bthd", "bthd", *["bhmd", "bhm"] * 2, *letters, *links],
        ["bthm", "bthm", "bthd", "bhmd", "bhm", *["bth"] * ("bth" in links)],
    )(q_BTHM, k_BTHM, v_BTHD, dy_BTHD, *initial, *dend, *results, *links.values())
    return dq_BTHM, dk_BTHM, dv_BTHD, State(ds_BHMD, dz_BHM), None, dlog_decay[0] if dlog_decay else None


attend.defvjp(_attend_forward, _attend_backward)


def _forward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
             log_decay_BTH: Array | None, normalize: bool, chosen: Plan) -> tuple[Array, ...]:
    """y, the final sums, the denominator (B, H, T) where y is divided by it, and what each span adds to the sums."""
    T, M, D = q_BTHM.shape[1], q_BTHM.shape[3], v_BTHD.shape[3]
    padded = _Padded.of(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, chosen)
    q, k, v, start, *_ = padded
    grid = Grid.of(Cut.of(chosen.forward, q, k, v), chosen.span, padded.links(chosen.forward.chunk), k, v)
    updates = None
    if not padded.serial:
        updates = State(*grid.launch(gpu_kernels.states_kernel, "states", {"k": grid.whole(k), "v": grid.tiled(v)},
                                     {"end": grid.end(of_rows=True)})["end"])
    found = grid.launch(
        gpu_kernels.output_kernel, "forward",
        {"q": grid.whole(q), "k": grid.whole(k), "v": grid.tiled(v),
         "before": grid.before(start, updates, of_rows=True, total=normalize or updates is None)},
        {"y": grid.tiled(jax.ShapeDtypeStruct(v.shape, v.dtype)),
         "denominator": grid.column(_column_like(q)) if normalize else None,
         "end": grid.end(of_rows=True) if updates is None else None})
    end = _only_span(found["end"]) if updates is None else grid.end_of_sequence(start, updates)
    results = (found["y"][:, :T, :, :D], end.s_BHMD[:, :, :M, :D], end.z_BHM[:, :, :M])
    denominator = (found["denominator"][:, :, :T],) if normalize else ()
    return *results, *denominator, *(updates or ())


def _backward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
              log_decay_BTH: Array | None, denominator_BHT: Array | None, updates: State | None, dy_BTHD: Array,
              dend: State, chosen: Plan) -> tuple[Array, ...]:
    """Gradients of q, k, v, the initial sums and, if present, the decay.

    ``updates`` are what each span adds, as saved by the forward pass; None in the serial schedule.
    """
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    padded = _Padded.of(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, chosen)
    dy = _fill(dy_BTHD, padded.v.shape[3], padded.plan)
    r = None
    if denominator_BHT is not None:
        r = jnp.pad(1 / (denominator_BHT + EPSILON), ((0, 0), (0, 0), (0, padded.q.shape[1] - T)))
    links = padded.links(chosen.backward.chunk)
    dq, e, reads, states = _query_gradient(padded, updates, dy, r)
    after = _fill_state(dend, padded.q.shape[3], padded.v.shape[3])
    dk, dv, dinitial, writes = _key_and_value_gradients(padded, links, dy, r, e, after, states)
    results = (dq[:, :T, :, :M], dk[:, :T, :, :M], dv[:, :T, :, :D],
               dinitial.s_BHMD[:, :, :M, :D], dinitial.z_BHM[:, :, :M])
    if log_decay_BTH is None or reads is None or writes is None:
        return results
    dlog_decay_BTH = _decay_gradient(reads, writes, chosen.backward.chunk).transpose(0, 2, 1)[:, :T]
    if runs_BT is not None:
        dlog_decay_BTH = jnp.where(runs_BT[:, :, None] < 0, 0.0, dlog_decay_BTH)
    return *results, dlog_decay_BTH.astype(log_decay_BTH.dtype)


def _query_gradient(padded: _Padded, updates: State | None, dy: Array, r: Array | None
                    ) -> tuple[Array, Array | None, Array | None, Sums | None]:
    """dφ(q); e where y is normalised; and with a decay the reads, and S and z before each chunk."""
    q, k, v, start, *_, chosen = padded
    grid = Grid.of(Cut.of(chosen.queries, q, k, v), chosen.span, padded.links(chosen.queries.chunk), v, k)
    updates = None if updates is None else _turned(updates)
    decays = padded.log_decay_BHT is not None

    def launch(name: str, e: Array | None = None, *, dq: bool, made_e: bool) -> dict[str, Any]:
        return grid.launch(
            gpu_kernels.query_gradient_kernel, name,
            {"q": grid.tiled(q) if made_e or decays else None, "k": grid.tiled(k), "v": grid.whole(v),
             "dy": grid.whole(dy), "r": grid.column(r), "e": grid.column(e),
             "before": grid.before(_turned(start), updates, total=dq and (r is not None or decays))},
            {"dq": grid.tiled(jax.ShapeDtypeStruct(q.shape, q.dtype)) if dq else None,
             "made_e": grid.column_by_tile() if made_e else None,
             "reads": grid.column_by_tile() if dq and decays and grid.cut.operand == jnp.bfloat16 else None,
             "states": grid.states() if dq and decays else None})

    if r is None or grid.tile == grid.columns:
        found = launch("dq", dq=True, made_e=r is not None or decays)
        e = None if found["made_e"] is None else found["made_e"].sum(axis=0)
    else:
        e = launch("e", dq=False, made_e=True)["made_e"].sum(axis=0)
        found = launch("dq", e, dq=True, made_e=False)
    reads = None
    if found["reads"] is not None:
        reads = found["reads"].sum(axis=0)
    elif decays and e is not None:
        reads = -e if r is None else -EPSILON * r * e
    return found["dq"], None if r is None else e, reads, found["states"]


def _key_and_value_gradients(padded: _Padded, links: Links, dy: Array, r: Array | None, e: Array | None,
                             after: State, states: Sums | None
                             ) -> tuple[Array, Array, State, DecayWrites | None]:
    """dφ(k), dv, the gradient of the initial sums from that of the final sums, and terms of the decay's gradient."""
    q, k, v, *_, chosen = padded
    cut = Cut.of(chosen.backward, q, k, v)
    grid = Grid.of(cut, chosen.span, links, dy, q)
    updates = None
    if not padded.serial:
        updates = State(*grid.launch(
            gpu_kernels.state_gradients_kernel, "state_gradients",
            {"dy": grid.whole(dy), "q": grid.tiled(q), "r": grid.column(r), "e": grid.column(e)},
            {"end": grid.end()})["end"])
    joined = grid.tile == grid.columns and cut.operand == jnp.bfloat16 and q.shape[3] * v.shape[3] <= JOINED
    found = grid.launch(
        gpu_kernels.key_gradient_kernel, "dk_dv" if joined else "dk",
        {"q": grid.tiled(q), "k": grid.tiled(k) if joined or states is not None else None, "v": grid.whole(v),
         "dy": grid.whole(dy), "r": grid.column(r), "e": grid.column(e),
         "before": grid.before(_turned(after), updates, reverse=True),
         "states": None if states is None else grid.states(states)},
        {"dk": grid.tiled(jax.ShapeDtypeStruct(k.shape, k.dtype)),
         "dv": grid.whole(jax.ShapeDtypeStruct(v.shape, v.dtype)) if joined else None,
         "decay": None if states is None else grid.decay_writes(),
         "end": grid.end() if updates is None else None})
    dinitial = _turned(_only_span(found["end"]) if updates is None else
                       grid.end_of_sequence(_turned(after), updates, reverse=True))
    if joined:
        return found["dk"], found["dv"], dinitial, found["decay"]
    grid = Grid.of(cut, chosen.span, links, q, dy)
    dv = grid.launch(
        gpu_kernels.value_gradient_kernel, "dv",
        {"q": grid.whole(q), "k": grid.whole(k), "dy": grid.tiled(dy), "r": grid.column(r),
         "before": grid.before(after, None if updates is None else _turned(updates), total=False, reverse=True)},
        {"dv": grid.tiled(jax.ShapeDtypeStruct(v.shape, v.dtype))})["dv"]
    return found["dk"], dv, dinitial, found["decay"]


def _decay_gradient(reads_BHT: Array, writes: DecayWrites, C: int) -> Array:
    """dg_t = Σ_{j<t≤i} P_ij, (B, H, T), from the reads and from what the kernel for dk writes, by tile."""
    inside_BHNC, behind_BHNC = (split_chunks(x.sum(axis=0), C) for x in (writes.inside, writes.behind))
    from_here_BHNC = lax.cumsum(split_chunks(reads_BHT, C) - inside_BHNC, axis=3, reverse=True)
    up_to_here_BHNC = jnp.cumsum(behind_BHNC, axis=3) - behind_BHNC
    return (from_here_BHNC + up_to_here_BHNC + writes.across.sum(axis=0)[..., None]).reshape(reads_BHT.shape)


def _only_span(end: Sums) -> State:
    return State(*(x[:, :, 0] for x in end))


def _column_like(x_BTHW: Array) -> jax.ShapeDtypeStruct:
    """A scalar for each token and head."""
    B, T, H, _ = x_BTHW.shape
    return jax.ShapeDtypeStruct((B, H, T), jnp.float32)
