"""Sharding: one mesh with the axes data, fsdp, tensor and context, and the dimensions that they split."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import MeshConfig, TrainConfig
from models.parameters import Axis, Declaration, declarations
from support.errors import ConfigError
from training.step import TrainState

AXES = ("data", "fsdp", "tensor", "context")
MESH_AXES: Mapping[Axis, str] = MappingProxyType({"heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"})
"""The mesh axis that splits a logical axis of the parameters."""


def make_mesh(config: MeshConfig, train: TrainConfig, context: int) -> Mesh:
    """The mesh; ``data = -1`` takes as many of the remaining devices as divide the batch.

    Raises:
        ConfigError: the sizes do not fit the devices or the batch.
    """
    devices = jax.device_count()
    others = config.fsdp * config.tensor * config.context
    if min(config.fsdp, config.tensor, config.context) < 1 or others > devices:
        raise ConfigError(f"mesh.fsdp × mesh.tensor × mesh.context is {others}; expected 1 to {devices}, the number of "
                          "devices")
    if context % config.context:
        raise ConfigError(f"mesh.context is {config.context}, which does not divide model.context, {context}")
    rows = train.batch_size // train.accumulate
    data = config.data
    if data == -1:
        data = math.gcd(rows // config.fsdp or 1, devices // others)
    if data < 1 or data * others > devices:
        raise ConfigError(f"mesh.data is {data}; expected 1 to {devices // others}: the other axes take {others} of "
                          f"{devices} devices each")
    if rows % (data * config.fsdp):
        raise ConfigError(f"train.batch_size / train.accumulate is {rows}, which mesh.data × mesh.fsdp, "
                          f"{data * config.fsdp}, does not divide")
    shape = (data, config.fsdp, config.tensor, config.context)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: data * others])


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of tokens (B, T)."""
    return NamedSharding(mesh, P(("data", "fsdp"), "context"))


def parameter_shardings(mesh: Mesh, model: nnx.Module) -> tuple[Any, Any]:
    """Shardings of a model's parameters and other variables, from their declared logical axes.

    ``MESH_AXES`` maps logical axes to mesh axes; ``fsdp`` splits the largest remaining dimension. Vectors, and
    dimensions that do not divide, are replicated.

    Args:
        mesh: the mesh.
        model: may be abstract.
    """

    def spec(array: Any, declared: Declaration) -> NamedSharding:
        split: list[str | None] = [None] * array.ndim
        if array.ndim > 1:
            for dimension, axis in enumerate(declared.axes):
                if axis in MESH_AXES and MESH_AXES[axis] not in split:
                    _split(split, array.shape, dimension, MESH_AXES[axis], mesh)
            largest = max((i for i in range(array.ndim) if split[i] is None), key=lambda i: array.shape[i])
            _split(split, array.shape, largest, "fsdp", mesh)
        return NamedSharding(mesh, P(*split))

    def of(kind: Any) -> Any:
        return jax.tree.map(spec, nnx.to_pure_dict(nnx.state(model, kind)), declarations(model, kind))

    return of(nnx.Param), of(nnx.Not(nnx.Param))


def state_shardings(mesh: Mesh, model: nnx.Module, state: TrainState) -> TrainState:
    """Shardings of the training state: the optimizer's moments as the parameters, its counts replicated.

    Args:
        mesh: the mesh.
        model: the model of the state; may be abstract.
        state: may be abstract.
    """
    parameters, variables = parameter_shardings(mesh, model)
    structure = jax.tree.structure(state.parameters)

    def is_moment(tree: Any) -> bool:
        return jax.tree.structure(tree) == structure

    optimizer = jax.tree.map(lambda tree: parameters if is_moment(tree) else NamedSharding(mesh, P()), state.optimizer,
                             is_leaf=is_moment)
    return TrainState(parameters, variables, optimizer)


def _split(axes: list[str | None], shape: tuple[int, ...], dimension: int, axis: str, mesh: Mesh) -> None:
    if mesh.shape[axis] > 1 and shape[dimension] % mesh.shape[axis] == 0:
        axes[dimension] = axis
