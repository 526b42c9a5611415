"""Decoding's GPU kernels in interpret mode: softmax attention of one token to a cache, against the definition in
float64 and the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.softmax_attention import cached_attention
from kernels.softmax_attention import decode as kernel
from kernels.softmax_attention.decode import pick_splits, softmax_decode

pytestmark = pytest.mark.usefixtures("gpu_kernel")

BLOCK = 16
# RMS(error) / RMS(reference): rounding of a few hundred sums and exponentials.
FLOAT32_TOLERANCE = 2e-6
# Keys and values are multiplied in float32 as they are. Only the result is rounded, to 8 and to 11 bits, by at most
# half a unit in the last place.
BFLOAT16_TOLERANCE = 2**-8
FLOAT16_TOLERANCE = 2**-11


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of ``BLOCK`` keys, so that small caches have many."""

    def use(width: int, itemsize: int = 4) -> None:
        monkeypatch.setattr(kernel, "BLOCK_BYTES", BLOCK * width * itemsize)

    return use


def make_inputs(B: int, S: int, D: int, dtype: str = "float32", *, H: int = 2) -> list[np.ndarray]:
    generator = np.random.default_rng(S + D)
    q, k, v = (generator.normal(size=shape).astype(jnp.dtype(dtype)) for shape in ((B, 1, H, D), *[(B, H, S, D)] * 2))
    return [q * np.asarray(3, q.dtype), k, v]  # some weights near 1, so that the running maximum matters


def definition(q, k, v, position) -> np.ndarray:
    """Row by row in float64, from the filled part alone."""
    y = np.zeros(q.shape)
    for b, last in enumerate(position):
        filled_k, filled_v = k[b, :, :last + 1].astype(float), v[b, :, :last + 1].astype(float)
        scores = np.einsum("hd,hsd->hs", q[b, 0].astype(float), filled_k) / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        y[b, 0] = np.einsum("hs,hsd->hd", weights / weights.sum(axis=1, keepdims=True), filled_v)
    return y


def decode(q, k, v, position, splits=None):
    return jax.jit(lambda *arguments: softmax_decode(*arguments, splits=splits))(
        q, k, v, np.asarray(position, np.int32))


def assert_close(actual, expected, tolerance: float) -> None:
    error = np.sqrt(np.mean((np.asarray(actual, float) - expected) ** 2) / np.mean(expected**2))
    assert error < tolerance, f"{error:.2e}"


# One key; a block minus one, exactly, and plus one; the same for one iteration of all four splits; a cache minus one,
# and full.
POSITIONS = (0, BLOCK - 2, BLOCK - 1, BLOCK, 4 * BLOCK - 2, 4 * BLOCK - 1, 4 * BLOCK, 10 * BLOCK - 2, 10 * BLOCK - 1)


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_rows_filled_differently(splits, blocks):
    blocks(8)
    q, k, v = make_inputs(len(POSITIONS), 10 * BLOCK, 8)
    y = decode(q, k, v, POSITIONS, splits)
    assert_close(y, definition(q, k, v, POSITIONS), FLOAT32_TOLERANCE)
    assert np.all(np.asarray(y)[0, 0] == v[0, :, 0])  # one key: its weight is 1


def test_it_is_the_plain_form():
    q, k, v = make_inputs(4, 1024, 8)
    position = np.array([0, 511, 700, 1023], np.int32)
    plain = jax.jit(lambda *arguments: cached_attention(*arguments, implementation="blockwise"))(q, k, v, position)
    assert_close(decode(q, k, v, position), np.asarray(plain, float), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_what_is_not_filled_is_not_read(garbage, blocks):
    blocks(8)
    q, k, v = make_inputs(len(POSITIONS), 10 * BLOCK, 8)
    clean = decode(q, k, v, POSITIONS, 4)
    for b, last in enumerate(POSITIONS):
        k[b, :, last + 1:], v[b, :, last + 1:] = garbage, garbage
    assert np.all(np.asarray(decode(q, k, v, POSITIONS, 4)) == np.asarray(clean))


@pytest.mark.parametrize(("S", "D"), [(1, 8), (20, 8), (100, 6), (52, 1), (40, 48), (33, 100), (24, 256)])
def test_any_room_and_width(S, D):
    q, k, v = make_inputs(3, S, D)
    position = [0, S // 2, S - 1]
    assert_close(decode(q, k, v, position), definition(q, k, v, position), FLOAT32_TOLERANCE)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", BFLOAT16_TOLERANCE), ("float16", FLOAT16_TOLERANCE)])
def test_lower_precision(dtype, tolerance, blocks):
    blocks(64, 2)
    q, k, v = make_inputs(3, 300, 64, dtype)
    position = [17, 299, 128]
    y = decode(q, k, v, position, 4)
    assert y.dtype == jnp.dtype(dtype)
    assert_close(y, definition(q, k, v, position), tolerance)


def test_queries_and_keys_of_different_formats():
    """The model may multiply in float32 and keep bfloat16."""
    q = make_inputs(2, 64, 16)[0]
    _, k, v = make_inputs(2, 64, 16, "bfloat16")
    assert_close(decode(q, k, v, [63, 5]), definition(q, k, v, [63, 5]), BFLOAT16_TOLERANCE)


def test_very_large_scores_stay_finite():
    q, k, v = np.full((1, 1, 1, 8), 3e3, np.float32), np.full((1, 1, 40, 8), 3e3, np.float32), make_inputs(1, 40, 8)[2]
    k[0, 0, 11] *= 2
    assert_close(decode(q, k, v[:, :1], [39], 2)[0, 0, 0], v[0, 0, 11].astype(float), FLOAT32_TOLERANCE)


def test_a_position_beyond_the_cache_sees_all_of_it(blocks):
    """As when a sampler continues past the end and discards the result."""
    blocks(8)
    q, k, v = make_inputs(2, 5 * BLOCK, 8)
    end = 5 * BLOCK - 1
    assert np.all(np.asarray(decode(q, k, v, [end + 1, end + 900])) == np.asarray(decode(q, k, v, [end, end])))


def test_two_runs_give_the_same_bits(blocks):
    blocks(8)
    q, k, v = make_inputs(3, 10 * BLOCK, 8)
    one, other = (np.asarray(decode(q, k, v, [150, 77, 3], 8)) for _ in range(2))
    assert np.all(one == other)


@pytest.mark.parametrize(("heads", "blocks", "splits"), [(12, 1024, 64), (384, 1024, 2), (12, 3, 4), (1, 8192, 128),
                                                         (2000, 1024, 1)])
def test_splits_keep_a_gpu_busy_and_no_more(heads, blocks, splits, monkeypatch):
    monkeypatch.setattr(kernel.device, "cores", lambda: 132)
    assert pick_splits(heads, blocks) == splits


@pytest.mark.parametrize(("tokens", "width", "dtype", "message"), [
    (2, 4, "float32", "q_BTHD has 2 tokens; it supports one"),
    (1, 4, "float64", "q_BTHD is float64; it supports float32, bfloat16, float16"),
    (1, 257, "float32", "q_BTHD has width 257; it supports widths of 1 to 256")])
def test_what_it_cannot_do(tokens, width, dtype, message):
    with jax.enable_x64(dtype == "float64"):
        q, keys = jnp.ones((1, tokens, 2, width), dtype), jnp.ones((1, 2, 8, width), dtype)
    with pytest.raises(NotImplementedError, match=message):
        cached_attention(q, keys, keys, jnp.zeros(1, jnp.int32), implementation="decode")


def test_on_a_gpu_one_token_takes_these_kernels_and_more_the_plain_form(monkeypatch):
    monkeypatch.setattr(kernel.device, "platform", lambda: "gpu")
    q, k, v = map(jnp.asarray, make_inputs(1, 64, 8))
    position = jnp.array([5], jnp.int32)
    pair = jnp.concatenate([q, q], axis=1)
    assert "softmax_decode" in str(jax.make_jaxpr(cached_attention)(q, k, v, position))
    assert "softmax_decode" not in str(jax.make_jaxpr(cached_attention)(pair, k, v, position))
