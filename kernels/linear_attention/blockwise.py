"""Linear attention block by block: the masked T × T product, never materialised.

Quadratic time and linear memory, as flash attention has for softmax; the attention half of the chunked hybrid. The
gradients of the product (q, k, v) ↦ mask(q kᵀ) v are products of the same kind: with ∂ the gradient of its output,

    ∂q = mask(∂ vᵀ) k,    ∂k = maskᵀ(v ∂ᵀ) q,    ∂v = maskᵀ(k qᵀ) ∂,

two of them looking forward in time. With a decay the gradient is that of autodiff.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..decay import sums_after, sums_between, sums_through
from ..segments import visible
from ..state import State, divide, final_state, from_initial
from .tuning import ChunkSizes


def blockwise(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
              normalize: bool, chunk_sizes: ChunkSizes, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Differentiable. Both passes have blocks of ``chunk_sizes.forward`` tokens."""
    dtype = initial.s_BHMD.dtype
    B, T, H, _ = q_BTHM.shape
    C = chunk_sizes.forward
    padding = -T % C
    runs = jnp.zeros((B, T), jnp.int32) if runs_BT is None else runs_BT
    runs_BNC = jnp.pad(runs, ((0, 0), (0, padding)), constant_values=-1).reshape(B, -1, C)

    def blocks(x):
        x = jnp.pad(x.astype(dtype), ((0, 0), (0, padding), (0, 0), (0, 0)))
        return x.reshape(B, -1, C, H, x.shape[-1]).transpose(1, 0, 3, 2, 4)  # N B H C …

    # A column of ones in the values: the same product gives the denominator.
    values_BTHD = jnp.concatenate([v_BTHD.astype(dtype), jnp.ones((B, T, H, 1), dtype)], axis=-1)
    q_NBHCM, k_NBHCM, v_NBHCD = blocks(q_BTHM), blocks(k_BTHM), blocks(values_BTHD)
    if log_decay_BTH is None:
        y_NBHCD = _product(q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC, "past" if causal else "all")
    else:
        y_NBHCD = _decayed_product(q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC, blocks(log_decay_BTH[..., None])[..., 0])
    y_BTHD = y_NBHCD.transpose(1, 0, 3, 2, 4).reshape(B, T + padding, H, -1)[:, :T]
    initial_BTHD, initial_BTH = from_initial(q_BTHM, initial, runs_BT, log_decay_BTH)
    y_BTHD = divide(y_BTHD[..., :-1] + initial_BTHD, y_BTHD[..., -1] + initial_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(q_NBHCM: Array, k_NBHCM: Array, v_NBHCD: Array, runs_BNC: Array,
             sees: Literal["past", "future", "all"]) -> Array:
    N, _, _, C, _ = q_NBHCM.shape

    def query_block(i):
        def key_block(j, y_BHCD):
            scores_BHTS = jnp.einsum("bhtm,bhsm->bhts", q_NBHCM[i], k_NBHCM[j])
            mask_BTS = visible(runs_BNC[:, i], runs_BNC[:, j])
            if sees != "all":
                t, s = i * C + jnp.arange(C)[:, None], j * C + jnp.arange(C)[None, :]
                mask_BTS &= (s <= t if sees == "past" else s >= t)[None]
            return y_BHCD + jnp.einsum("bhts,bhsd->bhtd", jnp.where(mask_BTS[:, None], scores_BHTS, 0), v_NBHCD[j])

        first, end = (i, N) if sees == "future" else (0, N if sees == "all" else i + 1)
        return lax.fori_loop(first, end, key_block, jnp.zeros(v_NBHCD.shape[1:], v_NBHCD.dtype))

    return lax.map(query_block, jnp.arange(N))


def _product_forward(q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC, sees):
    return _product(q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC, sees), (q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC)


def _product_backward(sees, saved, dy_NBHCD):
    q_NBHCM, k_NBHCM, v_NBHCD, runs_BNC = saved
    seen_by: Literal["past", "future", "all"] = {"past": "future", "future": "past", "all": "all"}[sees]  # pyright: ignore
    return (_product(dy_NBHCD, v_NBHCD, k_NBHCM, runs_BNC, sees),
            _product(v_NBHCD, dy_NBHCD, q_NBHCM, runs_BNC, seen_by),
            _product(k_NBHCM, q_NBHCM, dy_NBHCD, runs_BNC, seen_by), None)


_product.defvjp(_product_forward, _product_backward)


def _decayed_product(q_NBHCM: Array, k_NBHCM: Array, v_NBHCD: Array, runs_BNC: Array,
                     log_decay_NBHC: Array) -> Array:
    """The causal product with a decay, one factor for each pair: from the key to the end of its block, over the blocks
    in between, and up to the query."""
    N, _, _, C, _ = q_NBHCM.shape
    runs_NBC = runs_BNC.swapaxes(0, 1)
    keys = (jnp.arange(N), k_NBHCM, v_NBHCD, runs_NBC, jnp.exp(sums_after(log_decay_NBHC, -1)),
            jnp.exp(log_decay_NBHC.sum(axis=-1)))

    @jax.checkpoint
    def query_block(query):
        i, q_BHCM, own_runs_BC, log_decay_BHC = query
        reads_BHC = jnp.exp(sums_through(log_decay_BHC, -1))
        own_BHCS = jnp.where(jnp.tril(jnp.ones((C, C), bool)), jnp.exp(sums_between(log_decay_BHC)), 0)

        @jax.checkpoint
        def key_block(carry, key):
            j, k_BHCM, v_BHCD, runs_BC, writes_BHC, keeps_BH = key

            def add(carry):
                y_BHCD, between_BH = carry
                earlier_BHCS = reads_BHC[..., :, None] * (between_BH[..., None] * writes_BHC)[..., None, :]
                scores_BHCS = (jnp.einsum("bhcm,bhsm->bhcs", q_BHCM, k_BHCM)
                               * jnp.where(i == j, own_BHCS, earlier_BHCS))
                weights_BHCS = jnp.where(visible(own_runs_BC, runs_BC)[:, None], scores_BHCS, 0)
                return (y_BHCD + jnp.einsum("bhcs,bhsd->bhcd", weights_BHCS, v_BHCD),
                        jnp.where(i == j, between_BH, between_BH * keeps_BH))

            return lax.cond(j <= i, add, lambda carry: carry, carry), None

        nothing = (jnp.zeros(v_NBHCD.shape[1:], v_NBHCD.dtype), jnp.ones_like(log_decay_BHC[..., 0]))
        return lax.scan(key_block, nothing, keys, reverse=True)[0][0]

    return lax.map(query_block, (jnp.arange(N), q_NBHCM, runs_NBC, log_decay_NBHC))
