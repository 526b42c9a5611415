"""Products and roundings between compute dtypes equal the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import device
from kernels.mixed_precision import product, rounded

FORMULAS = ("bte,ef->btf", "nf,ef->ne", "ne,nf->ef", "nbhcm,nbhsm->nbhcs", "nbhcs,nbhcm->nbhsm", "nbhcd,nbhcd->nbhc",
            "bthm,bthd->bhmd")


def operands(formula, dtype, seed=0):
    """Two arrays of the formula's shapes, with some dimensions of size one, and the product in float64."""
    generator = np.random.default_rng(seed)
    names = formula.split("->")[0].split(",")
    sizes = {name: int(generator.choice([1, 2, 3, 17])) for name in sorted(set("".join(names)))}
    x, y = (jnp.asarray(generator.normal(size=[sizes[n] for n in operand]), dtype) for operand in names)
    return x, y, np.einsum(formula, np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_product_of_bfloat16_is_summed_in_float32(formula, fast, monkeypatch):
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: fast)
    for seed in range(3):
        x, y, expected = operands(formula, jnp.bfloat16, seed)
        found = jax.jit(lambda x, y: product(formula, x, y))(x, y)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_a_product_that_is_left_in_bfloat16_is_summed_in_float32(fast, monkeypatch):
    monkeypatch.setattr(device, "has_fast_bfloat16", lambda: fast)
    x, y = (jax.random.uniform(jax.random.key(seed), (1, 8, 3000)).astype(jnp.bfloat16) for seed in range(2))
    found = jax.jit(lambda x, y: product("bte,fe->btf", x, y[0], jnp.bfloat16))(x, y)
    assert found.dtype == jnp.bfloat16
    expected = np.einsum("bte,fe->btf", np.asarray(x, np.float64), np.asarray(y[0], np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_product_may_stand_between_transposes(formula):
    """XLA folds them into products, of which its CPU backend has not all for bfloat16."""
    x, y, expected = operands(formula, jnp.bfloat16, seed=5)
    turned = jax.jit(lambda x, y: product(formula, x.T, y.T).T + 1)(x.T, y.T)
    np.testing.assert_allclose(turned, expected.T + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtypes", "expected"), [(("float32", "float32"), "float32"), (("float16",) * 2, "float32"),
                                                  (("float32", "bfloat16"), "float32")])
def test_products_of_other_formats(dtypes, expected):
    x, y, reference = operands("bte,ef->btf", jnp.float32)
    found = product("bte,ef->btf", *(v.astype(dtype) for v, dtype in zip((x, y), dtypes, strict=True)))
    assert found.dtype == jnp.dtype(expected)
    np.testing.assert_allclose(found, reference, rtol=0.05, atol=0.05)


def test_a_product_of_bfloat16_stays_one_on_a_cpu_that_has_units_for_it():
    if not device.has_fast_bfloat16():
        pytest.skip("this CPU has no units for bfloat16")
    x, y = jnp.ones((32, 16), jnp.bfloat16), jnp.ones((32, 24), jnp.bfloat16)
    compiled = jax.jit(lambda x, y: product("ne,nf->ef", x, y)).lower(x, y).compile().as_text()
    assert "dot(" in compiled
    assert "f32[32,16]" not in compiled
    assert "f32[32,24]" not in compiled


def test_rounding_to_bfloat16_is_to_the_nearest_with_ties_away_from_zero():
    x = np.array([0.0, -0.0, 1.0, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 3e38, 1e-30, 1e-40,
                  np.inf, -np.inf, np.nan], np.float32)
    found = rounded(jnp.asarray(x), jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
    expected[5:7] = 1 + 2**-7, -1 - 2**-7  # halfway: ties to even would give 1
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


def test_a_gpu_rounds_by_its_own_conversion(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    halfway = jnp.float32(1 + 2**-8)
    assert rounded(halfway, jnp.bfloat16) == 1  # to even


@pytest.mark.parametrize(("dtype", "narrow"), [(jnp.float32, jnp.float16), (jnp.bfloat16, jnp.bfloat16),
                                               (jnp.float32, jnp.float32)])
def test_rounding_to_anything_else_is_a_conversion(dtype, narrow):
    x = jax.random.normal(jax.random.key(0), (50,)).astype(dtype)
    assert rounded(x, narrow).dtype == narrow
    np.testing.assert_array_equal(rounded(x, narrow), x.astype(narrow))
