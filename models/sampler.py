"""Sampling from a GPT: the prompt in parallel form, then token by token from what decoding keeps."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.schema import ConfigError
from kernels import device
from kernels.projection import activation_dtype
from models.attention.self_attention import Linear
from models.gpt import GPT, Cache

PREFILL_TOKENS = 256
"""Tokens of the prompt read at once: one shape, so that a prompt of another length compiles nothing."""
TOKENS_PER_CALL = 16
"""Tokens decoded on the device before the host sees them: few enough to stream, enough to hide the call."""
LEAST_ROOM = 1024
"""Tokens a growing cache has room for at least; beyond, powers of two, so that few shapes are ever compiled."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    The filters apply one after the other: temperature, the ``top_k`` likeliest tokens, of these renormalised the fewest
    likeliest that together have probability ``top_p`` (Holtzman et al., "The Curious Case of Neural Text Degeneration",
    2020).
    """

    temperature: float = 0.8
    """Logits are divided by it; 0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens that together have this probability; 1: among all."""
    seed: int = 0
    """Seed of the draws, from 0 to 2^32 - 1: the same seed gives the same samples."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for a value out of its range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature is {self.temperature}; expected a number of at least 0")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"--top-k is {self.top_k}; expected a number of tokens, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; expected a probability above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed is {self.seed}; expected a number from 0 to 2^32 - 1")


class Sampler:
    """Draws tokens from a model. Decoding is compiled once for a number of samples, prefilling once.

    All of it happens on the first device. A ``growing`` cache (softmax) has its room for tokens rounded up; each such
    room is compiled once.

    Args:
        model: the model; later changes of it are not seen.
        end_of_text: the token that ends a sample; None: nothing ends one.

    Raises:
        NotImplementedError: an attention mode of the model has no cached decode; the message names it.
    """

    def __init__(self, model: GPT, *, end_of_text: int | None = None):
        jax.eval_shape(lambda: model.init_cache(1, 1))
        self.end_of_text = end_of_text
        self.max_length = model.config.context if model.config.positions == "learned" else None
        """Tokens, prompt included, that the model has positions for; None: no bound."""
        self._model = model
        graph, state = nnx.split(_with_product_weights(model))
        # All that the compiled functions take is put on one device: what merely happens to be there, as a new array
        # does, has them compiled a second time for their own outputs.
        self._device = jax.local_devices()[0]
        self._state = jax.device_put(state, self._device)
        end = -1 if end_of_text is None else end_of_text

        def prefill(state: Any, tokens_BT: Array, cache: Cache, lengths_B: Array) -> tuple[Array, Cache]:
            model = nnx.merge(graph, state)
            x_BTE, cache = model.extend(tokens_BT, cache, lengths_B)
            last_B = jnp.maximum(lengths_B - 1, 0)
            return model.logits(jnp.take_along_axis(x_BTE, last_B[:, None, None], axis=1))[:, 0], cache

        def decode(state: Any, logits_BV: Array, cache: Cache, ended_B: Array, keys_B: Array, sampling: tuple,
                   count: Array) -> tuple[Array, Array, Array, Cache, Array]:
            model = nnx.merge(graph, state)

            def unfinished(carry: Any) -> Array:
                done, _, _, _, ended_B = carry
                return (done < count) & ~jnp.all(ended_B)

            def step(carry: Any) -> Any:
                done, tokens_BT, logits_BV, cache, ended_B = carry
                keys_at_B = jax.vmap(jax.random.fold_in)(keys_B, cache.position_B)
                token_B = jnp.where(ended_B, end, draw(logits_BV, keys_at_B, *sampling))
                x_BTE, cache = model.extend(token_B[:, None], cache)
                return (done + 1, tokens_BT.at[:, done].set(token_B), model.logits(x_BTE)[:, 0], cache,
                        ended_B | (token_B == end))

            def step_on(_: Array, carry: Any) -> Any:
                return (carry[0] + unfinished(carry), *step(carry)[1:])

            tokens_BT = jnp.full((len(ended_B), TOKENS_PER_CALL), end, jnp.int32)
            start = (jnp.int32(0), tokens_BT, logits_BV, cache, ended_B)
            if device.platform() == "cpu":
                return jax.lax.while_loop(unfinished, step, start)
            # Elsewhere the host would ask at every token whether to go on, and the device wait for it. Here it goes on
            # past the end, which is never read.
            return jax.lax.fori_loop(0, TOKENS_PER_CALL, step_on, start)

        self._prefill = jax.jit(prefill, donate_argnames="cache")
        self._decode = jax.jit(decode, donate_argnames=("logits_BV", "cache", "ended_B"))

    def warm_up(self, prompt_length: int, max_new_tokens: int, *, samples: int = 1) -> None:
        """Compile what :meth:`generate` runs for a prompt of this many tokens, without drawing any."""
        room = self._room(prompt_length, max_new_tokens)
        carry = self._start(np.zeros(0, np.int32), room, samples)
        jax.block_until_ready(self._decode(self._state, *carry, *_arrays(Sampling(), samples), np.int32(0)))

    def generate(self, prompt_T: Int[np.ndarray, " T"], sampling: Sampling, *, max_new_tokens: int,
                 samples: int = 1) -> Iterator[Int[np.ndarray, "B N"]]:
        """Draw up to ``max_new_tokens`` tokens after a prompt, or as many as the model has positions for.

        Sample i depends on the prompt, ``sampling`` and i, not on how many are drawn beside it.

        Args:
            prompt_T: token ids, at least one.
            sampling: how tokens are drawn.
            max_new_tokens: bound on the tokens of each sample.
            samples: B.

        Returns:
            An iterator over pieces of the samples, a few tokens of every row at a time, as they are drawn. A row that
            has ended holds end-of-text from there on; when all have, the pieces end.

        Raises:
            ConfigError: the prompt is empty, is longer than the learned positions, or has an id beyond the vocabulary;
                a value of ``sampling`` is out of its range.
        """
        sampling.check()
        T = len(prompt_T)
        if not T:
            raise ConfigError("the prompt has no tokens; start from the end-of-text token")
        if prompt_T.min() < 0 or prompt_T.max() >= self._model.vocab_size:
            raise ConfigError(f"the prompt has token ids from {prompt_T.min()} to {prompt_T.max()}; the model knows "
                              f"0 to {self._model.vocab_size - 1}")
        if self.max_length is not None:
            if self.max_length < T:
                raise ConfigError(f"the prompt has {T:,} tokens, and the model has learned positions for "
                                  f"{self.max_length:,}; shorten the prompt")
            max_new_tokens = min(max_new_tokens, self.max_length - T)
        return self._pieces(prompt_T, sampling, max_new_tokens, samples)

    @property
    def model(self) -> GPT:
        """The model that is sampled from, as it was given."""
        return self._model

    def continuation(self, position: int, *, calls: int, samples: int = 1,
                     sampling: Sampling | None = None) -> Callable[[], Array]:
        """Draw as if ``position`` tokens stood before, without reading any: for measurements.

        What decoding keeps is filled with random numbers from 0 to 1, its counts of tokens with ``position``; a cache
        that grows has room for what is drawn and no more. The tokens mean nothing, the time they take does.

        Args:
            position: tokens before, the same in every row.
            calls: bound on the calls of what is returned.
            samples: B.
            sampling: how tokens are drawn; None: the default.

        Returns:
            A function that starts to draw the next ``TOKENS_PER_CALL`` tokens of every row and returns them, (B, T),
            without waiting for the device.

        Raises:
            ConfigError: the model has no positions for so many tokens.
        """
        room = position + calls * TOKENS_PER_CALL
        if self.max_length is not None and self.max_length < room:
            raise ConfigError(f"{room:,} tokens are more than the {self.max_length:,} learned positions of the model")

        def fill() -> tuple[Array, Cache, Array]:
            key = jax.random.key(0)

            def contents(path: Any, x: jax.ShapeDtypeStruct) -> Array:
                if jnp.issubdtype(x.dtype, jnp.integer):
                    return jnp.full(x.shape, position, x.dtype)
                name = jax.tree_util.keystr(path)
                return jax.random.uniform(jax.random.fold_in(key, zlib.crc32(name.encode())), x.shape, x.dtype)

            shapes = jax.eval_shape(lambda: self._model.init_cache(samples, room))
            logits_BV = jax.random.normal(key, (samples, self._model.vocab_size))
            return logits_BV, jax.tree.map_with_path(contents, shapes), jnp.zeros(samples, bool)

        carry = jax.device_put(jax.jit(fill)(), self._device)
        keys_B, settings = jax.device_put(_arrays(sampling or Sampling(), samples), self._device)

        def draw_piece() -> Array:
            nonlocal carry
            _, tokens_BT, *rest = self._decode(self._state, *carry, keys_B, settings, np.int32(TOKENS_PER_CALL))
            carry = rest
            return tokens_BT

        return draw_piece

    def _pieces(self, prompt_T: np.ndarray, sampling: Sampling, max_new_tokens: int,
                samples: int) -> Iterator[np.ndarray]:
        keys_B, settings = _arrays(sampling, samples)
        carry = self._start(prompt_T, self._room(len(prompt_T), max_new_tokens), samples)
        left = max_new_tokens
        while left > 0:
            count = min(left, TOKENS_PER_CALL)
            done, tokens_BT, *carry = self._decode(self._state, *carry, keys_B, settings, np.int32(count))
            yield np.asarray(tokens_BT)[:, :int(done)]
            left = 0 if bool(np.all(carry[2])) else left - count

    def _start(self, prompt_T: np.ndarray, room: int, samples: int) -> tuple[Array, Cache, Array]:
        """The prompt is read once and shared: the next token's logits, cache and what has ended, of B rows.

        The ragged piece comes first, so that its padding stands within the learned positions.
        """
        piece = PREFILL_TOKENS if self.max_length is None else min(PREFILL_TOKENS, self.max_length)
        cache = jax.device_put(self._model.init_cache(1, room), self._device)
        T = len(prompt_T)
        first = (T - 1) % piece + 1 if T else 0
        tokens_1T = np.zeros((1, piece), np.int32)
        tokens_1T[0, :first] = prompt_T[:first]
        logits_1V, cache = self._prefill(self._state, tokens_1T, cache, np.array([first], np.int32))
        for start in range(first, T, piece):
            tokens_1T = prompt_T[None, start:start + piece].astype(np.int32)
            logits_1V, cache = self._prefill(self._state, tokens_1T, cache, np.array([piece], np.int32))
        rows = jax.eval_shape(lambda: self._model.init_cache(samples, room))
        cache = jax.tree.map(lambda x, row: jnp.broadcast_to(x, row.shape), cache, rows)
        logits_BV = jnp.broadcast_to(logits_1V, (samples, logits_1V.shape[1]))
        return jax.device_put((logits_BV, cache, jnp.zeros(samples, bool)), self._device)

    def _room(self, prompt_length: int, max_new_tokens: int) -> int:
        """Tokens a growing cache is made for."""
        if self.max_length is not None:
            return self.max_length
        return max(LEAST_ROOM, 1 << (prompt_length + max_new_tokens - 1).bit_length())


def _with_product_weights(model: GPT) -> GPT:
    """The same model, its projections' weights and the head's in the number format in which they are multiplied: half
    the bytes to read, and the same tokens."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear) and module.product_dtype is not None:
            module.kernel[...] = module.kernel[...].astype(module.product_dtype)
    dtype = activation_dtype(model.config.dtype)
    if dtype != model.token_embedding.embedding.dtype:
        model.head_weight = nnx.data(nnx.Variable(model.token_embedding.embedding[...].astype(dtype)))
    return model


def draw(logits_BV: Float[Array, "B V"], keys_B: Array, temperature: Float[Array, ""], top_k: Int[Array, ""],
         top_p: Float[Array, ""]) -> Int[Array, " B"]:
    """One token of each row, drawn as :class:`Sampling` says, row b with the random key ``keys_B[b]``."""

    def sample() -> Array:
        # The largest logit goes first: a tiny temperature would make all of them infinite otherwise.
        scaled_BV = (logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)) / temperature
        kept_BV = jax.lax.cond((top_k > 0) | (top_p < 1), lambda: likeliest(scaled_BV, top_k, top_p),
                               lambda: jnp.ones(scaled_BV.shape, bool))
        return jax.vmap(jax.random.categorical)(keys_B, jnp.where(kept_BV, scaled_BV, -jnp.inf)).astype(jnp.int32)

    # Conditions on the device: other settings compile nothing, and only a filter pays for its sort.
    return jax.lax.cond(temperature > 0, sample, lambda: jnp.argmax(logits_BV, axis=1).astype(jnp.int32))


def likeliest(logits_BV: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]) -> Bool[Array, "B V"]:
    """Which tokens ``top_k`` and then ``top_p`` keep; of equally likely ones the lower ids, and always one at least."""
    order_BV = jnp.argsort(logits_BV, axis=1, descending=True, stable=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=1)
    kept_BV = (jnp.arange(logits_BV.shape[1]) < jnp.where(top_k > 0, top_k, logits_BV.shape[1]))[None, :]
    p_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, -jnp.inf), axis=1)
    likelier_BV = jnp.cumsum(p_BV, axis=1) - p_BV
    kept_BV &= (likelier_BV < top_p) | (top_p >= 1)  # rounded sums reach 1 before the last token
    return jnp.put_along_axis(jnp.zeros(logits_BV.shape, bool), order_BV, kept_BV, axis=1, inplace=False)


def _arrays(sampling: Sampling, samples: int) -> tuple[Array, tuple]:
    """The random key of each sample, and the settings, as the compiled function takes them."""
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(sampling.seed), jnp.arange(samples))
    return keys_B, (np.float32(sampling.temperature), np.int32(sampling.top_k), np.float32(sampling.top_p))
