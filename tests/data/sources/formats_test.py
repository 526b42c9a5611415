"""Formats told by bytes, packed and encoded text, and what is refused."""

import bz2
import codecs
import gzip
import io
import lzma
import pickle
import random
import tarfile
import zipfile
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from data import texts
from data.sources import formats, open_source
from data.sources.source import Selection
from support.errors import ConfigError, DataError
from tests.data.sources.source_files import documents, pack, write_parquet

pytestmark = pytest.mark.fast
TEXT = "The quick brown fox – jumps über the lazy dog. 速い茶色の狐。\n" * 40
PACKED = (".gz", ".bz2", ".xz", ".zst")


def text_of(path) -> bytes:
    (_, head), (_, tail) = documents(str(path))
    return head + tail


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("name", ["a.txt", "A.TXT", "a", "a.py"])
def test_a_packed_text_is_unpacked_whatever_the_case_of_its_name(tmp_path, name, suffix):
    pack(tmp_path / f"x{suffix}", TEXT.encode())
    for as_named in (suffix, suffix.upper(), ""):
        path = (tmp_path / f"x{suffix}").rename(tmp_path / f"{name}{as_named}")
        assert text_of(path) == TEXT.encode()
        path.rename(tmp_path / f"x{suffix}")


@pytest.mark.parametrize(("mark", "encoding"), [
    (codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF8, "utf-8")])
@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_text_with_a_byte_order_mark_is_decoded_without_it(tmp_path, mark, encoding, suffix):
    pack(tmp_path / f"a.txt{suffix}", mark + TEXT.encode(encoding))
    assert text_of(tmp_path / f"a.txt{suffix}") == TEXT.encode()


def test_marks_and_cases_of_rows(tmp_path):
    rows = '{"text": "ä"}\n{"text": "b"}\n{"text": "c"}\n'
    csv = 'id;text\n1;ä\n2;"b"\n3;c\n'
    for name, content in {"DATA.JSONL": rows.encode(), "X.JSONL.GZ": gzip.compress(rows.encode()),
                          "u.jsonl": rows.encode("utf-16"), "u.csv": csv.encode("utf-16"), "part-00000": rows.encode(),
                          "T.CSV.BZ2": bz2.compress(csv.encode()), "b.jsonl": rows.encode("utf-8-sig"),
                          "l.csv#encoding=latin-1": csv.encode("latin-1")}.items():
        (tmp_path / name.partition("#")[0]).write_bytes(content)
        assert [text.decode() for _, text in documents(f"{tmp_path}/{name}")] == ["ä", "b", "c"], name
    write_parquet(tmp_path / "Data.Parquet", [b"a", b"b"]).rename(tmp_path / "data")
    assert [text for _, text in documents(f"{tmp_path}/data")] == [b"a", b"b"]


def archive(mode: Any) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode=mode) as packed:
            packed.addfile(tarfile.TarInfo("a.txt"))
        return file.getvalue()


def zipped() -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("a.txt", TEXT)
        return file.getvalue()


@pytest.mark.parametrize(("content", "what"), [
    (zipped, "a zip archive"), (lambda: archive("w"), "a tar archive"),
    (lambda: archive("w:gz"), "a tar archive packed with gzip"),
    (lambda: archive("w:xz"), "a tar archive packed with xz"),
    (lambda: b"\x89PNG\r\n\x1a\n\0\0\0\r", "a PNG image"), (lambda: b"%PDF-1.7\n", "a PDF file"),
    (lambda: np.arange(500, dtype="<u2").tobytes(), "binary data, with NUL bytes"),
    (lambda: pickle.dumps([TEXT]), "a pickle"), (lambda: TEXT.encode("utf-16-le"), "binary data, with NUL bytes"),
    (lambda: gzip.compress(gzip.compress(b"a")), "packed twice"),
    (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS"),
    (lambda: b"\xfd7zXZ\0garbage", "damaged xz data"),
])
def test_archives_and_binary_files_are_refused_by_what_they_are(tmp_path, content, what):
    for name in ("a.txt", "train.bin", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(content())
        with pytest.raises(ConfigError, match=rf"/{name} is {what}.*; expected"):
            open_source(str(tmp_path / name))


def test_a_name_alone_makes_no_parquet_and_no_packed_file(tmp_path):
    for name in ("a.parquet", "a.txt.gz"):
        (tmp_path / name).write_bytes(TEXT.encode())
    with pytest.raises(ConfigError, match=r"a\.parquet is not Parquet"):
        open_source(str(tmp_path / "a.parquet"))
    assert text_of(tmp_path / "a.txt.gz") == TEXT.encode()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
def test_much_invalid_utf8_suggests_an_encoding_with_which_it_is_read(tmp_path, name):
    text = "text\n" + "straße über alles\n" * 30 if name == "a.csv" else "straße über alles\n" * 30
    if name.startswith("a.js"):
        text = '{"text": "straße über alles"}\n' * 30
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"/{name}: \d+ sequences in [\d,]+ bytes .*#encoding="):
        documents(str(tmp_path / name))
    read = b"".join(document for _, document in documents(str(tmp_path / name), encoding="latin-1"))
    assert read.decode().count("straße über alles") == 30
    # With the encoding UTF-8 the bytes stay, with or without a mark.
    for mark in (b"", codecs.BOM_UTF8):
        (tmp_path / name).write_bytes(mark + text.encode("latin-1"))
        for encoding in ("utf-8", "UTF8", "utf-8-sig"):
            read = b"".join(document for _, document in documents(f"{tmp_path / name}#encoding={encoding}"))
            assert read.startswith(b"stra\xdfe")
            assert read.count(b"stra\xdfe") == 30


def test_one_invalid_sequence_in_a_thousand_bytes_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes((b"\xff" + b"a" * 999) * 20)
    assert text_of(tmp_path / "a.txt").count(b"\xff") == 20
    (tmp_path / "a.txt").write_bytes((b"\xff" + b"a" * 899) * 20)
    with pytest.raises(DataError, match="19 sequences in 17,100 bytes"):
        documents(str(tmp_path / "a.txt"))
    # The end of a long text may have as many as a chunk.
    (tmp_path / "a.txt").write_bytes(b"word " * 10_000 + b"\xff" * 20)
    assert text_of(tmp_path / "a.txt").count(b"\xff") == 20
    (tmp_path / "a.txt").write_bytes("日本語の文".encode("shift_jis") * 50 + b"\xff" * 50)
    with pytest.raises(DataError, match=r"a\.txt: 50 sequences"):
        documents(str(tmp_path / "a.txt"), encoding="shift_jis", val_share=0.5)


@pytest.mark.parametrize("name", ["no-such", "base64", "a\0b"])
def test_unknown_encodings(tmp_path, name):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=f"encoding is {name}"):
        open_source(f"{tmp_path}/a.txt#encoding={name}")


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl.gz", b'{"text": "' + b"a" * 5000 + b'"}\n'), ("a.json.gz", b'[{"text": "' + b"a" * 5000 + b'"}]'),
    ("a.json", b'{"text":\n "' + b"a" * 5000 + b'"}'), ("b.jsonl", b'{"text": "a"}\n{"text": "' + b"a" * 5000 + b'"}'),
    ("a.csv.xz", b'text\n"' + b"a" * 5000 + b'"\n'), ("a.csv", b'text\n"' + b"a\n" * 2500 + b'"\n'),
    ("c.jsonl.gz", b" " * 5000), ("a.gz", b'{"text": "' + b"a" * 5000)])
def test_a_line_or_row_beyond_the_limit_names_its_file(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(formats, "ROW_BYTES", 4000)
    monkeypatch.setattr(texts, "CHUNK_BYTES", 100)
    (tmp_path / name).write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get((tmp_path / name).suffix, bytes)(
        content))
    with pytest.raises(DataError, match=rf"/{name}(:| has) a (line|row).*(MiB|field larger than field limit)"):
        documents(str(tmp_path / name))


@pytest.mark.parametrize("suffix", [".txt.xz", ".zst"])
def test_every_place_of_a_packed_text_is_a_start(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 200)
    pack(tmp_path / f"a{suffix}", TEXT.encode("utf-16"))
    source = open_source(f"{tmp_path}/a{suffix}", Selection(val_share=0.3))

    def chunks(*places) -> list[texts.TextChunk]:
        return [chunk for block in source.blocks(*places) for chunk in block.texts.chunks]  # pyright: ignore[reportAttributeAccessIssue]

    whole = list(source.blocks())
    assert len(whole) > 5
    assert b"".join(chunk.text for chunk in chunks()) == TEXT.encode()
    for number, block in enumerate(whole):
        assert chunks(block.following) == [chunk for later in whole[number + 1 :] for chunk in later.texts.chunks]  # pyright: ignore[reportAttributeAccessIssue]
    cut = source.cut(Fraction(1, 2))
    assert chunks(None, cut) + chunks(cut) == chunks()
    assert chunks(cut)


def test_a_packed_file_that_breaks_off_is_named(tmp_path):
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(random.Random(0).randbytes(30_000).hex().encode())[:-100])
    with pytest.raises(DataError, match=r"/b\.txt\.gz: .* cannot be read: "):
        documents(f"{tmp_path}/b.txt.gz")
