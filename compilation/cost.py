"""What a program for a GPU costs, compiled and not run: its time by launch, and each device's part of a step."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from compilation.cards import Rates
from compilation.launches import Launch, launches, pallas_kernels, read_graphed
from compilation.program import Program, read_program
from compilation.target import Target, compile_lowered
from configs.schema import Config
from support.errors import BenchmarkError
from training.abstract_step import step_and_shapes
from training.environment import peak_bytes
from training.sharding import make_mesh


def estimate(device: Target, traced: jax.stages.Traced, rates: Rates) -> dict[str, Any]:
    """The estimated milliseconds of a program, its launches, bytes and operations, its memory, and the same by group
    of launches in ``rows``.

    Raises:
        BenchmarkError: it cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, memory = _read(device.compile(traced, Path(folder)))
        graphed = read_graphed(Path(folder))
    rows = grouped(launches(program, pallas_kernels(traced.jaxpr), graphed), rates)
    return {"ms": sum(row["ms"] for row in rows), "launches": sum(row["count"] for row in rows),
            "bytes": sum(row["bytes"] for row in rows), "operations": sum(row["operations"] for row in rows),
            "rows": rows, **memory}


def grouped(found: Iterable[Launch], rates: Rates) -> list[dict[str, Any]]:
    """Sums over the launches of each group, the longest first."""
    groups: dict[str, dict[str, Any]] = {}
    for launch in found:
        row = groups.setdefault(launch.group, {"group": launch.group, "count": 0, "bytes": 0, "operations": 0, "ms": 0})
        for name, amount in (("count", 1), ("bytes", launch.work.memory),
                             ("operations", sum(launch.work.operations.values())), ("ms", 1e3 * rates.seconds(launch))):
            row[name] += launch.count * amount
    return sorted(groups.values(), key=lambda row: -row["ms"])


def cost_per_device(config: Config, number: int, vocabulary: int, device: Target | None) -> dict[str, Any]:
    """What each device of a mesh takes of the training step of a config: ``operations`` of products, bytes of
    ``collectives`` by kind, and memory in bytes.

    Args:
        config: resolved.
        number: of devices.
        vocabulary: number of tokens.
        device: the kind of the devices; None: CPU devices of :func:`use_cpu_devices`.

    Raises:
        BenchmarkError: the step cannot be compiled.
    """
    mesh = make_mesh(config, jax.devices() if device is None else device.devices(number))
    # Not jax.set_mesh: no array can be on a device that does not exist.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step, arguments = step_and_shapes(config, vocabulary, mesh)
        traced = step.trace(*arguments)
        program, memory = _read(compile_lowered(traced.lower()) if device is None else device.compile(traced))
    operations = program.products.operations if device is None else sum(
        launch.count * sum(launch.work.operations.values())
        for launch in launches(program, pallas_kernels(traced.jaxpr), set()))
    return {"operations": operations, "collectives": dict(program.collectives), "mesh": dict(mesh.shape), **memory}


def use_cpu_devices(number: int) -> None:
    """Lets jax have this number of CPU devices. Call it before jax starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)


def _read(compiled: jax.stages.Compiled) -> tuple[Program, dict[str, Any]]:
    """The program, and the memory that it takes by the compiler's plan."""
    text, planned = compiled.as_text(), compiled.memory_analysis()
    if text is None or planned is None:
        raise BenchmarkError("the compiler does not report the program")
    return read_program(text), {
        "peak_bytes": peak_bytes(compiled), "argument_bytes": planned.argument_size_in_bytes,
        "output_bytes": planned.output_size_in_bytes, "temporary_bytes": planned.temp_size_in_bytes}
