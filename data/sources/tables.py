"""Whole datasets as Arrow tables, from Parquet files or the Hugging Face Hub."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.sources.source import one_line
from support.errors import DataError


@contextlib.contextmanager
def parquet_file(path: Path, remedy: str = "") -> Iterator[Any]:
    """An open Parquet file; raises :class:`DataError` if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}{remedy}") from error


def parquet_tables(folder: Path, columns: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Arrow tables of ``train`` and ``test`` from Parquet files in the layout of a Hub dataset, in the folder or in its
    folder ``plain_text``; None without such files.

    Args:
        folder: the folder.
        columns: names of the columns; None: all.

    Raises:
        DataError: a file cannot be read, or lacks a column.
    """
    for place in (folder, folder / "plain_text"):
        paths = {name: sorted(place.glob(f"{name}*.parquet")) for name in ("train", "test")}
        if all(paths.values()):
            break
    else:
        return None
    import pyarrow

    tables = {}
    for name, found in paths.items():
        parts = []
        for path in found:
            with parquet_file(path, remedy="; download it again") as file:
                part = file.read()
            wanted = part.column_names if columns is None else columns
            if absent := set(wanted) - set(part.column_names):
                raise DataError(f"{path} has no column {min(absent)!r}; it has {', '.join(part.column_names)}")
            parts.append(part.select(wanted))
        tables[name] = pyarrow.concat_tables(parts)
    return tables


def hub_tables(dataset: str, columns: Sequence[str] | None = None, *, otherwise: str) -> dict[str, Any]:
    """Arrow tables of ``train`` and ``test`` of a dataset of the Hugging Face Hub, cached by ``datasets``.

    Args:
        dataset: its id, or a folder with a copy.
        columns: names of the columns; None: all.
        otherwise: what to do if it cannot be downloaded.

    Raises:
        DataError: it cannot be downloaded, or lacks a split.
    """
    import datasets
    import huggingface_hub
    from datasets import config

    offline, reason = config.HF_HUB_OFFLINE, None
    try:
        if not Path(dataset).is_dir():
            try:  # ask once: load_dataset would retry for half a minute before it reads its cache
                huggingface_hub.HfApi().dataset_info(dataset, timeout=20)
            except Exception as error:
                config.HF_HUB_OFFLINE, reason = True, error
        found: Any = datasets.load_dataset(dataset)
        if absent := {"train", "test"} - set(found):
            raise DataError(f"the dataset {dataset} has the splits {', '.join(found)}, and no {min(absent)}")
        return {name: found[name].select_columns(list(columns or found[name].column_names)).with_format("arrow")[:]
                for name in ("train", "test")}
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the dataset {dataset} is not cached and cannot be downloaded from the Hugging Face Hub "
                        f"({one_line(reason or error)}); {otherwise}") from error
    finally:
        config.HF_HUB_OFFLINE = offline
