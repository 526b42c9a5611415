"""``python -m lra.train`` as a command: its files, resumption, and errors for invalid input."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import compare
import train as train_command
from comparison.remarks import remarks
from comparison.runs import group, load_run, scored
from lra import accuracy, tasks
from lra import train as lra_train
from support.errors import DataError
from tests import small_run
from tests.comparison.run_folders import write_run
from tests.edited import edited
from tests.lra import majority_task
from training.loading import load_model

STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings(), pytest.MonkeyPatch.context() as patch:
        majority_task.install(patch, fake=majority_task.dataset(), other=majority_task.dataset(),
                              smaller=majority_task.dataset(train=40))
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return majority_task.make(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    """An uninterrupted run, read-only."""
    folder = tmp_path_factory.mktemp("finished") / "softmax"
    assert majority_task.run(recipe, "--run-dir", folder) == 0
    return folder


@pytest.fixture
def run_dir(tmp_path, finished) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def refused(capsys, code: int, *arguments: object) -> str:
    """Standard error of a command that stops with ``code`` and one message."""
    capsys.readouterr()
    assert majority_task.run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return " ".join(err.replace("│", " ").split())


def run_interrupted(at: int, *arguments: object) -> int:
    """The exit code of a command that gets a Ctrl-C before it writes the line of step ``at``."""
    with small_run.before_line(at, lambda: signal.raise_signal(signal.SIGINT)):
        return majority_task.run(*arguments)


def assert_same_run(folder: Path, straight: Path) -> None:
    """Parameters and optimizer state are equal bit for bit, and every step has the same metrics."""
    expected, found = small_run.arrays(straight, STEPS), small_run.arrays(folder, STEPS)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    figures = ("step", "split", "tokens", "loss")
    assert ([[line[name] for name in figures] for line in small_run.lines(folder)]
            == [[line[name] for name in figures] for line in small_run.lines(straight)])


@pytest.mark.thorough
def test_a_run_writes_what_a_language_model_writes(finished):
    found = small_run.lines(finished)
    assert [(line["split"], line["step"]) for line in found] == [
        ("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4), ("val", 4), ("train", 5), ("train", 6),
        ("val", 6)]
    assert all(line["tokens"] == line["step"] * 8 * 16 for line in found)  # examples times context
    for line in small_run.lines(finished, "val"):
        assert list(line)[5:] == ["loss", "accuracy", "flops"]
        assert (21 * line["accuracy"]) % 1 == pytest.approx(0, abs=1e-6)
    environment = read(finished / "environment.json")
    assert environment["command"][:3] == ["python", "-m", "lra.train"]
    assert environment["corpus_checksum"] == majority_task.dataset().checksum
    assert environment["vocabulary_size"] == majority_task.VOCABULARY
    assert environment["parameters"] == sum(
        x.size for name, x in small_run.arrays(finished, STEPS).items() if name.startswith("parameters"))
    config = read(finished / "config.json")
    assert (config["data"]["task"], config["model"]["dropout"]) == ("fake", 0.25)


def test_a_run_ends_with_the_accuracy_on_test_and_what_guessing_reaches(finished):
    found = read(finished / "test.json")
    assert (found["task"], found["attention"], found["seed"], found["examples"]) == ("fake", ["softmax"], 0, 19)
    assert found["baselines"] == {"majority class": 0.625}
    assert (19 * found["accuracy"]) % 1 == pytest.approx(0, abs=1e-6)
    losses = {line["step"]: line["loss"] for line in small_run.lines(finished, "val")}
    assert losses[found["step"]] == min(losses.values())
    assert found["trained_steps"] == found["last"]["step"] == STEPS
    if found["step"] == STEPS:
        assert found["last"] == {name: found[name] for name in ("step", "loss", "accuracy")}


@pytest.mark.thorough
def test_the_best_checkpoint_by_val_loss_is_scored_where_training_got_worse(recipe, run_dir, capsys):
    before = read(run_dir / "test.json")
    assert majority_task.run(recipe, "--run-dir", run_dir, "--train.steps", 8, "--optimizer.learning-rate", 30) == 0
    val = small_run.lines(run_dir, "val")
    assert val[-1]["loss"] > val[-2]["loss"]
    found = read(run_dir / "test.json")
    assert (found["step"], found["trained_steps"], found["checkpoint"]) == (before["step"], 8, "best by val loss")
    assert found["accuracy"] == before["accuracy"]
    assert found["last"]["step"] == 8
    assert found["last"]["loss"] > found["loss"]
    assert accuracy.load(run_dir).last_accuracy == found["last"]["accuracy"]
    assert (f"(best by val loss), {found['last']['accuracy']:.4f} at the last step, 8; baselines: majority class "
            "0.6250") in capsys.readouterr().err


@pytest.mark.thorough
def test_ctrl_c_saves_and_the_same_command_goes_on_to_what_the_uninterrupted_run_is(
        recipe, finished, tmp_path, capsys):
    command = (recipe, "--run-dir", tmp_path / "run")
    assert run_interrupted(3, *command) == 128 + signal.SIGINT
    assert "stopped and saved at step 4; repeat the command" in capsys.readouterr().err
    assert not (tmp_path / "run" / "test.json").exists()
    assert majority_task.run(*command) == 0
    assert_same_run(tmp_path / "run", finished)
    assert read(tmp_path / "run" / "test.json")["accuracy"] == read(finished / "test.json")["accuracy"]


def test_a_finished_run_says_so_and_is_scored_where_it_is_not_yet(recipe, finished, run_dir, capsys):
    before = contents(run_dir)
    assert majority_task.run(recipe, "--run-dir", run_dir) == 0
    err = capsys.readouterr().err
    assert f"{run_dir} is finished: step {STEPS}" in err
    assert "test accuracy" not in err  # it is not computed again
    assert contents(run_dir) == before
    (run_dir / "test.json").unlink()
    assert majority_task.run(recipe, "--run-dir", run_dir) == 0
    assert read(run_dir / "test.json") == read(finished / "test.json")


@pytest.mark.thorough
def test_a_run_that_goes_on_has_no_score_until_its_new_end(recipe, run_dir):
    longer = (recipe, "--run-dir", run_dir, "--train.steps", 12)
    assert accuracy.load(run_dir).accuracy == read(run_dir / "test.json")["accuracy"]
    assert run_interrupted(8, *longer) == 128 + signal.SIGINT
    with pytest.raises(DataError, match="not scored yet"):
        accuracy.load(run_dir)
    assert majority_task.run(*longer) == 0
    assert read(run_dir / "test.json")["trained_steps"] == 12


def test_the_flags_of_the_data_reach_the_task_and_another_seed_does_not(recipe, tmp_path, monkeypatch):
    asked = []

    def load(task, **settings):
        asked.append({"task": task} | settings)
        return majority_task.dataset()

    monkeypatch.setattr(tasks, "load", load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for seed in ("1", "2"):
        config = lra_train.parse([str(recipe), "--data.max-length", "13", "--data.train-examples", "40",
                                  "--data.val-examples", "20", "--train.seed", seed]).config
        assert config.train.seed == int(seed)
        lra_train.load_data(config)
    assert asked == [{"task": "fake", "folder": None, "max_length": 13, "train_examples": 40, "val_examples": 20,
                      "seed": 0, "cache": tmp_path / "lineargpt" / "lra"}] * 2


@pytest.mark.thorough
def test_a_shortened_listops_is_trained_on_and_scored_beside_its_guessers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = {"data.max-length": 16, "data.train-examples": 64, "data.val-examples": 32, "model.layers": 1,
             "model.heads": 2, "model.width": 8, "model.mlp-width": 8, "train.steps": 2, "train.batch-size": 4}
    assert majority_task.run(small_run.ROOT / "configs" / "lra" / "listops.py", "--run-dir", tmp_path / "run",
                             *(word for name, value in flags.items() for word in (f"--{name}", value))) == 0
    found = read(tmp_path / "run" / "test.json")
    assert (found["task"], found["context"], found["train_examples"], found["examples"]) == ("listops", 16, 64, 32)
    data = tasks.load("listops", folder=None, max_length=16, train_examples=64, val_examples=32, seed=0)
    assert found["corpus_checksum"] == data.checksum
    assert found["baselines"] == data.baselines
    assert found["baselines"].keys() > {"majority class", "root operator"}


def test_a_run_is_named_after_recipe_and_attention_and_its_preset_reaches_the_recipe(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = lra_train.parse([str(recipe), "--attention", "linear,softmax", "--preset", "paper", "--data-dir", "here",
                            "--data.max-length", "13"])
    config = line.config
    assert line.run_dir == Path("runs/fake-linear-softmax")
    assert (config.model.dropout, config.model.context, config.data.dir) == (0.5, 13, "here")
    assert set(config.model.modes) == {"linear", "softmax"}


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "best"], "--preset"),
    (["--model.classes", 3], "model.classes is 3; expected 2 for the task fake"),
    (["--model.towers", 2], "model.towers is 2; expected 1 for the task fake"),
    (["--model.context", 9, "--data.max-length", 12], "model.context is 9 and data.max_length 12; give only"),
    (["--model.context", 9], "sequences of the task fake have up to 12 tokens: set data.max_length"),
])
def test_what_cannot_be_run_stops_before_any_work(recipe, tmp_path, capsys, arguments, message):
    assert message in refused(capsys, 2, recipe, "--run-dir", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_had_end_in_their_message(recipe, tmp_path, capsys, monkeypatch):
    def load(task, **settings):
        raise DataError(f"{settings['folder']}: there is no such folder")

    monkeypatch.setattr(tasks, "load", load)
    assert refused(capsys, 1, recipe, "--run-dir", tmp_path / "run", "--data-dir", "nowhere") == (
        "lra.train: nowhere: there is no such folder")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--data.task", "other"], "is a run with data.task fake, not other; choose another run_dir"),
    (["--model.width", 16], "is a run with model.width 8, not 16; choose another run_dir"),
    (["--model.dropout", 0], "is a run with model.dropout 0.25, not 0.0; choose another run_dir"),
    (["--train.seed", 1], "is a run with train.seed 0, not 1; choose another run_dir"),
])
def test_the_run_of_another_task_or_model_is_left_alone(recipe, run_dir, capsys, arguments, message):
    before = contents(run_dir)
    assert f"{run_dir} {message}" in refused(capsys, 2, recipe, "--run-dir", run_dir, *arguments)
    assert contents(run_dir) == before


def test_a_run_does_not_go_on_with_other_examples(recipe, run_dir, capsys, monkeypatch):
    majority_task.install(monkeypatch, fake=majority_task.dataset(train=40))
    assert "was trained on another corpus than this one of fake" in refused(
        capsys, 2, recipe, "--run-dir", run_dir, "--train.steps", 9)


def test_each_command_names_the_other_where_recipe_or_run_are_of_that(recipe, finished, tmp_path, capsys):
    assert "quickstart.py: not a recipe of lra.train: its get_config has no argument preset" in refused(
        capsys, 2, f"{small_run.ROOT}/configs/quickstart.py")
    message = refused(capsys, 2, "configs/nothing.py")
    assert "configs/lra/listops.py" in message
    assert "configs/quickstart.py" not in message
    assert small_run.run(recipe) == 2
    assert "not a recipe of train.py, but of lra.train" in capsys.readouterr().err
    language = small_run.make(tmp_path)
    assert small_run.run(language, "--run-dir", finished) == 2
    told = capsys.readouterr().err
    assert f"{finished} is a classifier run of lra.train, not a language-model run of train.py" in told
    with pytest.raises(train_command.ConfigError, match=r"is a classifier run of lra\.train"):
        load_model(finished)


def test_seeds_of_a_task_are_one_set_up_and_an_older_config_no_other(finished, run_dir):
    with edited(run_dir / "config.json") as config:
        config["train"]["seed"] = 1
        del config["model"]["head_width"]
    assert [len(setup.runs) for setup in group([load_run(finished), load_run(run_dir)])] == [2]


def test_a_classifier_beside_a_language_model_is_told_apart(finished, tmp_path):
    runs = [load_run(finished), load_run(write_run(tmp_path / "language"))]
    assert remarks(runs)[0].startswith("Different tokenizers (task-specific: softmax; bytes: language): losses per")
    assert scored(runs) == "example or token"


def test_runs_of_two_modes_are_compared(finished, tmp_path, capsys):
    """The other run is a copy with other losses, under another mode's name."""
    linear, files = tmp_path / "linear", {flag: tmp_path / f"found.{flag}" for flag in ("json", "png")}
    shutil.copytree(finished, linear)
    with edited(linear / "config.json") as config:
        config |= json.loads(json.dumps(config).replace('"softmax"', '"linear"'))
    lines = [line | {"loss": line["loss"] + 1} for line in small_run.lines(finished)]
    (linear / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.main([str(finished), str(linear), "--out", str(tmp_path / "page.html"),
                         *(word for flag, path in files.items() for word in (f"--{flag}", str(path)))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "val accuracy" in out
    assert "After 6 steps, softmax has the lower val loss" in out
    rows = read(files["json"])["rows"]
    assert [row["tokens"] for row in rows] == [STEPS * 8 * 16] * 2
    assert rows[0]["accuracy"] == small_run.lines(finished, "val")[-1]["accuracy"]
    assert '"scored":"example"' in (tmp_path / "page.html").read_text()
    # 6 per parameter, except those of 5 embeddings and of the head, and three times the attention, which has no mask.
    parameters = read(finished / "environment.json")["parameters"] - 5 * 8 - 8 * (8 + 2)
    per_token = 6 * parameters + 3 * 4 * 16 * 8
    np.testing.assert_allclose(load_run(finished).train.points["flops"][-1], STEPS * 8 * 16 * per_token)


@pytest.mark.parametrize("padded", [True, False])
def test_what_computes_attention_is_asked_for_rows_as_they_are(recipe, tmp_path, monkeypatch, padded):
    """cuDNN does not support padding: environment.json must not name it for padded rows."""
    asked, data = [], majority_task.dataset()
    if not padded:
        splits = {name: majority_task.split(0, len(split.labels), length=16) for name, split in data.splits.items()}
        data = data._replace(splits={name: split._replace(lengths=tuple(map(lambda n: n * 0 + 16, split.lengths)))
                                     for name, split in splits.items()})
    monkeypatch.setattr(tasks, "load", lambda task, **settings: data)

    def environment(*_, segments, **__):
        asked.append(segments)
        raise DataError("that is enough")

    monkeypatch.setattr("training.run.environment", environment)
    assert majority_task.run(recipe, "--run-dir", tmp_path / "run") != 0
    assert asked == [padded]
