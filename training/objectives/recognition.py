"""A recogniser of speech, by connectionist temporal classification."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.schema import SpeechConfig
from data.utterances import Dataset, Split
from models.recogniser import Recogniser
from support.errors import ConfigError
from training.objectives.examples import ExampleObjective


class Utterances(NamedTuple):
    """A batch. Padding follows the frames and the symbols of a row."""

    frames_BTK: Float[Array | np.ndarray, "B T K"]
    valid_BT: Bool[Array | np.ndarray, "B T"]
    """False on padding."""
    symbols_BL: Int[Array | np.ndarray, "B L"]
    """Transcripts; 0 is padding."""


class Recognition(ExampleObjective[SpeechConfig]):
    """A recogniser of the utterances of a corpus.

    The loss is that of connectionist temporal classification, the negative log-probability of a transcript in nats,
    divided by its number of symbols, with the mean over utterances. This is what PyTorch's ``CTCLoss`` computes by
    default. The error rate is the number of substitutions, deletions and insertions that turn the transcripts into the
    output of :func:`decode`, divided by the number of their symbols.

    Args:
        config: resolved config.
        dataset: corpus of the config.

    Raises:
        ConfigError: model and data do not match.
    """

    def __init__(self, config: SpeechConfig, dataset: Dataset):
        longest, split = max((int(split.lengths_N.max()), name) for name, split in dataset.splits.items())
        if longest > config.model.context:
            raise ConfigError(f"model.context is {config.model.context}; expected at least {longest}, the frames of "
                              f"the longest utterance of {split}")
        self.config, self._dataset = config, dataset
        self._most_symbols = max(split.symbols_NL.shape[1] for split in dataset.splits.values())
        self.model = nnx.eval_shape(self.make_model)
        self.corpus = f"this one of {config.data.corpus} (with its data.train_utterances and val_utterances)"
        self.checksum, self.notes, self.padded = dataset.checksum, dataset.notes, True
        self.counts = {name: len(split.lengths_N) for name, split in dataset.splits.items()}
        self.size = f"{self.counts['train']:,} examples of {config.data.corpus} speech"
        self.measure, self.facts = "error_rate", {"corpus": config.data.corpus, "symbols": len(dataset.symbols)}

    def make_model(self) -> Recogniser:
        return Recogniser(self.config.model, features=self._dataset.features, symbols=len(self._dataset.symbols) + 1,
                          rngs=nnx.Rngs(self.config.train.seed))

    def take(self, split: str, rows_B: Int[np.ndarray, " B"]) -> Utterances:
        return take(self._dataset.splits[split], rows_B, self.config.model.context, self._most_symbols)

    def outputs(self, model: Recogniser, batch: Utterances, **options: Any) -> Float[Array, "B T V"]:
        return model.forward(jnp.asarray(batch.frames_BTK), valid_BT=jnp.asarray(batch.valid_BT), **options)

    def losses(self, logits: Float[Array, "B T V"], batch: Utterances) -> Float[Array, " B"]:
        return ctc_losses(logits, *batch[1:])

    def answers(self, logits: Float[Array, "B T V"], batch: Utterances) -> Int[Array, "B T"]:
        return decode(logits, jnp.asarray(batch.valid_BT))

    def score(self, answers: Int[np.ndarray, "N T"], split: str, rows_N: Int[np.ndarray, " N"]) -> float:
        return error_rate(answers, self._dataset.splits[split].symbols_NL[rows_N])

    def verify(self) -> None:
        """Raises as :meth:`data.utterances.Dataset.verify`."""
        self._dataset.verify()


def take(split: Split, rows_B: Int[np.ndarray, " B"], context: int, most_symbols: int) -> Utterances:
    """Utterances in host memory, padded to ``context`` frames and ``most_symbols`` symbols."""
    frames = [split.frames[int(row)] for row in rows_B]
    frames_BTK = np.zeros((len(rows_B), context, frames[0].shape[1]), np.float32)
    for padded_TK, frames_TK in zip(frames_BTK, frames, strict=True):
        padded_TK[: len(frames_TK)] = frames_TK
    symbols_BL = np.zeros((len(rows_B), most_symbols), np.int32)
    symbols_BL[:, : split.symbols_NL.shape[1]] = split.symbols_NL[rows_B]
    return Utterances(frames_BTK, np.arange(context) < split.lengths_N[rows_B, None], symbols_BL)


def ctc_losses(logits_BTV: Float[Array, "B T V"], valid_BT: Bool[Array | np.ndarray, "B T"],
               symbols_BL: Int[Array | np.ndarray, "B L"]) -> Float[Array, " B"]:
    """The negative log-probability of each transcript in nats, divided by its number of symbols.

    Args:
        logits_BTV: symbol 0 is the blank.
        valid_BT: false on padding.
        symbols_BL: transcripts; 0 is padding.
    """
    padding_BL = (jnp.asarray(symbols_BL) == 0).astype(jnp.float32)
    losses_B = optax.ctc_loss(logits_BTV, 1 - jnp.asarray(valid_BT).astype(jnp.float32), jnp.asarray(symbols_BL),
                              padding_BL, blank_id=0)
    return losses_B / jnp.maximum((1 - padding_BL).sum(axis=1), 1)


def decode(logits_BTV: Float[Array, "B T V"], valid_BT: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Greedy decoding: the best symbol of each frame, without repetitions and then without blanks; 0 is padding."""
    best_BT = jnp.where(valid_BT, jnp.argmax(logits_BTV, axis=2), 0)
    before_BT = jnp.pad(best_BT, ((0, 0), (1, 0)))[:, :-1]
    is_symbol_BT = (best_BT != 0) & (best_BT != before_BT)
    # A stable sort moves the symbols to the front.
    order_BT = jnp.argsort(~is_symbol_BT, axis=1, stable=True)
    return jnp.take_along_axis(jnp.where(is_symbol_BT, best_BT, 0), order_BT, axis=1).astype(jnp.int32)


def error_rate(decoded_NT: Int[np.ndarray, "N T"], symbols_NL: Int[np.ndarray, "N L"]) -> float:
    """The edit distances of all transcripts, divided by the number of their symbols; 0 is padding in both."""
    from rapidfuzz.distance import Levenshtein

    def lists(rows: np.ndarray) -> Sequence[list[int]]:
        return [row[row != 0].tolist() for row in rows]

    errors = sum(itertools.starmap(Levenshtein.distance, zip(lists(decoded_NT), lists(symbols_NL), strict=True)))
    return errors / max(1, int((symbols_NL != 0).sum()))
