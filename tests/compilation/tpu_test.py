"""What is read of a compilation for a TPU, without libtpu."""

import importlib.util

import pytest

from benchmarks import tpu_check
from compilation.launches import launches
from compilation.program import read_program
from compilation.tpu import Kernel, Tpu, cycles_of, take_kernels
from support.errors import ConfigError

BUNDLES = """= control target key start
     0   :  { %s1 = inlined_call_operand.vmem [shape: bf16[1,8]] }
   0x1   :  { %2 = sst [smem:[#allocation36_spill]] %s5 }
   0xa LB: > { %v1 = vld [vmem:[%s1]]  ;;  %3 = vst [vmem:[#allocation7_spill] sm:$0xff] %v1 }
   0xb   : > { %4 = vst [vmem:[%s1]] %v2 ;;  %5 = vst [vmem:[#allocation8_spill] sm:$0xff] %v3 }
   0x1f2 PF: { %6 = vld [vmem:[#allocation7_spill]] }
"""


def test_bundles_and_spilled_vectors_are_counted_once(tmp_path):
    (tmp_path / "17957-jvp_linear_attention_forward_.1-72-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17958-transpose_jvp_linear_attention_key_gradient__.1-72-final_bundles.txt").write_text(BUNDLES[:150])
    for other in ("17957-jvp_linear_attention_forward_.1-71-post-ra.txt", "17-copy.1-66-final_bundles.txt"):
        (tmp_path / other).write_text(BUNDLES)
    assert take_kernels(tmp_path, "linear_attention_") == [
        Kernel("linear_attention_forward", 4, 2), Kernel("linear_attention_key_gradient", 1, 0)]
    assert take_kernels(tmp_path, "linear_attention_") == []
    assert list(tmp_path.iterdir()) == []


PROGRAM = """HloModule jit
%fused (a: f32[4,8,2], b: f32[4,8,3]) -> f32[4,2,3] {
  %a = f32[4,8,2]{2,1,0:T(8,128)} parameter(0)
  %b = f32[4,8,3]{2,1,0:T(8,128)} parameter(1)
  ROOT %product = f32[4,2,3]{2,1,0:T(8,128)S(1)} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, \
dim_labels=0fb_0io->0bf
}

%inner.1 (x: s32[]) -> s32[] {
  %x = s32[]{:T(128)} parameter(0)
  %f = f32[4,2,3]{2,1,0:T(8,128)} fusion(%x, %x), kind=kOutput, calls=%fused, \
backend_config={"window_config":{},"estimated_cycles":"100"}
  ROOT %copied = s32[] copy-start(%x)
}

%body.1 (y: s32[]) -> s32[] {
  %y = s32[] parameter(0)
  ROOT %v = s32[] while(%y), condition=%condition.1, body=%inner.1
}

%condition.1 (z: s32[]) -> pred[] {
  %z = s32[] parameter(0)
  %other = s32[] constant(9)
  %trips = s32[]{:T(128)} constant(64)
  ROOT %lt = pred[]{:T(512)} compare(%z, %trips), direction=LT, metadata={op_name="lt"}
}

ENTRY %main.3 (w: s32[]) -> s32[] {
  %w = s32[] parameter(0)
  %c = s32[] constant(5000)
  %u = s32[] while(%w), condition=%condition.1, body=%body.1
  %k = s32[] custom-call(%u), custom_call_target="tpu_custom_call"
  ROOT %m = s32[] multiply(%k, %k), backend_config={"estimated_cycles":"7"}
}
"""


def test_cycles_of_a_loop_count_once_for_each_trip_and_copies_and_kernels_have_none():
    assert cycles_of(PROGRAM) == 64 * 64 * 100 + 7
    found = {launch.name: launch for launch in launches(read_program(PROGRAM), {}, set())}
    assert found.keys() == {"f", "k", "m"}
    assert found["f"].count == 64 * 64
    assert found["k"].work.cycles is None


def test_a_product_of_batches_is_a_convolution_whose_outputs_meet_one_element_of_the_batch():
    assert read_program(PROGRAM).products.operations == 64 * 64 * 2 * 4 * 2 * 3 * 8


@pytest.mark.parametrize("loop", ["direction=GT", "direction=NE"])
def test_a_loop_with_another_condition_has_no_known_length(loop):
    program = read_program(PROGRAM.replace("direction=LT", loop))
    assert program.products.unbounded_loops == 2
    assert cycles_of(PROGRAM.replace("direction=LT", loop)) == 100 + 7


class _Card:
    name = "v5e"


@pytest.mark.parametrize(("case", "spills", "fault"), [
    (tpu_check.GPT2, 64, ""), (tpu_check.GPT2, 65, "spills 65 vectors, more than 64"), (tpu_check.CASES[3], 500, "")])
def test_more_spills_than_before_are_a_fault(case, spills, fault):
    row = tpu_check.kernel_row(_Card(), case, Kernel("linear_attention_forward", 1_500, spills))  # pyright: ignore[reportArgumentType]
    assert row["fault"] == fault
    # 1,500 bundles in each of 6 × 64 programs, at 1.5 GHz.
    assert row["milliseconds"] == (pytest.approx(0.384) if case is tpu_check.GPT2 else None)


def test_a_card_or_a_compiler_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="card is v9; expected one of v4, v5e, v5p, v6e, tpu7x"):
        Tpu("v9")
    with pytest.raises(ConfigError, match="it lacks libtpu; `make tpu-check` builds an environment that can"):
        Tpu("v5e")
    assert tpu_check.main(["--cards", "v5e,v9"]) == 2
    assert "--cards has v9; expected some of v4, v5e" in capsys.readouterr().err
