"""What a step takes of each device: collectives by hand, and a small step on CPU devices."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.devices import check_mesh
from benchmarks.program import read_program
from configs.schema import Config, MeshConfig, TrainConfig
from support.errors import ConfigError

PROGRAM = """\
HloModule jit_step

%add (left: f32[], right: f32[]) -> f32[] {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %added = f32[] add(%left, %right)
}

%scattered (p0.3: f32[8,4]) -> f32[2,4] {
  %p0.3 = f32[8,4]{1,0} parameter(0)
  ROOT %inner = f32[2,4]{1,0} reduce-scatter(%p0.3), dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %state = (s32[], f32[2,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[2,4]{1,0} get-tuple-element(%state), index=1
  %start = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), dimensions={0}
  %done = f32[8,4]{1,0} all-gather-done(%start)
  %wrapped = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%done), calls=%scattered
  %back = f32[2,4]{1,0} async-done(%wrapped), calls=%scattered
  ROOT %next = (s32[], f32[2,4]{1,0}) tuple(%i, %back)
}

%condition (state.1: (s32[], f32[2,4])) -> pred[] {
  %state.1 = (s32[], f32[2,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (first: f32[2,4], whole: bf16[16]) -> f32[2,4] {
  %first = f32[2,4]{1,0} parameter(0)
  %whole = bf16[16]{0} parameter(1)
  %zero = s32[] constant(0)
  %packed = (s32[], f32[2,4]{1,0}) tuple(%zero, %first)
  %loop = (s32[], f32[2,4]{1,0}) while(%packed), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %sum = (bf16[16]{0}, f32[2,4]{1,0}) all-reduce(%whole, %first), to_apply=%add
  %begun = (f32[2,4]{1,0}, f32[2,4]{1,0}) collective-permute-start(%first), source_target_pairs={{0,1}}
  %ended = f32[2,4]{1,0} collective-permute-done(%begun)
  %exchanged = f32[2,4]{1,0} all-to-all(%ended), dimensions={0}
  ROOT %result = f32[2,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def estimate(*flags: str) -> subprocess.CompletedProcess[str]:
    """In a new process, because the number of devices is fixed when jax starts."""
    return subprocess.run([sys.executable, "-m", "benchmarks.estimate", "configs/quickstart.py", *flags],
                          cwd=Path(__file__).parents[2], env=os.environ | {"JAX_PLATFORMS": "cpu"},
                          capture_output=True, text=True, check=False)


@pytest.mark.fast
def test_collectives_count_as_often_as_their_loop_runs():
    assert read_program(PROGRAM).collectives == {
        "all-gather": 5 * 128, "reduce-scatter": 5 * 128, "all-reduce": 32 + 32, "collective-permute": 32,
        "all-to-all": 32}


def test_a_mesh_that_does_not_take_all_devices_is_refused():
    done = estimate("--devices", "3", "--card", "cpu", "--mesh.context", "2", "--mesh.data", "1")
    assert done.returncode == 2
    assert "is 2, which leaves 1 of 3 devices idle" in done.stderr


@pytest.mark.fast
def test_a_batch_that_does_not_take_all_devices_is_refused_with_what_would_help():
    config = Config(train=TrainConfig(batch_size=1, accumulate=1))
    with pytest.raises(ConfigError, match=re.escape(
            "--devices is 8; the mesh mesh.data 1 × mesh.fsdp 1 × mesh.tensor 1 × mesh.context 1 takes 1: "
            "train.batch_size / train.accumulate is 1; expected --devices 1, a larger --train.batch-size, or a mesh "
            "that splits more than the batch, such as --mesh.context 8")):
        check_mesh(config, 8)
    with pytest.raises(ConfigError, match=r"expected --devices 2, .*, such as --mesh\.context 8"):
        check_mesh(replace(config, mesh=MeshConfig(context=2)), 8)
    check_mesh(config, 1)
    check_mesh(replace(config, mesh=MeshConfig(context=8)), 8)
    check_mesh(replace(config, train=TrainConfig(batch_size=8, accumulate=1)), 8)


@pytest.mark.thorough
def test_each_device_computes_its_share_of_a_step(tmp_path):
    small = ("--card", "cpu", "--vocabulary", "257", "--model.layers", "1", "--model.width", "32", "--model.heads", "2",
             "--model.context", "64", "--train.batch-size", "2", "--train.accumulate", "1", "--mesh.data", "1")
    found = {}
    for devices in (1, 2):
        path = tmp_path / f"{devices}.json"
        done = estimate("--devices", str(devices), "--mesh.context", str(devices), *small, "--json", str(path))
        assert done.returncode == 0, done.stderr
        found[devices] = json.loads(path.read_text())
    assert "context 2; of each device" in done.stdout
    assert found[1]["collectives"] == {}
    # Shorter chunks, but a device folds its tokens into a state besides.
    assert found[2]["operations"] / found[1]["operations"] == pytest.approx(0.5, abs=0.05)
    assert found[2]["collectives"]["all-reduce"] > 4 * 257 * 32  # the gradients
    assert found[2]["temporary_bytes"] < found[1]["temporary_bytes"]
