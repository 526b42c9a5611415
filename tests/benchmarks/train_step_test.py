"""The benchmark of training steps prints and writes what it promises, and stops before any work where it cannot."""

import json

import jax
import pytest

from benchmarks import report, train_step

TINY = ["--tokens", "64", "--width", "16", "--layers", "1", "--heads", "2", "--repeats", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Flax adds biases of one dimension to what it projects."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_rows_of_the_file_and_the_table(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert train_step.main([*TINY, "--contexts", "32,64", "--modes", "chunked,softmax:materialised", "--json",
                            str(path)]) == 0
    contents = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert {"jax", "flax", "python"} <= contents["versions"].keys()
    assert contents["device"]
    assert "commit" in contents
    assert contents["command"].startswith("python -m benchmarks.train_step ")
    assert "--contexts 32,64 " in contents["command"]
    rows = contents["rows"]
    assert [(row["context"], row["mode"], row["implementation"], row["batch"]) for row in rows] == [
        (32, "chunked", "chunked", 2), (32, "softmax:materialised", "materialised", 2),
        (64, "chunked", "chunked", 1), (64, "softmax:materialised", "materialised", 1)]
    for chunked, softmax in zip(rows[::2], rows[1::2], strict=True):
        assert softmax["ratio"] == 1
        assert chunked["ratio"] == pytest.approx(softmax["milliseconds"] / chunked["milliseconds"])
    for row in rows:
        assert len(row["samples"]) == 2
        assert min(row["samples"]) <= row["milliseconds"] <= max(row["samples"])
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["milliseconds"])
        assert row["peak_bytes"] > 12 * 257 * 16  # float32 embeddings and their two moments alone
        assert row["error"] is None
    heading, *lines = capsys.readouterr().out.splitlines()[1:]
    assert heading.split()[:2] == ["context", "mode"]
    assert heading.endswith("× softmax")
    assert len(lines) == 4
    assert lines[1].split()[1] == "softmax:materialised"
    assert lines[1].split()[-1] == "1.00"


def test_a_case_beyond_the_memory_or_the_device_is_a_row_without_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "peak_bytes", lambda compiled: 2**60)
    path = tmp_path / "step.json"
    modes = "softmax:cudnn,softmax:materialised"
    assert train_step.main([*TINY, "--contexts", "32", "--modes", modes, "--json", str(path)]) == 1
    cudnn, large = json.loads(path.read_text())["rows"]
    assert cudnn["milliseconds"] is None
    assert "NVIDIA GPU" in cudnn["error"]
    assert large["milliseconds"] is None
    assert large["samples"] == []
    assert "needs 1073741824.0 GiB" in large["error"]
    assert "softmax:materialised at 32: needs" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    (["--modes", "softmax,sotfmax"], "--modes sotfmax: there is no mode 'sotfmax'; there are "),
    (["--modes", "softmax:flash"], "--modes softmax:flash: softmax has no form 'flash'; it has cudnn, blockwise"),
    (["--heads", "3"], "model.heads is 3, which does not divide model.width, 16"),
    (["--contexts", "32,x"], "--contexts: invalid list of positive numbers value: '32,x'"),
    (["--json", "nowhere/step.json"], "--json nowhere/step.json: cannot be written"),
])
def test_usage_errors_name_the_flag_and_exit_with_2(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_step, "measure", lambda *_: pytest.fail("measured all the same"))
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(train_step.main([*TINY, *flags]))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_take_turns():
    calls = []
    report.time_by_turns({name: lambda name=name: calls.append(name) for name in "ab"}, 3, sample_seconds=0)
    assert calls == [*"aabb", *"ab" * 3]
