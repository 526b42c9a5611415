"""The description of a card, the environment that compiles for it, and programs that it compiles."""

import subprocess

import jax
import pytest

from compilation import target

pytestmark = pytest.mark.fast


def test_the_description_of_the_target():
    gpu = target.Target("h200")
    assert (gpu.kind, gpu.architecture, gpu.shared_bytes) == ("NVIDIA H200", "sm_90a", 232_448)


def test_the_environment_of_this_jax_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(target, "can_compile", lambda: False)
    monkeypatch.setattr(target, "ENVIRONMENTS", tmp_path)
    for version in ("0.9.1", "0.10.2", "99.0", jax.__version__):
        (tmp_path / version).mkdir()
    for version in ("0.9.1", "0.10.2"):
        (tmp_path / version / ".complete").touch()
    assert target.find_python() == str(tmp_path / "0.10.2/bin/python")
    (tmp_path / jax.__version__ / ".complete").touch()
    assert target.find_python() == str(tmp_path / jax.__version__ / "bin/python")


LOOP = """
import jax
import jax.numpy as jnp
from compilation import target
from compilation.program import read_program
from kernels.cross_entropy import cross_entropy
V, E, T = 5_000, 128, 8_192
gpu = target.Target()
shapes = [jax.ShapeDtypeStruct(*x) for x in (((1, T, E), jnp.bfloat16), ((V, E), jnp.float32), ((1, T), jnp.int32))]
program = read_program(gpu.compile(gpu.trace(jax.jit(jax.value_and_grad(cross_entropy, (0, 1))), *shapes)).as_text())

def inside(name):
    for x in program.computations[name].values():
        yield x
        for called in x.called:
            yield from inside(called)

loop, = (x for x in program.computations[program.entry].values() if x.opcode == "while")
print(program.trips(loop), *(x.opcode for x in inside(loop.called[-1]) if x.shape.dimensions[1:] == (E,) and
                    x.shape.dimensions[0] >= V and x.opcode in ("convert", "pad", "concatenate", "copy")))
found = {x.opcode for x in inside(loop.called[-1])}
assert "dot" in found and "convert" in found, found
"""


@pytest.mark.thorough
def test_the_head_converts_and_fills_up_the_embedding_once(gpu_python):
    ended = subprocess.run([gpu_python, "-c", LOOP], cwd=target.ROOT, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1:] == ["4"], ended.stdout + ended.stderr  # trips, and nothing of V × E


STEP = """
import re, sys
from compilation import target
from configs.schema import Config, ModelConfig, TrainConfig
from models import gpt
gpu = target.Target()
modes = tuple(sys.argv[1].split(","))
model = ModelConfig(layers=2, heads=2, width=128, context=256, dtype="bfloat16", attention=modes)
with gpu.tracing():
    model = gpt.resolve_config(model)
text = gpu.compile(gpu.trace_step(Config(model=model, train=TrainConfig(batch_size=1)), 257)).as_text()
print(*sorted(set(re.findall("__cudnn[$]fmha[A-Za-z]+|__cublas[$]lt[$]matmul|__triton_nested_gemm", text))))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("attention", "cudnn"), [("softmax", True), ("chunked,softmax", True), ("chunked", False)])
def test_only_a_step_of_softmax_attention_calls_cudnn(attention, cudnn, gpu_python):
    ended = subprocess.run([gpu_python, "-c", STEP, attention], cwd=target.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    calls = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} if cudnn else set()
    assert set(ended.stdout.split()) == {"__triton_nested_gemm"} | calls
