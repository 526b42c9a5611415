"""Sources of text, streams of documents: Python's standard library and packages, files, and Hugging Face datasets.

A source is ``python-stdlib``, ``python-packages``, a path or glob, or the id of a dataset, ``ID`` or ``ID:CONFIG``. For
rows (JSON, JSON lines, CSV, Parquet, datasets) ``#split=NAME`` and ``#column=NAME`` may follow, and for text, JSON and
CSV ``#encoding=NAME``: ``allenai/c4:en#split=validation``, ``posts/*.jsonl.zst#column=body``,
``a.txt#encoding=latin-1``. A folder with a copy of a dataset can replace its id.
"""

import difflib
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data.sources import formats
from data.sources.formats import Format
from data.sources.hub import is_saved, open_arrow, open_dataset, open_hub_dataset, open_saved
from data.sources.images import DIGITS
from data.sources.packages import PACKAGES, open_packages
from data.sources.rows import open_rows
from data.sources.source import EVERYTHING, Selection, Source, file_state, left_out
from data.sources.splits import files_by_split, siblings
from data.sources.text import STDLIB, open_stdlib, open_texts
from support.errors import ConfigError

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_PATH_SUFFIXES = {".txt", ".md", ".py", ".html", ".xml", ".parquet", *formats.JSON_SUFFIXES, *formats.CSV_SUFFIXES,
                  *formats.PACKED_SUFFIXES}
_ABOUT = ("readme", "licen", "copying", "citation", "notice", "changelog", "dataset_info")
"""Beginnings of the names of files about a folder."""
_SUFFIX = re.compile(r"#(\w+)=([^#]*)$")


def open_source(source: str, selection: Selection = EVERYTHING) -> Source:
    """Opens the source of a name (see the module docstring).

    JSON, JSON lines, CSV and Parquet have a document per row; any other file is one text. Text may be packed (gzip,
    bzip2, xz, zstd) and, with a byte order mark, in UTF-16 or UTF-32. A folder is read as rows if it has JSON lines or
    Parquet, or if other JSON or CSV is most of it. Files of other kinds, and those that are not text, are left out with
    a note.

    Args:
        source: the name.
        selection: which part of it. The default split is train, with the validation split, or else test, for val,
            where the names of all files of a folder, or of those beside a train file, give their splits. With a number
            or a fraction to hold out, documents are only of the one split. The default column of rows is text, or else
            messages.

    Raises:
        ConfigError: the file or folder does not exist or is empty, is of a kind that is not read, or options do not
            fit.
        DataError: a file cannot be read.
    """
    if not source:
        raise ConfigError("data.source is empty; expected a file, a folder, a glob or the name of a data set")
    plain = source
    while found := _SUFFIX.search(plain):
        name, value = found.groups()
        if name not in ("split", "column", "encoding"):
            raise ConfigError(f"data.source: {source} ends in #{name}=; expected #split=NAME, #column=NAME or "
                              "#encoding=NAME")
        if getattr(selection, name) not in (None, value):
            raise ConfigError(f"data.source: the {name} in {source} differs from {name} {getattr(selection, name)}")
        selection = replace(selection, **{name: value})
        plain = plain[: found.start()]
    if selection.encoding is not None:
        formats.check_encoding(selection.encoding)
    return replace(_open(source, plain, selection), selection=selection)


def _open(source: str, plain: str, selection: Selection) -> Source:
    path = Path(plain).expanduser()
    if plain == STDLIB:
        _check_options(source, selection, "text", "split", "column", "encoding", "template")
        return open_stdlib(selection)
    if plain == PACKAGES:
        _check_options(source, selection, "text", "split", "column", "encoding", "template")
        return open_packages(selection)
    if path.is_dir():
        return replace(_open_folder(source, path, selection), folder=path)
    if path.is_file():
        form = formats.inspect(path, selection.encoding)
        if form.what == formats.ARROW:
            _check_options(source, selection, "an Arrow file", "encoding")
            return open_arrow(source, path, selection)
        others = [] if selection.split is not None or selection.names_val else [
            other for other in siblings(path) if other.stat().st_size
            and formats.inspect(other, selection.encoding).kind == form.kind]
        return _open_files(source, path.parent, [path, *others], selection, by_name=bool(others))
    if glob.has_magic(plain):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise ConfigError(f"data.source: no file matches {plain}")
        return _open_files(source, Path(os.path.commonpath([file.parent for file in files])), files, selection)
    copy, _, config = plain.rpartition(":")
    if config and (folder := Path(copy).expanduser()).is_dir() and copy:
        state = file_state(folder, _visible_files(folder))
        opened = open_dataset(source, state, selection, str(folder.resolve()), config)
        return replace(opened, folder=folder)
    if plain.startswith((".", "~", "/")) or path.suffix.lower() in _PATH_SUFFIXES or not _DATASET_ID.fullmatch(plain):
        raise ConfigError(f"data.source: no file or folder {plain!r}; expected {STDLIB}, {PACKAGES}, a text file or "
                          "folder, or the id of a Hugging Face dataset")
    if plain == DIGITS:
        raise ConfigError(f"data.source: {DIGITS} is images; expected data.tokenizer pixels")
    if alike := difflib.get_close_matches(plain, [STDLIB, PACKAGES], 1):
        raise ConfigError(f"data.source: no source {plain!r}; perhaps you meant {alike[0]}")
    dataset, _, config = plain.partition(":")
    _check_options(source, selection, "a dataset", "encoding")
    return open_hub_dataset(source, selection, dataset, config or None)


def _open_folder(source: str, folder: Path, selection: Selection) -> Source:
    files = _visible_files(folder)
    if is_saved(folder):
        _check_options(source, selection, "a folder of save_to_disk", "encoding")
        return open_saved(source, folder, files, selection)
    for place in sorted({file.parent for file in files}):
        if is_saved(place):
            raise ConfigError(f"data.source: {source} has a folder of save_to_disk, {place}; give that folder")
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text(errors="replace"), re.MULTILINE):
        _check_options(source, selection, "a dataset", "encoding")
        return open_dataset(source, file_state(folder, files), selection, str(folder.resolve()))
    return _open_files(source, folder, files, selection, folder=True, by_name=True)


def _visible_files(folder: Path) -> list[Path]:
    """The files below a folder, without hidden ones; links to folders are followed, to each folder once."""
    files, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (resolved := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(resolved)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(place, name) for name in names if not name.startswith(".") and Path(place, name).is_file()]
    return sorted(files)


def _open_files(source: str, root: Path, files: Sequence[Path], selection: Selection, *, folder: bool = False,
                by_name: bool = False) -> Source:
    """Opens files of one kind; in a folder, those of the kind that it is read as."""
    found = {file: formats.inspect(file, selection.encoding) for file in files if file.stat().st_size}
    if not found:
        raise ConfigError(f"data.source: no text in the folder {source}" if folder else
                          f"data.source: {source} is empty")
    read = {file: form for file, form in found.items() if form.kind is not None}
    if not read:
        (name, form), *_ = found.items()
        if len(found) == 1:
            raise ConfigError(f"data.source: {name} is {form.what}; expected Parquet, or text, JSON or CSV (also as "
                              ".gz, .bz2, .xz or .zst; encoding names another than UTF-8)")
        raise ConfigError(f"data.source: no text in {source}: none of its {len(found):,} files is text; {name} is "
                          f"{form.what}")
    chosen = _chosen_in_folder(source, read) if folder else read
    kinds = {form.kind for form in chosen.values()}
    if len(kinds) > 1:
        raise ConfigError(f"data.source: {source} matches files of several kinds "
                          f"({', '.join(sorted(map(str, kinds)))}); expected one")
    as_text = kinds == {"text"}
    if as_text and folder:  # a file about the folder has no split
        rest = {file: form for file, form in chosen.items() if not file.name.lower().startswith(_ABOUT)}
        chosen = rest if len(files_by_split(root, rest, by_name=True)) > 1 else chosen
    others = [(file.relative_to(root).as_posix(), form.what) for file, form in found.items() if file not in chosen]
    notes = left_out(f"{source} is read as {'texts' if as_text else 'rows'}",
                     [f"{name} ({what})" if what else name for name, what in others])
    if as_text:
        _check_options(source, selection, "text", "split", "column", "template")
        opened = open_texts(source, root, chosen, selection, by_name=by_name)
    else:
        if kinds == {"parquet"}:
            _check_options(source, selection, "Parquet", "encoding")
        opened = open_rows(source, root, chosen, selection, by_name=by_name or selection.split is not None)
    return replace(opened, notes=(*opened.notes, *notes))


def _chosen_in_folder(source: str, files: dict[Path, Format]) -> dict[Path, Format]:
    """The files that are read of a folder: its JSON lines or Parquet; otherwise JSON or CSV, if that is most of its
    bytes; otherwise all, as texts. Files about the folder do not count."""
    sizes: dict[str, int] = dict.fromkeys(("lines", "parquet", "json", "csv", "text"), 0)
    by_kind: dict[str, dict[Path, Format]] = {kind: {} for kind in sizes}
    for file, form in files.items():
        if not file.name.lower().startswith(_ABOUT):
            lines = form.kind == "json" and ".json" not in map(str.lower, file.suffixes)
            kind = "lines" if lines else str(form.kind)
            by_kind[kind][file] = form
            sizes[kind] += file.stat().st_size
    if sizes["lines"] and sizes["parquet"]:
        raise ConfigError(f"data.source: {source} has both JSON-lines and Parquet files; select one kind, as "
                          f"'{source}/**/*.parquet'")
    kind = "lines" if sizes["lines"] else "parquet" if sizes["parquet"] else max(sizes, key=sizes.__getitem__)
    if kind == "text" or not sizes[kind]:
        return {file: form._replace(kind="text") for file, form in files.items() if form.kind != "parquet"}
    return by_kind[kind]


def _check_options(source: str, selection: Selection, what: str, *names: str) -> None:
    """Raises :class:`ConfigError` if options are given that a source does not have."""
    for name in names:
        if name in selection.given:
            raise ConfigError(f"{name} is {selection.given[name]}, but {source} is {what} and has no {name}; leave it "
                              "out")
