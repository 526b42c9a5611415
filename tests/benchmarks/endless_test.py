"""The benchmark of endless sampling prints and writes what it promises, and says what it cannot do."""

import json
from dataclasses import asdict
from pathlib import Path

import jax
import pytest

from benchmarks import endless, report
from benchmarks.endless import Row
from benchmarks.picture import draw_panels
from configs.schema import ModelConfig
from support.errors import ConfigError
from tests import tiny

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Flax adds biases of one dimension to what it projects."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.py"
    path.write_text(tiny.RECIPE)
    return path


def test_a_constant_mode_is_drawn_once_and_a_growing_one_for_each_length(recipe, tmp_path, capsys, monkeypatch):
    def in_process(module, case):
        assert module == "benchmarks.endless"
        tokens, windows = case["tokens"], case["windows"]
        step = 1 if case["model"]["attention"] == ("chunked",) else tokens / 1024
        return {"windows": [(tokens * (n + 1) // windows, step, 2**28) for n in range(windows)]}

    monkeypatch.setattr(report, "in_process", in_process)
    path = tmp_path / "endless.json"
    assert endless.main(["--recipe", str(recipe), "--positions", "rotary", "--tokens", "5000", "--growing-tokens",
                         "5000", "--json", str(path), "--picture", str(tmp_path / "endless.png")]) == 0
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert [row.position for row in rows if row.mode == "chunked"] == list(range(100, 5001, 100))
    assert [row.position for row in rows if row.mode == "softmax"] == [1024, 2048, 4096]
    assert {row.positions for row in rows} == {"rotary"}
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["chunked", "rotary", "5,000", "1.000", "1.000", "1.00", "256", "256", "1.00"],
        ["softmax", "rotary", "4,096", "1.000", "4.000", "4.00", "256", "256", "1.00"]]
    assert (tmp_path / "endless.png").stat().st_size


@pytest.mark.thorough
def test_a_process_draws_all_tokens_and_times_its_windows(capsys):
    model = ModelConfig(layers=1, heads=1, width=8, context=4, positions="rotary", dtype="float32",
                        attention=("chunked",), modes={"chunked": {"feature_map": "softplus"}})
    case = {"model": asdict(model), "vocabulary": 5, "tokens": 100, "windows": 3}
    assert endless.main(["--case", json.dumps(case)]) == 0
    windows = json.loads(capsys.readouterr().out)["windows"]
    assert [drawn for drawn, _, _ in windows] == [64, 96, 100]  # the first piece past each third
    assert all(milliseconds > 0 and resident > 50e6 for _, milliseconds, resident in windows)


def test_growth_leaves_out_the_warm_up():
    assert endless.growth([9.0, 9.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0, 2.0]) == (1.0, 2.0)
    assert endless.growth([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_the_picture_has_a_ring_at_the_context_of_training(tmp_path):
    rows = [Row("chunked", "none", n, 0.5, 2**28) for n in (1000, 2000, 4000)]
    run = {"run": "mine", "attention": "chunked", "positions": "none", "trained_context": 2,
           "losses": [{"last": last, "loss": 2.0} for last in (1, 2, 4)]}
    draw_panels(tmp_path / "endless.svg", endless.panels(rows, [run]), title="a device")
    drawn = (tmp_path / "endless.svg").read_text()
    assert "<!-- mine (chunked, none) -->" in drawn
    assert "<!-- resident MiB -->" in drawn


@pytest.mark.parametrize(("flags", "message"), [
    (["--positions", "learned"], "--positions learned: expected rotary or none"),
    (["--modes", "sotfmax"], "sotfmax: no such mode"),
    (["--runs", "nowhere"], "nowhere: there is no such folder"),
])
def test_usage_errors_are_told_before_any_work(recipe, flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "in_process", lambda *_: pytest.fail("measured all the same"))
    assert endless.main(["--recipe", str(recipe), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_learned_positions_have_no_loss_past_their_end(tmp_path, recipe):
    folder = tmp_path / "run"
    with tiny.settings():
        assert tiny.run(tiny.make(tmp_path), "--run-dir", folder, "--model.layers", 1, "--train.steps", 1) == 0
    with pytest.raises(ConfigError, match="the model has positions for 32 tokens and none beyond"):
        endless.losses(folder, None, 1)
    found = endless.losses(folder, 32, 2)
    assert found["run"] == "run"
    assert (found["trained_context"], found["context"]) == (32, 32)
    assert [bin["last"] for bin in found["losses"]] == [1, 2, 4, 8, 16, 32]
