"""The contract of every attention mode in the folder."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import attention
from models.attention.self_attention import LayerCache, SelfAttention
from models.parameters import Axis, declarations
from support.errors import ConfigError
from tests import several_devices

ROOT = Path(__file__).parents[2]
PARTS = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "rms", "output_norm": "rms", "output_gate": "sigmoid"}
VARIANTS = {
    "softmax+parts": PARTS,
    "chunked+parts": PARTS | {"feature_map": "identity", "qk_norm": "l2", "output_gate": "silu"},
    "softmax+forget": {"forget_gate": True, "short_conv": 2},
    "longformer+parts": PARTS | {"global_tokens": 0, "window": 40},
    "gated_delta+rotary": {"decay": False, "rotary": True, "output_gate": "none"},
    "window+narrow": {"window": 7},
    "power+ungated": {"gate": False, "output_norm": "rms"},
    "gated+channel": {"decay": "channel", "decay_rank": 3, "conv_init": "normal"},
    "gated+kda": {"decay": "kda", "output_norm": "none"},
    "gated_delta+range": {"write_range": 2, "conv_init": "normal", "short_conv": 2},
    "kda+range": {"write_range": 2, "rank": 3, "short_conv": 0, "output_gate": "none"},
    "gated+fixed": {"decay": "fixed", "short_conv": 0, "output_norm": "none", "output_gate": "none"},
}
"""Modes with options; names begin with the mode's."""
MODES = [*sorted(attention.modes()), *VARIANTS]
B, H, D, E = 2, 2, 4, 8
T, ROOM = 150, 320  # more than two chunks of 64

# float32 with differently ordered sums; weights near 1 amplify the rounding of scores.
TOLERANCE = 1e-5
# About six roundings to 8 bits (projections, features, weights, result), each 1.1e-3 RMS, amplified likewise.
BFLOAT16_TOLERANCE = 2e-2
# With norms of queries, keys and output: the terms of an output have both signs. Where they cancel, as for the first
# tokens of a row, the norm divides by almost 0. The gradients of these tokens are the largest, and are differences of
# rounded numbers. Without the norms the error is a sixth of this.
BFLOAT16_NORMED_TOLERANCE = 1e-1

SMALL = {"bigbird": {"block_size": 3, "random_blocks": 2}, "local": {"block_size": 8},
         "reformer": {"rounds": 3, "chunk_size": 3, "buckets": 4}, "sparse": {"block_size": 5, "summary": 2}}
"""Modes whose pieces then end inside of blocks."""


@functools.cache
def build(mode: str, **options) -> SelfAttention:
    """The layer of a mode, made once: no test may change it."""
    module = attention.modes()[name_of(mode)]
    return module.Attention(module.Config(**VARIANTS.get(mode, {}) | options), heads=H, head_width=D, width=E,
                            max_length=ROOM, rngs=nnx.Rngs(3))


def name_of(mode: str) -> str:
    return mode.partition("+")[0]


def make_x(tokens: int = T, seed: int = 0) -> jax.Array:
    # Initial projections shrink their input; with inputs this large attention is far from uniform.
    return 20 * jax.random.normal(jax.random.key(seed), (B, tokens, E))


def run(module: SelfAttention):
    """The whole layer, compiled, because a mode may override more than ``mix``."""
    graph, state = nnx.split(module)

    def layer(x_BTE, segment_ids_BT=None, causal=module.causal):
        if segment_ids_BT is not None:  # of one dtype: weakly typed ids would be compiled again
            segment_ids_BT = jnp.asarray(segment_ids_BT, jnp.int32)
        return _layer(graph, state, x_BTE, segment_ids_BT, causal, module.supports_segments(causal))

    return layer


@jax.jit(static_argnames=("graph", "causal", "packed"))  # shared by all tests with the same graph
def _layer(graph, state, x_BTE, segment_ids_BT, causal, packed):
    return nnx.merge(graph, state).forward(x_BTE, causal=causal, segment_ids_BT=segment_ids_BT, packed=packed)[0]


def run_decode(module: SelfAttention):
    graph, state = nnx.split(module)
    return lambda x_BTE, cache, lengths_B=None: _decode(graph, state, x_BTE, cache, lengths_B)


@jax.jit(static_argnames="graph")
def _decode(graph, state, x_BTE, cache, lengths_B):
    return nnx.merge(graph, state).forward(x_BTE, cache, lengths_B=lengths_B)


def whole(module: SelfAttention):
    """The output that decoding must equal: a token's in the whole sequence or, if later tokens change it, at the end of
    the sequence up to the token."""
    layer = run(module)
    if module.prefix_exact:
        return layer

    def last_of_each_prefix(x_BTE):
        segment_ids_BT = jnp.where(jnp.arange(x_BTE.shape[1])[None] <= jnp.arange(x_BTE.shape[1])[:, None], 0, -1)
        rows = [layer(jnp.broadcast_to(x_1TE, (len(segment_ids_BT), *x_1TE.shape[1:])), segment_ids_BT)
                for x_1TE in jnp.split(x_BTE, len(x_BTE))]
        return jnp.stack([jnp.diagonal(y_BTE).T for y_BTE in rows])

    return last_of_each_prefix


def decoder(mode: str, **options) -> SelfAttention:
    module = build(mode, **options)
    if module.decode_state == "none":
        pytest.skip("has no cached decode")
    return module


def assert_close(actual, expected, tolerance: float = TOLERANCE) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    assert error < tolerance, f"{error:.2e}"


def masks(module: SelfAttention) -> list[bool]:
    sees_ahead = module.bidirectional and not module.options.short_conv
    return [causal for causal, can in ((True, module.causal), (False, sees_ahead)) if can]


@pytest.mark.fast
def test_the_modes_are_found_and_helpers_are_not():
    assert {"bigbird", "chunked", "linear", "local", "performer", "softmax", "sparse"} <= set(MODES)
    assert not {"self_attention", "feature_maps", "__init__"} & set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_flags(mode):
    module = build(mode)
    assert all(type(flag) is bool for flag in (module.causal, module.bidirectional, module.prefix_exact,
                                               module.supports_segments(True), module.supports_segments(False)))
    assert module.causal or module.bidirectional
    assert module.decode_state in ("none", "constant", "window", "growing")
    assert module.name == name_of(mode)


@pytest.mark.parametrize(("mode", "decode_state"),
                         [("softmax", "growing"), ("linear", "constant"), ("chunked", "constant"),
                          ("performer", "constant")])
def test_flags_of_the_modes_without_parameters(mode, decode_state):
    module = build(mode)
    assert (module.causal, module.bidirectional, module.prefix_exact) == (True, True, True)
    assert module.decode_state == decode_state


@pytest.mark.parametrize("mode", MODES)
def test_shape_and_number_format(mode):
    module = build(mode)
    layer = run(module)
    for causal in masks(module):
        expected = layer(make_x(), causal=causal)
        assert (expected.shape, expected.dtype) == ((B, T, E), jnp.float32)
        assert np.all(np.isfinite(expected))
        low = layer(make_x().astype(jnp.bfloat16), causal=causal)
        assert (low.shape, low.dtype) == ((B, T, E), jnp.bfloat16)
        assert_close(low, layer(make_x().astype(jnp.bfloat16).astype(jnp.float32), causal=causal), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_causality(mode):
    module = build(mode)
    if not (module.causal and module.prefix_exact):
        pytest.skip("does not promise that outputs never depend on later tokens")
    layer, x = run(module), make_x()
    y = layer(x)
    for t in (1, 63, 64, 101, T - 1):
        perturbed = layer(x.at[:, t:].set(make_x(seed=1)[:, t:]))
        np.testing.assert_array_equal(perturbed[:, :t], y[:, :t])
        assert np.all(np.any(perturbed[:, t] != y[:, t], axis=-1))


@pytest.mark.parametrize("mode", MODES)
def test_looking_in_both_directions(mode):
    module = build(mode)
    if False not in masks(module):
        pytest.skip("sees the past only")
    layer, x = run(module), make_x()
    y = layer(x, causal=False)
    perturbed = layer(x.at[:, 1:].set(make_x(seed=1)[:, 1:]), causal=False)
    assert np.any(perturbed[:, 0] != y[:, 0])


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_a_mode_cannot_do_is_refused(mode):
    module = build(mode)
    for causal in {True, False} - set(masks(module)):
        with pytest.raises(NotImplementedError, match=f"attention mode '{name_of(mode)}'"):
            module.forward(make_x(), causal=causal)


@pytest.mark.parametrize("mode", MODES)
def test_extending_in_pieces_is_the_whole(mode):
    module = decoder(mode)
    x, extend = make_x(), run_decode(module)
    cache, pieces = module.layer_cache(B, ROOM, jnp.float32), []
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size]
    assert len(set(buffers)) == len(buffers)  # otherwise a sampler could not donate them
    structure = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache)
    for start, end in itertools.pairwise((0, 1, 71, 72, 73, 143)):  # of two lengths: each is compiled
        y, cache = extend(x[:, start:end], cache)
        pieces.append(y)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == structure  # a loop can carry it
    assert_close(jnp.concatenate(pieces, axis=1), whole(module)(x)[:, :143])


@pytest.mark.parametrize(("mode", "options"), [*((mode, {}) for mode in MODES), *SMALL.items()])
def test_prompts_of_different_lengths(mode, options):
    """Row b counts its first lengths_B[b] tokens; then, twice, another one or two."""
    module = decoder(mode, **options)
    x, extend = make_x(), run_decode(module)
    lengths = np.array([70, 33], np.int32)
    y, cache = extend(x[:, :70], module.layer_cache(B, ROOM, jnp.float32), lengths)
    first = whole(module)(x)
    for b, n in enumerate(lengths):
        assert_close(y[b, :n], first[b, :n])
    filled = lengths
    for more in (np.array([2, 1], np.int32), np.array([0, 2], np.int32)):
        y, cache = extend(jnp.stack([x[b, n:n + 2] for b, n in enumerate(filled)]), cache, more)
        for b, n in enumerate(filled):
            assert_close(y[b, :more[b]], first[b, n:n + more[b]]) if more[b] else None
        filled = filled + more


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_nothing(mode):
    module = build(mode)
    layer = run(module)
    x, padded = make_x(), jnp.concatenate([make_x(), make_x(seed=1)], axis=1)
    segment_ids = jnp.where(jnp.arange(2 * T) < T, 0, -1)[None].repeat(B, axis=0)
    for causal in masks(module):
        assert_close(layer(padded, segment_ids, causal=causal)[:, :T], layer(x, causal=causal))


@pytest.mark.parametrize("mode", MODES)
def test_segments_are_separate_sequences(mode):
    module = build(mode)
    layer, x, other = run(module), make_x(), make_x(seed=1)
    segment_ids = (jnp.arange(T) // 50)[None].repeat(B, axis=0)
    alone = jnp.where(segment_ids == 0, 0, -1)  # other tokens behind a segment are padding
    for causal in filter(module.supports_segments, masks(module)):
        packed = layer(x, segment_ids, causal=causal)
        for start in range(0, T, 50):
            segment = jnp.concatenate([x[:, start:start + 50], other[:, 50:]], axis=1)
            assert_close(packed[:, start:start + 50], layer(segment, alone, causal=causal)[:, :50])


@pytest.mark.parametrize("mode", MODES)
def test_a_segment_does_not_see_the_others(mode):
    """With ids that are unknown when the layer is traced."""
    module = build(mode)
    layer, x = run(module), make_x()
    segment_ids = (jnp.arange(T) // 50)[None].repeat(B, axis=0)
    for causal in filter(module.supports_segments, masks(module)):
        y = layer(x, segment_ids, causal=causal)
        perturbed = layer(x.at[:, 50:100].set(make_x(seed=1)[:, 50:100]), segment_ids, causal=causal)
        own = np.arange(T) // 50 == 1
        np.testing.assert_array_equal(perturbed[:, ~own], y[:, ~own])
        assert np.all(np.any(perturbed[:, own] != y[:, own], axis=-1))


@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_are_refused_where_segments_would_mix(mode):
    """Also where ids are unknown when the layer is traced."""
    module, x, ids = build(mode), make_x(4), jnp.zeros((B, 4), jnp.int32)
    for causal in itertools.filterfalse(module.supports_segments, masks(module)):
        forward = functools.partial(module.forward, x, causal=causal)
        for call in (forward, jax.jit(forward)):
            with pytest.raises(NotImplementedError, match=f"'{mode}' cannot separate the segments of a row"):
                call(segment_ids_BT=ids)


@pytest.mark.parametrize("mode", MODES)
def test_padding_anywhere_changes_nothing(mode):
    """Before a segment, inside, and behind: tokens are counted, not places."""
    module = build(mode)
    layer, x = run(module), make_x()
    ids = np.arange(T) // 50
    place = np.sort(np.random.default_rng(0).permutation(2 * T)[:T])
    padded, padded_ids = np.array(make_x(2 * T, seed=1)), np.full((B, 2 * T), -1, np.int32)
    padded[:, place], padded_ids[:, place] = x, ids
    for causal in filter(module.supports_segments, masks(module)):
        expected = layer(x, ids[None].repeat(B, axis=0), causal=causal)
        assert_close(layer(padded, padded_ids, causal=causal)[:, place], expected)


@jax.jit(static_argnames=("graph", "causal", "packed"))  # shared by both tests of gradients
def _sum_and_gradients(graph, parameters, rest, x_BTE, segment_ids_BT, weights_BTE, causal, packed):
    """The weighted sum of the output, and its gradients with respect to parameters and input."""

    def weighted_sum(parameters, x_BTE):
        y_BTE, _ = nnx.merge(graph, parameters, rest).forward(
            x_BTE, causal=causal, segment_ids_BT=segment_ids_BT, packed=packed)
        return jnp.sum(weights_BTE * y_BTE.astype(weights_BTE.dtype))

    return jax.value_and_grad(weighted_sum, (0, 1))(parameters, x_BTE)


def sum_and_gradients(module: SelfAttention, parameters, x_BTE, dtype):
    """With padding and, where they are supported, segments; in float64 or with parameters of float32."""
    graph, _, rest = nnx.split(module, nnx.Param, ...)
    packed = module.supports_segments(module.causal)
    ids_T = np.where(np.arange(T) % 30 == 7, -1, np.arange(T) // 60) if packed else np.where(np.arange(T) < 130, 0, -1)
    signs_BTE = np.sign(np.random.default_rng(0).normal(size=x_BTE.shape))  # exact in every dtype
    with jax.enable_x64(dtype == jnp.float64):
        return _sum_and_gradients(graph, parameters, rest, x_BTE, np.tile(np.int32(ids_T), (B, 1)),
                                  jnp.asarray(signs_BTE, dtype), module.causal, packed)


def to_float64(tree):
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_the_slopes(mode):
    """Of inputs and parameters, against finite differences in float64."""
    module = build(mode)
    point = to_float64((nnx.state(module, nnx.Param), make_x()))
    random = np.random.default_rng(1)
    directions = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), point)
    step = 1e-7  # small beside initial parameters of 0.02, which inputs of 20 amplify

    def at(by):
        return sum_and_gradients(module, *jax.tree.map(lambda leaf, along: leaf + by * along, point, directions),
                                 jnp.float64)

    with jax.enable_x64(True):
        (ahead, _), (behind, _), (_, gradients) = at(step / 2), at(-step / 2), at(0)
    expected = sum(np.vdot(gradient, direction) for gradient, direction in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(directions), strict=True))
    assert float(ahead - behind) / step == pytest.approx(float(expected), rel=1e-5, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_bfloat16_are_those_in_float64(mode):
    """Of parameters; inputs and the gradient of the output are exact in both dtypes."""
    module = build(mode)
    parameters = nnx.state(module, nnx.Param)
    x_BTE = (make_x() / 10).astype(jnp.bfloat16)

    def gradients(parameters, x_BTE, dtype):
        _, (found, _) = sum_and_gradients(module, parameters, x_BTE, dtype)
        return np.concatenate([np.ravel(g) for g in jax.tree.leaves(found)])

    normed = "none" not in (module.options.qk_norm, module.options.output_norm)
    assert_close(gradients(parameters, x_BTE, jnp.float32), gradients(*to_float64((parameters, x_BTE)), jnp.float64),
                 BFLOAT16_NORMED_TOLERANCE if normed else BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_the_state_is_what_the_flag_says(mode):
    module = build(mode)
    if module.decode_state == "none":
        with pytest.raises(NotImplementedError, match=mode):
            module.init_cache(1, ROOM, jnp.float32)
        return

    def cache_bytes(context):
        cache = jax.eval_shape(lambda: module.layer_cache(1, context, jnp.float32))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    declared = {context: module.layer_state_bytes(context) for context in (1, 1024, 4096, 8192)}
    assert all(type(size) is int and size > 0 for size in declared.values())
    if module.decode_state == "growing":
        assert declared[8192] > declared[4096] > declared[1024]
    else:
        assert declared[8192] == declared[4096]
        assert cache_bytes(8192) == cache_bytes(4096)
    # Apart from a few counters, the cache has only the declared state.
    assert declared[4096] <= cache_bytes(4096) <= declared[4096] + 64


@pytest.mark.parametrize("mode", MODES)
def test_flops_are_counted_alike_on_all_devices(mode, monkeypatch):
    module = build(mode)
    flops, at_4096 = module.flops(4096, 1024), module.flops(4096, 4096)
    for platform in ("gpu", "tpu"):
        monkeypatch.setattr("kernels.device.platform", lambda platform=platform: platform)
        assert (module.flops(4096, 1024), module.flops(4096, 4096)) == (flops, at_4096)
    assert type(flops) is int
    assert flops > 0
    assert module.flops(8192, 1024) == 2 * flops
    unmasked = module.flops(4096, 1024, causal=False)
    assert type(unmasked) is int
    assert unmasked > 0


@pytest.mark.parametrize("mode", MODES)
def test_shared_parameters_start_equal(mode):
    """The projections, from one seed; all other parameters must be declared as the mode's own."""
    base = SelfAttention(None, heads=H, head_width=D, width=E, max_length=ROOM, rngs=nnx.Rngs(3))
    module = build(mode)
    expected, actual = (dict(nnx.to_flat_state(nnx.state(layer, nnx.Param))) for layer in (base, module))
    assert module.own_parameters == sum(actual[path].size for path in actual.keys() - expected.keys())
    for path in expected.keys() & actual.keys():
        np.testing.assert_array_equal(actual[path][...], expected[path][...])


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_declares_its_axes_and_whether_it_decays(mode):
    """Sharding and the optimizer follow the declaration: a parameter without one is named in an error."""
    module = build.__wrapped__(mode)
    known = set(get_args(get_args(Axis)[0]))
    for declared in jax.tree.leaves(declarations(module)):
        assert set(declared.axes) - {None} <= known
        assert type(declared.decays) is bool
    module.forgotten_HD = nnx.Param(jnp.zeros((H, D)))
    with pytest.raises(ValueError, match=r"the parameter forgotten_HD of shape \(2, 4\) declares nothing; expected"):
        declarations(module)


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_longer_than_the_parameters_of_a_mode_is_refused(mode):
    if not (module := build(mode)).fixed_length:
        pytest.skip("has parameters for no length")
    with pytest.raises(ConfigError, match=rf"'{mode}' was given {ROOM + 1} tokens; expected .*, {ROOM}$"):
        module.forward(make_x(ROOM + 1), causal=module.causal)


@pytest.mark.fast
def test_a_mode_without_a_cached_decode_refuses_by_name():
    module = SelfAttention(None, heads=H, head_width=D, width=E, max_length=ROOM, rngs=nnx.Rngs(0))
    x = make_x(1)
    for call in (lambda: module.init_cache(1, 8, jnp.float32), lambda: module.forward(x, LayerCache((), ())),
                 lambda: module.state_bytes(8)):
        with pytest.raises(NotImplementedError, match="attention mode 'self_attention' has no cached decode"):
            call()


USE_IT = """
import jax.numpy as jnp
from flax import nnx
from configs.schema import ModelConfig
from models import attention
from models.gpt import GPT, resolve_config

assert "mean" in attention.modes() and "helper" not in attention.modes(), attention.modes()
config = ModelConfig(layers=2, heads=2, width=8, context=8, attention=("mean", "softmax"), dtype="float32",
                     modes={"mean": {"scale": 2.0}})
model = GPT(resolve_config(config), 11, rngs=nnx.Rngs(0))
assert model.blocks[0].attention.config.scale == 2.0
assert model(jnp.zeros((1, 8), jnp.int32)).shape == (1, 8, 11)
"""


@pytest.mark.thorough
def test_a_file_dropped_into_the_folder_is_a_mode(tmp_path):
    for package in ("configs", "kernels", "models", "support"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = (ROOT / "docs" / "adding_a_mode.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "models" / "attention" / "mean.py").write_text(code)
    (tmp_path / "models" / "attention" / "helper.py").write_text("Config = None\n")
    done = subprocess.run([sys.executable, "-c", USE_IT], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TRAFFIC = """
import json, sys
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from compilation.program import read_program
from models import attention

def moved(name, options, T):
    module = attention.modes()[name]
    layer = module.Attention(module.Config(**options), heads=2, head_width=4, width=8, max_length=T, rngs=nnx.Rngs(0))
    graph, *state = nnx.split(layer, nnx.Param, ...)
    mesh = jax.make_mesh((1, 1, 1, 4), ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)
    split = NamedSharding(mesh, P(None, "context"))
    x_BTE = jax.ShapeDtypeStruct((2, T, 8), jnp.float32, sharding=split)
    loss = lambda parameters, rest, x_BTE: jnp.sum(nnx.merge(graph, parameters, rest).forward(x_BTE)[0] ** 2)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 2)), out_shardings=(None, split)).lower(*state, x_BTE)
        found = read_program(lowered.compile().as_text()).collectives
    found.pop("all-reduce", None)  # the gradients of parameters, which every device has
    return found.total()

print(json.dumps({mode: [moved(mode.partition("+")[0], options, T) for T in (256, 512)]
                  for mode, options in json.loads(sys.argv[1]).items()}))
"""


@pytest.mark.thorough
def test_devices_that_share_a_sequence_exchange_as_much_at_any_context():
    """In the modes that say so, also with a short convolution, and with a decay of each channel."""
    modes = {mode: {} for mode, module in attention.modes().items() if module.Attention.splits_context}
    assert {"chunked", "gated", "gated_delta", "kda", "linear", "performer", "power", "window"} <= set(modes)
    modes |= {"window": {"window": 32}} | {name: VARIANTS[name] for name in ("chunked+parts", "gated+channel")}
    for mode, (short, long) in several_devices.printed(TRAFFIC, json.dumps(modes), devices=4).items():
        assert 0 < short == long, mode
