"""Launch parameters of the GPU kernels: the table, the defaults for other devices, and the plan of a call."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from compilation.launches import pallas_kernels
from kernels import device
from kernels.cases import find_cases
from kernels.linear_attention import linear_attention, tuning
from kernels.linear_attention.cases import LinearAttentionCase
from kernels.linear_attention.pallas_gpu import CHUNKS, WIDEST, block_width
from kernels.linear_attention.tuning import LONG, Plan, Row, Tiles, kernel_chunk_sizes, plan, row_for, rows

POWERS = (16, 32, 64, 128, 256)
DTYPES = ("float32", "bfloat16")


def tracing_for(kind: str = "NVIDIA H200", cores: int = 132):
    """Makes plans for this GPU."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def assert_legal(row: Row) -> None:
    """Within the limits of the kernels and of Triton's blocks; only a GPU can show the speed."""
    assert row.device
    assert row.M in POWERS
    assert row.D in POWERS
    assert row.dtype in DTYPES
    assert row.length in ("short", "long")
    assert row.programs_per_core is None or row.programs_per_core >= 0
    # The backward pass also has the transposed state, whose columns are those of M.
    of_queries = [(row.queries, row.M)] if row.queries else []
    for tiles, columns in ((row.forward, row.D), (row.backward, max(row.M, row.D)), *of_queries):
        assert tiles.chunk in CHUNKS
        assert tiles.tile in [power for power in POWERS if power <= columns]
        assert tiles.warps in (1, 2, 4, 8, 16)
        assert 1 <= tiles.stages <= 8


def assert_covers(found: Plan, tokens: int) -> None:
    """Spans are whole chunks of all launches, the last has a token, and the serial schedule has one span."""
    assert found.span % found.forward.chunk == found.span % found.backward.chunk == 0
    assert found.backward.chunk % found.queries.chunk == 0
    spans = -(-tokens // found.span)
    assert spans * found.span - tokens < found.span
    assert spans == 1 or found.schedule == "parallel"


def test_the_table_is_legal_and_says_what_was_measured():
    assert len(rows()) == len(json.loads(tuning.TABLE.read_text())), "two rows for the same key"
    for row in rows():
        assert_legal(row)
        assert row.measured, row


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_device_has_legal_defaults(dtype):
    with tracing_for("a GPU of next year"):
        for M, D, tokens in itertools.product(POWERS, POWERS, (1, LONG - 1, LONG)):
            row = row_for(tokens, M, D, dtype)
            assert row[:5] == ("a GPU of next year", M, D, dtype, "short" if tokens < LONG else "long")
            assert row.measured is None
            assert_legal(row)
    assert POWERS[-1] == WIDEST


def test_a_row_is_for_its_device_widths_dtype_and_lengths(monkeypatch, tmp_path):
    tiles = Tiles(chunk=128, tile=16, warps=2, stages=3)._asdict()
    entry = {"device": "NVIDIA H200", "M": 64, "D": 32, "dtype": "bfloat16", "length": "long", "forward": tiles,
             "backward": tiles | {"chunk": 32}, "programs_per_core": 0, "measured": {"milliseconds": 1.0}}
    table = tmp_path / "tuning.json"
    table.write_text(json.dumps([entry]))
    row, = tuning.read(table)
    monkeypatch.setattr(tuning, "table", lambda: {row[:5]: row})
    with tracing_for():
        assert row_for(LONG, 64, 32, "bfloat16") == row
        others = [(LONG - 1, 64, 32, "bfloat16"), (LONG, 32, 64, "bfloat16"), (LONG, 64, 32, "float32")]
        assert row not in [row_for(*other) for other in others]
        assert plan(1, LONG + 1, 1, 64, 32, "bfloat16") == Plan("serial", LONG + 128, row.forward, row.backward,
                                                                row.backward)
        parallel = plan(1, LONG + 1, 1, 64, 32, "bfloat16", schedule="parallel")
        assert_covers(parallel, LONG + 1)
    with tracing_for("NVIDIA A100"):
        assert row_for(LONG, 64, 32, "bfloat16").measured is None


@pytest.mark.parametrize(("width", "dtype", "others"), [(64, "bfloat16", False), (128, "bfloat16", True),
                                                        (64, "float32", True)])
def test_segments_have_tiles_of_their_own_where_registers_are_few(width, dtype, others):
    with tracing_for():
        plans = [plan(1, LONG, 12, width, width, dtype, segments=segments) for segments in (False, True)]
    assert (plans[0] != plans[1]) == others


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.thorough), 132])
def test_a_plan_covers_every_token(cores):
    lengths = (1, 15, 16, 17, 63, 64, 65, 500, 1000, 4096, 65_537, 2**22)
    with tracing_for(cores=cores):
        for tokens, sequences, M, D, dtype, chunk_size, schedule in itertools.product(
                lengths, (1, 12, 4096), (16, 256), (16, 64), DTYPES, (None, 16, 256), (None, "serial", "parallel")):
            chunk_sizes = kernel_chunk_sizes(tokens, M, D, dtype, chunk_size)
            found = plan(sequences, tokens, 1, M, D, dtype, chunk_sizes, schedule)
            assert (found.forward.chunk, found.backward.chunk) == chunk_sizes
            assert_covers(found, tokens)
            assert schedule in (None, found.schedule)
            if chunk_size is not None and chunk_size <= tokens:
                assert found.forward.chunk == found.backward.chunk == chunk_size
            assert max(found.forward.chunk, found.backward.chunk) < max(2 * tokens, 32), "most of a chunk is padding"


def test_the_schedule_follows_heads_and_length():
    with tracing_for():
        def schedule(batch, tokens, heads):
            return plan(batch, tokens, heads, 64, 64, "bfloat16").schedule

        assert schedule(1, 65_536, 12) == "parallel"
        assert schedule(1, 8192, 1) == "parallel"
        assert schedule(32, 8192, 16) == "serial"
        assert schedule(1, 128, 12) == "serial"


@pytest.mark.parametrize(("call", "spans", "waves"), [
    ((1, 8192, 96, 128), 1, 0.73), ((2, 16_384, 16, 128), 4, 0.97), ((4, 2048, 16, 128), 2, 0.97),
    ((8, 1024, 8, 64), 4, 0.97), ((1, 2**19, 12, 64), 64, 2.91)])
def test_the_last_wave_of_programs_is_nearly_full(call, spans, waves):
    """With 4 warps two programs share each of 132 multiprocessors, with 8 one has it alone."""
    B, T, H, width = call
    with tracing_for():
        found = plan(B, T, H, width, width, "bfloat16")
        assert -(-T // found.span) == spans
        for tiles in (found.forward, found.queries, found.backward):
            assert tuning.Launch(width, width, tiles).waves(B * H * spans) == pytest.approx(waves, abs=0.005)


def test_a_program_has_few_spans_before_its_own():
    with tracing_for():
        assert -(-2**20 // plan(1, 2**20, 1, 64, 64, "bfloat16").span) <= tuning.MOST_SPANS


def test_a_row_bounds_the_programs():
    with tracing_for():
        row = tuning.default_row("NVIDIA H200", 64, 64, "bfloat16", "long")
        spans = [-(-65_536 // plan(1, 65_536, 12, 64, 64, "bfloat16", row=row._replace(programs_per_core=most)).span)
                 for most in (0, 1, 2)]
        assert spans[0] == 1
        assert 1 < spans[1] <= 132 // 12 < spans[2] <= 2 * 132 // 12


@pytest.mark.parametrize(("call", "most"), [((1, 8192, 96, 128), 17.3), ((2, 16_384, 16, 128), 21.6),
                                            ((4, 2048, 16, 128), 23.2), ((8, 1024, 8, 64), 22.2)])
def test_passes_over_memory(call, most):
    """Bytes of the kernels' arguments and results, forward and backward, relative to q; at least 11."""
    B, T, H, width = call
    shape = jax.ShapeDtypeStruct((B, T, H, width), jnp.bfloat16)

    @jax.jit
    def passes(q, k, v, dy):
        y, backward = jax.vjp(lambda *x: linear_attention(*x, implementation="pallas_gpu")[0], q, k, v)
        return y, backward(dy)

    with tracing_for():
        kernels = pallas_kernels(passes.trace(*[shape] * 4).jaxpr)
    found = sum(work.memory for work in kernels.values()) / (2 * B * T * H * width)
    assert 11 < found <= most


@pytest.mark.parametrize("tokens", [512, 2048, 16_384, 65_536, 2**19])
@pytest.mark.parametrize("heads", [1, 12, 16, 25, 96])
def test_spans_divide_a_sequence_in_whole_chunks(tokens, heads):
    """Otherwise every array would be copied to be padded, and again to be cut."""
    with tracing_for():
        assert tokens % plan(1, tokens, heads, 64, 64, "bfloat16", schedule="parallel").span == 0


@pytest.mark.parametrize("schedule", ["serial", "parallel"])
def test_a_named_schedule_is_taken_where_the_other_would_be_picked(schedule):
    with tracing_for():
        many, few = ((batch, 65_536, heads, 64, 64, "bfloat16") for batch, heads in ((64, 16), (1, 1)))
        assert {plan(*many).schedule, plan(*few).schedule} == {"serial", "parallel"}
        for call in (many, few):
            named = plan(*call, schedule=schedule)
            assert named.schedule == schedule
            assert (named.span < 65_536) == (schedule == "parallel")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segments", [False, True])
def test_on_a_gpu_the_parallel_schedule_is_tried_where_it_scans_many_chunks_of_many_spans(dtype, segments, monkeypatch):
    monkeypatch.setattr(device, "kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(device, "cores", lambda: 132)
    plans = [(case, plan(case.B, case.T, case.H, block_width(case.M), block_width(case.D), dtype, schedule="parallel",
                         segments=segments))
             for case in find_cases("gpu") if isinstance(case, LinearAttentionCase)
             and (case.dtype, case.segments) == (dtype, segments)]
    assert any(found.span >= 2 * found.forward.chunk and 2 * found.span < case.T for case, found in plans)
