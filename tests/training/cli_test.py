"""The command line of the training commands."""

import dataclasses
from pathlib import Path

import pytest

import train
from configs.schema import Config, OptimizerConfig, TrainConfig
from tests import small_run
from training import loop, run
from training.accounting import Timing
from training.config_validation import validate_config
from training.position import Position

RECIPE = f"{small_run.ROOT}/configs/quickstart.py"

pytestmark = pytest.mark.fast


def test_the_flags_of_a_run_and_its_fields_are_one_command_line(capsys):
    line = train.parse([RECIPE, "--attention", "chunked", "--init-from", "other", "--train.accumulate", "5",
                        "--model.modes.chunked.chunk-size", "8", "--run-dir", "here"])
    assert (line.recipe, line.run_dir, line.flags.init_from) == (Path(RECIPE), Path("here"), Path("other"))
    assert line.config.model.modes["chunked"].chunk_size == 8
    assert capsys.readouterr().err.count("train.accumulate") == 1  # the config is validated once
    assert validate_config(line.config) == line.config


def test_none_takes_any_case_in_every_flag():
    line = train.parse([RECIPE, "--run-dir", "none", "--init-from", "None", "--train.steps", "none"])
    assert line.run_dir == Path("runs/quickstart-chunked")
    assert line.flags.init_from is line.config.train.steps is None


def test_a_drop_after_the_end_is_told_and_every_schedule_of_the_runs_length_has_a_fitting_warmup(capsys):
    dropping = Config(train=TrainConfig(steps=300), optimizer=OptimizerConfig(schedule="drop", drop_step=300))
    assert validate_config(dropping).optimizer.warmup_steps == 30
    assert "optimizer.drop_step is 300, and train.steps 300: the learning rate does not drop" in capsys.readouterr().err
    earlier = dataclasses.replace(dropping, optimizer=OptimizerConfig(schedule="drop", drop_step=299, warmup_steps=0))
    assert validate_config(earlier).optimizer == earlier.optimizer
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("batch", "asked", "found"), [
    (8, 3, 2), (12, 5, 4), (360, 100, 90), (2**31 - 1, 2**31 - 2, 1), (2**30, 2**30 - 1, 2**29)])
def test_an_accumulation_that_does_not_divide_the_batch_is_the_next_lower_divisor(batch, asked, found):
    config = Config(train=TrainConfig(batch_size=batch, accumulate=asked))
    assert validate_config(config).train.accumulate == found


@pytest.mark.parametrize(("signal", "code", "said"), [
    (None, 0, "run: 3 steps in 2.0 s of training, val loss 1.2500\n"),
    (15, 143, "run: stopped and saved at step 3; repeat the command to resume\n")])
def test_how_a_run_ended_is_told(capsys, signal, code, said):
    position = Position(step=3, batches=3, train_seconds=2.0, wall_seconds=5.0)
    timing = Timing(Path("timing.json"), 0.0, {"compile": 2.0, "step": 2.0, "other": 1.0})
    assert run.report(Path("run"), loop.Outcome(position, 1.25, signal, timing)) == code
    assert capsys.readouterr() == (
        "", f"run: 5.0 s wall time: compile 2.0 s (40%), step 2.0 s (40%), start-up and other 1.0 s (20%)\n{said}")


def test_a_run_that_was_stopped_before_its_first_step_was_not_saved(capsys):
    timing = Timing(Path("timing.json"), 0.0, {"other": 1.0})
    assert run.report(Path("run"), loop.Outcome(Position(), None, 15, timing)) == 143
    assert capsys.readouterr().err.endswith("run: stopped before its first step; repeat the command to start it\n")
