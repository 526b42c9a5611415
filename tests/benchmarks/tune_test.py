"""Tuning finds the fastest tiles of the kernel, never ones that are wrong, and changes nothing else in the table."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import timing, tune
from kernels.cases import find_cases
from kernels.linear_attention import pallas_gpu, tuning
from kernels.linear_attention.cases import LinearAttentionCase
from kernels.linear_attention.tuning import Tiles

DEFAULT = tuning.default_row("H200", 64, 64, "bfloat16", "long")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tune, "device", SimpleNamespace(platform=lambda: "gpu", kind=lambda: "H200"))


def time_by(monkeypatch, seconds):
    """Compiles nothing: a candidate takes ``seconds`` of its row of the table, and fails if that is None."""
    def prepare(candidate, case):
        if (found := seconds(candidate)) is None:
            raise ValueError("too many registers")
        return lambda: found

    monkeypatch.setattr(tune, "prepare", prepare)
    monkeypatch.setattr(timing, "time_by_turns", lambda runs, *_: {name: [run()] for name, run in runs.items()})


def test_the_sweep_finds_the_fastest_value_of_every_setting_and_leaves_out_what_fails(tmp_path, monkeypatch, gpu):
    wanted = {"programs_per_core": 4, "forward": Tiles(32, 32, 8, 3), "backward": Tiles(128, 32, 8, 1),
              "queries": Tiles(32, 64, 8, 3)}

    def seconds(row):
        tiles = zip((*row.forward, *row.backward), (*wanted["forward"], *wanted["backward"]), strict=True)
        differences = sum(ours != theirs for ours, theirs in tiles)
        differences += (row.programs_per_core != 4) + (row.queries != wanted["queries"])
        return None if row.forward.chunk == 128 else 1 + 0.05 * differences

    time_by(monkeypatch, seconds)
    out, tried = tmp_path / "tuning.json", tmp_path / "tried.json"
    assert tune.main(["--only", "64x64 bfloat16 long", "--out", str(out), "--json", str(tried)]) == 0
    (row,) = tuning.read(out)
    assert row._replace(measured=None) == DEFAULT._replace(**wanted)
    failed = {entry["error"] for entry in json.loads(tried.read_text())["rows"] if entry["milliseconds"] is None}
    assert failed == {"ValueError: too many registers"}


@pytest.mark.parametrize(("seconds", "tile"), [(0.98, 64), (0.9, 32)])
def test_the_row_is_written_with_its_measurement_and_the_others_stay(seconds, tile, tmp_path, monkeypatch, gpu):
    time_by(monkeypatch, lambda row: seconds if row.backward.tile == 32 else 1.0)
    others = [DEFAULT._replace(device="Other card"), DEFAULT._replace(length="short"),
              DEFAULT._replace(programs_per_core=1)]
    table = tmp_path / "tuning.json"
    table.write_text(json.dumps([tuning.entry(row) for row in others]))
    assert tune.main(["--only", "64x64 bfloat16 long", "--out", str(table)]) == 0
    *kept, row = sorted(tuning.read(table), key=lambda row: row.measured is not None)
    assert kept == others[:2]
    assert row[:5] == DEFAULT[:5]
    assert row.backward.tile == tile
    assert row.measured is not None
    assert row.measured["shapes"] == [
        {"shape": "B1 T16384 H12 M64 D64 bfloat16", "default": 1000.0, "best": 1000 * seconds}]
    assert row.measured.keys() >= {"samples", "versions", "commit", "command"}


def test_a_new_file_begins_with_the_rows_of_the_package(tmp_path, monkeypatch, gpu):
    time_by(monkeypatch, lambda row: 1.0)
    package = tmp_path / "package.json"
    package.write_text(json.dumps([tuning.entry(DEFAULT._replace(device="Other card"))]))
    monkeypatch.setattr(tuning, "TABLE", package)
    assert tune.main(["--only", "64x64 bfloat16 long", "--out", str(tmp_path / "new.json")]) == 0
    assert [row.device for row in tuning.read(tmp_path / "new.json")] == ["Other card", "H200"]
    assert len(tuning.read(package)) == 1


def test_without_a_working_kernel_nothing_is_written(tmp_path, monkeypatch, gpu, capsys):
    time_by(monkeypatch, lambda row: None)
    out = tmp_path / "tuning.json"
    assert tune.main(["--only", "long", "--out", str(out)]) == 1
    assert "ValueError: too many registers" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("M", "D", "dtype"), [(16, 16, "bfloat16"), (64, 128, "bfloat16"), (256, 256, "float32")])
def test_what_is_tried_is_legal_and_differs_in_one_setting(M, D, dtype):
    default = tuning.default_row("H200", M, D, dtype, "short")
    rows = [row for setting in tune.SETTINGS for row in tune.changed(default, setting)]
    assert len(rows) > 12
    for row in rows:
        assert sum(getattr(row, name) != getattr(default, name) for name in tuning.TILED) <= 1
        assert row.forward.tile <= D
        assert row.backward.tile <= max(M, D)
        for tiles in filter(None, (row.forward, row.backward, row.queries)):
            assert tiles.chunk in pallas_gpu.CHUNKS
        plan = tuning.plan(1, 2048, 12, M, D, dtype, row=row)
        assert (plan.schedule == "serial") if row.programs_per_core == 0 else True
        assert plan.span % plan.forward.chunk == plan.span % plan.backward.chunk == 0


def _case() -> LinearAttentionCase:
    (case, *_) = find_cases("tune")
    assert isinstance(case, LinearAttentionCase)
    return case


@pytest.mark.thorough
def test_a_candidate_runs_the_kernel_and_is_left_out_if_it_is_wrong(monkeypatch):
    case = replace(_case(), B=1, T=40, H=1, M=16, D=16)
    candidate = tuning.default_row("cpu", 16, 16, "bfloat16", "short")
    y, *gradients = tune.prepare(candidate, case)()
    assert [x.shape for x in (y, *gradients)] == [(1, 40, 1, 16)] * 4
    right = pallas_gpu.attend

    def wrong(*arguments):
        y, state = right(*arguments)
        return 1.1 * y, state

    monkeypatch.setattr(pallas_gpu, "attend", wrong)
    with pytest.raises(ValueError, match=r"error of y is 1.0e-01, more than"):
        tune.prepare(candidate, case)


@pytest.mark.parametrize("contents", ['[{"device": "H200"}]', "no table"])
def test_what_is_no_table_is_refused(contents, tmp_path, gpu, capsys):
    (tmp_path / "rows.json").write_text(contents)
    assert tune.main(["--out", str(tmp_path / "rows.json")]) == 2
    assert "rows.json: expected a table such as tuning.json" in capsys.readouterr().err
