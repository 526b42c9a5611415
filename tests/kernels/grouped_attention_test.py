"""Grouped attention against the definition, over all pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels.grouped_attention import api as grouped
from kernels.grouped_attention import (
    blocks_of,
    combine,
    grouped_attention,
    tag_blocks_of,
    tokens_of,
    with_neighbours,
)
from kernels.segments import HIDDEN

B, T, H, D = 2, 22, 3, 4


def inputs(seed: int = 0) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(seed), (3, B, T, H, D)))


def dense(q_BTHD, k_BSHD, v_BSHD, shown_TS) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTHD, k_BSHD, v_BSHD))
    weights = np.where(shown_TS, np.exp(np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)), v)


def positions(size: int) -> jax.Array:
    return tag_blocks_of(jnp.arange(T)[None].repeat(B, axis=0), size, fill=-1)


def sees(t_BHT, s_BHS):
    """Keys at or before the query, at most 6 back; every third query sees none."""
    t, s = t_BHT[..., :, None], s_BHS[..., None, :]
    return (s >= 0) & (s <= t) & (t - s <= 6) & (t % 3 != 1)


def windowed(q_BTHD, k_BTHD, v_BTHD, size: int = 6):
    q, k, v = (blocks_of(x, size) for x in (q_BTHD, k_BTHD, v_BTHD))
    k, v = (with_neighbours(x, 1, 0) for x in (k, v))
    return grouped_attention(q, k, v, positions(size), with_neighbours(positions(size), 1, 0, fill=-1), sees)


@pytest.mark.parametrize(("at_once", "largest"), [(1, 10**6), (2**30, 1), (3 * B * H * 6 * 12, 1), (B * H * 12 * 4, 1)],
                         ids=["each group", "all", "three, and one left", "groups in pieces"])
def test_it_is_attention_to_what_is_visible(monkeypatch, at_once, largest):
    monkeypatch.setitem(grouped.SCORES_AT_ONCE, "cpu", at_once)
    monkeypatch.setattr(grouped, "LARGEST", largest)
    t, s = np.arange(T)[:, None], np.arange(T)[None]
    part = jax.jit(windowed)(*inputs())
    y = np.asarray(tokens_of(part.y_BHNTD, T))
    np.testing.assert_allclose(y, dense(*inputs(), (s <= t) & (t - s <= 6) & (t % 3 != 1)), atol=1e-5)
    assert np.all(y[:, 1::3] == 0)


def test_parts_are_put_together_as_one_softmax():
    """Keys before token 9, the same for all groups, and those from there on."""
    @jax.jit
    def attend(q, k, v):
        s = jnp.arange(T)[None].repeat(B, axis=0)
        parts = [grouped_attention(blocks_of(q, 5), blocks_of(k, T), blocks_of(v, T), tag_blocks_of(s, 5, -1),
                                   tag_blocks_of(s, T, -1), lambda t_BHT, s_BHS, early=early: jnp.broadcast_to(
                                       ((s_BHS < 9) == early)[..., None, :], (*t_BHT.shape, s_BHS.shape[-1])))
                 for early in (True, False)]
        return tokens_of(combine(parts), T)

    np.testing.assert_allclose(attend(*inputs()), dense(*inputs(), np.ones((T, T), bool)), atol=1e-5)


def test_gradients_are_the_slopes_through_both_results():
    def whole(q, k, v):
        part = windowed(q, k, v)
        return part.y_BHNTD, jnp.where(part.logsumexp_BHNT > HIDDEN / 2, part.logsumexp_BHNT, 0)

    with jax.enable_x64(True):
        check_grads(jax.jit(whole), [jnp.asarray(x, jnp.float64) for x in inputs()], order=1, modes=["rev"])


def test_memory_of_the_gradient_is_linear_in_the_tokens():
    def temporary(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((1, tokens, 4, 32), jnp.float32)

        def loss(q, k, v):
            q, k, v = (blocks_of(x, 64) for x in (q, k, v))
            k, v = (with_neighbours(x, 1, 1) for x in (k, v))
            ones = jnp.ones((1, 1, tokens // 64, 64), jnp.int32)
            part = grouped_attention(q, k, v, ones, with_neighbours(ones, 1, 1),
                                     lambda t, s: (t[..., :, None] > 0) & (s[..., None, :] > 0))
            return part.y_BHNTD.sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16_384) < 2.2 * temporary(8_192)


def test_shapes_that_do_not_agree_are_refused():
    q, k, v = (blocks_of(x, 6) for x in inputs())
    with pytest.raises(ValueError, match="v_BHNSD has shape"):
        grouped_attention(q, k, v[:, :, :1], positions(6), positions(6), sees)
