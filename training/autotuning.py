"""What XLA tuned for a GPU, kept with a run: ``RUN/autotuning``.

XLA picks the products of a program by timing them, and another pick rounds otherwise. jax keeps what was picked in the
folder of what it compiled, which need not be there at the next start of a run: it is of one machine, and may be
cleared.
"""

import contextlib
import shutil
from pathlib import Path

import jax

from kernels import device
from support.command import note
from support.files import replacing

FOLDER = "autotuning"
"""In a run's folder."""
XLA_CACHE = "xla_gpu_per_fusion_autotune_cache_dir"
"""XLA's part of the compilation cache, named as the flag is: a file for each fusion that it tuned."""


def cache_folder() -> Path | None:
    """Where XLA keeps what it tunes; None on devices that it does not tune for, and without a compilation cache."""
    directory: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is None or "://" in directory or device.platform() != "gpu":
        return None
    return Path(directory) / XLA_CACHE


def restore(run_dir: Path) -> None:
    """Gives XLA what it tuned for a run before. What the cache has already stays. Call it before the step is compiled.
    """
    folder = cache_folder()
    if folder is None or not (run_dir / FOLDER).is_dir():
        return
    try:
        _copy_missing(run_dir / FOLDER, folder)
    except OSError as error:  # jax goes on without a cache that cannot be written
        note(f"what XLA tuned for {run_dir} cannot be given to it, so that this start may round otherwise: {error}")


def keep(run_dir: Path) -> None:
    """Keeps with a run all that the cache has of what XLA tuned. Call it when the step is compiled.

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
            # Another run may write the same file, or its cache be cleared.
            with contextlib.suppress(FileNotFoundError), replacing(to / path.name) as beside:
                shutil.copyfile(path, beside)
