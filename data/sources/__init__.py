"""Sources of text, streams of documents: Python's standard library, files, and Hugging Face datasets.

A source is ``python-stdlib``, a path or glob, or the id of a dataset, ``ID`` or ``ID:CONFIG``. For rows (JSON, JSON
lines, Parquet, datasets) ``#split=NAME`` and ``#column=NAME`` may follow: ``allenai/c4:en#split=validation``,
``posts/*.jsonl.zst#column=body``. A folder with a copy of a dataset can replace its id.
"""

import difflib
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from data.sources.hub import open_dataset, open_hub_dataset
from data.sources.images import DIGITS
from data.sources.rows import COMPRESSIONS, JSON_SUFFIXES, open_rows
from data.sources.source import Selection, Source, file_state, left_out
from data.sources.text import STDLIB, open_stdlib, open_texts
from support.errors import ConfigError

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_PATH_SUFFIXES = {".txt", ".md", ".py", ".csv", ".tsv", ".html", ".xml", ".parquet", *JSON_SUFFIXES, *COMPRESSIONS}
_SUFFIX = re.compile(r"#(\w+)=([^#]*)$")


def open_source(source: str, *, split: str | None = None, column: str | None = None,
                val_documents: int | None = None, val_share: float | None = None) -> Source:
    """Opens the source of a name (see the module docstring).

    JSON, JSON-lines (also compressed: .gz, .zst) and Parquet files, and folders of them, have a document per row. Any
    other file is one text, and the files of any other folder are a text each.

    Args:
        source: the name.
        split: split of rows; default: train, with the validation split, if any, for val.
        column: column of rows; default: text.
        val_documents: number of documents to hold out; rows are then only of ``split``.
        val_share: fraction of documents, or of a single text, to hold out; rows are then only of ``split``.

    Raises:
        ConfigError: the file or folder does not exist or is empty, or options do not fit.
    """
    plain = source
    options = {"split": split, "column": column}
    while found := _SUFFIX.search(plain):
        if found[1] not in options:
            raise ConfigError(f"data.source: {source} ends in #{found[1]}=; expected #split=NAME or #column=NAME")
        if options[found[1]] not in (None, found[2]):
            raise ConfigError(f"data.source: the {found[1]} in {source} differs from --{found[1]} {options[found[1]]}")
        options[found[1]] = found[2]
        plain = plain[: found.start()]
    selection = Selection(**options, val_documents=val_documents, val_share=val_share)
    opened = _open(source, plain, selection)
    return replace(opened, selection=selection)


def _open(source: str, plain: str, selection: Selection) -> Source:
    path = Path(plain).expanduser()
    if plain == STDLIB:
        _check_no_rows(source, selection)
        return open_stdlib(selection)
    if path.is_dir():
        return replace(_open_folder(source, path, selection), folder=path)
    if path.is_file():
        return _open_files(source, path.parent, [path], selection)
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
    if plain.startswith((".", "~", "/")) or path.suffix in _PATH_SUFFIXES or not _DATASET_ID.fullmatch(plain):
        raise ConfigError(f"data.source: no file or folder {plain!r}; expected {STDLIB}, a text file or folder, or the "
                          "id of a Hugging Face dataset")
    if plain == DIGITS:
        raise ConfigError(f"data.source: {DIGITS} is images; expected data.tokenizer pixels")
    if difflib.get_close_matches(plain, [STDLIB]):
        raise ConfigError(f"data.source: no source {plain!r}; perhaps you meant {STDLIB}")
    dataset, _, config = plain.partition(":")
    return open_hub_dataset(source, selection, dataset, config or None)


def _open_folder(source: str, folder: Path, selection: Selection) -> Source:
    files = _visible_files(folder)
    rows = [file for file in files if file.suffix == ".parquet" or (_kind(file) == "json" and file.suffix != ".json")]
    if not rows:
        _check_no_rows(source, selection)
        filled = [file for file in files if file.stat().st_size]
        if not filled:
            raise ConfigError(f"data.source: no text in the folder {source}")
        return open_texts(source, folder, filled, selection)
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text(errors="replace"), re.MULTILINE):
        return open_dataset(source, file_state(folder, files), selection, str(folder.resolve()))
    if len({_kind(file) for file in rows}) > 1:
        raise ConfigError(f"data.source: {source} has both JSON-lines and Parquet files; select one kind, as "
                          f"'{source}/**/*.parquet'")
    opened = open_rows(source, folder, rows, selection)
    others = [file.relative_to(folder).as_posix() for file in files if file not in set(rows)]
    return replace(opened, notes=left_out(f"{source} is read as rows", others))


def _visible_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*"))
            if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()]


def _open_files(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Opens files, which must all be of one kind."""
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"data.source: {source} matches files of several kinds ({', '.join(sorted(kinds))}); "
                          "expected one")
    if all(file.stat().st_size == 0 for file in files):
        raise ConfigError(f"data.source: {source} is empty")
    if kinds != {"text"}:
        return open_rows(source, root, files, selection)
    _check_no_rows(source, selection)
    return open_texts(source, root, [file for file in files if file.stat().st_size], selection)


def _kind(path: Path) -> Literal["json", "parquet", "text"]:
    compressed = path.suffix in COMPRESSIONS
    if (Path(path.stem).suffix if compressed else path.suffix) in JSON_SUFFIXES:
        return "json"
    if compressed:
        raise ConfigError(f"data.source: {path} is compressed; expected JSON lines (.jsonl.gz, .jsonl.zst) or an "
                          "uncompressed file")
    return "parquet" if path.suffix == ".parquet" else "text"


def _check_no_rows(source: str, selection: Selection) -> None:
    for name in ("split", "column"):
        if getattr(selection, name) is not None:
            raise ConfigError(f"--{name} {getattr(selection, name)}: {source} is text and has no {name}; leave it out")
