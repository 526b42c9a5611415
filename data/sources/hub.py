"""Datasets of the Hugging Face Hub, copies of them in a folder, and folders of ``save_to_disk``, by ``datasets``."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from data.sources.formats import ZstdFile
from data.sources.rows import Rows, check_column, column_parts, row_source, type_name
from data.sources.source import Selection, Source, file_state, one_line
from data.texts import Column, TextColumn
from support.errors import ConfigError, DataError

BATCH_ROWS = 256
"""Rows per batch of ``datasets``."""


def open_hub_dataset(source: str, selection: Selection, dataset: str, config: str | None) -> Source:
    """A dataset of the Hub by id; contacts the Hub only in ``pin`` and when read."""
    def pin(revision: str | None) -> Source:
        newest = _check_hub(source, dataset, None)
        licence = getattr(newest.card_data, "license", None) if newest.card_data is not None else None
        if isinstance(licence, list):
            licence = ", ".join(licence)
        options: dict[str, Any] = {"revision": revision or newest.sha}
        args = (dataset, config)
        if any(file.rfilename == f"{dataset.rpartition('/')[2]}.py" for file in newest.siblings or ()):
            # The dataset is a Python script, which is no longer supported. The Hub has a Parquet copy of most such
            # datasets, with a folder per configuration, on a branch with its own revisions.
            copy = _check_hub(source, dataset, revision or "refs/convert/parquet")
            names = sorted({file.rfilename.split("/")[0] for file in copy.siblings or () if "/" in file.rfilename})
            options, args = {"revision": copy.sha, "data_dir": _configuration(source, config, names)}, (dataset,)
        opened = open_dataset(source, source, selection, *args, **options)
        return replace(opened, version=options["revision"], licence=licence, selection=selection)

    return Source(source, lambda *places: pin(None).blocks(*places), source, lambda fraction: pin(None).cut(fraction),
                  pin=pin)


def open_dataset(source: str, state: str, selection: Selection, *args: str | None, **kwargs: Any) -> Source:
    """A column of ``datasets.load_dataset(*args, **kwargs)``, streamed."""
    column = selection.text_column

    def splits() -> dict[str, Rows]:
        return {name: _stream_rows(source, split, column) for name, split in _load(source, args, **kwargs).items()}

    return row_source(source, splits, selection, state=state)


def open_saved(source: str, folder: Path, files: Sequence[Path], selection: Selection) -> Source:
    """A column of a folder of ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""
    import datasets

    return _on_disk(source, lambda: datasets.load_from_disk(str(folder.resolve())), selection,
                    state=file_state(folder, files))


def open_arrow(source: str, file: Path, selection: Selection) -> Source:
    """A column of an Arrow file, in the streaming format, which ``datasets`` writes, or the random-access one."""
    import datasets
    import pyarrow.ipc
    from datasets.table import MemoryMappedTable

    def load() -> Any:
        with file.open("rb") as opened:
            streams = opened.read(6) != b"ARROW1"
        if streams:
            return datasets.Dataset.from_file(str(file.resolve()))
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        return datasets.Dataset(MemoryMappedTable(table, str(file)))

    return _on_disk(source, load, selection, state=file_state(file.parent, [file]))


def _on_disk(source: str, load: Callable[[], Any], selection: Selection, *, state: str) -> Source:
    """A column of the ``Dataset`` or ``DatasetDict`` that ``load`` returns."""
    import datasets

    column = selection.text_column

    def splits() -> dict[str, Rows]:
        with _dataset_errors(source, lambda: 0):
            found = load()
        whole = isinstance(found, datasets.Dataset)
        return {str(name): _saved_rows(source, split, column) for name, split in
                ({"train": found} if whole else found).items()}

    return row_source(source, splits, selection, state=state)


def is_saved(folder: Path) -> bool:
    """Whether it is a folder of ``save_to_disk``."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def _saved_rows(source: str, rows: Any, column: TextColumn) -> Rows:
    """Rows of a dataset on disk. A place in it is the number of a row."""

    def check() -> None:
        check_column(source, column, {field.name: type_name(field.type) for field in rows.features.arrow_schema})

    def read(start: Any) -> Iterator[tuple[Column, Any, float]]:
        first: int = (start or (0, None))[1] or 0
        name = column.find(rows.column_names)
        with _dataset_errors(source, lambda: first):
            selected = rows.select_columns([name]).with_format("arrow")
            while first < len(rows):
                table = selected[first : first + BATCH_ROWS]
                end = 0
                for found, end in column_parts(table.column(name).combine_chunks(), 0, column):
                    yield found, (0, first + end), (first + end) / len(rows)
                first += len(table)

    def cut(number: int, fraction: Fraction) -> int | None:
        place = math.ceil(fraction * len(rows) / BATCH_ROWS) * BATCH_ROWS
        return place if place < len(rows) else None

    return Rows(check, read, lambda: [len(rows)], cut)


def _load(source: str, args: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    import datasets
    import fsspec.compression

    if "zstd" not in fsspec.compression.compr:
        fsspec.compression.register_compression("zstd", lambda raw, **more: io.BufferedReader(ZstdFile(raw, **more)),
                                                "zst")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # logged errors are also raised
    try:
        builder = datasets.load_dataset_builder(*args, **kwargs)
        splits: Any = builder.as_streaming_dataset()
    except Exception as error:
        try:
            names = datasets.get_dataset_config_names(args[0], revision=kwargs.get("revision"))
        except Exception:
            names = []
        if names and "data_dir" not in kwargs:
            _configuration(source, args[1] if len(args) > 1 else None, names)
        raise DataError(f"{source}: cannot be opened as a dataset: {one_line(error)}") from error
    if getattr(builder.config, "on_mixed_types", None) is not None:
        # See rows.open_rows: raise an error rather than yield quoted texts.
        builder.config.on_mixed_types = None  # pyright: ignore[reportAttributeAccessIssue]
    return dict(splits)


def _configuration(source: str, wanted: str | None, names: Sequence[str]) -> str | None:
    """The given configuration, or the only one; :class:`ConfigError` if there is none, or several."""
    if wanted is not None and wanted not in names:
        raise ConfigError(f"data.source: {source} has no configuration {wanted!r}; it has {', '.join(names)}")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"data.source: {source} has several configurations; choose one as ID:CONFIG: "
                          f"{', '.join(names)}")
    return wanted or next(iter(names), None)


def _stream_rows(source: str, split: Any, column: TextColumn) -> Rows:
    """Rows of a dataset that is streamed. A place in a file is the number of rows read before its batch, the state of
    ``datasets`` at the batch, and a row of it."""

    def names() -> list[str]:
        return split.column_names or list(next(iter(split), {}))

    def check() -> None:
        with _dataset_errors(source, lambda: 0):
            schema = split.features.arrow_schema if split.features else None
            # Unknown types are checked in each batch.
            check_column(source, column, dict.fromkeys(names(), "null") if schema is None else
                         {field.name: type_name(field.type) for field in schema})

    def read(start: Any) -> Iterator[tuple[Column, Any, float | None]]:
        first, place = start or (0, None)
        done, state, skip = place or (0, None, 0)
        with _dataset_errors(source, lambda: done):
            sizes = split.info.splits or {}
            total = sizes[str(split.split)].num_examples if str(split.split) in sizes else None
            name = column.find(names())
            for number in range(first, split.num_shards):
                rows = split.shard(split.num_shards, number).select_columns([name]).with_format("arrow")
                if state is not None:
                    rows.load_state_dict(state)
                for table in rows.iter(BATCH_ROWS):
                    # The state is large, so save it once per batch.
                    following = rows.state_dict()
                    for found, end in column_parts(table.column(name).combine_chunks(), skip, column):
                        place = (done, state, end) if end < len(table) else (done + end, following, 0)
                        yield found, (number, place), min((done + end) / total, 1.0) if total else None
                    done, state, skip = done + len(table), following, 0
                state = None

    return Rows(check, read, lambda: [1] * split.num_shards)


@contextlib.contextmanager
def _dataset_errors(source: str, done: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise DataError(f"{source}: reading failed after {done():,} documents: {one_line(error)}") from error


def _check_hub(source: str, dataset: str, revision: str | None) -> Any:
    """Asks the Hub once; ``load_dataset`` would retry for half a minute without a network."""
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=20)
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise ConfigError(f"data.source: no file or folder {source!r}, and no Hugging Face dataset {dataset!r} (a "
                          "private one requires HF_TOKEN)") from error
    except Exception as error:
        raise DataError(f"{source}: no such file or folder, and the Hugging Face Hub cannot be reached "
                        f"({one_line(error)}); without a network, use a text file or folder, or a copy of the dataset "
                        "as JSON-lines or Parquet files") from error
