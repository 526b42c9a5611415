"""Sharding: one mesh with the axes data, fsdp, tensor and context, and the dimensions that they split."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs.schema import RunConfig
from models.encoder import Encoder
from models.gpt import GPT
from models.parameters import Axis, Declaration, declarations
from support.command import note, status
from support.errors import ConfigError
from training.step import TrainState

AXES = ("data", "fsdp", "tensor", "context")


@dataclass(frozen=True)
class ShardingRules:
    """How a mesh splits parameters."""

    axes: Mapping[Axis, str] = field(default_factory=lambda: MappingProxyType(
        {"heads": "tensor", "mlp": "tensor", "vocabulary": "tensor", "positions": "context"}))
    """The mesh axis that splits a logical dimension."""
    largest: str = "fsdp"
    """The mesh axis that splits, of the remaining dimensions that it divides, the largest."""

    def spec(self, mesh: Mesh, shape: Sequence[int], dimensions: Sequence[Axis]) -> P:
        """The partition of an array. Vectors, and dimensions that do not divide, are replicated."""
        split: list[str | None] = [None] * len(shape)
        if len(shape) < 2:
            return P(*split)
        for n, dimension in enumerate(dimensions):
            axis = self.axes.get(dimension)
            if axis is not None and axis not in split and _divides(mesh, axis, shape[n]):
                split[n] = axis
        fitting = [n for n, size in enumerate(shape) if split[n] is None and _divides(mesh, self.largest, size)]
        if fitting:
            split[max(fitting, key=lambda n: shape[n])] = self.largest
        return P(*split)


RULES = ShardingRules()


def _divides(mesh: Mesh, axis: str, size: int) -> bool:
    return mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0


def make_mesh(config: RunConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run. An axis of size -1 takes as many of the remaining devices as it can split its dimension over.

    Args:
        config: config of the run.
        devices: devices to use; None: all of this process.

    Raises:
        ConfigError: the sizes do not fit the devices, the batch, the context or the heads, or leave devices idle.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    used = math.prod(sizes.values())
    if unused := sorted({device.process_index for device in devices} - {d.process_index for d in devices[:used]}):
        given = math.prod(size for axis, size in sizes.items() if getattr(config.mesh, axis) != -1)
        raise ConfigError(f"the mesh has {used} of {len(devices)} devices, and none of process "
                          f"{', '.join(map(str, unused))}: train.batch_size / train.accumulate is "
                          f"{config.train.batch_size // config.train.accumulate}; make it a multiple of "
                          f"{len(devices) // given}, or start fewer processes")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:used])


def mesh_sizes(config: RunConfig, devices: int) -> dict[str, int]:
    """The size of each axis of :func:`make_mesh`, with this number of devices.

    Raises:
        ConfigError: as :func:`make_mesh`.
    """
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    rest = [axis for axis, size in sizes.items() if size == -1]
    named = " × ".join(f"mesh.{axis}" for axis in AXES if axis not in rest)
    if len(rest) > 1:
        raise ConfigError(f"mesh.{rest[0]} and mesh.{rest[1]} are both -1, the devices that remain; expected one such "
                          f"axis: give mesh.{rest[0]} a size")
    given = math.prod(size for axis, size in sizes.items() if axis not in rest)
    if min(size for axis, size in sizes.items() if axis not in rest) < 1 or given > devices:
        raise ConfigError(f"{named} is {given}; expected 1 to {devices}, the number of devices")
    rows = config.train.batch_size // config.train.accumulate
    splits = {"data": rows, "fsdp": rows, "tensor": config.model.heads, "context": config.model.context}
    if rest:
        (axis,) = rest
        limit = splits[axis]
        if axis in ("data", "fsdp"):
            limit //= sizes["fsdp" if axis == "data" else "data"]
        sizes[axis] = math.gcd(limit or 1, devices // given)
    used = math.prod(sizes.values())
    if not rest and used < devices:
        raise ConfigError(f"{named} is {used}, which leaves {devices - used} of {devices} devices idle; "
                          "expected an axis of size -1; or hide devices from jax, as CUDA_VISIBLE_DEVICES does")
    if config.model.context % sizes["context"]:
        raise ConfigError(f"mesh.context is {sizes['context']}, which does not divide model.context, "
                          f"{config.model.context}; expected a divisor")
    if config.model.heads % sizes["tensor"]:
        raise ConfigError(f"mesh.tensor is {sizes['tensor']}, which does not divide model.heads, "
                          f"{config.model.heads}; expected a divisor")
    if rows % (sizes["data"] * sizes["fsdp"]):
        raise ConfigError(f"train.batch_size / train.accumulate is {rows}; expected a multiple of mesh.data × "
                          f"mesh.fsdp, {sizes['data'] * sizes['fsdp']}")
    return sizes


def inference_mesh(devices: int) -> Mesh | None:
    """The mesh that splits the parameters of a trained model over devices; None for one device.

    Raises:
        ConfigError: there are fewer devices.
    """
    if devices == 1:
        return None
    if not 1 <= devices <= jax.device_count():
        raise ConfigError(f"devices is {devices}; expected 1 to {jax.device_count()}, the number of devices")
    return jax.make_mesh((1, devices, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES),
                         devices=jax.devices()[:devices])


def report_mesh(mesh: Mesh, config: RunConfig) -> None:
    """Prints the axes of the mesh of a config and how many devices it uses, if there are several."""
    devices = jax.device_count()
    if devices == 1:
        return
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "none"
    status(f"mesh axes: {axes}; {mesh.size} of {devices} devices")
    if mesh.size == devices:
        return
    (free,) = (axis for axis in AXES if getattr(config.mesh, axis) == -1)  # else all devices are used
    given = mesh.size // mesh.shape[free]
    if devices % given:
        others = " × ".join(f"mesh.{axis}" for axis in AXES if axis != free)
        remedy = f"{others} is {given}, which does not divide {devices}"
    elif free in ("data", "fsdp"):
        remedy = (f"train.batch_size / train.accumulate is {config.train.batch_size // config.train.accumulate}; to "
                  f"use all, make it a multiple of {devices // (mesh.shape['tensor'] * mesh.shape['context'])}, or "
                  "split each sequence with mesh.context")
    else:
        name, size = {"tensor": ("model.heads", config.model.heads),
                      "context": ("model.context", config.model.context)}[free]
        remedy = f"{name} is {size}; to use all, make it a multiple of {devices // given}, or give mesh.data the rest"
    note(f"{devices - mesh.size} of {devices} devices are idle: {remedy}")


def report_exchanges(mesh: Mesh, model: GPT | Encoder) -> None:
    """Names the modes whose devices exchange the tokens of the sequences that they share, if any."""
    exchanging = sorted({block.attention.name for block in model.blocks if not block.attention.splits_context})
    if mesh.shape["context"] > 1 and exchanging:
        note(f"mesh.context is {mesh.shape['context']}: in layers of {', '.join(exchanging)} devices exchange the "
             "tokens of whole sequences, which takes time in proportion to the context")


def check_shards(mesh: Mesh, model: nnx.Module) -> None:
    """Checks that fsdp splits nearly all parameters.

    Raises:
        ConfigError: more than 2 % of the parameters are whole on each device.
    """
    if mesh.shape["fsdp"] == 1:
        return
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    shardings, _ = parameter_shardings(mesh, model)
    # Of matrices: vectors are never split.
    sizes = [(x.size if "fsdp" not in sharding.spec else 0, jax.tree_util.keystr(path, simple=True, separator="."))
             for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(parameters),
                                            jax.tree.leaves(shardings), strict=True) if x.ndim > 1]
    whole = sum(size for size, _ in sizes) / sum(x.size for x in jax.tree.leaves(parameters))
    if whole > MOST_WHOLE:
        raise ConfigError(f"mesh.fsdp is {mesh.shape['fsdp']}, which leaves {whole:.0%} of the parameters whole on "
                          f"each device: it divides no dimension of {max(sizes)[1]}; choose another size")


MOST_WHOLE = 0.02
"""Largest fraction of the parameters that fsdp may leave whole."""


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of tokens (B, T)."""
    return NamedSharding(mesh, P(("data", "fsdp"), "context"))


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Batches in host memory, the same on all processes, on the devices; each process transfers its part.

    They are sharded if their rows can be split, else replicated.
    """
    mesh = sharding.mesh
    if any(len(x) % (mesh.shape["data"] * mesh.shape["fsdp"]) for x in jax.tree.leaves(tree)):
        sharding = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: place(x, sharding), tree)


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array that each process has whole, on the devices of a sharding; each process transfers its part."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)


@contextmanager
def on_one_device(mesh: Mesh, tree: Any) -> Iterator[Any]:
    """Arrays of a mesh, whole on the first device of each process, for work on it alone. All processes enter it.

    With one device, they are yielded as they are.
    """
    if mesh.size == 1:
        yield tree
        return
    device = jax.local_devices()[0]
    whole = tree if jax.process_count() == 1 else multihost_utils.process_allgather(tree, tiled=True)
    alone = jax.make_mesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=[device])
    with jax.set_mesh(alone):
        yield jax.device_put(whole, device)


def parameter_shardings(mesh: Mesh, model: nnx.Module) -> tuple[Any, Any]:
    """Shardings of a model's parameters and other variables, from their declared logical axes and ``RULES``.

    Args:
        mesh: the mesh.
        model: may be abstract.
    """

    def spec(array: Any, declared: Declaration) -> NamedSharding:
        return NamedSharding(mesh, RULES.spec(mesh, array.shape, declared.axes))

    def of(kind: Any) -> Any:
        return jax.tree.map(spec, nnx.to_pure_dict(nnx.state(model, kind)), declarations(model, kind))

    return of(nnx.Param), of(nnx.Not(nnx.Param))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Abstract arrays of these shapes and dtypes with these shardings."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes,
                        shardings)


def state_shardings(mesh: Mesh, model: nnx.Module, state: TrainState) -> TrainState:
    """Shardings of the training state: the optimizer's moments as the parameters, its counts replicated.

    Args:
        mesh: the mesh.
        model: the model of the state; may be abstract.
        state: may be abstract.
    """
    parameters, variables = parameter_shardings(mesh, model)
    by_path = dict(jax.tree_util.tree_leaves_with_path(parameters))

    def of_parameter(path: tuple[Any, ...], _: Any) -> NamedSharding:
        # A moment's path ends with that of its parameter.
        return next((by_path[path[n:]] for n in range(len(path)) if path[n:] in by_path), NamedSharding(mesh, P()))

    optimizer = jax.tree_util.tree_map_with_path(of_parameter, state.optimizer)
    return TrainState(parameters, variables, optimizer)


def create_sharded[T](create: Callable[[], T], mesh: Mesh, shardings: T) -> T:
    """The tree of arrays that ``create`` returns, with a tree of their shardings.

    On one device ``create`` runs without jit, so that XLA compiles an initialisation once for all arrays of a shape. As
    one program, that of a large model takes minutes to compile for a GPU. On several devices it runs under jit, so that
    none of them holds the whole tree.
    """
    if mesh.size == 1:
        return jax.device_put(create(), shardings)
    return jax.jit(create, out_shardings=shardings)()
