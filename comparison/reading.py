"""The runs of a command line, each read again only when its files have changed."""

import glob
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.runs import NotARunError, Run, load_run, name_runs
from support.errors import ConfigError, RunError
from training.window_losses import FILE as WINDOW_LOSSES


@dataclass(frozen=True)
class Found:
    """The runs in the given folders."""

    runs: list[Run]
    """Their names are unique."""
    damaged: list[RunError]
    """Runs that cannot be drawn."""
    notes: list[str]
    passed_over: list[str]
    """Folders that are not runs, each with the reason."""


class Reader:
    """Reads runs.

    Args:
        paths: run folders; other folders are skipped. A pattern such as ``runs/*`` is expanded at each read.
        awaited: also skip folders that do not exist yet.
        may_be_empty: read runs without logged steps, without curves; otherwise they are damaged.
    """

    def __init__(self, paths: Sequence[Path], *, awaited: bool = False, may_be_empty: bool = False):
        self.paths, self.awaited, self.may_be_empty = paths, awaited, may_be_empty
        self._read: dict[Path, tuple[Any, Run | Exception, list[str]]] = {}

    def state(self) -> Any:
        """A value that changes when any file has changed."""
        return [(path, _state(path)) for path in self._folders()]

    def read(self) -> Found:
        """Read every run.

        Raises:
            ConfigError: no run is given, a folder is given twice or does not exist, or none is a run.
        """
        folders = self._folders()
        resolved = [path.resolve() for path in folders]
        for path, place in zip(folders, resolved, strict=True):
            if resolved.count(place) > 1:
                raise ConfigError(f"{path}: given twice; expected each run once")
        found = Found([], [], [], [])
        for path in folders:
            result, notes = self._load(path)
            if isinstance(result, Run):
                found.runs.append(result)
            elif isinstance(result, RunError):
                found.damaged.append(result)
            else:
                found.passed_over.append(str(result))
            found.notes.extend(notes)
        if not (found.runs or found.damaged or self.awaited):
            raise ConfigError(found.passed_over[0] if found.passed_over else
                              f"{', '.join(map(str, self.paths))}: no such folder; expected run folders, such as one "
                              "from: python train.py configs/quickstart.py --attention softmax --run-dir runs/softmax")
        found.runs[:] = name_runs(found.runs)
        return found

    def _folders(self) -> list[Path]:
        return [path for named in self.paths
                for path in (map(Path, sorted(glob.glob(str(named)))) if _is_pattern(named) else [named])]

    def _load(self, path: Path) -> tuple[Run | Exception, list[str]]:
        """The run or the error, and the notes of reading it."""
        state = _state(path)
        if path not in self._read or self._read[path][0] != state:
            with warnings.catch_warnings(record=True, category=UserWarning) as caught:
                warnings.simplefilter("always")
                try:
                    result = load_run(path, may_be_empty=self.may_be_empty)
                except (RunError, NotARunError) as error:
                    if not (path.exists() or self.awaited):
                        raise
                    result = error
                except OSError as error:
                    result = RunError(f"{path}: cannot be read ({error.strerror})")
            self._read[path] = state, result, [str(warning.message) for warning in caught]
        return self._read[path][1:]


def _is_pattern(path: Path) -> bool:
    return glob.has_magic(str(path)) and not path.exists()


def _state(folder: Path) -> list[tuple[int, int] | None]:
    """Times and sizes of the files that are read."""
    found = []
    for name in ("config.json", "environment.json", "metrics.jsonl", "evaluation.json", WINDOW_LOSSES, "samples"):
        try:
            stat = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size))
    return found
