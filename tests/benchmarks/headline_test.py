"""The experiment behind the claim: through train.py and compare.py, and what it says where packages are missing."""

import json

import pytest

from benchmarks import headline
from comparison.runs import load_run

TINY = ["--minutes", "0.005", "--context", "64", "--model.layers", "1", "--model.heads", "2", "--model.width", "16",
        "--train.eval-every", "20"]


@pytest.mark.thorough
def test_runs_and_page_are_kept(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 500)  # in place of the standard library
    tiny = [*TINY, "--data.source", str(text)]
    assert headline.main([*tiny, "--out", str(out)]) == 0
    for mode in ("softmax", "chunked"):
        lines = [json.loads(line) for line in (out / mode / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line["split"] == "train"]
        assert steps == list(range(1, len(steps) + 1))
        assert lines[-1]["tokens"] == 64 * len(steps)
        assert max(line["train_seconds"] for line in lines) >= 0.3
        config = json.loads((out / mode / "config.json").read_text())
        assert config["model"]["context"] == 64
        assert config["model"]["attention"] == [mode]
        assert json.loads((out / mode / "environment.json").read_text())["implementations"]
        assert (out / mode / "checkpoints").exists()
    assert (out / "headline.png").stat().st_size
    assert "0.005 minutes of training each" in (out / "headline.html").read_text()
    assert len(json.loads((out / "headline.json").read_text())["setups"]) == 2
    assert "softmax" in capsys.readouterr().out
    assert [load_run(out / mode).attention for mode in ("softmax", "chunked")] == ["softmax", "chunked"]
    assert headline.main([*tiny, "--model.width", "32", "--out", str(out)]) == 2
    assert "another run_dir (--out)" in capsys.readouterr().err


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(headline, "NEEDED", ("tyro", "package_that_nobody_has", "nor_this"))
    assert headline.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "benchmarks.headline: requires packages that are not installed: package_that_nobody_has, nor_this\n")
    assert not (tmp_path / "out").exists()
