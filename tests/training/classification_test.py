"""A classifier's batches, update and evaluation."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.schema import EncoderConfig, LraConfig, OptimizerConfig, TaskConfig, TrainConfig
from models.encoder import resolve_config
from tests.lra import majority_task
from training.objectives.classification import Classification, take
from training.objectives.examples import order
from training.optimizer import model_optimizer
from training.sharding import batch_sharding, make_mesh
from training.step import build

CONTEXT = 16


@pytest.fixture(autouse=True)
def settings():
    """Layers broadcast their biases."""
    with jax.numpy_rank_promotion("allow"):
        yield


def config(*, dropout: float = 0.0, towers: int = 1, **train: Any) -> LraConfig:
    model = resolve_config(EncoderConfig(
        layers=1, heads=2, width=8, mlp_width=8, context=CONTEXT, dtype="float32", pooling="mean", dropout=dropout,
        towers=towers, attention=("softmax",)))
    return LraConfig(model=model, data=TaskConfig(task="fake"), optimizer=OptimizerConfig(weight_decay=0.0),
                     train=TrainConfig(batch_size=8, **train))


def optimizer(objective: Classification) -> Any:
    return model_optimizer(OptimizerConfig(), objective.model)


def sharding(config: LraConfig) -> Any:
    return batch_sharding(make_mesh(config))


@functools.cache
def initial(towers: int = 1) -> Any:
    """What dropout and the like do not change."""
    objective = Classification(config(towers=towers), majority_task.dataset(towers))
    return jax.jit(lambda: objective.initial(optimizer(objective)))()


@functools.cache
def after_one_update(**given: Any) -> tuple[float, float]:
    """Loss and gradient norm of the first."""
    objective = Classification(config(**given), majority_task.dataset())
    state = initial()
    with objective.batches(start=0, sharding=sharding(config())) as batches:
        metrics = jax.jit(objective.update(optimizer(objective)))(state, next(batches), jnp.float32(0.01))[1]
    return float(metrics.loss), float(metrics.gradient_norm)


@pytest.mark.parametrize(("count", "size"), [(10, 4), (3, 8), (6, 6)])
def test_every_epoch_has_every_example_once_in_an_order_of_its_own(count, size):
    found = np.concatenate(list(itertools.islice(order(count, size, 0), 2 * count)))
    epochs = found[: len(found) // count * count].reshape(-1, count)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(count), (len(epochs), 1)))
    assert len(np.unique(epochs, axis=0)) > 1
    other = np.concatenate(list(itertools.islice(order(count, size, 1), 2 * count)))
    assert (found != other).any()


def test_a_batch_depends_on_seed_and_number_alone():
    straight = list(itertools.islice(order(10, 4, 7), 9))
    for start in (1, 5):
        np.testing.assert_array_equal(list(itertools.islice(order(10, 4, 7, start=start), 4)),
                                      straight[start : start + 4])


def test_a_batch_is_padded_to_the_context_with_its_masks():
    split, rows_B = majority_task.split(0, 20, towers=2), np.array([3, 3, 17])
    batch = take(split, rows_B, CONTEXT)
    for tower in range(2):
        valid_BT = np.asarray(batch.valid[tower])
        assert batch.tokens[tower].shape == valid_BT.shape == (3, CONTEXT)
        for row, tokens_T, valid_T in zip(rows_B, batch.tokens[tower], valid_BT, strict=True):
            length = split.lengths[tower][row]
            np.testing.assert_array_equal(tokens_T[:length], split.tokens[tower][row, :length])
            np.testing.assert_array_equal(valid_T, np.arange(CONTEXT) < length)
            assert not tokens_T[length:].any()
    np.testing.assert_array_equal(batch.labels_B, split.labels[rows_B])


@pytest.mark.thorough
@pytest.mark.parametrize("towers", [1, 2])
def test_evaluation_is_of_the_whole_val_split_without_dropout(towers):
    """21 examples in batches of 8: the last is not full."""
    dataset = majority_task.dataset(towers)
    objective, given = Classification(config(dropout=0.9, towers=towers), dataset), config(towers=towers)
    state = initial(towers)
    val = dataset.splits["val"]
    valid = tuple(jnp.arange(majority_task.LENGTH)[None] < lengths_N[:, None] for lengths_N in val.lengths)
    logits = jax.jit(lambda state, tokens, valid: build(objective.model, state.parameters, state.variables).forward(
        *tokens, valid_BT=valid))(state, tuple(jnp.asarray(x, jnp.int32) for x in val.tokens), valid)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, val.labels).mean()
    found = objective.evaluator(sharding(given))(state)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["accuracy"] == pytest.approx((np.argmax(logits, axis=1) == val.labels).mean())
    test = objective.test(state.parameters, state.variables, sharding(given))
    assert (19 * test["accuracy"]) % 1 == pytest.approx(0, abs=1e-6)
    assert test != found


def test_a_large_val_split_is_evaluated_in_evenly_spaced_examples(monkeypatch):
    dataset, seen = majority_task.dataset(val=100), []
    monkeypatch.setattr("training.objectives.examples.WHOLE_SPLIT", 50)
    objective = Classification(config(eval_batches=4), dataset)
    monkeypatch.setattr(objective, "figures",
                        lambda parameters, variables, split, rows_N, sharding, stops: seen.append(rows_N))
    objective.evaluator(sharding(config()))(make_state())
    assert len(seen[0]) == 32
    assert set(np.diff(seen[0])) == {3, 4}
    assert (seen[0][0], seen[0][-1]) == (0, 96)


def make_state() -> Any:
    return type("State", (), {"parameters": {}, "variables": {}})()


@pytest.mark.thorough
def test_an_accumulated_update_is_that_of_the_whole_batch():
    np.testing.assert_allclose(after_one_update(accumulate=2), after_one_update(), rtol=1e-4)


@pytest.mark.thorough
def test_training_drops_and_recomputes_what_it_dropped():
    dropped = after_one_update(dropout=0.5)
    assert dropped[0] != pytest.approx(after_one_update()[0], rel=1e-3)
    np.testing.assert_allclose(after_one_update(dropout=0.5, remat="block"), dropped, rtol=1e-5)


@pytest.mark.parametrize("shorter", [0, 1])
def test_masks_are_given_only_where_something_is_padding(shorter):
    dataset = majority_task.dataset()
    splits = {name: split._replace(lengths=(np.full_like(split.lengths[0], CONTEXT),))
              for name, split in dataset.splits.items()}
    splits["test"].lengths[0][-1] -= shorter
    objective, given = Classification(config(), dataset._replace(splits=splits)), config()
    shape = objective.batch_shape(sharding(given))
    with objective.batches(start=0, sharding=sharding(given)) as batches:
        batch = next(batches)
    assert (shape.valid[0] is not None) == (batch.valid[0] is not None) == bool(shorter)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(lambda x: (x.shape, x.dtype), shape)
    assert set(objective.test(*initial_parameters(objective), sharding(given))) == {"loss", "accuracy"}


def initial_parameters(objective: Classification) -> tuple[Any, Any]:
    state = objective.initial(optax.identity())
    return state.parameters, state.variables
