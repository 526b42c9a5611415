"""An encoder of all supported modes on two devices, each with half of the rows."""

import json

import pytest

from tests import several_devices
from tests.models.encoder_test import BIDIRECTIONAL, SMALL

pytestmark = pytest.mark.thorough

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from configs.schema import EncoderConfig
from models.encoder import Encoder, resolve_config

modes, T = json.loads(sys.argv[1]), 37
config = EncoderConfig(layers=len(modes), heads=2, width=8, mlp_width=8, context=T, classes=3, dtype="float32",
                       pooling="mean", attention=tuple(modes), modes=modes)
graph, *state = nnx.split(Encoder(resolve_config(config), 11, rngs=nnx.Rngs(0)), nnx.Param, ...)
tokens_BT = jnp.arange(4 * T).reshape(4, T) ** 2 * 7 % 11
valid_BT = jnp.arange(T)[None] < jnp.array([[T], [20], [1], [30]])

@jax.jit
def run(parameters, rest, tokens_BT, valid_BT):
    def encode(parameters):
        return nnx.merge(graph, parameters, rest).forward(tokens_BT, valid_BT=valid_BT)
    y_BE, pull = jax.vjp(encode, parameters)
    return y_BE, pull(jnp.cos(y_BE))[0]

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
expected = jax.tree.leaves(run(*state, tokens_BT, valid_BT))
actual = jax.tree.leaves(run(*jax.device_put(state, NamedSharding(mesh, P())),
                             *jax.device_put((tokens_BT, valid_BT), NamedSharding(mesh, P("data")))))
errors = [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(actual, expected, strict=True)]
largest = [float(np.abs(np.asarray(b)).max()) for b in expected]
print(json.dumps({"rows": actual[0].addressable_shards[0].data.shape[0], "output": errors[0] / largest[0],
                  "gradients": max(errors[1:]) / max(largest[1:])}))
"""


def test_outputs_and_gradients_are_those_of_one_device():
    quick = SMALL | {"reformer": {"chunk_size": 8}}
    modes = {mode: quick.get(mode, {}) for mode in BIDIRECTIONAL}
    found = several_devices.printed(SCRIPT, json.dumps(modes), devices=2)
    assert found["rows"] == 2
    # Sums over rows in another order.
    assert max(found["output"], found["gradients"]) < 1e-5, found
