"""A kernel over several devices: each computes its own sequences and heads, and the result equals that of one."""


import pytest

from tests import several_devices

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from kernels.linear_attention import State, linear_attention

generator = np.random.default_rng(0)
B, T, H, M, D = 4, 40, 4, 16, 8
q, k = (generator.uniform(0.1, 1, (B, T, H, M)).astype(np.float32) for _ in range(2))
v, dy = (generator.normal(size=(B, T, H, D)).astype(np.float32) for _ in range(2))
state = State(generator.normal(size=(B, H, M, D)).astype(np.float32),
              generator.uniform(1, 2, (B, H, M)).astype(np.float32))
ids = np.sort(generator.integers(0, 3, (B, T)), axis=1).astype(np.int32)
mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rows, sums = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data", "tensor"))
arguments = jax.device_put((q, k, v, state), (rows, rows, rows, State(sums, sums)))

def gradients(implementation, normalize, segments):
    def loss(q, k, v, state):
        y, end = linear_attention(q, k, v, initial_state=state, segment_ids_BT=ids if segments else None,
                                  normalize=normalize, implementation=implementation)
        return (y * dy).sum() + end.s_BHMD.sum() + end.z_BHM.sum()
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

found = []
for implementation, normalize, segments in (("pallas_gpu_serial", True, False), ("pallas_gpu_parallel", False, True),
                                           ("pallas_tpu", True, True)):
    with jax.set_mesh(mesh):
        compiled = gradients(implementation, normalize, segments).lower(*arguments).compile()
        actual = jax.tree.leaves(compiled(*arguments))
    expected = jax.tree.leaves(gradients("reference", normalize, segments)(q, k, v, state))
    errors = [float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in zip(actual, expected)]
    own = [x.addressable_shards[0].data.size * 4 == x.size for x in actual]
    found.append({"error": max(errors), "gathers": compiled.as_text().count("all-gather("), "own": all(own)})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    return several_devices.printed(SCRIPT, devices=4)


@pytest.mark.thorough
def test_results_are_those_of_one_device(found):
    # Sums of 40 terms in float32, in another order.
    assert all(case["error"] < 1e-5 for case in found)


@pytest.mark.thorough
def test_no_device_gathers_what_others_have(found):
    assert all(case["gathers"] == 0 for case in found)
    assert all(case["own"] for case in found)
