"""One update: golden metrics; accumulation, rematerialisation and donation do not change it."""

import dataclasses
import functools
import itertools
from typing import Any, cast

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import Config, ModelConfig, OptimizerConfig, TrainConfig
from data.loader import Batch
from models.gpt import resolve_config
from training.optimizer import make_optimizer, model_optimizer
from training.step import (
    MERGING_OPTIONS,
    SCATTER_OPTIONS,
    TrainState,
    abstract_model,
    build,
    initial_state,
    jit_step,
    make_eval_step,
    make_train_step,
    make_update,
    state_of,
)

VOCABULARY = 31


@pytest.fixture(autouse=True)
def settings():
    """Layers broadcast their biases."""
    with jax.numpy_rank_promotion("allow"):
        yield


def tiny(attention: str = "chunked", *, clip_norm: float = 0.5, **train: Any) -> Config:
    model = resolve_config(ModelConfig(layers=1, heads=2, width=16, context=32, dtype="float32",
                                       attention=(attention,)))
    return Config(model=model, optimizer=OptimizerConfig(clip_norm=clip_norm), train=TrainConfig(batch_size=4, **train))


def optimizer(config: Config) -> Any:
    return model_optimizer(config.optimizer, abstract_model(config, VOCABULARY))


def batch() -> Batch:
    """Fixed tokens from a formula, which no library's random numbers can change."""
    tokens_BT = (np.arange(4 * 33).reshape(4, 33) ** 2 * 7 % VOCABULARY).astype(np.int32)
    return Batch(jnp.asarray(tokens_BT[:, :-1]), jnp.asarray(tokens_BT[:, 1:]))


def uneven() -> Batch:
    """A batch whose first row has three scored tokens."""
    targets_BT = np.array(batch().targets_BT)
    targets_BT[0, 3:] = -1
    return Batch(batch().inputs_BT, jnp.asarray(targets_BT))


@functools.cache
def initial(seed: int = 0) -> TrainState:
    """The same in every mode without its own parameters, as a test here asserts."""
    config = tiny(seed=seed)
    return jax.jit(lambda: initial_state(config, VOCABULARY, optimizer(config)))()


@functools.cache
def compiled(attention: str = "chunked", **options: Any) -> Any:
    config = tiny(attention, **options)
    model = abstract_model(config, VOCABULARY)
    return jit_step(make_train_step(model, config, optimizer(config)))


@functools.cache
def train(attention: str = "chunked", data: Any = batch, **options: Any) -> tuple[TrainState, np.ndarray]:
    """The state after three updates, and loss and gradient norm of each."""
    step = compiled(attention, **options)
    state, seen = jax.tree.map(jnp.copy, initial()), []
    for _ in range(3):
        state, metrics = step(state, data(), jnp.float32(0.01))
        seen.append([float(metrics.loss), float(metrics.gradient_norm)])
    return state, np.array(seen)


def assert_same_update(a: TrainState, b: TrainState) -> None:
    # Over all parameters: Adam magnifies the rounding of gradients near zero, such as those of key biases.
    x, y = (jax.flatten_util.ravel_pytree(state.parameters)[0] for state in (a, b))
    assert jnp.linalg.norm(x - y) / jnp.linalg.norm(y) < 1e-3


GOLDEN = {
    "softmax": [[3.436052, 1.176169], [3.271797, 0.978721], [3.137438, 0.983953]],
    "chunked": [[3.436057, 1.176127], [3.271854, 0.979170], [3.137447, 0.981180]],
}


@pytest.mark.parametrize("attention", GOLDEN)
def test_loss_and_gradient_norm_of_the_first_updates_are_what_they_were(attention):
    # Rounding differs between processors and versions of jax by about 1e-6 of the value, and Adam magnifies it.
    np.testing.assert_allclose(train(attention)[1], GOLDEN[attention], rtol=1e-4, err_msg=(
        "Training gives other numbers than it did. Update GOLDEN only for a change that is meant to change them "
        "(model, initialisation, optimizer, loss) or a jax with other random numbers, and say so in the commit; a "
        "faster kernel or a refactoring must not."))


def test_a_gpu_is_told_to_add_up_in_one_order(monkeypatch):
    def told(**asked: bool) -> dict[str, bool | int] | None:
        """The compiler options; no CPU compiler shows their effect."""
        with monkeypatch.context() as patch:
            patch.setattr("training.step.jax.jit", lambda step, *, compiler_options, **_: compiler_options)
            return cast(Any, jit_step(lambda: None, **asked))

    assert told() is None
    monkeypatch.setattr("kernels.device.platform", lambda: "gpu")
    assert told() == MERGING_OPTIONS | SCATTER_OPTIONS
    assert told(deterministic=False) == MERGING_OPTIONS


@pytest.mark.thorough
def test_an_accumulated_update_is_that_of_the_whole_batch():
    np.testing.assert_allclose(train(accumulate=2)[1], train()[1], rtol=1e-4)
    assert_same_update(train(accumulate=2)[0], train()[0])


def test_accumulation_weighs_tokens_equally_where_parts_have_fewer_to_score():
    np.testing.assert_allclose(train(data=uneven, accumulate=2)[1], train(data=uneven)[1], rtol=1e-4)


@pytest.mark.thorough
def test_a_mixture_of_logistics_trains_with_accumulation_and_recomputed_blocks():
    def losses(**options):
        config = tiny(**options)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, head="logistics"))
        model, transform = abstract_model(config, VOCABULARY + 1), optimizer(config)
        state = jax.jit(lambda: initial_state(config, VOCABULARY + 1, transform))()
        step, found = jit_step(make_train_step(model, config, transform)), []
        for _ in range(3):
            state, metrics = step(state, uneven(), jnp.float32(0.01))
            found.append([float(metrics.loss), float(metrics.gradient_norm)])
        total, count, right = jax.jit(make_eval_step(model, accuracy=True))(
            state.parameters, state.variables, uneven())
        return [*found, [float(total / count), int(right)]]

    expected = losses()
    np.testing.assert_allclose(losses(accumulate=2, remat="block"), expected, rtol=1e-4)
    assert expected[-1][0] < expected[0][0]


@pytest.mark.parametrize("remat", ["block", "names"])
def test_recomputed_blocks_give_the_same_update(remat):
    np.testing.assert_allclose(train(remat=remat)[1], train()[1], rtol=1e-4)
    assert_same_update(train(remat=remat)[0], train()[0])


@pytest.mark.parametrize("attention", ["softmax", "power", "local", "gated_delta"])
def test_remat_recomputes_each_block_and_by_names_not_its_attention(attention):
    def count(remat, operation):
        config = tiny(attention, remat=remat)
        step = jax.jit(make_train_step(abstract_model(config, VOCABULARY), config, optimizer(config)))
        state = jax.eval_shape(lambda: initial_state(config, VOCABULARY, optimizer(config)))
        return step.lower(state, batch(), jnp.float32(0)).as_text().count(operation)

    none, block, names = (count(remat, "dot_general") for remat in ("none", "block", "names"))
    assert none < names < block


@pytest.mark.fast
def test_the_logged_gradient_norm_is_the_one_before_clipping():
    assert train()[1][0, 1] > 0.5
    np.testing.assert_allclose(train(clip_norm=1e9)[1][0], train()[1][0], rtol=1e-6)


def test_the_old_state_gives_its_memory_to_the_new_one():
    state = jax.tree.map(jnp.copy, initial())
    compiled()(state, batch(), jnp.float32(0.01))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_parameters_start_equal_in_every_mode_and_follow_the_seed():
    for attention in ("softmax", "linear"):
        config = tiny(attention)
        state = initial_state(config, VOCABULARY, optimizer(config))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8), state.parameters,
                     initial().parameters)
    embedding, other = (initial(seed).parameters["token_embedding"]["embedding"] for seed in (0, 1))
    assert (np.asarray(embedding) != np.asarray(other)).all()


@pytest.mark.thorough
def test_what_a_loss_draws_comes_from_seed_and_step_and_is_another_in_each_part():
    class One(nnx.Module):
        def __init__(self):
            self.x = nnx.Param(jnp.ones(()))

    def loss_sum(model, batch, key):
        return model.x[...] * jax.random.uniform(key), jnp.int32(1)

    transform = make_optimizer(OptimizerConfig(), {"x": False})

    def losses(parts, seed=0, count=2):
        state, found = state_of(One(), transform), []
        step = jax.jit(make_update(One(), loss_sum, transform, seed=seed, parts=parts))
        for _ in range(count):
            state, metrics = step(state, jnp.zeros(4), jnp.float32(0))
            found.append(float(metrics.loss))
        return found

    assert losses(1) == losses(1)
    assert len({*losses(1), *losses(1, seed=1)}) == 4
    # The mean of four equal draws would be distributed as a single draw; that of different draws is near a half.
    means = np.array([losses(4, seed, count=8) for seed in range(4)])
    assert means.std() == pytest.approx(np.sqrt(1 / 12 / 4), rel=0.35)


DOCUMENTS = ((3, 9, 20), (15, 10), (20, 12), (30,))
"""Tokens of the documents in each row of :func:`packed`; two rows have padding."""


def place(batch: Batch, at: list[tuple[int, int]]) -> Batch:
    """The documents of these rows from these columns on; every third target does not count."""
    inputs_BT, targets_BT = np.array(batch.inputs_BT), np.array(batch.targets_BT)
    for number, (length, (row, column)) in enumerate(zip(itertools.chain(*DOCUMENTS), at, strict=True)):
        tokens = (np.arange(length + 1) ** 2 * 7 + 5 * number) % VOCABULARY
        inputs_BT[row, column : column + length] = tokens[:-1]
        targets_BT[row, column : column + length] = np.where(np.arange(length) % 3 == 2, -1, tokens[1:])
    return batch._replace(inputs_BT=jnp.asarray(inputs_BT), targets_BT=jnp.asarray(targets_BT))


def packed() -> Batch:
    """The documents in four rows."""
    inputs_BT, (targets_BT, segment_ids_BT) = np.zeros((4, 32), np.int32), np.full((2, 4, 32), -1, np.int32)
    at = []
    for row, lengths in enumerate(DOCUMENTS):
        for segment, length in enumerate(lengths):
            at.append((row, sum(lengths[:segment])))
            segment_ids_BT[row, at[-1][1] : at[-1][1] + length] = segment
    return place(Batch(inputs_BT, targets_BT, jnp.asarray(segment_ids_BT)), at)


def alone() -> Batch:
    """Each document in its own row; nothing after it can be seen."""
    rows = sum(len(lengths) for lengths in DOCUMENTS)
    return place(Batch(np.zeros((rows, 32), np.int32), np.full((rows, 32), -1, np.int32)),
                 [(row, 0) for row in range(rows)])


@pytest.mark.parametrize(("attention", "positions"), [
    pytest.param("softmax", "learned", marks=pytest.mark.thorough), ("chunked", "rotary")])
def test_packed_documents_have_the_loss_and_the_gradient_that_they_have_alone(attention, positions):
    def config(accumulate):
        config = tiny(attention, clip_norm=1e9, accumulate=accumulate)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, positions=positions))

    transform = optimizer(config(1))
    state = jax.jit(lambda: initial_state(config(1), VOCABULARY, transform))()
    # Far from the initial parameters, for which attention is nearly uniform and hides what is seen.
    state = state._replace(parameters=jax.tree.map(lambda x: 10 * x if x.ndim == 2 else x, state.parameters))

    def update(batch, accumulate):
        step = make_train_step(abstract_model(config(1), VOCABULARY), config(accumulate), transform)
        metrics = jax.jit(step)(state, batch, jnp.float32(0.01))[1]
        return [float(metrics.loss), float(metrics.gradient_norm)]

    def evaluation(batch):
        total, count = jax.jit(make_eval_step(abstract_model(config(1), VOCABULARY)))(
            state.parameters, state.variables, batch)
        return float(total / count)

    expected = update(alone(), 1)
    # The same sums in another order, in float32. The parts have different numbers of targets.
    np.testing.assert_allclose(update(packed(), 2), expected, rtol=1e-4)
    np.testing.assert_allclose(evaluation(packed()), expected[0], rtol=1e-5)
    # The comparison detects whether documents see each other.
    assert abs(evaluation(packed()._replace(segment_ids_BT=None)) / expected[0] - 1) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("data", [uneven, packed])
def test_accuracy_is_the_share_of_scored_targets_that_are_most_likely(data):
    model, state = abstract_model(tiny(), VOCABULARY), initial()
    logits_BTV = jax.jit(lambda state, batch: build(model, state.parameters, state.variables)(
        batch.inputs_BT, segment_ids_BT=batch.segment_ids_BT))(state, data())
    right_BT = np.argmax(logits_BTV, axis=-1) == np.asarray(data().targets_BT)
    evaluate = jax.jit(make_eval_step(model, accuracy=True))
    total, count, right = evaluate(state.parameters, state.variables, data())
    assert (int(count), int(right)) == ((data().targets_BT >= 0).sum(), right_BT.sum())
    assert total == jax.jit(make_eval_step(model))(state.parameters, state.variables, data())[0]
    best_BT = np.where(data().targets_BT >= 0, np.argmax(logits_BTV, axis=-1), -1)
    _, count, right = evaluate(state.parameters, state.variables, data()._replace(targets_BT=jnp.asarray(best_BT)))
    assert right == count


def test_evaluation_sums_the_loss_of_the_tokens_that_are_scored():
    evaluate = jax.jit(make_eval_step(abstract_model(tiny(), VOCABULARY)))
    state = initial()
    for data, scored, (loss, _) in ((batch, 128, train()[1][0]), (uneven, 99, train(data=uneven)[1][0])):
        total, count = evaluate(state.parameters, state.variables, data())
        assert int(count) == scored
        assert float(total) / scored == pytest.approx(loss, rel=1e-6)
