"""Sampling from a GPT: the prompt in parallel form, then token by token from what decoding keeps."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from kernels import cpu, device
from models.block import linears
from models.gpt import GPT, Cache
from support.errors import ConfigError

PREFILL_TOKENS = (256, 1024)
"""Tokens of the prompt read at once, as far as they are no more than the model's context: many of a long prompt, which
is faster, few of a short one. Both are compiled together, so that a prompt of another length compiles nothing."""
TOKENS_PER_CALL = 32
"""Tokens decoded on the device before the host sees them: few enough to stream, enough to hide the call."""
LEAST_ROOM = 1024
"""Tokens a growing cache has room for at least; beyond, powers of two, so that few shapes are ever compiled."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    The repetition penalty comes first (Keskar et al., "CTRL", 2019, in its common form, where a negative logit is
    multiplied), then temperature, then the filters one after the other: the ``top_k`` likeliest tokens; of these
    renormalised the fewest likeliest that together have probability ``top_p`` (Holtzman et al., "The Curious Case of
    Neural Text Degeneration", 2020); of these the ones at least ``min_p`` times as likely as the likeliest (Nguyen et
    al., "Turning Up the Heat: Min-p Sampling", 2024).
    """

    temperature: float = 0.8
    """Logits are divided by it; 0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens that together have this probability; 1: among all."""
    min_p: float = 0.0
    """Draw among the tokens at least this many times as likely as the likeliest; 0: among all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the generated text has are divided by it (multiplied where negative); 1:
    none."""
    seed: int = 0
    """Seed of the draws, from 0 to 2^32 - 1: the same seed gives the same samples."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for a value out of its range, and for filters of a greedy choice."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature is {self.temperature}; expected a number of at least 0")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"--top-k is {self.top_k}; expected a number of tokens, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; expected a probability above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"--min-p is {self.min_p}; expected a number from 0 to 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ConfigError(f"--repetition-penalty is {self.repetition_penalty}; expected a number from 0.001 to "
                              "1000, 1 for none")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed is {self.seed}; expected a number from 0 to 2^32 - 1")
        for name, value, without in (("top-k", self.top_k, 0), ("top-p", self.top_p, 1), ("min-p", self.min_p, 0)):
            if self.temperature == 0 and value != without:
                raise ConfigError(f"--temperature 0 takes the likeliest token, whatever --{name} is; expected one of "
                                  "them")


class Settings(NamedTuple):
    """:class:`Sampling` as the compiled functions take it, but for the seed."""

    temperature: Float[Any, ""]
    top_k: Int[Any, ""]
    top_p: Float[Any, ""]
    min_p: Float[Any, ""]
    repetition_penalty: Float[Any, ""]


class Memory(NamedTuple):
    """All that the tokens after a text depend on: what decoding keeps of it."""

    logits_BV: Array
    """Of the next token, as the model gives them."""
    cache: Cache
    seen_BV: Array
    """Whether the text has a token: what the repetition penalty has to know."""

    @property
    def position(self) -> int:
        """Tokens of the text; they are as many in every row."""
        return int(np.asarray(self.cache.position_B)[0])


class Generation(Iterator[Int[np.ndarray, "B N"]]):
    """Samples while they are drawn: an iterator that yields the next few tokens of every row at a time.

    A row that has ended holds end-of-text from there on; when all have, it is exhausted.
    """

    def __init__(self, start: Callable[[], tuple[Memory, Array]], decode: Callable[..., tuple], max_new_tokens: int):
        self._start, self._decode, self._left = start, decode, max_new_tokens
        self._carry: tuple[Memory, Array] | None = None

    def __next__(self) -> Int[np.ndarray, "B N"]:
        if self._left <= 0:
            raise StopIteration
        count = min(self._left, TOKENS_PER_CALL)
        done, tokens_BT, *carry = self._decode(*(self._carry or self._start()), count)
        self._carry = carry[0], carry[1]
        self._left = 0 if np.asarray(carry[1]).all() else self._left - count
        return np.asarray(tokens_BT)[:, :int(done)]

    @property
    def memory(self) -> Memory:
        """Of a ``resumable`` one: what is kept of the prompt and the tokens given out so far, end-of-text with them.

        Good until the next tokens are asked for.
        """
        if self._carry is None:
            self._carry = self._start()
        return self._carry[0]


class Sampler:
    """Draws tokens from a model. Decoding is compiled once for a number of samples, reading a prompt once.

    All of it happens on the first device. A ``growing`` cache (softmax) has its room for tokens rounded up; each such
    room is compiled once.

    Args:
        model: the model; later changes of it are not seen until :meth:`update`.
        end_of_text: the token that ends a sample; None: nothing ends one.

    Raises:
        NotImplementedError: an attention mode of the model has no cached decode; the message names it.
    """

    def __init__(self, model: GPT, *, end_of_text: int | None = None):
        jax.eval_shape(lambda: model.init_cache(1, 1))
        self.end_of_text = end_of_text
        self.max_length = model.max_length
        """Tokens, prompt included, that the model has positions for; None: no bound."""
        # All that the compiled functions take is put on one device: what merely happens to be there, as a new array
        # does, has them compiled a second time for their own outputs.
        self._device = jax.local_devices()[0]
        self._graph, state = nnx.split(with_product_weights(model))
        structure = jax.tree.structure(state)
        self.update(model)
        self._prefill_sizes = sorted({min(size, model.config.context) for size in PREFILL_TOKENS})
        graph, end = self._graph, -1 if end_of_text is None else end_of_text

        def prefill(leaves: list[Array], tokens_T: Array, memory: Memory, length: Array) -> Memory:
            model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))

            def read(tokens_1T: Array) -> Memory:
                x_1TE, cache = model.forward(tokens_1T, memory.cache, lengths_B=length[None])
                logits_1V = model.logits(jax.lax.dynamic_slice_in_dim(x_1TE, length - 1, 1, axis=1))[:, 0]
                counts_1T = jnp.arange(tokens_1T.shape[1])[None, :] < length
                return Memory(logits_1V, cache,
                              _mark(memory.seen_BV, jnp.where(counts_1T, tokens_1T, model.vocab_size)))

            *shorter, _ = self._prefill_sizes
            return jax.lax.switch(sum(length > size for size in shorter),
                                  [lambda size=size: read(tokens_T[None, :size]) for size in self._prefill_sizes])

        def decode(leaves: list[Array], memory: Memory, ended_B: Array, keys_B2: Array, settings: Settings,
                   count: Array, resumable: bool) -> tuple[Array, Array, Memory, Array]:
            model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))

            def unfinished(carry: Any) -> Array:
                done, _, _, ended_B = carry
                return (done < count) & ~jnp.all(ended_B)

            def step(carry: Any) -> Any:
                done, tokens_BT, memory, ended_B = carry
                keys_at_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys_B2), memory.cache.position_B)
                token_B = jnp.where(ended_B, end, draw(memory.logits_BV, memory.seen_BV, keys_at_B, settings))
                x_BTE, cache = model.forward(token_B[:, None], memory.cache)
                memory = Memory(model.logits(x_BTE)[:, 0], cache, _mark(memory.seen_BV, token_B[:, None]))
                return done + 1, tokens_BT.at[:, done].set(token_B), memory, ended_B | (token_B == end)

            def step_on(_: Array, carry: Any) -> Any:
                return (carry[0] + unfinished(carry), *step(carry)[1:])

            start = (jnp.int32(0), jnp.full((len(ended_B), TOKENS_PER_CALL), end, jnp.int32), memory, ended_B)
            if resumable or device.platform() == "cpu":
                return jax.lax.while_loop(unfinished, step, start)
            # Elsewhere the host would ask at every token whether to go on, and the device wait for it. Here it goes on
            # past the end, which is never read.
            return jax.lax.fori_loop(0, TOKENS_PER_CALL, step_on, start)

        self._prefill = jax.jit(prefill, donate_argnames="memory")
        self._decode = jax.jit(decode, donate_argnames=("memory", "ended_B"), static_argnames="resumable")
        self._fit = jax.jit(_fit, static_argnames=("shape", "dtype"))

    def update(self, model: GPT) -> None:
        """Sample from other parameters of the same model from now on; nothing is compiled again.

        Arrays that are on the device already are not copied: they have to last while they are sampled from.

        Raises:
            ValueError: it is another model.
        """
        graph, state = nnx.split(with_product_weights(model))
        if graph != self._graph:
            raise ValueError("another model: a Sampler can only change the parameters of its own")
        self._model = model
        # As a list: Flax would go through its state in Python at every call.
        self._leaves = jax.device_put(jax.tree.leaves(state), self._device)

    @property
    def model(self) -> GPT:
        """The model that is sampled from, as it was given."""
        return self._model

    def warm_up(self, prompt_length: int, max_new_tokens: int, *, samples: int = 1, resumable: bool = False) -> None:
        """Compile what :meth:`generate` runs for a prompt of this many tokens, without drawing any.

        The tokens of a ``memory`` count as the prompt's.
        """
        room = self._room(prompt_length + max_new_tokens)
        memory = self._read(np.zeros(0, np.int32), jax.device_put(self._blank(1, room), self._device))
        if max_new_tokens:
            carry = self.start(self._rows(memory, samples, room))
            _, _, memory, _ = self.decoder(Sampling(), samples, resumable=resumable)(*carry, 0)
        jax.block_until_ready(memory)

    def length(self, prompt_T: Int[np.ndarray, " T"], memory: Memory | None = None) -> int:
        """Tokens of a prompt and of what stands before it.

        Raises:
            ConfigError: there are none, more than the learned positions, or the prompt has an id beyond the vocabulary.
        """
        T, before, V = len(prompt_T), 0 if memory is None else memory.position, self._model.vocab_size
        if not T + before:
            raise ConfigError("the prompt has no tokens; start from the end-of-text token")
        if T and (prompt_T.min() < 0 or prompt_T.max() >= V):
            raise ConfigError(f"the prompt has token ids from {prompt_T.min()} to {prompt_T.max()}; the model knows "
                              f"0 to {V - 1}")
        if self.max_length is not None and self.max_length < before + T:
            after = f" after {before:,} others" if before else ""
            raise ConfigError(f"the prompt has {T:,} tokens{after}, and the model has positions for "
                              f"{self.max_length:,}; shorten the prompt")
        return before + T

    def encode(self, prompt_T: Int[np.ndarray, " T"], memory: Memory | None = None, *, reserve: int = 0) -> Memory:
        """Read a prompt: what decoding keeps of it, one row.

        Args:
            prompt_T: token ids.
            memory: of the text that the prompt goes on from, one row; None: it is the beginning. It stays good.
            reserve: how many tokens are to be drawn after it, for a ``growing`` cache to have the room.

        Raises:
            ConfigError: as :meth:`length`.
        """
        return self._encode(prompt_T, self.length(prompt_T, memory) + reserve, memory)

    def generate(self, prompt_T: Int[np.ndarray, " T"], sampling: Sampling, *, max_new_tokens: int, samples: int = 1,
                 memory: Memory | None = None, resumable: bool = False) -> Generation:
        """Draw up to ``max_new_tokens`` tokens after a prompt, or as many as the model has positions for.

        Sample i depends on the text before, ``sampling`` and i, and but for rounding not on how many are drawn beside
        it.

        Args:
            prompt_T: token ids; at least one, or a ``memory``.
            sampling: how tokens are drawn.
            max_new_tokens: bound on the tokens of each sample.
            samples: B.
            memory: of the text that the prompt goes on from, one row. It stays good.
            resumable: whether the ``memory`` of what is returned is wanted.

        Returns:
            An iterator that yields the next tokens of every sample, drawn as they are asked for; the first call reads
            the prompt.

        Raises:
            ConfigError: a value of ``sampling`` is out of its range; or as :meth:`length`.
        """
        sampling.check()
        length = self.length(prompt_T, memory)
        if self.max_length is not None:
            max_new_tokens = min(max_new_tokens, self.max_length - length)
        tokens = length + max_new_tokens

        def start() -> tuple[Memory, Array]:
            read = self._encode(prompt_T, tokens, memory)
            return self.start(read if samples == 1 else self._rows(read, samples, self._room(tokens)))

        return Generation(start, self.decoder(sampling, samples, resumable=resumable), max_new_tokens)

    def decoder(self, sampling: Sampling, samples: int = 1, *, resumable: bool = False) -> Callable[..., tuple]:
        """What draws the next tokens: ``decode(memory, ended_B, count)``, which does not wait for the device.

        It returns how many tokens it drew, at most ``count`` and ``TOKENS_PER_CALL``, the tokens (B, T), the memory
        after them and which rows have ended. It takes ``memory`` and ``ended_B``, as :meth:`start` gives them first,
        for itself. Where nothing ends early but on a CPU, it draws ``TOKENS_PER_CALL``, whatever the count.
        """
        keys_B2, settings = jax.device_put(_arrays(sampling, samples), self._device)

        def decode(memory: Memory, ended_B: Array, count: int) -> tuple:
            return self._decode(self._leaves, memory, ended_B, keys_B2, settings, np.int32(count), resumable)

        return decode

    def start(self, memory: Memory) -> tuple[Memory, Array]:
        """What decoding starts with, on the device: a memory, and that no row has ended."""
        return jax.device_put((memory, jnp.zeros(len(memory.seen_BV), bool)), self._device)

    def _encode(self, prompt_T: np.ndarray, tokens: int, memory: Memory | None) -> Memory:
        """A new memory with room for ``tokens``."""
        room = self._room(tokens)
        memory = self._rows(self._blank(1, 1) if memory is None else memory, 1, room)
        return self._read(prompt_T, memory) if len(prompt_T) else memory

    def _read(self, prompt_T: np.ndarray, memory: Memory) -> Memory:
        """The prompt in long chunks, and what is left in short ones; without any tokens one of padding."""
        short, long = self._prefill_sizes[0], self._prefill_sizes[-1]
        at = 0
        while at < max(1, len(prompt_T)):
            left = len(prompt_T) - at
            length = long if left >= long else min(left, short)
            tokens_T = np.pad(prompt_T[at:at + length], (0, long - length)).astype(np.int32)
            memory = self._prefill(self._leaves, tokens_T, memory, np.int32(length))
            at += length or 1
        return memory

    def _blank(self, samples: int, room: int) -> Memory:
        """Before the first token."""
        V = self._model.vocab_size
        cache = self._model.init_cache(samples, room)
        return Memory(jnp.zeros((samples, V)), cache, jnp.zeros((samples, V), bool))

    def _rows(self, memory: Memory, samples: int, room: int) -> Memory:
        """A copy of a row's memory, so many times, with room for so many tokens."""
        wanted = jax.eval_shape(lambda: self._blank(samples, room))
        return jax.tree.map(lambda x, like: self._fit(jax.device_put(x, self._device), like.shape, like.dtype),
                            memory, wanted)

    def _room(self, tokens: int) -> int:
        """Tokens a growing cache is made for."""
        if self.max_length is not None:
            return self.max_length
        return max(LEAST_ROOM, 1 << (tokens - 1).bit_length())


def with_product_weights(model: GPT) -> GPT:
    """What is sampled from: the same model, its projections' weights and the head's in the number format that they are
    multiplied in, half the bytes to read, and on a GPU transposed, as the kernels for one token read them."""
    model = nnx.clone(model)  # merging what was split would share its variables
    dtype = jnp.dtype(model.config.dtype)
    for linear in linears(model):
        w = linear.kernel[...] if linear.exact else linear.kernel[...].astype(dtype)
        if device.platform() == "gpu":
            w, linear.transposed = w.T, True
        linear.kernel.set_value(w)  # [...] = would keep the format
    if dtype != model.token_embedding.embedding.dtype:
        model.head_weight = nnx.data(nnx.Variable(model.token_embedding.embedding[...].astype(dtype)))
    return model


def _mark(seen_BV: Array, tokens_BT: Array) -> Array:
    """``seen_BV`` with these tokens; ids beyond the vocabulary are none."""
    return seen_BV.at[jnp.arange(len(seen_BV))[:, None], tokens_BT].set(True, mode="drop")


def _fit(x: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A copy of an array of one row, with other rows and room: filled up with zeros, or cut."""
    x = x[(slice(None), *map(slice, shape[1:]))]
    x = jnp.pad(x, [(0, 0), *((0, wanted - have) for wanted, have in zip(shape[1:], x.shape[1:], strict=True))])
    return jnp.array(jnp.broadcast_to(x, shape), dtype)


def draw(logits_BV: Float[Array, "B V"], seen_BV: Bool[Array, "B V"], keys_B: Array,
         settings: Settings) -> Int[Array, " B"]:
    """One token of each row, drawn as :class:`Sampling` says, row b with the random key ``keys_B[b]``.

    The repetition penalty is on the tokens ``seen_BV``. The largest of logits / temperature + Gumbel noise is a draw
    from their softmax (Gumbel, "Statistical Theory of Extreme Values", 1954); without noise it is the likeliest.
    """
    temperature, top_k, top_p, min_p, penalty = settings
    logits_BV = jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)

    def filtered() -> Array:
        # The largest logit goes first: a tiny temperature would make all of them infinite otherwise.
        scaled_BV = (logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)) / jnp.maximum(temperature, 1e-30)
        kept_BV = jax.lax.cond((top_k > 0) | (top_p < 1), lambda: likeliest(scaled_BV, top_k, top_p),
                               lambda: jnp.ones(scaled_BV.shape, bool))
        kept_BV &= scaled_BV >= jnp.log(min_p)  # the likeliest is at 0
        return jnp.where(kept_BV, logits_BV, -jnp.inf)

    def noise() -> Array:
        return jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype))(keys_B)

    # A condition on the device: other settings compile nothing, and only top_k and top_p pay for a sort.
    logits_BV = jax.lax.cond((top_k > 0) | (top_p < 1) | (min_p > 0), filtered, lambda: logits_BV)
    noise_BV = cpu.zeros_unless(temperature > 0, noise) if cpu.applies(cpu.zeros_unless) else noise()
    # Whatever the temperature, from 0 on, neither term leaves its range.
    warm_BV = logits_BV / jnp.clip(temperature, 1, 1e30) + noise_BV * jnp.minimum(temperature, 1)
    return jnp.argmax(warm_BV, axis=1).astype(jnp.int32)


def likeliest(logits_BV: Float32[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]) -> Bool[Array, "B V"]:
    """Which tokens ``top_k`` and then ``top_p`` keep; of equally likely ones the lower ids, and always one at least."""
    if cpu.applies(cpu.sort_descending):
        sorted_BV = cpu.sort_descending(logits_BV)
    else:
        sorted_BV = -jax.lax.sort(-logits_BV, dimension=1, is_stable=False)
    kept_BV = (jnp.arange(logits_BV.shape[1]) < jnp.where(top_k > 0, top_k, logits_BV.shape[1]))[None, :]
    p_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, -jnp.inf), axis=1)
    likelier_BV = jnp.cumsum(p_BV, axis=1) - p_BV
    kept_BV &= (likelier_BV < top_p) | (top_p >= 1)  # rounded sums reach 1 before the last token
    count_B1 = kept_BV.sum(axis=1, keepdims=True)
    least_B1 = jnp.take_along_axis(sorted_BV, count_B1 - 1, axis=1)
    above_BV, equal_BV = logits_BV > least_B1, logits_BV == least_B1
    return above_BV | (equal_BV & (jnp.cumsum(equal_BV, axis=1) <= count_B1 - above_BV.sum(axis=1, keepdims=True)))


def _arrays(sampling: Sampling, samples: int) -> tuple[Array, Settings]:
    """The random key of each sample, as numbers, which JAX passes faster, and the settings."""
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(sampling.seed), jnp.arange(samples))
    return jax.random.key_data(keys_B), Settings(
        np.float32(sampling.temperature), np.int32(sampling.top_k), np.float32(sampling.top_p),
        np.float32(sampling.min_p), np.float32(sampling.repetition_penalty))
