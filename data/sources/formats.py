"""The format of a file, found by its first bytes, and its text: unpacked, as UTF-8, without a byte order mark."""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from data import texts
from data.sources.source import one_line
from support.errors import ConfigError, DataError

ROW_BYTES = 2**29
"""Maximum bytes of a line, or of a row, after unpacking."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CSV_SUFFIXES = (".csv", ".tsv")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")

_LOOKED_AT = 8192
"""Bytes at the start of a file that are looked at."""
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",  # first: the one of UTF-16 is its beginning
          codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
ARROW = "an Arrow file, which is read alone or as part of the folder of save_to_disk"
_BINARY = (
    (0, b"ARROW1", ARROW), (0, b"\xff\xff\xff\xff", ARROW), (0, b"PK\3\4", "a zip archive"),
    (0, b"PK\5\6", "a zip archive"), (257, b"ustar", "a tar archive"), (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\7", "a RAR archive"), (0, b"\x04\x22\x4d\x18", "lz4 data"), (0, b"\x1f\x9d", "compress data"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"), (0, b"\xff\xd8\xff", "a JPEG image"), (0, b"GIF87a", "a GIF image"),
    (0, b"GIF89a", "a GIF image"), (0, b"%PDF-", "a PDF file"), (0, b"\xd0\xcf\x11\xe0", "an Office document"),
    (0, b"SQLite format 3\0", "an SQLite database"), (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"), (0, b"\x7fELF", "a program"), (0, b"fLaC\0", "FLAC audio"),
    (0, b"OggS\0", "Ogg audio"), (8, b"WAVEfmt ", "WAV audio"), (0, b"\x80\2", "a pickle"),
    (0, b"\x80\4\x95", "a pickle"), (0, b"\x80\5\x95", "a pickle"),
    (0, b"version https://git-lfs.github.com/", "a pointer of Git LFS without the file, which git lfs pull gets"))


class Format(NamedTuple):
    """What a file holds."""

    kind: Literal["text", "json", "csv", "parquet"] | None
    """None: nothing that is read here."""
    what: str = ""
    """In words, if it is not read."""
    packed: str | None = None
    """gzip, bzip2, xz or zstd."""
    encoding: str | None = None
    """Encoding in which to decode the text, a name of Python's. None: it is UTF-8 already."""
    checked: bool = True
    """Whether much invalid UTF-8 is an error: not if the user names UTF-8."""

    @property
    def plain(self) -> bool:
        """Whether the bytes of the file are its text, but for a byte order mark."""
        return self.packed is None and self.encoding in (None, "utf-8-sig")

    @property
    def mark_bytes(self) -> int:
        """Bytes before the text of a plain file."""
        return 0 if self.encoding is None else len(codecs.BOM_UTF8)


def inspect(path: Path, encoding: str | None = None) -> Format:
    """The format of a file.

    The bytes decide: what packs it, archives and other binary files, Parquet, the encoding. All else is text, of which
    the suffix, in any case, marks JSON and CSV; a file without one is JSON if its first line is an object.

    Args:
        path: the file.
        encoding: encoding of text without a byte order mark; default: UTF-8.

    Raises:
        DataError: it cannot be read.
    """
    with read_errors(path, "its start"), path.open("rb") as file:
        head = file.read(_LOOKED_AT)
        packed = next((name for start, name in _PACKED.items() if head.startswith(start)), None)
        if packed == "bzip2" and head[4:10] != b"1AY&SY":
            packed = None
        if packed is not None:
            try:
                head = _unpacked(file, packed).read(_LOOKED_AT)
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                return Format(None, f"damaged {packed} data", packed)
    within = "" if packed is None else f" packed with {packed}"
    for offset, start, what in _BINARY:
        if head[offset:].startswith(start):
            return Format(None, what + within, packed)
    if packed is not None and any(head.startswith(start) for start in _PACKED):
        return Format(None, f"packed twice, with {packed} the second time", packed)
    name = path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path
    suffix = name.suffix.lower()
    if head.startswith(b"PAR1"):
        return Format(None, f"Parquet{within}", packed) if packed else Format("parquet")
    if suffix == ".parquet":
        return Format(None, "not Parquet, in spite of its name", packed)
    is_utf8 = encoding is not None and codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    marked = next((known for mark, known in _MARKS.items() if head.startswith(mark)), None)
    form = Format("text", "", packed, marked or (None if is_utf8 else encoding), not is_utf8)
    with read_errors(path, "its start"), path.open("rb") as file, open_text(file, form) as text:
        start = text.read(_LOOKED_AT)
        if b"\0" in start:
            return Format(None, f"binary data{within}, with NUL bytes", packed)
        if suffix in JSON_SUFFIXES or (not suffix and start.lstrip().startswith(b"{") and _is_object(text, path)):
            form = form._replace(kind="json")
        elif suffix in CSV_SUFFIXES:
            form = form._replace(kind="csv")
    return form


def _is_object(text: io.BufferedIOBase, path: Path) -> bool:
    """Whether the first line that is not empty is a JSON object."""
    text.seek(0)
    line = next((line for line in lines(text, path) if line.strip()), b"")
    try:
        return isinstance(texts.parse_json(line), dict)
    except ValueError:
        return False


def check_encoding(name: str) -> None:
    """Raises :class:`ConfigError` unless it is the name of an encoding of text."""
    try:
        if codecs.lookup(name)._is_text_encoding:  # pyright: ignore[reportAttributeAccessIssue]
            return
    except (LookupError, ValueError):
        pass
    raise ConfigError(f"encoding is {name[:40]}: no such encoding; expected one that Python knows, such as latin-1, "
                      "cp1252, shift_jis or utf-16-le")


def check_utf8(path: Path, form: Format, text: bytes, end: int) -> None:
    """Raises :class:`DataError` if more than one sequence in a thousand bytes, and more than one, is not UTF-8.

    Args:
        path: the file, for the message.
        form: its format.
        text: consecutive bytes of its text. After other text, they may have as many as a chunk.
        end: their end in the text.
    """
    count = texts.undecodable(text) if form.checked else 0
    if count > max(1, len(text) / 1000, min(end, texts.CHUNK_BYTES) / 1000):
        raise DataError(f"{path}: {count:,} sequences in {len(text):,} bytes are not valid UTF-8; name the encoding of "
                        "the text as encoding, such as latin-1, or with #encoding= after the source (utf-8 reads them "
                        "as U+FFFD)")


@contextlib.contextmanager
def read_errors(path: Path, where: Any) -> Iterator[None]:
    """Turns errors of reading, unpacking and parsing into a :class:`DataError`.

    Args:
        path: the file.
        where: the place in it, or a function that gives it.
    """
    try:
        yield
    except (ValueError, EOFError, OSError, RecursionError, zlib.error, lzma.LZMAError, csv.Error) as error:
        place = where() if callable(where) else where
        why = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise DataError(f"{path}: {place} cannot be read: {why}") from error


def lines(file: Any, path: Path) -> Iterator[bytes]:
    """The lines of a file from its place on.

    Raises:
        DataError: one is longer than :data:`ROW_BYTES`.
    """
    while line := read_line(file, path):
        yield line


def read_line(file: Any, path: Path, begun: int = 0) -> bytes:
    """The next line, or the rest of one of which ``begun`` bytes have been read; errors as of :func:`lines`."""
    line = file.readline(ROW_BYTES - begun + 1)
    if begun + len(line) > ROW_BYTES:
        raise too_long(path, "a line")
    return line


def too_long(path: Path, what: str) -> DataError:
    """The error for a row of more than :data:`ROW_BYTES`."""
    return DataError(f"{path} has {what} of more than {ROW_BYTES // 2**20:,} MiB; expected shorter ones: divide its "
                     "text into more rows, or store it as a text file")


def open_text(file: Any, form: Format) -> io.BufferedReader:
    """The text of an open file, unpacked and as UTF-8. Invalid bytes stay, or become 0xFF if the file has another
    encoding. Seeking to an earlier place reads all before it again."""
    if form.packed is not None:
        file = _unpacked(file, form.packed)
    if form.encoding is not None:
        file = io.BufferedReader(_Recoded(file, form.encoding), 2**17)
    return file


def read_text(path: Path, form: Format) -> "memoryview | UnpackedText":
    """The text of a file as a sequence of bytes: memory-mapped if the file has it so."""
    if not form.plain:
        return UnpackedText(path, form)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return mapped[form.mark_bytes :]


class UnpackedText:
    """The text of a file that has to be unpacked or decoded, as a sequence of bytes.

    It is read forwards; its last part stays in memory for slices that go back a little. Its length takes reading it
    once.
    """

    def __init__(self, path: Path, form: Format):
        self._path = path
        raw = path.open("rb")
        weakref.finalize(self, raw.close)
        self._file = open_text(raw, form)
        self._part, self._start = b"", 0  # the last part, and where it starts
        self._length: int | None = None

    def __len__(self) -> int:
        if self._length is None:
            with read_errors(self._path, "the text"):
                self._file.seek(0)
                self._length = sum(map(len, iter(lambda: self._file.read(2**20), b"")))
                self._part, self._start = b"", self._length
        return self._length

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, int):
            return self[part : part + 1][0]
        start, stop, _ = part.indices(len(self))
        end = self._start + len(self._part)
        with read_errors(self._path, "the text"):
            if not self._start <= start <= end:
                self._file.seek(start)
                self._part, self._start, end = b"", start, start
            if stop > end:
                start_from = max(self._start, min(start, end - 2**17))
                self._part = self._part[start_from - self._start :] + self._file.read(stop - end)
                self._start = start_from
        return self._part[start - self._start : stop - self._start]


def _unpacked(file: Any, packed: str) -> io.BufferedReader:
    """What is packed in a file, from its start on. Several frames may follow each other."""
    file.seek(0)
    if packed == "zstd":
        return io.BufferedReader(ZstdFile(file), 2**20)
    opened: Any = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[packed](file)
    return io.BufferedReader(opened)


class _Forwards(io.RawIOBase):
    """A stream made from another one, which is read forwards. Going back starts again."""

    def __init__(self, raw: Any):
        self._raw, self._position = raw, 0
        self._start()

    def _start(self) -> None:
        """Starts again."""
        raise NotImplementedError

    def _next(self, size: int) -> bytes:
        """At most ``size`` further bytes; none at the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        part = self._next(len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 1:
            offset += self._position
        elif whence == 2:
            raise io.UnsupportedOperation("the length of the text is unknown")
        if offset < self._position:
            self._position = 0
            self._start()
        while self._position < offset and self.readinto(memoryview(bytearray(min(2**20, offset - self._position)))):
            pass
        return self._position


class ZstdFile(_Forwards):
    """A zstd file, read with Arrow's codec; Python has one from 3.14 on."""

    def __init__(self, raw: Any, mode: str = "rb", **_: Any):
        if mode not in ("r", "rb"):
            raise ValueError("zstd files are read-only")
        super().__init__(raw)

    def _start(self) -> None:
        import pyarrow

        self._raw.seek(0)
        # Arrow closes the file that it reads when a stream ends, also when it is replaced by another one.
        file = SimpleNamespace(read=self._raw.read, closed=False, close=lambda: None)
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")

    def _next(self, size: int) -> bytes:
        return self._stream.read(size)


class _Recoded(_Forwards):
    """Text of another encoding as UTF-8."""

    def __init__(self, raw: Any, encoding: str):
        # What is invalid in UTF-8 stays. In others it becomes an invalid byte, which is then counted in the same way.
        errors = "surrogateescape" if encoding == "utf-8-sig" else _INVALID
        self._make_decoder = lambda: codecs.getincrementaldecoder(encoding)(errors)
        super().__init__(raw)

    def _start(self) -> None:
        self._raw.seek(0)
        self._decoder, self._rest, self._ended = self._make_decoder(), b"", False

    def _next(self, size: int) -> bytes:
        while not self._rest and not self._ended:
            part = self._raw.read(2**16)
            self._ended = not part
            decoded = self._decoder.decode(part, self._ended)
            self._rest = decoded.encode(errors="surrogateescape")
        part, self._rest = self._rest[:size], self._rest[size:]
        return part


_INVALID = "lineargpt.invalid"
codecs.register_error(_INVALID, lambda error: ("\udcff", error.end))  # pyright: ignore[reportAttributeAccessIssue]
