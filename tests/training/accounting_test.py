"""Operations counted, peaks, and the split of a run's wall time."""

import json

import pytest

from tests import small_run
from tests.edited import contents
from training import accounting
from training.accounting import PARTS, Peak, Timing


def test_the_parts_are_all_the_time_and_add_up_over_starts(tmp_path, monkeypatch):
    clock = iter([11.0, 14.0, 15.0, 101.0, 103.0])
    monkeypatch.setattr(accounting.time, "perf_counter", lambda: next(clock))
    timing = Timing.of_run(tmp_path, 10.0)
    timing.enter("compile")
    timing.enter("step")
    timing.write()
    timing = Timing.of_run(tmp_path, 100.0)
    timing.enter("step")
    timing.write()
    found = contents(tmp_path / "timing.json")
    assert found == {"seconds": dict.fromkeys(PARTS, 0.0) | {"other": 2.0, "compile": 3.0, "step": 3.0},
                     "wall_seconds": 8.0, "starts": 2}
    assert str(timing).startswith("compile 3.0 s (38%), input 0.0 s (0%), step 3.0 s (38%), ")


@pytest.mark.parametrize("contents", ['{"seconds": {}}', "", '{"seconds": {"compile": 1'])
def test_a_damaged_file_of_times_is_noted_and_stops_no_run(tmp_path, capsys, contents):
    (tmp_path / "timing.json").write_text(contents)
    timing = Timing.of_run(tmp_path, 0.0)
    assert (timing.wall_seconds, timing.starts) == (0, 1)
    assert "timing.json is damaged: earlier times are lost" in capsys.readouterr().err


def test_an_exception_is_told_and_not_that_the_times_cannot_be_written(tmp_path):
    timing = Timing.of_run(tmp_path / "nowhere", 0.0)
    with pytest.raises(ZeroDivisionError), timing:
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), timing:
        pass


def test_peaks_are_of_the_devices_used_and_of_the_number_format(monkeypatch):
    monkeypatch.setattr(accounting, "peak", lambda: Peak({"bfloat16": 5.0}, 1.0))
    assert accounting.peak_flops("bfloat16", 3) == 15
    assert accounting.peak_flops("float32", 3) is None
    monkeypatch.setattr(accounting, "peak", lambda: None)
    assert accounting.peak_flops("bfloat16", 3) is None


def test_a_run_logs_operations_utilisation_and_times_also_when_it_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.loop.peak_flops", lambda dtype, devices: 1e12)
    with small_run.settings():
        command = small_run.make(tmp_path), "--run-dir", tmp_path / "run"
        assert small_run.run(*command, "--train.steps", 2) == 0
        assert small_run.run(*command, "--train.steps", 4) == 0
    lines = small_run.lines(tmp_path / "run")
    config, environment = (json.loads((tmp_path / "run" / name).read_text())
                           for name in ("config.json", "environment.json"))
    per_token = accounting.flops_per_token(config, environment)
    assert [line["flops"] for line in lines] == [line["tokens"] * per_token for line in lines]
    for line in small_run.lines(tmp_path / "run", "train"):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * per_token / 1e12)
    assert environment["peak_flops"] == 1e12
    times = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert times["starts"] == 2
    assert sum(times["seconds"].values()) == times["wall_seconds"] > lines[-1]["wall_seconds"]
    assert all(times["seconds"][part] > 0 for part in PARTS)
    assert " s wall time: compile " in capsys.readouterr().err


def test_the_state_of_a_model_is_that_of_all_its_layers():
    config = {"model": {"layers": 3, "heads": 2, "width": 16, "context": 32, "attention": ["chunked", "softmax"],
                        "modes": {"chunked": {"feature_map": "taylor"}}}}
    features = 1 + 8 + 8 * 9 // 2
    assert accounting.state_bytes(config) == 4 * (2 * 2 * features * (8 + 1) + 2 * 32 * 16)
    config["model"]["head_width"] = 4
    assert accounting.state_bytes(config) == 4 * (2 * 2 * (1 + 4 + 10) * (4 + 1) + 2 * 32 * 8)
