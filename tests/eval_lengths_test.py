"""eval.py --length and --by on tiny runs of synthetic tasks, against plain forward passes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import eval
from data import synthetic_tasks
from data.loader import fixed_batches
from data.token_files import TokenFiles
from tests import small_run
from training.loading import load_model
from training.task_evaluation import windows_of

TASK = "mqar:length=32,pairs=3,queries=4,documents=16,val_documents=12"


@pytest.fixture(autouse=True)
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """The recipe, its corpus, and "recall", a run of a task; all read-only."""
    folder = tmp_path_factory.mktemp("lengths")
    with small_run.settings():
        recipe = small_run.make(folder)
        assert train(recipe, "recall", TASK, "--model.positions", "none") == 0
    return recipe


def train(recipe: Path, name: str, source: str, *flags: str) -> int:
    recipe_of_task = recipe.with_name("task.py")
    recipe_of_task.write_text(recipe.read_text().replace(
        'DataConfig(dir=str(Path(__file__).parent / "tokens"))', f'DataConfig(source="{source}", packing="documents")'))
    return small_run.run(recipe_of_task, "--run-dir", recipe.parent / name, *flags)


def run(*arguments: object) -> int:
    return eval.main([str(argument) for argument in arguments])


def refused(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_documents_are_the_windows_of_their_token_files(tmp_path):
    for source in (TASK, "words:group=S3,documents=2,val_documents=12", "counter:documents=2,val_documents=12"):
        task = synthetic_tasks.parse(source)
        assert task is not None
        task.write(tmp_path / task.name())
        (there,) = fixed_batches(TokenFiles.open(tmp_path / task.name()), "val", context=task.length, batch_size=12,
                                 count=1, packing="documents")
        random = task.split("val")
        for one, same in zip(windows_of([next(random) for _ in range(12)]), there, strict=True):
            np.testing.assert_array_equal(one, same)
        (rows,) = fixed_batches(TokenFiles.open(tmp_path / task.name()), "val", context=task.length, batch_size=12,
                                count=1, packing="rows")
        random = task.split("val")
        assert rows.segment_ids_BT is None
        for one, same in zip(windows_of([next(random) for _ in range(12)], segments=False)[:2], rows[:2], strict=True):
            np.testing.assert_array_equal(one, same)


@nnx.jit
def forward(model, tokens_BT, segment_ids_BT) -> jax.Array:
    return model(tokens_BT, segment_ids_BT)


def test_accuracy_at_each_length_by_depth_and_by_distance(recipe, capsys):
    folder = recipe.parent / "recall"
    assert run(folder, "--length", "32,48,64", "--by", "distance") == 0
    printed = capsys.readouterr().out
    assert "by distance, length 48" in printed
    found = json.loads((folder / "evaluation-task.json").read_text())
    assert (found["task"], found["step"]) == ("mqar", 2)
    assert found["commit"] is None or isinstance(found["commit"], str)
    assert found["devices"]
    assert [entry["length"] for entry in found["lengths"]] == [32, 48, 64]
    model = load_model(folder, None, None).model
    for entry in found["lengths"]:
        task = synthetic_tasks.parse(f"{TASK},length={entry['length']}".replace("length=32,", ""))
        assert task is not None
        split, documents = task.split("val"), entry["documents"]
        assert documents == 8  # two batches of four
        chosen = [next(split) for _ in range(documents)]
        batch = windows_of(chosen)
        logits = np.asarray(forward(model, jnp.asarray(batch.inputs_BT), jnp.asarray(batch.segment_ids_BT)))
        scored, right, loss = [], [], []
        for n, document in enumerate(chosen):
            assert document.weights_L is not None
            assert document.targets_L is not None
            assert document.answers_L is not None
            for t in np.flatnonzero(document.weights_L):
                target = int(document.targets_L[t])
                scored.append((n, t, document.answers_L[t]))
                right.append(int(np.argmax(logits[n, t])) == target)
                loss.append(np.log(np.exp(logits[n, t]).sum()) - logits[n, t, target])
        assert entry["tokens"] == len(scored) == 4 * documents
        assert entry["accuracy"] == pytest.approx(np.mean(right))
        assert entry["loss"] == pytest.approx(np.mean(loss), rel=1e-4)
        assert entry["loss_last"] == pytest.approx(np.mean(loss[3::4]), rel=1e-4)
        assert entry["accuracy_last"] == pytest.approx(np.mean(right[3::4]))
        for by, value in (("distance", lambda t, answer: t - answer),
                          ("depth", lambda t, answer, length=task.length: 100 * answer / length)):
            assert sum(part["tokens"] for part in entry[by]) == len(scored)
            for part in entry[by]:
                inside = [i for i, (_, t, answer) in enumerate(scored)
                          if part["first"] <= value(t, answer) < part["last"] + (by == "distance")]
                assert part["tokens"] == len(inside)
                assert part["loss"] == pytest.approx(np.mean([loss[i] for i in inside]), rel=1e-4)


def test_another_task_and_the_length_of_training(recipe, capsys):
    folder = recipe.parent / "recall"
    assert run(folder, "--by", "depth", "--data.source", "copy:length=24", "--batches", "1") == 0
    assert "by depth, length 24" in capsys.readouterr().out
    found = json.loads((folder / "evaluation-task.json").read_text())
    assert found["settings"].startswith("length=24,symbols=10,")
    assert [(entry["length"], entry["documents"]) for entry in found["lengths"]] == [(24, 4)]
    assert run(folder, "--length", "16", "--data.source", "words") == 0
    assert "depth" not in json.loads((folder / "evaluation-task.json").read_text())["lengths"][0]


def test_what_cannot_be_evaluated_says_why(recipe, capsys):
    folder = recipe.parent / "recall"
    before = (folder / "evaluation-task.json").read_bytes() if (folder / "evaluation-task.json").exists() else None
    for arguments, message in (
            (["--length", "8"], "mqar:length is 8; expected at least 14 for 3 pairs and 4 queries"),
            (["--length", "ten"], "--length is ten; expected comma-separated numbers of tokens above 0"),
            (["--length", ""], "--length is ; expected comma-separated numbers"),
            (["--length", "64", "--context", "32"], "--context and --length are mutually exclusive"),
            (["--length", "64", "--windows", "16"], "--windows and --length are mutually exclusive"),
            (["--by", "depth", "--split", "test"], "--split and --by are mutually exclusive"),
            (["--length", "64", "--batches", "0"], "--batches is 0; expected at least 1"),
            (["--by", "depth", "--data.source", "words"], "the answers of words stand at no single place"),
            (["--length", "64", "--data.source", "wrods:length=8"], "perhaps you meant words"),
            (["--length", "64", "--data.source", "python-stdlib"], "--data.source is python-stdlib; expected a synth"),
            (["--length", "64", "--data.dir", "."], "--data.dir holds token files; name a task with --data.source")):
        assert message in refused(capsys, folder, *arguments)
    assert train(recipe, "learned", TASK, "--model.positions", "learned") == 0
    assert "context is 64: the model has positions for 32 tokens" in refused(
        capsys, recipe.parent / "learned", "--length", "64")
    assert small_run.run(recipe, "--run-dir", recipe.parent / "text") == 0
    assert "not on a synthetic task; name one with --data.source" in refused(
        capsys, recipe.parent / "text", "--length", "64")
    after = (folder / "evaluation-task.json").read_bytes() if (folder / "evaluation-task.json").exists() else None
    assert before == after
