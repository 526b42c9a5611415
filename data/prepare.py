"""Converts text or images to token files: ``python -m data.prepare SOURCE --tokenizer NAME --out DIR``.

Several processes tokenize the text in chunks that depend only on the text. Repeating an interrupted command resumes it
and gives the same files. :mod:`data.token_files` describes the files in ``DIR``.

On several machines, each makes a part, and one joins them: the same files as of one machine. ::

    python -m data.prepare SOURCE --tokenizer NAME --out DIR --part 3/16
    python -m data.prepare --join DIR

Images, which have the tokenizer ``pixels``, are read and written at once: :mod:`data.sources.images`.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import contextlib
import functools
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import DataConfig
from data import chats, journal, parts, synthetic_tasks, texts, token_files, tokenizers, verification
from data.parts import Part, PartName
from data.sources import images, open_source
from data.sources.source import EVERYTHING, Block, Selection, Source
from support.command import note, run_command, status
from support.errors import ConfigError, DataError
from support.files import cache_folder
from support.flags import checked_flags, flags_by_field
from support.machine import cores
from support.progress import progress_bar

_VERSION = 4  # part of the cache folder's name: increase it when the tokens of a source change
_PLACES = 3  # increase it when the places in a source change
_SMALL_SPLIT, _FEW_DOCUMENTS = 0.01, 100
"""A split with a smaller fraction of the tokens and fewer documents is reported to be small."""


def prepare(source: str, tokenizer: str, directory: Path, selection: Selection = EVERYTHING, *,
            workers: int | None = None, progress: bool = True) -> dict[str, Any]:
    """Writes the token files of ``source`` to ``directory`` and returns the contents of its ``meta.json``.

    The folder is written under a temporary name and renamed when complete. An interrupted preparation resumes.

    Args:
        source: as in :func:`data.sources.open_source`; of images, as in :mod:`data.sources.images`.
        tokenizer: as in :func:`data.tokenizers.load`, or pixels for images.
        directory: output folder.
        selection: which part of the source, and what is held out; of images, everything.
        workers: number of tokenizing processes; default: one per core. The files do not depend on it.
        progress: whether to show a progress bar.

    Raises:
        ConfigError: unknown source or tokenizer, or ``directory`` is not empty.
        DataError: the source cannot be read, or the files cannot be written.
    """
    directory = Path(directory).absolute()
    if tokenizer == tokenizers.PIXELS:
        for name, value in selection.given.items():
            raise ConfigError(f"{name} is {value}, but {source} is images, whose splits are fixed; leave it out")
        token_files.check_free(directory)
        with journal.lock(directory):
            return images.write_images(source, directory)
    opened = _open(source, directory, selection, workers)
    encoding = tokenizers.load(tokenizer)
    with journal.lock(directory):
        return _write(opened, encoding, directory, progress, workers)


def prepare_part(name: PartName, source: str, tokenizer: str, directory: Path, selection: Selection = EVERYTHING, *,
                 workers: int | None = None, progress: bool = True) -> Part:
    """Tokenizes a part of ``source`` for :func:`join_parts`, in the folder of the part.

    Parts are of about equal size. A file of compressed rows, of CSV or of a JSON array, a row group of Parquet, and a
    file of a dataset belong to one part. A complete part is returned as it is, and an interrupted one resumes.

    Args:
        name: which part.
        source, tokenizer, directory, selection, workers, progress: as in :func:`prepare`, and the same for all parts.

    Raises:
        ConfigError: as in :func:`prepare`, the source is images, or the folder has a part made with other settings.
        DataError: as in :func:`prepare`, or the part is damaged.
    """
    if tokenizer == tokenizers.PIXELS:
        raise ConfigError(f"part is {name}, but data.tokenizer pixels is for images, which are prepared in one piece")
    directory = Path(directory).absolute()
    encoding = tokenizers.load(tokenizer)
    opened = _open(source, directory, selection, workers)
    folder = name.folder(directory)
    request = _request(opened, tokenizers.vocabulary(encoding))
    with journal.lock(folder):
        if (folder / "part.json").is_file():
            part = Part.read(folder)
            part.check_request(request)
            status(f"the part {name} is complete already")
            return part
        return _write_part(name, opened, encoding, folder, request, progress, workers)


def join_parts(directory: Path, *, progress: bool = True) -> dict[str, Any]:
    """Writes the token files of all parts of ``directory``, and returns the contents of its ``meta.json``.

    The files are those of :func:`prepare`. Joined token files are left as they are. An interrupted join resumes.

    Raises:
        ConfigError: parts are missing, doubled, or of different sources, tokenizers or settings; or ``directory`` is
            not empty.
        DataError: a part is damaged, or the files cannot be written.
    """
    directory = Path(directory).absolute()
    with journal.lock(directory):
        exists = token_files.has_token_files(directory)
        if exists and not parts.parts_folder(directory).is_dir():
            status(f"{directory} has token files already, and there are no parts to join")
            return token_files.read_meta(directory)
        found = parts.find_parts(directory)
        if not exists:
            return _join(found, directory, progress)
        origin, tokenizer = found[0].meta["origin"], found[0].vocabulary.tokenizer
        meta = token_files.read_meta(directory)
        if any(meta.get(name) != value for name, value in {**origin, "tokenizer": tokenizer}.items()):
            raise ConfigError(f"{directory} has token files of {meta.get('source')} and {meta['tokenizer']} already; "
                              f"its parts are of {origin['source']} and {tokenizer}")
        status(f"{directory} is joined already")
        return meta


def _open(source: str, directory: Path, selection: Selection, workers: int | None) -> Source:
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}; expected a number above 0")
    token_files.check_free(directory)
    opened = open_source(source, selection)
    if opened.folder is not None and directory.is_relative_to(opened.folder.absolute()):
        raise ConfigError(f"out {directory} is inside the source {source}; choose a folder outside of it")
    return opened


def ensure(data: DataConfig) -> Path:
    """The folder of the token files of a config.

    Without ``data.dir``, ``data.source`` is prepared on first use in ``$XDG_CACHE_HOME/lineargpt/data`` (``~/.cache``),
    by one process while others wait.

    Raises:
        ConfigError: ``data.dir`` has no token files, or those of another tokenizer; or as in :func:`prepare`.
        DataError: as in :func:`prepare`.
    """
    tokenizers.check_name(data.tokenizer)
    if data.dir is not None:
        return _find(data, Path(data.dir).expanduser())
    make: Callable[[Path], object]
    if (task := synthetic_tasks.parse(data.source)) is not None:
        if data.tokenizer != "bytes":
            raise ConfigError(f"data.tokenizer is {data.tokenizer}; expected bytes for {data.source}")
        name, make = task.folder_name, task.write
    elif data.tokenizer == tokenizers.PIXELS:
        name = _folder_name(data.source, images.source_state(data.source), data.tokenizer)
        make = functools.partial(images.write_images, data.source)
    else:
        source = open_source(data.source)
        name = _folder_name(source.name, source.state, data.tokenizer, source.version)
        make = lambda folder: _write(source, tokenizers.load(data.tokenizer), folder, progress=True)  # noqa: E731
    directory = cache_folder("data") / name
    if not token_files.has_token_files(directory):
        with journal.lock(directory):
            if not token_files.has_token_files(directory):  # another process has not made it meanwhile
                try:
                    make(directory)
                except (ConfigError, DataError) as error:
                    if task is not None or (similar := synthetic_tasks.similar_task(data.source)) is None:
                        raise
                    raise type(error)(f"{error}; perhaps you meant the task {similar}") from error
    return directory


def _folder_name(source: str, state: str, tokenizer: str, version: str | None = None) -> str:
    key = hashlib.sha256(f"{_VERSION} {source} {state}".encode(errors="surrogateescape")).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(source).name} {version or ''}").strip("-.")
    return f"{label}-{tokenizer}-{key}"


def _find(data: DataConfig, directory: Path) -> Path:
    """The existing folder of token files, checked against the tokenizer of the config."""
    if not token_files.has_token_files(directory):
        raise ConfigError(f"data.dir: no token files in {data.dir} (no meta.json); create them with: "
                          f"python -m data.prepare {data.source} --tokenizer {data.tokenizer} --out {data.dir}")
    meta = token_files.read_meta(directory)
    if (found := meta["tokenizer"]) != data.tokenizer:
        raise ConfigError(f"data.tokenizer is {data.tokenizer}, but {data.dir} has tokens of {found}; set "
                          f"data.tokenizer {found} or another data.dir")
    token_files.check_fingerprint(directory, meta, tokenizers.FINGERPRINTS.get(found))
    return directory


def verify_files(directory: Path) -> dict[str, Any]:
    """:func:`data.token_files.verify`, and a comparison of the vocabulary's fingerprint with that of the tokenizer.

    Raises:
        ConfigError: there are no token files.
        DataError: as there; or the tokenizer differs, or cannot be loaded.
    """
    verification.forget(directory)
    meta = token_files.verify(directory)
    if meta.get("tokenizer_fingerprint") is not None:
        token_files.check_fingerprint(directory, meta, tokenizers.fingerprint(tokenizers.load(meta["tokenizer"])))
    return meta


def _write(source: Source, encoding: Any, directory: Path, progress: bool, workers: int | None = None,
           ) -> dict[str, Any]:
    """Writes the token files. The caller holds the lock of ``directory``."""
    token_files.check_free(directory)
    vocabulary = tokenizers.vocabulary(encoding)
    with journal.UnfinishedFolder(directory, _request(source, vocabulary)) as unfinished:
        state = _resume(unfinished)
        source = _pinned(source, state)
        writer = unfinished.open_writer(token_files.TokenFilesWriter, vocabulary)

        def add(encoded: tokenizers.Encoded, block: Block, state: dict[str, Any]) -> dict[str, Any]:
            return _add(writer, source.selection, block, encoded, state, source.version)

        with tokenizers.Workers(encoding, _processes(encoding, source, workers)) as pool:
            blocks = pool.encode((block.texts, block) for block in source.blocks(state["start"]))
            state = _add_all(unfinished, state, blocks, add, source.name, progress)
        return _finish(unfinished, writer, _origin(source), state)


def _write_part(name: PartName, source: Source, encoding: Any, folder: Path, request: dict[str, Any], progress: bool,
                workers: int | None) -> Part:
    """Writes a part. The caller holds the lock of ``folder``."""
    begin, end = (Fraction(number, name.parts) for number in (name.number - 1, name.number))
    with journal.UnfinishedFolder(folder, request) as unfinished:
        state = _resume(unfinished)
        source = _pinned(source, state)
        writer = unfinished.open_writer(parts.PartWriter, tokenizers.vocabulary(encoding))

        def add(encoded: tokenizers.Encoded, block: Block, state: dict[str, Any]) -> dict[str, Any]:
            writer.write(encoded, block)
            return {**state, "start": block.following, "revision": source.version, "splits": writer.state()}

        def blocks() -> Iterator[tuple[Any, Block]]:
            start = state["start"] or (source.cut(begin) if begin else None)
            for block in source.blocks(start, source.cut(end) if end < 1 else None):
                done = block.fraction_done  # of the source; of the part for the progress bar
                yield block.texts, block if done is None else block._replace(
                    fraction_done=min(max(float((Fraction(done) - begin) * name.parts), 0.0), 1.0))

        with tokenizers.Workers(encoding, _processes(encoding, source, workers)) as pool:
            _add_all(unfinished, state, pool.encode(blocks()), add,
                     f"{Path(source.name).name} {name.number} of {name.parts}", progress)
        with unfinished.write_errors():
            writer.finish(name, request, _origin(source))
            unfinished.finish()
    return Part.read(folder)


def _join(found: Sequence[Part], directory: Path, progress: bool) -> dict[str, Any]:
    """Writes the token files of parts. The caller holds the lock of ``directory``."""
    token_files.check_free(directory)
    origin = found[0].meta["origin"]
    selection = Selection(*(origin.get(field.name) for field in fields(Selection)))
    checksums = hashlib.sha256("".join(part.meta["sha256"] for part in found).encode()).hexdigest()
    with journal.UnfinishedFolder(directory, {"checksum_of_the_parts": checksums}) as unfinished:
        state = _resume(unfinished)
        writer = unfinished.open_writer(token_files.TokenFilesWriter, found[0].vocabulary)
        try:
            state = _add_all(
                unfinished, state, parts.read_blocks(found, state["start"]),
                lambda encoded, block, state: _add(writer, selection, block, encoded, state, None),
                directory.name, progress)
        except parts.DamagedPartError:
            unfinished.state = None  # its tokens have been written
            raise
        return _finish(unfinished, writer, origin, state)


def _add_all(unfinished: journal.UnfinishedFolder, state: dict[str, Any],
             blocks: Iterable[tuple[tokenizers.Encoded, Block]],
             add: Callable[[tokenizers.Encoded, Block, dict[str, Any]], dict[str, Any]], title: str, progress: bool,
             ) -> dict[str, Any]:
    """Writes blocks by ``add``, which returns the state after each; returns the last state."""
    with _progress_bar(title, progress) as update:
        for encoded, block in blocks:
            with unfinished.write_errors():
                state = unfinished.state = add(encoded, block, state)
                unfinished.commit_when_due(int(encoded.bytes_P.sum()))
            update(len(encoded.ids), block.fraction_done)
    return state


def _request(source: Source, vocabulary: token_files.Vocabulary) -> dict[str, Any]:
    """The settings of a preparation, which must be the same to resume it, and of all parts."""
    return {"version of lineargpt": [_VERSION, _PLACES, texts.CHUNK_BYTES], "tokenizer": vocabulary.tokenizer,
            "source": source.name, **vars(source.selection), "state": source.state,
            "tokenizer_fingerprint": vocabulary.fingerprint, "shard_tokens": token_files.SHARD_TOKENS}


def _origin(source: Source) -> dict[str, Any]:
    return {"source": source.name, "source_version": source.version, "licence": source.licence,
            **vars(source.selection)}


def _resume(unfinished: journal.UnfinishedFolder) -> dict[str, Any]:
    """The state of an unfinished folder, or the first."""
    if (state := unfinished.state) is None:
        return {"start": None, "revision": None, "checksum": "", "replaced": 0,
                "skipped": dict.fromkeys(texts.SKIPPED, 0), "splits": {}}
    documents, tokens = (sum(entry[name] for entry in state["splits"].values()) for name in ("documents", "tokens"))
    status(f"resuming after {documents:,} documents, {tokens:,} tokens ({unfinished.path})")
    return state


def _pinned(source: Source, state: dict[str, Any]) -> Source:
    """The source at the revision of the state, or the newest; prints its notes."""
    if source.pin is not None:
        source = source.pin(state["revision"])
    for line in source.notes:
        note(line)
    return source


def _add(writer: token_files.TokenFilesWriter, selection: Selection, block: Block, encoded: tokenizers.Encoded,
         state: dict[str, Any], revision: str | None) -> dict[str, Any]:
    """Writes the tokens of a block that follows ``state``; returns the state after it."""
    documents = sum(writer.documents(split) for split in token_files.SPLITS)
    held_out_P = selection.held_out(block, documents, len(encoded.tokens_P))
    for split, chosen_P in (("train", ~held_out_P), ("val", held_out_P)):
        writer.write(split, encoded.ids if chosen_P.all() else encoded.ids[np.repeat(chosen_P, encoded.tokens_P)],
                     text_bytes=int(encoded.bytes_P[chosen_P].sum()), documents=int((chosen_P & encoded.ends_P).sum()))
    checksum = bytes.fromhex(state["checksum"])
    for place in range(0, len(encoded.digests), 32):
        checksum = hashlib.sha256(checksum + encoded.digests[place : place + 32]).digest()
    if not isinstance(block.texts, texts.TextChunks) or any(chunk.held_out is None for chunk in block.texts.chunks):
        # Of other chunks it is in their digests.
        checksum = hashlib.sha256(checksum + held_out_P.tobytes()).digest()
    return {"start": block.following, "revision": revision, "checksum": checksum.hex(),
            "replaced": state["replaced"] + encoded.replaced,
            "skipped": {why: count + encoded.skipped.get(why, 0) for why, count in state["skipped"].items()},
            "splits": writer.state()}


def _finish(unfinished: journal.UnfinishedFolder, writer: token_files.TokenFilesWriter, origin: dict[str, Any],
            state: dict[str, Any]) -> dict[str, Any]:
    """Completes the folder of token files; returns the contents of ``meta.json``."""
    for split in token_files.SPLITS:
        if not writer.documents(split):
            raise _nothing_left(origin, split, writer.documents("val"), state["skipped"], unfinished.path)
    with unfinished.write_errors():
        meta = writer.finish(origin, checksum=state["checksum"], skipped=state["skipped"], replaced=state["replaced"])
        unfinished.finish()
    if line := _skipped_rows(meta["skipped"], "skipped documents: {}"):
        status(line)
    if meta["replaced"]:
        status(f"{meta['replaced']:,} invalid UTF-8 sequences were read as U+FFFD")
    total = sum(entry["tokens"] for entry in meta["splits"].values())
    for split, entry in meta["splits"].items():
        if entry["tokens"] < _SMALL_SPLIT * total and entry["documents"] < _FEW_DOCUMENTS:
            note(f"{split} has {entry['tokens']:,} tokens of {entry['documents']:,} documents, "
                 f"{entry['tokens'] / total:.2%} of all; val_share of data.prepare sets another fraction")
    return meta


def _nothing_left(origin: dict[str, Any], split: str, in_val: int, skipped: dict[str, int], partial: Path,
                  ) -> ConfigError:
    """The error for a split without documents."""
    remedy = f"; delete the tokenized part, {partial}, to start over"
    wanted = origin["val_documents"]
    if split == "train" and wanted is not None:
        return ConfigError(f"val_documents is {wanted}; expected less than the {in_val:,} documents with text of "
                           f"{origin['source']}{remedy}")
    return ConfigError(f"data.source: {origin['source']} has too little text for the {split} split"
                       + _skipped_rows(skipped, " (of its rows {})") + remedy)


def _skipped_rows(skipped: dict[str, int], template: str) -> str:
    """Number of skipped rows by reason; empty if there are none."""
    reasons = {"empty": "were empty", "not_text": "held no text", "no_column": "lacked the column"}
    counts = [f"{count:,} {reasons[why]}" for why, count in skipped.items() if count]
    return template.format(", ".join(counts)) if counts else ""


def _processes(encoding: Any, source: Source, workers: int | None) -> int:
    """Number of tokenizing processes; 0 if starting one takes longer than the work."""
    if encoding.name == "bytes" or (source.total_bytes or 2**40) < 4 * texts.CHUNK_BYTES:
        return 0
    if workers is not None:
        return workers
    return len(cores())


@contextlib.contextmanager
def _progress_bar(name: str, show: bool) -> Iterator[Callable[[int, float | None], None]]:
    """Yields a function that takes the tokens written since the last call, and the fraction of the source read."""
    written, begun = 0, time.monotonic()
    with progress_bar(Path(name).name, show=show) as update:

        def advance(tokens: int, fraction_done: float | None) -> None:
            nonlocal written
            written += tokens
            rate = written / max(time.monotonic() - begun, 1e-3)
            update(fraction_done, f"{written / 1e6:,.1f}M tokens, {rate / 1e6:,.2f}M/s")

        yield advance


def _command(source: str | None = None, /, *, out: Path | None = None, tokenizer: str = "bytes",
             split: str | None = None, column: str | None = None, encoding: str | None = None,
             val_documents: int | None = None, val_share: float | None = None, template: Path | None = None,
             workers: int | None = None, part: str | None = None, join: Path | None = None,
             verify: bool = False) -> None:
    """Convert text or images to token files. An interrupted command resumes when repeated.

    Args:
        source: python-stdlib; python-packages; a text, JSON(L), CSV (also packed: .gz, .bz2, .xz, .zst) or Parquet
            file, a folder or a glob of them; a folder of save_to_disk; or the id of a Hugging Face dataset (ID or
            ID:CONFIG). With --tokenizer pixels: digits, a folder of images, or the id of a dataset of images. With
            --verify: the folder to check.
        out: Folder to write.
        tokenizer: bytes, a tiktoken encoding such as gpt2, or pixels for images.
        split: Split to read. Default: train, with the validation split, if there is one, for val.
        column: Column that holds the text, or messages of a role and a content. Default: text, or else messages or
            conversations.
        encoding: Encoding of text without a byte order mark, such as latin-1. Default: UTF-8.
        val_documents: Number of documents to hold out: the first rows, or files picked by a hash of their names.
        val_share: Fraction to hold out: evenly spaced rows, files by size, or the end of a single text.
        template: File with a Jinja template that makes a text of the list messages, such as the chat template of a
            published model. Default: <|ROLE|> in a line before each content.
        workers: Number of tokenizing processes. Default: one per core.
        part: Make only this part of the token files, such as 3/16, for --join. The parts of --out DIR are in DIR.parts.
        join: Join the parts of this folder to its token files.
        verify: Verify the checksums of existing token files, and write nothing.
    """
    if sum((verify, part is not None, join is not None)) > 1:
        raise ConfigError("--part, --join and --verify are mutually exclusive")
    if verify:
        directory = out or (None if source is None else Path(source))
        if directory is None:
            raise ConfigError("--verify requires a folder of token files: --verify --out DIR")
        splits = verify_files(directory)["splits"]
        shards = sum(len(entry["shards"]) for entry in splits.values())
        tokens = sum(entry["tokens"] for entry in splits.values())
        print(f"{directory}: {shards:,} shards, {tokens:,} tokens, all checksums match")
        return
    if join is not None:
        if source is not None or out is not None:
            raise ConfigError(f"--join {join} needs no {'source' if source is not None else '--out'}: the parts have "
                              "everything")
        _report(join_parts(join))
        return
    if source is None or out is None:
        if part is not None and source is not None:
            raise ConfigError(f"--part {part} requires --out DIR, the folder of all token files")
        raise ConfigError("expected a source and --out DIR; see python -m data.prepare --help")
    selection = Selection(split, column, encoding, val_documents, val_share,
                          None if template is None else chats.read_template(template))
    if part is not None:
        made = prepare_part(PartName.parse(part), source, tokenizer, out, selection, workers=workers)
        print(f"part {made.name}: {made.meta['tokens']:,} tokens, {made.meta['bytes']:,} bytes, "
              f"{made.meta['documents']:,} documents in {made.folder}")
        return
    _report(prepare(source, tokenizer, out, selection, workers=workers))


def _report(meta: dict[str, Any]) -> None:
    for name, entry in meta["splits"].items():
        print(f"{name}: {entry['tokens']:,} tokens, {entry['bytes']:,} bytes, {entry['documents']:,} documents")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    def command(given: Sequence[str]) -> None:
        import tyro

        tyro.cli(_command, prog="python -m data.prepare", args=checked_flags(given, _command))

    return run_command("data.prepare", command, arguments, interrupted=lambda: "; repeat the command to resume",
                       flags=flags_by_field(_command) | {"data.tokenizer": "--tokenizer", "data.dir": "--out"})


if __name__ == "__main__":
    sys.exit(main())
