"""The benchmark of the CPU's workarounds compares what takes turns, and has a row for each that changes a program."""

import json

import pytest

from benchmarks import cpu_workarounds, timing
from kernels import cpu, device


def test_ratios_are_of_medians_with_intervals_around_them():
    with_all, without = [1.0, 1.1, 0.9, 1.0, 5.0], [1.2, 1.3, 1.2, 1.1, 1.2]
    base, row = cpu_workarounds.compare("steps", "a case", {cpu_workarounds.ALL: with_all, "rounded": without})
    assert (row.without, row.measure, row.case) == ("rounded", "steps", "a case")
    assert (base.milliseconds, row.milliseconds) == (1000, 1200)
    assert row.ratio is not None
    assert row.interval is not None
    assert row.ratio == pytest.approx(1.2)
    assert row.interval[0] < row.ratio < row.interval[1]
    assert base.ratio is None


@pytest.mark.thorough
def test_rows_of_the_file_and_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cpu, "WORKAROUNDS", (cpu.weighted_sum, cpu.zeros_unless))
    monkeypatch.setattr(cpu, "PROCESS_WORKAROUNDS", (cpu.keep_freed_memory,))
    monkeypatch.setattr(cpu_workarounds, "GPT2_VOCABULARY", 300)
    monkeypatch.setattr(timing, "in_process", lambda _, case: {"seconds": 1 + (case["without"] != "all")})
    path = tmp_path / "workarounds.json"
    assert cpu_workarounds.main(["--modes", "softmax", "--contexts", "16", "--layers", "1", "--width", "8",
                                 "--repeats", "2", "--processes", "2", "--json", str(path)]) == 0
    contents = json.loads(path.read_text())
    assert contents["command"].startswith("python -m benchmarks.cpu_workarounds ")
    dtypes = ("float32", "bfloat16") if device.has_fast_bfloat16() else ("float32",)
    assert [(row["without"], row["measure"], row["case"]) for row in contents["rows"]] == [
        *((name, "steps", f"softmax, context 16, {dtype}") for dtype in dtypes for name in ("all", "weighted_sum")),
        *((name, "tokens", f"chunked, {how}") for how in ("greedy", "top-k 40") for name in ("all", "zeros_unless")),
        *((name, "process", f"softmax, context 16, {dtypes[-1]}") for name in ("all", "keep_freed_memory"))]
    for base, row in zip(contents["rows"][::2], contents["rows"][1::2], strict=True):
        assert len(base["samples"]) == len(row["samples"]) == 2
        assert row["ratio"] == pytest.approx(row["milliseconds"] / base["milliseconds"])
    assert contents["rows"][-1]["ratio"] == 2
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(contents["rows"])


def test_a_process_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setattr(timing, "in_process", lambda *_: {"error": "killed: out of memory"})
    assert cpu_workarounds.main(["--measure", "process", "--contexts", "16"]) == 1
    assert "killed: out of memory" in capsys.readouterr().err


def test_other_devices_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert cpu_workarounds.main([]) == 2
    assert "requires a CPU: this device is a gpu" in capsys.readouterr().err
