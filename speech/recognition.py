"""Training of recognisers: the objective that the loop of ``training`` needs, from a config and a corpus."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from configs.schema import SpeechConfig
from models.recogniser import Recogniser
from speech.utterances import Dataset, Split
from support.errors import ConfigError
from training import step as steps
from training.examples import evaluated, in_batches, of_rows, order
from training.objectives import Evaluator, evaluate_each
from training.sharding import put


class Utterances(NamedTuple):
    """A batch. Padding follows the frames and the symbols of a row."""

    frames_BTK: Float[Array | np.ndarray, "B T K"]
    valid_BT: Bool[Array | np.ndarray, "B T"]
    """False on padding."""
    symbols_BL: Int[Array | np.ndarray, "B L"]
    """Transcripts; 0 is padding."""


class Recognition:
    """A :class:`training.scored.ScoredObjective`: a recogniser of the utterances of a corpus.

    The loss is that of connectionist temporal classification, the negative log-probability of a transcript in nats,
    divided by its number of symbols, with the mean over utterances. This is what PyTorch's ``CTCLoss`` computes by
    default. The error rate is the number of substitutions, deletions and insertions that turn the transcripts into the
    output of :func:`decode`, divided by the number of their symbols.

    Every epoch has its own order, and a batch may span two epochs. Evaluations are as in Long Range Arena: see
    :func:`training.examples.evaluated`. The test split is always evaluated whole.

    Args:
        config: resolved config.
        dataset: corpus of the config.

    Raises:
        ConfigError: model and data do not match.
    """

    def __init__(self, config: SpeechConfig, dataset: Dataset):
        context, longest = config.model.context, max(int(split.lengths_N.max()) for split in dataset.splits.values())
        if longest > context:
            raise ConfigError(f"model.context is {context}; expected at least {longest}, the frames of the longest "
                              "utterance")
        self._config, self._dataset = config, dataset
        self._most_symbols = max(split.symbols_NL.shape[1] for split in dataset.splits.values())
        self.model = nnx.eval_shape(self.make_model)
        self.name, self.measure, self.padded = f"{config.data.corpus} speech", "error_rate", True
        self.checksum, self.notes = dataset.checksum, dataset.notes
        self.counts = {name: len(split.lengths_N) for name, split in dataset.splits.items()}
        self.facts = {"corpus": config.data.corpus, "symbols": len(dataset.symbols)}

    def make_model(self) -> Recogniser:
        """The recogniser, its parameters drawn from ``train.seed``."""
        return Recogniser(self._config.model, features=self._dataset.features, symbols=len(self._dataset.symbols) + 1,
                          rngs=nnx.Rngs(self._config.train.seed))

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.state_of(self.make_model(), transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        train = self._config.train

        def loss_sum(model: Recogniser, batch: Utterances, key: Array) -> tuple[Array, Array]:
            losses_B = ctc_losses(self.logits(model, batch, dropout=key, remat=train.remat), *batch[1:])
            return losses_B.sum(), jnp.int32(len(losses_B))

        return steps.make_update(self.model, loss_sum, transform, parts=train.accumulate, seed=train.seed)

    def logits(self, model: Recogniser, batch: Utterances, **options: Any) -> Array:
        return model.forward(jnp.asarray(batch.frames_BTK), valid_BT=jnp.asarray(batch.valid_BT), **options)

    def batch_shape(self, sharding: NamedSharding) -> Utterances:
        B, T = self._config.train.batch_size, self._config.model.context
        frames_BTK: Any = jax.ShapeDtypeStruct((B, T, self._dataset.features), jnp.float32, sharding=sharding)
        valid_BT: Any = jax.ShapeDtypeStruct((B, T), jnp.bool, sharding=sharding)
        symbols_BL: Any = jax.ShapeDtypeStruct((B, self._most_symbols), jnp.int32, sharding=of_rows(sharding))
        return Utterances(frames_BTK, valid_BT, symbols_BL)

    @contextmanager
    def batches(self, *, start: int, sharding: NamedSharding) -> Iterator[Iterator[Utterances]]:
        train = self._config.train
        yield (self._put(self._take("train", rows_B), sharding) for rows_B in order(
            self.counts["train"], train.batch_size, train.seed, start=start))

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        rows_N = evaluated(self.counts["val"], self._config.train)
        return lambda state, stops=lambda: False: self._figures(
            state.parameters, state.variables, "val", rows_N, sharding, stops)

    def test(self, parameters: Any, variables: Any, sharding: NamedSharding) -> dict[str, float]:
        """``loss`` and ``error_rate`` of the whole test split."""
        figures = self._figures(parameters, variables, "test", np.arange(self.counts["test"]), sharding, lambda: False)
        assert figures is not None  # nothing stops it
        return figures

    def samples(self, folder: Path, *, keep_through: int) -> None:
        """Not supported."""

    def _figures(self, parameters: Any, variables: Any, split: str, rows_N: np.ndarray, sharding: NamedSharding,
                 stops: Callable[[], bool]) -> dict[str, float] | None:
        train = self._config.train
        # The batch size of training, to fit into memory.
        batches = list(in_batches(rows_N, train.batch_size // train.accumulate))
        evaluate = self._evaluate(sharding.mesh)
        found = evaluate_each(lambda batch: evaluate(parameters, variables, batch),
                              (self._put(self._take(split, rows_B), sharding) for rows_B, _ in batches), stops)
        if found is None:
            return None
        counted_N = np.concatenate([counted_B for _, counted_B in batches])
        losses_N, decoded_NT = (np.concatenate(arrays)[counted_N] for arrays in zip(*found, strict=True))
        return {"loss": float(losses_N.mean(dtype=np.float64)),
                "error_rate": error_rate(decoded_NT, self._dataset.splits[split].symbols_NL[rows_N])}

    @functools.cache  # noqa: B019 (an objective lives as long as the process)
    def _evaluate(self, mesh: jax.sharding.Mesh) -> Callable[[Any, Any, Utterances], tuple[Array, Array]]:
        """The losses of a batch, and what it is decoded to, whole on every process."""

        def evaluate(parameters: Any, variables: Any, batch: Utterances) -> tuple[Array, Array]:
            logits_BTV = self.logits(steps.build(self.model, parameters, variables), batch)
            return ctc_losses(logits_BTV, *batch[1:]), decode(logits_BTV, jnp.asarray(batch.valid_BT))

        return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def _take(self, split: str, rows_B: Int[np.ndarray, " B"]) -> Utterances:
        return take(self._dataset.splits[split], rows_B, self._config.model.context, self._most_symbols)

    def _put(self, batch: Utterances, sharding: NamedSharding) -> Utterances:
        frames_BTK, valid_BT = put(batch[:2], sharding)
        return Utterances(frames_BTK, valid_BT, put(batch.symbols_BL, of_rows(sharding)))


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
    kept_BT = (best_BT != 0) & (best_BT != before_BT)
    # A stable sort moves the kept symbols to the front.
    order_BT = jnp.argsort(~kept_BT, axis=1, stable=True)
    return jnp.take_along_axis(jnp.where(kept_BT, best_BT, 0), order_BT, axis=1).astype(jnp.int32)


def error_rate(decoded_NT: Int[np.ndarray, "N T"], symbols_NL: Int[np.ndarray, "N L"]) -> float:
    """The edit distances of all transcripts, divided by the number of their symbols; 0 is padding in both."""
    from rapidfuzz.distance import Levenshtein

    def lists(rows: np.ndarray) -> Sequence[list[int]]:
        return [row[row != 0].tolist() for row in rows]

    errors = sum(itertools.starmap(Levenshtein.distance, zip(lists(decoded_NT), lists(symbols_NL), strict=True)))
    return errors / max(1, int((symbols_NL != 0).sum()))
