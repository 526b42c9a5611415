"""``reformer``: softmax attention among tokens in the same hash bucket, where large weights are likely.

Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", 2020. Keys are normalised queries, k_j = √D q_j /
|q_j|, and scores are q_i·k_j / √D (the paper's text omits √D for clarity; its authors' code has both). In every round

- a token's bucket is the argmax of [qR; −qR] for a random R of the round, which similar directions are likely to share;
- tokens are sorted by bucket, then by position, and cut into chunks;
- a token attends to tokens of its bucket in its chunk or the previous one.

Rounds are combined by their sums of weights, in which a pair that is visible in N rounds has 1/N of its weight in each:
one softmax over all visible tokens. Here such a pair has its whole weight in the first of these rounds, which gives the
same sum. A token attends to itself only if no other token is visible.

Chunk boundaries depend on all tokens, so that outputs depend on later tokens through them. Decoding computes the output
of a token as the last one of the sequence; the paper also sorts again for every token. Segments are sorted one after
the other, each with chunks from its own start. Memory is linear in the tokens.

The released Reformer of the Long Range Arena has one round, a constant R, and 10 chunks at any length, which makes it
quadratic. It multiplies scores by √D, does not normalise keys, and masks neither padding, nor other buckets, nor the
token itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from kernels.grouped_attention import Part, combine, grouped_attention, with_neighbours
from kernels.project_heads import HeadWeights
from kernels.segments import HIDDEN, runs_of
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.random_projection import RandomProjection
from models.attention.self_attention import SelfAttention
from support.errors import ConfigError
from support.ranges import Count, Natural, Range

UNFACTORED = 64
"""Maximum number of buckets hashed by one argmax; more are pairs of two, so that the cost grows as the square root."""
NO_BLOCK = -2  # a place that is not adjacent to that of any token


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of the Reformer."""

    rounds: Annotated[int, Range(1, 64)] = 2
    """Number of hash rounds."""
    chunk_size: Count = 64
    """Chunk length."""
    buckets: Annotated[int, Range(most=2**16)] | None = None
    """Buckets per round: an even number up to 64, or a power of two. None: about two per chunk of the context."""
    resample_every: Natural = 1
    """Training steps between redraws of the hash rotations. 0: never redrawn."""

    UNSUPPORTED_OPTIONS = MappingProxyType(dict.fromkeys(
        ("short_conv", "qk_activation", "qk_norm"), "reformer computes normalised keys from the queries"))

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.buckets
        if n is not None and (n < 2 or n % 2 or (n > UNFACTORED and n & (n - 1))):
            raise ConfigError(f"model.modes.reformer.buckets is {n}; expected an even number up to {UNFACTORED}, or a "
                              "power of two")


class Cache(NamedTuple):
    """The decode state: all keys and values, and the bucket of each key in each round R."""

    past: KeyValueCache
    buckets_BHSR: Array
    """Integers in float32, since integer arrays in a cache are counts."""


class Attention(SelfAttention):
    """Attention by locality-sensitive hashing; decoding keeps every key and value."""

    length_fields = ("chunk_size",)
    bidirectional = True
    decode_state = "growing"
    prefix_exact = False

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        del self.key  # keys are normalised queries
        self.rotations_DRM = RandomProjection(self._rotations(rngs()))

    @property
    def buckets(self) -> int:
        """Number of buckets per round."""
        if self.config.buckets is not None:
            return self.config.buckets
        wanted = 2 * self.max_length / self.config.chunk_size
        return max(2, 2 * round(wanted / 2)) if wanted <= UNFACTORED else 2 ** round(math.log2(wanted))

    @property
    def factors(self) -> tuple[int, ...]:
        """Sizes of the argmaxes of a bucket's number: one, or two, whose pairs are the buckets."""
        power = self.buckets.bit_length() - 1
        return (self.buckets,) if self.buckets <= UNFACTORED else (2 ** (power - power // 2), 2 ** (power // 2))

    def resample(self, step: Array, key: Array) -> None:
        """:meth:`RandomProjection.resample` of the rotations; the training step calls it."""
        self.rotations_DRM.resample(step, self.config.resample_every, lambda: self._rotations(key))

    @property
    def head_weights(self) -> Sequence[HeadWeights]:
        """Of queries, in float32 because rounding would change some buckets, and of values."""
        return [HeadWeights(*self.query.parameters, exact=True), HeadWeights(*self.value.parameters)]

    def queries_keys_values(self, heads: Sequence[Array]) -> tuple[Array, Array, Array]:
        """Keys are queries of length √D."""
        q_BTHD, v_BTHD = heads
        return q_BTHD, q_BTHD * lax.rsqrt(jnp.mean(q_BTHD**2, axis=-1, keepdims=True) + 1e-6), v_BTHD

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        B, T = v_BTHD.shape[:2]
        runs_BT = jnp.zeros((B, T), jnp.int32) if segment_ids_BT is None else runs_of(segment_ids_BT)
        order_RBHT, slot_RBHT, place_RBHT = sort(self._hash(q_BTHD), runs_BT, self.config.chunk_size)
        # Chunks of a segment are not aligned with blocks of slots: the visible tokens are in the same block, the two
        # before or, if not causal, the one after.
        before, after = (1, 0) if segment_ids_BT is None else (2, 0 if causal else 1)
        size = min(self.config.chunk_size, T)

        def attend(this: tuple[Array, ...]) -> Part:
            """One round, without pairs of earlier rounds."""
            number, order_BHT, slot_BHT, place_BHT = this

            def blocks(x_BHT: Array, fill: int = 0) -> Array:
                x_BHT = permute(x_BHT, order_BHT, slot_BHT)
                padding = [(0, 0), (0, 0), (0, -T % size)] + [(0, 0)] * (x_BHT.ndim - 3)
                x_BHT = jnp.pad(x_BHT, padding, constant_values=fill)
                return x_BHT.reshape(*x_BHT.shape[:2], -1, size, *x_BHT.shape[3:])

            def tokens(x_BHNT: Array) -> Array:
                x_BHT = x_BHNT.reshape(*x_BHNT.shape[:2], -1, *x_BHNT.shape[4:])[:, :, :T]
                return permute(x_BHT, slot_BHT, order_BHT)

            def visible(query: Any, key: Any) -> Array:
                pairs = jax.tree.map(lambda t_BHT, s_BHS: (t_BHT[..., :, None], s_BHS[..., None, :]), query, key)
                (t_BHT1, s_BH1S), place, places = pairs
                shown_BHTS = _near(*place) & (s_BH1S < t_BHT1 if causal else s_BH1S != t_BHT1)
                for other, other_place in enumerate(places):
                    shown_BHTS &= (other >= number) | ~_near(*other_place)
                return shown_BHTS

            positions_BHT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, None], order_BHT.shape)
            tags = (blocks(positions_BHT), blocks(place_BHT, NO_BLOCK), [blocks(x, NO_BLOCK) for x in place_RBHT[:-1]])
            key_tags = jax.tree.map(lambda x: with_neighbours(x, before, after, NO_BLOCK), tags)
            k_BHNSD, v_BHNSD = (with_neighbours(blocks(x), before, after) for x in (k_BHTD, v_BHTD))
            part = grouped_attention(blocks(q_BHTD), k_BHNSD, v_BHNSD, tags, key_tags, visible)
            return Part(tokens(part.y_BHNTD)[:, :, None], tokens(part.logsumexp_BHNT)[:, :, None])

        q_BHTD, k_BHTD, v_BHTD = (x.astype(v_BTHD.dtype).swapaxes(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        # Sequential rounds, recomputed in the backward pass, need only one sorted copy at a time.
        rounds = len(order_RBHT)
        stacked = lax.map(jax.checkpoint(attend), (jnp.arange(rounds), order_RBHT, slot_RBHT, place_RBHT))
        parts = [Part(*(x[number] for x in stacked)) for number in range(rounds)]
        y_BTHD = fall_back_to_self(parts, v_BHTD[:, :, None])[:, :, 0].swapaxes(1, 2)
        return jnp.where((runs_BT >= 0)[..., None, None], y_BTHD, 0).astype(v_BTHD.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Cache:
        return Cache(KeyValueCache.empty(batch, self.heads, max_length, self.head_width, dtype),
                     jnp.zeros((batch, self.heads, max_length, self.config.rounds), jnp.float32))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Cache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Cache]:
        T, chunk_size = v_BTHD.shape[1], self.config.chunk_size
        buckets_RBHT = self._hash(q_BTHD).astype(jnp.float32)
        buckets_BTHR = jnp.moveaxis(buckets_RBHT, 0, 3).swapaxes(1, 2)
        filled_B, old = cache.past.filled_B, cache.buckets_BHSR
        past = cache.past.append(k_BTHD, v_BTHD, lengths_B)
        buckets_BHSR = KeyValueCache(old, old, filled_B).append(buckets_BTHR, buckets_BTHR, lengths_B).k_BHSD

        def visible(query: Any, key_buckets_RBHS: Any) -> Array:
            """Visible earlier tokens, sorted in every round as if the query were the last token."""
            position_BHT, query_buckets_RBHT = query
            s_S = jnp.arange(buckets_BHSR.shape[2])[None, None, None]
            before_BHTS = s_S < position_BHT[..., None]
            shown_BHTS = jnp.zeros_like(before_BHTS)
            for query_BHT, key_BHS in zip(query_buckets_RBHT, key_buckets_RBHS, strict=True):
                query_BHT1, key_BH1S = query_BHT[..., None], key_BHS[..., None, :]
                own_BHTS = before_BHTS & (key_BH1S == query_BHT1)
                start_BHT1 = jnp.sum(before_BHTS & (key_BH1S < query_BHT1), axis=-1, keepdims=True)
                rank_BHTS = start_BHT1 + jnp.cumsum(own_BHTS, axis=-1) - 1  # of those in its bucket
                chunk_BHT1 = (rank_BHTS[..., -1:] + 1) // chunk_size  # the query comes after them
                shown_BHTS |= own_BHTS & (rank_BHTS // chunk_size >= chunk_BHT1 - 1)
            return shown_BHTS

        position_B1T1 = (filled_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None])[:, None, :, None]
        q_BHTD, v_BHTD = (x.astype(v_BTHD.dtype).swapaxes(1, 2) for x in (q_BTHD, v_BTHD))
        part = grouped_attention(q_BHTD[:, :, :, None], past.k_BHSD[:, :, None], past.v_BHSD[:, :, None],
                                 (position_B1T1, [x_BHT[..., None] for x_BHT in buckets_RBHT]),
                                 list(jnp.moveaxis(buckets_BHSR, 3, 0)[:, :, :, None]), visible)
        y_BTHD = fall_back_to_self([part], v_BHTD[:, :, :, None])[:, :, :, 0].swapaxes(1, 2)
        return y_BTHD.astype(v_BTHD.dtype), Cache(past, buckets_BHSR)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        keys = min(2 * self.config.chunk_size, context)
        return tokens * self.heads * self.config.rounds * self.head_width * (4 * keys + sum(self.factors))

    def _rotations(self, key: Array) -> Array:
        return jax.random.normal(key, (self.head_width, self.config.rounds, sum(self.factors) // 2), jnp.float32)

    def _hash(self, q_BTHD: Array) -> Array:
        """The bucket of each token in each round, buckets_RBHT."""
        q_BTHD = lax.stop_gradient(q_BTHD.astype(jnp.promote_types(jnp.float32, q_BTHD.dtype)))
        turned_RBHTM = jnp.einsum("bthd,drm->rbhtm", q_BTHD, self.rotations_DRM[...].astype(q_BTHD.dtype),
                                  precision=lax.Precision.HIGHEST)
        bucket_RBHT, start = jnp.zeros(turned_RBHTM.shape[:-1], jnp.int32), 0
        for factor in self.factors:
            half = turned_RBHTM[..., start:(start := start + factor // 2)]
            bucket_RBHT = factor * bucket_RBHT + lax.argmax(jnp.concatenate([half, -half], axis=-1), 4, jnp.int32)
        return bucket_RBHT


def sort(buckets_RBHT: Array, runs_BT: Array, chunk_size: int) -> tuple[Array, Array, Array]:
    """Sorts tokens by run, bucket and position, padding last, with separate chunks for each run.

    Returns, of shape (R, B, H, T):
        the token in each slot;
        the slot of each token;
        the place of each token, a number such that a key's place equals the query's, or is one less, exactly if the key
        is in the query's run and bucket, and in its chunk or the previous one.
    """
    R, B, H, T = buckets_RBHT.shape
    slots_RBHT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, None, None], (R, B, H, T))
    runs_RBHT = jnp.broadcast_to(jnp.where(runs_BT < 0, T, runs_BT)[None, :, None], (R, B, H, T))
    runs_RBHT, buckets_RBHT, order_RBHT = lax.sort((runs_RBHT, buckets_RBHT, slots_RBHT), num_keys=2, is_stable=True)
    starts_RBHT = _changes(runs_RBHT)
    rank_RBHT = slots_RBHT - lax.cummax(jnp.where(starts_RBHT, slots_RBHT, 0), axis=3)
    steps_RBHT = jnp.where(starts_RBHT | _changes(buckets_RBHT), 2, rank_RBHT % chunk_size == 0)
    places_RBHT = jnp.cumsum(steps_RBHT.astype(jnp.int32), axis=3)
    _, slot_RBHT, place_RBHT = lax.sort((order_RBHT, slots_RBHT, places_RBHT), num_keys=1)
    return order_RBHT, slot_RBHT, place_RBHT


@jax.custom_vjp
def permute(x_BHT: Array, order_BHT: Array, slot_BHT: Array) -> Array:
    """Permutes x_BHT…; ``slot_BHT`` is the inverse permutation, so that the gradient is a gather, not a scatter."""
    return jax.vmap(jax.vmap(lambda x, order: x[order]))(x_BHT, order_BHT)


permute.defvjp(lambda x_BHT, order_BHT, slot_BHT: (permute(x_BHT, order_BHT, slot_BHT), (order_BHT, slot_BHT)),
               lambda saved, dy_BHT: (permute(dy_BHT, *saved[::-1]), None, None))


def _changes(x_RBHT: Array) -> Array:
    """Whether a number differs from the previous one; true for the first."""
    return jnp.pad(x_RBHT[..., 1:] != x_RBHT[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=True)


def _near(query_place: Array, key_place: Array) -> Array:
    """Whether a key is in the query's bucket, and in its chunk or the previous one."""
    return (query_place == key_place) | (query_place == key_place + 1)


def fall_back_to_self(parts: list[Part], v_BHNTD: Array) -> Array:
    """One softmax over all parts; a token without visible tokens attends to itself."""
    alone_BHNT = jnp.stack([part.logsumexp_BHNT for part in parts]).max(axis=0) < HIDDEN / 2
    return jnp.where(alone_BHNT[..., None], v_BHNTD, combine(parts))
