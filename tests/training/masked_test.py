"""Masked language modelling: which tokens are targets, the loss, a run and how other commands refuse it."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import compare
import eval
import sample
from configs.schema import EncoderConfig, MaskedConfig, TrainConfig, config_class
from data.loader import Batch
from kernels.cross_entropy.reference import reference
from models.encoder import Encoder, MaskedModel, resolve_config
from tests import small_run
from training import step as steps
from training.objectives.masked import MaskedLanguageModelling, make_masked_step
from training.objectives.masked import mask as mask_tokens
from training.optimizer import model_optimizer

VOCABULARY = 257
RECIPE = small_run.RECIPE
for old, new in (("ModelConfig", "EncoderConfig"), ("Config, DataConfig", "DataConfig"),
                 ("-> Config", "-> MaskedConfig"), ("return Config", "return MaskedConfig"),
                 ("import Checkpoint", "import MaskedConfig, Checkpoint"),
                 ("width=16,", 'width=16, mlp_width=32, pooling="none", positions="rotary", dropout=0.1,')):
    assert old in RECIPE
    RECIPE = RECIPE.replace(old, new)


def windows(rows: int, length: int, segment_ids_BT: np.ndarray | None = None) -> Batch:
    tokens_BT = np.random.default_rng(0).integers(0, VOCABULARY, (rows, length), np.int32)
    return Batch(tokens_BT, tokens_BT, segment_ids_BT)


mask_rows = jax.jit(functools.partial(mask_tokens, mask_token=VOCABULARY))


def mask(batch: Batch, seed: int = 0) -> Batch:
    return jax.device_get(mask_rows(batch, jax.random.split(jax.random.key(seed), len(batch.inputs_BT))))


@pytest.mark.fast
def test_targets_are_15_per_cent_of_the_tokens_and_80_per_cent_of_them_masked():
    batch = windows(64, 4096)
    masked = mask(batch)
    target_BT = masked.targets_BT >= 0
    np.testing.assert_array_equal(masked.targets_BT[target_BT], batch.inputs_BT[target_BT])
    np.testing.assert_array_equal(masked.inputs_BT[~target_BT], batch.inputs_BT[~target_BT])
    shown, kept = masked.inputs_BT[target_BT], batch.inputs_BT[target_BT]
    random = shown[(shown != VOCABULARY) & (shown != kept)]
    # Five standard deviations; a random token is the kept one in 1 of 257.
    for found, expected, count in (
            (target_BT.mean(), 0.15, target_BT.size), ((shown == VOCABULARY).mean(), 0.8, shown.size),
            (len(random) / len(shown), 0.1 * 256 / 257, shown.size)):
        assert abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)
    assert set(random) == set(range(VOCABULARY))
    assert not np.array_equal(target_BT[0], target_BT[1])


@pytest.mark.fast
def test_padding_is_no_target():
    segment_ids_BT = np.where(np.arange(512) < 300, 0, -1).astype(np.int32)[None]
    assert (mask(windows(1, 512, segment_ids_BT)).targets_BT[:, 300:] == -1).all()


@pytest.mark.fast
def test_the_separator_before_a_document_is_no_target():
    segment_ids_BT = np.repeat(np.arange(128), 4).astype(np.int32)[None]
    target_T = mask(windows(1, 512, segment_ids_BT)).targets_BT[0] >= 0
    assert not target_T[::4].any()
    assert target_T.sum() > 30


def config(mode: str) -> MaskedConfig:
    model = EncoderConfig(layers=1, heads=2, width=8, mlp_width=16, context=32, positions="rotary", pooling="none",
                          dtype="float32", attention=(mode,))
    return MaskedConfig(model=resolve_config(model))


@pytest.mark.parametrize("mode", ["softmax", "performer"])
def test_a_step_has_the_mean_loss_over_the_targets_of_its_seed_and_number(mode: str):
    given, batch = config(mode), windows(3, 32)
    model = steps.abstract_model(given, VOCABULARY)
    transform = model_optimizer(given.optimizer, model)
    state = jax.jit(lambda: steps.initial_state(given, VOCABULARY, transform))()
    after, metrics = jax.jit(make_masked_step(model, given, transform))(state, batch, jnp.float32(1e-2))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(given.train.seed), 0), steps.LOSS_STREAM)
    masked = jax.device_get(mask_rows(batch, jax.random.split(jax.random.split(key)[0], 3)))
    # The step redraws random features before it computes the loss.
    built = steps.build(model, state.parameters, after.variables)
    x_BTE = jax.jit(built.forward)(masked.inputs_BT)
    embedding_VE = built.encoder.token_embedding.embedding[...]
    expected = jax.jit(reference)(x_BTE, embedding_VE, masked.targets_BT) / np.sum(masked.targets_BT >= 0)
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
    changed = jax.tree.map(lambda old, new: np.any(np.asarray(old) != new), state.parameters, after.parameters)
    assert all(jax.tree.leaves(changed))


def test_only_targets_contribute_to_loss_and_gradient():
    model = MaskedModel(config("softmax").model, VOCABULARY, rngs=nnx.Rngs(0))
    masked = mask(windows(2, 32))
    other = masked._replace(targets_BT=np.where(masked.targets_BT >= 0, masked.targets_BT, -2))
    x_BTE = jax.jit(model.forward)(masked.inputs_BT)
    loss_and_gradient = jax.jit(jax.value_and_grad(model.head.loss_sum))
    losses = [loss_and_gradient(x_BTE, batch.targets_BT) for batch in (masked, other)]
    np.testing.assert_array_equal(losses[0][0], losses[1][0])
    assert (np.asarray(losses[0][1])[masked.targets_BT < 0] == 0).all()


def test_documents_of_a_row_do_not_see_each_other():
    encoder = Encoder(replace(config("softmax").model, positions="learned"), VOCABULARY, rngs=nnx.Rngs(0))
    tokens_BT = windows(1, 12).inputs_BT
    segment_ids_BT = np.array([[0] * 5 + [1] * 4 + [-1] * 3], np.int32)
    forward = jax.jit(encoder.forward)
    y_BTE = np.asarray(forward(tokens_BT, segment_ids_BT=segment_ids_BT))
    for part in (slice(0, 5), slice(5, 9)):
        np.testing.assert_allclose(y_BTE[:, part], forward(tokens_BT[:, part]), atol=1e-5)
    with pytest.raises(ValueError, match="expected none for rows with segments"):
        Encoder(replace(encoder.config, pooling="mean"), VOCABULARY, rngs=nnx.Rngs(0)).forward(
            jnp.asarray(tokens_BT), segment_ids_BT=jnp.asarray(segment_ids_BT))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = small_run.make(tmp_path_factory.mktemp("masked"))
    found.write_text(RECIPE)
    return found


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    folder = recipe.parent / "run"
    with small_run.settings():
        assert small_run.run(recipe, "--attention", "softmax", "--run-dir", folder, "--data.packing", "documents") == 0
    return folder


def test_a_run_is_drawn_and_other_commands_refuse_it(recipe: Path, run: Path, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]):
    assert config_class(json.loads((run / "config.json").read_text())) is MaskedConfig
    val, = small_run.lines(run, "val")
    assert 0 <= val["accuracy"] <= 1
    assert val["loss"] == pytest.approx(np.log(VOCABULARY), abs=1.5)
    assert "bits_per_byte" not in val
    page = tmp_path / "page.html"
    assert compare.main([str(run), "--out", str(page)]) == 0
    assert "masked token" in page.read_text()
    capsys.readouterr()
    for command in (sample.main, eval.main):
        assert command([str(run)]) == 2
        assert f"{run} is a masked-language-model run of train.py; expected a language-model run" in (
            capsys.readouterr().err)
    assert small_run.run(recipe, "--run-dir", tmp_path / "new", "--init-from", run) == 2
    assert "is a masked-language-model recipe; expected a language-model recipe" in capsys.readouterr().err


def test_documents_need_a_mode_that_separates_them(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert small_run.run(recipe, "--attention", "linear", "--data.packing", "documents", "--run-dir",
                         tmp_path / "run") == 2
    assert "attention mode 'linear' cannot separate the documents" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.fast
def test_the_masks_of_evaluation_depend_only_on_the_window():
    """Not on the mode, the seed of the run, or how many windows are evaluated at once."""
    batch = windows(4, 64)
    found = []
    for mode, seed, rows in (("softmax", 0, 4), ("linear", 1, 2)):
        objective = MaskedLanguageModelling.__new__(MaskedLanguageModelling)
        objective.model = steps.abstract_model(replace(config(mode), train=TrainConfig(seed=seed)), VOCABULARY)
        parts = [Batch(batch.inputs_BT[first:first + rows], batch.targets_BT[first:first + rows])
                 for first in range(0, 4, rows)]
        masked = objective.evaluated(parts)
        found.append([np.concatenate(arrays) for arrays in zip(*(one[:2] for one in masked), strict=True)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
def test_a_resumed_run_equals_the_uninterrupted_one(recipe: Path, tmp_path: Path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    flags = ("--attention", "performer", "--optimizer.schedule", "constant", "--train.eval-every", 2)
    with small_run.settings():
        assert small_run.run(recipe, "--run-dir", straight, "--train.steps", 4, *flags) == 0
        for count in (2, 4):
            assert small_run.run(recipe, "--run-dir", resumed, "--train.steps", count, *flags) == 0
    expected, found = small_run.arrays(straight, 4), small_run.arrays(resumed, 4)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    names = ("step", "split", "loss", "accuracy")
    assert ([[line.get(name) for name in names] for line in small_run.lines(resumed)]
            == [[line.get(name) for name in names] for line in small_run.lines(straight)])
