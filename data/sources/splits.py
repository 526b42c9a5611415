"""The splits that the names of files give."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from data.sources import formats
from data.sources.source import Selection
from support.errors import ConfigError

_VALIDATION = ("validation", "valid", "val", "dev")
HELD_OUT = (*_VALIDATION, "test")
"""Names of splits that become val, the first that exists."""
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test",
          **dict.fromkeys(_VALIDATION, "validation")}
_NO_TOPICS = {"of", "part", "shard", "chunk", "data", *(suffix[1:] for suffix in (
    *formats.JSON_SUFFIXES, *formats.CSV_SUFFIXES, *formats.PACKED_SUFFIXES, ".parquet"))}


def split_names(files: Sequence[Path]) -> list[str] | None:
    """The split of each file, if all are laid out by splits: each is in a folder that is called as a split, or has one
    in its name, and there is a train file for each of the other words in their names."""
    found = [_split_and_topic(file) for file in files]
    if any(("train", topic) not in found for _, topic in found):
        return None
    return [str(split) for split, _ in found]


def siblings(file: Path) -> list[Path]:
    """The files of other splits beside a train file, whose names differ from its own in the split and in numbers."""
    split, topic = _split_and_topic(Path(file.name))
    if split != "train":
        return []
    return [other for other in sorted(file.parent.iterdir()) if not other.name.startswith(".") and other.is_file()
            and _split_and_topic(Path(other.name)) in [(name, topic) for name in HELD_OUT]]


def files_by_split(root: Path, files: Collection[Path], *, by_name: bool) -> dict[str, list[Path]]:
    """The files of each split; all are train if their names give no splits, or may not."""
    names = split_names([file.relative_to(root) for file in files]) if by_name else None
    groups: dict[str, list[Path]] = {}
    for file, name in zip(files, names or ["train"] * len(files), strict=True):
        groups.setdefault(name, []).append(file)
    return dict(sorted(groups.items()))


def chosen_splits(splits: Collection[str], source: str, selection: Selection) -> dict[bool | None, str]:
    """The splits that are read, by whether they are val. None: some of its documents are.

    Raises:
        ConfigError: the source does not have the split of the selection.
    """
    if selection.split is not None and selection.split not in splits:
        raise ConfigError(f"data.source: {source} has no split {selection.split!r}; it has {', '.join(splits)}")
    chosen = selection.split or ("train" if "train" in splits else next(iter(splits)))
    val = next((name for name in HELD_OUT if name in splits and name != chosen), None)
    return {None: chosen} if val is None or selection.split is not None or selection.names_val else {
        False: chosen, True: val}


def splits_note(source: str, groups: dict[str, list[Path]], selection: Selection) -> tuple[str, ...]:
    """A note about the splits that the names of files give, if any."""
    if len(groups) == 1 or selection.split is not None:
        return ()
    chosen = chosen_splits(groups, source, selection)
    val = chosen.get(True)
    if val is not None and [Path(source)] == groups["train"]:
        names = ", ".join(file.name for file in groups[val])
        return (f"{source}: val is {names} beside it; val_share holds out a part of the file instead",)
    counts = ", ".join(f"{name} ({len(group):,})" for name, group in groups.items())
    as_val = "" if val is None else f", and {val} as val"
    return (f"{source}: the names of its files give the splits {counts}, of which train is read{as_val}; a glob of the "
            "files reads all of them as one",)


def _split_and_topic(file: Path) -> tuple[str | None, frozenset[str]]:
    """The split that a path names, and the other words of its name."""
    folder = next((part.lower() for part in reversed(file.parts[:-1]) if part.lower() in _WORDS), None)
    words = [word for word in re.split(r"[^a-z0-9]+", file.as_posix().lower()) if word.isalpha()]
    split = folder or next((word for word in reversed(words) if word in _WORDS), None)
    topic = frozenset(words) - _WORDS.keys() - _NO_TOPICS if folder is None else frozenset()
    return None if split is None else _WORDS[split], topic
