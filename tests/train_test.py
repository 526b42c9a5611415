"""train.py as a command: its files, the modes and forms it trains, and errors for invalid input."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from configs.schema import Config
from data.loader import fixed_batches
from data.prepare import prepare
from data.token_files import TokenFiles
from models import attention as attentions
from tests import edited, small_run
from training import run_folder
from training.checkpoint import Checkpoints
from training.environment import add_to_environment
from training.run_files import read_environment


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    """A run of seven steps, read-only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", 7, "--train.eval-every", 3,
                         "--checkpoint.every-steps", 4) == 0
    return folder


@pytest.fixture
def run_dir(tmp_path, finished) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(capsys, code: int, *arguments: object) -> str:
    """Standard error of a command that stops with ``code`` and one message."""
    capsys.readouterr()
    assert small_run.run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return " ".join(err.replace("│", " ").split())


# What a run writes


def test_metrics_have_one_train_line_a_step_and_val_lines_at_evaluations_and_the_end(finished, recipe):
    found = small_run.lines(finished)
    assert [(line["split"], line["step"]) for line in found] == [
        ("train", 1), ("train", 2), ("train", 3), ("val", 3), ("train", 4), ("train", 5), ("train", 6), ("val", 6),
        ("train", 7), ("val", 7)]
    for line in found:
        assert list(line)[:6] == ["step", "tokens", "train_seconds", "wall_seconds", "split", "loss"]
        assert line["tokens"] == line["step"] * 4 * 32
        assert 0 < line["train_seconds"] < line["wall_seconds"]
    for line in small_run.lines(finished, "train"):
        assert list(line)[6:] == ["learning_rate", "gradient_norm", "tokens_per_second", "flops"]
    clocks = np.array([[line["train_seconds"], line["wall_seconds"]] for line in found])
    assert (np.diff(clocks, axis=0) >= 0).all()
    meta = json.loads((finished.parents[0] / "run" / "environment.json").read_text())
    assert meta["tokenizer"] == "bytes"
    evaluated = fixed_batches(TokenFiles.open(recipe.parent / "tokens"), "val", context=32, batch_size=4, count=2)
    for line in small_run.lines(finished, "val"):
        # Every token is a byte of text, but the end-of-text tokens.
        part = np.mean([batch.targets_BT != 256 for batch in evaluated])
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / np.log(2) / part)


def test_the_loss_falls(finished):
    losses = [line["loss"] for line in small_run.lines(finished, "val")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 5.3 < np.log(257)


def test_checkpoints_are_at_their_steps_and_at_the_end(finished):
    assert small_run.saved_steps(finished) == [4, 7]
    with Checkpoints(finished / "checkpoints") as checkpoints:
        found = checkpoints.restore({"position": None})
    assert found is not None
    last = small_run.lines(finished, "train")[-1]
    assert found[1]["position"]["step"] == found[1]["position"]["batches"] == 7
    assert found[1]["position"]["train_seconds"] == last["train_seconds"]


def test_config_json_is_the_config_that_ran(recipe, finished, tmp_path, capsys):
    values = edited.contents(finished / "config.json")
    assert values["train"]["steps"] == 7
    assert values["model"]["attention"] == ["chunked"]
    assert values["model"]["dtype"] == "float32"
    config = Config.from_dict(values)
    config = dataclasses.replace(config, model=attentions.resolve(config.model))
    assert config.to_dict() == values
    assert isinstance(config.model.modes["chunked"], attentions.load("chunked").Config)


def test_environment_json_says_what_it_was_made_with(recipe, finished):
    found = json.loads((finished / "environment.json").read_text())
    meta = json.loads((recipe.parent / "tokens" / "meta.json").read_text())
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == [jax.devices()[0].device_kind]
    assert found["command"][:2] == ["train.py", str(recipe)]
    assert found["corpus_checksum"] == meta["checksum"]
    assert found["vocabulary_size"] == 257
    arrays = small_run.arrays(finished, 7)
    assert found["parameters"] == sum(x.size for name, x in arrays.items() if name.startswith("parameters"))
    assert found["implementations"] == {"chunked": "chunked"}
    assert "commit" in found


def test_a_finished_run_says_so_and_changes_nothing(recipe, run_dir, capsys):
    before = contents(run_dir)
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 7) == 0
    assert f"{run_dir} is finished: step 7. Set more train.steps" in capsys.readouterr().err
    assert contents(run_dir) == before


@pytest.mark.thorough
def test_more_steps_go_on_from_the_end(recipe, run_dir):
    before = small_run.lines(run_dir)
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 9) == 0
    found = small_run.lines(run_dir)
    assert found[: len(before)] == before
    assert [(line["split"], line["step"]) for line in found[len(before):]] == [("train", 8), ("train", 9), ("val", 9)]


def test_the_times_of_a_run_that_shared_its_device_stay_marked(recipe, run_dir):
    assert read_environment(run_dir)["shared_device"] is False
    add_to_environment(run_dir, shared_device=True)
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 8) == 0
    assert read_environment(run_dir)["shared_device"] is True


def test_a_run_says_that_it_goes_on_and_does_not_go_back(recipe, run_dir, capsys):
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 8) == 0
    assert f"note: {run_dir} resumes from step 7\n" in capsys.readouterr().err
    before = contents(run_dir)
    message = refused(capsys, 2, recipe, "--run-dir", run_dir, "--train.steps", 5)
    assert f"train.steps is 5; expected at least 8, the step of {run_dir}" in message
    assert contents(run_dir) == before


def test_a_run_that_goes_on_another_way_says_what_changes(recipe, finished, capsys):
    def said(*flags: str) -> str:
        config = train.parse([str(recipe), *flags]).config
        capsys.readouterr()
        assert run_folder.newest_step(config, finished) == (7, False)
        return capsys.readouterr().err.removeprefix(f"note: {finished} resumes from step 7\n")

    assert said("--train.steps", "9", "--optimizer.learning-rate", "0.02", "--optimizer.clip-norm", "None",
                "--train.eval-every", "1", "--optimizer.schedule", "constant") == (
        "note: optimizer.learning_rate is 0.02 now, 0.01 at the last start; optimizer.schedule is constant now, cosine "
        "at the last start; optimizer.clip_norm is None now, 1.0 at the last start; the learning rate of step 8 is "
        "0.02 now, 0.001 at the last start: optimizer.schedule is constant, over 9 steps\n")
    # The warm-up is over.
    assert "warmup_steps" not in said("--train.steps", "70", "--optimizer.warmup-steps", "7")
    assert "optimizer.warmup_steps is 8 now, 0 at the last start" in said(
        "--train.steps", "80", "--optimizer.warmup-steps", "9")


def test_a_finished_run_that_is_extended_says_how_its_learning_rate_changes(recipe, run_dir, capsys):
    def said(*flags: str) -> str:
        config = train.parse([str(recipe), *flags]).config
        capsys.readouterr()
        assert run_folder.newest_step(config, run_dir) == (7, False)
        return capsys.readouterr().err.removeprefix(f"note: {run_dir} resumes from step 7\n")

    # The cosine from 0.01 to 0.001 is at its end after 7 steps of 7, and half-way after 7 of 14.
    assert said("--train.steps", "14") == (
        "note: the learning rate of step 8 is 0.0055 now, 0.001 at the last start: optimizer.schedule is cosine, over "
        "14 steps\n")
    with edited.edited(run_dir / "config.json") as values:
        values["optimizer"]["schedule"] = "constant"
    assert said("--train.steps", "14", "--optimizer.schedule", "constant") == ""


def test_a_run_of_the_earlier_cosine_says_that_it_changes(recipe, run_dir, capsys):
    with edited.edited(run_dir / "config.json") as values:
        values["format"], values["train"]["steps"], values["optimizer"]["warmup_steps"] = 1, 50, 5
    config = train.parse([str(recipe), "--train.steps", "50", "--optimizer.warmup-steps", "5"]).config
    capsys.readouterr()
    run_folder.newest_step(config, run_dir)
    earlier, now = (1e-3 + 9e-3 * (1 + math.cos(math.pi * share)) / 2 for share in (7 / 50, 2 / 45))
    assert capsys.readouterr().err == (
        f"note: {run_dir} resumes from step 7\nnote: optimizer.schedule is cosine now, cosine from step 0 at the last "
        f"start; the learning rate of step 8 is {now:.3g} now, {earlier:.3g} at the last start: optimizer.schedule is "
        "cosine, over 50 steps\n")


def test_a_run_without_an_intact_checkpoint_is_left_as_it_is(recipe, run_dir, capsys):
    for path in (run_dir / "checkpoints").glob("*/SHA256SUMS"):
        path.write_text("x")
    before = contents(run_dir)
    message = refused(capsys, 1, recipe, "--run-dir", run_dir, "--train.steps", 9)
    assert "is truncated or altered" in message
    assert f"{run_dir}: all checkpoints are damaged; move the folder away to start over" in message
    assert contents(run_dir) == before


def test_a_checkpoint_that_cannot_be_read_ends_the_command_and_nothing_is_written(recipe, run_dir, capsys, monkeypatch):
    def unreadable(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = contents(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", unreadable)
        message = refused(capsys, 1, recipe, "--run-dir", run_dir, "--train.steps", 9)
    assert re.search(rf"train\.py: {run_dir}/checkpoints/7/.*: {os.strerror(errno.EIO)}", message)
    assert contents(run_dir) == before


@pytest.mark.thorough
def test_without_run_dir_a_run_is_named_after_recipe_and_attention(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert small_run.run(recipe, "--attention", "chunked,softmax") == 0
    assert small_run.saved_steps(tmp_path / "runs" / "tiny-chunked-softmax") == [2]
    values = json.loads((tmp_path / "runs" / "tiny-chunked-softmax" / "config.json").read_text())
    assert set(values["model"]["modes"]) == {"chunked", "softmax"}


# Modes and forms


@pytest.mark.parametrize(("mode", "form"), [
    ("softmax", "materialised"), ("linear", "recurrent"),
    *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in (
        ("softmax", "blockwise"), ("linear", "parallel"), ("linear", "blockwise"), ("linear", "cumsum")))])
def test_every_form_trains(recipe, tmp_path, mode, form):
    assert small_run.run(recipe, "--attention", mode, f"--model.modes.{mode}.form", form, "--run-dir", tmp_path / "run",
                         "--model.layers", 1) == 0
    assert len(small_run.lines(tmp_path / "run", "train")) == 2
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["implementations"] == {mode: form}


@pytest.mark.thorough
def test_every_mode_trains_as_it_is(recipe, tmp_path):
    """A layer of each mode for language models."""
    modes = attentions.causal_modes()
    assert small_run.run(recipe, "--attention", ",".join(modes), "--run-dir", tmp_path / "run", "--model.layers",
                         len(modes)) == 0
    first, second = small_run.lines(tmp_path / "run", "train")
    assert second["loss"] < first["loss"]
    assert set(json.loads((tmp_path / "run" / "config.json").read_text())["model"]["modes"]) == set(modes)


def test_blocks_are_no_longer_than_the_sequence(recipe, capsys):
    config = train.parse([str(recipe), "--attention", "bigbird,longformer", "--model.modes.bigbird.block-size",
                          "1000"]).config
    modes: dict[str, Any] = config.model.modes
    assert (modes["bigbird"].block_size, modes["longformer"].window) == (32, 32)
    assert "note: model.modes.bigbird.block_size is 32, not 1000: at most model.context" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_chunk_that_changes_the_function_may_not_change(recipe, tmp_path, capsys):
    command = (recipe, "--attention", "local,chunked", "--run-dir", tmp_path / "run")
    assert small_run.run(*command) == 0
    assert small_run.run(*command, "--train.steps", 3, "--model.modes.chunked.chunk-size", 4) == 0
    assert "model.modes.local.block_size" in refused(capsys, 2, *command, "--model.modes.local.block-size", 4)


def test_documents_side_by_side_need_a_mode_that_keeps_them_apart(recipe, tmp_path, capsys):
    message = refused(capsys, 2, recipe, "--run-dir", tmp_path / "run", "--attention", "softmax,bigbird",
                      "--data.packing", "documents")
    assert "data.packing is documents; expected stream: attention mode 'bigbird' cannot separate" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_new_file_is_a_mode_without_another_edit(recipe, tmp_path):
    root = tmp_path / "copy"
    skipped = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__")
    shutil.copytree(small_run.ROOT, root, ignore=skipped)
    (root / "models" / "attention" / "mean.py").write_text('''"""``mean``: the mean of the values so far."""

from dataclasses import dataclass

import jax.numpy as jnp

from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config:
    scale: float = 1.0
    """Factor."""


class Attention(SelfAttention):
    def mix(self, q_BTHD, k_BTHD, v_BTHD, *, x_BTE, causal, segment_ids_BT):
        count_T = jnp.arange(1, v_BTHD.shape[1] + 1)
        return self.config.scale * jnp.cumsum(v_BTHD, axis=1) / count_T[None, :, None, None]
''')
    process = small_run.start(recipe, "--attention", "mean", "--model.modes.mean.scale", 2, "--run-dir",
                              tmp_path / "run",
                              root=root)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(small_run.lines(tmp_path / "run", "train")) == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["modes"] == {"mean": {"scale": 2.0}}


# Bad input


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model.widht", 3], "train.py: unknown flag --model.widht; perhaps you meant --model.width"),
    (["--model.width", "wide"], "train.py: model.width is wide; expected a whole number"),
    (["--lr", "1e-3"], "train.py: unknown flag --lr; perhaps you meant --optimizer.learning-rate"),
    (["--model.positions", "relative"], "model.positions is relative; expected learned, "),
    (["--model.layers", 0], "model.layers is 0; expected at least 1"),
    (["--model.context", 50_000], "model.context is 50000; the"),
    (["--train.steps", 0], "train.steps is 0; expected at least 1"),
    (["--train.batch-size", 2**31 - 1, "--train.accumulate", 2**31 - 2],
     "train.batch_size is 2147483647: a batch of 32 tokens a row needs 274.88 GB of memory, and a device has"),
    (["--model.width", 2**31 - 1, "--model.heads", 1], "model.layers 2, model.heads 1, model.width 2147483647, "
     "model.context 32: the model has 110,680,465,019,930,410,715 parameters, which with their gradients and the"),
    (["--data.dir", "nowhere"], "no token files in nowhere (no meta.json); create them with: python -m"),
    (["--data.tokenizer", "gpt2"], "has tokens of bytes; set data.tok"),
    (["--data.tokenizer", "gpt3"], "gpt3"),
])
def test_what_cannot_be_run_stops_before_any_work(recipe, tmp_path, capsys, arguments, message):
    assert message in refused(capsys, 2, recipe, "--run-dir", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_without_a_recipe_the_usage_is_shown(capsys):
    assert "expected a recipe as the first argument usage: python train.py RECIPE" in refused(capsys, 2)
    assert "expected a recipe" in refused(capsys, 2, "--attention", "softmax")


def test_an_unknown_recipe_is_told_with_those_there_are(capsys):
    message = refused(capsys, 2, "configs/quikstart.py")
    assert message.startswith("train.py: configs/quikstart.py: no such recipe; expected one of configs/")
    assert "configs/quickstart.py" in message


@pytest.mark.thorough
def test_what_is_too_long_is_shortened_with_a_note(recipe, tmp_path, capsys):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--train.steps", 20,
                         "--model.modes.chunked.chunk-size", 64,
                         "--optimizer.warmup-steps", 50, "--train.accumulate", 3, "--model.layers", 1) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: train.accumulate is 2, not 3, which does not divide train.batch_size",
        "note: optimizer.warmup_steps is 2, not 50: at most a tenth of the run",
        "note: model.modes.chunked.chunk_size is 32, not 64: at most model.context"]
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    assert values["train"]["accumulate"] == 2
    assert values["optimizer"]["warmup_steps"] == 2
    assert values["model"]["modes"]["chunked"]["chunk_size"] == 32


@pytest.mark.thorough
def test_a_val_split_smaller_than_a_batch_is_enough(recipe, tmp_path):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--model.context", 500, "--model.layers", 1,
                         "--train.batch-size", 8, "--train.accumulate", 2) == 0
    assert len(small_run.lines(tmp_path / "run", "val")) == 1


@pytest.fixture
def tokens(recipe, tmp_path) -> Path:
    """A copy of the token files."""
    return Path(shutil.copytree(recipe.parent / "tokens", tmp_path / "tokens"))


def test_truncated_token_files_are_named(recipe, tokens, tmp_path, capsys):
    file = tokens / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    message = refused(capsys, 1, recipe, "--run-dir", tmp_path / "run", "--data.dir", tokens)
    assert f"{file}: expected " in message
    assert "delete the folder and prepare it again" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_an_id_beyond_the_vocabulary_is_named(recipe, tokens, tmp_path, capsys):
    file = tokens / "train-00000.bin"
    np.full(file.stat().st_size // 2, 300, "<u2").tofile(file)
    message = refused(capsys, 1, recipe, "--run-dir", tmp_path / "run", "--data.dir", tokens)
    assert f"{file}: the token 300 is beyond the vocabulary of 257 tokens of bytes" in message
    assert small_run.saved_steps(tmp_path / "run") == []


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model.width", 32], "is a run with model.width 16, not 32; choose another run_dir"),
    (["--attention", "softmax"], "is a run with model.attention ['chunked'], not ['softmax']; choose another run_dir"),
    (["--optimizer.name", "radam"], "is a run with optimizer.name adamw, not radam; choose another run_dir"),
    (["--model.width", 32, "--train.seed", 3],
     "is a run with model.width 16, not 32; train.seed 0, not 3; choose another run_dir"),
])
def test_the_run_of_another_model_is_left_alone(recipe, run_dir, capsys, arguments, message):
    before = contents(run_dir)
    assert f"{run_dir} {message}" in refused(capsys, 2, recipe, "--run-dir", run_dir, *arguments)
    assert contents(run_dir) == before


def test_a_folder_that_is_no_run_is_left_alone(recipe, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds other files than a run; choose another" in refused(capsys, 2, recipe, "--run-dir", tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(("change", "said"), [({"format": 3}, "format 3"), (None, "no format version")])
def test_a_run_of_another_format_is_refused_and_left_alone(recipe, run_dir, tmp_path, capsys, change, said):
    import compare
    import convert
    import eval
    import sample

    values = edited.contents(run_dir / "config.json")
    assert values.pop("format") == 2
    (run_dir / "config.json").write_text(json.dumps(values | (change or {})))
    before = contents(run_dir)
    message = f"{run_dir / 'config.json'}: {said}; this version of lineargpt reads formats 1 to 2: use the version that"
    assert message in refused(capsys, 1, recipe, "--run-dir", run_dir)
    assert message in refused(capsys, 1, recipe, "--run-dir", tmp_path / "new", "--init-from", run_dir)
    for command, arguments in ((sample, []), (eval, []), (compare, ["--out", str(tmp_path / "page.html")])):
        assert command.main([str(run_dir), *arguments]) == 1
        assert message in capsys.readouterr().err
    assert convert.main(["export", str(run_dir), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert contents(run_dir) == before
    assert not any((tmp_path / name).exists() for name in ("new", "page.html", "out"))


def test_a_damaged_config_json_is_named(recipe, run_dir, capsys):
    (run_dir / "config.json").write_text("{")
    assert f"{run_dir / 'config.json'} is damaged" in refused(capsys, 1, recipe, "--run-dir", run_dir)


@pytest.mark.parametrize(("place", "code", "message"), [
    ("file", 2, "file is a file; choose another run_dir"),
    ("file/run", 1, "file/run: Not a directory; choose another run_dir"),
])
def test_a_run_dir_that_cannot_be_made_is_named(recipe, tmp_path, capsys, place, code, message):
    (tmp_path / "file").write_text("kept")
    assert message in refused(capsys, code, recipe, "--run-dir", tmp_path / place)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.thorough
def test_a_full_disk_ends_in_one_message_and_loses_nothing(recipe, run_dir):
    before = small_run.arrays(run_dir, 7)
    # No file may grow past 16 kB: lines fit, the parameters do not.
    process = small_run.start(recipe, "--run-dir", run_dir, "--train.steps", 9,
                              under=("bash", "-c", 'ulimit -f 16; exec "$0" "$@"'))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert f"the checkpoint of step 9 could not be written to {run_dir / 'checkpoints'}; check its free space" in errors
    assert 7 in small_run.saved_steps(run_dir)
    after = small_run.arrays(run_dir, 7)
    assert all((after[name] == before[name]).all() for name in before)
    # With room again, the same command goes on.
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 9) == 0
    assert [line["step"] for line in small_run.lines(run_dir, "train")] == list(range(1, 10))


def test_two_processes_do_not_train_in_one_folder(recipe, run_dir, capsys):
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is training in it" in refused(capsys, 1, recipe, "--run-dir", run_dir)


@pytest.mark.parametrize(("make", "said"), [
    (lambda folder: folder.symlink_to("nowhere"), "checkpoints is a link to nowhere, which does not exist; mount its"),
    (lambda folder: folder.touch(), "checkpoints is a file; expected a folder: move it away"),
])
def test_checkpoints_that_could_not_be_written_are_refused_at_the_start(recipe, finished, tmp_path, capsys, make, said):
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "config.json", tmp_path / "run")
    shutil.copy(finished / "environment.json", tmp_path / "run")
    make(tmp_path / "run" / "checkpoints")
    before = contents(tmp_path / "run")
    assert said in refused(capsys, 1, recipe, "--run-dir", tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_checkpoints_on_a_read_only_disk_are_refused_before_anything_is_written(recipe, run_dir, capsys, monkeypatch):
    before = contents(run_dir)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "checkpoints")
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 7) == 0  # finished
    message = refused(capsys, 1, recipe, "--run-dir", run_dir, "--train.steps", 9)
    assert f"{run_dir / 'checkpoints'} cannot be written; check its permissions" in message
    assert contents(run_dir) == before


def test_a_run_dir_that_is_not_utf_8_is_refused_at_the_start(recipe, tmp_path, capsys):
    run_dir = tmp_path / os.fsdecode(b"caf\xe9")
    said = "caf\\xe9' is not UTF-8, which checkpoints require; rename the folder, or choose another"
    assert said in refused(capsys, 2, recipe, "--run-dir", run_dir)
    assert not run_dir.exists()


def test_a_run_in_a_folder_that_is_not_utf_8_is_not_of_another_model(run_dir, tmp_path, capsys):
    import sample

    assert sample.main([str(run_dir.rename(tmp_path / os.fsdecode(b"caf\xe9"))), "--prompt", "a"]) == 2
    assert "caf\\xe9/checkpoints' is not UTF-8, which checkpoints require" in capsys.readouterr().err


def test_a_lock_that_is_a_link_or_missing_from_the_file_system_is_told(recipe, tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "run" / ".lock").symlink_to("../thesis.tex")
    command = (recipe, "--run-dir", tmp_path / "run")
    assert f"{tmp_path / 'run' / '.lock'} is a symbolic link" in refused(capsys, 1, *command)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"

    def without_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    (tmp_path / "run" / ".lock").unlink()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert f"{tmp_path / 'run'} is on a file system without locks (Function not implemented)" in refused(
        capsys, 1, *command)


def test_help_lists_the_fields_and_the_options_of_the_modes(recipe, capsys):
    assert small_run.run(recipe, "--attention", "linear", "--help") == 0
    out = capsys.readouterr().out
    for flag in ("--model.width", "--train.steps", "--mesh.fsdp", "--model.modes.linear.form", "--attention MODE"):
        assert flag in out


# Going on only as the same run


@pytest.mark.parametrize(("flag", "value", "named"), [
    ("--model.modes.chunked.feature-map", "relu", "model.modes.chunked.feature_map"),
    ("--train.seed", 1, "train.seed"),
    ("--train.batch-size", 2, "train.batch_size"),
])
def test_a_run_does_not_go_on_as_another(recipe, run_dir, capsys, flag, value, named):
    before = contents(run_dir)
    errors = refused(capsys, 2, recipe, "--run-dir", run_dir, "--train.steps", 4, flag, value)
    assert named in errors
    assert "--run-dir" in errors
    assert contents(run_dir) == before


@pytest.mark.thorough
def test_a_run_goes_on_computed_another_way(recipe, run_dir):
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 8, "--model.modes.chunked.chunk-size", 8) == 0
    assert [line["step"] for line in small_run.lines(run_dir, "train")] == list(range(1, 9))


def test_a_run_does_not_go_on_with_other_tokens(recipe, run_dir, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("another text altogether\n" * 200)
    prepare(str(tmp_path / "other.txt"), "bytes", tmp_path / "other", progress=False)
    assert "another corpus" in refused(capsys, 2, recipe, "--run-dir", run_dir, "--train.steps", 4,
                                       "--data.dir", tmp_path / "other")


@pytest.mark.thorough
def test_a_folder_in_which_nothing_was_begun_is_taken(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert small_run.run(recipe, "--run-dir", tmp_path / "run") == 0


@pytest.mark.thorough
def test_a_finished_run_with_damaged_parameters_is_finished_again(recipe, finished, run_dir, capsys):
    """Only its position is intact, and says that all seven steps are done."""
    step = max(small_run.saved_steps(run_dir))
    largest = max((run_dir / "checkpoints" / str(step) / "parameters").rglob("*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 7) == 0
    assert "note: skipping the damaged checkpoint" in capsys.readouterr().err
    straight = small_run.arrays(finished, 7)
    assert all(np.array_equal(x, straight[name]) for name, x in small_run.arrays(run_dir, 7).items())
    assert [line["step"] for line in small_run.lines(run_dir, "train")] == list(range(1, 8))


def test_a_kernel_that_this_device_lacks_stops_before_any_work(recipe, tmp_path, capsys):
    assert "NVIDIA GPU" in refused(capsys, 2, recipe, "--run-dir", tmp_path / "run", "--attention", "softmax",
                                   "--model.modes.softmax.form", "cudnn")
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_fails_is_named(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def get_config(attention='chunked'):\n    return 1 / 0\n")
    errors = refused(capsys, 2, tmp_path / "broken.py")
    assert "broken.py" in errors
    assert "ZeroDivisionError" in errors


@pytest.mark.parametrize("damage", ["{", "[1]"])
def test_a_damaged_environment_json_is_named(recipe, run_dir, capsys, damage):
    (run_dir / "environment.json").write_text(damage)
    assert f"{run_dir / 'environment.json'} is damaged" in refused(capsys, 1, recipe, "--run-dir", run_dir)


# Beginning with another run's parameters


@pytest.fixture(scope="module")
def softmax_run(recipe, tmp_path_factory) -> Path:
    """A softmax run of two steps, read-only."""
    folder = tmp_path_factory.mktemp("softmax") / "run"
    assert small_run.run(recipe, "--attention", "softmax", "--run-dir", folder) == 0
    return folder


@pytest.mark.parametrize("reset", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_linear_run_begins_with_softmax_parameters(recipe, softmax_run, tmp_path, capsys, reset):
    flags = ["--init-from.reset", "attention"] if reset else []
    assert small_run.run(recipe, "--attention", "chunked", "--run-dir", tmp_path / "run", "--init-from", softmax_run,
                         *flags) == 0
    said = next(line for line in capsys.readouterr().err.splitlines() if "init_from" in line)
    assert said.startswith(f"note: init_from {softmax_run}, step 2: loaded: ")
    taken, new = said.split("; new: ")
    assert "token_embedding" in taken
    assert "optimizer state, step and clocks" in new
    assert ("attention.query" in new, "attention.query" in taken) == (reset, not reset)

    source, begun = small_run.arrays(softmax_run, 2), small_run.arrays(tmp_path / "run", 0)
    parameters = [name for name in source if name.startswith("parameters")]
    assert parameters == [name for name in begun if name.startswith("parameters")]
    for name in parameters:
        if reset and "['attention']" in name and name.endswith("['kernel']"):
            assert np.any(begun[name] != source[name]), name
        elif not (reset and "['attention']" in name):
            np.testing.assert_array_equal(begun[name], source[name], err_msg=name)
    for name in begun:
        if name.startswith("optimizer"):
            assert not np.any(begun[name]), name
    assert [line["step"] for line in small_run.lines(tmp_path / "run", "train")] == [1, 2]
    origin = json.loads((tmp_path / "run" / "environment.json").read_text())["init_from"]
    assert origin == {"run": str(softmax_run), "step": 2, "reset": "attention" if reset else None}


@pytest.mark.thorough
def test_what_a_mode_has_in_another_shape_is_new_and_said(recipe, softmax_run, tmp_path, capsys):
    gated = ["--attention", "gated", "--run-dir"]
    assert small_run.run(recipe, *gated, tmp_path / "four", "--init-from", softmax_run) == 0
    said = capsys.readouterr().err
    assert "; new: attention.decay, attention.decay.log_rate_H, attention.gate, attention.key_taps_KF, " in said
    assert "attention.query" in said.split("; new: ")[0]
    assert small_run.run(recipe, *gated, tmp_path / "three", "--init-from", tmp_path / "four",
                         "--model.modes.gated.short-conv", 3) == 0
    said = capsys.readouterr().err
    assert said.splitlines()[0].endswith(
        "; of another shape: attention.key_taps_KF, attention.query_taps_KF, attention.value_taps_KF")
    four, three = small_run.arrays(tmp_path / "four", 2), small_run.arrays(tmp_path / "three", 0)
    same = [name for name in four if name.startswith("parameters") and "taps" not in name]
    assert any("['gate']" in name for name in same)
    for name in same:
        np.testing.assert_array_equal(three[name], four[name], err_msg=name)


@pytest.mark.thorough
def test_the_same_mode_begins_at_the_loss_the_other_run_ended_with(recipe, finished, tmp_path):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--init-from", finished, "--train.steps", 1,
                         "--optimizer.learning-rate", 1e-12, "--train.eval-every", 1) == 0
    assert small_run.lines(tmp_path / "run", "val")[0]["loss"] == pytest.approx(
        small_run.lines(finished, "val")[-1]["loss"], rel=1e-5)


@pytest.mark.thorough
def test_a_run_that_has_begun_ignores_init_from_and_says_so(recipe, softmax_run, run_dir, capsys):
    straight = contents(run_dir / "checkpoints" / "7")
    assert small_run.run(recipe, "--run-dir", run_dir, "--train.steps", 8, "--init-from", softmax_run) == 0
    assert f"note: init_from {softmax_run} is ignored: {run_dir} resumes" in capsys.readouterr().err
    assert contents(run_dir / "checkpoints" / "7") == straight
    assert [line["step"] for line in small_run.lines(run_dir, "train")] == list(range(1, 9))
    assert "init_from" not in json.loads((run_dir / "environment.json").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_remembers_what_it_began_with_and_is_the_uninterrupted_one(recipe, softmax_run, tmp_path,
                                                                                 optimizer):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    # A rate that does not depend on the steps.
    flags = ("--optimizer.name", optimizer, "--optimizer.final-fraction", 1)
    start = ("--init-from", softmax_run, *flags)
    assert small_run.run(recipe, "--run-dir", straight, "--train.steps", 4, *start) == 0
    assert small_run.run(recipe, "--run-dir", resumed, "--train.steps", 2, *start) == 0
    assert small_run.run(recipe, "--run-dir", resumed, "--train.steps", 4, *flags) == 0
    begun, source = small_run.arrays(straight, 0), small_run.arrays(softmax_run, 2)
    assert all(np.array_equal(begun[name], source[name]) for name in source if name.startswith("parameters"))
    expected, actual = small_run.arrays(straight, 4), small_run.arrays(resumed, 4)
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)
    assert json.loads((resumed / "environment.json").read_text())["init_from"]["run"] == str(softmax_run)


@pytest.mark.thorough
def test_a_shorter_context_takes_the_first_positions(recipe, softmax_run, tmp_path, capsys):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--init-from", softmax_run, "--model.context", 16) == 0
    assert "the first 16 of 32 positions" in capsys.readouterr().err
    name = "parameters['position_embedding']['embedding']"
    positions, longer = small_run.arrays(tmp_path / "run", 0)[name], small_run.arrays(softmax_run, 2)[name]
    np.testing.assert_array_equal(positions, longer[:16])


@pytest.mark.thorough
@pytest.mark.parametrize(("arguments", "message"), [
    (["--model.width", 32], "has shape (16,) there and (32,) here; model.width is 16 there and 32 here"),
    (["--model.layers", 3], "no parameter blocks.2.attention_norm.bias, which this model has; model.layers is 2 there"),
    (["--model.layers", 1], "is not in this model; model.layers is 2 there and 1 here"),
    (["--model.head-width", 4], "has shape (16,) there and (8,) here; model.head_width is 8 there and 4 here"),
    (["--model.heads", 4], "the attention heads differ; model.heads is 2 there and 4 here"),
    (["--model.positions", "rotary"], "model.positions is learned there and rotary here"),
    (["--model.context", 64], "position_embedding.embedding has shape (32, 16) there and (64, 16) here: model.context "
                              "is 64; expected at most the 32 learned positions there"),
])
def test_a_run_whose_shapes_disagree_is_refused(recipe, softmax_run, tmp_path, capsys, arguments, message):
    said = refused(capsys, 2, recipe, "--run-dir", tmp_path / "run", "--init-from", softmax_run, *arguments)
    assert f"init_from {softmax_run}: " in said
    assert message in said
    assert not (tmp_path / "run").exists()


def test_a_config_that_cannot_be_run_is_compared_with_the_run_of_its_weights(recipe, finished, tmp_path, capsys):
    flags = ("--model.positions", "rotary", "--model.heads", 16)  # widths of 1, which rotary positions cannot have
    message = refused(capsys, 2, recipe, *flags, "--init-from", finished, "--run-dir", tmp_path / "run")
    assert ("the head width 1; expected an even head width; init_from "
            f"{finished}: model.heads is 2 there and 16 here; model.positions is learned there and rotary here; "
            "model.head_width is 8 there and 1 here") in message
    message = refused(capsys, 2, recipe, *flags, "--init-from", tmp_path / "nowhere")
    assert "expected an even head width (--model.positions)" in message


def test_what_another_process_began_meanwhile_is_read_under_the_lock(recipe, finished, tmp_path, capsys, monkeypatch):
    locked = run_folder.locked

    @contextlib.contextmanager
    def after_another(run_dir):
        with locked(run_dir):
            shutil.copy(finished / "config.json", run_dir)
            values = edited.contents(finished / "environment.json") | {"init_from": {"run": "theirs"}}
            (run_dir / "environment.json").write_text(json.dumps(values))
            yield

    monkeypatch.setattr(run_folder, "locked", after_another)
    assert "was started with init_from theirs and has no intact checkpoint" in refused(
        capsys, 2, recipe, "--run-dir", tmp_path / "run")


def test_init_from_what_is_no_run_is_refused(recipe, tmp_path, capsys):
    assert "there is no such folder" in refused(capsys, 2, recipe, "--run-dir", tmp_path / "run",
                                                "--init-from", tmp_path / "nowhere")
    assert "--init-from.reset requires --init-from RUN" in refused(capsys, 2, recipe, "--run-dir", tmp_path / "run",
                                                 "--init-from.reset", "attention")
    assert not (tmp_path / "run").exists()


# Mixed stacks


@pytest.mark.thorough
def test_a_mixed_stack_trains_checkpoints_resumes_samples_and_is_in_the_report(recipe, tmp_path, capsys):
    import compare
    import sample

    run = tmp_path / "run"
    flags = ("--attention", "chunked,chunked,chunked,softmax", "--model.layers", 4, "--run-dir", run)
    assert small_run.run(recipe, *flags) == 0
    assert small_run.run(recipe, *flags, "--train.steps", 3) == 0
    assert [line["step"] for line in small_run.lines(run, "train")] == [1, 2, 3]
    assert small_run.saved_steps(run) == [2, 3]
    implementations = json.loads((run / "environment.json").read_text())["implementations"]
    assert set(implementations) == {"chunked", "softmax"}
    capsys.readouterr()
    assert sample.main([str(run), "--prompt", "1 times", "--max-new-tokens", "8", "--seed", "0"]) == 0
    assert "step 3, chunked,chunked,chunked,softmax, prompt of 7 tokens" in capsys.readouterr().err
    assert compare.main([str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "chunked,chunked,chunked,softmax" in (tmp_path / "report.html").read_text()


# A batch in tokens


@pytest.mark.parametrize(("size", "rate"), [("124m", 6e-4), ("355m", 3e-4), ("774m", 2.5e-4), ("1558m", 2e-4)])
def test_an_update_of_the_gpt2_recipes_is_as_many_tokens_at_every_context(size, rate):
    for context in (1024, 8192, 65_536):
        config = train.parse([f"{small_run.ROOT}/configs/gpt2_{size}.py", "--model.context", str(context)]).config
        assert config.train.batch_size * context == 2**19
        assert config.optimizer.learning_rate == rate
        assert config.model.modes["chunked"].feature_map == "softplus"


def test_rows_per_device_set_the_accumulation(recipe, capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    flags = [str(recipe), "--train.batch-size", "24", "--train.rows-per-device"]
    assert train.parse([*flags, "3"]).config.train.accumulate == 4
    assert train.parse([*flags, "3", "--mesh.tensor", "2"]).config.train.accumulate == 8
    assert "train.rows_per_device is 5, 10 sequences on 2 devices; expected a divisor of train.batch_size, 24" in (
        refused(capsys, 2, *flags, "5"))


def test_a_batch_in_sequences_goes_before_one_in_tokens(recipe, capsys):
    config = train.parse([str(recipe), "--train.batch-size", "0", "--train.batch-tokens", "100"]).config
    assert config.train.batch_size == 3  # of 32 tokens
    config = train.parse([str(recipe), "--train.batch-size", "5", "--train.batch-tokens", "100"]).config
    assert (config.train.batch_size, config.train.batch_tokens) == (5, None)
    assert "train.batch_tokens 100 is ignored, as train.batch_size is 5" in capsys.readouterr().err
    config = train.parse([str(recipe), "--train.batch-size", "1", "--train.batch-tokens", "31"]).config
    assert config.train.batch_size == 1
    assert "train.batch_tokens is 31; expected at least model.context, 32" in refused(
        capsys, 2, recipe, "--train.batch-size", 0, "--train.batch-tokens", 31)
