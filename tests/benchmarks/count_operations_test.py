"""Operations counted from shapes, and those of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.count_operations import CHECKED, count
from benchmarks.program import Products, read_program
from benchmarks.train_step import Size


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


@pytest.mark.heavy
@pytest.mark.parametrize(("mode", "causal"), CHECKED)
def test_what_is_counted_is_in_the_compiled_program(mode, causal):
    row = count(mode, Size(layers=1, heads=2, width=128, vocabulary=64), context=64, batch=1, causal=causal)
    assert row.ratio == pytest.approx(1, abs=0.03)
    assert row.calls == row.loops == 0
