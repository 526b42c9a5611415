"""The mixture of discretised logistics: a distribution over levels, whose closed form is its log-softmax."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from models.gpt import GPT, resolve_config
from models.heads import LOGISTICS, NEVER, LogisticsHead, log_probability
from sampling.sampler import Sampler, Sampling
from sampling.weights import from_product_weights, to_product_weights
from training.accounting import flops_per_token

CONFIG = resolve_config(ModelConfig(layers=1, heads=2, width=16, context=12, dtype="float32", attention=("linear",),
                                    head="logistics"))
LEVELS = 17


def make(**changes: Any) -> Any:
    return GPT(dataclasses.replace(CONFIG, **changes), LEVELS + 1, rngs=nnx.Rngs(0))


def reference(mixture_P: np.ndarray, levels: int) -> np.ndarray:
    """Probabilities of the levels by the definition, in float64, from differences of the logistic function."""
    logits, means, log_scales = np.split(np.asarray(mixture_P, np.float64), 3)
    scales = np.exp(np.maximum(log_scales, -7))
    edges = [-np.inf, *(np.arange(levels - 1) * 2 + 1) / (levels - 1) - 1, np.inf]
    with np.errstate(over="ignore"):
        below = np.array([1 / (1 + np.exp(-(edge - means) / scales)) for edge in edges])
    weights = np.exp(logits - logits.max())
    return (below[1:] - below[:-1]) @ weights / weights.sum()


def mixtures(log_scale: float, count: int = 20) -> np.ndarray:
    logits, means, spread = np.random.default_rng(1).normal(size=(3, count, LOGISTICS))
    return np.concatenate([logits, means, log_scale + spread], axis=1).astype(np.float32)


@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("log_scale", [-9.0, -3.0, 0.0, 4.0])
def test_probabilities_are_those_of_the_definition(levels, log_scale):
    """Edge levels have the tails, and a log-scale is at least −7."""
    found = jax.jit(log_probability, static_argnums=2)(mixtures(log_scale)[:, None], jnp.arange(levels), levels)
    expected = np.array([reference(mixture_P, levels) for mixture_P in mixtures(log_scale)])
    # Edges at 1 in float32 are off by 6e-8, which a scale of exp(−7) magnifies to 1e-4.
    np.testing.assert_allclose(np.exp(found), expected, rtol=2e-4, atol=1e-9)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-4 if log_scale < -5 else 1e-5)


@jax.jit
def values_and_gradients(mixture_P, levels_N):
    """Of several levels of 256."""
    return jax.vmap(jax.value_and_grad(log_probability), (None, 0, None))(mixture_P, levels_N, 256)


def equal_logistics(mean: float, log_scale: float) -> jax.Array:
    return jnp.concatenate([jnp.full(LOGISTICS, value) for value in (0.0, mean, log_scale)])


@pytest.mark.parametrize("log_scale", [-50.0, 0.0, 50.0, 1000.0])
@pytest.mark.parametrize("mean", [-1e4, 0.0, 1e4])
def test_values_and_gradients_are_finite_for_all_parameters(log_scale, mean):
    values, gradients = values_and_gradients(equal_logistics(mean, log_scale), jnp.array([0, 128, 255]))
    assert np.isfinite(values).all()
    assert np.isfinite(gradients).all()


def test_a_target_far_from_all_means_has_a_gradient():
    """Where its probability is 0 in float32: the mean moves towards it, by 1 / scale."""
    (value,), (gradient,) = values_and_gradients(equal_logistics(-1.0, -6.0), jnp.array([200]))
    assert value < -500
    _, means, log_scales = np.split(gradient, 3)
    np.testing.assert_allclose(means.sum(), math.exp(6), rtol=1e-3)
    assert (log_scales > 0).all()


def make_head(scale: float) -> LogisticsHead:
    """``scale`` widens the mixtures' parameters, log-scales too."""
    norm, (weight_EP, bias_P) = make().final_norm.parameters, make().head_projection.parameters
    return LogisticsHead(norm, weight_EP * scale, bias_P, LEVELS)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_loss_and_gradient_are_those_of_log_softmax_at_the_target(scale):
    """At both edge levels too; targets below 0 are not scored."""
    head, rng = make_head(scale), np.random.default_rng(0)
    x_BTE = jnp.asarray(rng.normal(size=(2, 12, CONFIG.width)), jnp.float32)
    targets_BT = rng.integers(0, LEVELS, (2, 12))
    targets_BT[:, :3] = 0, LEVELS - 1, -1

    def of_closed_form(x_BTE, weight_EP, bias_P):
        return LogisticsHead(head.norm, weight_EP, bias_P, LEVELS).loss_sum(x_BTE, jnp.asarray(targets_BT))

    def of_logits(x_BTE, weight_EP, bias_P):
        log_p_BTV = jax.nn.log_softmax(LogisticsHead(head.norm, weight_EP, bias_P, LEVELS).logits(x_BTE))
        at_target_BT1 = jnp.take_along_axis(log_p_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=2)
        return -jnp.sum(jnp.where(targets_BT >= 0, at_target_BT1[..., 0], 0))

    found, expected = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x_BTE, head.weight_EP, head.bias_P)
                       for loss in (of_closed_form, of_logits))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for x, wanted in zip(found[1], expected[1], strict=True):
        # Log-softmax subtracts log Σ exp, whose rounding wide parameters magnify.
        np.testing.assert_allclose(x, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    losses_BT, right_BT = map(np.asarray, jax.jit(head.score)(x_BTE, targets_BT))
    np.testing.assert_allclose(losses_BT.sum(), found[0], rtol=1e-5)
    np.testing.assert_array_equal(right_BT, np.argmax(jax.jit(head.logits)(x_BTE), axis=2) == targets_BT)
    assert jax.jit(head.count_right)(x_BTE, targets_BT) == right_BT.sum()
    assert (losses_BT[targets_BT < 0] == 0).all()


def test_logits_have_the_separator_which_is_never_drawn():
    model = make()
    logits_BTV = np.asarray(jax.jit(model.logits)(jax.random.normal(jax.random.key(0), (2, 3, CONFIG.width))))
    assert logits_BTV.shape == (2, 3, LEVELS + 1)
    assert (logits_BTV[..., LEVELS] == np.float32(NEVER)).all()
    np.testing.assert_allclose(np.logaddexp.reduce(logits_BTV, axis=2), 0, atol=1e-5)
    drawn = np.concatenate(list(Sampler(model).generate(
        np.array([LEVELS]), Sampling(temperature=1.0), max_new_tokens=11, samples=30)), axis=1)
    assert ((drawn >= 0) & (drawn < LEVELS)).all()
    assert len(np.unique(drawn)) > 10


def test_the_head_is_float32_whatever_the_compute_dtype():
    """In the sampler too, which stores other weights in the compute dtype."""
    x_BTE = jax.random.normal(jax.random.key(0), (2, 3, CONFIG.width))
    _, head = from_product_weights(*to_product_weights(make(dtype="bfloat16")))
    np.testing.assert_array_equal(jax.jit(head.logits)(x_BTE), jax.jit(make().logits)(x_BTE))


def test_other_parameters_start_as_with_a_tied_head():
    expected = dict(nnx.to_flat_state(nnx.state(make(head="tied"), nnx.Param)))
    found = dict(nnx.to_flat_state(nnx.state(make(), nnx.Param)))
    assert {path[0] for path in found.keys() - expected.keys()} == {"head_projection"}
    assert all((found[path][...] == value[...]).all() for path, value in expected.items())


def test_operations_count_the_projection_and_not_the_embedding():
    def flops(head: str) -> float:
        model = nnx.eval_shape(lambda: make(head=head))
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        found = flops_per_token({"model": dataclasses.asdict(model.config)}, {
            "parameters": count, "vocabulary_size": LEVELS + 1})
        assert found is not None
        return found

    assert flops("tied") - flops("logistics") == 6 * (
        (LEVELS + 1) * CONFIG.width - (CONFIG.width + 1) * 3 * LOGISTICS)
