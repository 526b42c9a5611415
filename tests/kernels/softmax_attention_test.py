"""Softmax attention: its reference equals the definition; blocks, caches and invalid input of its forms.

That every form is the reference is tested for all ops by ``op_contract_test.py``.
"""

import functools
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.test_util import check_grads

from kernels import device
from kernels.cases import make_segments
from kernels.softmax_attention import blockwise, cached, cached_attention, pick_implementation, softmax_attention

B, H, D = 3, 2, 6

# RMS(error) / RMS(reference): rounding of a few hundred sums and exponentials.
FLOAT64_TOLERANCE = 1e-13


class Case(NamedTuple):
    """What is computed."""

    T: int
    causal: bool = True
    segments: bool = False


CASES = {
    "many blocks": Case(T=100),
    "segments": Case(T=75, segments=True),
    "both directions": Case(T=75, causal=False),
    "both directions, segments": Case(T=50, causal=False, segments=True),
}


@pytest.fixture
def blocks(monkeypatch):
    def use(block: int) -> None:
        monkeypatch.setattr(blockwise, "BLOCK", block)
        monkeypatch.setattr(blockwise, "BLOCK_OF_FEW_HEADS", block)
        monkeypatch.setattr(cached, "CACHE_BLOCK", 16)

    return use


def make_inputs(case: Case, dtype: str = "float64") -> tuple[list[np.ndarray], np.ndarray | None]:
    generator = np.random.default_rng(1)
    qkv = [generator.normal(size=(B, case.T, H, D)).astype(jnp.dtype(dtype)) for _ in range(3)]
    qkv[0] *= np.asarray(3, qkv[0].dtype)  # some weights near 1, so that the running maximum matters
    return qkv, make_segments(B, case.T) if case.segments else None


@pytest.mark.parametrize("implementation", ["materialised", "blockwise"])
def test_a_window_counts_tokens_and_not_padding(implementation):
    """Of two tokens: the last sees the token before the padding."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 3, 1, D)).astype(np.float32)
    y = jax.jit(lambda q, k, v: softmax_attention(q, k, v, window=2, segment_ids_BT=jnp.array([[0, -1, 0]]),
                                                  implementation=implementation))(q, k, v)
    weights = np.exp(k[0, [0, 2], 0] @ q[0, 2, 0] / np.sqrt(D))
    np.testing.assert_allclose(y[0, 2, 0], weights @ v[0, [0, 2], 0] / weights.sum(), rtol=1e-5)


def outputs_and_gradients(case: Case, implementation: str, qkv, segments) -> dict[str, np.ndarray]:
    def run(qkv):
        y = softmax_attention(*qkv, causal=case.causal, implementation=implementation,
                              segment_ids_BT=None if segments is None else jnp.asarray(segments))
        # No two elements have the same weight, so that none can be mistaken for another.
        return jnp.sum(y.astype(jnp.result_type(y, jnp.float32)) * jnp.sin(1 + jnp.arange(y.size)).reshape(y.shape)), y

    gradients, y = jax.jit(jax.grad(run, has_aux=True))(qkv)
    return {name: np.asarray(x) for name, x in zip(("y", "dq", "dk", "dv"), (y, *gradients), strict=True)}


@functools.cache
def materialised(case: Case) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return outputs_and_gradients(case, "materialised", *make_inputs(case))


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, want in expected.items():
        if not np.any(want):  # one token: its weight is 1 whatever the scores are
            assert not np.any(actual[name]), name
            continue
        error = np.sqrt(np.mean((actual[name].astype(np.float64) - want) ** 2) / np.mean(want**2))
        assert error < tolerance, f"{name}: {error:.2e}"


def definition(case: Case) -> np.ndarray:
    """A loop over tokens in NumPy, with segments as defined."""
    (q, k, v), segments = make_inputs(case)
    y = np.zeros(v.shape)
    for b in range(B):
        ids = np.zeros(case.T, int) if segments is None else segments[b]
        valid = np.flatnonzero(ids >= 0)
        run_of, run = {}, 0
        for place, t in enumerate(valid):
            run += int(place > 0 and ids[t] != ids[valid[place - 1]])
            run_of[t] = run
        for t in valid:
            seen = [j for j in valid if run_of[j] == run_of[t] and (j <= t or not case.causal)]
            weights = np.exp(np.einsum("hd,jhd->jh", q[b, t], k[b, seen]) / np.sqrt(D))
            y[b, t] = np.einsum("jh,jhd->hd", weights / weights.sum(axis=0), v[b, seen])
    return y


@pytest.mark.parametrize("name", ["many blocks", "segments", "both directions", "both directions, segments"])
def test_the_materialised_form_is_the_definition(name):
    assert_close(materialised(CASES[name]), {"y": definition(CASES[name])}, FLOAT64_TOLERANCE)


def test_gradients_of_the_materialised_form_are_its_derivatives():
    case = Case(T=9, segments=True)
    with jax.enable_x64(True):
        qkv, segments = make_inputs(case)
        attend = jax.jit(lambda *qkv: softmax_attention(*qkv, segment_ids_BT=jnp.asarray(segments),
                                                        implementation="materialised"))
        check_grads(attend, tuple(qkv), order=1, modes=["rev"])


def test_one_token_is_its_own_value():
    case = Case(T=1)
    with jax.enable_x64(True):
        found = outputs_and_gradients(case, "blockwise", *make_inputs(case))
    assert np.all(found["y"] == make_inputs(case)[0][2])
    assert all(np.all(np.isfinite(x)) for x in found.values())


def test_blocks_are_larger_where_heads_are_few_and_padded_little():
    def score_shapes(B, T):
        x = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32)
        jaxpr = str(jax.make_jaxpr(lambda q: softmax_attention(q, q, q, implementation="blockwise"))(x))
        return {shape for shape in (f"f32[{B},{H},{n},{n}]" for n in range(1, 600)) if shape in jaxpr}

    assert score_shapes(1, 2048) == {f"f32[1,{H},512,512]"}
    assert score_shapes(32, 2048) == {f"f32[32,{H},256,256]"}
    assert score_shapes(32, 300) == {f"f32[32,{H},152,152]"}  # not 256, which would waste 212 of 512
    assert score_shapes(32, 196) == {f"f32[32,{H},196,196]"}


@pytest.mark.parametrize("implementation", ["materialised", "blockwise"])
def test_padding_gives_zero_and_takes_no_gradient(implementation, blocks):
    blocks(16)
    case = Case(T=50, segments=True)
    qkv, segments = make_inputs(case, "float32")
    assert segments is not None
    for name, x in outputs_and_gradients(case, implementation, qkv, segments).items():
        assert np.all(x[segments < 0] == 0), name
        assert np.all(np.isfinite(x)), name


HIDDEN_BLOCKS = """
import jax, jax.numpy as jnp
from kernels.softmax_attention import softmax_attention

T = 600  # three blocks of 200: the second segment's queries see nothing in the first
ids = jnp.where(jnp.arange(T) < 200, 0, jnp.where(jnp.arange(T) < 590, 1, -1))[None]
for D in (6, 32):
    q = jax.random.normal(jax.random.key(D), (1, T, 64, D))
    def total(q, implementation):
        return jnp.sum(softmax_attention(q, q, q, segment_ids_BT=ids, implementation=implementation) ** 2)
    both = [jax.jit(jax.grad(total), static_argnums=1)(q, name) for name in ("blockwise", "materialised")]
    print(float(jnp.sqrt(jnp.mean((both[0] - both[1]) ** 2))))
"""


@pytest.mark.thorough
def test_a_block_that_hides_everything_adds_nothing_under_full_optimisation():
    """XLA fuses a product and a sum there, unlike in the other tests."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    found = subprocess.run([sys.executable, "-c", HIDDEN_BLOCKS], check=True, capture_output=True, env=environment)
    differences = [float(line) for line in found.stdout.split()]
    assert len(differences) == 2
    assert all(difference < 1e-5 for difference in differences)  # none is NaN


@pytest.mark.parametrize("implementation", ["materialised", "blockwise"])
def test_very_large_scores_stay_finite(implementation):
    q = np.full((1, 40, 1, 4), 300, np.float32)
    y, gradient = jax.jit(jax.value_and_grad(
        lambda q: softmax_attention(q, q, q, implementation=implementation).sum()))(q)
    assert y == pytest.approx(300 * 160)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize(("implementation", "growth"), [("materialised", 4), ("blockwise", 2)])
def test_memory_of_a_gradient_grows_with_the_sequence(implementation, growth, blocks):
    blocks(64)

    def temporary_bytes(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: softmax_attention(q, k, v, implementation=implementation).sum(), (0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) / temporary_bytes(4096) == pytest.approx(growth, rel=0.1)


@pytest.mark.parametrize(("room", "T", "filled"), [(16, 1, (0, 3, 15)), (12, 3, (0, 9, 4)), (64, 1, (0, 40, 16)),
                                                   (64, 40, (0, 24, 7)), (64, 16, (48, 0, 5))])
def test_a_cache_filled_differently_in_each_row(room, T, filled, blocks):
    """Row b holds filled[b] keys, and T are added: equals those T rows of the full form."""
    blocks(8)  # of queries; of keys 16
    (q, k, v), _ = make_inputs(Case(T=room), "float32")
    queries = np.stack([q[b, n:n + T] for b, n in enumerate(filled)])
    k_cache, v_cache = k.copy(), v.copy()
    for b, n in enumerate(filled):
        k_cache[b, n + T:], v_cache[b, n + T:] = 1e4, 1e4  # beyond the filled part anything is allowed
    y = jax.jit(lambda *arguments: cached_attention(*arguments))(
        queries, k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2), np.array(filled, np.int32))
    full = jax.jit(lambda *qkv: softmax_attention(*qkv, implementation="materialised"))(q, k, v)
    for b, n in enumerate(filled):
        np.testing.assert_allclose(y[b], full[b, n:n + T], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 16, 600])
def test_a_cache_is_not_copied(T, dtype):
    """Not even in part: the room beyond the last key costs nothing."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, T, 2, 64), (1, 2, 2**20, 64), (1, 2, 2**20, 64))]
    compiled = jax.jit(lambda *arguments: cached_attention(*arguments)).lower(
        *shapes, jax.ShapeDtypeStruct((1,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20 * 64


@pytest.mark.parametrize("batch", [1, 3])
def test_a_query_in_bfloat16_is_that_in_float32(batch):
    """A single token has its own code path."""
    q, k, v = (jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i, shape in enumerate(
        [(batch, 1, 2, 32), (batch, 2, 1024, 32), (batch, 2, 1024, 32)]))
    position_B = jnp.array([700, 3, 1023])[:batch]
    compute = jax.jit(lambda *arguments: cached_attention(*arguments))
    expected = np.asarray(compute(*(x.astype(jnp.float32) for x in (q, k, v)), position_B))
    error = np.asarray(compute(q, k, v, position_B), np.float32) - expected
    # The weights and y are rounded to 8 bits.
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 5e-3


def test_a_cache_has_whole_blocks(blocks):
    blocks(16)
    keys = jnp.ones((1, 1, 20, 4))
    with pytest.raises(ValueError, match="k_BHSD has room for 20 keys; expected a multiple of 16"):
        cached_attention(jnp.ones((1, 1, 1, 4)), keys, keys, jnp.zeros(1, jnp.int32))


def test_a_cpu_gets_the_blockwise_form():
    assert pick_implementation(jnp.dtype("float32"), 64) == "blockwise"


class TestBadInput:
    """One clear error, raised by the kernel itself: the tests' shape checks would come first."""

    @pytest.fixture(autouse=True)
    def _as_users_run_it(self, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    @pytest.mark.parametrize(("change", "message"), [
        ({"k_BTHD": jnp.ones((1, 7, 2, 4))}, r"k_BTHD has shape \(1, 7, 2, 4\); expected \(1, 8, 2, 4\)"),
        ({"v_BTHD": jnp.ones((1, 8, 1, 4))}, r"v_BTHD has shape \(1, 8, 1, 4\); expected \(1, 8, 2, 4\)"),
        ({"segment_ids_BT": jnp.zeros((1, 9), int)}, r"segment_ids_BT has shape \(1, 9\); expected \(1, 8\)"),
        ({"implementation": "flash"}, "implementation='flash': expected one of materialised, blockwise, cudnn"),
        ({"window": 0}, "window=0: expected at least 1"),
        ({"log_decay_BTH": jnp.zeros((1, 8, 4))}, r"log_decay_BTH has shape \(1, 8, 4\); expected \(1, 8, 2\)"),
        ({"log_decay_BTH": jnp.full((1, 8, 2), 0.5)}, "log_decay_BTH is 0.5 somewhere; expected 0 or less"),
    ])
    def test_a_value_error_names_the_argument(self, change, message):
        x = jnp.ones((1, 8, 2, 4))
        with pytest.raises(ValueError, match=message):
            softmax_attention(**({"q_BTHD": x, "k_BTHD": x, "v_BTHD": x} | change))

    def test_cudnn_is_refused_without_a_gpu(self):
        x = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=r"'cudnn': it needs an NVIDIA GPU; .* is a cpu"):
            softmax_attention(x, x, x, implementation="cudnn")

    @pytest.mark.parametrize("option", [{"window": 4}, {"log_decay_BTH": jnp.zeros((1, 8, 2))}])
    def test_a_window_and_a_decay_need_the_mask(self, option):
        x = jnp.ones((1, 8, 2, 4))
        with pytest.raises(NotImplementedError, match=f"{next(iter(option))} requires causal=True"):
            softmax_attention(x, x, x, causal=False, **option)

    def test_cudnn_takes_no_log_decay(self, monkeypatch):
        monkeypatch.setattr(device, "platform", lambda: "gpu")
        x = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="'cudnn': it does not support log decays, except"):
            softmax_attention(x, x, x, log_decay_BTH=jnp.zeros((1, 8, 2)), implementation="cudnn")
        assert pick_implementation(x.dtype, 8) == "cudnn"
        assert pick_implementation(x.dtype, 8, log_decay=True) == "blockwise"

    def test_the_decoding_kernel_takes_no_log_decay(self):
        keys = jnp.ones((1, 2, 16, 8))
        with pytest.raises(NotImplementedError, match="'decode': it does not support log decays"):
            cached_attention(jnp.ones((1, 1, 2, 8)), keys, keys, jnp.zeros(1, jnp.int32),
                             log_decay_BHS=jnp.zeros((1, 2, 16)), implementation="decode")

    def test_a_cache_has_a_log_decay_for_each_key(self):
        keys = jnp.ones((1, 2, 16, 8))
        with pytest.raises(ValueError, match=r"log_decay_BHS has shape \(1, 16, 2\); expected \(1, 2, 16\)"):
            cached_attention(jnp.ones((1, 1, 2, 8)), keys, keys, jnp.zeros(1, jnp.int32),
                             log_decay_BHS=jnp.zeros((1, 16, 2)))


def test_on_a_tpu_splash_attention_is_picked_for_what_it_supports():
    tpu = AbstractDevice(device_kind="TPU v5 lite", platform="tpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu)):
        def picked(dtype="bfloat16", width=64, **options):
            return pick_implementation(jnp.dtype(dtype), width, **options)

        assert picked() == picked("float32", 256) == picked(segments=True) == picked(window=9) == "splash"
        for options, reason in (({"log_decay": True}, "log decays"), ({"window": 9, "segments": True}, "a window with"),
                                ({"width": 257}, "width 257"), ({"dtype": "float16"}, "float16")):
            device.note.cache_clear()
            with pytest.warns(UserWarning, match=f"'splash': .*{reason}.*; 'blockwise' takes its place"):
                assert picked(**options) == "blockwise", options
    assert picked() == "blockwise"
