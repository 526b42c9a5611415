"""The fused step of a token is ``GPT.forward`` and ``logits``, up to rounding. Its kernels are interpreted."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from kernels import device
from models import attention
from models.gpt import GPT, resolve_config
from sampling.sampler import Sampler, Sampling
from sampling.token_step import TokenStep
from sampling.weights import from_product_weights, to_product_weights

pytestmark = pytest.mark.usefixtures("gpu_kernel")

V, CONTEXT, PROMPT = 13, 24, 9
# RMS(error) / RMS(reference). In bfloat16 products are rounded to 8 bits, in one of the two more often.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2**-5}
MIXED = ("chunked", "longformer", "gated", "softmax", "gated_delta", "power")


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Ops choose the forms of a GPU, with their kernels interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("platform", "gpu"), ("interprets_kernels", True), ("cores", 2)):
            patch.setattr(device, name, lambda value=value: value)
        yield


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_model(modes: tuple[str, ...], options: dict[str, Any] | None = None, **config: Any) -> GPT:
    """With large random parameters, so that each counts."""
    given = ModelConfig(**{"layers": len(modes), "heads": 2, "width": 12, "context": CONTEXT, "dtype": "float32",
                           "attention": modes, "modes": {modes[0]: options} if options else {}} | config)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: GPT(resolve_config(given), V, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.5, x.shape), x.dtype), parameters))


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
        wanted = np.asarray(wanted, np.float64)
        assert np.linalg.norm(np.asarray(x, np.float64) - wanted) <= tolerance * (np.linalg.norm(wanted) or 1)


def check(model: GPT, batch: int = 1) -> None:
    """Compares the logits and the cache after a prompt and two more tokens."""
    tokens_BT = jnp.asarray(np.random.default_rng(1).integers(V, size=(batch, PROMPT + 2)), jnp.int32)
    _, cache = jax.jit(lambda: model.forward(tokens_BT[:, :PROMPT], model.init_cache(batch, CONTEXT)))()

    @jax.jit
    def plain(tokens_BT, cache):
        x_BTE, cache = model.forward(tokens_BT, cache)
        return model.logits(x_BTE)[:, 0], cache

    def twice(step):
        _, after = step(tokens_BT[:, PROMPT:PROMPT + 1], cache)
        return step(tokens_BT[:, PROMPT + 1:], after)

    expected = twice(plain)
    with as_on_a_gpu():
        graph, arrays = to_product_weights(model)

        @jax.jit
        def fused(tokens_BT, cache):
            step = TokenStep.of(*from_product_weights(graph, arrays))
            assert step is not None
            return step(tokens_BT, cache)

        found = twice(fused)
    assert_close(found, expected, TOLERANCES[model.config.dtype])


@pytest.mark.parametrize("options", [
    {"short_conv": 0, "qk_activation": "none", "output_norm": "none", "output_gate": "none"},
    {"short_conv": 2, "qk_activation": "silu", "qk_norm": "l2", "output_norm": "rms", "output_gate": "silu"}],
    ids=["bare", "all"])
@pytest.mark.parametrize(("mode", "more"), [
    ("linear", {}), ("chunked", {"feature_map": "softplus", "normalize": True}),
    ("performer", {"phi": "performer_relu"}),
    ("gated", {}), ("gated", {"decay": "fixed", "qk_norm": "rms"}), ("gated_delta", {}),
    ("gated_delta", {"decay": False}), ("gated_delta", {"write_range": 2})])
def test_a_mode_with_a_recurrence(mode, more, options):
    model = make_model((mode,), options | more, positions="learned")
    assert model.blocks[0].attention.recurrence is not None
    check(model)


@pytest.mark.parametrize(("mode", "options"), [("chunked", {}), ("gated_delta", {"rotary": True})])
def test_rotary_positions(mode, options):
    check(make_model((mode,), options, positions="rotary"))


def test_a_decay_per_channel():
    check(make_model(("gated",), {"decay": "channel"}))


@pytest.mark.parametrize("mode", attention.sampling_modes())
def test_every_mode(mode):
    check(make_model((mode,)), batch=2)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_model_of_several_modes(dtype):
    check(make_model(MIXED, dtype=dtype))


def test_a_head_of_logistics_and_heads_that_are_too_wide_for_the_kernel():
    check(make_model(("gated_delta",), head="logistics", head_width=136))


def test_samples_are_those_of_the_plain_forms():
    model, prompt_T = make_model(MIXED), np.arange(PROMPT) % V
    state = Sampler(model).encode(prompt_T)

    def sample() -> np.ndarray:
        return np.concatenate(list(Sampler(model).generate(
            prompt_T[:0], Sampling(temperature=1.0), max_new_tokens=12, state=state)), axis=1)

    expected_BT = sample()
    with as_on_a_gpu():
        found_BT = sample()
    np.testing.assert_array_equal(found_BT, expected_BT)
    assert len(set(expected_BT[0].tolist())) > 1  # a model that repeats itself would hide errors


def test_other_devices_have_none():
    model = make_model(("gated",))
    assert TokenStep.of(model, model.head) is None
