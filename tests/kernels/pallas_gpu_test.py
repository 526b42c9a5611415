"""The GPU kernels in interpret mode, beyond ``op_contract_test.py``.

Interpret mode says nothing about registers, time or the GPU's own arithmetic: ``make gpu-check`` and
``benchmarks.suite`` do.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels import cases, device
from kernels.cases import REFERENCE, error_of
from kernels.linear_attention import State, linear_attention, pick_implementation, tuning
from kernels.linear_attention.cases import KERNEL_TOLERANCES, PARALLEL, SCHEDULES, SERIAL, LinearAttentionCase
from kernels.linear_attention.pallas_gpu import pallas_gpu
from kernels.segments import runs_of
from kernels.state import EPSILON

pytestmark = pytest.mark.usefixtures("gpu_kernel")

B, H = 3, 2
PARALLEL_THEN_SERIAL = [PARALLEL, pytest.param(SERIAL, marks=pytest.mark.thorough)]


@dataclass(frozen=True)
class Case(LinearAttentionCase):
    """A case for which a function of the test calls the kernels, with the signature of ``linear_attention``."""

    attend: Callable[..., tuple[jax.Array, State]] = field(default=linear_attention, kw_only=True)

    def call(self, implementation: Any, **inputs: Any) -> dict[str, Any]:
        if implementation == REFERENCE:
            return super().call(implementation, **inputs)
        y, end = self.attend(inputs["q"], inputs["k"], inputs["v"], initial_state=State(inputs["s"], inputs["z"]),
                             segment_ids_BT=inputs.get("segment_ids"), chunk_size=self.chunk_size,
                             implementation=implementation)
        return {"y": y, "final s": end.s_BHMD, "final z": end.z_BHM}


def make_case(T: int, M: int, D: int, dtype: str = "float32", **options: Any) -> Case:
    return Case(B, T, H, M, D, dtype=dtype, tolerance=KERNEL_TOLERANCES[dtype], **options)


def make_inputs(case: LinearAttentionCase) -> tuple[tuple[np.ndarray, ...], State]:
    """φ(q), φ(k), v and a state."""
    x = case.make_inputs()
    return (x["q"], x["k"], x["v"]), State(x["s"], x["z"])


def assert_is_the_reference(case: Case, implementation: Any) -> None:
    found = cases.run(case, implementation)()
    errors = {name: error_of(found[name], x) for name, x in cases.run_reference(case).items()}
    assert cases.faults_of(case, errors, None) == []


def assert_close(actual: Any, expected: Any, tolerance: float = KERNEL_TOLERANCES["float32"]) -> None:
    assert error_of(np.asarray(actual), np.asarray(expected, np.float64)) < tolerance


@pytest.fixture(autouse=True)
def _several_spans(monkeypatch):
    """Makes the parallel schedule cut the sequences into four or more spans; on one core it makes two."""
    monkeypatch.setattr(device, "cores", lambda: 4 * B * H)


def test_interpret_mode_fills_outputs_with_nan():
    """Otherwise no test here would notice an element that no program writes."""

    def half(x_ref, out_ref):
        out_ref[:4] = x_ref[:4]

    out = pl.pallas_call(half, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)(jnp.ones(8))
    np.testing.assert_array_equal(out, [1] * 4 + [np.nan] * 4)


def test_sums_beyond_the_range_of_float16():
    (q, k, v), _ = make_inputs(make_case(200, 64, 64, "float16"))
    q, k = 100 * q, 100 * k
    assert np.einsum("bthm,bthm->bth", q, k, dtype=np.float32).min() > np.finfo(np.float16).max
    attend = jax.jit(linear_attention, static_argnames="implementation")
    actual, _ = attend(q, k, v, implementation=SERIAL)
    expected, _ = attend(*(x.astype(np.float32) for x in (q, k, v)), implementation="chunked")
    assert_close(actual, expected, KERNEL_TOLERANCES["float16"])


def test_dtypes_may_differ():
    class OfManyDtypes(Case):
        def make_shapes(self):
            shapes = super().make_shapes()
            return shapes | {name: jax.ShapeDtypeStruct(shapes[name].shape, "bfloat16") for name in ("k", "v")}

    case = OfManyDtypes(B, 100, H, 32, 64, dtype="float32", tolerance=0.0, chunk_size=64, segments=True)
    actual, expected = cases.run(case, SERIAL)(), cases.run_reference(case)
    assert [actual[name].dtype for name in ("dq", "dk", "dv", "y")] == ["float32", *["bfloat16"] * 3]
    assert actual.keys() == {"y", "final s", "final z", "dq", "dk", "dv", "ds", "dz"}
    for name, x in expected.items():
        assert_close(actual[name], x, KERNEL_TOLERANCES["bfloat16" if name in ("y", "dk", "dv") else "float32"])


def test_values_far_from_zero():
    """A gradient of φ(k) is then the difference of sums many times as large, of which no part may be rounded."""
    (q, k, v), _ = make_inputs(make_case(300, 32, 32))
    weights = np.random.default_rng(1).normal(size=v.shape).astype(np.float32)

    def gradient(implementation, *qkv):
        pull = jax.grad(lambda *qkv: jnp.sum(linear_attention(*qkv, implementation=implementation)[0] * weights), 1)
        return np.asarray(jax.jit(pull)(*qkv))

    qkv = q, k, v + np.float32(20)
    with jax.enable_x64(True):
        expected = gradient("reference", *map(np.float64, qkv))
    error, plain = (error_of(gradient(implementation, *qkv), expected) for implementation in (SERIAL, "chunked"))
    assert error < 1.5 * plain


@pytest.mark.parametrize(("D", "dtype", "joined"), [(64, "bfloat16", True), (128, "bfloat16", False),
                                                    (64, "float32", False)])
def test_one_scan_makes_the_gradients_of_keys_and_values_where_the_state_is_small(D, dtype, joined):
    q_BTHM, v_BTHD = jnp.ones((1, 64, 1, 64), dtype), jnp.ones((1, 64, 1, D), dtype)
    gradient = jax.grad(lambda q, k, v: linear_attention(q, k, v, implementation=SERIAL)[0].astype("float32").sum(),
                        argnums=(0, 1, 2))
    assert ("linear_attention_dk_dv" in str(jax.make_jaxpr(gradient)(q_BTHM, q_BTHM, v_BTHD))) == joined


def test_a_row_of_the_table_is_followed(monkeypatch):
    """A separate chunk length for the backward pass."""
    row_for = tuning.row_for

    def another(*key):
        row = row_for(*key)
        return row._replace(backward=row.backward._replace(chunk=64))

    monkeypatch.setattr(tuning, "row_for", another)
    case = make_case(300, 16, 32)
    plan = tuning.plan(B, case.T, H, case.M, case.D, "float32", schedule="parallel")
    assert (plan.forward.chunk, plan.backward.chunk) == (16, 64)
    assert 3 * plan.span < case.T
    assert_is_the_reference(case, PARALLEL)


@pytest.mark.thorough
def test_a_sequence_resumed_from_its_state_is_the_unsplit_one():
    """Cut inside a segment, and continued in the other schedule; another row then has only padding."""
    T = 200
    ids_BT = cases.make_segments(B, T)
    cut = next(t for t in range(40, T) if ids_BT[0, t - 1] == ids_BT[0, t] >= 0)
    assert cut < T // 3

    def resumed(q, k, v, *, initial_state, segment_ids_BT, implementation, **options):
        parts = []
        for where, schedule in zip((slice(None, cut), slice(cut, None)), implementation.split(","), strict=True):
            y, initial_state = linear_attention(
                q[:, where], k[:, where], v[:, where], initial_state=initial_state,
                segment_ids_BT=segment_ids_BT[:, where], implementation=schedule, **options)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), initial_state

    assert_is_the_reference(make_case(T, 16, 32, segments=True, attend=resumed), f"{PARALLEL},{SERIAL}")


@pytest.mark.parametrize("implementation", PARALLEL_THEN_SERIAL)
def test_packed_segments_are_the_segments_one_by_one(implementation):
    case, length = make_case(120, 16, 32), 16
    (q, k, v), state = make_inputs(case)
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
        assert_close(packed[:, start:start + length], y)
    end = alone[-1][1]
    assert_close(packed_end.s_BHMD, end.s_BHMD)
    assert_close(packed_end.z_BHM, end.z_BHM)
    assert not np.any(np.asarray(packed)[ids_BT < 0])


@pytest.mark.parametrize("implementation", PARALLEL_THEN_SERIAL)
def test_two_runs_give_the_same_bits(implementation):
    (q, k, v), state = make_inputs(make_case(65, 16, 16))

    def gradients(qkv, state):
        outputs, pull = jax.vjp(lambda *x: linear_attention(*x[0], initial_state=x[1], implementation=implementation),
                                qkv, state)
        return outputs, pull(outputs)

    program = str(jax.make_jaxpr(gradients)((q, k, v), state))
    assert "pallas_call[" in program
    assert "atomic" not in program
    run = jax.jit(gradients)
    jax.tree.map(np.testing.assert_array_equal, run((q, k, v), state), run((q, k, v), state))


@pytest.mark.parametrize("implementation", PARALLEL_THEN_SERIAL)
def test_vmap(implementation):
    """Over one more dimension, with a state and gradients: equals a larger batch."""
    def mapped(q, k, v, *, initial_state, segment_ids_BT, **options):
        assert segment_ids_BT is None
        one = jax.tree.map(lambda x: x[:, None], ((q, k, v), initial_state))
        found = jax.vmap(lambda qkv, state: linear_attention(*qkv, initial_state=state, **options))(*one)
        return jax.tree.map(lambda x: x[:, 0], found)

    assert_is_the_reference(make_case(40, 16, 32, attend=mapped), implementation)


def decayed_recurrence(q, k, v, s, z, log_decay, runs_BT, normalize):
    """The definition, token by token: y and the state."""
    def step(carry, token):
        s, z, latest_B = carry
        q, k, v, log_decay, run_B = token
        same_B = run_B <= latest_B
        share_BH = jnp.where(same_B[:, None], jnp.exp(jnp.where(run_B[:, None] < 0, 0, log_decay)), 0)
        q, k = (jnp.where((run_B < 0)[:, None, None], 0, x) for x in (q, k))
        s = share_BH[..., None, None] * s + k[..., :, None] * v[..., None, :]
        z = share_BH[..., None] * z + k
        y = jnp.einsum("bhm,bhmd->bhd", q, s)
        if normalize:
            y /= jnp.einsum("bhm,bhm->bh", q, z)[..., None] + EPSILON
        return (s, z, jnp.maximum(latest_B, run_B)), y

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, log_decay, runs_BT))
    end, y = jax.lax.scan(step, (s, z, jnp.zeros(len(q), jnp.int32)), tokens)
    return y.swapaxes(0, 1), *end[:2]


def make_log_decay(kind, shape):
    generator = np.random.default_rng(2)
    if kind == "strong":
        log_decay = np.full(shape, -0.01)
        log_decay[:, ::29] = -1e4
    elif kind == "fast":
        log_decay = -generator.uniform(0.2, 1, shape)
    else:
        log_decay = -np.logaddexp(0, generator.normal(-3, 2, shape))
    return log_decay.astype(np.float32)


@pytest.mark.parametrize(("case", "kind", "schedule"), [
    pytest.param(make_case(100, 16, 32), "strong", "serial", marks=pytest.mark.thorough),
    (make_case(130, 16, 16, segments=True), "mixed", "parallel"),
    (make_case(200, 64, 48, "bfloat16", segments=True), "fast", "parallel"),
    pytest.param(make_case(200, 100, 64), "strong", "parallel", marks=pytest.mark.thorough),
    pytest.param(make_case(200, 64, 64, "bfloat16", normalize=False), "strong", "serial", marks=pytest.mark.thorough),
    pytest.param(make_case(200, 128, 64, "bfloat16"), "mixed", "parallel", marks=pytest.mark.thorough),
    pytest.param(make_case(100, 16, 32, normalize=False), "fast", "parallel", marks=pytest.mark.thorough),
])
def test_decay_is_the_recurrence(case, kind, schedule):
    """Outputs and gradients, also of the decay, with float64 errors. After a g of −1e4 small ones still count."""
    inputs = case.make_inputs()
    runs_BT = runs_of(jnp.asarray(inputs.get("segment_ids", np.zeros((B, case.T), np.int32))))
    arrays = [*(inputs[name] for name in "qkvsz"), make_log_decay(kind, (B, case.T, H))]
    generator = np.random.default_rng(3)
    cotangents = tuple(generator.normal(size=x.shape).astype(x.dtype) for x in arrays[2:5])

    def pulled(function, arrays, cotangents):
        outputs, pull = jax.vjp(function, *arrays)
        return *outputs, *pull(cotangents)

    def attend(q, k, v, s, z, log_decay):
        log_decay = jnp.where(runs_BT[..., None] < 0, 0.0, log_decay)
        y, end = pallas_gpu(q, k, v, State(s, z), runs_BT if case.segments else None, causal=True,
                            normalize=case.normalize, schedule=schedule, log_decay_BTH=log_decay,
                            chunk_sizes=tuning.ChunkSizes(64, 64))
        return y, *end

    found = jax.jit(functools.partial(pulled, attend))(arrays, cotangents)
    with jax.enable_x64(True):
        expected = pulled(lambda *arrays: decayed_recurrence(*arrays, runs_BT, case.normalize),
                          *jax.tree.map(lambda x: jnp.asarray(np.float64(x)), (arrays, cotangents)))
    for actual, x in zip(found, expected, strict=True):
        assert_close(np.float64(actual), x, KERNEL_TOLERANCES[case.dtype])


class TestWhatIsRefused:
    """A named implementation never falls back; without a name the plain form is used."""

    @pytest.mark.parametrize("implementation", ["pallas_gpu", *SCHEDULES])
    @pytest.mark.parametrize(("widths", "dtype", "options", "message"), [
        ((16, 16), "float64", {}, "q_BTHM is float64; it supports float32, bfloat16, float16"),
        ((257, 16), "float32", {}, "q_BTHM has width 257; it supports widths of 1 to 256"),
        ((16, 257), "float32", {}, "v_BTHD has width 257; it supports widths of 1 to 256"),
        ((16, 16), "float32", {"causal": False}, "causal=False"),
        ((16, 256), "bfloat16", {"log_decay_BTH": jnp.zeros((1, 8, 1))},
         "v_BTHD has width 256; with a decay it supports widths of 1 to 128"),
        ((16, 16), "float32", {"log_decay_BTH": jnp.zeros((1, 8, 1)), "chunk_size": 32},
         "chunk_size=32; for these widths and dtypes it supports 16"),
        ((16, 16), "float32", {"chunk_size": 100},
         "chunk_size=100; for these widths and dtypes it supports 16, 32, 64"),
        ((16, 16), "bfloat16", {"chunk_size": 256},
         "chunk_size=256; for these widths and dtypes it supports 16, 32, 64, 128"),
    ])
    def test_an_error_names_the_argument_and_the_limit(self, implementation, widths, dtype, options, message):
        with (jax.enable_x64(dtype == "float64"),
              pytest.raises(NotImplementedError, match=f"implementation='{implementation}': .*{re.escape(message)}")):
            linear_attention(*self.arrays(widths, dtype), implementation=implementation, **options)

    def test_on_a_gpu_the_kernels_are_picked_for_what_they_do(self, monkeypatch):
        def picked(widths=(16, 16), dtype="float32", **options):
            with jax.enable_x64(dtype == "float64"):
                return pick_implementation(*self.arrays(widths, dtype), **options)

        monkeypatch.setattr(device, "platform", lambda: "cpu")
        assert picked() == "chunked"
        monkeypatch.setattr(device, "platform", lambda: "gpu")
        assert picked() == picked((256, 3), "bfloat16", chunk_size=64) == "pallas_gpu"
        assert picked(log_decay=True) == "pallas_gpu"
        refused = (picked(dtype="float64"), picked((16, 257)), picked(causal=False), picked(chunk_size=100),
                   picked((16, 256), log_decay=True))
        assert set(refused) == {"chunked"}

    def arrays(self, widths, dtype):
        features, values = (jnp.ones((1, 8, 1, width), dtype) for width in widths)
        return features, features, values
