"""The Reformer against the paper's formulas over all pairs, its decoding, its rotations and its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.reformer import Attention, Config

B, T, H, D = 2, 45, 2, 4
SIZES: dict[str, Any] = {"heads": H, "head_width": D, "width": H * D, "max_length": T}


def build(**options: Any) -> Attention:
    return Attention(Config(**options), **SIZES, rngs=nnx.Rngs(0))


def inputs(tokens: int = T, norm: float = 3.0) -> list[jax.Array]:
    """Queries, their keys, and values."""
    q, v = jax.random.normal(jax.random.key(0), (2, B, tokens, H, D))
    k = D**0.5 * q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    return [norm * q, k, v]


def mix(module: Attention, segment_ids_BT: Any = None, *, causal: bool, qkv: Any = None) -> np.ndarray:
    segment_ids_BT = None if segment_ids_BT is None else jnp.asarray(segment_ids_BT, jnp.int32)
    return np.asarray(jax.jit(lambda q, k, v: module.mix(
        q, k, v, x_BTE=jnp.zeros(()), causal=causal, segment_ids_BT=segment_ids_BT))(*(qkv or inputs())))


def buckets_of(module: Attention, q_TD: np.ndarray) -> np.ndarray:
    """In each round, as a row of tokens."""
    rows = []
    for r in range(module.config.rounds):
        start, bucket_T = 0, np.zeros(len(q_TD), int)
        for factor in module.factors:
            x = q_TD @ np.asarray(module.rotations_DRM[...], np.float64)[:, r, start:start + factor // 2]
            bucket_T = factor * bucket_T + np.concatenate([x, -x], axis=1).argmax(axis=1)
            start += factor // 2
        rows.append(bucket_T)
    return np.stack(rows)


def by_the_paper(module: Attention, q_TD: np.ndarray, v_TD: np.ndarray, *, causal: bool) -> np.ndarray:
    """One head of one sequence: o_i = Σ_r exp(z(i, P_i^r) − z(i, P_i)) o_i^r, log N_ij and 10^5 off for itself."""
    tokens, chunk_size = len(q_TD), module.config.chunk_size
    scores_TT = q_TD @ (q_TD / np.linalg.norm(q_TD, axis=1, keepdims=True)).T  # keys are √D long
    scores_TT -= 1e5 * np.eye(tokens)
    rounds = []
    for bucket_T in buckets_of(module, q_TD):
        chunk_T = np.empty(tokens, int)
        for rank, i in enumerate(sorted(range(tokens), key=lambda i, bucket_T=bucket_T: (bucket_T[i], i))):
            chunk_T[i] = rank // chunk_size
        back_TT = chunk_T[:, None] - chunk_T[None]
        rounds.append((bucket_T[:, None] == bucket_T[None]) & (back_TT >= 0) & (back_TT <= 1))
    shown_RTT = np.stack(rounds) & (np.tri(tokens, dtype=bool) | (not causal))
    with np.errstate(divide="ignore"):
        logits_RTT = np.where(shown_RTT, scores_TT - np.log(shown_RTT.sum(axis=0)), -np.inf)
    z_RT = np.logaddexp.reduce(logits_RTT, axis=2)
    o_RTD = np.exp(logits_RTT - z_RT[..., None]) @ v_TD
    return np.sum(np.exp(z_RT - np.logaddexp.reduce(z_RT, axis=0))[..., None] * o_RTD, axis=0)


def expected(module: Attention, segment_ids_T: np.ndarray, *, causal: bool) -> np.ndarray:
    """Each segment separately; 0 for padding."""
    q, _, v = (np.asarray(x, np.float64) for x in inputs())
    y = np.zeros_like(v)
    for b, h, segment in np.ndindex(B, H, segment_ids_T.max() + 1):
        mine = segment_ids_T == segment
        y[b, mine, h] = by_the_paper(module, q[b, mine, h], v[b, mine, h], causal=causal)
    return y


ONE = np.zeros(T, int)
PACKED = np.repeat([0, 1, 2, -1], [20, 3, 18, 4])
PACKED[7] = -1  # padding within a segment


@pytest.mark.parametrize(("causal", "segment_ids_T", "options"), [
    (True, ONE, {"rounds": 3, "chunk_size": 4, "buckets": 6}),
    (False, ONE, {"rounds": 3, "chunk_size": 3, "buckets": 2}),  # many chunks to a bucket
    (True, PACKED, {"rounds": 2, "chunk_size": 4, "buckets": 2}),
    (False, PACKED, {"rounds": 2, "chunk_size": 5, "buckets": 4}),
])
def test_it_is_what_the_paper_defines(causal, segment_ids_T, options):
    module = build(**options)
    segment_ids_BT = None if segment_ids_T is ONE else segment_ids_T[None].repeat(B, axis=0)
    y = mix(module, segment_ids_BT, causal=causal)
    np.testing.assert_allclose(y, expected(module, segment_ids_T, causal=causal), atol=1e-5)


@pytest.mark.thorough
def test_a_token_that_sees_no_other_sees_itself():
    """The first one of a causal sequence does; with many buckets, hashed in two factors, so do others."""
    module = build(rounds=2, chunk_size=4, buckets=128)
    y, v = mix(module, causal=True), inputs()[2]
    np.testing.assert_array_equal(y[:, 0], v[:, 0])
    assert 0.2 < np.mean(np.all(y == v, axis=-1)) < 0.8
    np.testing.assert_allclose(y, expected(module, ONE, causal=True), atol=1e-5)


@pytest.mark.thorough
def test_rotations_are_no_parameters_and_there_is_no_key_projection():
    module = build()
    assert set(nnx.to_pure_dict(nnx.state(module, nnx.Param))) == {"query", "value", "output"}
    x = 100 * jax.random.normal(jax.random.key(0), (B, T, H * D))
    (q, k, _), _ = module.heads_of(x, None, None, None)
    np.testing.assert_allclose(k, D**0.5 * q / jnp.linalg.norm(q, axis=-1, keepdims=True), atol=1e-3)


@pytest.mark.parametrize(("every", "changes"), [(0, []), (2, [2, 4])])
def test_rotations_are_drawn_anew_on_schedule(every, changes):
    module = build(resample_every=every)
    last, changed = np.asarray(module.rotations_DRM[...]), []
    for step in range(5):
        module.resample(jnp.int32(step), jax.random.key(step))
        if not np.array_equal(module.rotations_DRM[...], last):
            changed.append(step)
        last = np.asarray(module.rotations_DRM[...])
    assert changed == changes


@pytest.mark.parametrize(("max_length", "chunk_size", "factors"), [
    (10, 64, (2,)), (320, 64, (10,)), (1000, 64, (32,)), (4000, 64, (16, 8)), (16_384, 64, (32, 16)),
])
def test_there_are_about_two_buckets_for_each_chunk(max_length, chunk_size, factors):
    module = Attention(Config(chunk_size=chunk_size), **SIZES | {"max_length": max_length}, rngs=nnx.Rngs(0))
    assert module.factors == factors
    assert np.prod(factors) == module.buckets
