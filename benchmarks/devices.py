"""What the training step of a config takes of each device of a mesh: products, collectives and memory.

The step is compiled for the devices and not run. For ``estimate --devices``.
"""

import math
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax

from benchmarks import memory, report, target
from benchmarks.launches import launches, pallas_kernels
from benchmarks.program import read_program
from benchmarks.train_step import step_and_shapes
from configs.schema import Config
from support.command import status
from support.errors import BenchmarkError, ConfigError
from training.sharding import make_mesh, mesh_sizes

CPU = "cpu"
"""In place of the name of a card: this machine's CPU."""


def use_cpu_devices(number: int) -> None:
    """Lets jax have this number of CPU devices. Call it before jax starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)


def check_mesh(config: Config, devices: int) -> None:
    """Raises :class:`ConfigError` if the mesh of a config does not take all devices."""
    sizes = mesh_sizes(config, devices)
    used = math.prod(sizes.values())
    if used < devices:
        told = " × ".join(f"mesh.{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"--devices is {devices}; the mesh {told} takes {used}: train.batch_size / train.accumulate is "
            f"{config.train.batch_size // config.train.accumulate}; expected --devices {used}, a larger "
            "--train.batch-size, or a mesh that splits more than the batch, such as --mesh.context "
            f"{sizes['context'] * devices // used}")


def measure_step(config: Config, number: int, vocabulary: int, gpu: target.Target | None) -> dict[str, Any]:
    """Of each device: ``operations`` of products, bytes of ``collectives`` by kind, and memory in bytes.

    Args:
        config: resolved.
        number: of devices.
        vocabulary: number of tokens.
        gpu: the kind of the devices; None: CPU devices of :func:`use_cpu_devices`.

    Raises:
        BenchmarkError: the step cannot be compiled.
    """
    devices = jax.devices() if gpu is None else gpu.devices(number)
    mesh = make_mesh(config, devices)
    # Not jax.set_mesh: no array can be on a device that does not exist.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step, arguments = step_and_shapes(config, vocabulary, mesh)
        traced = step.trace(*arguments)
        if gpu is None:
            compiled = target.compile_lowered(traced.lower())
        else:
            with tempfile.TemporaryDirectory() as folder:
                compiled = gpu.compile(traced, Path(folder))
    text, planned = compiled.as_text(), compiled.memory_analysis()
    if text is None or planned is None:
        raise BenchmarkError("the compiler does not report the program")
    program = read_program(text)
    operations = program.products.operations if gpu is None else sum(
        launch.count * sum(launch.work.operations.values())
        for launch in launches(program, pallas_kernels(traced.jaxpr), set()))
    return {"operations": operations, "collectives": dict(program.collectives),
            "peak_bytes": report.peak_bytes(compiled), "temporary_bytes": planned.temp_size_in_bytes,
            "argument_bytes": planned.argument_size_in_bytes, "mesh": dict(mesh.shape)}


def tell(config: Config, vocabulary: int, gpu: target.Target | None, options: Namespace,
         results: report.Results) -> None:
    """Compiles the step of a config for ``options.devices`` devices, and tells what each takes.

    Raises:
        ConfigError: the mesh does not take all devices.
        BenchmarkError: the step cannot be compiled.
    """
    check_mesh(config, options.devices)
    status("compiling …")
    found = measure_step(config, options.devices, vocabulary, gpu)
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one device"
    print("\n".join([
        f"compiled, not run: {options.devices} × {options.card}, {mesh}; of each device:",
        f"{','.join(config.model.attention)} attention, {config.model.dtype}, a step of {config.train.batch_size} × "
        f"{config.model.context:,} tokens, remat {config.train.remat}: {found['operations'] / 1e12:,.4f} TFLOP of "
        f"products, {found['peak_bytes'] / 2**30:,.2f} GiB, {found['temporary_bytes'] / 2**30:,.2f} of them temporary",
        *(f"{kind}: {size / 1e6:,.2f} MB" for kind, size in sorted(found["collectives"].items())),
        *([] if gpu is None else [memory.verdict(found["peak_bytes"], memory.CARDS[options.card] * 2**20)])]))
    results.more = {"card": options.card, "devices": options.devices, "vocabulary": vocabulary,
                    "model": config.to_dict()["model"], "train": config.to_dict()["train"], **found}
    results.keep()
