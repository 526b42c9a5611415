"""The environment of a run: ``RUN/environment.json``."""

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels import cpu
from models.encoder import Encoder
from models.gpt import GPT
from support import json_files
from support.command import message, note
from support.errors import JsonError
from support.files import cache_folder
from support.machine import cores, processor
from training import autotuning
from training.run_files import ENVIRONMENT, read_environment

PUBLISHED = "published_weights"
"""Key of ``environment.json`` for runs imported by ``convert.py``: source and dtypes of the weights, and other values
to export."""
CHECKPOINTED = "checkpointed"
"""Key of ``environment.json``: whether the run has ever had a checkpoint. Earlier versions did not write it."""

SHARED_DEVICE = "LINEARGPT_SHARED_DEVICE"
"""Environment variable of a run: 1 if other runs use its device, so that its times cannot be compared."""


def environment(model: GPT | Encoder, *, parameters: int, checksum: str,
                command: Sequence[str] | None = None, segments: bool = False) -> dict[str, Any]:
    """Versions, commit, devices, CPU, command line, corpus checksum, and the implementation of each attention mode.

    ``segments``: whether rows have several documents or padding.
    """
    attention = {block.attention.name: block.attention for block in model.blocks}
    dtype, causal = jnp.dtype(model.config.dtype), isinstance(model, GPT)
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")},
        "commit": git_commit(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "processor": processor(),
        "cores": len(cores()),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "shared_device": os.environ.get(SHARED_DEVICE) == "1",
        "command": list(sys.argv if command is None else command),
        "corpus_checksum": checksum,
        "vocabulary_size": model.vocab_size,
        "parameters": parameters,
        "dtype": model.config.dtype,
        "implementations": {
            name: form for name, layer in attention.items()
            if (form := layer.implementation(dtype, causal=causal, segments=segments)) is not None},
    }


def add_to_environment(run_dir: Path, **values: Any) -> None:
    """Adds values to the ``environment.json`` of a run; its checksum changes with them.

    Raises:
        JsonError: the file is damaged.
        OSError: it cannot be read or written.
    """
    json_files.write(run_dir / ENVIRONMENT, read_environment(run_dir) | values)


def note_checkpoint(run_dir: Path) -> None:
    """Notes in ``environment.json`` that the run has a checkpoint. Where it cannot, the run goes on, and says so."""
    try:
        if read_environment(run_dir).get(CHECKPOINTED) is not True:
            add_to_environment(run_dir, **{CHECKPOINTED: True})
    except (OSError, JsonError) as error:
        note(f"the first checkpoint of the run could not be recorded: {message(error)}")


def git_commit() -> str | None:
    """The commit of the running code, with -dirty if files differ from it.

    Without a git checkout, the value of ``LINEARGPT_COMMIT``, or None.
    """
    try:
        described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                                   cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LINEARGPT_COMMIT")
    return described.stdout.strip()


def peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Memory of a compiled function: arguments, outputs and temporaries; None if the device does not report it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes)


def compilation_cache() -> str | None:
    """The folder of JAX's compilation cache, created if missing; None, with a note, if it cannot be written."""
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_folder("jax"))
    if "://" in directory:  # a bucket
        return directory
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        note(f"programs are compiled at every start: the compilation cache {directory} cannot be written "
             f"({error.strerror}); set JAX_COMPILATION_CACHE_DIR to another folder")
        return None
    return directory


def configure_jax() -> None:
    """Configures JAX: CPU features, products on a TPU, and the compilation cache in :func:`compilation_cache`.

    Call it before anything is compiled. ``JAX_COMPILATION_CACHE_DIR`` sets another folder. If the folder cannot be
    written, there is no cache.
    """
    cpu.configure_process()
    if importlib.util.find_spec("libtpu") is not None:
        # A TPU rounds float32 operands to bfloat16 by default: a float32 model would be one in name only.
        jax.config.update("jax_default_matmul_precision", "highest")
    directory = compilation_cache()
    jax.config.update("jax_compilation_cache_dir", directory)
    if directory is None:
        return
    # JAX warns of every program that a full disk keeps out of the cache.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    # Many small programs together take as long to compile as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", autotuning.XLA_CACHE)
