"""The GPU kernels in interpret mode, beside what ``op_contract_test.py`` asks of them.

Interpret mode says nothing about registers, time or the GPU's own arithmetic: ``make gpu-check`` and
``benchmarks.suite`` do.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels import device
from kernels.linear_attention import linear_attention, pick_implementation, tuning
from tests.kernels.linear_attention_cases import (
    B,
    Case,
    H,
    assert_close,
    errors,
    make_inputs,
    outputs_and_gradients,
    reference,
)

pytestmark = pytest.mark.gpu

SERIAL, PARALLEL = SCHEDULES = ("pallas_gpu_serial", "pallas_gpu_parallel")

# RMS(error) / RMS(reference): sums of up to some thousand terms, and differences of such sums.
FLOAT32_TOLERANCE = 1e-5
# One rounding to 8 bits is 2⁻⁹/√3 = 1.1e-3 RMS. Scores, states and results are rounded once each, and dφ(q) is a
# difference of such terms.
BFLOAT16_TOLERANCE = 5e-3
# Results are rounded to 11 bits, 1.4e-4 RMS; products are of float32.
FLOAT16_TOLERANCE = 3e-4

@pytest.fixture(autouse=True)
def _several_spans(monkeypatch):
    """The parallel schedule cuts the sequences into four spans and more, where on one core it makes two."""
    monkeypatch.setattr(device, "cores", lambda: 4 * B * H)


def test_interpret_mode_fills_outputs_with_nan():
    """Without this no test here would notice an element that no program writes."""

    def half(x_ref, out_ref):
        out_ref[:4] = x_ref[:4]

    out = pl.pallas_call(half, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)(jnp.ones(8))
    np.testing.assert_array_equal(out, [1] * 4 + [np.nan] * 4)


def test_sums_beyond_the_range_of_float16():
    (q, k, v), _, _ = make_inputs(Case(T=200, M=64, D=64, state=False), "float16")
    q, k = 100 * q, 100 * k
    assert np.einsum("bthm,bthm->bth", q, k, dtype=np.float32).min() > np.finfo(np.float16).max
    actual, _ = linear_attention(*map(jnp.asarray, (q, k, v)), implementation=SERIAL)
    expected, _ = linear_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), implementation="chunked")
    assert_close({"y": np.asarray(actual)}, {"y": np.asarray(expected)}, FLOAT16_TOLERANCE)


def test_dtypes_may_differ():
    case, dtypes = Case(T=100, M=32, D=64, chunk_size=64, segments=True), ("float32", "bfloat16", "bfloat16")
    actual = outputs_and_gradients(case, SERIAL, *make_inputs(case, *dtypes))
    assert [actual[name].dtype for name in ("dq", "dk", "dv", "y")] == ["float32", *["bfloat16"] * 3]
    expected = reference(case, *dtypes)
    for names, tolerance in (("y dk dv", BFLOAT16_TOLERANCE), ("s z dq ds₀ dz₀", FLOAT32_TOLERANCE)):
        assert_close(*({name: x[name] for name in names.split()} for x in (actual, expected)), tolerance)


def test_values_far_from_zero():
    """A gradient of φ(k) is then the difference of sums many times as large: no part of them may be rounded."""
    (q, k, v), _, _ = make_inputs(Case(T=300, M=32, D=32), "float32")
    weights = np.random.default_rng(1).normal(size=v.shape).astype(np.float32)

    def gradient(implementation, *qkv):
        pull = jax.grad(lambda *qkv: jnp.sum(linear_attention(*qkv, implementation=implementation)[0] * weights), 1)
        return {"dk": np.asarray(jax.jit(pull)(*qkv))}

    qkv = q, k, v + np.float32(20)
    with jax.enable_x64(True):
        expected = gradient("reference", *map(np.float64, qkv))
    error, plain = (errors(gradient(implementation, *qkv), expected)["dk"] for implementation in (SERIAL, "chunked"))
    assert error < 1.5 * plain


@pytest.mark.parametrize(("D", "dtype", "joined"), [(64, "bfloat16", True), (128, "bfloat16", False),
                                                    (64, "float32", False)])
def test_one_scan_makes_the_gradients_of_keys_and_values_where_the_state_is_small(D, dtype, joined):
    q_BTHM, v_BTHD = jnp.ones((1, 64, 1, 64), dtype), jnp.ones((1, 64, 1, D), dtype)
    gradient = jax.grad(lambda q, k, v: linear_attention(q, k, v, implementation=SERIAL)[0].astype("float32").sum(),
                        argnums=(0, 1, 2))
    assert ("linear_attention_dk_dv" in str(jax.make_jaxpr(gradient)(q_BTHM, q_BTHM, v_BTHD))) == joined


def test_a_row_of_the_table_is_followed(monkeypatch):
    """A chunk length of its own for the backward pass."""
    row_for = tuning.row_for

    def another(*key):
        row = row_for(*key)
        return row._replace(backward=row.backward._replace(chunk=64))

    monkeypatch.setattr(tuning, "row_for", another)
    case, schedule = Case(T=300, M=16, D=32), PARALLEL
    plan = tuning.plan(B, case.T, H, case.M, case.D, "float32", schedule="parallel")
    assert (plan.forward.chunk, plan.backward.chunk) == (16, 64)
    assert 3 * plan.span < case.T
    actual = outputs_and_gradients(case, schedule, *make_inputs(case, "float32"))
    assert_close(actual, reference(case, "float32"), FLOAT32_TOLERANCE)


def test_a_sequence_resumed_from_its_state_is_the_unsplit_one():
    """Cut inside a segment, and continued in the other schedule; another row has had nothing but padding then."""
    case = Case(T=200, M=16, D=32, segments=True)
    qkv, state, ids_BT = make_inputs(case, "float32")
    assert ids_BT is not None
    cut = next(t for t in range(40, case.T) if ids_BT[0, t - 1] == ids_BT[0, t] >= 0)
    assert cut < case.T // 3

    def resumed(q, k, v, *, initial_state, segment_ids_BT, implementation, **options):
        parts = []
        for where, schedule in zip((slice(None, cut), slice(cut, None)), implementation, strict=True):
            y, initial_state = linear_attention(
                q[:, where], k[:, where], v[:, where], initial_state=initial_state,
                segment_ids_BT=segment_ids_BT[:, where], implementation=schedule, **options)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), initial_state

    actual = outputs_and_gradients(case, (PARALLEL, SERIAL), qkv, state, ids_BT, attend=resumed)
    assert_close(actual, reference(case, "float32"), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", SCHEDULES)
def test_packed_segments_are_the_segments_one_by_one(implementation):
    case, length = Case(T=120, M=16, D=32), 16
    (q, k, v), state, _ = make_inputs(case, "float32")
    # One is a chunk, one follows at once, one begins after padding anywhere; padding of more than a chunk ends the row.
    starts = [0, 16, 35, 80]
    ids_BT = np.full((B, case.T), -1, np.int32)
    for i, start in enumerate(starts):
        ids_BT[:, start:start + length] = i
    run = jax.jit(lambda *qkv, **options: linear_attention(*qkv, chunk_size=16, implementation=implementation,
                                                           **options))
    packed, packed_end = run(q, k, v, initial_state=state, segment_ids_BT=ids_BT)
    nothing = jax.tree.map(np.zeros_like, state)
    alone = [run(*(x[:, start:start + length] for x in (q, k, v)), initial_state=nothing if i else state)
             for i, start in enumerate(starts)]
    for start, (y, _) in zip(starts, alone, strict=True):
        assert_close({"y": np.asarray(packed[:, start:start + length])}, {"y": np.asarray(y)}, FLOAT32_TOLERANCE)
    end = alone[-1][1]
    assert_close({"s": np.asarray(packed_end.s_BHMD), "z": np.asarray(packed_end.z_BHM)},
                 {"s": np.asarray(end.s_BHMD), "z": np.asarray(end.z_BHM)}, FLOAT32_TOLERANCE)
    assert not np.any(np.asarray(packed)[ids_BT < 0])


@pytest.mark.parametrize("implementation", SCHEDULES)
def test_two_runs_give_the_same_bits(implementation):
    (q, k, v), state, _ = make_inputs(Case(T=65, M=16, D=16), "float32")

    def gradients(qkv, state):
        outputs, pull = jax.vjp(lambda *x: linear_attention(*x[0], initial_state=x[1], implementation=implementation),
                                qkv, state)
        return outputs, pull(outputs)

    program = str(jax.make_jaxpr(gradients)((q, k, v), state))
    assert "pallas_call[" in program
    assert "atomic" not in program
    run = jax.jit(gradients)
    jax.tree.map(np.testing.assert_array_equal, run((q, k, v), state), run((q, k, v), state))


@pytest.mark.parametrize("implementation", SCHEDULES)
def test_vmap(implementation):
    """Over one more dimension, with a state and gradients: the same as a larger batch."""
    case = Case(T=40, M=16, D=32)
    (q, k, v), state, _ = make_inputs(case, "float32")

    def mapped(q, k, v, *, initial_state, segment_ids_BT, **options):
        assert segment_ids_BT is None
        one = jax.tree.map(lambda x: x[:, None], ((q, k, v), initial_state))
        found = jax.vmap(lambda qkv, state: linear_attention(*qkv, initial_state=state, **options))(*one)
        return jax.tree.map(lambda x: x[:, 0], found)

    actual = outputs_and_gradients(case, implementation, (q, k, v), state, None, attend=mapped)
    assert_close(actual, reference(case, "float32"), FLOAT32_TOLERANCE)


class TestWhatIsRefused:
    """By name never another form, and never a wrong number; without a name the plain form."""

    @pytest.mark.parametrize("implementation", ["pallas_gpu", *SCHEDULES])
    @pytest.mark.parametrize(("widths", "dtype", "options", "message"), [
        ((16, 16), "float64", {}, "q_BTHM is float64; it takes float32, bfloat16, float16"),
        ((257, 16), "float32", {}, "q_BTHM has width 257; it takes widths of 1 to 256"),
        ((16, 257), "float32", {}, "v_BTHD has width 257; it takes widths of 1 to 256"),
        ((16, 16), "float32", {"causal": False}, "causal=False"),
        ((16, 16), "float32", {"chunk_size": 100},
         "chunk_size=100; for these widths and number formats it takes 16, 32, 64"),
        ((16, 16), "bfloat16", {"chunk_size": 256},
         "chunk_size=256; for these widths and number formats it takes 16, 32, 64, 128"),
    ])
    def test_an_error_names_the_argument_and_the_limit(self, implementation, widths, dtype, options, message):
        with (jax.enable_x64(dtype == "float64"),
              pytest.raises(NotImplementedError, match=f"implementation='{implementation}': .*{re.escape(message)}")):
            linear_attention(*self.arrays(widths, dtype), implementation=implementation, **options)

    def test_on_a_gpu_the_kernels_are_picked_for_what_they_do(self, monkeypatch):
        def picked(widths=(16, 16), dtype="float32", **options):
            with jax.enable_x64(dtype == "float64"):
                return pick_implementation(*self.arrays(widths, dtype), **options)

        assert picked() == "chunked"
        monkeypatch.setattr(device, "platform", lambda: "gpu")
        assert picked() == picked((256, 3), "bfloat16", chunk_size=64) == "pallas_gpu"
        refused = picked(dtype="float64"), picked((16, 257)), picked(causal=False), picked(chunk_size=100)
        assert set(refused) == {"chunked"}

    def arrays(self, widths, dtype):
        features, values = (jnp.ones((1, 8, 1, width), dtype) for width in widths)
        return features, features, values
