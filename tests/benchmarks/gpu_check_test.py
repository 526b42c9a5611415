"""The GPU check fails on what it promises to fail on, and says what it lacks. What compiles for a GPU runs only where
`make gpu-check` has built an environment."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from benchmarks import gpu_check
from compilation import target
from compilation.machine_code import Kernel, MachineCode, find_atomics, read_assembler
from tests.compilation.assembler_output import ATOMICS, CLEAN, COMPILERS, LIMIT, SPILLING

pytestmark = pytest.mark.fast


class _Target(target.Target):
    """Compiles nothing."""

    def compile(self, traced, dump=None, **flags):
        if traced is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: shared memory 300000 exceeds 232448\nmore")


@pytest.fixture
def check(monkeypatch, capsys):
    """``check(case, found)``: exit code, output and errors of the command where compilation finds that."""
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    monkeypatch.setattr(gpu_check, "Target", _Target)

    def checked(case, found=None):
        monkeypatch.setattr(gpu_check, "cases", lambda _: [case])
        if found is not None:
            monkeypatch.setattr(gpu_check, "inspect", lambda *_: found)
        code = gpu_check.main([])
        return code, *capsys.readouterr()

    return checked


@pytest.mark.parametrize(("most", "expected"), [(3, 0), (2, 1)])
def test_more_launches_than_there_were_fail(most, expected, check):
    case = gpu_check.Case("a token", lambda: "traced", ("linear_attention_",), token=True, most=most)
    code, out, err = check(case, MachineCode(read_assembler(CLEAN), 3))
    assert code == expected
    assert "Launches for a token\ncase " in out
    assert ("a token: has 3 launches, more than 2" in err) == bool(code)


@pytest.mark.parametrize(("kernels", "expected", "text"), [
    (CLEAN, 0, "1 kernels of ours in 1 programs: no spill"),
    (CLEAN + COMPILERS, 0, "1 kernels of ours in 1 programs: no spill"),
    (CLEAN + SPILLING, 1, "a case: linear_attention_dq spills registers, 1,436 bytes; serialises wgmma"),
    (COMPILERS, 1, "a case: our kernel linear_attention_… is missing"),
    ("", 1, "a case: our kernel linear_attention_… is missing"),
])
def test_fails_on_faults_of_ours_alone(kernels, expected, text, check):
    code, out, err = check(gpu_check.Case("a case", lambda: "traced", ("linear_attention_",)),
                           MachineCode(read_assembler(kernels), 3))
    assert code == expected
    assert text in out + err
    assert out.splitlines()[-1].startswith(f"jax {jax.__version__}: ")  # scripts/gpu_check.sh looks for it


@pytest.mark.parametrize("deterministic", [True, False])
def test_atomic_additions_fail_where_two_runs_have_to_be_equal(deterministic, check):
    found = find_atomics(ATOMICS)
    assert found == ("input_scatter_fusion", "reduce_1")
    code, _, err = check(gpu_check.Case("a step", lambda: "traced", (), deterministic=deterministic),
                         MachineCode(read_assembler(CLEAN), 3, found))
    assert code == int(deterministic)
    assert ("a step: adds floating-point numbers atomically, in input_scatter_fusion" in err) is deterministic


@pytest.mark.parametrize(("traced", "reason"), [
    ("traced", "the compiler has written no kernel"), (None, "INTERNAL: shared memory 300000 exceeds 232448")])
def test_what_cannot_be_compiled_fails_with_the_first_line(traced, reason, check):
    code, _, err = check(gpu_check.Case("a case", lambda: traced, ()))
    assert code == 1
    assert f"gpu-check: jax {jax.__version__}: a case: cannot be compiled: {reason}\n" in err


def test_equal_kernels_are_a_line_once():
    one, other = (Kernel(name, 96, 0, 0) for name in ("linear_attention_dk", "linear_attention_dk__1"))
    assert len(list(gpu_check.rows("a case", [one, other], LIMIT))) == 1
    assert len(list(gpu_check.rows("a case", [one, Kernel(other.name, 97, 0, 0)], LIMIT))) == 2


@pytest.mark.parametrize(("flags", "compiled"), [
    ([], ["op", "step"]), (["--ours"], ["op"]), (["--others"], ["step"]), (["--others", "--only", "op"], [])])
def test_the_two_halves_are_the_whole(monkeypatch, flags, compiled):
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    monkeypatch.setattr(gpu_check, "Target", _Target)
    monkeypatch.setattr(gpu_check, "cases", lambda _: [gpu_check.Case("op", lambda: "traced", ("linear_attention_",)),
                                                       gpu_check.Case("step", lambda: "traced", ())])
    found = []
    monkeypatch.setattr(gpu_check, "check", lambda case, _: found.append(case.name) or (MachineCode([], 0), []))
    assert gpu_check.main(flags) == 0
    assert found == compiled


def test_no_half_is_left_over(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "can_compile", lambda: True)
    assert gpu_check.main(["--ours", "--others"]) == 2
    assert "mutually exclusive" in capsys.readouterr().err


def test_where_nothing_can_be_compiled_the_commands_say_what_to_do(monkeypatch, tmp_path, capsys):
    for module in (target, gpu_check):
        monkeypatch.setattr(module, "can_compile", lambda: False)
    monkeypatch.setattr(target, "ENVIRONMENTS", tmp_path)
    assert gpu_check.main([]) == 2
    assert "`make gpu-check` builds an environment that can" in capsys.readouterr().err


SPILL = """
import sys
from benchmarks import gpu_check
from kernels.linear_attention import tuning
few, default = tuning.Tiles(chunk=64, tile=64, warps=1, stages=1), tuning.default_row
tuning.default_row = lambda *given, **options: default(*given, **options)._replace(
    forward=few, backward=few, queries=None)
sys.exit(gpu_check.main(["--only", "B8 T1024"]))
"""


@pytest.mark.thorough
def test_a_kernel_with_too_few_warps_fails_the_check(gpu_python):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run([gpu_python, "-c", SPILL], cwd=Path(target.ROOT), env=environment, capture_output=True,
                           text=True)
    assert ended.returncode == 1, ended.stderr
    assert "spills registers" in ended.stdout
    assert ": linear_attention B8 T1024 H8 M64 D64 bfloat16: linear_attention_" in ended.stderr
