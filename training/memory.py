"""The memory that a run needs at least, compared with what its devices have."""

import contextlib
import os
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from configs.schema import RunConfig
from models.parameters import count_parameters
from support.command import note
from support.errors import ConfigError

COPIES = 4
"""Float32 arrays of the size of the parameters: these, their gradients and the two moments of Adam."""
FLOAT_BYTES = 4
CGROUP_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Limits of a container, in versions 2 and 1 of cgroups."""


def check_memory(config: RunConfig, model: nnx.Module, mesh: Mesh) -> None:
    """Checks that the devices have the memory that parameters, optimizer and a batch need; prints a note if they lack
    that of the inputs of the layers, which the backward pass reads. All are lower bounds.

    Args:
        config: validated config.
        model: the abstract model.
        mesh: the devices.

    Raises:
        ConfigError: the devices have less memory than parameters, optimizer and a batch need.
    """
    size, train, axes, parameters = config.model, config.train, mesh.shape, count_parameters(model)
    others = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param))))
    state = FLOAT_BYTES * (COPIES * parameters / (axes["fsdp"] * axes["tensor"]) + others)
    batch = FLOAT_BYTES * train.batch_size * size.context / (axes["data"] * axes["fsdp"] * axes["context"])
    layers = batch / train.accumulate * size.layers * size.width
    there = device_bytes()
    if state > there:
        fields = ", ".join(f"model.{name} {getattr(size, name)}" for name in ("layers", "heads", "width", "context"))
        random = f" and {others:,} random numbers of model.modes" if others else ""
        raise ConfigError(f"{fields}: the model has {parameters:,} parameters{random}, which with their gradients and "
                          f"the optimizer need {_gb(state)} of memory, and a device has {_gb(there)}; expected a "
                          "smaller model, or more devices with mesh.fsdp")
    if state + batch > there:
        raise ConfigError(f"train.batch_size is {train.batch_size}: a batch of {size.context:,} tokens a row needs "
                          f"{_gb(batch)} of memory, and a device has {_gb(there)}; expected a smaller batch")
    if state + batch + layers > there:
        note(f"parameters and optimizer need {_gb(state)} of memory and the inputs of the layers {_gb(layers)}, and a "
             f"device has {_gb(there)}: lower train.batch_size, {train.batch_size}, or raise train.accumulate, "
             f"{train.accumulate}")


def device_bytes() -> float:
    """The memory of a device in bytes; that of the machine, divided among its devices, if they do not report it."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit or _machine_bytes() / jax.local_device_count()


def _machine_bytes() -> float:
    """The memory of the machine, or what its container may use."""
    there = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no cgroups, or no limit: max
            there.append(int(path.read_text()))
    return min(there)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
