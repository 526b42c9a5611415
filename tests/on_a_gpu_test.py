"""Tests that need a GPU, of whole models and of calls near its memory size: correct and deterministic results.

``tests/kernels/op_contract_test.py`` has the ops one by one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import timing
from configs.schema import Config, ModelConfig, TrainConfig
from data.loader import Batch
from kernels.cases import WORSE_THAN_PLAIN, error_of
from kernels.linear_attention import State, linear_attention
from kernels.linear_attention.cases import DEVICE_TOLERANCES, SCHEDULES
from models.gpt import GPT, resolve_config
from sampling.token_step import token_step
from sampling.weights import from_product_weights, to_product_weights
from training.environment import peak_bytes
from training.optimizer import model_optimizer
from training.step import initial_state, jit_step, make_model, make_train_step

pytestmark = pytest.mark.usefixtures("gpu")

MODES = ("softmax", "window", "linear", "chunked", "gated", "gated_delta", "power", "chunked,softmax")
CUDNN_MODES = ("softmax", "window", "chunked,softmax")
"""Modes that train with cuDNN's attention, which sums the gradients of the queries in no fixed order."""
VOCABULARY = 257
PERIOD = 4099
"""After how many tokens the inputs of a large call repeat: a prime number, so that an address that is off by a power of
two finds other numbers."""
TOKENS = 301
COMPARED_TOKENS = 4096
"""The last tokens of a large call, which are compared."""


def make_config(attention: str, dtype: str) -> Config:
    """Two layers as wide as GPT-2's of 124M, with weights large enough for attention to matter."""
    model = ModelConfig(layers=2, heads=12, width=768, context=1024, dtype=dtype,  # type: ignore[arg-type]
                        attention=tuple(attention.split(",")), initial_scale=0.1)
    return Config(model=resolve_config(model), train=TrainConfig(batch_size=2))


def make_batch(config: Config) -> Batch:
    shape = 2, config.train.batch_size, config.model.context
    return Batch(*np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32))


def loss_and_gradients(config: Config, platform: str) -> dict[str, np.ndarray]:
    """Results of a new model on a platform's first device, by its default implementations; gradients as one vector."""

    @nnx.jit
    @nnx.value_and_grad
    def compute(model: GPT, batch: Batch) -> jax.Array:
        x_BTE, _ = model.forward(jnp.asarray(batch.inputs_BT))
        targets_BT = jnp.asarray(batch.targets_BT)
        return model.head.loss_sum(x_BTE, targets_BT) / targets_BT.size

    exact = "highest" if config.model.dtype == "float32" else "default"
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision(exact):
        loss, gradients = compute(make_model(config, VOCABULARY), make_batch(config))
    return {"loss": np.asarray(loss),
            "gradients": np.concatenate([np.ravel(x) for x in jax.tree.leaves(nnx.to_pure_dict(gradients))])}


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_those_of_the_plain_forms_on_the_cpu(mode):
    expected = loss_and_gradients(make_config(mode, "float32"), "cpu")
    exact = loss_and_gradients(make_config(mode, "float32"), "gpu")
    rounded, plain = (loss_and_gradients(make_config(mode, "bfloat16"), platform) for platform in ("gpu", "cpu"))
    for name, x in expected.items():
        assert error_of(exact[name], x) <= 1e-4, name
        assert error_of(rounded[name], x) <= max(WORSE_THAN_PLAIN * error_of(plain[name], x), 1e-4), name


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in CUDNN_MODES])
def test_training_steps_give_the_same_bits_each_time(mode):
    config = make_config(mode, "bfloat16")
    model = make_model(config, VOCABULARY)
    transform = model_optimizer(config.optimizer, model)
    step = jit_step(make_train_step(model, config, transform))

    def train() -> list[np.ndarray]:
        state = initial_state(config, VOCABULARY, transform)
        for _ in range(3):
            state, metrics = step(state, make_batch(config), jnp.float32(1e-3))
        return [np.asarray(x) for x in jax.tree.leaves((state, metrics))]

    first, again = train(), train()
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_sampled_token_has_the_logits_of_the_parallel_form_with_the_same_bits_each_time(mode):
    tokens_BT = np.random.default_rng(1).integers(0, VOCABULARY, (1, TOKENS), dtype=np.int32)

    def whole(dtype: str, platform: str) -> np.ndarray:
        with jax.default_device(jax.devices(platform)[0]):
            return np.asarray(nnx.jit(lambda model, x: model(x))(make_model(make_config(mode, dtype), VOCABULARY),
                                                                 tokens_BT)[0, -1])

    graph, arrays = to_product_weights(make_model(make_config(mode, "bfloat16"), VOCABULARY))

    @jax.jit
    def last_logits(arrays: Any, tokens_BT: jax.Array) -> jax.Array:
        model, head = from_product_weights(graph, arrays)
        _, cache = model.forward(tokens_BT[:, :-1], model.init_cache(*tokens_BT.shape))
        return token_step(model, head)(tokens_BT[:, -1:], cache)[0][0]

    expected, plain, found = whole("float32", "cpu"), whole("bfloat16", "cpu"), last_logits(arrays, tokens_BT)
    assert error_of(np.asarray(found), expected) <= WORSE_THAN_PLAIN * error_of(plain, expected)
    assert np.array_equal(found, last_logits(arrays, tokens_BT))


@pytest.mark.xdist_group("takes most of the memory")
@pytest.mark.parametrize("implementation", SCHEDULES)
@pytest.mark.parametrize("D", [64, 128])
def test_a_call_of_more_elements_than_an_int32_counts_is_the_same_call_in_two_parts(D, implementation):
    check_large_call(2**31 // (8 * D) + 2**14, D, implementation)


def check_large_call(T: int, D: int, implementation: str) -> None:
    """Compares the last tokens of one call with those of two, the second of which continues from the first's state."""

    def attend(q, k, v, dy, state):
        y, backward, end = jax.vjp(lambda q, k, v: linear_attention(q, k, v, initial_state=state,
                                                                    implementation=implementation), q, k, v,
                                   has_aux=True)
        last = {name: x[:, -COMPARED_TOKENS:] for name, x in zip(("y", "dq", "dk", "dv"), (y, *backward(dy)),
                                                                 strict=True)}
        return last | {"final s": end.s_BHMD, "final z": end.z_BHM}

    def whole(q, k, v, dy):
        return attend(q, k, v, dy, None)

    def resumed(q, k, v, dy):
        before, after = (slice(None), slice(None, T // 2)), (slice(None), slice(T // 2, None))
        _, state = linear_attention(q[before], k[before], v[before], implementation=implementation)
        return attend(q[after], k[after], v[after], dy[after], State(*state))

    def inputs():
        keys, at_T = jax.random.split(jax.random.key(0), 4), jnp.arange(T) % PERIOD
        q, k, v, dy = (jax.random.normal(key, (1, PERIOD, 8, D)) for key in keys)
        return tuple(x.astype(jnp.bfloat16)[:, at_T] for x in (jax.nn.softplus(q), jax.nn.softplus(k), v, dy))

    x_BTHD = jax.ShapeDtypeStruct((1, T, 8, D), jnp.bfloat16)
    programs = [jax.jit(program).lower(*[x_BTHD] * 4).compile() for program in (whole, resumed)]
    needed, limit = max(peak_bytes(program) or 0 for program in programs), timing.device_memory()
    if limit is not None and needed > limit:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB, the device has {limit / 2**30:.0f}")
    given = jax.jit(inputs)()
    found, expected = ({name: np.asarray(x) for name, x in program(*given).items()} for program in programs)
    for name, x in expected.items():
        assert error_of(found[name], x.astype(np.float64)) <= DEVICE_TOLERANCES["bfloat16"], name
