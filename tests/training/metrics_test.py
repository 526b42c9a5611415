"""A metrics file stays readable whatever happens to its run."""

import errno
import math
import os
import shutil
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orjson
import pytest

import training.metrics
from training.metrics import MetricsWriter, last_step, read_blocks, read_columns

pytestmark = pytest.mark.fast

COMPLETE = '{"step":1,"split":"train","loss":3.0}\n{"step":2,"split":"train","loss":2.0}\n'


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read(path: Path, split: str = "train") -> list[dict]:
    """The records of a split, in the order of the file."""
    return [record for block in reversed(list(read_blocks(path))) for record in block if record["split"] == split]


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def write_lines(path: Path, *steps: int) -> None:
    with MetricsWriter(path) as writer:
        for step in steps:
            writer.write({"step": step, "split": "train", "loss": 1 / step})


def test_records_come_back_from_a_run_in_training(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "split": "train", "loss": 3.5, "tokens": 2**40 + 1})
        writer.write({"step": 1, "split": "val", "loss": 4.0})
        writer.write({"step": 2, "split": "train", "loss": 0.1 + 0.2, "gradient_norm": 1.5})
        # On disk while the run still trains.
        assert read(path) == [{"step": 1, "split": "train", "loss": 3.5, "tokens": 2**40 + 1},
                              {"step": 2, "split": "train", "loss": 0.1 + 0.2, "gradient_norm": 1.5}]
        assert read(path, "val") == [{"step": 1, "split": "val", "loss": 4.0}]


def test_numpy_and_jax_scalars_keep_their_exact_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": np.int64(1), "split": "train", "loss": jnp.float32(0.1), "rate": np.float32(0.1),
                      "half": jnp.bfloat16(0.1)})
    record, = read(path)
    assert record["loss"] == record["rate"] == float(np.float32(0.1))
    assert record["half"] == float(jnp.bfloat16(0.1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.float32("inf")])
def test_non_finite_numbers_stay_valid_json(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "split": "train", "loss": value})
    assert orjson.loads(path.read_bytes()) == {"step": 1, "split": "train", "loss": None}


def test_resuming_cuts_the_lines_past_the_restored_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 2, 3)
    with path.open("a") as file:
        file.write('{"step":2,"split":"val","loss":9}\n{"step":3,"split":"val","loss":9}\n')
    with MetricsWriter(path, keep_through=2) as writer:
        writer.write({"step": 3, "split": "train", "loss": 7.0})
    assert [(record["step"], record["loss"]) for record in read(path)] == [(1, 1), (2, 0.5), (3, 7)]
    assert [record["step"] for record in read(path, "val")] == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reopening_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 2)
    write_lines(path, 3)
    assert steps(path) == [1, 2, 3]


@pytest.mark.parametrize("keep_through", [None, 10])
@pytest.mark.parametrize("half", ['{"step":3,"spl', '{', '{"step":3,"split":"train","loss":1.0'])
def test_a_half_written_last_line_is_passed_over_and_cut_on_resume(tmp_path, half, keep_through):
    path = tmp_path / "metrics.jsonl"
    path.write_text(COMPLETE + half)
    assert steps(path) == [1, 2]
    with MetricsWriter(path, keep_through=keep_through) as writer:
        writer.write({"step": 3, "split": "train", "loss": 1.0})
    assert steps(path) == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_line_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(COMPLETE.rstrip("\n"))
    write_lines(path, 3)
    assert steps(path) == [1, 2, 3]


def test_damaged_lines_are_counted_and_the_first_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(COMPLETE + '\n   \n[1, 2]\nnoise\n{"step": 5}\n' + COMPLETE)
    with pytest.warns(UserWarning, match=rf"{path}: skipped 3 damaged line\(s\), the first at line 5"):
        assert steps(path) == [1, 2, 1, 2]


@pytest.mark.parametrize("size", [20, 39, 40, 41, 100])
def test_blocks_of_any_size_hold_whole_lines(tmp_path, monkeypatch, size):
    path = tmp_path / "metrics.jsonl"
    path.write_text(COMPLETE + "noise\n" + COMPLETE + "\n" + '{"step":7,"split":"train"}')
    monkeypatch.setattr(training.metrics, "BLOCK_BYTES", size)
    with pytest.warns(UserWarning, match=r"skipped 1 damaged line\(s\), the first at line 3"):
        assert steps(path) == [1, 2, 1, 2, 7]


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert list(read_blocks(tmp_path / "metrics.jsonl")) == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        list(read_blocks(tmp_path / "metrics.jsonl"))


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer._file.close()
        writer._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
        with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl"):
            writer.write({"step": 1, "split": "train", "loss": 1.0})


@pytest.mark.parametrize(("move", "folder"), [
    (lambda run: run.rename(run.with_name("other")), "other"),
    (lambda run: run.parent.rename(run.parent.with_name("others")), "../others/run"),
    (shutil.rmtree, None),
    (lambda run: (run / "metrics.jsonl").unlink(), "run"),
    (lambda run: (run / "metrics.jsonl").replace(run / "metrics.old"), "run"),
])
def test_a_file_that_lost_its_name_is_noticed_and_its_lines_can_be_kept(tmp_path, move, folder):
    run, kept = tmp_path / "runs" / "run", tmp_path / "kept"
    kept.mkdir()
    (kept / "metrics.jsonl").write_text("of another run")
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.write({"step": 1, "split": "train", "loss": 1.0})
        assert writer.is_in_place()
        assert writer.folder() == run
        assert writer.keep_in(run) == run / "metrics.jsonl"
        move(run)
        assert not writer.is_in_place()
        assert writer.folder() == (None if folder is None else (tmp_path / "runs" / folder).resolve())
        writer.write({"step": 2, "split": "train", "loss": 1.0})
        assert writer.keep_in(kept) == kept / "metrics.jsonl.1"
    assert steps(kept / "metrics.jsonl.1") == [1, 2]
    assert (kept / "metrics.jsonl").read_text() == "of another run"


@pytest.mark.parametrize(("number", "gone"), [(errno.ESTALE, True), (errno.EIO, False), (errno.ETIMEDOUT, False)])
def test_a_disk_that_is_gone_is_told_from_one_that_does_not_answer(tmp_path, monkeypatch, number, gone):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        def fails(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "stat", fails)
        assert writer.is_in_place() is not gone


def test_a_folder_made_anew_is_another_one(tmp_path):
    run = tmp_path / "run"
    with MetricsWriter(run / "metrics.jsonl") as writer:
        shutil.rmtree(run)
        write_lines(run / "metrics.jsonl", 1)
        assert not writer.is_in_place()


def test_the_last_step_is_that_of_the_last_line_that_has_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text(COMPLETE + '{"split":"note"}\n{"step":9,"spl')
    assert last_step(path) == 2


def test_an_interrupted_resume_loses_no_line(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 2, 3)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(path, keep_through=1)
    assert steps(path) == [1, 2, 3]


def test_columns_have_the_last_record_of_each_step_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(training.metrics, "BLOCK_BYTES", 70)  # several blocks
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"split":"train","loss":3.0}\n{"step":2,"split":"train","loss":2.5}\n'
                    '{"step":2,"split":"val","loss":4.0,"accuracy":0.5}\n{"split":"train","loss":9.0}\n'
                    '{"step":2,"split":"train","loss":2.0}\n{"step":3,"split":"train","loss":null}\n{"step":4')
    found = read_columns(path)
    assert {name: column.dtype.kind for name, column in found.items()} == {
        "step": "i", "split": "U", "loss": "f", "accuracy": "f"}
    assert found["step"].tolist() == [1, 2, 2, 3]
    assert found["split"].tolist() == ["train", "val", "train", "train"]
    np.testing.assert_array_equal(found["loss"], [3.0, 4.0, 2.0, np.nan])
    np.testing.assert_array_equal(found["accuracy"], [np.nan, 0.5, np.nan, np.nan])
    path.write_text("")
    assert read_columns(path) == {}
