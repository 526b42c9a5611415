"""XLA's autotuning results on a GPU, saved with a run: ``RUN/autotuning``.

XLA chooses algorithms for matrix products by timing them, and different choices round differently. jax keeps the
results in its compilation cache, which may be missing when a run resumes: it belongs to one machine and may be cleared.
"""

import contextlib
import shutil
from pathlib import Path

import jax

from kernels import device
from support.command import note
from support.files import replacing

FOLDER = "autotuning"
"""Name of the folder in a run."""
XLA_CACHE = "xla_gpu_per_fusion_autotune_cache_dir"
"""XLA's part of the compilation cache, named after its flag, with a file per tuned fusion."""


def cache_folder() -> Path | None:
    """XLA's autotuning cache; None on devices without autotuning, and without a compilation cache."""
    directory: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is None or "://" in directory or device.platform() != "gpu":
        return None
    return Path(directory) / XLA_CACHE


def restore(run_dir: Path) -> None:
    """Restores a run's autotuning results, except those already in the cache. Call it before compiling the step."""
    folder = cache_folder()
    if folder is None or not (run_dir / FOLDER).is_dir():
        return
    try:
        _copy_missing(run_dir / FOLDER, folder)
    except OSError as error:  # jax works without a writable cache
        note(f"the autotuning results of {run_dir} cannot be restored; results may round differently: {error}")


def keep(run_dir: Path) -> None:
    """Saves all autotuning results of the cache with a run. Call it after compiling the step.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    folder = cache_folder()
    if folder is not None and folder.is_dir():
        _copy_missing(folder, run_dir / FOLDER)


def _copy_missing(source: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        is_whole = path.is_file() and not path.name.startswith(".")
        if is_whole and not (to / path.name).exists():
            # Another run may write the same file, or the cache may be cleared.
            with contextlib.suppress(FileNotFoundError), replacing(to / path.name) as beside:
                shutil.copyfile(path, beside)
