"""The experiment behind the claim: with everything installed, and on a machine without it."""

import json

import jax
import pytest

from benchmarks import headline
from comparison.runs import load_run

TINY = ["--minutes", "0.005", "--context", "64", "--layers", "1", "--heads", "2", "--width", "16", "--eval-every", "20"]


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Flax adds biases of one dimension to what it projects."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def small_corpus(tmp_path, monkeypatch):
    """A text in place of the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 500)
    get_config = headline.quickstart.get_config

    def small(mode):
        config = get_config(mode)
        return headline.replace(config, data=headline.replace(config.data, source=str(path)))

    monkeypatch.setattr(headline.quickstart, "get_config", small)


@pytest.mark.thorough
@pytest.mark.parametrize("bare", [True, False])
def test_runs_and_page_are_kept(bare, small_corpus, tmp_path, monkeypatch, capsys):
    if bare:
        monkeypatch.setattr(headline, "NEEDED", ("package_that_nobody_has",))
    out = tmp_path / "out"
    assert headline.main([*TINY, "--out", str(out)]) == 0
    contents = json.loads((out / "headline.json").read_text())
    assert contents["plain_loop"] == bare
    for mode in ("softmax", "chunked"):
        found = contents["runs"][mode]
        assert found["model"]["attention"] == [mode]
        assert found["median_tokens_per_second"] > 0
        assert found["train_seconds"] >= 0.3
        assert found["tokens"] == 64 * found["steps"]
        assert found["val_curve"][-1] == [pytest.approx(found["train_seconds"]), found["val_loss"]]
        lines = [json.loads(line) for line in (out / mode / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, found["steps"] + 1))
        config = json.loads((out / mode / "config.json").read_text())
        assert config["model"]["context"] == 64
        assert config["model"]["attention"] == [mode]
        assert json.loads((out / mode / "environment.json").read_text())["implementations"]
        assert (out / mode / "checkpoints").exists() != bare
    assert (out / "headline.png").stat().st_size
    assert (out / "headline.html").exists() != bare
    assert contents["command"].endswith(" --out DIR")
    printed = capsys.readouterr().out
    assert "0.005 minutes of training each" in printed
    assert "tokens/s overall  median of steps" in printed
    assert headline.main([*TINY, "--width", "32", "--out", str(out)]) == 2
    assert "another --out" in capsys.readouterr().err
    if bare:  # compare.py draws the same folders elsewhere
        assert [load_run(out / mode).attention for mode in ("softmax", "chunked")] == ["softmax", "chunked"]


@pytest.mark.parametrize(("flags", "message"), [
    (["--minutes", "-1"], "--minutes -1: expected a number above 0"),
    (["--modes", "sotfmax"], "--modes sotfmax: no such mode"),
    (["--heads", "3"], "--heads is 3, which does not divide --width, 16"),
])
def test_usage_errors_name_the_flag_and_exit_with_2(flags, message, tmp_path, capsys):
    assert headline.main([*TINY, *flags, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
