"""The mesh, and equal results of a run on one and on several devices."""

import json
import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs.schema import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from models.attention.self_attention import Linear
from models.gpt import GPT, resolve_config
from models.parameters import declare
from support.errors import ConfigError
from tests import several_devices
from training.optimizer import model_optimizer
from training.sharding import (
    AXES,
    check_shards,
    make_mesh,
    parameter_shardings,
    report_exchanges,
    report_mesh,
    state_shardings,
)
from training.step import state_of

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, math, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from configs.schema import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from data.loader import Batch
from models.gpt import resolve_config
from training import step as steps
from training.optimizer import model_optimizer
from training.sharding import batch_sharding, create_sharded, make_mesh, put, state_shardings

CONTEXT = 32
found, folder = {}, Path(sys.argv[3])
modes = json.loads(sys.argv[2])
tokens_BT = jnp.arange(4 * (CONTEXT + 1)).reshape(4, CONTEXT + 1) ** 2 * 7 % 31
ids_BT = jnp.asarray(np.repeat([[0, 1, 2], [0, 1, -1], [3, 4, 4], [1, 1, 1]], [5, 18, 9], axis=1), jnp.int32)
for name, sizes in json.loads(sys.argv[1]).items():
    model = resolve_config(ModelConfig(layers=len(modes), heads=2, width=16, context=CONTEXT, dtype="float32",
                                       attention=tuple(modes), modes=modes, head=sys.argv[5]))
    config = Config(model=model, optimizer=OptimizerConfig(name=sys.argv[6]),
                    train=TrainConfig(batch_size=4, accumulate=2), mesh=MeshConfig(**sizes))
    mesh = make_mesh(config, jax.devices()[:math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        model = steps.abstract_model(config, 32)
        transform = model_optimizer(config.optimizer, model)
        initial = lambda: steps.initial_state(config, 32, transform)
        shardings = state_shardings(mesh, model, jax.eval_shape(initial))
        state = create_sharded(initial, mesh, shardings)
        step = steps.jit_step(steps.make_train_step(model, config, transform), out_shardings=(shardings, None))
        segments_BT = ids_BT if sys.argv[4] == "segments" else None
        targets_BT = tokens_BT[:, 1:] if segments_BT is None else jnp.where(ids_BT < 0, -1, tokens_BT[:, 1:])
        batch = jax.device_put(Batch(tokens_BT[:, :-1], targets_BT, segments_BT), batch_sharding(mesh))
        losses, arrays = [], {}
        for number in range(5):
            state, metrics = step(state, batch, jnp.float32(0.001))
            losses.append(float(metrics.loss))
            if number == 0 and sys.argv[6] == "adamw":  # the first moment is the gradient times a factor
                moments = [x for x in jax.tree.leaves(state.optimizer, is_leaf=lambda x: isinstance(x, dict))
                           if isinstance(x, dict)]
                arrays |= {"gradient" + jax.tree_util.keystr(path): np.asarray(x)  # the step deletes it
                           for path, x in jax.tree_util.tree_leaves_with_path(moments[0])}
        arrays |= {"parameter" + jax.tree_util.keystr(path): x
                   for path, x in jax.tree_util.tree_leaves_with_path(state.parameters)}
        odd = put(Batch(tokens_BT[:3, :-1], tokens_BT[:3, 1:]), batch_sharding(mesh))
        evaluate = jax.jit(steps.make_eval_step(model))
        val = float(evaluate(state.parameters, state.variables, odd)[0]) if name in ("one", "data") else None
    np.savez(folder / f"{name}.npz", **{path: np.asarray(x) for path, x in arrays.items()})
    size = sum(x.size for x in jax.tree.leaves(state.parameters))
    own = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.parameters))
    rows = batch.inputs_BT.addressable_shards[0].data.shape[0]
    found[name] = {"losses": losses, "share": own / size, "rows": rows, "devices": mesh.size, "val": val}
print(json.dumps(found))
"""

MESHES = {"one": {"data": 1}, "data": {"data": 2}, "fsdp": {"data": 1, "fsdp": 2}, "tensor": {"data": 1, "tensor": 2},
          "context": {"data": 1, "context": 2}, "all": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2}}
CONVOLVED = {"short_conv": 4}
MODES = {"linear": {"chunked": {}, "gated": CONVOLVED},
         "recurrent": {"gated_delta": CONVOLVED, "power": {}, "window": {"window": 20}}}
KEY_BIAS = "['key']['bias']"
"""Its gradient is zero but for rounding in modes that a constant in all keys does not change."""


def train_on_each_mesh(modes: dict[str, Any], folder: Path, meshes: Iterable[str] = MESHES, *, segments: bool = False,
                       head: str = "tied", optimizer: str = "adamw") -> dict[str, Any]:
    """Five updates on each mesh."""
    sizes = {name: MESHES[name] for name in meshes}
    found = several_devices.printed(SCRIPT, json.dumps(sizes), json.dumps(modes), folder,
                                    "segments" if segments else "", head, optimizer, devices=8)
    for name, run in found.items():
        run["arrays"] = dict(np.load(folder / f"{name}.npz"))
    return found


def assert_same_updates(runs: dict[str, Any]) -> None:
    """Five losses, the first gradients and the last parameters are those of one device.

    Adam magnifies the rounding of small gradients. A bias that begins at 0 may differ by 1e-6: five updates move it by
    up to the learning rate, 0.001, each.
    """
    expected = runs["one"]
    for mesh, found in runs.items():
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-6, err_msg=mesh)
        assert found["arrays"].keys() == expected["arrays"].keys()
        for name, want in expected["arrays"].items():
            error = np.sqrt(np.mean((found["arrays"][name] - want) ** 2))
            size = np.sqrt(np.mean(want**2))
            if name.endswith(KEY_BIAS):
                bound = 1e-6 if name.startswith("gradient") else 1e-2
            else:
                bound = 1e-5 * max(size, 1e-6) if name.startswith("gradient") else max(1e-4 * size, 1e-6)
            assert error < bound, (mesh, name, error)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MODES)
def test_a_run_on_several_devices_is_that_of_one_and_each_axis_splits_what_it_is_for(kind, tmp_path):
    """The recurrent modes have documents that cross the border of two devices, and a head of logistics.

    One test, because the runs take long to compile.
    """
    recurrent = kind == "recurrent"
    runs = train_on_each_mesh(MODES[kind], tmp_path, segments=recurrent, head="logistics" if recurrent else "tied")
    assert {name: run["devices"] for name, run in runs.items()} == {
        name: math.prod(sizes.values()) for name, sizes in MESHES.items()}
    assert_same_updates(runs)
    # An evaluation batch that does not split is evaluated whole.
    assert runs["data"]["val"] == pytest.approx(runs["one"]["val"], rel=2e-4)
    assert {name: run["rows"] for name, run in runs.items()} == {
        "one": 4, "data": 2, "fsdp": 2, "tensor": 4, "context": 4, "all": 2}
    assert runs["data"]["share"] == runs["one"]["share"] == 1
    assert 0.9 < runs["context"]["share"] < 1  # the position embedding
    assert runs["fsdp"]["share"] < 0.6  # except biases and norms, a large part of so small a model
    assert runs["tensor"]["share"] < 0.65  # nor the position embedding


@pytest.mark.thorough
def test_muon_on_several_devices_makes_the_updates_of_one(tmp_path):
    runs = train_on_each_mesh({"kda": {}}, tmp_path, ("one", "fsdp", "tensor", "all"), optimizer="muon")
    for mesh, found in runs.items():
        np.testing.assert_allclose(found["losses"], runs["one"]["losses"], rtol=1e-4, err_msg=mesh)
    assert runs["one"]["losses"][-1] < runs["one"]["losses"][0]
    assert runs["fsdp"]["share"] < 0.6
    assert runs["tensor"]["share"] < 0.65


def test_projections_are_split_by_heads_and_back_together():
    mesh: Any = jax.sharding.AbstractMesh((1, 1, 2, 1), ("data", "fsdp", "tensor", "context"))

    class Layers(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.into, self.odd = (Linear(8, heads, axes=("width", "heads"), rngs=rngs) for heads in (8, 7))
            self.out_of = Linear(8, 8, axes=("heads", "width"), rngs=rngs)
            self.scores_HLL = nnx.Param(np.zeros((4, 6, 6)), **declare("heads", "positions", "positions", decays=True))
            self.directions_RD = nnx.Variable(np.zeros((8, 4)))

    parameters, variables = jax.tree.map(lambda sharding: sharding.spec, parameter_shardings(mesh, Layers()))
    assert parameters["into"]["kernel"] == P(None, "tensor")
    assert parameters["scores_HLL"] == P("tensor", None, None)
    assert parameters["out_of"]["kernel"] == P("tensor", None)
    assert parameters["into"]["bias"] == P(None)
    assert parameters["odd"]["kernel"] == P(None, None)  # seven is not divisible by two
    assert variables["directions_RD"] == P(None, None)


def test_the_moments_lie_as_the_parameters_do_and_counts_everywhere():
    mesh: Any = jax.sharding.AbstractMesh((1, 2, 2, 1), ("data", "fsdp", "tensor", "context"))
    model = Linear(8, 8, axes=("width", "mlp"), rngs=nnx.Rngs(0))
    state = state_of(model, optax.scale_by_adam())
    specs: Any = jax.tree.map(lambda sharding: sharding.spec, state_shardings(mesh, model, state))
    assert specs.parameters == {"kernel": P("fsdp", "tensor"), "bias": P(None)}
    assert specs.optimizer == optax.ScaleByAdamState(P(), specs.parameters, specs.parameters)
    state = state_of(model, model_optimizer(OptimizerConfig(name="muon"), model))
    specs = jax.tree.map(lambda sharding: sharding.spec, state_shardings(mesh, model, state))
    of_groups = {jax.tree_util.keystr(path): spec
                 for path, spec in jax.tree_util.tree_leaves_with_path(specs.optimizer)}
    assert {path for path, spec in of_groups.items() if spec == P("fsdp", "tensor")} == {
        path for path in of_groups if path.endswith("mu['kernel']")}
    assert any("matrix" in path for path in of_groups)


DEVICES: Any = [types.SimpleNamespace(process_index=0)] * 8


@pytest.fixture
def _meshes_are_shapes(monkeypatch):
    """Meshes of devices that do not exist."""
    monkeypatch.setattr(jax, "make_mesh", lambda sizes, axes, *, devices, **_: dict(
        zip(axes, sizes, strict=True)) | {"devices": len(devices)})


def config_of(mesh: MeshConfig, *, context: int = 1024, **train: Any) -> Config:
    return Config(model=ModelConfig(layers=1, heads=12, width=24, context=context, attention=("softmax",)),
                  train=TrainConfig(**train), mesh=mesh)


@pytest.mark.usefixtures("_meshes_are_shapes")
def test_a_mesh_without_devices_of_a_process_is_refused():
    devices: Any = [types.SimpleNamespace(process_index=n // 2) for n in range(8)]
    with pytest.raises(ConfigError, match=r"the mesh has 4 of 8 devices, and none of process 2, 3: train.batch_size / "
                                          r"train.accumulate is 4; make it a multiple of 8, or start fewer processes"):
        make_mesh(config_of(MeshConfig(), batch_size=4), devices)
    assert make_mesh(config_of(MeshConfig(), batch_size=8), devices)


@pytest.mark.usefixtures("_meshes_are_shapes")
@pytest.mark.parametrize(("mesh", "train", "sizes"), [
    (MeshConfig(), {"batch_size": 16}, (8, 1, 1, 1)),
    (MeshConfig(), {"batch_size": 4}, (4, 1, 1, 1)),
    (MeshConfig(fsdp=2), {"batch_size": 16}, (4, 2, 1, 1)),
    (MeshConfig(data=2, fsdp=-1), {"batch_size": 16}, (2, 4, 1, 1)),
    (MeshConfig(data=2, tensor=-1), {"batch_size": 16}, (2, 1, 4, 1)),
    (MeshConfig(data=1, context=-1), {"batch_size": 1}, (1, 1, 1, 8)),
])
def test_one_axis_takes_the_devices_that_remain(mesh, train, sizes):
    found: Any = make_mesh(config_of(mesh, **train), DEVICES)
    assert tuple(found[axis] for axis in AXES) == sizes
    assert found["devices"] == math.prod(sizes)


def test_fsdp_splits_the_largest_dimension_that_it_divides():
    """At the sizes of GPT-2 of 124M parameters, whose vocabulary no usual number of devices divides."""
    model = nnx.eval_shape(lambda: GPT(resolve_config(ModelConfig(attention=("chunked",))), 50_257, rngs=nnx.Rngs(0)))
    total = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    for devices in (2, 8):
        mesh: Any = jax.sharding.AbstractMesh((1, devices, 1, 1), AXES)
        check_shards(mesh, model)
        parameters, _ = parameter_shardings(mesh, model)
        own = sum(x.size // (devices if "fsdp" in sharding.spec else 1) for x, sharding in zip(
            jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))), jax.tree.leaves(parameters), strict=True))
        assert own / total <= 1 / devices + 0.02


def test_fsdp_that_leaves_parameters_whole_is_refused():
    mesh: Any = jax.sharding.AbstractMesh((1, 5, 1, 1), AXES)
    model = nnx.eval_shape(lambda: GPT(resolve_config(ModelConfig(attention=("chunked",))), 50_257, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"mesh.fsdp is 5, which leaves \d+% of the parameters whole on each device: "
                                          "it divides no dimension of token_embedding"):
        check_shards(mesh, model)


def test_modes_that_gather_sequences_are_named(capsys):
    """And only where devices share sequences."""
    model = nnx.eval_shape(lambda: GPT(resolve_config(ModelConfig(layers=3, heads=2, width=8, attention=(
        "chunked", "softmax", "window"))), 32, rngs=nnx.Rngs(0)))
    for context in (1, 4):
        mesh: Any = jax.sharding.AbstractMesh((1, 1, 1, context), AXES)
        report_exchanges(mesh, model)
    assert capsys.readouterr().err.count("mesh.context is 4: in layers of softmax devices exchange the tokens") == 1


def test_idle_devices_are_named_with_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    for config, sizes, remedy in (
            (MeshConfig(), (4, 1, 1, 1), "train.batch_size / train.accumulate is 4; to use all, make it a multiple of "
                                         "8"),
            (MeshConfig(tensor=3), (2, 1, 3, 1), "mesh.fsdp × mesh.tensor × mesh.context is 3, which does not divide "
                                                 "8"),
            (MeshConfig(data=1, tensor=-1), (1, 1, 4, 1), "model.heads is 4; to use all, make it a multiple of 8")):
        mesh: Any = jax.sharding.AbstractMesh(sizes, AXES)
        report_mesh(mesh, Config(mesh=config, model=ModelConfig(heads=4), train=TrainConfig(batch_size=4)))
        told = capsys.readouterr().err
        assert f"{math.prod(sizes)} of 8 devices\n" in told
        assert f"{8 - math.prod(sizes)} of 8 devices are idle: {remedy}" in told
