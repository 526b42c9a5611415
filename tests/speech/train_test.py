"""``python -m speech.train`` as a command: its files, resumption, and errors for invalid input."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from comparison.runs import load_run, scored
from configs.schema import SpeechConfig, config_class
from speech import train as speech_train
from support.errors import ConfigError
from tests import small_run
from tests.speech import corpus_folders
from training.loading import load_model

RECIPE = '''
from configs.schema import CheckpointConfig, EncoderConfig, OptimizerConfig, SpeechConfig, SpeechDataConfig, TrainConfig


def get_config(attention: str = "linear") -> SpeechConfig:
    return SpeechConfig(
        model=EncoderConfig(layers=1, heads=2, width=8, mlp_width=8, context=52, dtype="float32", pooling="none",
                            attention=tuple(attention.split(","))),
        data=SpeechDataConfig(train_utterances=12, val_utterances=5),
        # The learning rate must not depend on the length of the run.
        optimizer=OptimizerConfig(learning_rate=0.03, schedule="constant", warmup_steps=0),
        train=TrainConfig(steps=4, batch_size=4, eval_every=2),
        checkpoint=CheckpointConfig(every_steps=2, keep=1),
    )
'''


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "tones.py").write_text(RECIPE)
    return tmp_path / "tones.py"


def refused(capsys, code: int, *arguments: object) -> str:
    """Standard error of a command that stops with ``code`` and one message."""
    capsys.readouterr()
    assert corpus_folders.run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return " ".join(err.replace("│", " ").split())


@pytest.mark.thorough
def test_a_run_logs_error_rates_resumes_and_is_scored_on_test(recipe, tmp_path, monkeypatch, capsys):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert corpus_folders.run(recipe, "--run-dir", straight) == 0
    with small_run.before_line(1, lambda: signal.raise_signal(signal.SIGINT)):
        assert corpus_folders.run(recipe, "--run-dir", stopped) == 128 + signal.SIGINT
    assert not (stopped / "test.json").exists()
    assert corpus_folders.run(recipe, "--run-dir", stopped) == 0
    expected, found = small_run.arrays(straight, 4), small_run.arrays(stopped, 4)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    val = small_run.lines(straight, "val")
    assert [list(line)[5:] for line in val] == [["loss", "error_rate", "flops"]] * 2
    test = json.loads((straight / "test.json").read_text())
    assert (test["corpus"], test["attention"], test["examples"], test["train_examples"]) == (
        "synthetic", ["linear"], 5, 12)
    assert json.loads((stopped / "test.json").read_text())["error_rate"] == test["error_rate"]
    assert f"test error rate {test['error_rate']:.4f} at step" in capsys.readouterr().err
    run = load_run(straight)
    steps, rates = run.curve("step", "val", "error_rate")
    assert (list(steps), list(rates)) == ([2, 4], [line["error_rate"] for line in val])
    assert run.final("error_rate") == val[-1]["error_rate"]
    assert scored([run]) == "symbol"
    with pytest.raises(ConfigError, match=r"is a speech-recognition run of speech\.train; expected a language-model"):
        load_model(straight)


def test_a_config_names_its_kind(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = speech_train.parse([str(recipe), "--attention", "softmax,linear", "--data-dir", "here"])
    assert (line.run_dir, line.config.data.dir) == (Path("runs/tones-softmax-linear"), "here")
    values = line.config.to_dict()
    assert values["kind"] == "speech-recognition"
    assert config_class(values) is SpeechConfig
    assert SpeechConfig.from_dict(values).to_dict() == values


@pytest.mark.parametrize(("code", "arguments", "message"), [
    (2, ["--data.corpus", "audio"], "data.dir is None; expected the folder of the corpus, as data.corpus is audio"),
    (2, ["--data-dir", "x"], "data.dir is x; expected None, as data.corpus is synthetic"),
    (2, ["--data.val-utterances", 0], "data.val_utterances is 0; expected at least 1"),
    (2, ["--model.context", 8], "model.context is 8; expected at least 52 for synthetic utterances"),
    (1, ["--data.corpus", "audio", "--data-dir", "nowhere"], "data.dir nowhere: no such folder; expected train*"),
])
def test_what_cannot_be_run_stops_before_any_work(recipe, tmp_path, capsys, code, arguments, message):
    assert message in refused(capsys, code, recipe, "--run-dir", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("corpus", ["synthetic", "audio", "features"])
def test_a_run_is_planned_without_computing_features(recipe, tmp_path, monkeypatch, corpus):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make = {"synthetic": None, "audio": corpus_folders.audio, "features": corpus_folders.features}[corpus]
    flags = [] if make is None else ["--data-dir", str(make(tmp_path / "corpus", {
        "train": ["A B"] * 12, "val": ["A"] * 5, "test": ["B"] * 5}))]
    config = speech_train.parse([str(recipe), "--data.corpus", corpus, "--model.context", "60", *flags]).config
    planned = speech_train.planned_model(config, tmp_path / "run")
    assert not (tmp_path / "cache").exists()
    trained = speech_train.load_objective(config).model
    assert nnx.state(planned) == nnx.state(trained)


@pytest.mark.thorough
def test_damaged_features_end_every_start_and_are_computed_again(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = corpus_folders.features(tmp_path / "corpus", {"train": ["b"] * 12, "val": ["b"] * 5, "test": ["b"] * 5})
    command = (recipe, "--run-dir", tmp_path / "run", "--data.corpus", "features", "--data-dir", folder)
    line = speech_train.parse([*map(str, (recipe, *command[3:]))])

    def damage() -> None:
        for file in speech_train.load_data(line.config).files:
            file.path.write_bytes(bytes(file.path.stat().st_size))

    damage()
    assert "frames.bin does not match its checksum" in refused(capsys, 1, *command)
    assert small_run.saved_steps(tmp_path / "run") == []
    assert corpus_folders.run(*command, "--train.steps", 2) == 0
    (tmp_path / "run" / "test.json").unlink()  # as of a run that was killed before it was scored
    damage()
    assert "frames.bin does not match its checksum" in refused(capsys, 1, *command, "--train.steps", 2)
    assert not (tmp_path / "run" / "test.json").exists()
    damage()
    assert "frames.bin does not match its checksum" in refused(capsys, 1, *command, "--train.steps", 3)
    assert small_run.saved_steps(tmp_path / "run") == [2]
    speech_train.load_data(line.config).verify()


@pytest.mark.thorough
def test_a_folder_of_audio_is_trained_on(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = corpus_folders.audio(tmp_path / "corpus", {"train": ["GO"] * 4, "val": ["A"], "test": ["B"]}, seconds=0.2)
    assert corpus_folders.run(recipe, "--run-dir", tmp_path / "run", "--data.corpus", "audio", "--data-dir", folder,
                              "--data.train-utterances", 3, "--data.val-utterances", 1, "--train.steps", 2) == 0
    test = json.loads((tmp_path / "run" / "test.json").read_text())
    assert (test["corpus"], test["train_examples"], test["symbols"]) == ("audio", 3, 28)


def test_each_command_names_the_other_where_a_recipe_is_of_that(capsys):
    assert "listops.py: not a recipe of speech.train, but of lra.train" in refused(
        capsys, 2, f"{small_run.ROOT}/configs/lra/listops.py")
    message = refused(capsys, 2, "configs/nothing.py")
    assert "configs/speech/synthetic.py" in message
    assert "listops" not in message
