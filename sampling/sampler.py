"""Sampling from a GPT: the prompt in parallel form, then token by token from the decode state."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from kernels import cpu, device
from models.gpt import GPT, Cache
from sampling.token_step import token_step
from sampling.weights import from_product_weights, to_product_weights
from support.errors import ConfigError
from support.ranges import Seed

PREFILL_TOKENS = (256, 1024)
"""Prompt tokens per call, at most the model's context: large chunks for long prompts, small ones for the rest. Both are
compiled together, so that prompts of other lengths need no compilation."""
TOKENS_PER_CALL = 32
"""Tokens decoded on the device per call: few enough to stream, enough to hide the overhead."""
LEAST_ROOM = 1024
"""Minimum size of a growing cache, in tokens; larger sizes are powers of two, so that few shapes are compiled."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling of the next token from the logits.

    Applied in this order: the repetition penalty (Keskar et al., "CTRL", 2019, in its common form, which multiplies
    negative logits), temperature, and the filters ``top_k``; ``top_p``, on the renormalised rest (Holtzman et al., "The
    Curious Case of Neural Text Degeneration", 2020); ``min_p`` (Nguyen et al., "Turning Up the Heat: Min-p Sampling",
    2024).
    """

    temperature: float = 0.8
    """Divisor of the logits. 0: greedy."""
    top_k: int = 0
    """Sample from this number of most likely tokens. 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability. 1: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the probability of the most likely one. 0: from all."""
    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens in the prompt or the generated text; a factor of negative logits. 1: none."""
    seed: Seed = 0
    """Random seed, from 0 to 2^32 - 1: the same seed gives the same samples."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for values out of range, and for filters with greedy sampling."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; expected a number of at least 0")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k is {self.top_k}; expected a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected a probability above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; expected a number from 0 to 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; expected a number from 0.001 to "
                              "1000, 1 for none")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; expected a number from 0 to 2^32 - 1")
        for name, value, without in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1), ("min_p", self.min_p, 0)):
            if self.temperature == 0 and value != without:
                raise ConfigError("temperature is 0, which takes the likeliest token, whatever "
                                  f"{name} is; expected one of them")


class Settings(NamedTuple):
    """:class:`Sampling` for the compiled functions, without the seed."""

    temperature: Float[Any, ""]
    top_k: Int[Any, ""]
    top_p: Float[Any, ""]
    min_p: Float[Any, ""]
    repetition_penalty: Float[Any, ""]
    top_p_rest: Float[Any, ""] = np.float32(0)
    """What float32 rounds off ``top_p``."""


class DecodeState(NamedTuple):
    """The decode state of a text."""

    logits_BV: Array
    """Logits of the next token."""
    cache: Cache
    seen_BV: Array
    """Whether the text has a token, for the repetition penalty."""

    @property
    def position(self) -> int:
        """Number of tokens of the text, equal in all rows."""
        return int(np.asarray(self.cache.position_B)[0])


class Generation(Iterator[Int[np.ndarray, "B N"]]):
    """An iterator over samples, which yields the next few tokens of every row at a time.

    Rows that have ended are filled with end-of-text. The iterator ends when all rows have ended.
    """

    def __init__(self, start: Callable[[], tuple[DecodeState, Array]], decode: Callable[..., tuple],
                 max_new_tokens: int):
        self._start, self._decode, self._left = start, decode, max_new_tokens
        self._carry: tuple[DecodeState, Array] | None = None

    def __next__(self) -> Int[np.ndarray, "B N"]:
        if self._left <= 0:
            raise StopIteration
        count = min(self._left, TOKENS_PER_CALL)
        done, tokens_BT, *carry = self._decode(*(self._carry or self._start()), count)
        self._carry = carry[0], carry[1]
        self._left = 0 if np.asarray(carry[1]).all() else self._left - count
        return np.asarray(tokens_BT)[:, :int(done)]

    @property
    def state(self) -> DecodeState:
        """If ``resumable``: the decode state after the prompt and the tokens yielded so far, including end-of-text.

        Valid until the next tokens are requested.
        """
        if self._carry is None:
            self._carry = self._start()
        return self._carry[0]


class Sampler:
    """Samples tokens from a model, on the first device, or on those of a mesh.

    Reading prompts is compiled once, decoding once for each number of samples. The size of a ``growing`` cache
    (softmax) is rounded up; each size is compiled once.

    Args:
        model: the model; later changes take effect only with :meth:`update`.
        end_of_text: the token that ends a sample, if any.
        excluded: a token that is never sampled, if any.
        mesh: the mesh that the model's arrays are sharded over. Set it (``jax.set_mesh``) for all calls.

    Raises:
        NotImplementedError: an attention mode of the model has no cached decode.
    """

    def __init__(self, model: GPT, *, end_of_text: int | None = None, excluded: int | None = None,
                 mesh: Mesh | None = None):
        jax.eval_shape(lambda: model.init_cache(1, 1))
        self.end_of_text = end_of_text
        self.max_length = model.max_length
        """Maximum number of tokens, including the prompt; None: no limit."""
        # All inputs of the compiled functions are committed: uncommitted arrays would cause a second compilation for
        # their outputs.
        self._is_sharded = mesh is not None
        self._device = jax.local_devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._graph, arrays = to_product_weights(model)
        structure = jax.tree.structure(arrays)
        self.update(model)
        self._prefill_sizes = sorted({min(size, model.config.context) for size in PREFILL_TOKENS})
        graph, end = self._graph, -1 if end_of_text is None else end_of_text

        def prefill(leaves: list[Array], tokens_T: Array, state: DecodeState, length: Array) -> DecodeState:
            model, head = from_product_weights(graph, structure.unflatten(leaves))

            def read(tokens_1T: Array) -> DecodeState:
                x_1TE, cache = model.forward(tokens_1T, state.cache, lengths_B=length[None])
                logits_1V = head.logits(jax.lax.dynamic_slice_in_dim(x_1TE, length - 1, 1, axis=1))[:, 0]
                counts_1T = jnp.arange(tokens_1T.shape[1])[None, :] < length
                return DecodeState(logits_1V, cache,
                              _mark(state.seen_BV, jnp.where(counts_1T, tokens_1T, model.vocab_size)))

            *shorter, _ = self._prefill_sizes
            return jax.lax.switch(sum(length > size for size in shorter),
                                  [lambda size=size: read(tokens_T[None, :size]) for size in self._prefill_sizes])

        def decode(leaves: list[Array], state: DecodeState, ended_B: Array, keys_B2: Array, settings: Settings,
                   count: Array, resumable: bool) -> tuple[Array, Array, DecodeState, Array]:
            next_logits = token_step(*from_product_weights(graph, structure.unflatten(leaves)))

            def unfinished(carry: Any) -> Array:
                done, _, _, ended_B = carry
                return (done < count) & ~jnp.all(ended_B)

            def step(carry: Any) -> Any:
                done, tokens_BT, state, ended_B = carry
                keys_at_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys_B2), state.cache.position_B)
                logits_BV = state.logits_BV
                if excluded is not None:
                    logits_BV = logits_BV.at[:, excluded].set(-jnp.inf)
                token_B = jnp.where(ended_B, end, sample_token(logits_BV, state.seen_BV, keys_at_B, settings))
                logits_BV, cache = next_logits(token_B[:, None], state.cache)
                state = DecodeState(logits_BV, cache, _mark(state.seen_BV, token_B[:, None]))
                return done + 1, tokens_BT.at[:, done].set(token_B), state, ended_B | (token_B == end)

            def step_on(_: Array, carry: Any) -> Any:
                return (carry[0] + unfinished(carry), *step(carry)[1:])

            start = (jnp.int32(0), jnp.full((len(ended_B), TOKENS_PER_CALL), end, jnp.int32), state, ended_B)
            if resumable or device.platform() == "cpu":
                return jax.lax.while_loop(unfinished, step, start)
            # A condition would synchronise host and device at every token. Instead, decode past the end, and ignore it.
            return jax.lax.fori_loop(0, TOKENS_PER_CALL, step_on, start)

        self._prefill = jax.jit(prefill, donate_argnames="state")
        self._decode = jax.jit(decode, donate_argnames=("state", "ended_B"), static_argnames="resumable")
        self._fit = jax.jit(_fit, static_argnames=("shape", "dtype"))

    def update(self, model: GPT) -> None:
        """Use other parameters of the same model, without another compilation.

        Arrays on the device are not copied and must stay valid.

        Raises:
            ValueError: it is another model.
        """
        graph, arrays = to_product_weights(model)
        if graph != self._graph:
            raise ValueError("expected the same model with other parameters")
        self._model = model
        # A list, since Flax traverses a state in Python at every call.
        leaves = jax.tree.leaves(arrays)
        self._leaves = leaves if self._is_sharded else jax.device_put(leaves, self._device)

    @property
    def model(self) -> GPT:
        """The model."""
        return self._model

    def warm_up(self, prompt_length: int, max_new_tokens: int, *, samples: int = 1, resumable: bool = False) -> None:
        """Compile :meth:`generate` for a prompt length, without sampling.

        The prompt length includes the tokens of a ``state``.
        """
        tokens = prompt_length + max_new_tokens
        state = self._encode(np.zeros(1, np.int32), tokens, None)
        if max_new_tokens:
            carry = self.start(state if samples == 1 else self._rows(state, samples, self._room(tokens)))
            _, _, state, _ = self.decoder(Sampling(), samples, resumable=resumable)(*carry, 0)
        jax.block_until_ready(state)

    def length(self, prompt_T: Int[np.ndarray, " T"], state: DecodeState | None = None) -> int:
        """Number of tokens of a prompt, including those of ``state``.

        Raises:
            ConfigError: there are none, more than the learned positions, or the prompt has an id beyond the vocabulary.
        """
        T, before, V = len(prompt_T), 0 if state is None else state.position, self._model.vocab_size
        if not T + before:
            raise ConfigError("the prompt is empty; start from the end-of-text token")
        if T and (prompt_T.min() < 0 or prompt_T.max() >= V):
            raise ConfigError(f"the prompt has token ids from {prompt_T.min()} to {prompt_T.max()}; expected 0 to "
                              f"{V - 1}")
        if self.max_length is not None and self.max_length < before + T:
            after = f" after {before:,} others" if before else ""
            raise ConfigError(f"the prompt has {T:,} tokens{after}; expected at most {self.max_length:,}, the model's "
                              "number of positions")
        return before + T

    def encode(self, prompt_T: Int[np.ndarray, " T"], state: DecodeState | None = None, *,
               reserve: int = 0) -> DecodeState:
        """Read a prompt and return its decode state, with one row.

        Args:
            prompt_T: token ids.
            state: decode state of the text before the prompt, with one row, if any. It stays valid.
            reserve: number of tokens to be sampled after it, to size a ``growing`` cache.

        Raises:
            ConfigError: as :meth:`length`.
        """
        return self._encode(prompt_T, self.length(prompt_T, state) + reserve, state)

    def generate(self, prompt_T: Int[np.ndarray, " T"], sampling: Sampling, *, max_new_tokens: int, samples: int = 1,
                 state: DecodeState | None = None, resumable: bool = False, past_last: bool = False) -> Generation:
        """Sample up to ``max_new_tokens`` tokens after a prompt, limited by the model's positions.

        Sample i depends only on the text, ``sampling`` and i, up to rounding not on the number of samples.

        Args:
            prompt_T: token ids; at least one, or a ``state``.
            sampling: sampling options.
            max_new_tokens: maximum number of tokens of each sample.
            samples: B.
            state: decode state of the text before the prompt, with one row. It stays valid.
            resumable: whether the result needs its ``state``.
            past_last: whether samples may have the token after the model's last position too, from which nothing can be
                sampled.

        Returns:
            An iterator over the next tokens of all samples, computed on demand; the first call reads the prompt.

        Raises:
            ConfigError: a value of ``sampling`` is out of range; or as :meth:`length`.
        """
        sampling.check()
        length = self.length(prompt_T, state)
        if self.max_length is not None:
            max_new_tokens = min(max_new_tokens, self.max_length - length + past_last)
        tokens = length + max_new_tokens

        def start() -> tuple[DecodeState, Array]:
            read = self._encode(prompt_T, tokens, state)
            return self.start(read if samples == 1 else self._rows(read, samples, self._room(tokens)))

        return Generation(start, self.decoder(sampling, samples, resumable=resumable), max_new_tokens)

    def generate_each(self, prompts: Sequence[np.ndarray], sampling: Sampling, *, max_new_tokens: int,
                      room: int) -> Generation:
        """Sample one continuation of each prompt, of up to ``max_new_tokens`` tokens.

        Args:
            prompts: token ids of each row, of any lengths (T,).
            sampling: sampling options.
            max_new_tokens: maximum number of tokens of each continuation.
            room: number of tokens for which a ``growing`` cache has room, at least those of a row.

        Raises:
            ConfigError: as :meth:`generate`.
        """
        sampling.check()
        for prompt_T in prompts:
            self.length(prompt_T)

        def start() -> tuple[DecodeState, Array]:
            rows = [self._encode(prompt_T, room, None) for prompt_T in prompts]
            return self.start(jax.tree.map(lambda *x: jnp.concatenate(x), *rows))

        return Generation(start, self.decoder(sampling, len(prompts)), max_new_tokens)

    def decoder(self, sampling: Sampling, samples: int = 1, *, resumable: bool = False) -> Callable[..., tuple]:
        """The function ``decode(state, ended_B, count)``, which samples the next tokens asynchronously.

        It returns the number of tokens, at most ``count`` and ``TOKENS_PER_CALL``, the tokens (B, T), the state after
        them and which rows have ended. It donates ``state`` and ``ended_B``, initially from :meth:`start`. Except on a
        CPU, it samples ``TOKENS_PER_CALL`` tokens, whatever the count.
        """
        keys_B2, settings = jax.device_put(_arrays(sampling, samples), self._device)

        def decode(state: DecodeState, ended_B: Array, count: int) -> tuple:
            return self._decode(self._leaves, state, ended_B, keys_B2, settings, np.int32(count), resumable)

        return decode

    def start(self, state: DecodeState) -> tuple[DecodeState, Array]:
        """The initial arguments of decoding, on the device: a state, and that no row has ended."""
        return jax.device_put((state, jnp.zeros(len(state.seen_BV), bool)), self._device)

    def _encode(self, prompt_T: np.ndarray, tokens: int, state: DecodeState | None) -> DecodeState:
        """The state of a prompt, with a cache for ``tokens`` tokens."""
        room = self._room(tokens)
        state = self._rows(self._blank(1, 1) if state is None else state, 1, room)
        return self._read(prompt_T, state)

    def _read(self, prompt_T: np.ndarray, state: DecodeState) -> DecodeState:
        """Reads the prompt in large chunks and the rest in small ones."""
        short, long = self._prefill_sizes[0], self._prefill_sizes[-1]
        at = 0
        while at < len(prompt_T):
            left = len(prompt_T) - at
            length = long if left >= long else min(left, short)
            tokens_T = np.pad(prompt_T[at:at + length], (0, long - length)).astype(np.int32)
            state = self._prefill(self._leaves, tokens_T, state, np.int32(length))
            at += length
        return state

    def _blank(self, samples: int, room: int) -> DecodeState:
        """The state before the first token."""
        V = self._model.vocab_size
        cache = self._model.init_cache(samples, room)
        return DecodeState(jnp.zeros((samples, V)), cache, jnp.zeros((samples, V), bool))

    def _rows(self, state: DecodeState, samples: int, room: int) -> DecodeState:
        """Copies of one row's state, with a cache for ``room`` tokens."""
        wanted = jax.eval_shape(lambda: self._blank(samples, room))
        return jax.tree.map(lambda x, like: self._fit(jax.device_put(x, self._device), like.shape, like.dtype),
                            state, wanted)

    def _room(self, tokens: int) -> int:
        """Size of a growing cache, in tokens."""
        if self.max_length is not None:
            return self.max_length
        return max(LEAST_ROOM, 1 << (tokens - 1).bit_length())


def _mark(seen_BV: Array, tokens_BT: Array) -> Array:
    """``seen_BV`` with these tokens; ids beyond the vocabulary are ignored."""
    return seen_BV.at[jnp.arange(len(seen_BV))[:, None], tokens_BT].set(True, mode="drop")


def _fit(x: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A copy of an array of one row with another shape: repeated, padded with zeros, or cropped."""
    x = x[(slice(None), *map(slice, shape[1:]))]
    x = jnp.pad(x, [(0, 0), *((0, wanted - have) for wanted, have in zip(shape[1:], x.shape[1:], strict=True))])
    return jnp.array(jnp.broadcast_to(x, shape), dtype)


def sample_token(logits_BV: Float[Array, "B V"], seen_BV: Bool[Array, "B V"], keys_B: Array,
         settings: Settings) -> Int[Array, " B"]:
    """Samples one token of each row, as described in :class:`Sampling`, row b with the random key ``keys_B[b]``.

    The repetition penalty applies to the tokens ``seen_BV``. The argmax of logits / temperature + Gumbel noise is a
    sample of their softmax (Gumbel, "Statistical Theory of Extreme Values", 1954); without noise it is greedy.
    """
    temperature, top_k, top_p, min_p, penalty, top_p_rest = settings
    filters = (top_k > 0) | (top_p < 1) | (top_p_rest < 0)
    logits_BV = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)

    def filtered() -> Array:
        # Subtract the largest logit: a tiny temperature would make all of them infinite otherwise.
        divisor = jnp.maximum(temperature, 1e-30)
        scaled_BV = (logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)) / divisor
        allowed_BV = jax.lax.cond(filters, lambda: likeliest(logits_BV, top_k, top_p, top_p_rest, divisor),
                               lambda: jnp.ones(scaled_BV.shape, bool))
        allowed_BV &= scaled_BV >= jnp.log(min_p)  # the largest is 0
        return jnp.where(allowed_BV, logits_BV, -jnp.inf)

    def noise() -> Array:
        return jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype))(keys_B)

    # A condition on the device: other settings need no compilation, and only top_k and top_p need a sort.
    logits_BV = jax.lax.cond(filters | (min_p > 0), filtered, lambda: logits_BV)
    noise_BV = cpu.zeros_unless(temperature > 0, noise) if cpu.applies(cpu.zeros_unless) else noise()
    # Both terms are finite for every temperature from 0 on.
    warm_BV = logits_BV / jnp.clip(temperature, 1, 1e30) + noise_BV * jnp.minimum(temperature, 1)
    return jnp.argmax(warm_BV, axis=1).astype(jnp.int32)


def likeliest(logits_BV: Float32[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""],
              top_p_rest: Float[Any, ""] | float = 0.0,
              temperature: Float[Any, ""] | float = 1.0) -> Bool[Array, "B V"]:
    """The tokens that remain after ``top_k`` and then ``top_p``, at least one; ties are resolved to lower ids."""
    V = logits_BV.shape[1]
    if cpu.applies(cpu.sort_descending):
        sorted_BV = cpu.sort_descending(logits_BV)
    else:
        sorted_BV = -jax.lax.sort(-logits_BV, dimension=1, is_stable=False)
    most = jnp.where(top_k > 0, jnp.minimum(top_k, V), V).astype(jnp.int32)

    def nucleus() -> Array:
        # The rarest tokens that remain may have less probability than float32's rounding of the sum.
        with jax.enable_x64(True):
            sorted, p, rest, divisor = (jax.lax.convert_element_type(x, jnp.float64)
                                                  for x in (sorted_BV, top_p, top_p_rest, temperature))
            weights_BV = jnp.exp((sorted - sorted[:, :1]) / divisor) * (jnp.arange(V) < most)[None]
            sums_BV = jnp.cumsum(weights_BV, axis=1)
            allowed_BV = sums_BV - weights_BV < (p + rest) * sums_BV[:, -1:]
            return jnp.clip(allowed_BV.sum(axis=1, keepdims=True, dtype=jnp.int32), 1, most)

    count_B1 = jax.lax.cond((top_p < 1) | (top_p_rest < 0), nucleus, lambda: jnp.full((len(logits_BV), 1), most))
    least_B1 = jnp.take_along_axis(sorted_BV, count_B1 - 1, axis=1)
    above_BV, equal_BV = logits_BV > least_B1, logits_BV == least_B1
    return above_BV | (equal_BV & (jnp.cumsum(equal_BV, axis=1) <= count_B1 - above_BV.sum(axis=1, keepdims=True)))


def _arrays(sampling: Sampling, samples: int) -> tuple[Array, Settings]:
    """The random key data of each sample, which JAX passes faster than keys, and the settings."""
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(sampling.seed), jnp.arange(samples))
    top_p = np.float32(sampling.top_p)
    return jax.random.key_data(keys_B), Settings(
        np.float32(sampling.temperature), np.int32(sampling.top_k), top_p, np.float32(sampling.min_p),
        np.float32(sampling.repetition_penalty), np.float32(sampling.top_p - float(top_p)))
