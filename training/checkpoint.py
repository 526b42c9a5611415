"""Checkpoints of a run: asynchronous, checksummed and atomic.

    RUN/checkpoints/STEP/            a complete checkpoint: one folder per item, written by Orbax
    RUN/checkpoints/STEP/loss.json   its val loss, if any
    RUN/checkpoints/STEP/SHA256SUMS  the checksums of all other files; verify with ``sha256sum -c SHA256SUMS``
    RUN/checkpoints/STEP.replaced/   a complete checkpoint, while another of the same step takes its place
    RUN/checkpoints/unfinished/      what is being written or deleted

A checkpoint is written to ``unfinished`` and renamed to STEP once it and its checksums are on disk. Before deletion it
is renamed back. One of the same step is first renamed to STEP.replaced, and counts as STEP until there is a new STEP.
A process that dies at any moment, or a power loss, leaves only complete checkpoints.

``SHA256SUMS`` says which files a checkpoint has: others in its folder are ignored. A checkpoint is damaged if a listed
file is missing or differs. Any other failure to read a file is an ``OSError``, since the file may be intact.

The items are pytrees of arrays ("parameters", "variables", "optimizer"), except "position", a dict of numbers in JSON,
which is restored exactly.
"""

import errno
import functools
import hashlib
import logging
import math
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

import jax
import orjson

from support.command import message, note
from support.errors import CheckpointError, ConfigError
from support.files import sync, sync_entry
from support.json_files import Finite, check, read

CHECKSUMS = "SHA256SUMS"
LOSS = "loss.json"
UNFINISHED = "unfinished"
REPLACED = ".replaced"
JSON_ITEM = "position"
JSON_FILE = "data.json"
"""The file of that item, as Orbax names it."""
OPTIMIZER = "optimizer"
LEAF_NAMES = {"parameters": "parameter", "variables": "variable", "optimizer": "optimizer state"}
TRIES = 10
"""How often a checkpoint is read that a running process deletes or replaces meanwhile."""
LINE = re.compile(rb"([0-9a-f]{64})  ([^\0]+)")
"""A line of ``SHA256SUMS``."""
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
BACKGROUND = {"orbax", "tensorstore", "asyncio", "uvloop"}
"""Packages that work on a checkpoint in threads, tasks and callbacks."""
BELOW = {*BACKGROUND, "absl", "etils", "jax", "nest_asyncio"}
"""Packages between these and the standard library."""


class _DamagedError(CheckpointError):
    """A checkpoint is damaged."""

    def __init__(self, folder: Path, damage: str):
        super().__init__(f"{folder} is damaged: {damage}")
        self.folder, self.damage = folder, damage


class _GoneError(Exception):
    """A checkpoint was deleted or replaced while it was read."""


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
            raise ConfigError(f"checkpoint.keep is {keep}; expected at least 1")
        check_path(directory)
        self.directory = Path(directory)
        self.keep = keep
        self._completed = completed
        self._unfinished = self.directory.absolute() / UNFINISHED  # Orbax requires absolute paths
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[int] = set()
        self._parent: tuple[int, int] | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        names = {path.name.removesuffix(REPLACED) for path in self.directory.iterdir() if path.is_dir()}
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def best(self) -> int | None:
        """The step of the checkpoint with the lowest val loss; None if none has a loss. Damaged checkpoints are skipped
        with a note.

        Raises:
            OSError: a file cannot be read.
        """
        return self._read(lambda: self._best_of(self.steps())[0])

    def save(self, step: int, items: dict[str, Any], *, loss: float | None = None) -> None:
        """Write a checkpoint in the background, replacing one of the same step.

        Waits for a pending save first. On return the arrays may be donated or overwritten.

        Args:
            step: number of updates; the name of the checkpoint.
            items: pytrees of arrays by item name, and "position", a dict of numbers. A tree may be empty.
            loss: val loss in nats per token, to keep the best checkpoint; non-finite losses are ignored.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written. Earlier checkpoints stay as they are.
        """
        self.wait()
        ocp, context = _orbax()
        saved = {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}  # Orbax refuses empty trees
        if JSON_ITEM in saved:
            saved[JSON_ITEM] = {key: x.item() if hasattr(x, "item") else x for key, x in saved[JSON_ITEM].items()}
        with self._as_checkpoint_error(step), context:
            if jax.process_index() == 0:
                if self._parent is None:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    self._parent = _identity(self.directory.parent)
                self._check_parent()
                self._clean_up()
                self._unfinished.mkdir(parents=True, exist_ok=True)
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
        """Whether a save has been started, and neither :meth:`wait` nor :meth:`failure` has reported its end."""
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

    def restore(self, abstract: dict[str, Any], step: int | Literal["best"] | None = None, *,
                verify: Iterable[str] = ()) -> tuple[int, dict[str, Any]] | None:
        """Load the newest intact checkpoint, or another one. Only the requested items are verified and read.

        If a running process deletes or replaces the checkpoint meanwhile, the steps are listed again.

        Args:
            abstract: by item name, a pytree of ``jax.ShapeDtypeStruct`` with the shardings to load onto (none: the
                first device). The value for "position" is ignored.
            step: step of the checkpoint; "best": that with the lowest val loss. None: the newest intact one.
            verify: other items to verify.

        Returns:
            The step and the items, with arrays exactly as saved; None if there is no such checkpoint. Without a step,
            damaged checkpoints are skipped with a note.

        Raises:
            ConfigError: there is no checkpoint at ``step``; the message lists the available ones.
            CheckpointError: the checkpoint at ``step``, or the best one, is damaged, the checkpoint is of another
                model, or each one was deleted while it was read.
            OSError: a file cannot be read.
        """
        self.wait()
        self._damaged.clear()
        return self._read(lambda: self._restore(abstract, step, {*abstract, *verify}))

    def _restore(self, abstract: dict[str, Any], step: int | Literal["best"] | None,
                 items: set[str]) -> tuple[int, dict[str, Any]] | None:
        steps = self.steps()
        if step is None:
            candidates = [other for other in reversed(steps) if other not in self._damaged]
        elif step == "best":
            best, _ = self._best_of(steps)
            candidates = [] if best is None else [best]
        elif step in steps:
            candidates = [step]
        else:
            there = ", ".join(map(str, steps)) or "none"
            raise ConfigError(f"{self.directory}: no checkpoint at step {step}; expected one of {there}")
        for candidate in candidates:
            try:
                with self._reading(candidate) as folder:
                    _verify(folder, items)
                    return candidate, _load(folder, abstract)
            except _DamagedError as error:
                if step is not None:
                    raise CheckpointError(f"{error}. There are checkpoints at steps {', '.join(map(str, steps))}"
                                          ) from error
                self._skip(candidate, error)
        return None

    def load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """The items of the newest intact checkpoint, at the step that :meth:`resume` has returned before.

        Their files are not read a second time to verify them. Later checkpoints count as damaged.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self._damaged = {other for other in self.steps() if other > step}
        return _load(self._folder(step), abstract)

    def resume(self, abstract: dict[str, Any], *, verify: Iterable[str] = ()) -> tuple[int, dict[str, Any]] | None:
        """:meth:`restore` for a run that resumes; None only if it has no checkpoint yet.

        No other process may write checkpoints in the folder: what a killed one has left is put back or deleted.

        Raises:
            CheckpointError: all checkpoints are damaged, or of another model.
            OSError: a file cannot be read.
        """
        self._put_back()
        found = self.restore(abstract, verify=verify)
        if found is None and self.steps():
            raise CheckpointError(f"{self.directory.parent}: all checkpoints are damaged; move the folder away to "
                                  "start over")
        if found is not None:
            self._clean_up()
        return found

    def has_optimizer_state(self, step: int) -> bool:
        """Whether training can resume from the checkpoint at a step; :meth:`keep_parameters` removes the state."""
        return OPTIMIZER in _items(self._folder(step))

    def check_optimizer_state(self, step: int) -> None:
        """Raises :class:`CheckpointError` if the checkpoint at a step has no optimizer state."""
        _check_optimizer_state(self._folder(step))

    def keep_parameters(self) -> None:
        """Keep only the parameters and variables of the best and the last checkpoint of a finished run.

        Training cannot resume from them. A process that dies during the call leaves intact checkpoints, with or without
        optimizer state; the next call removes the rest. Damaged checkpoints are left as they are, with a note.

        Raises:
            OSError: a file cannot be read, written or removed.
        """
        self.wait()
        self._clean_up()
        best, steps = self._read(lambda: self._best_of(self.steps()))
        for step in steps:
            folder = self.directory / str(step)
            if step not in (best, steps[-1]):
                self._delete(folder)
            elif (folder / OPTIMIZER).exists():
                self._unfinished.mkdir(exist_ok=True)
                sums = self._unfinished / CHECKSUMS  # in the checkpoint a killed process would leave it
                sums.write_bytes(_sums({name: checksum for name, checksum in _listed(folder).items()
                                        if not name.startswith(f"{OPTIMIZER}/")}))
                sync_entry(sums)
                sums.replace(folder / CHECKSUMS)
                sync_entry(folder)
                self._delete(folder / OPTIMIZER)  # only now: its files are no longer listed
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _finish(self, step: int, response: Any, loss: float | None) -> None:
        """On the background thread: wait for Orbax, write checksums, rename the checkpoint, and delete old ones."""
        with self._as_checkpoint_error(step):
            response.result()
            if jax.process_index() != 0:
                return
            written = self._unfinished / str(step)
            if loss is not None and math.isfinite(loss):
                (written / LOSS).write_bytes(orjson.dumps({"loss": float(loss)}))
            (written / CHECKSUMS).write_bytes(_sums({name: _sha256(written / name) for name in _files(written)}))
            sync(written)
            self._check_parent()
            self._put_in_place(written)
            self._damaged.discard(step)
        self._completed()
        try:
            self._prune(step)
        except OSError as error:
            raise CheckpointError(f"{self.directory}: the checkpoint of step {step} is complete, but an earlier one "
                                  f"cannot be deleted ({message(error)})") from error

    def _check_parent(self) -> None:
        """Raises if the folder of the run is another one than at the first save: Orbax makes deleted folders anew."""
        if _identity(self.directory.parent) != self._parent:
            raise FileNotFoundError(errno.ENOENT, "it was deleted or renamed", str(self.directory.parent))

    def _put_in_place(self, written: Path) -> None:
        """Renames a checkpoint that is on disk to its step, in place of one that may be there."""
        place, aside = self._places(int(written.name))
        replaces = place.exists()
        if replaces:
            place.rename(aside)
        try:
            written.rename(place)
        except OSError:
            self._put_back()
            raise
        sync_entry(self.directory)
        if replaces:
            self._delete(aside)

    def _put_back(self) -> None:
        """Renames checkpoints back to their steps that were renamed for others which never came."""
        for place, aside in map(self._places, self.steps()):
            if not place.exists():
                aside.rename(place)

    def _clean_up(self) -> None:
        """Puts back and deletes what a killed process may have left."""
        self._put_back()
        shutil.rmtree(self._unfinished, ignore_errors=True)
        for _, aside in map(self._places, self.steps()):
            if aside.exists():
                self._delete(aside)

    def _prune(self, newest: int) -> None:
        """Delete checkpoints that are no longer kept, after the checkpoint at ``newest`` is complete.

        Ignores damaged checkpoints and those later than ``newest``, left after an earlier one was restored.
        """
        best, steps = self._read(lambda: self._best_of(
            step for step in self.steps() if step <= newest and step not in self._damaged))
        for step in steps[:-self.keep]:
            if step != best:
                self._delete(self.directory / str(step))

    def _delete(self, folder: Path) -> None:
        """Deletes a folder; a process that dies meanwhile leaves none of it there, or all."""
        self._unfinished.mkdir(exist_ok=True)
        removed = self._unfinished / ".".join((*folder.relative_to(self.directory).parts, "removed"))
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _best_of(self, steps: Iterable[int]) -> tuple[int | None, list[int]]:
        """The step with the lowest val loss, if any has one, and the steps that are not found damaged."""
        losses = {}
        for step in steps:
            try:
                with self._reading(step) as folder:
                    losses[step] = _loss(folder)
            except _DamagedError as error:
                self._skip(step, error)
        known = {step: loss for step, loss in losses.items() if loss is not None}
        return min(known, key=known.__getitem__, default=None), list(losses)

    def _skip(self, step: int, error: _DamagedError) -> None:
        """Says, once, that a damaged checkpoint is skipped."""
        if step not in self._damaged:
            note(f"skipping the damaged checkpoint {error.folder}: {error.damage}")
        self._damaged.add(step)

    def _places(self, step: int) -> tuple[Path, Path]:
        """The folder of the checkpoint at a step, and that of one that is being replaced."""
        return self.directory / str(step), self.directory / f"{step}{REPLACED}"

    def _folder(self, step: int) -> Path:
        """Where the checkpoint at a step is."""
        place, aside = self._places(step)
        return aside if not place.exists() and aside.exists() else place

    @contextmanager
    def _reading(self, step: int) -> Iterator[Path]:
        """The folder of a checkpoint. An error within is a :class:`_GoneError` if the folder is not there any more."""
        folder = self._folder(step)
        before = _identity(folder)
        try:
            yield folder
        except Exception as error:
            if before is None or _identity(folder) != before:
                raise _GoneError(folder) from error
            raise

    def _read[T](self, read: Callable[[], T]) -> T:
        """Calls ``read`` again if a running process deletes or replaces a checkpoint meanwhile."""
        for _ in range(TRIES):
            with suppress(_GoneError):
                return read()
        raise CheckpointError(f"{self.directory}: a running process has deleted {TRIES} checkpoints, each while it was "
                              "read; repeat the command, or save less often with checkpoint.every_steps")

    @contextmanager
    def _as_checkpoint_error(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # TensorStore reports a full disk as a ValueError
            # Orbax's, which ended with the first error.
            warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
            if jax.process_index() == 0:
                shutil.rmtree(self._unfinished, ignore_errors=True)  # frees the space of the partial checkpoint
                if self._parent is not None and _identity(self.directory.parent) != self._parent:
                    with suppress(OSError):  # what was made anew, and is empty
                        self.directory.rmdir()
                        self.directory.parent.rmdir()
            earlier: list[int] = []
            with suppress(OSError):  # the folder cannot be read either
                earlier = [other for other in self.steps() if other not in self._damaged]
            raise CheckpointError(f"the checkpoint of step {step} could not be written to {self.directory}; check its "
                                  "free space and permissions. "
                                  + ("Earlier checkpoints are intact." if earlier else
                                     "There is no earlier checkpoint.")
                                  + f" ({_reason(error)})") from error


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

    _drop_background_tracebacks()
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name=JSON_ITEM)
    # The call that saves reports an unwritable folder.
    context.asynchronous.create_directories_asynchronously = False
    # Compression shrinks trained float32 weights by a tenth, for twice the CPU time.
    context.array.saving.use_compression = False
    return ocp, context


@functools.cache  # once
def _drop_background_tracebacks() -> None:
    """Drops the errors that Orbax and TensorStore report from threads, tasks and callbacks: they also raise the error
    that ends a save or a load, and one failed write may report hundreds."""
    def is_of_caller(record: logging.LogRecord) -> bool:
        traceback = record.exc_info[2] if record.exc_info else None
        return "orbax" not in record.pathname and not _is_background(traceback)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_of_caller)

    def unless_background(hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> None:
            traceback = arguments[2] if len(arguments) == 3 else arguments[0].exc_traceback
            if not _is_background(traceback):
                hook(*arguments)
        return called

    # TensorStore's callbacks arrive at the first.
    sys.excepthook = unless_background(sys.excepthook)
    sys.unraisablehook = unless_background(sys.unraisablehook)
    threading.excepthook = unless_background(threading.excepthook)


def _is_background(traceback: TracebackType | None) -> bool:
    """Whether an error was raised in a thread, task or callback of Orbax: no other package has called."""
    packages = set()
    while traceback is not None:
        packages.add(str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0])
        traceback = traceback.tb_next
    return not packages.isdisjoint(BACKGROUND) and packages <= BELOW | sys.stdlib_module_names


def _reason(error: Exception) -> str:
    """The reason of an error of Orbax in one line, without the specification that TensorStore may append."""
    return (message(error).strip() or type(error).__name__).splitlines()[0].partition(" [")[0]


def _load(folder: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    if JSON_ITEM in abstract:  # one process may read it alone, and Orbax waits for all
        with _naming(path := folder / JSON_ITEM / JSON_FILE):
            loaded[JSON_ITEM] = read(path, dict[str, Any])
    if abstract.keys() <= loaded.keys():
        return loaded
    ocp, context = _orbax()
    wanted: dict[str, Any] = {}
    place = folder.absolute()  # Orbax requires absolute paths
    items = _items(folder)
    with context:
        # Parameters first, so that the message about another model names one of them.
        for name, tree in sorted(abstract.items(), key=lambda item: item[0] != "parameters"):
            if name == JSON_ITEM:
                continue
            if name == OPTIMIZER and jax.tree.leaves(tree):
                _check_optimizer_state(folder)
            stored = _from_orbax(folder, lambda name=name: ocp.metadata(place, checkpointable_name=name).metadata
                                 ) if name in items else {}
            if stored is None:  # Orbax only logs why
                raise CheckpointError(f"{folder / name} cannot be read")
            if (difference := _difference(LEAF_NAMES.get(name, name), stored, tree)) is not None:
                raise CheckpointError(f"{folder} is a checkpoint of another model: {difference}")
            if jax.tree.leaves(tree):
                wanted[name] = jax.tree.map(_with_sharding, tree)
        loaded |= _from_orbax(folder, lambda: ocp.load_checkpointables(place, wanted)) if wanted else {}
    return {name: loaded.get(name, tree) for name, tree in abstract.items()}


def _from_orbax[T](folder: Path, read: Callable[[], T]) -> T:
    """What Orbax reads of a checkpoint; :class:`CheckpointError` if it cannot, as for a file that the device cannot
    read."""
    try:
        return read()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be read ({_reason(error)})") from error


def _check_optimizer_state(folder: Path) -> None:
    if OPTIMIZER not in _items(folder):
        raise CheckpointError(f"{folder} has no optimizer state, which sweep.py deletes from finished runs without "
                              "keep_all: training cannot resume. Start a new run from its parameters with "
                              "init_from")


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


def _verify(folder: Path, items: set[str]) -> None:
    """Verifies the files of these items of a checkpoint.

    Raises:
        _DamagedError: one is missing or altered.
        OSError: one cannot be read.
    """
    for name, checksum in _listed(folder).items():
        if "/" in name and name.split("/")[0] not in items:
            continue
        try:
            intact = _sha256(folder / name) == checksum
        except MISSING:
            raise _DamagedError(folder, f"{name} is missing") from None
        if not intact:
            raise _DamagedError(folder, f"{name} does not match its checksum: it is truncated or altered")


def _listed(folder: Path) -> dict[str, str]:
    """The checksums in ``SHA256SUMS`` by file; raises as :func:`_verify`."""
    try:
        content = _content(folder / CHECKSUMS)
    except MISSING:
        raise _DamagedError(folder, f"{CHECKSUMS} is missing") from None
    first, _, rest = content.partition(b"\n")
    if first == _heading(rest):
        content = rest  # earlier versions wrote none
    lines = [LINE.fullmatch(line) for line in content.removesuffix(b"\n").split(b"\n")]
    if not all(lines):
        raise _DamagedError(folder, f"{CHECKSUMS} is truncated or altered")
    return {os.fsdecode(line[2]): line[1].decode() for line in lines if line}


def _items(folder: Path) -> set[str]:
    """The items of a checkpoint that are not empty; raises as :func:`_verify`."""
    return {name.split("/")[0] for name in _listed(folder) if "/" in name}


def _sums(checksums: dict[str, str]) -> bytes:
    """The contents of ``SHA256SUMS``, in order of the files."""
    lines = b"".join(f"{checksums[name]}  {name}\n".encode() for name in sorted(checksums))
    return _heading(lines) + b"\n" + lines


def _heading(lines: bytes) -> bytes:
    """The first line of ``SHA256SUMS``, a comment for ``sha256sum``, from the others."""
    return f"# SHA-256 of the lines below: {hashlib.sha256(lines).hexdigest()}".encode()


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the name of a file to the ``OSError`` of a read, which lacks it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _content(path: Path) -> bytes:
    with _naming(path):
        return path.read_bytes()


def _sha256(path: Path) -> str:
    with _naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Loss(TypedDict):
    """``loss.json``."""

    loss: Finite


def _loss(folder: Path) -> float | None:
    """The val loss of a checkpoint, if it has one; raises as :func:`_verify`."""
    checksum = _listed(folder).get(LOSS)
    if checksum is None:
        return None
    try:
        content = _content(folder / LOSS)
    except MISSING:
        raise _DamagedError(folder, f"{LOSS} is missing") from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise _DamagedError(folder, f"{LOSS} does not match its checksum: it is truncated or altered")
    values = orjson.loads(content)
    check(values, _Loss, folder / LOSS)
    return values["loss"]


def _identity(folder: Path) -> tuple[int, int] | None:
    """What distinguishes a folder from another of the same name; None if there is none."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
