"""What NVIDIA's assembler and XLA say of programs, shortened."""

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
PIPELINE = """\
.visible .entry linear_attention_dq(
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r9;
\tcp.async.commit_group;
\tcp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, %r9;
\tcp.async.commit_group;
$L__BB0_4:
\tcp.async.wait_group \t1;
\twgmma.commit_group.sync.aligned;
\twgmma.wait_group.sync.aligned 0;
\twgmma.commit_group.sync.aligned;
\tadd.s32 \t%r5, %r4, 1;
\tsetp.gt.s32 \t%p2, %r5, 1;
\tselp.b32 \t%r4, 0, %r5, %p2;
\tcp.async.cg.shared.global [ %r3 + 0 ], [ %rd3 + 0 ], 0x10, %r9;
\tcp.async.commit_group;
\t@%p3 bra \t$L__BB0_4;
\twgmma.wait_group.sync.aligned 0;
"""
"""Two steps in flight, in a ring of two buffers; the last product of a step is unfinished when the next is copied."""
ATOMICS = """\
.visible .entry input_scatter_fusion(
\tatom.global.v4.f32.add \t{%f1, %f2, %f3, %f4}, [%rd1], {%f5, %f6, %f7, %f8};
.visible .entry loop_add_fusion(
\tadd.f32 %f1, %f2, %f3;
\tatom.global.add.u32 %r1, [%rd1], 1;
.visible .entry reduce_1(
\tred.global.add.noftz.bf16x2 [%rd1], %r1;
"""
