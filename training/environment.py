"""What a run was made with: ``RUN/environment.json``."""

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
from support.errors import RunError
from support.files import read_json, write_json
from training import autotuning

PUBLISHED = "published_weights"
"""What ``environment.json`` has of a run that ``convert.py`` imported, and of no other: where its weights are from, the
number formats, and what else an export gives back."""


def environment(model: GPT | Encoder, *, parameters: int, tokenizer: str | None, checksum: str,
                command: Sequence[str] | None = None, segments: bool = False) -> dict[str, Any]:
    """Versions, commit, devices, command line, corpus checksum, and which form computes each attention mode.

    ``segments``: whether rows are of several documents, or padded.
    """
    attention = {block.attention.name: block.attention for block in model.blocks}
    dtype, causal = jnp.dtype(model.config.dtype), isinstance(model, GPT)
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")},
        "commit": git_commit(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "device_count": jax.device_count(),
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
    """Adds what is known only later to the ``environment.json`` of a run.

    Raises:
        RunError: the file is damaged.
    """
    path = run_dir / "environment.json"
    write_json(path, read_json(path, RunError) | values)


def git_commit() -> str | None:
    """The commit of the code that runs, with -dirty where files differ from it.

    Where the files are no git checkout, what ``LINEARGPT_COMMIT`` says, or None.
    """
    try:
        described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                                   cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LINEARGPT_COMMIT")
    return described.stdout.strip()


def peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Memory that a compiled function needs: arguments, outputs and temporaries; None where the device does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes)


def compilation_cache() -> str | None:
    """The folder that keeps what JAX compiles, made where it is not there; None where it cannot be."""
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineargpt" / "jax"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        directory = str(cache)
    return directory


def configure_jax() -> None:
    """Has JAX use all of a CPU, and keep what it compiles in :func:`compilation_cache` for the next start.

    Call it before anything is compiled. ``JAX_COMPILATION_CACHE_DIR`` names another folder; where the folder cannot be
    made there is no cache.
    """
    cpu.configure_process()
    directory = compilation_cache()
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # A start compiles many small things, which together take as long as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", autotuning.XLA_CACHE)
