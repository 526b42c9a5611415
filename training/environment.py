"""The environment of a run: ``RUN/environment.json``."""

import os
import platform
import subprocess
import sys
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
from support.files import cache_folder
from training import autotuning
from training.run_files import ENVIRONMENT, read_environment

PUBLISHED = "published_weights"
"""Key of ``environment.json`` for runs imported by ``convert.py``: source and dtypes of the weights, and other values
to export."""


def environment(model: GPT | Encoder, *, parameters: int, tokenizer: str | None, checksum: str,
                command: Sequence[str] | None = None, segments: bool = False) -> dict[str, Any]:
    """Versions, commit, devices, command line, corpus checksum, and the implementation of each attention mode.

    ``segments``: whether rows have several documents or padding.
    """
    attention = {block.attention.name: block.attention for block in model.blocks}
    dtype, causal = jnp.dtype(model.config.dtype), isinstance(model, GPT)
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")},
        "commit": git_commit(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "command": list(sys.argv if command is None else command),
        "corpus_checksum": checksum,
        "tokenizer": tokenizer,
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
    """The folder of JAX's compilation cache, created if missing; None if that fails."""
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        cache = cache_folder("jax")
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        directory = str(cache)
    return directory


def configure_jax() -> None:
    """Configures JAX: CPU features, and the compilation cache in :func:`compilation_cache`.

    Call it before anything is compiled. ``JAX_COMPILATION_CACHE_DIR`` sets another folder. If the folder cannot be
    created, there is no cache.
    """
    cpu.configure_process()
    directory = compilation_cache()
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # Many small programs together take as long to compile as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", autotuning.XLA_CACHE)
