"""The benchmark of endless sampling prints and writes what it promises, and says what it cannot do."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import endless, timing
from benchmarks.endless import Row
from configs.schema import ModelConfig
from tests import small_run

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.py"
    path.write_text(small_run.RECIPE)
    return path


def test_a_constant_mode_is_drawn_once_and_a_growing_one_for_each_length(recipe, tmp_path, capsys, monkeypatch):
    def in_process(module, case):
        assert module == "benchmarks.endless"
        tokens, windows = case["tokens"], case["windows"]
        step = 1 if case["model"]["attention"] == ("chunked",) else tokens / 1024
        return {"windows": [(tokens * (n + 1) // windows, step, 2**28) for n in range(windows)]}

    monkeypatch.setattr(timing, "in_process", in_process)
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
    assert endless.growth([9.0, 9.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0, 2.0]) == (1.0, 2.0, 2.0)
    assert endless.growth([1.0, 2.0, 3.0]) == (1.0, 3.0, 3.0)
