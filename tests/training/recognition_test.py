"""CTC, decoding, error rates, and the objective of recognisers."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import EncoderConfig, OptimizerConfig, SpeechConfig, TrainConfig
from data.utterances import frames_needed
from models.encoder import resolve_config
from speech import synthetic
from support.errors import ConfigError
from training.objectives.recognition import Recognition, ctc_losses, decode, error_rate, take
from training.optimizer import model_optimizer
from training.sharding import batch_sharding, make_mesh
from training.step import build

CONTEXT = 60


@pytest.fixture(autouse=True)
def settings():
    """Layers broadcast their biases."""
    with jax.numpy_rank_promotion("allow"):
        yield


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    """The transcript of a path: the definition."""
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != 0)


def enumerated(logits_TV: np.ndarray, transcript: tuple[int, ...]) -> float:
    """Minus the logarithm of the probability of all paths with this transcript."""
    logs_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
    frames, symbols = logs_TV.shape
    logs = [sum(logs_TV[t, v] for t, v in enumerate(path))
            for path in itertools.product(range(symbols), repeat=frames) if collapsed(path) == transcript]
    return -np.logaddexp.reduce(logs) if logs else np.inf


def random_case(lengths: tuple[int, ...], transcripts: tuple[tuple[int, ...], ...], *, padding: float = 0.0) -> Any:
    B, T, L, V = len(lengths), max(lengths) + 2, max(map(len, transcripts)) + 1, 3
    random = np.random.default_rng(0)
    logits_BTV, symbols_BL = np.full((B, T, V), padding, np.float32), np.zeros((B, L), np.int32)
    for row, (length, transcript) in enumerate(zip(lengths, transcripts, strict=True)):
        logits_BTV[row, :length] = random.normal(0, 2, (length, V))
        symbols_BL[row, : len(transcript)] = transcript
    return jnp.asarray(logits_BTV), jnp.asarray(np.arange(T) < np.array(lengths)[:, None]), jnp.asarray(symbols_BL)


losses = jax.jit(ctc_losses)
LENGTHS, TRANSCRIPTS = (4, 5, 3, 4), ((1, 2), (2, 2), (1,), (1, 1, 2))


def test_the_loss_is_that_of_all_paths_a_symbol():
    logits_BTV, valid_BT, symbols_BL = random_case(LENGTHS, TRANSCRIPTS)
    expected = [enumerated(np.asarray(logits_BTV[row, :length], np.float64), transcript) / len(transcript)
                for row, (length, transcript) in enumerate(zip(LENGTHS, TRANSCRIPTS, strict=True))]
    np.testing.assert_allclose(losses(logits_BTV, valid_BT, symbols_BL), expected, rtol=1e-4)


def test_padding_changes_neither_loss_nor_gradient_nor_what_is_decoded():
    case, other = random_case(LENGTHS, TRANSCRIPTS), random_case(LENGTHS, TRANSCRIPTS, padding=9.0)
    gradient = jax.jit(jax.value_and_grad(lambda logits_BTV, *rest: ctc_losses(logits_BTV, *rest).sum()))
    (loss, of_case), (of_other, gradient_BTV) = gradient(*case), gradient(*other)
    assert float(loss) == pytest.approx(float(of_other), rel=1e-6)
    np.testing.assert_allclose(of_case, gradient_BTV, atol=1e-6)
    assert not np.asarray(gradient_BTV)[~np.asarray(case[1])].any()
    longer_BL = np.pad(case[2], ((0, 0), (0, 3)))
    np.testing.assert_allclose(losses(*case[:2], longer_BL), losses(*case), rtol=1e-6)
    decoded, decoded_other = (jax.jit(decode)(*given[:2]) for given in (case, other))
    np.testing.assert_array_equal(decoded, decoded_other)


@pytest.mark.fast
@pytest.mark.parametrize("transcript", [(1,), (1, 2), (1, 1), (2, 2, 2), (1, 2, 2, 1)])
def test_a_transcript_needs_a_frame_a_symbol_and_one_between_equal_ones(transcript):
    least = min(frames for frames in range(1, 8) if any(
        collapsed(path) == transcript for path in itertools.product(range(3), repeat=frames)))
    assert frames_needed(np.array(transcript)) == least


def test_decoding_collapses_repetitions_and_then_drops_blanks():
    paths = [(1, 1, 0, 1, 2, 2, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0), (2, 0, 0, 2, 2, 1, 1, 1), (1, 2, 1, 2, 1, 2, 1, 2)]
    logits_BTV = 5 * np.eye(3, dtype=np.float32)[np.array(paths)]
    valid_BT = np.arange(8) < np.array([[8], [8], [5], [8]])
    found = np.asarray(jax.jit(decode)(logits_BTV, valid_BT))
    for row, path in enumerate(paths):
        expected = collapsed(path[: int(valid_BT[row].sum())])
        assert tuple(found[row, : len(expected)]) == expected
        assert not found[row, len(expected):].any()


def test_the_error_rate_is_of_all_symbols_together():
    decoded_NT = np.array([[1, 2, 3, 0, 0], [4, 4, 0, 0, 0], [0, 0, 0, 0, 0]])
    symbols_NL = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 7]])
    assert error_rate(decoded_NT, symbols_NL) == (0 + 1 + 4) / 8
    assert error_rate(np.array([[1, 3, 2]]), np.array([[1, 2]])) == 1 / 2


def config(**train: Any) -> SpeechConfig:
    model = resolve_config(EncoderConfig(layers=1, heads=2, width=8, mlp_width=8, context=CONTEXT, dtype="float32",
                                         pooling="none", attention=("softmax",)))
    return SpeechConfig(model=model, optimizer=OptimizerConfig(weight_decay=0.0),
                        train=TrainConfig(batch_size=4, **train))


@functools.cache
def dataset() -> Any:
    return synthetic.load(context=CONTEXT, train_utterances=10, val_utterances=6, seed=0)


def sharding() -> Any:
    return batch_sharding(make_mesh(config()))


def optimizer(objective: Recognition) -> Any:
    return model_optimizer(OptimizerConfig(), objective.model)


@functools.cache
def initial() -> Any:
    objective = Recognition(config(), dataset())
    return jax.jit(lambda: objective.initial(optimizer(objective)))()


def test_a_batch_depends_on_seed_and_number_alone():
    objective = Recognition(config(), dataset())
    with objective.batches(start=0, sharding=sharding()) as batches:
        straight = list(itertools.islice(batches, 5))
    with objective.batches(start=3, sharding=sharding()) as batches:
        resumed = next(batches)
    jax.tree.map(np.testing.assert_array_equal, resumed, straight[3])
    shape = objective.batch_shape(sharding())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), resumed) == jax.tree.map(lambda x: (x.shape, x.dtype), shape)


def test_an_evaluation_is_of_the_whole_split_and_a_longer_context_changes_nothing():
    """Six utterances in batches of four: the last is not full."""
    objective, state = Recognition(config(), dataset()), initial()
    val = dataset().splits["val"]
    batch = take(val, np.arange(6), CONTEXT + 9, 20)
    model = build(objective.model, state.parameters, state.variables)
    model.encoder.config = resolve_config(EncoderConfig(**vars(config().model) | {"context": CONTEXT + 9}))
    logits_BTV = jax.jit(lambda batch: objective.outputs(model, batch))(batch)
    found = objective.evaluator(sharding())(state)
    assert found is not None
    losses_B = losses(logits_BTV, batch.valid_BT, batch.symbols_BL)
    assert found["loss"] == pytest.approx(float(np.mean(losses_B)), rel=1e-4)
    decoded_BT = np.asarray(jax.jit(decode)(logits_BTV, batch.valid_BT))
    assert found["error_rate"] == error_rate(decoded_BT, val.symbols_NL)
    assert objective.test(state.parameters, state.variables, sharding()) != found


@pytest.mark.thorough
def test_an_accumulated_update_is_that_of_the_whole_batch():
    def after(**train: Any) -> tuple[float, float]:
        objective = Recognition(config(**train), dataset())
        with objective.batches(start=0, sharding=sharding()) as batches:
            metrics = jax.jit(objective.update(optimizer(objective)))(initial(), next(batches), jnp.float32(0.01))[1]
        return float(metrics.loss), float(metrics.gradient_norm)

    np.testing.assert_allclose(after(accumulate=2), after(), rtol=1e-4)


def test_utterances_beyond_the_context_are_refused():
    longer = synthetic.load(context=CONTEXT + 10, train_utterances=9, val_utterances=6, seed=0)
    with pytest.raises(ConfigError, match=r"model\.context is 60; expected at least \d+, the frames of the longest"):
        Recognition(config(), longer)
    assert Recognition(config(), dataset()).padded
