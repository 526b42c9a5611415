"""lineargpt.py: training, opening, sampling and comparing runs from Python."""

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import lineargpt
import sample
from configs.schema import LraConfig
from lineargpt import ConfigError, compare_runs, harness_model, load_recipe, open_run, train_run
from support.errors import CheckpointError, RunError, TrainingError
from tests import small_run
from tests.edited import contents
from training.checkpoint import Checkpoints
from training.metrics import MetricsWriter


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory) -> Path:
    """``python``, from train_run, and ``command``, from train.py: the same run of chunked, read-only; and ``softmax``,
    from train_run."""
    folder = tmp_path_factory.mktemp("runs")
    train_run(load_recipe(recipe), folder / "python")
    assert small_run.run(recipe, "--run-dir", folder / "command") == 0
    train_run(load_recipe(recipe, "softmax"), folder / "softmax")
    return folder


def test_train_run_trains_what_the_command_trains(folder):
    python, command = (small_run.lines(folder / name) for name in ("python", "command"))
    assert [(line["split"], line["step"]) for line in python] == [("train", 1), ("train", 2), ("val", 2)]
    assert [line["loss"] for line in python] == [line["loss"] for line in command]
    assert (folder / "python" / "config.json").read_bytes() == (folder / "command" / "config.json").read_bytes()
    first, second = (small_run.arrays(folder / name, 2) for name in ("python", "command"))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_train_run_goes_on_and_leaves_a_finished_run(recipe, folder, tmp_path, capsys):
    config = load_recipe(recipe)
    run_dir = Path(shutil.copytree(folder / "python", tmp_path / "run"))
    assert train_run(config, run_dir).step == 2
    assert "is finished: step 2" in capsys.readouterr().err
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    started = time.perf_counter()
    run = train_run(longer, run_dir)
    took = time.perf_counter() - started
    assert run.step == 3
    # The wall clock counts from the call, not from the import of the module.
    before, *_, after = small_run.lines(folder / "python", "val") + small_run.lines(run_dir, "val")
    assert 0 < after["wall_seconds"] - before["wall_seconds"] < took


def test_ctrl_c_saves_and_interrupts(recipe, tmp_path, monkeypatch):
    config = load_recipe(recipe)
    write = MetricsWriter.write

    def write_and_interrupt(self, record):
        write(self, record)
        if record["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_interrupt)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=9))
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            with pytest.raises(KeyboardInterrupt):
                train_run(config, tmp_path / "run")
        finally:
            signal.signal(signal.SIGINT, handler)
    (stopped,) = small_run.saved_steps(tmp_path / "run")
    assert 1 <= stopped < 9
    assert train_run(config, tmp_path / "run").step == 9


def test_train_run_refuses_what_the_command_refuses(recipe, folder, tmp_path):
    config = load_recipe(recipe)
    with pytest.raises(ConfigError, match=r"train\.steps is 0; expected at least 1"):
        train_run(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=0)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"is a run with model\.attention \['softmax'\], not \['chunked'\]"):
        train_run(config, folder / "softmax")
    misspelt: Any = "atention"
    with pytest.raises(ConfigError, match="reset is 'atention'; expected None or \"attention\""):
        train_run(config, tmp_path / "run", init_from=folder / "softmax", reset=misspelt)
    with pytest.raises(ConfigError, match="reset requires init_from"):
        train_run(config, tmp_path / "run", reset="attention")
    with pytest.raises(ConfigError, match=r"config is a LraConfig; expected a configs\.schema\.Config"):
        train_run(LraConfig(), tmp_path / "run")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "run").exists()


def test_train_run_raises_when_the_loss_is_not_finite(recipe, tmp_path):
    config = load_recipe(recipe)
    hot = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e30))
    with pytest.raises(TrainingError, match="not finite"):
        train_run(hot, tmp_path / "run")


def test_train_run_begins_with_the_weights_of_another_run(recipe, folder, tmp_path):
    run = train_run(load_recipe(recipe, "softmax"), tmp_path / "run", init_from=folder / "python", reset="attention")
    assert run.environment["init_from"] == {"run": str(folder / "python"), "step": 2, "reset": "attention"}


def test_an_opened_run_has_config_model_and_tokenizer(folder):
    run = open_run(folder / "python")
    assert run.config.model.attention == ("chunked",)
    assert run.config.to_dict() == contents(folder / "python" / "config.json")
    assert run.environment["vocabulary_size"] == 257
    assert run.step == 2
    assert jax.jit(lambda tokens_BT: run.model(tokens_BT))(np.zeros((1, 8), int)).shape == (1, 8, 257)
    assert run.model is run.model
    assert run.tokenizer.encode_ordinary("def") == [100, 101, 102]
    assert repr(run) == f"Run(path={folder / 'python'!r}, checkpoint='newest')"


def test_the_checkpoint_is_the_newest_the_best_or_that_at_a_step(folder, tmp_path):
    run_dir = Path(shutil.copytree(folder / "python", tmp_path / "run"))
    _, parameters, variables = nnx.split(open_run(run_dir).model, nnx.Param, ...)
    with Checkpoints(run_dir / "checkpoints", keep=9) as checkpoints:
        checkpoints.save(5, {"parameters": nnx.to_pure_dict(jax.tree.map(lambda x: 0 * x, parameters)),
                             "variables": nnx.to_pure_dict(variables)}, loss=99.0)
    assert open_run(run_dir).step == 5
    assert open_run(run_dir, "best").step == 2
    assert open_run(run_dir, 2).step == 2
    embedding = open_run(run_dir, 5).model.token_embedding.embedding[...]
    assert not embedding.any()
    assert open_run(run_dir, "best").model.token_embedding.embedding[...].any()
    with pytest.raises(ConfigError, match="no checkpoint at step 3; expected one of 2, 5"):
        _ = open_run(run_dir, 3).model
    for wrong in ("last", True, 1.5, None):
        with pytest.raises(ConfigError, match='expected a step, "newest" or "best"'):
            open_run(run_dir, wrong)  # pyright: ignore[reportArgumentType]
    for path in run_dir.glob("checkpoints/*/loss.json"):
        path.unlink()
    with pytest.raises(RunError, match="no checkpoint has a val loss"):
        _ = open_run(run_dir, "best").step
    with pytest.raises(CheckpointError, match=r"loss\.json is missing"):
        _ = open_run(run_dir, 2).model


def test_a_folder_that_is_no_run_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        open_run(tmp_path)
    run_dir = Path(shutil.copytree(folder / "python", tmp_path / "run"))
    (run_dir / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        open_run(run_dir)


def test_metrics_are_a_data_frame(folder):
    pandas = pytest.importorskip("pandas")
    metrics, lines = open_run(folder / "python").metrics, small_run.lines(folder / "python")
    assert isinstance(metrics, pandas.DataFrame)
    assert list(metrics["split"]) == ["train", "train", "val"]
    assert list(metrics["step"]) == [1, 2, 2]
    assert list(metrics["loss"]) == [line["loss"] for line in lines]
    assert list(metrics["learning_rate"].isna()) == [False, False, True]
    assert list(metrics["loss"][metrics["split"] == "val"]) == [lines[-1]["loss"]]


def test_metrics_are_arrays_without_pandas(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    metrics, lines = open_run(folder / "python").metrics, small_run.lines(folder / "python")
    assert metrics["step"].tolist() == [1, 2, 2]
    assert metrics["step"].dtype == np.int64
    assert metrics["loss"][metrics["split"] == "val"].tolist() == [lines[-1]["loss"]]
    assert {len(column) for column in metrics.values()} == {3}
    table = compare_runs([folder / "python"]).table
    assert table["val_loss"].tolist() == [lines[-1]["loss"]]


@pytest.mark.parametrize("text", [None, ""])
def test_a_run_without_metrics_says_so(folder, tmp_path, text):
    run_dir = Path(shutil.copytree(folder / "python", tmp_path / "run"))
    (run_dir / "metrics.jsonl").unlink()
    if text is not None:
        (run_dir / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.jsonl: no steps yet"):
        _ = open_run(run_dir).metrics


def test_samples_are_those_of_the_command(folder, capsys):
    run = open_run(folder / "python")
    text = run.sample("def ", max_new_tokens=40, temperature=1.0, top_k=90, seed=3)
    capsys.readouterr()
    assert sample.main([str(folder / "python"), "--prompt", "def ", "--max-new-tokens", "40", "--temperature", "1",
                        "--top-k", "90", "--seed", "3"]) == 0
    assert text == capsys.readouterr().out
    assert text == run.sample(b"def ", max_new_tokens=40, temperature=1.0, top_k=90, seed=3)
    assert text != run.sample("def ", max_new_tokens=40, temperature=1.0, top_k=90, seed=4)
    assert 0 < len(run.sample(max_new_tokens=5)) <= 5
    letter = next(letter for letter in text[1:] if letter.isascii())
    stopped = run.sample("def ", max_new_tokens=40, temperature=1.0, top_k=90, seed=3, stop=[letter])
    assert stopped == text[:text.index(letter)]


def test_samples_are_of_the_model_as_it_is(folder):
    run = open_run(folder / "python")
    before = run.sample("def ", max_new_tokens=20)
    embedding = run.model.token_embedding.embedding
    embedding.set_value(embedding[...].at[:].set(0).at[65].set(1))
    run.model.final_norm.scale.set_value(0 * run.model.final_norm.scale[...])
    run.model.final_norm.bias.set_value(1 + 0 * run.model.final_norm.bias[...])
    assert run.sample("def ", max_new_tokens=20, temperature=0) == "A" * 20 != before


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1.0}, "temperature is -1.0; expected a number of at least 0"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
    ({"stop": ["x", ""]}, "stop has an empty string"), ({"stop": "xy"}, r"stop is 'xy'; expected .* \['xy'\]"),
    ({"prompt": "x" * 33}, "expected at most 32, the model's number of positions"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_sampling_options_out_of_range_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        open_run(folder / "python").sample(**options)


def test_a_harness_model_scores_with_the_model_of_the_run(folder):
    run = open_run(folder / "softmax")
    found = {}
    for given in (run, folder / "softmax"):
        model: Any = harness_model(given, rows=2)
        assert model.max_length == run.config.model.context
        found[given] = model.loglikelihood([types.SimpleNamespace(args=("ab", "c"))], disable_tqdm=True)[0][0]
    logits_TV = np.asarray(run.model(jax.numpy.array([list(b"ab")]))[0], np.float64)
    expected = logits_TV[1, ord("c")] - np.log(np.exp(logits_TV[1]).sum())
    assert list(found.values()) == [pytest.approx(expected, rel=1e-5)] * 2
    context = run.config.model.context
    for length in (0, context + 1):  # it has learned positions
        with pytest.raises(ConfigError, match=f"max_length is {length}; expected a number of .* from 1 to {context}"):
            harness_model(run, max_length=length)
    with pytest.raises(ConfigError, match="rows is 0; expected at least 1"):
        harness_model(run, rows=0)


def test_compared_runs_have_the_files_and_figures_of_the_command(folder, tmp_path):
    compared = compare_runs([open_run(folder / "python"), str(folder / "softmax")], title="Two <runs>")
    losses = [small_run.lines(folder / name, "val")[-1]["loss"] for name in ("python", "softmax")]
    assert list(compared.table["run"]) == ["python", "softmax"]
    assert list(compared.table["val_loss"]) == losses
    assert str(compared).startswith(compared.verdict[0])
    starts = {".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml", ".csv": b"run,attention,",
              ".json": b"{"}
    for suffix, start in starts.items():
        path = compared.write(tmp_path / "new" / f"figures{suffix}")
        assert path.read_bytes()[:len(start)].lower() == start.lower(), suffix
    assert "Two &lt;runs&gt;" in (tmp_path / "new" / "figures.html").read_text()
    page = tmp_path / "page.html"
    assert lineargpt.compare.main([str(folder / "python"), str(folder / "softmax"), "--title", "Two <runs>", "--out",
                                   str(page), "--svg", str(tmp_path / "command.svg")]) == 0
    assert page.read_bytes() == (tmp_path / "new" / "figures.html").read_bytes()
    assert (tmp_path / "command.svg").read_bytes() == compared.picture()
    with pytest.raises(ConfigError, match=r"figures\.pdf: expected a name ending in \.html, \.png"):
        compared.write(tmp_path / "figures.pdf")


def test_a_notebook_shows_verdict_picture_and_table(folder):
    shown = compare_runs([folder / "python", folder / "softmax"], title="a < b")._repr_html_()
    compared = compare_runs([folder / "python", folder / "softmax"])
    assert all(f"<p>{sentence}</p>" in shown for sentence in compared.verdict)
    assert '<img alt="a &lt; b" src="data:image/svg+xml;base64,' in shown
    assert f"<td>{compared.table['val_loss'][1]:.4f}</td>" in shown
    assert "a < b" not in shown


def test_errors_name_fields_and_arguments_not_flags(recipe, folder, tmp_path):
    config = load_recipe(recipe)
    with pytest.raises(ConfigError, match=r"not \['chunked'\]; choose another run_dir$"):
        train_run(config, folder / "softmax")
    data = dataclasses.replace(config.data, tokenizer="gpt2")
    with pytest.raises(ConfigError, match=r"; set data\.tokenizer bytes or another data\.dir$"):
        train_run(dataclasses.replace(config, data=data), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"/models--gpt2: .*; expected the folder of a train\.py run$"):
        open_run(tmp_path / "models--gpt2")
    with pytest.raises(ConfigError, match=r"; create one with: python train\.py configs/quickstart\.py --attention "):
        compare_runs([tmp_path / "run"])


def test_runs_that_cannot_be_compared_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="runs is empty"):
        compare_runs([])
    with pytest.raises(ConfigError, match="runs is one run"):
        compare_runs(str(folder / "python"))
    with pytest.raises(ConfigError, match="given twice"):
        compare_runs([folder / "python", open_run(folder / "python")])
    with pytest.raises(ConfigError, match="no such folder"):
        compare_runs([folder / "python", tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="not a run"):
        compare_runs([folder / "python", tmp_path])
    run_dir = Path(shutil.copytree(folder / "python", tmp_path / "run"))
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="no steps yet"):
        compare_runs([folder / "python", run_dir])


def test_the_python_of_the_guide_runs(recipe, folder, tmp_path, monkeypatch):
    """With a tiny recipe in place of the quickstart's."""
    (code,) = re.findall(r"```python\n(.*?)```", (small_run.ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recipe.parent, "configs")
    shutil.copy("configs/tiny.py", "configs/quickstart.py")
    shutil.copytree(folder / "softmax", "runs/softmax")
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["run"].config.model.attention == ("gated",)
    assert found["run"].step == 2
    assert list(found["val"]["step"]) == [2]
    assert 0 < len(found["text"]) <= 100
    assert Path("report.html").is_file()


NOTEBOOK = json.loads((small_run.ROOT / "docs" / "lineargpt.ipynb").read_text())


@pytest.mark.fast
def test_the_notebook_is_committed_without_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        own = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | own
        if own:
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            ast.parse("".join(cell["source"]))  # without magics


REPORT = """
import json
print(json.dumps({"steps": {name: run.step for name, run in runs.items()},
                  "lines": {line.get_label(): list(map(float, line.get_ydata())) for line in axes.get_lines()}}))
"""


@pytest.mark.thorough
def test_the_notebook_runs_in_jupyter_from_training_to_a_picture_and_a_sample(tmp_path):
    text = json.dumps(NOTEBOOK)
    assert text.count("minutes=0.25") == 1
    notebook = json.loads(text.replace("minutes=0.25", "minutes=0.06"))  # losses fall within seconds
    notebook["cells"].append({"cell_type": "code", "id": "report", "metadata": {}, "source": REPORT, "outputs": [],
                              "execution_count": None})
    (tmp_path / "notebook.ipynb").write_text(json.dumps(notebook))
    # As a user runs it: with XLA's own optimisation.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace",
                           "notebook.ipynb"], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env=environment | {"PYTHONPATH": str(small_run.ROOT), "JUPYTER_PLATFORM_DIRS": "1"})
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in json.loads((tmp_path / "notebook.ipynb").read_text())["cells"]
               if cell["cell_type"] == "code" for output in cell["outputs"]]
    *printed, found = "".join("".join(output["text"]) for output in outputs
                              if output.get("name") == "stdout").splitlines()
    found = json.loads(found)
    assert list(found["steps"]) == list(found["lines"]) == ["softmax", "gated"]
    for losses in found["lines"].values():
        assert losses[-1] < np.log(257)
    assert any('src="data:image/svg+xml;base64,' in "".join(output.get("data", {}).get("text/html", ""))
               for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
    assert printed[0].startswith("def ")
    assert len("\n".join(printed[:-2])) > len("def ")
    softmax, gated = ([float(size.replace(",", "")) for size in re.findall(r"([\d,]+) KiB", line)]
                      for line in printed[-2:])
    assert softmax[0] < softmax[1] < softmax[2]
    assert gated[0] == gated[1] == gated[2]
