"""Where arrays live: one mesh with the axes data, fsdp, tensor and context, and one rule for each kind of array."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import MeshConfig, TrainConfig
from support.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "context")


def make_mesh(config: MeshConfig, train: TrainConfig, context: int) -> Mesh:
    """The mesh; ``data = -1`` takes as many of the remaining devices as divide the batch.

    Raises:
        ConfigError: the sizes do not fit the devices or the batch.
    """
    devices = jax.device_count()
    others = config.fsdp * config.tensor * config.context
    if min(config.fsdp, config.tensor, config.context) < 1 or others > devices:
        raise ConfigError(f"mesh.fsdp × mesh.tensor × mesh.context is {others}; there are {devices} devices")
    if context % config.context:
        raise ConfigError(f"mesh.context is {config.context}, which does not divide model.context, {context}")
    rows = train.batch_size // train.accumulate
    data = config.data
    if data == -1:
        data = math.gcd(rows // config.fsdp or 1, devices // others)
    if data < 1 or data * others > devices:
        raise ConfigError(f"mesh.data is {data} and the other axes take {others}; there are {devices} devices")
    if rows % (data * config.fsdp):
        raise ConfigError(f"train.batch_size / train.accumulate is {rows}, which mesh.data × mesh.fsdp, "
                          f"{data * config.fsdp}, does not divide")
    shape = (data, config.fsdp, config.tensor, config.context)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: data * others])


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of tokens (B, T)."""
    return NamedSharding(mesh, P(("data", "fsdp"), "context"))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Of parameters, and of the optimizer's moments, which have the parameters' names and shapes.

    ``tensor`` splits heads and MLP width: the last dimension of a projection into them, the first of one out of them,
    and of a table that each head has for itself. ``fsdp`` splits the largest dimension that is left.
    """

    def spec(path: Any, leaf: Any) -> NamedSharding:
        axes: list[str | None] = [None] * leaf.ndim
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        out_of = any(name.endswith(("output", "token_embedding")) for name in names)
        into = any(name.endswith(("query", "key", "value", "hidden")) for name in names)
        # Such as scores_HLL.
        of_heads = leaf.ndim == 3 and any(name.partition("_")[2].startswith("H") for name in names)
        if leaf.ndim > 1:
            if of_heads or out_of or into:
                _split(axes, leaf.shape, 0 if of_heads or out_of else 1, "tensor", mesh)
            largest = max((i for i in range(leaf.ndim) if axes[i] is None), key=lambda i: leaf.shape[i])
            _split(axes, leaf.shape, largest, "fsdp", mesh)
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(spec, state)


def _split(axes: list[str | None], shape: tuple[int, ...], dimension: int, axis: str, mesh: Mesh) -> None:
    if mesh.shape[axis] > 1 and shape[dimension] % mesh.shape[axis] == 0:
        axes[dimension] = axis
