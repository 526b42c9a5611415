"""Ops on sequences that are split over devices give the results of one device, with a traffic that does not grow."""

import json

import numpy as np
import pytest

from tests import several_devices

SCRIPT = r"""
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from compilation.program import read_program
from kernels.delta_rule import delta_rule
from kernels.linear_attention import State, linear_attention
from kernels.power_attention import power_attention
from kernels.short_convolution import short_convolution
from kernels.softmax_attention import softmax_attention

B, H, M, D = 2, 2, 5, 6
SEGMENTS = np.stack([np.repeat([0, 1, -1, 1, 2], [20, 11, 9, 8, 16]), np.r_[-np.ones(20), np.zeros(44)]])

def draw(n, *shape):
    return jax.random.normal(jax.random.key(n), shape)

def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

def case(op, T, ids, decays):
    # The op, arrays that are split over devices, and others.
    g = -jnp.exp(draw(3, B, T, H) - 1) if decays else None
    tokens = {"k": jnp.exp(draw(1, B, T, H, M)), "v": draw(2, B, T, H, D)} | ({"g": g} if decays else {})
    q, state = jnp.exp(draw(0, B, T, H, M)), jnp.exp(draw(4, B, H, M, D))
    options = {"segment_ids_BT": ids}
    decay = "log_decay_BTH"
    if op.endswith("_channels"):
        decay, op = "channel_log_decay_BTHM", op.removesuffix("_channels")
        tokens["g"] = -jnp.exp(draw(3, B, T, H, M) - 1)
    if op == "linear":
        call = lambda q, k, v, s, z, g=None: linear_attention(
            q, k, v, initial_state=State(s, z), chunk_size=8, **options, **{decay: g})
        return call, tokens | {"q": q}, {"s": state, "z": jnp.exp(draw(5, B, H, M))}
    if op == "delta":
        tokens |= {"q": draw(0, B, T, H, M), "k": unit(draw(1, B, T, H, M)), "beta": jax.nn.sigmoid(draw(6, B, T, H))}
        call = lambda q, k, v, beta, s, g=None: delta_rule(
            q, k, v, beta, initial_state=s, chunk_size=8, **options, **{decay: g})
        return call, tokens, {"s": state}
    if op == "delta_kernel":  # values of width D + M are too wide for it
        q, k, v = (draw(n, B, T, H, 40) for n in range(3))
        tokens = tokens | {"q": q, "k": unit(k), "v": v, "beta": jax.nn.sigmoid(draw(6, B, T, H))}
        call = lambda q, k, v, beta, s, g=None: delta_rule(
            q, k, v, beta, log_decay_BTH=g, initial_state=s, implementation="pallas_gpu", **options)
        return call, tokens, {"s": draw(4, B, H, 40, 40)}
    if op == "power":
        tokens |= {"q": draw(0, B, T, H, M), "k": draw(1, B, T, H, M), "v": draw(2, B, T, H, M)}
        call = lambda q, k, v, g=None: power_attention(q, k, v, log_decay_BTH=g, chunk_size=8, **options)
        return call, tokens, {}
    if op == "softmax":
        tokens |= {"q": draw(0, B, T, H, M), "k": draw(1, B, T, H, M), "v": draw(2, B, T, H, M)}
        call = lambda q, k, v, g=None: softmax_attention(q, k, v, log_decay_BTH=g, **options)
        return call, tokens, {}
    if op.startswith("window"):
        tokens = {"q": draw(0, B, T, H, M), "k": draw(1, B, T, H, M), "v": draw(2, B, T, H, M)}
        call = lambda q, k, v: softmax_attention(q, k, v, window=int(op[6:]), **options)
        return call, tokens, {}
    if op == "convolution":
        call = lambda x, taps: short_convolution(x, taps, **options) * (1 if ids is None else (ids >= 0)[..., None])
        return call, {"x": draw(0, B, T, D)}, {"taps": draw(1, 4, D)}
    raise ValueError(op)

def compute(sizes, op, T, segments, decays):
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)
    ids = jnp.asarray(SEGMENTS, jnp.int32) if segments else None
    call, tokens, others = case(op, T, ids, decays)

    def loss(tokens, others):
        results = call(**tokens, **others)
        return sum(jnp.sum(jnp.sin(0.1 * x)) for x in jax.tree.leaves(results)), results

    tokens = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"), "context")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(tokens, others).compile()
        found = compiled(tokens, others)
    moved = read_program(compiled.as_text()).collectives
    moved.pop("all-reduce", None)  # the gradients of what every device has
    return {"results": [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(found)], "moved": moved.total()}

print(json.dumps([compute(*case) for case in json.loads(sys.argv[1])]))
"""

ONE = (1, 1, 1, 1)
MESHES = ((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2))
"""The first has every case of an op, the others the first case."""
OPS = ("linear", "linear_channels", "delta", "delta_channels", "delta_kernel", "power", "softmax", "window7",
       "window40", "convolution")
"""The last mesh splits the two heads of softmax attention; the others add heads of zeros."""


WITHOUT_DECAY = ("window7", "window40", "convolution")
MEASURED = [op for op in OPS if op not in ("softmax", "window40", "delta_kernel")]
"""Ops whose traffic is measured."""


def cases_of(op: str) -> list[tuple[bool, bool]]:
    """Whether the inputs have segments, and decays."""
    if op in WITHOUT_DECAY:
        return [(True, False), (False, False)]
    if op == "delta_kernel" or op.endswith("_channels"):  # slow when interpreted; channels always have a decay
        return [(True, True)]
    return [(True, True), (True, False), (False, False)]


# One process for all cases of an op, because each imports JAX.
@pytest.mark.parametrize("op", [op if op == "linear" else pytest.param(op, marks=pytest.mark.thorough) for op in OPS])
def test_results_are_those_of_one_device_and_the_traffic_does_not_grow_with_the_context(op):
    cases = cases_of(op)
    meshes = {case: MESHES if case == cases[0] else MESHES[:1] for case in cases}
    asked = [(sizes, op, 64, *case) for case in cases for sizes in (ONE, *meshes[case])]
    asked += [(MESHES[0], op, context, False, False) for context in (256, 1024) if op in MEASURED]
    found = iter(several_devices.printed(SCRIPT, json.dumps(asked), devices=4))
    for case in cases:
        expected = next(found)["results"]
        for sizes in meshes[case]:
            for actual, want in zip(next(found)["results"], expected, strict=True):
                error = np.sqrt(np.mean(np.subtract(actual, want) ** 2) / np.mean(np.square(want)))
                assert error < 1e-5, (sizes, case, error)  # sums in another order
    if op in MEASURED:
        short, long = (each["moved"] for each in found)
        assert 0 < long == short
