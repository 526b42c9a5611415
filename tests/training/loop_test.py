"""Runs that are interrupted, broken or bounded by time."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lineargpt
import sample
from configs.schema import EARLIER_DOCUMENTS, ModelConfig, TrainConfig
from data import tokenizers
from data.documents import Document, write_corpus
from data.verification import Verification
from models.gpt import GPT, resolve_config
from sampling.sampler import Sampler, Sampling
from sampling.samples import SAMPLE_TOKENS, check, sample_text
from sampling.text_stream import TextStream
from support.errors import CheckpointError, ConfigError
from tests import small_run
from training import checkpoint, loop, position
from training.checkpoint import Checkpoints
from training.loading import load_model
from training.metrics import MetricsWriter
from training.objectives import language
from training.signals import collect_signals

STEPS = 40


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory) -> Path:
    """The uninterrupted run, read-only."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", STEPS, "--train.sample-every", 16) == 0
    return folder


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Waits for a condition while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"train.py ended with {process.returncode} before: {process.communicate()[1]}")
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_same_run(folder: Path, straight: Path) -> None:
    """Parameters and optimizer state are equal bit for bit, and every step is logged once with the same metrics."""
    expected, found = small_run.arrays(straight, STEPS), small_run.arrays(folder, STEPS)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    figures = ("step", "tokens", "loss", "learning_rate", "gradient_norm")
    assert ([[line[name] for name in figures] for line in small_run.lines(folder, "train")]
            == [[line[name] for name in figures] for line in small_run.lines(straight, "train")])


def assert_clocks_go_on(folder: Path) -> None:
    clocks = np.array([[line["train_seconds"], line["wall_seconds"]] for line in small_run.lines(folder)])
    assert (np.diff(clocks, axis=0) >= 0).all()
    assert (clocks[:, 0] < clocks[:, 1]).all()


@pytest.mark.thorough
def test_a_run_killed_three_times_equals_the_run_that_was_not(recipe, straight, tmp_path):
    folder = tmp_path / "run"
    command = (recipe, "--run-dir", folder, "--train.steps", STEPS, "--checkpoint.every-steps", 1)

    def at_step(step: int) -> bool:
        return len(small_run.lines(folder, "train")) >= step

    def saving() -> bool:
        # The checkpoint after step 12 is partly written, and not renamed yet.
        return at_step(12) and any((folder / "checkpoints" / "unfinished").glob("*/*"))

    for moment in (lambda: at_step(5), saving, lambda: at_step(22)):
        process = small_run.start(*command)
        wait_for(moment, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert max(small_run.saved_steps(folder)) < STEPS
    assert small_run.run(*command) == 0
    assert_same_run(folder, straight)
    assert [line["step"] for line in small_run.lines(folder, "val")] == [10, 20, 30, 40]
    assert_clocks_go_on(folder)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(recipe, straight, tmp_path, number):
    folder = tmp_path / "run"
    # Long evaluations, so that the run is not finished before the signal arrives.
    command = (recipe, "--run-dir", folder, "--train.steps", STEPS, "--train.eval-every", 1, "--train.eval-batches", 50)
    process = small_run.start(*command)
    wait_for(lambda: len(small_run.lines(folder, "train")) >= 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    last = small_run.lines(folder, "train")[-1]["step"]
    assert 3 <= last < STEPS
    assert small_run.saved_steps(folder)[-1] == last
    assert f"{folder}: stopped and saved at step {last}; repeat the command to resume" in errors
    wall_seconds = small_run.lines(folder)[-1]["wall_seconds"]

    assert small_run.run(*command) == 0
    assert_same_run(folder, straight)
    assert_clocks_go_on(folder)
    # The time until the first line of the second part counts too.
    assert small_run.lines(folder, "train")[last]["wall_seconds"] > wall_seconds


def test_a_signal_is_heard_though_nobody_can_be_told(monkeypatch):
    error, (reader, closed) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(closed, 2)
    try:
        with collect_signals() as received:
            signal.raise_signal(signal.SIGINT)
            assert received.first == signal.SIGINT
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(closed)


def test_the_end_of_the_terminal_stops_a_run_however_often_it_is_told():
    with collect_signals() as received:
        for _ in range(3):  # the system and the shell send it
            signal.raise_signal(signal.SIGHUP)
        assert received.first == signal.SIGHUP


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collect_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received.first is None
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.thorough
def test_ctrl_c_saves_a_run_whose_output_nobody_reads(recipe, tmp_path):
    folder = tmp_path / "run"
    process = small_run.start(recipe, "--run-dir", folder, "--train.steps", STEPS, "--train.eval-every", 1,
                              "--train.eval-batches", 50)
    wait_for(lambda: len(small_run.lines(folder, "train")) >= 3, process)
    for stream in (process.stdout, process.stderr):  # as where tee ends first
        assert stream is not None
        stream.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert small_run.saved_steps(folder)[-1] == small_run.lines(folder, "train")[-1]["step"]


def test_a_signal_ends_an_evaluation_and_the_same_command_makes_up_for_it(recipe, tmp_path):
    folder = tmp_path / "run"
    with small_run.before_line(1, lambda: signal.raise_signal(signal.SIGTERM)):  # while step 2, the last, is running
        assert small_run.run(recipe, "--run-dir", folder) == 128 + signal.SIGTERM
    assert small_run.lines(folder, "val") == []
    assert small_run.saved_steps(folder) == [2]
    assert small_run.run(recipe, "--run-dir", folder) == 0
    assert [line["step"] for line in small_run.lines(folder, "val")] == [2]
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.best() == 2  # the checkpoint has the loss now
    assert small_run.run(recipe, "--run-dir", folder) == 0  # now it is finished
    assert len(small_run.lines(folder)) == 3


def test_a_step_in_which_the_process_was_stopped_is_not_training_time(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    with small_run.before_line(1, lambda: signal.raise_signal(signal.SIGCONT)):
        assert small_run.run(recipe, "--run-dir", folder, "--train.steps", 3) == 0
    times = [line["train_seconds"] for line in small_run.lines(folder, "train")]
    assert times[0] == times[1] < times[2]
    assert re.search(r"note: step 2: the process was stopped and continued; its \d+\.\d s count as wall time, not as "
                     "training time", capsys.readouterr().err)


def test_a_start_reads_each_file_of_a_checkpoint_once_to_verify_it(recipe, tmp_path, monkeypatch):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run") == 0
    read, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest",
                        lambda file, name: (read.append(Path(file.name)), digest(file, name))[1])
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--train.steps", 3) == 0
    before = [path for path in read if path.is_relative_to(tmp_path / "run" / "checkpoints" / "2")]
    assert before
    assert len(before) == len(set(before))


def fail_saves(monkeypatch, count: int) -> list[int]:
    """Makes the first saves fail, once their files are written. Returns the steps of those so far."""
    failed, sync = list[int](), checkpoint.sync

    def full(written):
        if len(failed) < count:
            failed.append(int(written.name))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(written))
        sync(written)

    monkeypatch.setattr(checkpoint, "sync", full)
    return failed


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_save_is_tried_once_more_at_the_next_step(recipe, tmp_path, capsys, monkeypatch, failures):
    def failure(self):  # the save has ended when the next step looks
        with contextlib.suppress(CheckpointError):
            return self.wait()
        return CheckpointError("the checkpoint of step 3 could not be written.")

    folder, failed = tmp_path / "run", fail_saves(monkeypatch, failures)
    monkeypatch.setattr(Checkpoints, "failure", failure)
    code = small_run.run(recipe, "--run-dir", folder, "--train.steps", 6, "--checkpoint.every-steps", 3)
    printed = capsys.readouterr().err
    assert "the checkpoint of step 3 could not be written. Trying once more." in " ".join(printed.split())
    if failures == 1:
        assert (code, small_run.saved_steps(folder)) == (0, [4, 6])
    else:
        assert (code, failed, small_run.saved_steps(folder)) == (1, [3, 4], [])


@pytest.mark.parametrize("then", ["the end", "a signal", "an error of the call"])
def test_a_failed_save_is_tried_once_more_whatever_comes_next(recipe, tmp_path, monkeypatch, then):
    folder, failed, save = tmp_path / "run", list[int](), Checkpoints.save

    def fail_once(self, step, items, **options):
        if not failed:
            failed.append(step)
            raise CheckpointError(f"the checkpoint of step {step} could not be written.")
        save(self, step, items, **options)

    if then == "an error of the call":
        monkeypatch.setattr(Checkpoints, "save", fail_once)
    else:
        failed = fail_saves(monkeypatch, 1)
    if then == "a signal":
        moving(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGTERM))
    steps = 4 if then == "a signal" else 2
    code = small_run.run(recipe, "--run-dir", folder, "--train.steps", steps, "--checkpoint.every-steps", 2)
    assert (code, failed, small_run.saved_steps(folder)) == (143 if then == "a signal" else 0, [2], [2])


def test_a_signal_ends_the_wait_for_the_verification_of_a_finished_run(recipe, tmp_path, monkeypatch):
    def wait(self, seconds=None):
        assert seconds is not None  # else it would wait until all is verified
        signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(Verification, "wait", wait)
    assert small_run.run(recipe, "--run-dir", tmp_path / "run") == 0
    assert small_run.saved_steps(tmp_path / "run") == [2]


@pytest.mark.parametrize(("flags", "code"), [((), 1), (("--data.no-verify",), 0)])
def test_a_damaged_corpus_ends_the_first_start_before_anything_is_saved(tmp_path, capsys, flags, code):
    (shard,) = small_run.make(tmp_path).parent.glob("tokens/train-*.bin")
    tokens = np.fromfile(shard, np.uint16)
    tokens[10:20] = tokens[20:30]
    tokens.tofile(shard)
    folder = tmp_path / "run"
    assert small_run.run(tmp_path / "tiny.py", "--run-dir", folder, *flags) == code
    if code:
        assert f"{shard} does not match its checksum" in "".join(capsys.readouterr().err.split("\n")).replace("  ", " ")
        assert small_run.saved_steps(folder) == []
    else:
        assert small_run.saved_steps(folder) == [2]


def test_a_resumed_run_verifies_what_the_first_start_did_not(tmp_path, capsys, monkeypatch):
    def wait(self, seconds=None):
        signal.raise_signal(signal.SIGTERM)  # before all files were read
        return False

    (shard,) = small_run.make(tmp_path).parent.glob("tokens/train-*.bin")
    command = (tmp_path / "tiny.py", "--run-dir", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(language.LanguageModelling, "verify", lambda self: None)
        patch.setattr(Verification, "wait", wait)
        assert small_run.run(*command) == 0
    tokens = np.fromfile(shard, np.uint16)
    tokens[10:20] = tokens[20:30]
    tokens.tofile(shard)
    capsys.readouterr()
    assert small_run.run(*command, "--train.steps", 4) == 1
    assert f"{shard} does not match its checksum" in "".join(capsys.readouterr().err.split("\n")).replace("  ", " ")
    assert small_run.saved_steps(tmp_path / "run") == [2]


def test_the_last_evaluation_comes_before_the_last_checkpoint(recipe, tmp_path, monkeypatch):
    # A run killed between the two would otherwise count as finished and never get its val line.
    def killed(self, step, *_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", killed)
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--checkpoint.every-steps", 2) == 130
    assert [line["step"] for line in small_run.lines(tmp_path / "run", "val")] == [2]


def test_a_run_bounded_by_time_ends_at_its_time_and_is_finished(recipe, tmp_path, capsys, monkeypatch):
    folder, clock = tmp_path / "run", itertools.count(1000 * round(time.perf_counter() + 60))  # after the start
    monkeypatch.setattr(position, "time", types.SimpleNamespace(perf_counter=lambda: next(clock) / 1000))
    command = (recipe, "--run-dir", folder, "--train.steps", "None", "--train.minutes", 0.003)
    assert small_run.run(*command) == 0
    found = small_run.lines(folder, "train")
    assert found[-1]["train_seconds"] >= 0.18
    # The known time is that of the step before the last one dispatched.
    assert all(line["train_seconds"] < 0.18 for line in found[:-2])
    rates = [line["learning_rate"] for line in found]
    assert max(rates) > 2 * rates[-1]  # the cosine follows the fraction of time
    assert small_run.lines(folder)[-1]["split"] == "val"
    assert small_run.saved_steps(folder)[-1] == found[-1]["step"]
    assert small_run.run(*command) == 0
    assert "is finished" in capsys.readouterr().err
    assert small_run.lines(folder, "train") == found


def moving(monkeypatch, step: int, move: Callable[[], object]) -> None:
    """Makes something happen to the run folder once the line of a step is written."""
    write = MetricsWriter.write

    def and_move(self, record):
        write(self, record)
        if (record["split"], record["step"]) == ("train", step):
            move()

    monkeypatch.setattr(MetricsWriter, "write", and_move)


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.thorough), 10])
def test_a_run_whose_folder_is_renamed_is_saved_there(recipe, tmp_path, capsys, monkeypatch, every):
    """Noticed at the save of a step, and between two steps."""
    folder, there = tmp_path / "run", tmp_path / "renamed"
    moving(monkeypatch, 2, lambda: folder.rename(there))
    command = (recipe, "--train.steps", 6, "--checkpoint.every-steps", every)
    assert small_run.run(*command, "--run-dir", folder) == 1
    last = 2 if every == 2 else 3
    assert (f"{folder} was renamed to {there} while it trained. Step {last} is saved in {there}; repeat the command "
            f"with run_dir {there} to resume") in capsys.readouterr().err
    assert not folder.exists()
    assert small_run.saved_steps(there) == [last]
    assert [line["step"] for line in small_run.lines(there, "train")] == [*range(1, last + 1)]
    monkeypatch.undo()
    assert small_run.run(*command, "--run-dir", there) == 0
    assert [line["step"] for line in small_run.lines(there, "train")] == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_folder_is_deleted_is_saved_beside_it(recipe, tmp_path, capsys, monkeypatch):
    folder, there = tmp_path / "runs" / "run", tmp_path / "runs" / "run.deleted-while-training"

    def replace():  # by another one of the same name
        shutil.rmtree(folder.parent)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("of another run")

    moving(monkeypatch, 2, replace)
    command = (recipe, "--train.steps", 6)
    assert small_run.run(*command, "--run-dir", folder) == 1
    assert (f"{folder} was deleted, or moved to another file system, while it trained. Step 3 is saved in {there}; "
            f"repeat the command with run_dir {there} to resume") in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == "of another run"
    monkeypatch.undo()
    assert small_run.run(*command, "--run-dir", there) == 0
    assert [line["step"] for line in small_run.lines(there, "train")] == [1, 2, 3, 4, 5, 6]
    assert small_run.saved_steps(there) == [3, 6]


@pytest.mark.thorough
def test_a_run_that_cannot_be_saved_elsewhere_says_what_happened(recipe, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "runs" / "run"

    def replace():
        shutil.rmtree(folder.parent)
        folder.parent.touch()  # a file, in which no folder can be made

    moving(monkeypatch, 1, replace)
    assert small_run.run(recipe, "--run-dir", folder) == 1
    assert (f"train.py: {folder} was deleted or renamed while it trained, and step 2 cannot be saved elsewhere: "
            in capsys.readouterr().err)


@pytest.mark.thorough
@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_metrics_are_taken_away_keeps_its_lines(recipe, tmp_path, capsys, monkeypatch, replaced):
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"

    def take_away():
        metrics.unlink()
        if replaced:
            metrics.write_text("edited")

    moving(monkeypatch, 1, take_away)
    assert small_run.run(recipe, "--run-dir", folder) == 1
    kept = folder / ("metrics.jsonl.1" if replaced else "metrics.jsonl")
    assert [json.loads(line)["step"] for line in kept.read_text().splitlines()] == [1, 2]
    happened = f"{metrics} was {'replaced' if replaced else 'deleted'} while it trained"
    assert f"{happened}. Step 2 is saved in {folder}; " in capsys.readouterr().err
    assert small_run.saved_steps(folder) == [2]
    assert not replaced or metrics.read_text() == "edited"


@pytest.mark.thorough
def test_a_run_whose_folder_goes_during_a_save_is_saved_beside_it(recipe, tmp_path, monkeypatch):
    folder, sync = tmp_path / "run", checkpoint.sync

    def deleted(written):
        if written.is_relative_to(folder):
            shutil.rmtree(folder)
            (written / "parameters").mkdir(parents=True)  # as Orbax does
        sync(written)

    monkeypatch.setattr(checkpoint, "sync", deleted)
    assert small_run.run(recipe, "--run-dir", folder) == 1
    assert small_run.saved_steps(tmp_path / "run.deleted-while-training") == [2]
    lines = small_run.lines(tmp_path / "run.deleted-while-training")
    assert [line["split"] for line in lines] == ["train", "train", "val"]
    assert not folder.exists()


def test_a_run_whose_config_is_deleted_writes_it_again(recipe, tmp_path, capsys, monkeypatch):
    folder, before = tmp_path / "run", []

    def take_away():
        before.append((folder / "config.json").read_bytes())
        (folder / "config.json").unlink()

    moving(monkeypatch, 1, take_away)
    assert small_run.run(recipe, "--run-dir", folder) == 0
    assert f"note: {folder}: config.json was deleted; a copy is in its place" in capsys.readouterr().err
    assert (folder / "config.json").read_bytes() == before[0]


@pytest.mark.parametrize("kept", ["samples", "metrics.jsonl"])
def test_a_run_whose_checkpoints_are_gone_is_left_as_it_is(recipe, straight, tmp_path, capsys, kept):
    folder = Path(shutil.copytree(straight, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    other = folder / ("metrics.jsonl" if kept == "samples" else "samples")
    shutil.move(other, tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    capsys.readouterr()
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", STEPS) == 1
    named = f"{folder / 'metrics.jsonl'} (up to step {STEPS})" if kept == "metrics.jsonl" else str(folder / "samples")
    assert f"{folder} has no checkpoints, but it has {named} from before. If the checkpoints were moved" in (
        capsys.readouterr().err)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(recipe, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"

    def killed(self, step, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        assert small_run.run(recipe, "--run-dir", folder) == 130
    assert small_run.run(recipe, "--run-dir", folder) == 0
    assert f"note: {folder} ended at step 2, before its first checkpoint; it starts from the" in capsys.readouterr().err
    assert [line["step"] for line in small_run.lines(folder, "train")] == [1, 2]
    shutil.rmtree(folder / "checkpoints")  # now it has had one
    assert small_run.run(recipe, "--run-dir", folder) == 1
    assert [line["step"] for line in small_run.lines(folder, "train")] == [1, 2]


def test_lines_are_on_disk_before_the_checkpoint_has_its_name(recipe, tmp_path, monkeypatch):
    happened, folder = [], tmp_path / "run"
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor):
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda self, to: (happened.append(Path(to)), rename(self, to))[1])
    assert small_run.run(recipe, "--run-dir", folder) == 0
    lines = happened.index(folder / "metrics.jsonl")
    assert happened[lines + 1] == folder
    assert lines < happened.index(folder / "checkpoints" / "2")
    assert folder / "metrics.jsonl" not in happened[lines + 1:]


@pytest.mark.thorough
def test_both_bounds_stop_at_the_first(recipe, tmp_path):
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--train.steps", 3, "--train.minutes", 60) == 0
    assert len(small_run.lines(tmp_path / "run", "train")) == 3


@pytest.mark.thorough
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", 4, "--checkpoint.every-steps", 2) == 0
    saved = small_run.arrays(folder, 4)
    capsys.readouterr()
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", 30, "--checkpoint.every-steps", 7,
                         "--optimizer.learning-rate", 1e30) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    last = small_run.lines(folder, "train")[-1]["step"]
    assert f"step {last}: the " in err
    assert " is not finite. The last good checkpoint is step 4; try a lower optimizer.learning_rate" in err
    assert small_run.saved_steps(folder) == [2, 4]
    for name, array in small_run.arrays(folder, 4).items():
        np.testing.assert_array_equal(array, saved[name])


@pytest.mark.parametrize("flags", [(), *(pytest.param(flags, marks=pytest.mark.thorough)
                                         for flags in (("--checkpoint.every-steps", 1), ("--train.eval-every", 1)))])
def test_a_broken_state_is_neither_saved_nor_called_finished(recipe, tmp_path, capsys, flags):
    folder = tmp_path / "run"
    assert small_run.run(recipe, "--run-dir", folder, "--train.steps", 2, "--optimizer.learning-rate", 1e30,
                         *flags) == 1
    assert "is not finite. There is no checkpoint yet; try a lower" in capsys.readouterr().err
    assert small_run.saved_steps(folder) == []
    assert small_run.lines(folder, "val") == []


@pytest.mark.thorough
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(recipe, straight, tmp_path, capsys):
    folder = tmp_path / "run"
    command = (recipe, "--run-dir", folder, "--train.steps", STEPS, "--train.sample-every", 16)
    assert small_run.run(*command) == 0
    (folder / "samples" / "00000035.txt").write_text("of a step that the run does not come to again")
    for file in (folder / "checkpoints" / str(STEPS)).rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert small_run.run(*command) == 0
    assert re.search(f"note: skipping the damaged checkpoint .*/{STEPS}: ", capsys.readouterr().err)
    assert_same_run(folder, straight)
    assert samples(folder) == samples(straight)


def samples(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "samples").iterdir()}


def test_samples_are_what_the_model_says_after_their_step(straight):
    found = samples(straight)
    assert sorted(found) == ["00000016.txt", "00000032.txt", "00000040.txt"]
    run = load_model(straight)
    end, stream = run.model.vocab_size - 1, TextStream(tokenizers.load("bytes"))
    pieces = Sampler(run.model, end_of_text=end).generate(np.array([end]), Sampling(), max_new_tokens=SAMPLE_TOKENS)
    drawn = "".join(stream.feed(piece_BT[0]) for piece_BT in pieces) + stream.close()
    assert drawn
    assert found["00000040.txt"] == drawn.encode()
    assert found["00000016.txt"] != found["00000040.txt"]


@pytest.mark.thorough
def test_the_time_of_samples_is_not_training_and_logs_get_every_line(recipe, tmp_path, monkeypatch):
    clock, logged = itertools.count(round(time.perf_counter())), []

    def write(self, step, model):
        for _ in range(1000):
            next(clock)

    monkeypatch.setattr(position, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(language.TextSamples, "write", write)
    monkeypatch.setattr(loop.Logs, "write", lambda self, record: logged.append(record))
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", "--train.sample-every", 1) == 0
    assert logged == small_run.lines(tmp_path / "run")
    assert logged[-1]["train_seconds"] < 100
    assert logged[-1]["wall_seconds"] > 1000


def test_the_planned_memory_of_a_step_is_noted(straight):
    made_with = json.loads((straight / "environment.json").read_text())
    assert made_with["step_bytes"] > 3 * 4 * made_with["parameters"]  # parameters and their two moments


def test_samples_are_refused_of_a_mode_that_has_no_decode():
    config = resolve_config(ModelConfig(layers=1, heads=1, width=2, context=2, attention=("linear",)))
    model = nnx.eval_shape(lambda: GPT(config, 3, rngs=nnx.Rngs(0)))
    check(TrainConfig(sample_every=5), model)
    model.blocks[0].attention.decode_state = "none"
    check(TrainConfig(sample_every=0), model)
    with pytest.raises(ConfigError, match=r"train\.sample_every is 5; expected 0: attention mode 'linear' has no"):
        check(TrainConfig(sample_every=5), model)


def weighted_corpus(folder: Path) -> Path:
    """Documents of two equal halves, of which only the second is scored."""
    generator = np.random.default_rng(0)

    def documents(count: int):
        for _ in range(count):
            half = generator.integers(0, 8, generator.integers(4, 16))
            yield Document(np.concatenate([half, half]), np.repeat([0, 1], len(half)))

    write_corpus(folder / "copies", {"train": documents(40), "val": documents(20)}, source="copies")
    return folder / "copies"


def test_packed_weighted_documents_train_and_tell_padding_and_accuracy(recipe, tmp_path, capsys):
    corpus, folder = weighted_corpus(tmp_path), tmp_path / "run"
    command = (recipe, "--data.dir", corpus, "--run-dir", folder, "--data.packing", "documents")
    assert small_run.run(*command) == 0
    assert re.search(r"note: data\.packing documents: \d+\.\d\d% of the training positions are padding",
                     capsys.readouterr().err)
    (val,) = small_run.lines(folder, "val")
    assert 0 <= val["accuracy"] <= 1
    assert "bits_per_byte" not in val
    assert small_run.run(*command[:-2]) == 2
    assert f"{folder} is a run with data.packing documents, not stream" in capsys.readouterr().err
    # In format 1 the first tokens of documents were no targets.
    config = json.loads((folder / "config.json").read_text()) | {"format": 1}
    config.pop("contents_sha256", None)  # its checksum, which that format does not have
    (folder / "config.json").write_text(json.dumps(config))
    assert small_run.run(*command, "--train.steps", 4) == 2
    assert f"{folder} is a run with data.packing {EARLIER_DOCUMENTS}, not documents" in capsys.readouterr().err


@pytest.mark.thorough
def test_packed_documents_teach_how_a_document_begins_and_ends(recipe, tmp_path, capsys):
    random, letters = np.random.default_rng(0), np.frombuffer(b"abc", np.uint8)
    texts = [b"Q" + bytes(letters[random.integers(0, 3, random.integers(2, 12))]) for _ in range(420)]
    documents = [Document(np.frombuffer(text, np.uint8).astype(int)) for text in texts]
    write_corpus(tmp_path / "tokens", {"train": documents[:400], "val": documents[400:]}, source="questions")
    assert small_run.run(recipe, "--data.dir", tmp_path / "tokens", "--data.packing", "documents", "--run-dir",
                         tmp_path / "run", "--attention", "softmax", "--train.steps", 150, "--train.sample-every", 150,
                         "--optimizer.learning-rate", 3e-2) == 0
    run = lineargpt.open_run(tmp_path / "run")
    end = tokenizers.end_of_text(run.tokenizer)
    logits_TV = np.asarray(nnx.jit(run.model)(jnp.array([[end, ord("Q"), ord("a"), ord("b")]]))[0], np.float64)
    p_TV = np.exp(logits_TV) / np.exp(logits_TV).sum(axis=1, keepdims=True)
    assert p_TV[0, ord("Q")] > 0.95
    assert p_TV[3, [*letters, end]].sum() > 0.95
    samples = [(tmp_path / "run" / "samples" / "00000150.txt").read_text(),
               *(run.sample(seed=seed) for seed in range(23))]
    assert sum(re.fullmatch("Q[abc]*", text) is not None for text in samples) >= 22
    assert len(set(samples)) > 12
    # A prompt is the start of a document, as in training.
    capsys.readouterr()
    assert sample.main([str(tmp_path / "run"), "--prompt", "Qa", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert "prompt of 3 tokens" in err
    assert out == run.sample("Qa", temperature=0) == sample_text(
        run._sampler, run.tokenizer, b"Qa", Sampling(0.0), max_new_tokens=200, by_document=True)


@pytest.mark.thorough
def test_a_mixture_goes_on_where_it_stopped_and_evaluates_each(recipe, tmp_path, capsys):
    texts, copies = recipe.parent / "tokens", weighted_corpus(tmp_path)
    shares = ("--data.mixture", texts, 3, copies, 1)
    command = (recipe, "--data.packing", "documents", "--checkpoint.every-steps", 3)
    for name, steps in (("resumed", 3), ("resumed", 6), ("whole", 6)):
        assert small_run.run(*command, *shares, "--run-dir", tmp_path / name, "--train.steps", steps,
                             "--optimizer.final-fraction", 1) == 0
    expected, found = (small_run.arrays(tmp_path / name, 6) for name in ("whole", "resumed"))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    val = small_run.lines(tmp_path / "whole", "val")[-1]
    for name in ("loss", "accuracy"):
        assert val[name] == pytest.approx(0.75 * val[f"{name}/tokens"] + 0.25 * val[f"{name}/copies"])
    assert val["bits_per_byte/tokens"] > 0
    assert load_model(tmp_path / "whole").config.data.mixture == ((str(texts), 3), (str(copies), 1))
    capsys.readouterr()
    assert small_run.run(*command, "--data.mixture", texts, 2, copies, 1, "--run-dir", tmp_path / "whole",
                         "--train.steps", 9) == 2
    assert f"was trained on another corpus than {texts} + {copies}" in capsys.readouterr().err
