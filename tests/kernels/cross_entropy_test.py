"""The blocked head and loss equal optax's cross-entropy of all logits at once, values and gradients."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kernels.cross_entropy import count_right, cross_entropy, score
from kernels.cross_entropy.cases import CASES
from tests import several_devices

B, T, E, V = 2, 7, 5, 11


@pytest.fixture(params=[case.constants for case in CASES if case.dtype == "float64"],
                ids=[case.title.partition(", ")[0] for case in CASES if case.dtype == "float64"])
def _blocks(request, monkeypatch):
    for name, value in request.param:
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), constant, value)


def make_inputs(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(B, T, E)).astype(jnp.dtype(dtype))
    embedding = generator.normal(size=(V, E)).astype(np.float64 if dtype == "float64" else np.float32)
    targets = generator.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 2:4], targets[1, 6] = -1, -1
    return x, embedding, targets


def expected_loss(x, embedding, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ embedding.T, jnp.maximum(targets, 0))
    return jnp.sum(jnp.where(targets >= 0, losses, 0))


scaled_expected = jax.jit(jax.value_and_grad(lambda *a: 0.7 * expected_loss(*a), (0, 1)))


def relative_error(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


# float64, float32: rounding of sums of a few dozen terms. bfloat16: the softmax minus the target is rounded to 8 bits
# (1.1e-3 RMS) and so is dx.
@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 3e-3)])
def test_values_and_gradients(dtype, tolerance):
    x, embedding, targets = make_inputs(dtype)
    with jax.enable_x64(dtype == "float64"):
        loss, gradients = jax.jit(jax.value_and_grad(lambda *a: 0.7 * cross_entropy(*a), (0, 1)))(x, embedding, targets)
    # Rounded to x's dtype, as in the products: that error is by design.
    exact = x.astype(np.float64), embedding.astype(x.dtype).astype(np.float64)
    with jax.enable_x64(True):
        expected, expected_gradients = scaled_expected(*exact, targets)
    assert loss.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert (gradients[0].dtype, gradients[1].dtype) == (x.dtype, embedding.dtype)
    assert relative_error(loss, expected) < min(tolerance, 1e-5)  # sums and the loss are never rounded to 8 bits
    for actual, want in zip(gradients, expected_gradients, strict=True):
        assert relative_error(actual, want) < tolerance
    assert not np.any(np.asarray(gradients[0])[targets < 0])


@pytest.mark.usefixtures("_blocks")
def test_logits_far_below_zero():
    """As those of GPT-2's published weights are."""
    x, embedding, targets = make_inputs("float32")
    x[..., 0], embedding[:, 0] = 20, -10
    found = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))(x, embedding, targets)
    with jax.enable_x64(True):
        exact = x.astype(np.float64), embedding.astype(np.float64)
        expected = jax.jit(jax.value_and_grad(expected_loss, (0, 1)))(*exact, targets)
    for actual, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(actual, want) < 1e-4  # logits of 200 are rounded to 2e-5


@pytest.mark.fast
@pytest.mark.usefixtures("_blocks")
def test_right_targets_are_counted():
    x, embedding, targets = make_inputs("float32")
    best = np.argmax(x @ embedding.T, axis=-1).astype(np.int32)
    mixed = np.where(np.arange(T)[None, :] % 3 == 0, best, targets)
    for given in (targets, mixed, best, np.full_like(best, -1)):
        assert jax.jit(count_right)(x, embedding, given) == (given == best).sum()


@pytest.mark.fast
@pytest.mark.usefixtures("_blocks")
def test_the_scores_of_targets():
    x, embedding, targets = make_inputs("float32")
    losses_BT, right_BT = jax.jit(score)(x, embedding, targets)
    logits = x @ embedding.T
    expected = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, np.maximum(targets, 0))
    np.testing.assert_allclose(losses_BT, np.where(targets >= 0, expected, 0), rtol=1e-5)
    np.testing.assert_array_equal(right_BT, np.argmax(logits, axis=-1) == targets)


@pytest.mark.fast
def test_nothing_scored_is_zero():
    x, embedding, targets = make_inputs("float32")
    arguments = x, embedding, np.full_like(targets, -1)
    loss, gradients = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))(*arguments)
    assert loss == 0
    assert not any(np.any(g) for g in gradients)


def test_memory_does_not_hold_the_logits_of_all_tokens(monkeypatch):
    vocabulary, width = 4096, 16
    monkeypatch.setattr(importlib.import_module("kernels.cross_entropy.blocks"), "BLOCK_LOGITS", 64 * vocabulary)
    tokens = 8192
    arguments = (jax.ShapeDtypeStruct((1, tokens, width), jnp.float32),
                 jax.ShapeDtypeStruct((vocabulary, width), jnp.float32), jax.ShapeDtypeStruct((1, tokens), jnp.int32))
    gradient = jax.jit(jax.value_and_grad(lambda *a: cross_entropy(*a), (0, 1)))
    temporary = gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * tokens * vocabulary / 10


SPLIT = """
import json, math, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from kernels.cross_entropy import count_right, cross_entropy

def compute(sizes, B, T):
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)
    x, embedding, targets = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(
        ((B, T, 16), (101, 16), (B, T))))
    targets = jnp.where(targets > 1, -1, jnp.argmax(x @ embedding.T, axis=2) + (targets > 0))
    if B % (sizes[0] * sizes[1]) == T % sizes[3] == 0:
        x, targets = jax.device_put((x, targets), NamedSharding(mesh, P(("data", "fsdp"), "context")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(cross_entropy, (0, 1))).lower(x, embedding, targets).compile()
        loss, gradients = compiled(x, embedding, targets)
        right = int(jax.jit(count_right)(x, embedding, targets))
    return {"loss": float(loss), "gradients": [x.tolist() for x in gradients], "right": right,
            "flops": compiled.cost_analysis()["flops"] * math.prod(sizes),
            "gathers": compiled.as_text().count("all-gather(")}

print(json.dumps([compute(*case) for case in json.loads(sys.argv[1])]))
"""


def test_each_device_computes_the_head_of_its_own_tokens():
    """Losses and gradients are those of one device, its share of the operations is 1 / N, and nothing is gathered."""
    one, odd = ((1, 1, 1, 1), 4, 8), ((1, 1, 1, 1), 3, 7)
    cases = [one, odd, ((4, 1, 1, 1), 4, 8), ((2, 2, 1, 1), 4, 8), ((1, 1, 4, 1), 4, 8), ((1, 1, 1, 4), 4, 8),
             ((2, 1, 1, 2), 3, 7)]
    whole, whole_odd, *split = several_devices.printed(SPLIT, json.dumps(cases), devices=4)
    for (sizes, B, _), found in zip(cases[2:], split, strict=True):
        expected = whole if B == 4 else whole_odd
        assert found["right"] == expected["right"] > 0, sizes
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-6), sizes
        for actual, want in zip(found["gradients"], expected["gradients"], strict=True):
            assert relative_error(actual, want) < 1e-6, sizes
        if B == 4:
            assert found["gathers"] == 0, sizes
            assert found["flops"] < 1.05 * expected["flops"], sizes
