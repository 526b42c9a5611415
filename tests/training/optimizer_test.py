"""The optimizers' decay, clipping and updates, and the learning rate over a run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig, OptimizerConfig
from models.gpt import GPT, resolve_config
from support.errors import ConfigError
from sweeps.estimates import STATE_COPIES
from training.optimizer import global_norm, learning_rate, make_optimizer, matrix_mask, model_optimizer

CONFIG = OptimizerConfig(learning_rate=2.0, final_fraction=0.25, warmup_steps=4)


def test_decay_is_on_what_is_flagged_only():
    transform = make_optimizer(OptimizerConfig(weight_decay=0.5), {"kernel": True, "bias": False, "scale": False})
    parameters = {name: np.full(shape, 4, np.float32) for name, shape in (
        ("kernel", (2, 3)), ("bias", 3), ("scale", 2))}
    zeros = jax.tree.map(np.zeros_like, parameters)
    updates: Any = jax.jit(lambda zeros, parameters: transform.update(
        zeros, transform.init(parameters), parameters)[0])(zeros, parameters)
    np.testing.assert_array_equal(updates["kernel"], np.full((2, 3), 2.0))
    np.testing.assert_array_equal(updates["bias"], np.zeros(3))
    np.testing.assert_array_equal(updates["scale"], np.zeros(2))


def test_gradients_are_clipped_to_the_global_norm():
    transform = make_optimizer(OptimizerConfig(clip_norm=1.0, beta1=0.9), {"a": False, "b": False})
    parameters = {"a": jnp.zeros(1), "b": jnp.zeros(1)}

    def mean(gradients, **options):
        state: Any = transform.update(gradients, transform.init(parameters), parameters, **options)[1]
        return np.array([state[1].mu["a"][0], state[1].mu["b"][0]]) / 0.1

    np.testing.assert_allclose(mean({"a": jnp.array([30.0]), "b": jnp.array([40.0])}), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(mean({"a": jnp.array([0.3]), "b": jnp.array([0.4])}), [0.3, 0.4], rtol=1e-6)
    # For scaled gradients the scaled norm counts.
    large = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    np.testing.assert_allclose(mean(large, scale=0.1), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(mean(large, scale=0.01), [0.3, 0.4], rtol=1e-6)


def test_the_global_norm_is_of_small_and_large_arrays():
    random = np.random.default_rng(0)
    shapes = ((), (3,), (2, 5, 7), (20_000,), (150, 128), (2, 100, 128))
    tree = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    expected = np.sqrt(sum(np.sum(np.asarray(x, float) ** 2) for x in tree))
    assert float(global_norm(tree)) == pytest.approx(expected, rel=1e-6)


def nanogpt_rates(steps: int, warmup: int, peak: float, least: float) -> np.ndarray:
    """The learning rates of nanoGPT's train.py, with lr_decay_iters = max_iters."""
    it = np.arange(steps)
    ratio = (it - warmup) / (steps - warmup)
    return np.where(it < warmup, peak * (it + 1) / (warmup + 1), least + 0.5 * (1 + np.cos(np.pi * ratio)) * (
        peak - least))


@pytest.mark.parametrize(("steps", "warmup", "final"), [
    (1000, 100, 0.1), (2000, 100, 0.05), (600, 7, 0.0), (50, 5, 0.25), (9, 0, 0.1), (1, 0, 0.1)])
def test_the_cosine_is_nanogpts_at_every_step_and_reaches_the_peak(steps, warmup, final):
    config = OptimizerConfig(learning_rate=2.0, final_fraction=final, warmup_steps=warmup)
    rates = np.array([learning_rate(config, step, step / steps) for step in range(steps)])
    assert np.abs(rates - nanogpt_rates(steps, warmup, 2.0, 2 * final)).max() < 1e-7 * 2
    assert rates.max() == rates[warmup] == 2.0
    assert learning_rate(config, steps, 1.0) == pytest.approx(2 * final)


def test_a_run_in_minutes_has_the_rates_of_a_run_in_steps_at_a_constant_pace():
    config = OptimizerConfig(learning_rate=2.0, final_fraction=0.05, warmup_steps=30)
    rates = np.array([learning_rate(config, step, step * 0.12 / 60) for step in range(500)])  # 500 steps of 0.12 s
    assert np.abs(rates - nanogpt_rates(500, 30, 2.0, 0.1)).max() < 1e-7 * 2


def test_a_run_in_minutes_is_warm_after_a_tenth_of_it_and_decays_over_the_rest():
    slow = OptimizerConfig(learning_rate=2.0, final_fraction=0.25, warmup_steps=1000)
    assert learning_rate(slow, 3, 0.05) == pytest.approx(1.0)
    assert learning_rate(slow, 6, 0.1) == pytest.approx(2.0)
    assert learning_rate(slow, 40, 0.55) == pytest.approx(2 * (0.25 + 0.75 / 2))
    # The warm-up ends after its steps if these are over sooner.
    assert learning_rate(slow, 1000, 0.001) == 2.0
    # The rates go down whatever the pace.
    random = np.random.default_rng(0)
    shares = np.cumsum(random.exponential(size=2000) ** 3)
    rates = [learning_rate(CONFIG, step, share) for step, share in enumerate(shares / shares[-1])]
    assert np.all(np.diff(rates[5:]) <= 0)
    # The last step of a run may begin after its time.
    assert learning_rate(CONFIG, 100, 1.2) == pytest.approx(0.5)


def test_a_constant_rate_stays_at_the_peak():
    constant = OptimizerConfig(learning_rate=2.0, schedule="constant", final_fraction=0.25, warmup_steps=4)
    rates = [learning_rate(constant, step, step / 100) for step in (0, 3, 4, 50, 99)]
    assert rates == pytest.approx([0.4, 1.6, 2.0, 2.0, 2.0])
    assert learning_rate(constant, 1, 0.9) == pytest.approx(2.0)


@pytest.mark.parametrize(("shape", "at_a_quarter"), [("linear", 0.75), ("sqrt", 0.5)])
def test_warm_up_then_the_peak_then_a_decay(shape, at_a_quarter):
    wsd = OptimizerConfig(learning_rate=2.0, schedule="wsd", decay_fraction=0.4, decay_shape=shape, final_fraction=0.1,
                          warmup_steps=4)
    rates = [learning_rate(wsd, step, step / 100) for step in (0, 3, 4, 59, 60, 70, 100)]
    assert rates == pytest.approx([0.4, 1.6, 2.0, 2.0, 2.0, 2 * (0.1 + 0.9 * at_a_quarter), 0.2])
    assert learning_rate(wsd, 120, 1.2) == pytest.approx(0.2)  # the last step of a run in minutes may begin late
    assert learning_rate(OptimizerConfig(schedule="wsd", decay_fraction=0.0), 500, 0.999) == 1e-3


def test_the_rate_drops_after_the_published_3000_updates_of_the_copy_task():
    published = OptimizerConfig(learning_rate=1e-3, schedule="drop", drop_step=3000, final_fraction=0.1, warmup_steps=0)
    rates = [learning_rate(published, update - 1, (update - 1) / 10_000)
             for update in (1, 3000, 3001, 10_000)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
    assert learning_rate(published, 3000, 0.01) == pytest.approx(1e-4)


def test_the_inverse_root_follows_the_step_alone():
    lra = OptimizerConfig(learning_rate=0.05, schedule="inverse_sqrt", warmup_steps=1000)
    rates = [learning_rate(lra, t - 1, share) for t, share in ((1, 0), (500, 0.9), (1000, 0), (4000, 1))]
    # S(w) = min(1, t / w) / sqrt(max(t, w)), 1.6e-3 at the end of the warm-up.
    assert rates == pytest.approx([0.05 / 1000**1.5, 0.025 / 1000**0.5, 0.05 / 1000**0.5, 0.05 / 4000**0.5])
    assert rates[2] == pytest.approx(1.58e-3, rel=1e-3)
    assert learning_rate(lra, 499, 0.5) == pytest.approx(rates[1])


def test_epsilon_is_beside_the_root_and_clipping_may_be_left_out():
    transform = make_optimizer(OptimizerConfig(epsilon=3.0, clip_norm=None, weight_decay=0.0), {"a": True})
    parameters = {"a": jnp.zeros(2)}
    updates: Any = transform.update({"a": jnp.array([30.0, 40.0])}, transform.init(parameters), parameters)[0]
    np.testing.assert_allclose(updates["a"], [30 / 33, 40 / 43], rtol=1e-5)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(OptimizerConfig(warmup_steps=0, learning_rate=3.0), 0, 0.0) == 3.0


def test_radam_makes_the_updates_of_its_algorithm_with_decoupled_decay():
    config = OptimizerConfig(name="radam", beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.5, clip_norm=None)
    transform = make_optimizer(config, {"a": True})
    gradients = np.random.default_rng(0).normal(size=(12, 3))
    parameters = {"a": jnp.array([1.0, -2.0, 3.0])}
    state = transform.init(parameters)
    # Algorithm 2 of Liu et al., with the threshold 5 of their code in place of 4.
    m, v, longest = np.zeros(3), np.zeros(3), 2 / (1 - 0.99) - 1
    rectified = []
    for t, gradient in enumerate(gradients, start=1):
        updates: Any
        updates, state = transform.update({"a": jnp.asarray(gradient, jnp.float32)}, state, parameters)
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        expected, length = m / (1 - 0.9**t), longest - 2 * t * 0.99**t / (1 - 0.99**t)
        rectified.append(length >= 5)
        if rectified[-1]:
            r = np.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            expected = r * expected / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(updates["a"], expected + 0.5 * np.asarray(parameters["a"]), rtol=1e-4)
    assert not rectified[0]
    assert rectified[-1]


MUON = OptimizerConfig(name="muon", learning_rate=0.02, adam_learning_rate=0.005, weight_decay=0.5, momentum=0.9,
                       clip_norm=None)


def test_muon_turns_the_momentum_of_matrices_by_its_singular_vectors():
    random = np.random.default_rng(0)
    parameters = {"matrix": jnp.asarray(random.normal(size=(6, 9)), jnp.float32)}
    transform = make_optimizer(MUON, {"matrix": True}, {"matrix": True})
    gradients = [random.normal(size=(6, 9)) for _ in range(2)]
    state, momentum, updates = transform.init(parameters), np.zeros((6, 9)), None
    for gradient in gradients:
        updates, state = transform.update({"matrix": jnp.asarray(gradient, jnp.float32)}, state, parameters)
        momentum = 0.9 * momentum + 0.1 * gradient
    update: Any = updates
    found = np.asarray(update["matrix"]) - 0.5 * np.asarray(parameters["matrix"])
    # Nesterov's momentum, up to a factor, which the orthogonalisation takes away.
    left, _, right = np.linalg.svd(0.9 * momentum / (1 - 0.9**3) + 0.1 * gradients[-1] / (1 - 0.9**2),
                                   full_matrices=False)
    turned = left.T @ found @ right.T  # nearly diagonal, with singular values of about 1 times the scale
    np.testing.assert_allclose(turned - np.diag(np.diag(turned)), 0, atol=1e-4)
    assert np.all((np.diag(turned) / (0.2 * np.sqrt(9)) > 0.6) & (np.diag(turned) / (0.2 * np.sqrt(9)) < 1.3))


def test_with_muon_adamw_trains_the_rest_with_its_own_rate():
    parameters = {"embedding": jnp.full((3, 2), 4.0), "bias": jnp.full(2, 4.0), "matrix": jnp.ones((2, 2))}
    decays = {"embedding": True, "bias": False, "matrix": True}
    gradients = jax.tree.map(jnp.ones_like, parameters)
    transform = make_optimizer(MUON, decays, {"embedding": False, "bias": False, "matrix": True})
    updates: Any = transform.update(gradients, transform.init(parameters), parameters)[0]
    np.testing.assert_allclose(updates["bias"], np.full(2, 0.25), rtol=1e-4)  # 0.005 / 0.02
    np.testing.assert_allclose(updates["embedding"], np.full((3, 2), 0.25 * (1 + 0.5 * 4)), rtol=1e-4)


def test_muon_takes_every_projection_of_a_block_and_nothing_else():
    config = resolve_config(ModelConfig(layers=1, heads=2, width=8, context=8, attention=("kda",), dtype="float32"))
    mask = matrix_mask(nnx.eval_shape(lambda: GPT(config, 11, rngs=nnx.Rngs(0))))
    taken = {jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("blocks.0.")
             for path, takes in jax.tree_util.tree_leaves_with_path(mask) if takes}
    assert taken == {f"{name}.kernel" for name in (
        "mlp.hidden", "mlp.output", *(f"attention.{name}" for name in (
            "query", "key", "value", "output", "write", "decay", "decay.down", "gate", "gate.down")))}


def test_muon_refuses_what_is_no_matrix():
    config = resolve_config(ModelConfig(layers=1, heads=2, width=8, context=8, attention=("synthesizer",),
                                        dtype="float32"))
    with pytest.raises(ConfigError, match=r"muon, and the parameter blocks\.0\.attention\.scores_HLL has shape "
                                          r"\(2, 8, 8\), which is no matrix; expected adamw"):
        model_optimizer(MUON, nnx.eval_shape(lambda: GPT(config, 11, rngs=nnx.Rngs(0))))


def test_both_optimizers_have_the_state_that_estimates_of_disk_space_count():
    parameters = {"a": jnp.zeros((20, 30)), "b": jnp.zeros(50)}
    for name in ("adamw", "radam"):
        state = make_optimizer(OptimizerConfig(name=name), {"a": True, "b": False}).init(parameters)
        # And one count of updates.
        assert sum(x.size for x in jax.tree.leaves(state)) == (STATE_COPIES - 1) * 650 + 1
