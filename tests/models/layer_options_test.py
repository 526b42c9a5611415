"""The layer options, beyond the contract tests: results, caches and refusals."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from configs.schema import EncoderConfig, ModelConfig
from models import attention, encoder, gpt
from models.attention.gates import ChannelDecay, InputDecay, fixed_log_decay
from models.attention.layer_options import LayerOptions
from models.attention.rotary import rotate
from models.attention.self_attention import Linear, SelfAttention
from models.parameters import declarations
from support.errors import ConfigError

pytestmark = pytest.mark.fast

B, T, H, D, E = 2, 9, 2, 4, 8
X_BTE = jax.random.normal(jax.random.key(0), (B, T, E))
POSITIONS_BT = np.arange(T)[None].repeat(B, axis=0)


def build(mode: str = "softmax", *, head_width: int = D, **options):
    module = attention.modes()[mode]
    return module.Attention(module.Config(**options), heads=H, head_width=head_width, width=E, max_length=T,
                            rngs=nnx.Rngs(3))


def forward(layer: SelfAttention, *inputs, **options):
    """``layer.forward``, compiled."""
    return jax.jit(lambda *inputs, **options: layer.forward(*inputs, **options))(*inputs, **options)


def test_a_layer_without_parts_has_no_parameters_of_them():
    plain = nnx.to_flat_state(nnx.state(build(), nnx.Param))
    assert {path[0] for path, _ in plain} == {"query", "key", "value", "output"}


@pytest.mark.parametrize("options", [{"short_conv": 4}, {"output_gate": "sigmoid"}, {"output_gate": "silu"}])
def test_a_convolution_and_a_gate_begin_as_nothing(options):
    np.testing.assert_allclose(forward(build(**options), X_BTE)[0], forward(build(), X_BTE)[0], rtol=1e-6)


def test_the_order_is_convolution_activation_norm_rotation_and_then_norm_and_gate():
    layer = build("softmax", short_conv=2, qk_activation="silu", qk_norm="l2", output_norm="rms", output_gate="silu")
    taps = {name: 0.5 + np.asarray(jax.random.normal(jax.random.key(n), (2, H * D)))
            for n, name in enumerate(("query", "key", "value"))}
    for name, taps_KF in taps.items():
        getattr(layer, f"{name}_taps_KF")[...] = taps_KF
    layer.gate.kernel[...] = jax.random.normal(jax.random.key(9), (E, H * D))
    layer.output_scale_HD[...] = scale_HD = jax.random.normal(jax.random.key(7), (H, D))

    @jax.jit
    def in_order(x_BTE, positions_BT):
        heads = {}
        for name in taps:
            x_BTF = getattr(layer, name)(x_BTE)
            before_BTF = jnp.pad(x_BTF, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            x_BTF = jax.nn.silu(taps[name][0][None, None] * before_BTF + taps[name][1][None, None] * x_BTF)
            heads[name] = x_BTF.reshape(B, T, H, D)
        q, k = (rotate(x_BTHD / jnp.sqrt(jnp.sum(x_BTHD**2, axis=-1, keepdims=True) + 1e-6), positions_BT)
                for x_BTHD in (heads["query"], heads["key"]))
        y = layer.mix(q, k, heads["value"], x_BTE=x_BTE, causal=True, segment_ids_BT=None)
        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * scale_HD[None, None]
        y = y.reshape(B, T, H * D) * jax.nn.silu(layer.gate(x_BTE))
        return layer.output(y)

    found = forward(layer, X_BTE, positions_BT=POSITIONS_BT)[0]
    np.testing.assert_allclose(found, in_order(X_BTE, POSITIONS_BT), rtol=1e-4, atol=1e-6)


def test_the_parts_are_counted():
    plain, parts = build(), build(short_conv=3, output_gate="sigmoid")
    assert parts.flops(10, T) == plain.layer_flops(10, T)
    assert parts.layer_flops(10, T) - plain.layer_flops(10, T) == 10 * (2 * E * H * D + 2 * 3 * 3 * H * D)
    assert parts.layer_state_bytes(T) - plain.layer_state_bytes(T) == 4 * 2 * 3 * H * D


def test_taps_scales_and_decays_take_no_weight_decay():
    declared = declarations(build("gated"))
    found = {".".join(path): of.decays for path, of in nnx.traversals.flatten_mapping(declared).items()}
    assert {name for name, decays in found.items() if decays} == {
        f"{name}.kernel" for name in ("query", "key", "value", "output", "gate", "decay")}


def test_a_decay_begins_between_its_bounds_and_stays_float32():
    decay = InputDecay(E, 64, rngs=nnx.Rngs(0))
    rates_H, steps_H = np.exp(decay.log_rate_H[...]), np.asarray(jax.nn.softplus(decay.parameters[1]))
    assert 1 <= rates_H.min() < 3
    assert 14 < rates_H.max() <= 16
    assert 0.99e-3 < steps_H.min() < 2e-3
    assert 0.06 < steps_H.max() < 0.101
    log_decay_BTH = decay(X_BTE.astype(jnp.bfloat16))
    assert log_decay_BTH.dtype == jnp.float32
    assert np.all(log_decay_BTH < 0)


def test_a_decay_per_channel_has_a_rate_per_head_and_a_step_per_channel():
    decay = ChannelDecay(E, 3, H, 64, rngs=nnx.Rngs(0))
    assert decay.log_rate_H.shape == (H,)
    steps = np.asarray(jax.nn.softplus(decay.parameters[1]))
    assert steps.shape == (H * 64,)
    assert 0.99e-3 < steps.min() < steps.max() < 0.101
    x_BTE = X_BTE.astype(jnp.bfloat16)
    log_decay_BTHM = decay(x_BTE)
    assert log_decay_BTHM.dtype == jnp.float32
    gate_BTHM = decay.gate(x_BTE)
    for h, rate in enumerate(np.exp(decay.log_rate_H[...])):
        np.testing.assert_allclose(log_decay_BTHM[:, :, h], -rate * jax.nn.softplus(gate_BTHM[:, :, h]), rtol=1e-5)


def test_kda_is_the_delta_rule_with_decays_and_a_gate_of_low_rank():
    layer = build("kda", rank=3, write_range=2, short_conv=0, qk_activation="none", output_norm="none")
    layer.gate.kernel[...] = jax.random.normal(jax.random.key(9), (3, H * D))
    q, k, v = (getattr(layer, name)(X_BTE).reshape(B, T, H, D) for name in ("query", "key", "value"))
    q, k = (x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    beta_BTH, factor_BTHM = 2 * jax.nn.sigmoid(Linear.__call__(layer.write, X_BTE)), jnp.exp(layer.decay(X_BTE))
    gate_BTF = layer.gate.down(X_BTE) @ layer.gate.kernel[...] + layer.gate.parameters[1][None, None]
    np.testing.assert_allclose(layer.gate(X_BTE), gate_BTF, rtol=1e-5)
    state, y = np.zeros((B, H, D, D)), []
    for t in range(T):
        state = np.asarray(factor_BTHM[:, t])[..., None] * state
        error = np.asarray(v[:, t]) - np.einsum("bhm,bhmd->bhd", k[:, t], state)
        state += np.einsum("bh,bhm,bhd->bhmd", beta_BTH[:, t], k[:, t], error)
        y.append(np.einsum("bhm,bhmd->bhd", q[:, t], state))
    expected = layer.output(np.stack(y, axis=1).reshape(B, T, H * D).astype(np.float32)
                            * 2 * jax.nn.sigmoid(gate_BTF))
    np.testing.assert_allclose(forward(layer, X_BTE)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [lambda start: build("kda", decay_init=start),
                                  lambda start: build("gated", decay="kda", decay_init=start)])
def test_the_initial_decay_of_each_channel_or_head(make):
    def values_per_head(start: str) -> list[int]:
        return [len(set(bias_D.tolist())) for bias_D in make(start).decay.bias[...].reshape(H, D)]

    assert values_per_head("channel") == [D] * H
    assert values_per_head("head") == [1] * H
    bias_HD = make("head").decay.bias[...].reshape(H, D)
    assert len(set(bias_HD[:, 0].tolist())) == H


def test_the_decay_of_gla():
    layer = build("gated", decay="channel", decay_rank=3)
    gate_BTF = layer.decay.down(X_BTE) @ layer.decay.kernel[...] + layer.decay.parameters[1][None, None]
    np.testing.assert_allclose(layer.decay(X_BTE), np.asarray(jax.nn.log_sigmoid(gate_BTF)).reshape(B, T, H, D) / 16,
                               rtol=1e-4)


def test_gated_with_the_decay_of_kda():
    kda, gated = build("kda", rank=3), build("gated", decay="kda", decay_rank=3)
    nnx.update(gated.decay, nnx.state(kda.decay))
    np.testing.assert_array_equal(gated.decay(X_BTE), kda.log_decay(X_BTE)["channel_log_decay_BTHM"])


def test_taps_that_begin_at_random_have_the_scale_of_projections():
    taps_KF = build("softmax", short_conv=4, conv_init="normal", head_width=400).query_taps_KF[...]
    assert np.std(taps_KF) == pytest.approx(0.02, rel=0.05)


def test_a_fixed_decay_is_that_of_retnet():
    np.testing.assert_allclose(np.exp(fixed_log_decay(3)), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], rtol=1e-6)


def test_the_division_is_off_where_the_output_is_normed():
    config = attention.modes()["chunked"].Config
    assert config().normalizes
    assert not config(output_norm="rms").normalizes
    assert config(output_norm="rms", normalize=True).normalizes
    assert (config().resolved().normalize, config(output_norm="rms").resolved().normalize) == (True, False)


def test_a_mode_without_rotary_positions_keeps_none():
    for rotary in (False, True):
        layer = build("gated", rotary=rotary)
        same = np.allclose(forward(layer, X_BTE, positions_BT=POSITIONS_BT)[0], forward(layer, X_BTE)[0], rtol=1e-5)
        assert same == (not rotary)


def test_a_head_need_not_be_its_share_of_the_width():
    config = gpt.resolve_config(ModelConfig(layers=1, heads=3, width=16, head_width=6, context=8, dtype="float32"))
    model = gpt.GPT(config, 11, rngs=nnx.Rngs(0))
    assert model.blocks[0].attention.query.kernel.shape == (16, 18)
    assert jax.jit(model)(np.zeros((1, 8), np.int32)).shape == (1, 8, 11)


@pytest.mark.parametrize(("mode", "options", "expected"), [
    ("softmax", {"short_conv": -1}, "at least 0"),
    ("softmax", {"qk_norm": "l1"}, "none, l2 or rms"),
    ("reformer", {"qk_norm": "l2"}, "none"),
    ("synthesizer", {"short_conv": 4}, "0"),
    ("linformer", {"short_conv": 4}, "0"),
    ("longformer", {"qk_norm": "rms"}, "none, or model.modes.longformer.global_tokens 0"),
    ("window", {"window": 0}, "at least 1"),
    ("power", {"degree": 3}, "an even one, or model.modes.power.normalize False"),
    ("chunked", {"feature_map": "identity"}, "model.modes.chunked.normalize False"),
    ("chunked", {"feature_map": "taylor", "order": 1},
     "model.modes.chunked.normalize False, or model.modes.chunked.order 2"),
    ("chunked", {"features": 0}, "at least 1"),
    ("performer", {"features": -3}, "at least 1"),
    ("performer", {"resample_every": -1}, "at least 0"),
    ("performer", {"chunk_size": 0}, "at least 1"),
    ("gated", {"decay": "none"}, "input, fixed, channel or kda"),
    ("gated", {"decay_rank": 0}, "at least 1"),
    ("gated", {"kernel": "pallas_gpu", "decay": "channel"}, "chunked"),
    ("gated", {"kernel": "pallas_gpu", "decay": "kda"}, "chunked"),
    ("gated_delta", {"qk_norm": "rms"}, "none or l2"),
    ("gated_delta", {"chunk_size": 0}, "at least 1"),
    ("gated_delta", {"write_range": 3}, "1 or 2"),
    ("kda", {"rank": 0}, "at least 1"),
    ("kda", {"qk_norm": "rms"}, "none or l2"),
    ("kda", {"write_range": 0}, "1 or 2"),
    ("softmax", {"conv_init": "zeros"}, "identity or normal"),
    ("reformer", {"rounds": 0}, "at least 1"),
    ("reformer", {"chunk_size": 0}, "at least 1"),
    ("reformer", {"resample_every": -1}, "at least 0"),
    *(("reformer", {"buckets": buckets}, "an even number up to 64, or a power of two") for buckets in (0, 7, 100)),
    ("bigbird", {"block_size": 0}, "at least 1"),
    ("bigbird", {"random_blocks": -1}, "at least 0"),
    ("sparse", {"block_size": 1}, "at least 2"),
    ("sparse", {"summary": 0}, "at least 1"),
    ("sparse", {"summary": 8, "block_size": 8}, "at least 1, and less than model.modes.sparse.block_size, 8"),
    ("sinkhorn", {"block_size": 0}, "at least 1"),
    ("sinkhorn", {"iterations": 0}, "at least 1"),
    ("sinkhorn", {"temperature": 0.0}, "a number above 0"),
    ("sinkhorn", {"temperature": float("nan")}, "a number above 0"),
    ("linformer", {"k": 0}, "at least 1"),
    ("local", {"block_size": 0}, "at least 1"),
    ("longformer", {"window": 0}, "at least 1"),
    ("longformer", {"global_tokens": -1}, "at least 0"),
    ("synthesizer", {"k": 0}, "at least 1"),
    ("synthesizer", {"kind": "Random"}, "random, factorised or dense"),
])
def test_options_that_cannot_be(mode, options, expected, monkeypatch):
    """The message has the first option, its value and what was expected."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks that tests add
    with pytest.raises(ConfigError) as caught:
        attention.modes()[mode].Config(**options)
    (option, value), *_ = options.items()
    message = str(caught.value)
    assert message.startswith(f"model.modes.{mode}.")
    assert message.endswith(f"expected {expected}")
    assert str(value) in message
    assert option in message or option == "feature_map"  # it is normalize that has to change


def test_the_documented_work_of_the_delta_rule_is_what_is_counted():
    modes = attention.modes()

    def of_mixing(mode: str, head_width: int) -> int:
        layer = modes[mode].Attention(modes[mode].Config(), heads=1, head_width=head_width, width=E, max_length=1024,
                                      rngs=nnx.Rngs(3))
        gates = [getattr(layer, name) for name in ("write", "decay") if hasattr(layer, name)]
        return layer.flops(1024, 1024) - sum(gate.flops(1024) for gate in gates)

    text = " ".join((Path(__file__).parents[2] / "docs" / "attention_modes.md").read_text().split())
    ratios = re.search(r"(\S+), (\S+) and (\S+) times the work of `gated` at head widths 32, 64 and 128", text)
    assert ratios is not None
    for width, ratio in zip((32, 64, 128), ratios.groups(), strict=True):
        assert of_mixing("gated_delta", width) / of_mixing("gated", width) == pytest.approx(float(ratio), abs=0.05)


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention": ("gated",), "context": 3}, "model.modes.gated.short_conv is 4; expected at most model.context, 3"),
    ({"attention": ("power",), "modes": {"power": {"degree": 4}}, "width": 128, "heads": 4},
     "model.modes.power.degree is 4: heads of width 32 have 52,360 features; expected at most 10,000"),
    ({"head_width": 0}, "model.head_width is 0; expected at least 1"),
])
def test_models_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        gpt.resolve_config(ModelConfig(**{"layers": 1, "heads": 2, "width": 16, "context": 8} | changes))


@pytest.mark.parametrize(("mode", "options", "message"), [
    ("softmax", {"short_conv": 4}, "model.modes.softmax.short_conv is 4; expected 0 in an encoder"),
    ("softmax", {"forget_gate": True}, "model.attention softmax: with these options it is causal"),
    ("gated", {}, "model.attention gated: it is causal and cannot be an encoder; expected one of bigbird, chunked"),
])
def test_encoders_that_cannot_be(mode, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        encoder.resolve_config(EncoderConfig(attention=(mode,), modes={mode: options}))


def test_every_mode_has_the_options():
    assert all(issubclass(module.Config, LayerOptions) for module in attention.modes().values())
