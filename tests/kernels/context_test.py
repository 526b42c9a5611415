"""Linear attention of sequences that are split over devices equals that of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = r"""
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from kernels.linear_attention import State, linear_attention

B, H, M, D = 2, 2, 5, 6
COLLECTIVE = r"= \(?(\w+)\[([\d,]*)\]\S* (?:all-gather|reduce-scatter|all-to-all|collective-permute)\("
WIDTHS = {"f32": 4, "s32": 4, "pred": 1}
SEGMENTS = np.stack([np.repeat([0, 1, -1, 2], [20, 11, 9, 24]), np.r_[-np.ones(20), np.zeros(44)]])

def compute(sizes, T, segments, decay):
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    q, k, v = jnp.exp(draw(0, B, T, H, M)), jnp.exp(draw(1, B, T, H, M)), draw(2, B, T, H, D)
    g = -jnp.exp(draw(3, B, T, H)) if decay else None
    state = State(jnp.exp(draw(4, B, H, M, D)), jnp.exp(draw(5, B, H, M)))
    ids = jnp.asarray(SEGMENTS, jnp.int32) if segments else None

    def loss(inputs):
        *arrays, state = inputs
        q, k, v, g = (*arrays, None)[:4]
        y, end = linear_attention(q, k, v, log_decay_BTH=g, initial_state=state, segment_ids_BT=ids, chunk_size=8)
        return jnp.sin(y).sum() + jnp.sum(end.s_BHMD ** 2) + jnp.cos(end.z_BHM).sum(), (y, end)

    tokens = jax.device_put([x for x in (q, k, v, g) if x is not None],
                            NamedSharding(mesh, P(("data", "fsdp"), "context")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower((*tokens, state)).compile()
        found = compiled((*tokens, state))
    moved = sum(WIDTHS[kind] * np.prod([int(n) for n in shape.split(",") if n])
                for kind, shape in re.findall(COLLECTIVE, compiled.as_text()))
    return {"results": [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(found)], "moved": float(moved)}

print(json.dumps([compute(*case) for case in json.loads(sys.argv[1])]))
"""

ONE = (1, 1, 1, 1)
MESHES = ((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2))


def compute(*cases: tuple) -> list[dict]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(cases)], cwd=Path(__file__).parents[2],
                          env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("segments", "decay"), [
    (True, True), *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((False, False), (True, False)))])
def test_outputs_states_and_gradients_are_those_of_one_device(segments, decay):
    expected, *split = compute(*((sizes, 64, segments, decay) for sizes in (ONE, *MESHES)))
    for sizes, found in zip(MESHES, split, strict=True):
        for actual, want in zip(found["results"], expected["results"], strict=True):
            error = np.sqrt(np.mean(np.subtract(actual, want) ** 2) / np.mean(np.square(want)))
            assert error < 1e-5, sizes  # sums in another order


def test_the_traffic_does_not_grow_with_the_context():
    short, long = compute(((1, 1, 1, 4), 64, False, True), ((1, 1, 1, 4), 512, False, True))
    assert 0 < long["moved"] == short["moved"]
