"""What the training step of a config takes of each device of a mesh: products, collectives and memory.

The step is compiled for the devices and not run. For ``estimate --devices``.
"""

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks import memory, report, target
from benchmarks.launches import launches, pallas_kernels
from benchmarks.program import read_program
from benchmarks.train_step import step_and_shapes
from configs.schema import Config
from models import gpt
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


def measure_step(case: Mapping[str, Any]) -> dict[str, Any]:
    """Of each device: ``operations`` of products, bytes of ``collectives`` by kind, and memory in bytes.

    Args:
        case: ``card``, ``devices``, ``config``, a dictionary, and ``vocabulary``, the number of tokens.
    """
    gpu = None
    if case["card"] == CPU:
        use_cpu_devices(case["devices"])
        config, devices = Config.from_dict(case["config"]), jax.devices()
        config = replace(config, model=gpt.resolve_config(config.model))
    else:
        gpu = target.Target(case["card"])
        config, devices = gpu.load_config(case["config"]), gpu.devices(case["devices"])
    mesh = make_mesh(config, devices)
    # Not jax.set_mesh: no array can be on a device that does not exist.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step, arguments = step_and_shapes(config, case["vocabulary"], mesh)
        traced = step.trace(*arguments)
        if gpu is None:
            compiled = traced.lower().compile()
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


def tell(options: Namespace, results: report.Results, module: str) -> None:
    """Compiles the step of a command line for ``options.devices`` devices, and tells what each takes.

    Raises:
        ConfigError: the command line is wrong, the mesh does not take all devices, or the step needs more memory than a
            card has.
        BenchmarkError: the step cannot be compiled.
    """
    use_cpu_devices(options.devices)
    gpu = None if options.card == CPU else target.Target(options.card)
    config = target.parse_words(options.words, gpu)
    check_mesh(config, options.devices)
    case = {"card": options.card, "devices": options.devices, "config": config.to_dict(),
            "vocabulary": options.vocabulary or target.vocabulary_size(config)}
    status("compiling …")
    found = target.compile_elsewhere(module, case, sys.executable if gpu is None else None)
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one device"
    print("\n".join([
        f"compiled, not run: {options.devices} × {options.card}, {mesh}; of each device:",
        f"{','.join(config.model.attention)} attention, {config.model.dtype}, a step of {config.train.batch_size} × "
        f"{config.model.context:,} tokens, remat {config.train.remat}: {found['operations'] / 1e12:,.4f} TFLOP of "
        f"products, {found['peak_bytes'] / 2**30:,.2f} GiB, {found['temporary_bytes'] / 2**30:,.2f} of them temporary",
        *(f"{kind}: {size / 1e6:,.2f} MB" for kind, size in sorted(found["collectives"].items())),
        *([] if gpu is None else [memory.verdict(found["peak_bytes"], memory.CARDS[options.card] * 2**20)])]))
    results.more = {"card": options.card, "devices": options.devices, "vocabulary": case["vocabulary"],
                    "model": config.to_dict()["model"], "train": config.to_dict()["train"], **found}
    results.keep()
