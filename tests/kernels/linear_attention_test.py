"""Linear attention: its reference equals the definition; states, segments and invalid input of its forms.

That every form is the reference is tested for all ops by ``op_contract_test.py``.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels import cases, device
from kernels.dispatch import Call
from kernels.gpu import triton
from kernels.linear_attention import EPSILON, State, linear_attention, mosaic_gpu, pick_implementation
from kernels.linear_attention.cases import CASES, PLAIN_FORMS, PLAIN_TOLERANCES, UNMASKED_FORMS, LinearAttentionCase

B = 3


def make_inputs(T: int) -> tuple[tuple[np.ndarray, ...], State]:
    """φ(q), φ(k), v and a state, in float64."""
    x = LinearAttentionCase(B, T, 2, 5, 7, dtype="float64", tolerance=0.0).make_inputs()
    return (x["q"], x["k"], x["v"]), State(x["s"], x["z"])


def make_log_decay(T: int) -> np.ndarray:
    """From no decay to almost complete decay, in float64."""
    case = LinearAttentionCase(B, T, 2, 5, 7, dtype="float64", log_decay="mixed", tolerance=0.0)
    return case.make_inputs()["log_decay"]


# Without bidirectional segments in bfloat16: their gradients have bfloat16 operands, and are rounded like them.
@pytest.mark.parametrize(("form", "causal", "segments", "dtype"), [
    ("chunked", False, True, "float32"), ("chunked", False, True, "float16"),
    *((form, causal, False, dtype) for dtype in ("float32", "bfloat16", "float16")
      for form, causal in (("chunked", True), ("chunked", False), ("cumsum", True), ("recurrent", True)))])
def test_no_product_with_a_state_is_left_to_round_its_operands(form, causal, segments, dtype):
    """A GPU rounds float32 operands to TF32 by default; states are float32 whatever the inputs are."""
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
    """A loop over pairs of tokens in NumPy, with segments as defined."""
    inputs = case.make_inputs()
    q, k, v, ids_BT = inputs["q"], inputs["k"], inputs["v"], inputs.get("segment_ids")
    B, T, H, M, D = case.B, case.T, case.H, case.M, case.D
    log_decay_BTH = inputs.get("log_decay", np.zeros((B, T, H)))
    state = State(inputs.get("s", np.zeros((B, H, M, D))), inputs.get("z", np.zeros((B, H, M))))
    y, s_end, z_end = np.zeros(v.shape), np.zeros_like(state.s_BHMD), np.zeros_like(state.z_BHM)
    for b in range(B):
        ids = np.zeros(T, int) if ids_BT is None else ids_BT[b]
        valid = np.flatnonzero(ids >= 0)
        run_of, run = {}, 0
        for place, t in enumerate(valid):
            run += int(place > 0 and ids[t] != ids[valid[place - 1]])
            run_of[t] = run

        def left(of, at, run_of=run_of, b=b):  # decay of a token, in its segment, up to another
            between = [t for t in run_of if of < t <= at and run_of[t] == run_of[at]]
            return np.exp(log_decay_BTH[b, between].sum(axis=0))

        def sums(seen, at, run, left=left, b=b):
            kept = np.stack([left(j, at) for j in seen] or [np.ones(H)])
            initial = [x[b] if run == 0 else 0 * x[b] for x in state]
            if run == 0 and seen:
                initial = [x * left(-1, at).reshape(H, *[1] * (x.ndim - 1)) for x in initial]
            return (np.einsum("jh,jhm,jhd->hmd", kept[:len(seen)], k[b, seen], v[b, seen]) + initial[0],
                    np.einsum("jh,jhm->hm", kept[:len(seen)], k[b, seen]) + initial[1])

        for t in valid:
            s, z = sums([j for j in valid if run_of[j] == run_of[t] and (j <= t or not case.causal)], t, run_of[t])
            denominator = np.einsum("hm,hm->h", q[b, t], z) + EPSILON if case.normalize else np.ones(H)
            y[b, t] = np.einsum("hm,hmd->hd", q[b, t], s) / denominator[:, None]
        last = [t for t in valid if run_of[t] == run]
        s_end[b], z_end[b] = sums(last, last[-1] if last else -1, run)
    return {"y": y, "final s": s_end, "final z": z_end}


@pytest.mark.parametrize("title", ["segments", "both directions, segments", "one more than a chunk",
                                   "segments, not normalised", "decay, segments"])
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
@pytest.mark.parametrize(("segments", "decays"), [
    pytest.param(False, False, marks=pytest.mark.thorough), (True, False), (True, True)])
def test_a_sequence_resumed_from_its_state_is_the_unsplit_one(implementation, segments, decays):
    (q, k, v), state = make_inputs(40)
    log_decay = make_log_decay(40) if decays else None
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
                                        segment_ids_BT=part_ids,
                                        log_decay_BTH=jnp.asarray(log_decay[:, where]) if decays else None, **options)
            parts.append(y)
        return jnp.concatenate(parts, axis=1), state

    def whole(q, k, v, state):
        whole_ids = None if ids is None else jnp.asarray(ids)
        return linear_attention(q, k, v, initial_state=state, segment_ids_BT=whole_ids,
                                log_decay_BTH=jnp.asarray(log_decay) if decays else None, **options)

    with jax.enable_x64(True):
        resumed = jax.jit(functools.partial(split, at=17))(q, k, v, state)
        unsplit = jax.jit(whole)(q, k, v, state)
    for actual, expected in zip(jax.tree.leaves(resumed), jax.tree.leaves(unsplit), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", *PLAIN_FORMS])
@pytest.mark.parametrize(("causal", "decays"), [
    pytest.param(True, False, marks=pytest.mark.thorough), (False, False), (True, True)])
def test_packed_segments_are_the_segments_one_by_one(implementation, causal, decays):
    if not causal and implementation not in ("reference", *UNMASKED_FORMS):
        pytest.skip("sees the past only")
    length, gap, count = 13, 2, 3
    T = count * (gap + length)
    (q, k, v), state = make_inputs(T)
    log_decay = make_log_decay(T)
    ids = np.full((B, T), -1, np.int32)
    starts = range(gap, T, gap + length)
    for i, start in enumerate(starts):
        ids[:, start:start + length] = i
    log_decay[ids < 0] = -3  # padding decays nothing
    run = jax.jit(functools.partial(linear_attention, causal=causal, chunk_size=8, implementation=implementation))
    with jax.enable_x64(True):
        packed, packed_end = run(q, k, v, initial_state=state, segment_ids_BT=ids,
                                 log_decay_BTH=log_decay if decays else None)
        for i, start in enumerate(starts):
            y, end = run(*(x[:, start:start + length] for x in (q, k, v)), initial_state=state if i == 0 else None,
                         log_decay_BTH=log_decay[:, start:start + length] if decays else None)
            np.testing.assert_allclose(packed[:, start:start + length], y, rtol=1e-10, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), packed_end, end)
    assert not np.any(np.asarray(packed)[ids < 0])


_reference_not_normalised = jax.jit(functools.partial(linear_attention, normalize=False, implementation="reference"))


@pytest.mark.parametrize("implementation", [
    pytest.param(form, marks=[] if form in ("chunked", "recurrent") else pytest.mark.thorough)
    for form in ("reference", *PLAIN_FORMS)])
@pytest.mark.parametrize("strong", [-1e4, -np.inf])
def test_what_a_strong_decay_leaves_is_what_comes_after_it(implementation, strong):
    """To 1e-5 of each token, in float32: a difference of sums of up to −1e4 would lose the −0.01 that follow."""
    T, start = 60, 11
    (q, k, v), state = jax.tree.map(lambda x: x.astype(np.float32), make_inputs(T))
    log_decay = np.full((B, T, 2), -0.01, np.float32)
    log_decay[:, start] = strong

    def run(q, k, v, state, log_decay):
        return linear_attention(q, k, v, initial_state=state, log_decay_BTH=log_decay, normalize=False,
                                chunk_size=32, implementation=implementation)

    y, end = jax.jit(run)(q, k, v, state, log_decay)
    with jax.enable_x64(True):
        after = [np.asarray(x[:, start:], np.float64) for x in (q, k, v, log_decay)]
        expected, expected_end = _reference_not_normalised(*after[:3], log_decay_BTH=np.maximum(after[3], -1e4))
    size_BTH = np.linalg.norm(expected, axis=-1)
    assert (np.linalg.norm(y[:, start:] - np.asarray(expected), axis=-1) / size_BTH).max() < 1e-5
    for x, wanted in zip(end, expected_end, strict=True):
        assert cases.error_of(np.asarray(x), np.asarray(wanted)) < 1e-5
    gradients = jax.jit(jax.grad(lambda *x: run(*x)[0].sum() + run(*x)[1].s_BHMD.sum(), range(5)))(
        q, k, v, state, log_decay)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert not np.any(gradients[4][:, start])
    assert np.all(gradients[4][:, :start])


@pytest.mark.parametrize("implementation", ["chunked", pytest.param("blockwise", marks=pytest.mark.thorough)])
def test_a_decay_does_not_depend_on_the_chunk_length(implementation):
    (q, k, v), state = make_inputs(40)
    log_decay = make_log_decay(40)

    def run(chunk_size):
        def loss(q, k, v, state, log_decay):
            y, end = linear_attention(q, k, v, initial_state=state, log_decay_BTH=log_decay, chunk_size=chunk_size,
                                      implementation=implementation)
            return jnp.sin(y).sum() + jnp.cos(end.s_BHMD).sum()
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, range(5)))(q, k, v, state, log_decay))

    with jax.enable_x64(True):
        whole = run(40)
        for chunk_size in (1, 7, 16):
            for x, wanted in zip(run(chunk_size), whole, strict=True):
                np.testing.assert_allclose(x, wanted, rtol=1e-10, atol=1e-12)


def test_a_decay_of_zero_is_none():
    (q, k, v), state = make_inputs(40)
    run = jax.jit(functools.partial(linear_attention, chunk_size=16))
    with jax.enable_x64(True):
        plain, decayed = (run(q, k, v, initial_state=state, log_decay_BTH=log_decay)
                          for log_decay in (None, np.zeros((B, 40, 2))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-14), plain, decayed)


def test_a_decay_has_a_gradient_in_its_own_format():
    (q, k, v), _ = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_inputs(20))
    log_decay = jnp.asarray(make_log_decay(20), jnp.bfloat16)

    @jax.jit
    def outputs_and_gradient(log_decay):
        y, pull = jax.vjp(lambda log_decay: linear_attention(q, k, v, log_decay_BTH=log_decay)[0], log_decay)
        return y, pull(y)[0]

    assert [x.dtype for x in outputs_and_gradient(log_decay)] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(("implementation", "growth"),
                         [("reference", 4), ("blockwise", 2), ("chunked", 2), ("recurrent", 2)])
def test_memory_of_a_gradient_grows_with_the_sequence(implementation, growth):
    def temporary_bytes(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        gradient = jax.grad(lambda *qkv: linear_attention(*qkv, implementation=implementation)[0].sum(), (0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) / temporary_bytes(4096) == pytest.approx(growth, rel=0.1)


@pytest.mark.parametrize("options", [(), ("log_decay_BTH", "segment_ids_BT")], ids=str)
def test_the_gradient_of_the_recurrence_keeps_no_state_per_token(options):
    """Less than three arrays of the size of the inputs, and with a decay 2 √T states; T states would take M = 64 such
    arrays."""
    tokens, width = 4096, 64
    x = jax.ShapeDtypeStruct((1, tokens, 1, width), jnp.float32)
    more = {"log_decay_BTH": jax.ShapeDtypeStruct((1, tokens, 1), jnp.float32),
            "segment_ids_BT": jax.ShapeDtypeStruct((1, tokens), jnp.int32)}
    gradient = jax.grad(lambda *qkv, extras: linear_attention(*qkv, implementation="recurrent", **extras)[0].sum(),
                        (0, 1, 2))
    extras = {name: more[name] for name in options}
    planned = jax.jit(gradient).lower(x, x, x, extras=extras).compile().memory_analysis()
    assert planned is not None
    states = 2 * int(tokens ** 0.5) if "log_decay_BTH" in options else 0
    assert planned.temp_size_in_bytes < (3 * tokens + states * width) * width * 4


@pytest.mark.parametrize("constant", [None, -8.0, -15.0])
def test_the_gradient_of_many_decays_is_that_of_the_definition(constant):
    """Of strong decays it is far smaller than the terms of other gradients: no difference of these can give it."""
    case = LinearAttentionCase(1, 2000, 2, 8, 8, dtype="float32", log_decay="mixed", tolerance=0.0)
    inputs = case.make_inputs()
    if constant is not None:
        inputs["log_decay"] = np.full_like(inputs["log_decay"], constant)

    def gradient(implementation, inputs):
        def loss(log_decay, inputs):
            out = case.call(implementation, **(inputs | {"log_decay": log_decay}))
            return jnp.sin(out["y"]).sum() + jnp.cos(out["final s"]).sum()
        return jax.jit(jax.grad(loss))(inputs["log_decay"], inputs)

    found = gradient("recurrent", inputs)
    with jax.enable_x64(True):
        expected = gradient("chunked", {name: x.astype(np.float64) for name, x in inputs.items()})
    assert cases.error_of(np.asarray(found), np.asarray(expected)) < 1e-6


def test_the_fastest_form_is_picked_by_length():
    def picked(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
        return pick_implementation(x, x, x)

    assert picked(1) == "recurrent"
    assert picked(2) == "chunked"


def test_on_a_tpu_its_kernels_are_picked_for_what_they_support():
    def picked(tokens=300, width=64, dtype="bfloat16", **options):
        x = jax.ShapeDtypeStruct((1, tokens, 2, width), dtype)
        return pick_implementation(x, x, x, **options)

    device = AbstractDevice(device_kind="TPU v5 lite", platform="tpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert picked() == picked(log_decay=True, segments=True) == picked(width=256, chunk_size=256) == "pallas_tpu"
        assert picked(1) == "recurrent"
        for options in ({"width": 257}, {"dtype": "float16"}, {"chunk_size": 64}, {"causal": False},
                        {"log_decay": True, "channel_decay": True}):
            assert picked(**options) == "chunked", options


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk_size": 64}, "implementation='pallas_tpu': chunk_size=64; it supports 128, 256"),
    ({"causal": False}, "it supports only causal=True; for causal=False choose implementation='chunked'"),
    ({"channel_log_decay_BTHM": jnp.zeros((1, 8, 2, 4))}, "it does not support channel_log_decay_BTHM"),
    ({"dtype": "float16"}, "q_BTHM is float16; it supports float32, bfloat16")])
def test_what_the_kernels_of_a_tpu_refuse(options, message):
    x = jnp.ones((1, 8, 2, 4), options.pop("dtype", "float32"))
    with pytest.raises(NotImplementedError, match=message):
        linear_attention(x, x, x, implementation="pallas_tpu", **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk_size": 128}, "implementation='mosaic_gpu': chunk_size=128; it supports 64"),
    ({"causal": False}, "it supports only causal=True; for causal=False choose implementation='chunked'"),
    ({"segment_ids_BT": jnp.zeros((1, 8), int)}, "it does not support segment_ids_BT"),
    ({"log_decay_BTH": jnp.zeros((1, 8, 2))}, "it does not support log_decay_BTH"),
    ({"dtype": "float32"}, "q_BTHM is float32; it supports bfloat16"),
    ({"width": 32}, "q_BTHM has width 32; it supports widths of 64 and 128"),
    ({"kind": "NVIDIA A100-SXM4-80GB"}, "it supports Hopper GPUs, and this is NVIDIA A100-SXM4-80GB")])
def test_what_the_mosaic_kernel_refuses(options, message, monkeypatch):
    if "kind" in options:
        kind = options.pop("kind")
        monkeypatch.setattr(device, "platform", lambda: "gpu")
        monkeypatch.setattr(device, "kind", lambda: kind)
    x = jnp.ones((1, 8, 2, options.pop("width", 64)), options.pop("dtype", "bfloat16"))
    with pytest.raises(NotImplementedError, match=message):
        linear_attention(x, x, x, implementation="mosaic_gpu", **options)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA GH200 480GB"])
def test_no_card_picks_the_mosaic_kernel(kind, monkeypatch):
    monkeypatch.setattr(triton, "MISSING", "it is gone")
    x = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)
    target = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=target)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pick_implementation(x, x, x) == "chunked"
        assert mosaic_gpu.refuses(Call(dict.fromkeys(("q_BTHM", "k_BTHM", "v_BTHD"), x))) is None


class TestBadInput:
    """One clear error, raised by the kernel itself: the tests' shape checks would come first."""

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
        ({"log_decay_BTH": jnp.zeros((2, 8))}, r"log_decay_BTH has shape \(2, 8\); expected \(2, 8, 3\)"),
        ({"log_decay_BTH": jnp.full((2, 8, 3), 0.5)}, "log_decay_BTH is 0.5 somewhere; expected 0 or less"),
        ({"log_decay_BTH": jnp.full((2, 8, 3), jnp.nan)}, "log_decay_BTH is nan somewhere; expected 0 or less"),
        ({"chunk_size": 0}, "chunk_size=0: expected a whole number of at least 1"),
        ({"implementation": "chunky"}, "implementation='chunky': expected one of reference, .*chunked"),
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

    def test_decays_of_whole_numbers(self):
        with pytest.raises(TypeError, match="log_decay_BTH is int32; expected floating point"):
            self.call(log_decay_BTH=jnp.zeros((2, 8, 3), jnp.int32))

    def test_a_decay_above_zero_that_a_traced_call_is_given_as_a_constant(self):
        above = jnp.ones((2, 8, 3))
        with pytest.raises(ValueError, match="log_decay_BTH is 1 somewhere; expected 0 or less"):
            jax.jit(lambda v_BTHD: self.call(v_BTHD=v_BTHD, log_decay_BTH=above))(jnp.ones((2, 8, 3, 5)))

    @pytest.mark.parametrize("implementation", [None, "reference", *UNMASKED_FORMS])
    def test_a_decay_cannot_look_ahead(self, implementation):
        with pytest.raises(NotImplementedError, match="log_decay_BTH requires causal=True"):
            self.call(implementation=implementation, causal=False, log_decay_BTH=jnp.zeros((2, 8, 3)))

    @pytest.mark.parametrize("implementation", ["cumsum", "recurrent"])
    def test_a_recurrence_cannot_look_ahead(self, implementation):
        with pytest.raises(NotImplementedError, match=f"'{implementation}': it supports only causal=True"):
            self.call(implementation=implementation, causal=False)

    def call(self, **changes):
        keys = jnp.ones((2, 8, 3, 4))
        arguments = {"q_BTHM": keys, "k_BTHM": keys, "v_BTHD": jnp.ones((2, 8, 3, 5))}
        return linear_attention(**(arguments | changes))
