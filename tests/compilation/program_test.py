"""Operations of compiled programs, and those that ``metrics.jsonl`` counts from shapes; collectives by hand."""

from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from compilation.program import Products, read_program
from configs.schema import EncoderConfig, ModelConfig
from models import encoder, gpt
from models.encoder import Classifier
from models.gpt import GPT
from training import accounting


def products(function, *shapes) -> Products:
    text = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    assert text is not None
    return read_program(text).products


def test_a_loops_body_counts_as_often_as_it_runs():
    def loops(x, w):
        def outer(x, _):
            return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0], None
        return lax.scan(outer, x, length=5)[0]

    found = products(loops, (8, 16), (16, 16))
    assert (found.operations, found.unbounded_loops) == (15 * 2 * 8 * 16 * 16, 0)


def test_products_of_batches_and_convolutions_are_counted():
    batched = products(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, 4, 5), (3, 5, 6))
    assert batched.operations == 2 * 3 * 4 * 5 * 6
    convolved = products(lambda x, w: lax.conv_general_dilated(
        x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")), (2, 10, 4), (3, 4, 6))
    assert convolved.operations == 2 * (2 * 8 * 6) * 3 * 4


def test_a_loop_that_ends_by_itself_is_told():
    def until(x):
        return lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)

    found = products(until, (4, 4))
    assert (found.operations, found.unbounded_loops) == (2 * 4**3, 1)


B, T, V = 1, 64, 64
SIZES: dict[str, Any] = {"layers": 1, "heads": 2, "width": 128, "context": T, "dtype": "float32"}


def test_what_is_counted_for_a_causal_model_is_in_the_compiled_step():
    config = gpt.resolve_config(ModelConfig(**SIZES, attention=("linear",), modes={"linear": {"form": "cumsum"}}))

    def loss(model: GPT, tokens_BT: jax.Array) -> jax.Array:
        x_BTE, _ = model.forward(tokens_BT)
        return model.head.loss_sum(x_BTE, tokens_BT)

    check_operations(config, GPT, loss)


def test_what_is_counted_for_an_encoder_is_in_the_compiled_step():
    config = encoder.resolve_config(EncoderConfig(
        **SIZES, attention=("softmax",), modes={"softmax": {"form": "materialised"}}, mlp_width=512, pooling="mean"))
    check_operations(config, Classifier, lambda model, tokens_BT: model.forward(tokens_BT).sum())


def check_operations(config, kind, loss):
    """6 per parameter and token, and three times the attention's, are the products of the loss and its gradient."""
    graph, parameters, rest = nnx.split(nnx.eval_shape(lambda: kind(config, V, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def of_parameters(parameters, rest, tokens_BT):
        return loss(nnx.merge(graph, parameters, rest), tokens_BT)

    tokens_BT = jax.ShapeDtypeStruct((B, T), jnp.int32)
    text = jax.jit(jax.value_and_grad(of_parameters)).lower(parameters, rest, tokens_BT).compile().as_text()
    assert text is not None
    found = read_program(text).products
    counted = accounting.flops_per_token({"model": asdict(config)}, {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)), "vocabulary_size": V})
    assert counted is not None
    assert found.operations == pytest.approx(counted * B * T, rel=0.03)
    assert found.calls == found.unbounded_loops == 0


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


@pytest.mark.fast
def test_collectives_count_as_often_as_their_loop_runs():
    assert read_program(PROGRAM).collectives == {
        "all-gather": 5 * 128, "reduce-scatter": 5 * 128, "all-reduce": 32 + 32, "collective-permute": 32,
        "all-to-all": 32}
