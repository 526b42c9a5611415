"""Tuning finds the fastest cut of the kernels, never one that is wrong, and changes nothing else in the table."""

import json
import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tune
from kernels.linear_attention import pallas_gpu, tuning
from kernels.linear_attention.tuning import Tiles

DEFAULT = tuning.default_row("H200", 64, 64, "bfloat16", "long")


class SyntheticBench:
    """Times that are a function of the row: those of the defaults but for what is faster."""

    def __init__(self, default, shapes, faster=lambda row: 1.0):
        self.default, self.shapes, self.faster, self.trials = default, shapes, faster, {}

    def start(self):
        pass

    def try_out(self, rows):
        found = [tune.Trial(row, error="too many registers") if row.forward.chunk == 128 else
                 tune.Trial(row, (self.faster(row),), self.faster(row)) for row in rows]
        self.trials |= {trial.row: trial for trial in found}
        return found

    def compare(self, best):
        return [{"shape": "B1 T16384 H12 M64 D64", "default": 1.0, "best": self.faster(best)}]


def soon():
    return time.monotonic() + 60


def test_the_search_goes_down_in_every_knob_and_leaves_out_what_fails():
    wanted = {"programs_per_core": 4, "forward": Tiles(32, 32, 8, 3), "backward": Tiles(128, 32, 8, 1),
              "queries": Tiles(32, 64, 8, 3)}

    def faster(row):
        tiles = zip((*row.forward, *row.backward), (*wanted["forward"], *wanted["backward"]), strict=True)
        differences = sum(ours != theirs for ours, theirs in tiles)
        differences += (row.programs_per_core != 4) + (row.queries != wanted["queries"])
        return 1 - 0.05 * (10 - differences) / 11

    found = tune.search(SyntheticBench(DEFAULT, (), lambda row: 0.01 if row.forward.chunk == 128 else faster(row)), [],
                        soon())
    # Steps of half a hundredth are noise; of two they are not.
    assert found == DEFAULT
    found = tune.search(SyntheticBench(DEFAULT, (), lambda row: faster(row) ** 5), [], soon())
    assert found == DEFAULT._replace(**wanted)


def test_the_search_starts_at_the_present_row_too_and_stops_in_time():
    present = DEFAULT._replace(backward=Tiles(32, 32, 8, 1), measured={"samples": 20})
    bench = SyntheticBench(DEFAULT, (), lambda row: 0.5 if row.backward == present.backward else 1.0)
    assert tune.search(bench, [present._replace(measured=None)], time.monotonic() - 1).backward == present.backward
    assert set(bench.trials) == {DEFAULT, present._replace(measured=None)}  # nothing else was tried


@pytest.mark.parametrize(("M", "D", "dtype"), [(16, 16, "bfloat16"), (64, 128, "bfloat16"), (256, 256, "float32")])
def test_what_is_tried_is_legal_and_differs_in_one_thing(M, D, dtype):
    default = tuning.default_row("H200", M, D, dtype, "short")
    rows = [row for setting in tune.SETTINGS for row in tune.changed(default, setting)]
    assert len(rows) > 15
    for row in rows:
        assert sum(getattr(row, name) != getattr(default, name) for name in tuning.TILED) <= 1
        assert row.forward.tile <= D
        assert row.backward.tile <= max(M, D)
        for tiles in filter(None, (row.forward, row.backward, row.queries)):
            assert tiles.chunk in pallas_gpu.CHUNKS
        plan = tuning.plan(1, 2048, 12, M, D, dtype, row=row)
        assert (plan.schedule == "serial") if row.programs_per_core == 0 else True
        assert plan.span % plan.forward.chunk == plan.span % plan.backward.chunk == 0


@pytest.fixture
def bench():
    default = tuning.default_row("cpu", 16, 16, "bfloat16", "short")
    return tune.Bench(default, (tune.Shape(1, 40, 1),))


@pytest.mark.thorough
def test_a_candidate_that_is_wrong_or_fails_is_left_out(bench, monkeypatch):
    default = bench.default
    other, broken = (default._replace(backward=default.backward._replace(**change))
                     for change in ({"warps": 8}, {"stages": 3}))
    right = pallas_gpu.attend

    def attend(q, k, v, initial, runs, normalize, choose):
        plan = choose(1, 40, 1, 16, 16, q.dtype)
        if plan.backward == broken.backward:
            raise ValueError("shared memory exhausted")
        y, state = right(q, k, v, initial, runs, normalize, choose)
        return (y + 0.1 * jax.lax.stop_gradient(y) if plan.backward == other.backward else y), state

    monkeypatch.setattr(pallas_gpu, "attend", attend)
    bench.start()
    found = bench.try_out([default, other, broken])
    assert [trial.row for trial in found] == [default, other, broken]
    assert found[0].error is None
    assert found[0].score == 1
    assert "B1 T40 H1: error of y is 1.0e-01, more than " in found[1].error
    assert "shared memory exhausted" in found[2].error
    assert found[1].score == found[2].score == math.inf
    # Rows with the same plan are timed once.
    alike = bench.try_out([default, default._replace(queries=default.backward)])
    assert alike[0].milliseconds == alike[1].milliseconds
    compared = bench.compare(default)
    assert compared[0].keys() == {"shape", "default", "best"}
    assert compared[0]["shape"] == "B1 T40 H1 M16 D16"
    assert compared[0]["default"] > 0


def test_wrong_defaults_are_no_measure(bench, monkeypatch):
    right = pallas_gpu.attend

    def attend(*arguments):
        y, state = right(*arguments)
        return y * jnp.nan, state

    monkeypatch.setattr(pallas_gpu, "attend", attend)
    with pytest.raises(tune.WrongDefaultError, match="wrong at B1 T40 H1: error of y is nan"):
        bench.start()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tune, "device", SimpleNamespace(platform=lambda: "gpu", kind=lambda: "H200"))


@pytest.mark.parametrize(("time_of_small_tiles", "chosen"), [(0.98, "default"), (0.9, "best")])
def test_the_row_is_written_with_its_measurement_and_the_others_stay(tmp_path, monkeypatch, gpu, capsys,
                                                                      time_of_small_tiles, chosen):
    monkeypatch.setattr(tune, "Bench", lambda default, shapes: SyntheticBench(
        default, shapes, lambda row: time_of_small_tiles if row.backward.tile == 32 else 1.0))
    others = [DEFAULT._replace(device="Other card"), DEFAULT._replace(length="short"),
              DEFAULT._replace(programs_per_core=1)]
    table, tried = tmp_path / "tuning.json", tmp_path / "tried.json"
    table.write_text(json.dumps([tuning.entry(row) for row in others]))
    arguments = ["--widths", "64x64", "--lengths", "long", "--out", str(table), "--json", str(tried)]
    assert tune.main(arguments) == 0
    *kept, row = sorted(tuning.read(table), key=lambda row: row.measured is not None)
    assert kept == others[:2]
    assert row[:5] == DEFAULT[:5]
    assert row.backward.tile == (32 if chosen == "best" else 64)
    assert row.measured["chosen"] == chosen
    assert row.measured["shapes"] == [
        {"shape": "B1 T16384 H12 M64 D64", "default": 1.0, "best": time_of_small_tiles}]
    assert row.measured.keys() >= {"samples", "tried", "left_out", "versions", "commit", "command"}
    assert row.measured["command"].endswith("--widths 64x64 --dtypes bfloat16 --lengths long --minutes 8.0")
    (written,) = json.loads(tried.read_text())["rows"]
    assert written["measured"]["left_out"] > 0
    assert "64x64 bfloat16 long" in capsys.readouterr().out
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["tried.json", "tuning.json"]


def test_a_new_file_begins_with_the_rows_of_the_package(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr(tune, "Bench", SyntheticBench)
    package = tmp_path / "package.json"
    package.write_text(json.dumps([tuning.entry(DEFAULT._replace(device="Other card"))]))
    monkeypatch.setattr(tuning, "TABLE", package)
    assert tune.main(["--widths", "64x64", "--lengths", "long", "--out", str(tmp_path / "new.json")]) == 0
    assert [row.device for row in tuning.read(tmp_path / "new.json")] == ["Other card", "H200"]
    assert len(tuning.read(package)) == 1


def test_without_time_or_a_working_kernel_nothing_is_written(tmp_path, monkeypatch, gpu, capsys):
    class Broken(SyntheticBench):
        def start(self):
            raise tune.WrongDefaultError("the defaults fail at B1 T16384 H12: no such instruction")

    monkeypatch.setattr(tune, "Bench", Broken)
    out = tmp_path / "tuning.json"
    assert tune.main(["--minutes", "0.1", "--out", str(out)]) == 1
    assert "no time left for 64x64 bfloat16 short, 128x128" in capsys.readouterr().err
    assert tune.main(["--widths", "64x64", "--lengths", "long", "--out", str(out)]) == 1
    assert "64x64 bfloat16 long: the defaults fail at B1 T16384 H12: no such" in capsys.readouterr().err
    assert not out.exists()


def test_it_needs_a_gpu(capsys):
    assert tune.main([]) == 2
    assert "requires a GPU: on a cpu the kernel is interpreted" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    (["--minutes", "0"], "--minutes: invalid number above 0 value: '0'"),
    (["--dtypes", "float16"], "--dtypes: float16: expected bfloat16, float32, or several"),
    (["--lengths", "medium"], "--lengths: medium: expected short, long, or several"),
    (["--widths", "48x48"], "--widths: 48x48: expected 16x16, 16x32, "),
    (["--out", "/nowhere/tuning.json"], "--out /nowhere/tuning.json: cannot be written"),
])
def test_usage_errors_name_the_flag_and_exit_with_2(flags, message, gpu, capsys):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(tune.main(flags))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_table_is_refused(tmp_path, gpu, capsys):
    (tmp_path / "rows.json").write_text('[{"device": "H200"}]')
    assert tune.main(["--out", str(tmp_path / "rows.json")]) == 2
    assert "rows.json: expected a table such as tuning.json" in capsys.readouterr().err
