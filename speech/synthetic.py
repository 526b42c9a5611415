"""Generated utterances: letters are tones of different pitch, which fade, with noise, and of varying length.

Nothing is read and no frames are stored: an utterance is generated from the seed, its split and its number whenever it
is asked for.
"""

import string
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from data.utterances import BINS, Dataset, Split, checksum, padded
from support.errors import ConfigError

SYMBOLS = tuple(string.ascii_lowercase[:20])
UTTERANCES = {"train": 10_000, "val": 200, "test": 200}
"""Default number of utterances."""
LENGTHS = (6, 24)
"""Fewest and most frames of a letter."""
PAUSES = (2, 10)
"""Fewest and most frames of a pause, which follows every letter with ``PAUSE_SHARE``, and separates equal letters."""
PAUSE_SHARE = 0.3
NOISE = 0.5
"""Standard deviation of the noise."""
AMPLITUDES = (4.0, 5.0)
"""Least and largest amplitude of the first frame of a tone."""
FADED = 0.3
"""Amplitude that a tone falls to, relative to that of its first frame."""
FADING = 1.0
"""Frames in which the difference falls by the factor e."""
WIDTH = 1.2
"""Standard deviation of a tone over mel bins. Neighbouring letters are 1.8 bins apart."""
SHIFT = 0.3
"""Largest shift of all tones of an utterance, in bins."""
LEAST_CONTEXT = 2 * (LENGTHS[0] + 2 * PAUSES[1])
"""With it, every utterance has a letter."""
_VERSION = 1


class _Parts(NamedTuple):
    """Letters and pauses of an utterance, one after the other."""

    symbols_P: Int[np.ndarray, " P"]
    """0 for a pause."""
    lengths_P: Int[np.ndarray, " P"]


class Tones:
    """The frames of generated utterances; see :class:`data.utterances.Frames`.

    Args:
        seed: of the corpus.
        split: number of the split.
        most: maximum number of frames; an utterance has at least half as many.
    """

    def __init__(self, seed: int, split: int, most: int):
        self._seed, self._split, self._most = seed, split, most

    def parts(self, row: int) -> _Parts:
        """Letters and pauses of an utterance. The last may be shortened to the fewest frames of a letter."""
        random = np.random.default_rng([self._seed, self._split, row])
        wanted = int(random.integers(max(self._most // 2, LENGTHS[0]), self._most, endpoint=True))
        symbols, lengths, left = [0], [int(random.integers(*PAUSES, endpoint=True))], wanted
        left -= lengths[0]
        while left >= LENGTHS[0]:
            symbol = int(random.integers(1, len(SYMBOLS), endpoint=True))
            if symbols[-1] == symbol or random.random() < PAUSE_SHARE:
                pause = int(random.integers(*PAUSES, endpoint=True))
                symbols.append(0)
                lengths.append(pause)
                left -= pause
                if left < LENGTHS[0]:
                    break
            length = min(left, int(random.integers(*LENGTHS, endpoint=True)))
            symbols.append(symbol)
            lengths.append(length)
            left -= length
        lengths[-1] += left
        return _Parts(np.array(symbols), np.array(lengths))

    def __getitem__(self, row: int) -> Float[np.ndarray, "T K"]:
        symbols_P, lengths_P = self.parts(row)
        random = np.random.default_rng([self._seed, self._split, row, 1])
        amplitude_P = random.uniform(*AMPLITUDES, len(symbols_P)) * (symbols_P > 0)
        pitch_P = 2 + 1.8 * (symbols_P - 1) + random.uniform(-SHIFT, SHIFT)
        distance_PK = np.arange(BINS) - pitch_P[:, None]
        tone_PK = amplitude_P[:, None] * np.exp(-0.5 * (distance_PK / WIDTH) ** 2)
        age_T = np.arange(lengths_P.sum()) - np.repeat(np.cumsum(lengths_P) - lengths_P, lengths_P)
        frames_TK = np.repeat(tone_PK, lengths_P, axis=0)
        frames_TK *= (FADED + (1 - FADED) * np.exp(-age_T / FADING))[:, None]
        return (frames_TK + NOISE * random.standard_normal(frames_TK.shape)).astype(np.float32)


def load(*, context: int, train_utterances: int | None, val_utterances: int | None, seed: int) -> Dataset:
    """The corpus; utterances have at most ``context`` frames.

    Raises:
        ConfigError: ``context`` is less than ``LEAST_CONTEXT``.
    """
    check_context(context)
    counts = {"train": train_utterances, "val": val_utterances, "test": val_utterances}
    splits = {name: _split(Tones(seed, number, context), UTTERANCES[name] if count is None else count)
              for number, (name, count) in enumerate(counts.items())}
    generator = repr((_VERSION, NOISE, AMPLITUDES, FADED, FADING, WIDTH, SHIFT))
    return Dataset(splits, BINS, SYMBOLS, checksum(splits, f"tones {generator}", str(seed)), ())


def check_context(context: int) -> None:
    """Raises :class:`ConfigError` if ``context`` is less than ``LEAST_CONTEXT``."""
    if context < LEAST_CONTEXT:
        raise ConfigError(f"model.context is {context}; expected at least {LEAST_CONTEXT} for synthetic utterances")


def _split(tones: Tones, count: int) -> Split:
    parts = [tones.parts(row) for row in range(count)]
    return Split(tones, np.array([lengths_P.sum() for _, lengths_P in parts], np.int32),
                 padded([symbols_P[symbols_P > 0] for symbols_P, _ in parts]))
