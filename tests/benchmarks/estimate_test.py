"""The estimates of programs and of the devices of a mesh: their text and files, and what the command says it lacks."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import estimate
from compilation import cards, cost, target, tpu
from compilation.launches import Launch, Work
from configs.schema import Config, MeshConfig, TrainConfig
from kernels import embedding
from support.errors import ConfigError


def _fake(launched: Mapping[str, Work], peak: int = 2**30):
    """Estimates by mode; the program of a call counts as that of ``kernel``."""
    def estimated(gpu: target.Target, mode: str, rates: cards.Rates) -> dict[str, Any]:
        rows = cost.grouped([Launch("a", "a product", 10, launched.get(mode, Work()), False)], rates)
        return rows[0] | {"launches": 10, "peak_bytes": peak, "argument_bytes": 2**20, "output_bytes": 2**20,
                          "rows": rows}

    return estimated


@pytest.mark.fast
def test_the_answer_and_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(target, "find_python", lambda: sys.executable)
    monkeypatch.setattr(estimate, "trace", lambda gpu, config, *_: ",".join(config.model.attention))
    monkeypatch.setattr(estimate, "trace_call", lambda *_: "kernel")
    monkeypatch.setattr(estimate, "estimate", _fake({"softmax": Work(4 * 10**9, 0, 0),
                                                     "chunked": Work(2 * 10**9, 0, 0)}))
    path = tmp_path / "estimate.json"
    assert estimate.main(["configs/gpt2_124m.py", "--attention", "chunked", "--vocabulary", "257", "--json",
                          str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("an estimate, no measurement: NVIDIA H200 at 4 TB/s")
    assert f"jax {jax.__version__}" in printed.splitlines()[0]
    assert "5.000 ms, 10 launches" in printed
    assert "softmax: 10.000 ms, 2.00 times as long" in printed
    assert "memory: 1.00 GiB, as compiled for this card; fits: h200, " in printed
    contents = json.loads(path.read_text())
    assert contents["ms"] == pytest.approx(5)
    assert contents["softmax"]["ms"] == pytest.approx(10)
    assert contents["rows"] == [{"group": "a product", "count": 10, "bytes": 20 * 10**9, "operations": 0,
                                 "ms": pytest.approx(5)}]
    assert estimate.main(["--kernel", "linear_attention:2,64,4,32"]) == 0
    printed = capsys.readouterr().out
    assert "0.030 ms, 10 launches, 0.0 passes over memory" in printed
    assert "11 passes" in printed
    monkeypatch.setattr(tpu, "can_compile", lambda: True)
    monkeypatch.setattr(estimate, "Tpu", lambda card: Namespace(kind=card))
    monkeypatch.setattr(tpu, "find_python", lambda: sys.executable)
    monkeypatch.setattr(estimate, "estimate", _fake({"kernel": Work(819 * 10**5, 0, 0)}))
    assert estimate.main(["--kernel", "linear_attention:2,64,4,32", "--card", "v5e", "--json", str(path)]) == 0
    assert "1.000 ms, 10 instructions\n" in capsys.readouterr().out
    assert "passes" not in json.loads(path.read_text())


@pytest.mark.fast
@pytest.mark.parametrize(("flags", "message"), [
    ([], "expected a recipe and flags of train.py, or --kernel"),
    (["--kernel", "linear_attention:1,2,3,4", "--sampling"], "takes neither a recipe"),
    (["--kernel", "attention:1,2,3,4"], "linear_attention, power_attention"),
    (["--kernel", "linear_attention:1,2,3"], "expected B, T, H and D"),
    (["--kernel", "linear_attention:1,2,3,4", "--card", "h300"], "--card is h300; expected "),
    (["configs/gpt2_124m.py", "--mesh.fsdp", "8"], "mesh.fsdp is 8; expected 1"),
    (["configs/gpt2_124m.py", "--vocabulary", "257"], "`make gpu-check` builds an environment that can"),
])
def test_usage_errors(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(target, "can_compile", lambda: False)
    monkeypatch.setattr(target, "ENVIRONMENTS", tmp_path)
    assert estimate.main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.fast
def test_the_program_is_compiled_by_the_python_that_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started = []
    monkeypatch.setattr(target, "find_python", lambda: "envs/0.11.2/bin/python")
    monkeypatch.setattr(estimate.subprocess, "run", lambda command, **_: started.append(command) or Namespace(
        returncode=3))
    given = ["configs/gpt2_124m.py", "--attention", "chunked", "--json", str(tmp_path / "estimate.json")]
    assert estimate.main(given) == 3
    assert estimate.main(["--kernel", "linear_attention:2,64,4,32"]) == 3
    start = ["envs/0.11.2/bin/python", "-m", estimate.MODULE]
    assert started == [[*start, *given, "--vocabulary", "50257"], [*start, "--kernel", "linear_attention:2,64,4,32"]]


@pytest.mark.fast
def test_what_does_not_fit_says_how_much_is_missing_and_what_helps():
    has = cards.MOST_SHARE * cards.MEMORY["h200"] / 2**10
    with pytest.raises(ConfigError, match=rf"200\.0 GiB.* {has:.1f} .*{200 - has:.1f} GiB.*train\.accumulate"):
        estimate.check_fits(200 * 2**30, "h200")
    estimate.check_fits(2**30, "h200")


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [None, 2])
def test_estimates_of_a_small_step(devices: int | None, tmp_path: Path, gpu_python: str):
    found = _run(tmp_path, "configs/quickstart.py", "--attention", "softmax", "--vocabulary", "512", *(
        f"--model.{name}={value}" for name, value in {"layers": 1, "heads": 2, "width": 128, "context": 1024,
                                                      "dtype": "bfloat16", "positions": "rotary"}.items()),
        "--train.batch-size=1", "--train.accumulate=1", "--train.remat=none", *(
            [] if devices is None else ["--devices", str(devices), "--mesh.data", "1", "--mesh.context", str(devices)]))
    # Three products a matrix of a layer and of the head, the attention's two and five, and those of the embedding's
    # gradient.
    dense, of_embedding = 6 * 1024 * (12 * 128**2 + 512 * 128), 2 * 1024 * embedding.ROWS * 128
    if devices is not None:
        assert 0.5 < found["operations"] / (dense + 7 * 1024**2 * 128) < 0.6  # the diagonal's share is more than half
        assert found["collectives"]["all-reduce"] > 4 * 12 * 128**2  # the gradients
        return
    assert found["argument_bytes"] >= 3 * 4 * (512 * 128 + 12 * 128**2)  # float32 weights and their two moments alone
    assert found["operations"] == pytest.approx(dense + 7 * 1024**2 * 128 + of_embedding, rel=0.01)
    # Some launches are in a CUDA graph, where they take less than others can.
    assert any(row["ms"] < 1e3 * row["count"] * cards.RATES["h200"].launch for row in found["rows"])


@pytest.mark.thorough
def test_the_estimate_of_a_small_call(tmp_path: Path, gpu_python: str):
    call = _run(tmp_path, "--kernel", "linear_attention:1,1024,2,64")
    names = {row["group"] for row in call["rows"]}
    assert {"linear_attention_forward", "linear_attention_dq"} <= names
    assert not any("not found" in name for name in names)
    assert call["bytes"] > estimate.LEAST_PASSES * 1024 * 2 * 64 * 2


def _run(folder: Path, *flags: str) -> dict[str, Any]:
    """The file of an estimate, from a process of its own, because the number of devices is fixed when jax starts."""
    path = folder / "estimate.json"
    done = subprocess.run([sys.executable, "-m", estimate.MODULE, *flags, "--json", path], capture_output=True,
                          text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.fast
def test_a_mesh_that_does_not_take_all_devices_is_refused_with_what_would_help():
    config = Config(train=TrainConfig(batch_size=1, accumulate=1))
    with pytest.raises(ConfigError, match=r"devices is 8; .* takes 1: .*devices 1, .*mesh\.context 8"):
        estimate.check_mesh(config, 8)
    with pytest.raises(ConfigError, match=r"expected .*devices 2, .*mesh\.context 8"):
        estimate.check_mesh(replace(config, mesh=MeshConfig(context=2)), 8)
    estimate.check_mesh(config, 1)
    estimate.check_mesh(replace(config, mesh=MeshConfig(context=8)), 8)
    estimate.check_mesh(replace(config, train=TrainConfig(batch_size=8, accumulate=1)), 8)


@pytest.mark.thorough
def test_each_device_computes_its_share_of_a_step(tmp_path):
    small = ("--card", "cpu", "--vocabulary", "257", "--model.layers", "1", "--model.width", "32", "--model.heads", "2",
             "--model.context", "64", "--train.batch-size", "2", "--train.accumulate", "1", "--mesh.data", "1")
    found = {devices: _run(tmp_path, "configs/quickstart.py", "--devices", str(devices), "--mesh.context", str(devices),
                           *small) for devices in (1, 2)}
    assert found[1]["collectives"] == {}
    # Shorter chunks, but a device folds its tokens into a state besides.
    assert found[2]["operations"] / found[1]["operations"] == pytest.approx(0.5, abs=0.05)
    assert found[2]["collectives"]["all-reduce"] > 4 * 257 * 32  # the gradients
    assert found[2]["temporary_bytes"] < found[1]["temporary_bytes"]
