"""Linear attention: its reference is the definition, and what its forms do with states, segments and bad input.

That every form is the reference is tested for all ops by ``op_contract_test.py``.
"""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels import cases
from kernels.linear_attention import EPSILON, State, linear_attention, pick_implementation
from kernels.linear_attention.cases import CASES, PLAIN_FORMS, PLAIN_TOLERANCES, UNMASKED_FORMS, LinearAttentionCase

B = 3


def make_inputs(T: int) -> tuple[tuple[np.ndarray, ...], State]:
    """φ(q), φ(k), v and a state, in float64."""
    x = LinearAttentionCase(B, T, 2, 5, 7, dtype="float64", tolerance=0.0).make_inputs()
    return (x["q"], x["k"], x["v"]), State(x["s"], x["z"])


# Without bfloat16 of segments in both directions: gradients there meet operands of bfloat16, and are rounded as those.
@pytest.mark.parametrize(("form", "causal", "segments", "dtype"), [
    ("chunked", False, True, "float32"), ("chunked", False, True, "float16"),
    *((form, causal, False, dtype) for dtype in ("float32", "bfloat16", "float16")
      for form, causal in (("chunked", True), ("chunked", False), ("cumsum", True), ("recurrent", True)))])
def test_no_product_with_a_state_is_left_to_round_its_operands(form, causal, segments, dtype):
    """A GPU rounds float32 operands to TF32 unless it is asked not to; states are float32, whatever goes in."""
    x_BTHM, state = jnp.ones((1, 8, 2, 4), dtype), State(jnp.ones((1, 2, 4, 4)), jnp.ones((1, 2, 4)))
    segment_ids_BT = jnp.array([[0, 0, 0, 1, 1, 1, 1, -1]]) if segments else None

    def backward(*arrays):
        return jax.vjp(lambda q, k, v, state: linear_attention(
            q, k, v, initial_state=state, implementation=form, causal=causal, chunk_size=4,
            segment_ids_BT=segment_ids_BT), *arrays)[1]

    y_and_state = jax.eval_shape(lambda *arrays: linear_attention(*arrays), x_BTHM, x_BTHM, x_BTHM)
    cotangents = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), y_and_state)
    text = jax.jit(lambda *arrays: backward(*arrays)(cotangents)).lower(x_BTHM, x_BTHM, x_BTHM, state).as_text()
    wide = [line for line in text.splitlines() if "dot_general" in line and "f16" not in line]
    assert wide
    assert [line for line in wide if "precision = [HIGHEST, HIGHEST]" not in line] == []


def definition(case: LinearAttentionCase) -> dict[str, np.ndarray]:
    """A loop over pairs of tokens in NumPy, with segments as the design words them."""
    inputs = case.make_inputs()
    q, k, v, ids_BT = inputs["q"], inputs["k"], inputs["v"], inputs.get("segment_ids")
    B, T, H, M, D = case.B, case.T, case.H, case.M, case.D
    state = State(inputs.get("s", np.zeros((B, H, M, D))), inputs.get("z", np.zeros((B, H, M))))
    y, s_end, z_end = np.zeros(v.shape), np.zeros_like(state.s_BHMD), np.zeros_like(state.z_BHM)
    for b in range(B):
        ids = np.zeros(T, int) if ids_BT is None else ids_BT[b]
        valid = np.flatnonzero(ids >= 0)
        run_of, run = {}, 0
        for place, t in enumerate(valid):
            run += int(place > 0 and ids[t] != ids[valid[place - 1]])
            run_of[t] = run
        for t in valid:
            seen = [j for j in valid if run_of[j] == run_of[t] and (j <= t or not case.causal)]
            s = np.einsum("jhm,jhd->hmd", k[b, seen], v[b, seen]) + (state.s_BHMD[b] if run_of[t] == 0 else 0)
            z = k[b, seen].sum(axis=0) + (state.z_BHM[b] if run_of[t] == 0 else 0)
            denominator = np.einsum("hm,hm->h", q[b, t], z) + EPSILON if case.normalize else np.ones(H)
            y[b, t] = np.einsum("hm,hmd->hd", q[b, t], s) / denominator[:, None]
        last = [t for t in valid if run_of[t] == run]
        s_end[b] = np.einsum("jhm,jhd->hmd", k[b, last], v[b, last]) + (state.s_BHMD[b] if run == 0 else 0)
        z_end[b] = k[b, last].sum(axis=0) + (state.z_BHM[b] if run == 0 else 0)
    return {"y": y, "final s": s_end, "final z": z_end}


@pytest.mark.parametrize("title", ["segments", "both directions, segments", "one more than a chunk",
                                   "segments, not normalised"])
def test_the_reference_is_the_definition(title):
    (case,) = (case for case in CASES if case.title == f"{title}, float64")
    assert isinstance(case, LinearAttentionCase)
    found = cases.run_reference(case)
    for name, x in definition(case).items():
        assert cases.error_of(found[name], x) < PLAIN_TOLERANCES["float64"], name


def test_states_are_float32_whatever_goes_in():
    (case,) = (case for case in CASES if case.title == "several chunks, bfloat16")
    dtypes = {name: x.dtype for name, x in cases.output_shapes(case).items()}
    assert dtypes == {"y": "bfloat16", "final s": "float32", "final z": "float32"}


@pytest.mark.parametrize("implementation", ["reference", *PLAIN_FORMS])
@pytest.mark.parametrize("segments", [False, True])
def test_a_sequence_resumed_from_its_state_is_the_unsplit_one(implementation, segments):
    (q, k, v), state = make_inputs(40)
    ids = None
    if segments:
        ids = np.zeros((B, 40), np.int32)
        ids[0, 10:], ids[0, 15:20], ids[1, 15:18], ids[2, :18], ids[2, 30:] = 4, -1, -1, -1, 9
    options = {"chunk_size": 8, "implementation": implementation}

    def split(q, k, v, state, at):
        parts = []
        for where in (slice(None, at), slice(at, None)):
            part_ids = None if ids is None else jnp.asarray(ids[:, where])
            y, state = linear_attention(q[:, where], k[:, where], v[:, where], initial_state=state,
                                        segment_ids_BT=part_ids, **options)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), state

    def whole(q, k, v, state):
        whole_ids = None if ids is None else jnp.asarray(ids)
        return linear_attention(q, k, v, initial_state=state, segment_ids_BT=whole_ids, **options)

    with jax.enable_x64(True):
        resumed = jax.jit(functools.partial(split, at=17))(q, k, v, state)
        unsplit = jax.jit(whole)(q, k, v, state)
    for actual, expected in zip(jax.tree.leaves(resumed), jax.tree.leaves(unsplit), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", *PLAIN_FORMS])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_segments_are_the_segments_one_by_one(implementation, causal):
    if not causal and implementation not in ("reference", *UNMASKED_FORMS):
        pytest.skip("sees the past only")
    length, gap, count = 13, 2, 3
    T = count * (gap + length)
    (q, k, v), state = make_inputs(T)
    ids = np.full((B, T), -1, np.int32)
    starts = range(gap, T, gap + length)
    for i, start in enumerate(starts):
        ids[:, start:start + length] = i
    run = jax.jit(functools.partial(linear_attention, causal=causal, chunk_size=8, implementation=implementation))
    with jax.enable_x64(True):
        packed, packed_end = run(q, k, v, initial_state=state, segment_ids_BT=ids)
        for i, start in enumerate(starts):
            y, end = run(*(x[:, start:start + length] for x in (q, k, v)), initial_state=state if i == 0 else None)
            np.testing.assert_allclose(packed[:, start:start + length], y, rtol=1e-10, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), packed_end, end)
    assert not np.any(np.asarray(packed)[ids < 0])


@pytest.mark.parametrize(("implementation", "growth"),
                         [("reference", 4), ("blockwise", 2), ("chunked", 2), ("recurrent", 2)])
def test_memory_of_a_gradient_grows_with_the_sequence(implementation, growth):
    def temporary_bytes(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        gradient = jax.grad(lambda *qkv: linear_attention(*qkv, implementation=implementation)[0].sum(), (0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) / temporary_bytes(4096) == pytest.approx(growth, rel=0.1)


def test_the_fastest_form_is_picked_by_length():
    def picked(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        return pick_implementation(x, x, x)

    assert picked(1) == "recurrent"
    assert picked(2) == "chunked"


class TestBadInput:
    """One clear error, raised by the kernel itself: the shape checks that tests add would come first."""

    @pytest.fixture(autouse=True)
    def _as_users_run_it(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    @pytest.mark.parametrize(("change", "message"), [
        ({"q_BTHM": jnp.ones((2, 8, 3))}, r"q_BTHM has shape \(2, 8, 3\); expected four dimensions, B, T, H, M"),
        ({"v_BTHD": jnp.ones((2, 8))}, r"v_BTHD has shape \(2, 8\); expected four dimensions, B, T, H, D"),
        ({"k_BTHM": jnp.ones((2, 9, 3, 4))}, r"k_BTHM has shape \(2, 9, 3, 4\); expected \(2, 8, 3, 4\)"),
        ({"v_BTHD": jnp.ones((2, 8, 1, 5))}, r"v_BTHD has shape \(2, 8, 1, 5\); expected \(2, 8, 3, 5\)"),
        ({"segment_ids_BT": jnp.zeros((2, 7), int)}, r"segment_ids_BT has shape \(2, 7\); expected \(2, 8\)"),
        ({"initial_state": State(jnp.ones((2, 3, 5, 4)), jnp.ones((2, 3, 4)))}, r"initial_state\.s_BHMD has shape"),
        ({"initial_state": State(jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 5)))}, r"initial_state\.z_BHM has shape"),
        ({"chunk_size": 0}, "chunk_size=0: expected a whole number of at least 1"),
        ({"implementation": "chunky"}, "implementation='chunky': there is reference, .*chunked"),
    ])
    def test_a_value_error_names_the_argument(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.call(**change)

    @pytest.mark.fast
    def test_no_tokens(self):
        empty = jnp.ones((2, 0, 3, 4))
        with pytest.raises(ValueError, match="T must be at least 1"):
            linear_attention(empty, empty, empty)

    def test_integers(self):
        with pytest.raises(TypeError, match="k_BTHM is int32; expected floating point"):
            self.call(k_BTHM=jnp.ones((2, 8, 3, 4), jnp.int32))

    @pytest.mark.parametrize("implementation", ["cumsum", "recurrent"])
    def test_a_recurrence_cannot_look_ahead(self, implementation):
        with pytest.raises(NotImplementedError, match=f"'{implementation}': it sees the past only"):
            self.call(implementation=implementation, causal=False)

    def call(self, **changes):
        keys = jnp.ones((2, 8, 3, 4))
        arguments = {"q_BTHM": keys, "k_BTHM": keys, "v_BTHD": jnp.ones((2, 8, 3, 5))}
        return linear_attention(**(arguments | changes))
