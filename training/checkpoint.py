"""Checkpoints of a run: asynchronous, checksummed and atomic.

    RUN/checkpoints/STEP/            a complete checkpoint: one folder per item, written by Orbax
    RUN/checkpoints/STEP/loss.json   its val loss, if any
    RUN/checkpoints/STEP/SHA256SUMS  the checksums of all other files; verify with ``sha256sum -c SHA256SUMS``
    RUN/checkpoints/unfinished/      a checkpoint that is being written or deleted

A checkpoint is written to ``unfinished`` and renamed to STEP once it and its checksums are on disk. Before deletion it
is renamed back. A process that dies at any moment, or a power loss, leaves only complete STEP folders.

The items are pytrees of arrays ("parameters", "variables", "optimizer"), except "position", a dict of numbers in JSON,
which is restored exactly.
"""

import hashlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import orjson

from support.errors import CheckpointError, ConfigError
from support.files import sync, sync_entry, write_text

CHECKSUMS = "SHA256SUMS"
LOSS = "loss.json"
UNFINISHED = "unfinished"
JSON_ITEM = "position"
JSON_FILE = "data.json"
"""The file of that item, as Orbax names it."""
OPTIMIZER = "optimizer"
LEAF_NAMES = {"parameters": "parameter", "variables": "variable", "optimizer": "optimizer state"}


class Checkpoints:
    """Writes and reads the checkpoints in one folder.

    Use it as a context manager or call :meth:`close`; otherwise a pending save is lost at the end of the process.
    Reading does not modify the folder, so that checkpoints of a running process can be read. With several JAX
    processes, all save and load arrays together, in a folder that they share; process 0 makes a checkpoint complete.

    Args:
        directory: ``RUN/checkpoints``; created at the first save.
        keep: number of newest checkpoints kept, in addition to the one with the lowest loss.
        completed: called on process 0, on a thread, when a checkpoint is complete.

    Raises:
        ConfigError: ``keep`` is less than 1, or the path is not UTF-8.
    """

    def __init__(self, directory: Path, *, keep: int = 2, completed: Callable[[], object] = lambda: None):
        if keep < 1:
            raise ConfigError(f"checkpoint.keep: expected at least 1, got {keep}")
        check_path(directory)
        self.directory = Path(directory)
        self.keep = keep
        self._completed = completed
        self._unfinished = self.directory.absolute() / UNFINISHED  # Orbax requires absolute paths
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def best(self) -> int | None:
        """The step of the checkpoint with the lowest val loss; None if none has a loss."""
        losses = {step: loss for step in self.steps() if (loss := _loss(self.directory / str(step))) is not None}
        return min(losses, key=losses.__getitem__, default=None)

    def save(self, step: int, items: dict[str, Any], *, loss: float | None = None) -> None:
        """Write a checkpoint in the background, replacing one of the same step.

        Waits for a pending save first. On return the arrays may be donated or overwritten.

        Args:
            step: number of updates; the name of the checkpoint.
            items: pytrees of arrays by item name, and "position", a dict of numbers. A tree may be empty.
            loss: val loss in nats per token, to keep the best checkpoint; non-finite losses are ignored.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written. Earlier checkpoints are intact.
        """
        self.wait()
        ocp, context = _orbax()
        saved = {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}  # Orbax refuses empty trees
        if JSON_ITEM in saved:
            saved[JSON_ITEM] = {key: x.item() if hasattr(x, "item") else x for key, x in saved[JSON_ITEM].items()}
        with self._one_clear_error(step), context:
            if jax.process_index() == 0:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # left by a killed process
                self._unfinished.mkdir(parents=True)
            response = ocp.save_checkpointables_async(self._unfinished / str(step), saved)
        self._pending = self._thread.submit(self._finish, step, response, loss)

    def wait(self) -> None:
        """Wait until a pending save is complete on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def is_pending(self) -> bool:
        """Whether a save has been started, and neither :meth:`wait` nor :meth:`failure` has told how it ended."""
        return self._pending is not None

    def failure(self) -> CheckpointError | None:
        """The error of a pending save that has ended with one, which :meth:`wait` then no longer raises."""
        if self._pending is None or not self._pending.done():
            return None
        error = self._pending.exception()
        if not isinstance(error, CheckpointError):
            return None
        self._pending = None
        return error

    def close(self) -> None:
        """Wait for a pending save and end the background thread; raises like :meth:`wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore(self, abstract: dict[str, Any], step: int | None = None, *,
                verify: Iterable[str] = ()) -> tuple[int, dict[str, Any]] | None:
        """Load the newest intact checkpoint, or that at one step. Only the requested items are verified and read.

        Args:
            abstract: by item name, a pytree of ``jax.ShapeDtypeStruct`` with the shardings to load onto (none: the
                first device). The value for "position" is ignored.
            step: step of the checkpoint. None: the newest intact one.
            verify: other items to verify.

        Returns:
            The step and the items, with arrays exactly as saved; None if there is no intact checkpoint. Without
            ``step``, damaged checkpoints are skipped with a warning.

        Raises:
            ConfigError: there is no checkpoint at ``step``; the message lists the available ones.
            CheckpointError: the checkpoint at ``step`` is damaged, or the checkpoint is of another model.
        """
        self.wait()
        verified = {*abstract, *verify}
        if step is not None:
            if step not in (steps := self.steps()):
                there = ", ".join(map(str, steps)) or "none"
                raise ConfigError(f"{self.directory}: no checkpoint at step {step}; expected one of {there}")
            folder = self.directory / str(step)
            if (damage := _damage(folder, verified)) is not None:
                raise CheckpointError(f"{folder} is damaged: {damage}. There are checkpoints at steps "
                                      f"{', '.join(map(str, steps))}")
            return step, _load(folder, abstract)
        # List the steps again each time: a running process may delete a checkpoint while it is read here.
        self._damaged.clear()
        while remaining := [s for s in self.steps() if s not in self._damaged]:
            folder = self.directory / str(remaining[-1])
            if (damage := _damage(folder, verified)) is None:
                return remaining[-1], _load(folder, abstract)
            warnings.warn(f"skipping the damaged checkpoint {folder}: {damage}", stacklevel=2)
            self._damaged.add(remaining[-1])
        return None

    def load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """The items of the newest intact checkpoint, at the step that :meth:`resume` has returned before.

        Their files are not read a second time to verify them. Later checkpoints count as damaged.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self._damaged = {other for other in self.steps() if other > step}
        return _load(self.directory / str(step), abstract)

    def resume(self, abstract: dict[str, Any], *, verify: Iterable[str] = ()) -> tuple[int, dict[str, Any]] | None:
        """:meth:`restore` for a run that resumes; None only if it has no checkpoint yet.

        Raises:
            CheckpointError: all checkpoints are damaged, or of another model.
        """
        found = self.restore(abstract, verify=verify)
        if found is None and self.steps():
            raise CheckpointError(f"{self.directory.parent}: all checkpoints are damaged; move the folder away to "
                                  "start over")
        return found

    def training_can_go_on(self, step: int) -> bool:
        """Whether the checkpoint at a step has its optimizer state, which :meth:`keep_parameters` removes."""
        return (self.directory / str(step) / OPTIMIZER).is_dir()

    def check_training_can_go_on(self, step: int) -> None:
        """Raises :class:`CheckpointError` if the checkpoint at a step has no optimizer state."""
        _check_optimizer_state(self.directory / str(step))

    def keep_parameters(self) -> None:
        """Keep only the parameters and variables of the best and the last checkpoint of a finished run.

        Training cannot resume from them. A process that dies during the call leaves a checkpoint with a damaged
        optimizer state; the next call removes the rest.

        Raises:
            OSError: a file cannot be written or removed.
        """
        self.wait()
        kept = {self.best(), *self.steps()[-1:]}
        for step in self.steps():
            folder = self.directory / str(step)
            if step not in kept:
                self._unfinished.mkdir(exist_ok=True)
                self._remove(step)
            elif (folder / OPTIMIZER).exists():
                lines = (folder / CHECKSUMS).read_text().splitlines(keepends=True)
                write_text(folder / CHECKSUMS, "".join(
                    line for line in lines if not line.partition("  ")[2].startswith(f"{OPTIMIZER}/")))
                shutil.rmtree(folder / OPTIMIZER)
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _finish(self, step: int, response: Any, loss: float | None) -> None:
        """On the background thread: wait for Orbax, write checksums, rename the checkpoint, and delete old ones."""
        with self._one_clear_error(step):
            response.result()
            if jax.process_index() != 0:
                return
            written = self._unfinished / str(step)
            if loss is not None and math.isfinite(loss):
                (written / LOSS).write_bytes(orjson.dumps({"loss": float(loss)}))
            lines = [f"{_sha256(written / name)}  {name}\n" for name in sorted(_files(written))]
            (written / CHECKSUMS).write_text("".join(lines))
            sync(written)
            self._remove(step)
            written.rename(self.directory / str(step))
            sync_entry(self.directory)
            self._completed()
            self._damaged.discard(step)
            self._prune(step)

    def _prune(self, newest: int) -> None:
        """Delete checkpoints that are no longer kept, after the checkpoint at ``newest`` is complete.

        Ignores damaged checkpoints and those later than ``newest``, left after an earlier one was restored.
        """
        steps = [step for step in self.steps() if step <= newest and step not in self._damaged]
        losses = {step: loss for step in steps if (loss := _loss(self.directory / str(step))) is not None}
        best = min(losses, key=losses.__getitem__, default=None)
        for step in steps[:-self.keep]:
            if step != best:
                self._remove(step)

    def _remove(self, step: int) -> None:
        folder = self.directory / str(step)
        if folder.exists():
            removed = self._unfinished / f"{step}.removed"
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    @contextmanager
    def _one_clear_error(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # TensorStore reports a full disk as a ValueError
            if jax.process_index() == 0:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # frees the space of the partial checkpoint
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"the checkpoint of step {step} could not be written to {self.directory}; check its "
                                  f"free space and permissions. Earlier checkpoints are intact. ({reason})"
                                  ) from error


def check_path(path: Path) -> None:
    """Raises :class:`ConfigError` if a path is not UTF-8, which TensorStore requires."""
    try:
        str(Path(path).absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the path {os.fsencode(Path(path).absolute())!r} is not UTF-8, which checkpoints require; "
                          "rename the folder, or choose another") from None


def _orbax() -> tuple[Any, Any]:
    """Orbax and the context of its calls. The import takes half a second."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_without_orbax_tracebacks)
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name=JSON_ITEM)
    # The call that saves reports an unwritable folder.
    context.asynchronous.create_directories_asynchronously = False
    # Compression shrinks trained float32 weights by a tenth, for twice the CPU time.
    context.array.saving.use_compression = False
    return ocp, context


def _without_orbax_tracebacks(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax logs in its threads: it also raises the exception."""
    return record.exc_info is None or "orbax" not in record.pathname


def _load(folder: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    if JSON_ITEM in abstract:  # one process may read it alone, and Orbax waits for all
        loaded[JSON_ITEM] = orjson.loads((folder / JSON_ITEM / JSON_FILE).read_bytes())
    if abstract.keys() <= loaded.keys():
        return loaded
    ocp, context = _orbax()
    wanted: dict[str, Any] = {}
    place = folder.absolute()  # Orbax requires absolute paths
    with context:
        # Parameters first, so that the message about another model names one of them.
        for name, tree in sorted(abstract.items(), key=lambda item: item[0] != "parameters"):
            if name == JSON_ITEM:
                continue
            if name == OPTIMIZER and jax.tree.leaves(tree):
                _check_optimizer_state(folder)
            stored = ocp.metadata(place, checkpointable_name=name).metadata if (place / name).is_dir() else {}
            if (difference := _difference(LEAF_NAMES.get(name, name), stored, tree)) is not None:
                raise CheckpointError(f"{folder} is a checkpoint of another model: {difference}")
            if jax.tree.leaves(tree):
                wanted[name] = jax.tree.map(_with_sharding, tree)
        loaded |= ocp.load_checkpointables(place, wanted) if wanted else {}
    return {name: loaded.get(name, tree) for name, tree in abstract.items()}


def _check_optimizer_state(folder: Path) -> None:
    if not (folder / OPTIMIZER).is_dir():
        raise CheckpointError(f"{folder} has no optimizer state, which sweep.py deletes from finished runs without "
                              "--keep-all: training cannot resume. Start a new run from its parameters with "
                              "--init-from")


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _difference(leaf_name: str, stored: Any, expected: Any) -> str | None:
    """Description of the first difference of two trees in names, shapes or dtypes; None if they agree."""
    found, wanted = _leaves(stored), _leaves(expected)
    for name in sorted(wanted.keys() | found.keys()):
        label = f"{leaf_name} {name.removesuffix('.value')}"
        if name not in found:
            return f"it has no {label}"
        if name not in wanted:
            return f"it has {label}, which this model has not"
        for what, i in (("shape", 0), ("dtype", 1)):
            if found[name][i] != wanted[name][i]:
                return f"{label} has {what} {found[name][i]}, expected {wanted[name][i]}"
    return None


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array by name. Random keys have those of their integers."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        leaves[jax.tree_util.keystr(path, simple=True, separator=".")] = (tuple(leaf.shape), str(leaf.dtype))
    return leaves


def _damage(folder: Path, items: set[str]) -> str | None:
    """Description of the damage to the files of these items of a checkpoint; None if they are intact."""
    try:
        lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{CHECKSUMS} cannot be read ({error.strerror})"
    if not all(len(line.partition("  ")[0]) == 64 and line.partition("  ")[2] for line in lines):
        return f"{CHECKSUMS} is truncated or altered"
    checksums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder) - {CHECKSUMS}
    for name in sorted(present | checksums.keys()):
        if "/" in name and name.split("/")[0] not in items:
            continue
        if name not in present:
            return f"{name} is missing"
        if name not in checksums:
            return f"{name} is not in {CHECKSUMS}"
        try:
            intact = _sha256(folder / name) == checksums[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not intact:
            return f"{name} does not match its checksum: it is truncated or altered"
    return None


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _loss(folder: Path) -> float | None:
    try:
        return float(orjson.loads((folder / LOSS).read_bytes())["loss"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
        return None
