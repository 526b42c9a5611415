"""The assembler's output and XLA's lists of launches are read right."""

import pytest

from compilation import machine_code
from compilation.machine_code import (
    Kernel,
    count_launches,
    find_atomics,
    find_overwriting,
    mosaic_launches,
    overwrites_operands,
    read_assembler,
    read_launches,
)
from tests.compilation.assembler_output import ATOMICS, CLEAN, COMPILERS, LAUNCHES, LIMIT, PIPELINE, SPILLING

pytestmark = pytest.mark.fast


def test_reads_registers_spills_and_serialised_products():
    (spilling,), (clean,), (compilers,) = map(read_assembler, (SPILLING, CLEAN, COMPILERS))
    assert (spilling.name, spilling.registers, spilling.spilled_bytes) == ("linear_attention_dq", 255, 704 + 732)
    assert spilling.serialised == "insufficient register resources"
    assert (clean.registers, clean.spilled_bytes, clean.shared_bytes, clean.serialised) == (96, 0, 0, None)
    assert (compilers.spilled_bytes, compilers.shared_bytes, compilers.ours) == (120, 33024, False)
    assert [kernel.name for kernel in read_assembler(CLEAN + COMPILERS)] == [clean.name, compilers.name]


@pytest.mark.parametrize(("name", "ours"), [
    ("linear_attention_dq", True), ("softmax_decode_splits", True), ("softmax_decode_combine__1", True),
    ("input_add_reduce_fusion", False), ("gemm_fusion_linear_attention_", False),
])
def test_our_kernels_are_known_by_their_names(name, ours):
    assert Kernel(name, 32, 0, 0).ours is ours


def test_an_assembler_that_says_nothing_is_no_clean_kernel():
    with pytest.raises(ValueError, match="registers of linear_attention_forward"):
        read_assembler(CLEAN.replace("Used", "Took"))


def test_reads_threads_and_shared_memory_of_launches():
    launches = read_launches(LAUNCHES)
    assert launches == {"loop_pad_fusion_3": (128, 0), "linear_attention_dq": (256, 118784)}


def test_reads_threads_and_shared_memory_of_mosaic_kernels(tmp_path):
    kernel = ".visible .entry linear_attention_mosaic_mosaic_gpu_kernel(\n)\n.maxntid 128, 1, 1\n{"
    (tmp_path / "linear_attention_mosaic_0.resources.txt").write_text(
        "Resources(smem_scratch_bytes=75776, tmem_scratch_cols=0)")
    sources = {tmp_path / "linear_attention_mosaic_0.ptx": kernel, tmp_path / "module.ptx": CLEAN}
    assert mosaic_launches(sources) == {"linear_attention_mosaic_mosaic_gpu_kernel": (128, 75776)}


def test_counts_kernels_and_copies_and_not_the_loop_around_them():
    loop = "040: kWhile        [prev=039 (2) | sink         ] kWhile\n  001: kGemm        [source] kGemm\n"
    assert count_launches(LAUNCHES) == 3
    assert count_launches(LAUNCHES + loop) == 4


@pytest.mark.parametrize(("kernel", "faults"), [
    (Kernel("linear_attention_dk", 255, 0, LIMIT), []),
    (Kernel("linear_attention_dk", 255, 24, 0), ["spills registers, 24 bytes"]),
    (Kernel("linear_attention_dk", 255, 0, 0, serialised="a wait"), ["serialises wgmma, due to a wait"]),
    (Kernel("linear_attention_dq", 255, 0, 0, overwrites=True),
     ["copies the next tokens over operands that wgmma may still read"]),
    (Kernel("linear_attention_dk", 255, 0, LIMIT + 1),
     ["needs 232,449 bytes of shared memory, but a block has 232,448"]),
])
def test_faults(kernel, faults):
    assert kernel.faults(LIMIT) == faults


def test_atomic_additions_of_floats_are_found():
    assert find_atomics(ATOMICS) == ("input_scatter_fusion", "reduce_1")


def test_copies_over_operands_that_are_still_read_are_found(tmp_path, monkeypatch):
    assert find_overwriting(PIPELINE + ATOMICS) == ("linear_attention_dq",)
    (tmp_path / "module.1.ptx").write_text(PIPELINE)
    monkeypatch.setattr(machine_code, "assemble", lambda *_: SPILLING)
    (kernel,) = machine_code.inspect(tmp_path, "sm_90a").kernels
    assert kernel.overwrites


@pytest.mark.parametrize(("old", "new"), [
    ("%r5, 1;\n\tselp", "%r5, 2;\n\tselp"),  # a ring of three buffers
    ("\tcp.async.cg.shared.global [ %r3", "\twgmma.wait_group.sync.aligned 0;\n\tcp.async.cg.shared.global [ %r3"),
    ("\tcp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, %r9;\n\tcp.async.commit_group;\n", ""),
])
def test_a_copy_into_a_free_buffer_is_no_fault(old, new):
    assert old in PIPELINE
    assert not overwrites_operands(PIPELINE.replace(old, new))


def test_only_files_with_kernels_of_ours_are_assembled(tmp_path, monkeypatch):
    for name in ("linear_attention_forward", "input_scatter_fusion"):
        (tmp_path / f"{name}.ptx").write_text(f".visible .entry {name}(\n")
    (tmp_path / "constants.ptx").write_text(".global .align 4 .b8 c[4];\n")
    monkeypatch.setattr(machine_code, "assemble", lambda paths, _: (
        CLEAN if [path.name for path in paths] == ["linear_attention_forward.ptx"] else ""))
    assert [kernel.name for kernel in machine_code.inspect(tmp_path, "sm_90a").kernels] == ["linear_attention_forward"]
