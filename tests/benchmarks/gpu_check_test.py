"""The GPU check reads the assembler right, fails on what it promises to fail on, and says what it lacks. What compiles
for a GPU runs only where `make gpu-check` has built an environment."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from benchmarks import gpu_check, memory, target
from configs.schema import Config, DataConfig
from data import tokenizers
from support.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

SPILLING = """\
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the function 'linear_attention_dq'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'linear_attention_dq' for 'sm_90a'
ptxas info    : Function properties for linear_attention_dq
    704 bytes stack frame, 704 bytes spill stores, 732 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 704 bytes cumulative stack size
ptxas info    : Compile time = 834.656 ms
"""
CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'linear_attention_forward' for 'sm_90a'
ptxas info    : Function properties for linear_attention_forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
ptxas info    : Compile time = 29.857 ms
"""
COMPILERS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'input_add_multiply_reduce_fusion_4' for 'sm_90a'
ptxas info    : Function properties for input_add_multiply_reduce_fusion_4
    64 bytes stack frame, 60 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 64 bytes cumulative stack size, 33024 bytes smem
ptxas info    : Compile time = 13.636 ms
"""
LAUNCHES = """\
001: kCustomKernel [source       | next=004 (3) ] loop_pad_fusion_3 grid: [133632, 1, 1] threads: [128, 1, 1]  \
shared_memory: 0 bytes
025: kCustomKernel [prev=024 (1) | next=026 (1) ] linear_attention_dq grid: [16, 9, 2] threads: [256, 1, 1]  \
shared_memory: 118784 bytes
041: kCopy         [prev=039 (2) | sink         ] kCopy
"""
LIMIT = 232_448


def test_reads_registers_spills_and_serialised_products():
    (spilling,), (clean,), (compilers,) = map(gpu_check.read_assembler, (SPILLING, CLEAN, COMPILERS))
    assert (spilling.name, spilling.registers, spilling.spilled_bytes) == ("linear_attention_dq", 255, 704 + 732)
    assert spilling.serialised == "insufficient register resources"
    assert (clean.registers, clean.spilled_bytes, clean.shared_bytes, clean.serialised) == (96, 0, 0, None)
    assert (compilers.spilled_bytes, compilers.shared_bytes, compilers.ours) == (120, 33024, False)
    assert [kernel.name for kernel in gpu_check.read_assembler(CLEAN + COMPILERS)] == [clean.name, compilers.name]


@pytest.mark.parametrize(("name", "ours"), [
    ("linear_attention_dq", True), ("softmax_decode_splits", True), ("softmax_decode_combine__1", True),
    ("input_add_reduce_fusion", False), ("gemm_fusion_linear_attention_", False),
])
def test_our_kernels_are_known_by_their_names(name, ours):
    assert gpu_check.Kernel(name, 32, 0, 0).ours is ours


def test_an_assembler_that_says_nothing_is_no_clean_kernel():
    with pytest.raises(ValueError, match="registers of linear_attention_forward"):
        gpu_check.read_assembler(CLEAN.replace("Used", "Took"))


def test_reads_threads_and_shared_memory_of_launches():
    launches = gpu_check.read_launches(LAUNCHES)
    assert launches == {"loop_pad_fusion_3": (128, 0), "linear_attention_dq": (256, 118784)}


def test_counts_kernels_and_copies_and_not_the_loop_around_them():
    loop = "040: kWhile        [prev=039 (2) | sink         ] kWhile\n  001: kGemm        [source] kGemm\n"
    assert gpu_check.count_launches(LAUNCHES) == 3
    assert gpu_check.count_launches(LAUNCHES + loop) == 4


@pytest.mark.parametrize(("most", "code"), [(3, 0), (2, 1)])
def test_more_launches_than_there_were_fail(most, code, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "inspect", lambda *_: gpu_check.Program(gpu_check.read_assembler(CLEAN), 3))
    monkeypatch.setattr(gpu_check, "MOST_LAUNCHES", {"a token": most})
    case = gpu_check.Case("a token", lambda: "traced", ("linear_attention_",), token=True)
    assert run(case, monkeypatch) == code
    printed = capsys.readouterr()
    assert "Launches for a token\ncase " in printed.out
    assert ("a token: has 3 launches, more than 2" in printed.err) == bool(code)


@pytest.mark.parametrize(("kernel", "faults"), [
    (gpu_check.Kernel("linear_attention_dk", 255, 0, LIMIT), []),
    (gpu_check.Kernel("linear_attention_dk", 255, 24, 0), ["spills registers, 24 bytes"]),
    (gpu_check.Kernel("linear_attention_dk", 255, 0, 0, serialised="a wait"), ["serialises wgmma, due to a wait"]),
    (gpu_check.Kernel("linear_attention_dk", 255, 0, LIMIT + 1),
     ["needs 232,449 bytes of shared memory, but a block has 232,448"]),
])
def test_faults(kernel, faults):
    assert kernel.faults(LIMIT) == faults


def run(case: gpu_check.Case, monkeypatch) -> int:
    """The exit code of the command for one case."""
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    monkeypatch.setattr(gpu_check, "Target", _Target)
    monkeypatch.setattr(gpu_check, "cases", lambda _: [case])
    return gpu_check.main([])


class _Target(target.Target):
    """Compiles nothing."""

    def compile(self, traced, dump=None, **flags):
        if traced is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: shared memory 300000 exceeds 232448\nmore")


@pytest.mark.parametrize(("kernels", "code", "said"), [
    (CLEAN, 0, "1 kernels of ours in 1 programs: no spill, no serialised wgmma, no overrun"),
    (CLEAN + COMPILERS, 0, "1 kernels of ours in 1 programs: no spill, no serialised wgmma, no overrun"),
    (CLEAN + SPILLING, 1, "a case: linear_attention_dq spills registers, 1,436 bytes; serialises wgmma"),
    (COMPILERS, 1, "a case: our kernel linear_attention_… is missing"),
    ("", 1, "a case: it has no kernel"),
])
def test_fails_on_faults_of_ours_alone(kernels, code, said, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "inspect", lambda *_: gpu_check.Program(gpu_check.read_assembler(kernels), 3))
    assert run(gpu_check.Case("a case", lambda: "traced", ("linear_attention_",)), monkeypatch) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert printed.out.splitlines()[-1].startswith(f"jax {jax.__version__}: ")  # scripts/gpu_check.sh looks for it


ATOMICS = """\
.visible .entry input_scatter_fusion(
\tatom.global.v4.f32.add \t{%f1, %f2, %f3, %f4}, [%rd1], {%f5, %f6, %f7, %f8};
.visible .entry loop_add_fusion(
\tadd.f32 %f1, %f2, %f3;
\tatom.global.add.u32 %r1, [%rd1], 1;
.visible .entry reduce_1(
\tred.global.add.noftz.bf16x2 [%rd1], %r1;
"""


@pytest.mark.parametrize("deterministic", [True, False])
def test_atomic_additions_fail_where_two_runs_have_to_be_equal(deterministic, monkeypatch, capsys):
    found = gpu_check.find_atomics(ATOMICS)
    assert found == ("input_scatter_fusion", "reduce_1")
    monkeypatch.setattr(gpu_check, "inspect", lambda *_: gpu_check.Program(gpu_check.read_assembler(CLEAN), 3, found))
    case = gpu_check.Case("a step", lambda: "traced", (), deterministic=deterministic)
    assert run(case, monkeypatch) == int(deterministic)
    printed = capsys.readouterr()
    assert ("a step: adds floating-point numbers atomically, in input_scatter_fusion" in printed.err) is deterministic


def test_what_cannot_be_compiled_fails_with_the_first_line(monkeypatch, capsys):
    assert run(gpu_check.Case("a case", lambda: None, ()), monkeypatch) == 1
    said = "a case: cannot be compiled: INTERNAL: shared memory 300000 exceeds 232448\n"
    assert f"gpu-check: jax {jax.__version__}: {said}" in capsys.readouterr().err


def test_equal_kernels_are_a_line_once():
    one, other = (gpu_check.Kernel(name, 96, 0, 0) for name in ("linear_attention_dk", "linear_attention_dk__1"))
    assert len(list(gpu_check.rows("a case", [one, other], LIMIT))) == 1
    assert len(list(gpu_check.rows("a case", [one, gpu_check.Kernel(other.name, 97, 0, 0)], LIMIT))) == 2


@pytest.mark.parametrize(("flags", "compiled"), [
    ([], ["op", "step"]), (["--ours"], ["op"]), (["--others"], ["step"]), (["--others", "--only", "op"], [])])
def test_the_two_halves_are_the_whole(monkeypatch, flags, compiled):
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    monkeypatch.setattr(gpu_check, "Target", _Target)
    monkeypatch.setattr(gpu_check, "cases", lambda _: [gpu_check.Case("op", lambda: "traced", ("linear_attention_",)),
                                                       gpu_check.Case("step", lambda: "traced", ())])
    found = []
    monkeypatch.setattr(gpu_check, "check", lambda case, _: found.append(case.name) or (gpu_check.Program([], 0), []))
    assert gpu_check.main(flags) == 0
    assert found == compiled


def test_no_half_is_left_over(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    assert gpu_check.main(["--ours", "--others"]) == 2
    assert "mutually exclusive" in capsys.readouterr().err


def test_the_description_of_the_target():
    gpu = target.Target("h200")
    assert (gpu.kind, gpu.architecture, gpu.shared_bytes) == ("NVIDIA H200", "sm_90a", LIMIT)


def test_where_nothing_can_be_compiled_the_commands_say_what_to_do(monkeypatch, tmp_path, capsys):
    for module in (target, gpu_check):
        monkeypatch.setattr(module, "can_compile", lambda: False)
    monkeypatch.setattr(target, "ENVIRONMENTS", tmp_path)
    assert gpu_check.main([]) == 2
    assert "`make gpu-check` builds an environment that can" in capsys.readouterr().err


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


@pytest.mark.parametrize(("share", "said"), [(0.74, "fits"), (0.9, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
                                             (0.96, "does not fit")])
def test_verdicts(share, said):
    assert said in memory.verdict(int(share * 2**40), 2**40)


def test_a_program_fits_some_cards():
    assert memory.verdicts(60 * 2**30) == (
        "fits: h200, a100-80gb; fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: h100-80gb; "
        "does not fit: a100-40gb, rtx4090, l4")


def test_the_vocabulary_of_gpt2_is_known_and_another_one_without_its_files_has_a_flag(monkeypatch):
    def missing(name):
        raise DataError("no network")

    monkeypatch.setattr(tokenizers, "load", missing)
    for name, size in (("gpt2", 50_257), ("bytes", 257)):
        assert target.vocabulary_size(Config(data=DataConfig(tokenizer=name))) == size
    with pytest.raises(ConfigError, match=r"tokenizer o200k_base is not on this machine; give its .*: --vocabulary"):
        target.vocabulary_size(Config(data=DataConfig(tokenizer="o200k_base")))


@pytest.fixture
def python() -> str:
    """A Python that can compile for a GPU."""
    try:
        return target.find_python()
    except ConfigError as error:
        pytest.skip(str(error))


SPILL = """
import sys
from benchmarks import gpu_check
from kernels.linear_attention import tuning
tuning._default_tiles = lambda *_, **__: tuning.Tiles(chunk=64, tile=64, warps=1, stages=1)
sys.exit(gpu_check.main(["--only", "B8 T1024"]))
"""


@pytest.mark.thorough
def test_a_kernel_with_too_few_warps_fails_the_check(python):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run([python, "-c", SPILL], cwd=Path(target.ROOT), env=environment, capture_output=True,
                           text=True)
    assert ended.returncode == 1, ended.stderr
    assert "spills registers" in ended.stdout
    assert ": linear_attention B8 T1024 H8 M64 D64 bfloat16: linear_attention_" in ended.stderr


LOOP = """
import jax
import jax.numpy as jnp
from benchmarks import target
from benchmarks.program import read_program
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
print(loop.trips, *(x.opcode for x in inside(loop.called[-1]) if x.shape.dimensions[1:] == (E,) and
                    x.shape.dimensions[0] >= V and x.opcode in ("convert", "pad", "concatenate", "copy")))
found = {x.opcode for x in inside(loop.called[-1])}
assert "dot" in found and "convert" in found, found
"""


@pytest.mark.thorough
def test_the_head_converts_and_fills_up_the_embedding_once(python):
    ended = subprocess.run([python, "-c", LOOP], cwd=Path(target.ROOT), capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1:] == ["4"], ended.stdout + ended.stderr  # trips, and nothing of V × E


STEP = """
import re, sys
from benchmarks import target
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
def test_a_step_with_the_attention_of_cudnn_leaves_products_to_cublas(attention, cudnn, python):
    """XLA takes no Triton where cuDNN has to add up in one order, and could not compile it without a card."""
    ended = subprocess.run([python, "-c", STEP, attention], cwd=Path(target.ROOT), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    with_cudnn = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "__cublas$lt$matmul"}
    assert set(ended.stdout.split()) == (with_cudnn if cudnn else {"__triton_nested_gemm"})
