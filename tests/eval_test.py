"""eval.py as a command, on tiny runs trained here; its results against plain forward passes."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiktoken
from flax import nnx

import eval
from comparison.runs import load_evaluations, load_run
from data import synthetic_tasks, tokenizers
from data.loader import Batch, Corpora, fixed_batches
from data.token_files import TokenFiles
from tests import several_devices, small_run
from tests.edited import edited
from training import evaluation
from training.loading import load_model


@pytest.fixture(autouse=True)
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Made once and read-only: the recipe, its corpus, and "none", a run without positions."""
    folder = tmp_path_factory.mktemp("evaluate")
    with small_run.settings():
        assert small_run.run(small_run.make(folder), "--run-dir", folder / "none", "--model.positions", "none") == 0
    return folder


@pytest.fixture(scope="module")
def recall(folder) -> Path:
    """A run of packed documents with weights, and its corpus in "recall-tokens"."""
    task = synthetic_tasks.parse("mqar:length=32,pairs=4,queries=4,documents=40,val_documents=10")
    assert task is not None
    task.write(folder / "recall-tokens")
    with small_run.settings():
        assert small_run.run(folder / "tiny.py", "--run-dir", folder / "recall", "--data.dir", folder / "recall-tokens",
                             "--data.packing", "documents") == 0
    return folder / "recall"


@pytest.fixture(scope="module")
def learned(folder) -> Path:
    """A run with learned positions."""
    with small_run.settings():
        assert small_run.run(folder / "tiny.py", "--run-dir", folder / "learned", "--attention", "softmax") == 0
    return folder / "learned"


def run(*arguments: object) -> int:
    return eval.main([str(argument) for argument in arguments])


def found(run_dir: Path) -> dict:
    return json.loads((run_dir / "evaluation.json").read_text())


def refused(capsys, code: int, *arguments: object) -> str:
    """The last line on standard error of a command that evaluates nothing and exits with ``code``."""
    capsys.readouterr()
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_loss_is_that_of_the_val_lines(folder, capsys):
    assert run(folder / "none", "--windows", "8,999") == 0
    out, err = capsys.readouterr()
    assert "corpus tokens: context 32, 256 tokens" in err
    report = found(folder / "none")
    (entry,) = report["evaluations"]
    (line,) = small_run.lines(folder / "none", "val")
    assert entry["loss"] == pytest.approx(line["loss"], rel=1e-5)  # summed in another order
    assert entry["bits_per_byte"] == pytest.approx(line["bits_per_byte"], rel=1e-5)
    evaluated = fixed_batches(TokenFiles.open(folder / "tokens"), "val", context=32, batch_size=4, count=2)
    text_bytes = sum(int((batch.targets_BT != 256).sum()) for batch in evaluated)
    assert entry["bits_per_byte"] == pytest.approx(entry["loss"] * entry["tokens"] / math.log(2) / text_bytes)
    assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
    assert report["step"] == 2
    assert report["corpus_checksum"] == json.loads((folder / "none" / "environment.json").read_text())[
        "corpus_checksum"]
    assert report["versions"]["jax"] == jax.__version__
    assert "accuracy" not in entry
    # The bins hold every token once.
    bins = entry["positions"]
    assert [(b["first"], b["last"]) for b in bins] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)]
    assert sum(b["tokens"] for b in bins) == entry["tokens"] == 2 * 4 * 32
    assert sum(b["tokens"] * b["loss"] for b in bins) / entry["tokens"] == pytest.approx(entry["loss"])
    (short,) = entry["short_context"]  # 999 is longer than the context
    assert (short["least"], short["window"], short["tokens"]) == (7, 8, 2 * 4 * (32 - 8))
    assert short["gain"] == pytest.approx(short["loss_window"] - short["loss"])
    for text in (f"{entry['loss']:.4f}", f"{short['gain']:.4f}", "17 to 32", "7 to 8"):
        assert text in out
    assert [path.name for path in (folder / "none").glob("*.tmp")] == []
    # The windows together are the whole.
    ((corpus, context, _), windows), = load_run(folder / "none").window_losses.items()
    assert (corpus, context) == (entry["corpus"], 32)
    assert windows.tokens_N.tolist() == [32] * entry["windows"]
    assert len(set(windows.loss_N.tolist())) == entry["windows"]
    assert windows.loss_N.sum() / windows.tokens_N.sum() == pytest.approx(entry["loss"])


def test_results_are_printed_before_they_are_written(folder, tmp_path, capsys, monkeypatch):
    run_dir = shutil.copytree(folder / "none", tmp_path / "run")
    for path in run_dir.glob("evaluation*"):
        path.unlink()

    def fails(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(run_dir))

    for name in ("write", "write_window_losses"):
        with monkeypatch.context() as patch:
            patch.setattr(eval, name, fails)
            capsys.readouterr()
            assert run(run_dir, "--batches", "1") == 1
        out, err = capsys.readouterr()
        (loss,) = re.findall(r"step 2, chunked.*?│ +32 │ +4 │ +128 │ +(\d\.\d{4}) ± ", out, re.DOTALL)
        assert err.splitlines()[-1].startswith(
            f"eval.py: the printed results are not in {run_dir}/evaluation.json: the folder cannot be written "
            "(Read-only file system); free disk space, or evaluate a copy")
    assert not (run_dir / "evaluation.json").exists()
    # Output that fails ends it no earlier than a failing file.
    monkeypatch.setattr(eval, "print_texts", fails)
    assert run(run_dir, "--batches", "1") == 1
    assert "eval.py: standard output cannot be written (Read-only file system); the results are in " in (
        capsys.readouterr().err)
    (entry,) = found(run_dir)["evaluations"]
    assert f"{entry['loss']:.4f}" == loss


def test_damaged_val_tokens_are_noticed(folder, tmp_path, capsys):
    tokens = shutil.copytree(folder / "tokens", tmp_path / "tokens")
    run_dir = shutil.copytree(folder / "none", tmp_path / "run")
    arguments = (run_dir, "--data.dir", tokens, "--batches", "1")
    assert run(*arguments) == 0
    before = (run_dir / "evaluation.json").read_bytes()
    for name, code in (("train-00000.bin", 0), ("val-00000.bin", 1)):  # train is not read
        content = bytearray((tokens / name).read_bytes())
        content[2] ^= 1
        (tokens / name).write_bytes(content)
        capsys.readouterr()
        assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{tokens}/val-00000.bin does not match its checksum" in err
    assert (run_dir / "evaluation.json").read_bytes() == before


@pytest.mark.thorough
def test_devices_that_share_rows_and_parameters_score_as_one(folder):
    flags = [sys.executable, "eval.py", str(folder / "none"), "--windows", "8"]
    environment = os.environ | several_devices.environment(2)
    losses = []
    for devices in "12":
        done = subprocess.run([*flags, "--devices", devices], cwd=small_run.ROOT, env=environment,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (entry,) = found(folder / "none")["evaluations"]
        losses.append([entry["loss"], entry["short_context"][0]["loss_window"],
                       *(part["loss"] for part in entry["positions"])])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)


@nnx.jit
def forward(model, tokens_BT) -> jax.Array:
    return model(tokens_BT)


def losses(model, tokens_T) -> np.ndarray:
    """Nats of every token but the first, from one plain forward pass."""
    logits_TV = np.asarray(forward(model, jnp.asarray(tokens_T[None, :-1]))[0], np.float64)
    return np.log(np.exp(logits_TV).sum(axis=1)) - logits_TV[np.arange(len(logits_TV)), tokens_T[1:]]


@pytest.mark.thorough
def test_figures_are_those_of_plain_forward_passes(folder):
    model = load_model(folder / "none").model
    files = TokenFiles.open(folder / "tokens")
    found = evaluation.evaluate(model, Corpora.of(files), contexts=[48, 24], windows=[4], tokens=48, tokens_at_once=1)
    long, trained = (one.figures for one in found)
    tokens_T = files.read("val", 0, 49)
    of_all = losses(model, tokens_T)
    assert long["context"] == 48
    assert long["loss"] == pytest.approx(of_all.mean(), rel=1e-5)
    assert long["positions"][3]["loss"] == pytest.approx(of_all[4:8].mean(), rel=1e-5)
    # The shorter context uses the same tokens: the stretch of 48, in two windows.
    halves = np.concatenate([losses(model, tokens_T[:25]), losses(model, tokens_T[24:])])
    assert trained["tokens"] == 48
    assert trained["loss"] == pytest.approx(halves.mean(), rel=1e-5)
    assert (long["windows"], trained["windows"]) == (1, 2)
    of_windows = found[1].windows
    assert of_windows.loss_N / of_windows.tokens_N == pytest.approx([halves[:24].mean(), halves[24:].mean()], rel=1e-5)
    assert of_windows.tokens_N.tolist() == [24, 24]
    assert long["standard_error"] is None
    # Two windows of equal length: the standard deviation of their means, over √2; as exact as a float32 of the losses
    # whose difference it is.
    standard_error = np.std([halves[:24].mean(), halves[24:].mean()], ddof=1) / 2**0.5
    assert trained["standard_error"] == pytest.approx(standard_error, abs=float(np.spacing(np.float32(halves.mean()))))
    # At a window of 4 the stride is 1: the last four tokens exactly.
    short = [losses(model, tokens_T[t - 4 : t + 1])[-1] for t in range(5, 49)]
    assert long["short_context"][0]["least"] == 4
    assert long["short_context"][0]["loss_window"] == pytest.approx(np.mean(short), rel=1e-5)
    assert long["short_context"][0]["loss"] == pytest.approx(of_all[4:].mean(), rel=1e-5)


@pytest.mark.thorough
def test_figures_do_not_depend_on_how_much_is_computed_at_once(folder):
    model, corpora = load_model(folder / "none").model, Corpora.of(TokenFiles.open(folder / "tokens"))
    alone, pairs = (evaluation.evaluate(model, corpora, contexts=[16], windows=[8], tokens=5 * 16,
                                        tokens_at_once=rows * 16)[0].figures for rows in (1, 2))
    assert alone["windows_checksum"] == pairs["windows_checksum"]
    assert alone["tokens"] == pairs["tokens"] == 5 * 16  # five windows: in pairs, the last one is alone
    assert pairs["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert pairs["short_context"][0]["loss_window"] == pytest.approx(alone["short_context"][0]["loss_window"], rel=1e-5)


@pytest.mark.parametrize(("length", "window"), [(32, 8), (33, 8), (40, 16), (9, 8), (8, 8), (21, 1)])
def test_short_windows_score_each_later_token_once(length, window):
    inputs_BT = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    short = evaluation.short_windows(Batch(inputs_BT, inputs_BT + 1), window)
    scored = short.targets_BT >= 0
    expected = np.concatenate([row[window:] for row in inputs_BT + 1])
    assert sorted(short.targets_BT[scored].tolist()) == expected.tolist()
    assert (np.diff(short.inputs_BT, axis=1) == 1).all()
    assert (np.nonzero(scored)[1] + 1 > 3 * window / 4).all()


def test_positions_are_counted_within_documents():
    segments_BT = np.array([[0, 0, 0, 1, 1, -1], [0, 1, 2, 2, 2, 2]], np.int32)
    tokens_BT = np.zeros((2, 6), np.int32)
    batch = Batch(tokens_BT, np.where(segments_BT < 0, -1, tokens_BT), segments_BT)
    assert evaluation.context_lengths(batch).tolist() == [[1, 2, 3, 1, 2, 0], [1, 1, 1, 2, 3, 4]]
    short = evaluation.short_windows(batch, 2)
    assert short.segment_ids_BT is not None
    assert int((np.asarray(short.targets_BT) >= 0).sum()) == 3


@pytest.mark.thorough
def test_accuracy_where_the_corpus_has_weights(recall, capsys):
    assert run(recall, "--windows", "8") == 0
    (entry,) = found(recall)["evaluations"]
    (line,) = small_run.lines(recall, "val")
    assert entry["accuracy"] == pytest.approx(line["accuracy"])
    assert entry["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert entry["tokens"] == 8 * 4
    assert "bits_per_byte" not in entry
    assert all(0 <= b["accuracy"] <= 1 for b in entry["positions"])
    assert "accuracy in window" in capsys.readouterr().out


@pytest.mark.thorough
def test_contexts_that_the_positions_allow(folder, learned, capsys):
    assert run(folder / "none", "--context", "8,64", "--batches", "1") == 0
    entries = found(folder / "none")["evaluations"]
    assert [(entry["context"], entry["windows"]) for entry in entries] == [(8, 64), (64, 8)]  # one batch is 128 tokens
    assert min(p["standard_error"] for entry in entries for p in entry["positions"]) > 0
    assert run(learned, "--context", "16") == 0
    err = refused(capsys, 2, learned, "--context", "16,33")
    assert "context is 33: the model has positions for 32 tokens" in err
    before = found(learned)["evaluations"]
    assert [entry["context"] for entry in before] == [16]
    # Other windows of the same val split are not confused with these.
    assert run(learned, "--context", "16", "--batches", "1") == 0
    assert len({entry["windows_checksum"] for entry in [*found(learned)["evaluations"], *before]}) == 2


@pytest.mark.thorough
def test_compare_takes_the_loss_by_position(recall, tmp_path):
    run_dir = shutil.copytree(recall, tmp_path / "recall")
    (run_dir / "evaluation.json").unlink(missing_ok=True)
    assert load_evaluations(run_dir) == (None, [], {})
    assert run(run_dir, "--context", "16,32") == 0
    _, entries, _ = load_evaluations(run_dir)
    assert [entry["context"] for entry in entries] == [16, 32]
    assert entries == found(run_dir)["evaluations"]


@pytest.mark.thorough
def test_another_corpus_is_named(folder, recall, tmp_path, capsys):
    run_dir = shutil.copytree(folder / "none", tmp_path / "run")
    assert run(run_dir, "--data.dir", recall.with_name("recall-tokens")) == 0
    assert "is not the training corpus of" in capsys.readouterr().err
    assert "accuracy" in found(run_dir)["evaluations"][0]


@pytest.mark.thorough
def test_published_weights_have_no_corpus_of_their_own(folder, tmp_path, capsys):
    run_dir = shutil.copytree(folder / "none", tmp_path / "run")
    with edited(run_dir / "environment.json") as environment:
        environment["published_weights"] = {"source": "elsewhere"}
    said = refused(capsys, 2, run_dir)
    assert "holds published weights, without a corpus: give --data.dir" in said
    assert "are mutually exclusive" in refused(capsys, 2, run_dir, "--data.dir", "a", "--data.source", "b")
    assert run(run_dir, "--data.source", folder / "texts") == 0
    with edited(run_dir / "config.json") as config:
        config["data"]["tokenizer"] = "gpt2"
    large = tiktoken.Encoding("gpt2", pat_str=".", mergeable_ranks={
        bytes([i]): i for i in range(256)}, special_tokens={"<|endoftext|>": 50256})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "load", lambda name: large)
        patch.setattr(eval, "open_corpora", lambda data: pytest.fail("prepared for nothing"))
        said = refused(capsys, 2, run_dir, "--data.source", folder / "texts")
    assert "the tokenizer gpt2 has a vocabulary of 50257 tokens, the model of" in said


def test_what_cannot_be_evaluated(folder, tmp_path, capsys):
    assert "there is no such folder" in refused(capsys, 2, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "not a run, it has no config.json" in refused(capsys, 2, tmp_path / "empty")
    assert "no token files" in refused(capsys, 2, folder / "none", "--data.dir", tmp_path)
    assert re.search(r"split is test; .*tokens has only train and val", refused(
        capsys, 2, folder / "none", "--split", "test"))
    assert "the val split of" in refused(capsys, 2, folder / "none", "--context", "10000000")
    for flag, value in (("--context", "0"), ("--context", "1k"), ("--context", ""), ("--windows", "-3"),
                        ("--batches", "0")):
        assert f"{flag} is {value}; expected" in refused(capsys, 2, folder / "none", f"{flag}={value}")
    bare = tmp_path / "bare"
    shutil.copytree(folder / "none", bare)
    shutil.rmtree(bare / "checkpoints")
    assert "no checkpoints yet" in refused(capsys, 1, bare)
    without = tmp_path / "without-val"
    shutil.copytree(folder / "tokens", without)
    with edited(without / "meta.json") as meta:
        del meta["splits"]["val"]
    (without / "val-00000.bin").unlink()
    assert "no validation tokens" in refused(capsys, 1, folder / "none", "--data.dir", without)


def test_classes_of_tokens_add_up_to_the_loss(folder, capsys, tmp_path):
    first = Path(shutil.copytree(folder / "none", tmp_path / "run"))
    assert run(first, "--by-token-class", "--context", "16,32") == 0
    assert "repeats of 4 tokens, context 16" in capsys.readouterr().out
    for entry in found(first)["evaluations"]:
        partitions = {one["partition"]: one["classes"] for one in entry["token_classes"]}
        assert list(partitions) == ["repeats of 2 tokens", "repeats of 4 tokens", "repeats of 8 tokens", "characters",
                                    "closing brackets", "prose"]
        for classes in partitions.values():
            assert sum(one["tokens"] for one in classes) == entry["tokens"]
            assert sum(one["share"] for one in classes) == pytest.approx(1)
            assert sum(one["share"] * one["loss"] for one in classes) == pytest.approx(entry["loss"])
        assert {one["class"] for one in partitions["prose"]} <= {"content word", "number", "whitespace",
                                                                 "end of document", "function word", "other character"}
    _, _, windows = load_evaluations(first)
    for losses in windows.values():
        assert set(losses.classes) == {one["partition"] for one in found(first)["evaluations"][0]["token_classes"]}
        for of_class in losses.classes.values():
            np.testing.assert_allclose(of_class.loss_NK.sum(axis=1), losses.loss_N)
            np.testing.assert_array_equal(of_class.tokens_NK.sum(axis=1), losses.tokens_N)
    assert run(first) == 0
    assert "token_classes" not in found(first)["evaluations"][0]


def test_a_corpus_without_text_has_no_classes(recall, capsys):
    assert "symbols of a generated corpus, which have no classes of tokens; expected text" in refused(
        capsys, 2, recall, "--by-token-class")


def test_tasks_of_lm_evaluation_harness(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data.jsonl").write_text('{"text": "def f(self):"}\n')
    (tmp_path / "task.yaml").write_text(f"""
task: bytes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "data.jsonl"}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
""")
    shutil.copytree(folder / "none", tmp_path / "run")
    assert run(tmp_path / "run", "--tasks", "bytes", "--task-dir", tmp_path, "--limit", 1) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "evaluation-harness.json").read_text())
    bits = written["harness"]["results"]["bytes"]["bits_per_byte,none"]
    loaded = load_model(tmp_path / "run")
    text = b"def f(self):"
    x_BTE, _ = loaded.model.forward(jnp.array([[256, *text[:-1]]]))
    loss = float(loaded.model.head.loss_sum(x_BTE, jnp.array([[*text]]))) / len(text)
    assert bits == pytest.approx(loss / math.log(2), rel=1e-5)
    assert f"{bits:.4g}" in out
    assert (written["step"], written["limit"]) == (loaded.step, 1)


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--tasks", ","], "--tasks names no task; expected one or more, comma-separated, such as lambada_openai"),
    (["--tasks", "a", "--by-token-class"], "--by-token-class and --tasks are mutually exclusive"),
    (["--tasks", "a", "--data.source", "b"], "--data and --tasks are mutually exclusive: a task has its own data"),
    (["--tasks", "a", "--limit", 0], "--limit is 0; expected at least 1"),
    (["--tasks", "a", "--fewshot", -1], "--fewshot is -1; expected at least 0"),
    (["--tasks", "a", "--task-dir", "nowhere"], "--task-dir nowhere: there is no such folder"),
    (["--task-dir", "nowhere"], "--task-dir requires --tasks"),
    (["--limit", 3], "--limit requires --tasks")])
def test_flags_of_tasks_that_do_not_fit(folder, capsys, arguments, expected):
    assert expected in refused(capsys, 2, folder / "none", *arguments)


def test_the_earlier_name_names_this_one_and_leaves_the_package_to_imports(tmp_path):
    root = Path(eval.__file__).parent
    done = subprocess.run([sys.executable, root / "evaluate.py", "RUN"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "evaluate.py is now eval.py: python eval.py RUN\n")
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "__init__.py").write_text("from evaluate.part import value")
    (tmp_path / "evaluate" / "part.py").write_text("value = 42")
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r}); import evaluate; print(evaluate.value)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stdout) == (0, "42\n")
