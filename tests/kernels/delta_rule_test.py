"""The delta rule: its reference equals the definition; states, segments and invalid input of its forms.

That every form is the reference is tested for all ops by ``op_contract_test.py``.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType

from kernels import cases
from kernels.delta_rule import api, delta_rule, pick_chunk_size, pick_implementation
from kernels.delta_rule.cases import ATTENTIONS, CASES, FORMS, TOLERANCES, DeltaRuleCase

B, H, M, D = 3, 2, 5, 7


def make_inputs(T: int, **options) -> dict[str, np.ndarray]:
    """Arguments of ``delta_rule`` by name, in float64."""
    x = DeltaRuleCase(B, T, H, M, D, dtype="float64", tolerance=0.0, **options).make_inputs()
    names = {"q": "q_BTHM", "k": "k_BTHM", "v": "v_BTHD", "beta": "beta_BTH", "state": "initial_state",
             "log_decay": "log_decay_BTH"}
    return {name: x[key] for key, name in names.items() if key in x}


def with_gradients(run, inputs):
    """y, the state, and gradients of half the sum of their squares."""
    @jax.jit
    def compute(inputs):
        (y, end), backward = jax.vjp(run, inputs)
        return y, end, *backward((y, end))

    return compute(inputs)


def definition(case: DeltaRuleCase) -> dict[str, np.ndarray]:
    """A loop over tokens in NumPy, with segments as defined."""
    x = case.make_inputs()
    y, end = np.zeros(x["v"].shape), x["state"].copy()
    for b in range(case.B):
        ids_T = x["segment_ids"][b] if case.segments else np.zeros(case.T, int)
        tokens = [t for t in range(case.T) if ids_T[t] >= 0]
        for h in range(case.H):
            state_MD = x["state"][b, h]
            for place, t in enumerate(tokens):
                if place and ids_T[t] != ids_T[tokens[place - 1]]:
                    state_MD = np.zeros_like(state_MD)
                if case.log_decay is not None:
                    state_MD = np.exp(x["log_decay"][b, t, h]) * state_MD
                k_M = x["k"][b, t, h]
                state_MD = state_MD + x["beta"][b, t, h] * np.outer(k_M, x["v"][b, t, h] - state_MD.T @ k_M)
                y[b, t, h] = state_MD.T @ x["q"][b, t, h]
            end[b, h] = state_MD
    return {"y": y, "final state": end}


@pytest.mark.parametrize("title", ["one more than a chunk", "segments", "segments, mixed decay"])
def test_the_reference_is_the_definition(title):
    (case,) = (case for case in CASES if case.title == f"{title}, float64")
    assert isinstance(case, DeltaRuleCase)
    found = cases.run_reference(case)
    for name, x in definition(case).items():
        assert cases.error_of(found[name], x) < TOLERANCES["float64"], name


def test_states_are_float32_whatever_goes_in():
    (case,) = (case for case in CASES if case.title == "several chunks, bfloat16")
    assert {name: x.dtype for name, x in cases.output_shapes(case).items()} == {"y": "bfloat16",
                                                                                "final state": "float32"}


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_product_with_a_state_is_left_to_round_its_operands(implementation, dtype):
    """A GPU rounds float32 operands to TF32 by default."""
    def run(inputs, cotangents):
        outputs, backward = jax.vjp(lambda inputs: delta_rule(**inputs, implementation=implementation, chunk_size=4),
                                    inputs)
        return outputs, backward(cotangents)

    inputs = {name: jnp.asarray(x, jnp.float32 if name in ("initial_state", "log_decay_BTH") else dtype)
              for name, x in make_inputs(8, log_decay="mixed").items()}
    cotangents = (inputs["v_BTHD"], inputs["initial_state"])
    text = jax.jit(run).lower(inputs, cotangents).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "f16" not in line]
    assert products
    assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("plain", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_sequence_resumed_from_its_state_is_the_unsplit_one(implementation, plain):
    inputs = make_inputs(40, log_decay=None if plain else "mixed")
    state = inputs.pop("initial_state")
    if not plain:
        ids = np.zeros((B, 40), np.int32)
        ids[0, 10:], ids[0, 15:20], ids[1, 15:18], ids[2, :18], ids[2, 30:] = 4, -1, -1, -1, 9
        inputs["segment_ids_BT"] = ids

    def run(inputs, state, cuts):
        parts = []
        for start, end in zip((0, *cuts), (*cuts, None), strict=True):
            part = {name: x[:, start:end] for name, x in inputs.items()}
            y, state = delta_rule(**part, initial_state=state, chunk_size=8, implementation=implementation)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), state

    with jax.enable_x64(True):
        resumed, unsplit = (jax.jit(functools.partial(run, cuts=cuts))(inputs, state) for cuts in ((17, 18), ()))
    for found, expected in zip(resumed, unsplit, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", FORMS)
def test_padding_is_left_alone_whatever_it_holds(implementation):
    inputs = make_inputs(30, log_decay="mixed")
    ids = np.zeros((B, 30), np.int32)
    ids[:, 12:19] = -1
    short = {name: x if name == "initial_state" else x[:, ids[0] >= 0] for name, x in inputs.items()}
    padded = {name: x.copy() for name, x in inputs.items()}
    padded["beta_BTH"][ids < 0], padded["log_decay_BTH"][ids < 0] = 5.0, -3.0

    def run(inputs, ids):
        return delta_rule(**inputs, segment_ids_BT=None if ids is None else jnp.asarray(ids), chunk_size=8,
                          implementation=implementation)

    with jax.enable_x64(True):
        y, end, gradients = with_gradients(functools.partial(run, ids=ids), padded)
        expected_y, expected_end = jax.jit(functools.partial(run, ids=None))(short)
    np.testing.assert_allclose(y[:, ids[0] >= 0], expected_y, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(end, expected_end, rtol=1e-10, atol=1e-12)
    assert not np.any(np.asarray(y)[ids < 0])
    for name in set(gradients) - {"initial_state"}:
        assert not np.any(np.asarray(gradients[name])[ids < 0]), name


@pytest.mark.parametrize("implementation", FORMS)
def test_after_a_decay_of_everything_comes_a_new_sequence(implementation):
    T, start = 40, 11
    inputs = {name: x.astype(np.float32) for name, x in make_inputs(T, log_decay="mixed").items()}
    inputs["log_decay_BTH"][:, start] = -np.inf

    def run(inputs):
        return delta_rule(**inputs, chunk_size=16, implementation=implementation)

    y, end, gradients = with_gradients(run, inputs)
    after = {name: x[:, start:] for name, x in inputs.items() if name != "initial_state"}
    expected_y, expected_end = jax.jit(run)(after)
    assert cases.error_of(np.asarray(y[:, start:]), np.asarray(expected_y)) < TOLERANCES["float32"]
    assert cases.error_of(np.asarray(end), np.asarray(expected_end)) < TOLERANCES["float32"]
    assert all(np.isfinite(x).all() for x in gradients.values())
    assert not np.any(gradients["log_decay_BTH"][:, start])


@pytest.mark.parametrize("implementation", FORMS)
def test_a_decay_of_zero_is_none(implementation):
    inputs = make_inputs(40)
    run = jax.jit(functools.partial(delta_rule, chunk_size=16, implementation=implementation))
    with jax.enable_x64(True):
        plain, decayed = run(**inputs), run(**inputs, log_decay_BTH=np.zeros((B, 40, H)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-15), plain, decayed)


@pytest.mark.parametrize("implementation", FORMS)
def test_a_key_reads_the_value_that_it_was_bound_to_last(implementation):
    """Exactly: with orthonormal keys and β = 1 integer values have no rounding error."""
    T, width = 50, 6
    generator = np.random.default_rng(0)
    keys_T = generator.integers(0, width, T)
    values_TD = generator.integers(-9, 10, (T, D))
    k_BTHM = np.eye(width, dtype=np.float32)[keys_T][None, :, None]
    v_BTHD = values_TD.astype(np.float32)[None, :, None]
    # Each token reads at the key that the next one writes, before it does.
    run = jax.jit(functools.partial(delta_rule, chunk_size=16, implementation=implementation))
    y_BTHD, state = run(np.roll(k_BTHM, -1, axis=1), k_BTHM, v_BTHD, np.ones((1, T, 1), np.float32))
    memory = {}
    for t in range(T):
        memory[keys_T[t]] = values_TD[t]
        if t + 1 < T:
            np.testing.assert_array_equal(y_BTHD[0, t, 0], memory.get(keys_T[t + 1], np.zeros(D)))
    assert len(memory) == width
    np.testing.assert_array_equal(state[0, 0], np.stack([memory[key] for key in range(width)]))


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_states_neither_grow_nor_shrink_where_each_key_turns_them_round(correlation):
    """β|k|² = 2 is a reflection: 2,000 of them, and as many in the gradient, preserve the norm of a state."""
    T = 2000
    case = DeltaRuleCase(1, T, 2, 16, 8, correlation=correlation, tolerance=0.0)
    x = case.make_inputs()
    q, k, v = (jnp.asarray(x[name]) for name in ("q", "k", "v"))
    beta_BTH = jnp.full((1, T, 2), 2.0)

    @jax.jit
    def run(state):
        end, backward = jax.vjp(lambda state: delta_rule(q, k, 0 * v, beta_BTH, initial_state=state)[1], state)
        return end, *backward(state)

    end, gradient = run(x["state"])
    for found in (end, gradient):
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(x["state"]), rel=1e-5)


def test_used_again_under_a_checkpoint_it_has_the_same_gradient():
    inputs = make_inputs(40, log_decay="mixed")

    def twice(inputs, wrap):
        f = wrap(lambda inputs: delta_rule(**inputs, chunk_size=16))
        y, state = f(inputs)
        y, state = f(inputs | {"q_BTHM": inputs["q_BTHM"] + y[..., :M], "initial_state": state})
        return jnp.sin(y).sum() + jnp.cos(state).sum()

    with jax.enable_x64(True):
        plain, again = (jax.jit(jax.grad(functools.partial(twice, wrap=wrap)))(inputs)
                        for wrap in (lambda f: f, jax.checkpoint))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), plain, again)


def test_memory_of_a_gradient_grows_with_the_sequence_and_is_less_than_a_state_per_token():
    width = 64

    def temporary_bytes(T, implementation):
        x = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
        beta = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
        gradient = jax.grad(lambda *x: delta_rule(*x, implementation=implementation)[0].sum(), range(4))
        planned = jax.jit(gradient).lower(x, x, x, beta).compile().memory_analysis()
        assert planned is not None
        return planned.temp_size_in_bytes

    assert temporary_bytes(4096, "chunked") / temporary_bytes(2048, "chunked") == pytest.approx(2, rel=0.1)
    state_per_token = 4096 * width * width * 4
    assert temporary_bytes(4096, "chunked") < state_per_token < temporary_bytes(4096, "recurrent")


def test_the_fastest_form_is_picked_by_length():
    def picked(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        return pick_implementation(x, x, x)

    assert picked(1) == "recurrent"
    assert picked(2) == "chunked"


def test_narrow_heads_have_short_chunks():
    assert [pick_chunk_size(*widths) for widths in ((16, 16), (32, 32), (32, 64), (128, 128))] == [32, 32, 64, 64]


def test_what_is_timed_has_keys_of_length_1():
    (timed,) = ATTENTIONS
    x = {name: jnp.asarray(x, jnp.float32) for name, x in make_inputs(20).items()}
    q, k, v = x["q_BTHM"], x["k_BTHM"], x["v_BTHD"]
    found = timed.call(q, 3 * k, v, chunk_size=8, implementation="recurrent")
    expected = delta_rule(q, k, v, jnp.full((B, 20, H), 0.5), implementation="recurrent")[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class TestBadInput:
    """One clear error, raised by the kernel itself: the tests' shape checks would come first."""

    @pytest.fixture(autouse=True)
    def _as_users_run_it(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    @pytest.mark.parametrize(("change", "message"), [
        ({"q_BTHM": jnp.ones((2, 8, 3))}, r"q_BTHM has shape \(2, 8, 3\); expected four dimensions, B, T, H, M"),
        ({"k_BTHM": jnp.ones((2, 9, 3, 4))}, r"k_BTHM has shape \(2, 9, 3, 4\); expected \(2, 8, 3, 4\)"),
        ({"v_BTHD": jnp.ones((2, 8, 1, 5))}, r"v_BTHD has shape \(2, 8, 1, 5\); expected \(2, 8, 3, 5\)"),
        ({"beta_BTH": jnp.ones((2, 8, 1))}, r"beta_BTH has shape \(2, 8, 1\); expected \(2, 8, 3\)"),
        ({"initial_state": jnp.ones((2, 3, 5, 4))}, r"initial_state has shape \(2, 3, 5, 4\); expected \(2, 3, 4, 5\)"),
        ({"segment_ids_BT": jnp.zeros((2, 7), int)}, r"segment_ids_BT has shape \(2, 7\); expected \(2, 8\)"),
        ({"log_decay_BTH": jnp.zeros((2, 8))}, r"log_decay_BTH has shape \(2, 8\); expected \(2, 8, 3\)"),
        ({"log_decay_BTH": jnp.full((2, 8, 3), 0.5)}, "log_decay_BTH is 0.5 somewhere; expected 0 or less"),
        ({"chunk_size": 0}, "chunk_size=0: expected a whole number of at least 1"),
        ({"implementation": "chunky"},
         "implementation='chunky': expected one of reference, recurrent, decode, chunked, pallas_gpu"),
        ({name: jnp.ones((2, 0, 3, 4)) for name in ("q_BTHM", "k_BTHM", "v_BTHD")} | {"beta_BTH": jnp.ones((2, 0, 3))},
         "T must be at least 1"),
    ])
    def test_a_value_error_names_the_argument(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.call(**change)

    @pytest.mark.parametrize(("change", "message"), [
        ({"k_BTHM": jnp.ones((2, 8, 3, 4), jnp.int32)}, "k_BTHM is int32; expected floating point"),
        ({"beta_BTH": jnp.ones((2, 8, 3), bool)}, "beta_BTH is bool; expected floating point"),
        ({"initial_state": jnp.ones((2, 3, 4, 5), jnp.int32)}, "initial_state is int32; expected floating point"),
        ({"log_decay_BTH": jnp.zeros((2, 8, 3), jnp.int32)}, "log_decay_BTH is int32; expected floating point"),
        ({"segment_ids_BT": jnp.zeros((2, 8))}, "segment_ids_BT is float32; expected whole numbers"),
    ])
    def test_a_type_error_names_the_argument(self, change, message):
        with pytest.raises(TypeError, match=message):
            self.call(**change)

    def call(self, **changes):
        keys = jnp.ones((2, 8, 3, 4))
        arguments: dict[str, Any] = {"q_BTHM": keys, "k_BTHM": keys, "v_BTHD": jnp.ones((2, 8, 3, 5)),
                                     "beta_BTH": jnp.ones((2, 8, 3))}
        return delta_rule(**(arguments | changes))


@pytest.mark.parametrize(("width", "calls"), [(32, 1), (64, 2)])
def test_devices_that_share_a_sequence_run_the_kernel_that_is_named(width, calls, monkeypatch):
    """Also where it does not support values with the map of the states beside them."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", None)
    x_BTHD, beta_BTH = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 128, 2, width), (1, 128, 2)))

    def launches() -> int:
        call = functools.partial(delta_rule, implementation="pallas_gpu")
        return str(jax.make_jaxpr(call)(x_BTHD, x_BTHD, x_BTHD, beta_BTH)).count("pallas_call[")

    mesh: Any = jax.sharding.AbstractMesh((1, 1, 1, 2), ("data", "fsdp", "tensor", "context"), (AxisType.Auto,) * 4)
    alone = launches()
    assert alone > 0
    with jax.sharding.use_abstract_mesh(mesh):
        assert launches() == (1 + calls) * alone
