"""Token files: contents, atomic writes, and errors for invalid requests."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from configs.schema import DataConfig
from data import journal, prepare, texts, token_files, tokenizers
from data.sources.source import Selection
from data.token_files import TokenFiles
from support.errors import ConfigError, DataError
from support.progress import progress_bar
from tests.data.sources.images_test import png
from tests.edited import contents

ROOT = Path(__file__).parents[2]
GPT2_FILES = ROOT.parent / "shared" / "tiktoken"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three small texts; the smallest is held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a.txt": b"first \xff\x01 text", "b.txt": b"val", "c.txt": b"third text\n"}.items():
        (folder / name).write_bytes(text)
    return folder


def command(*arguments: str) -> subprocess.CompletedProcess:
    """The command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare", *arguments])
        code = prepare.main()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ids(directory: Path, split: str) -> list[int]:
    files = TokenFiles.open(directory)
    return files.read(split, 0, files.tokens(split)).tolist()


def test_tokens_are_the_documents_with_end_of_text_after_each(folder, tmp_path):
    meta = prepare.prepare(str(folder), "bytes", tmp_path / "out", progress=False)
    assert ids(tmp_path / "out", "train") == [*b"first \xff\x01 text", 256, *b"third text\n", 256]
    assert ids(tmp_path / "out", "val") == [*b"val", 256]
    assert np.fromfile(tmp_path / "out" / "val-00000.bin", "<u2").tolist() == [*b"val", 256]
    assert meta == contents(tmp_path / "out" / "meta.json")
    assert meta["vocabulary_size"] == 257
    assert meta["document_separator"] == 256
    assert meta["splits"]["train"]["bytes"] == 24
    assert meta["splits"]["train"]["documents"] == 2


def test_the_standard_library_brings_version_and_licence(tmp_path):
    meta = prepare.prepare("python-stdlib", "bytes", tmp_path / "out", progress=False)
    assert meta["licence"] == "PSF-2.0"
    assert "3." in meta["source_version"]
    assert meta["splits"]["train"]["largest_id"] == 256


def test_full_shards_are_followed_by_further_ones(folder, tmp_path, monkeypatch):
    prepare.prepare(str(folder), "bytes", tmp_path / "whole", progress=False)
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 7)
    meta = prepare.prepare(str(folder), "bytes", tmp_path / "parts", progress=False)
    assert [shard["tokens"] for shard in meta["splits"]["train"]["shards"]] == [7, 7, 7, 5]
    assert (tmp_path / "parts" / "train-00003.bin").stat().st_size == 10
    assert ids(tmp_path / "parts", "train") == ids(tmp_path / "whole", "train")


def test_a_text_tokenized_in_chunks_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    merges = {bytes([i]): i for i in range(256)} | {b" t": 256, b" th": 257, b"he": 258, b" the": 259, b"\n\n": 260}
    words = tiktoken.Encoding("words", pat_str=r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s+(?!\S)|\s+", mergeable_ranks=merges,
                              special_tokens={"<|endoftext|>": 261})
    monkeypatch.setattr(tokenizers, "load", lambda name: words)
    text = b"the other  day\n\nthere, the 1st\n" * 200
    (tmp_path / "text.txt").write_bytes(text)
    monkeypatch.setattr(texts, "CHUNK_BYTES", 50)
    prepare.prepare(str(tmp_path / "text.txt"), "words", tmp_path / "out", progress=False)
    found = ids(tmp_path / "out", "train")[:-1] + ids(tmp_path / "out", "val")[:-1]
    assert found == words.encode_ordinary(text.decode())


def test_vocabularies_above_65536_are_written_in_four_bytes(folder, tmp_path, monkeypatch):
    large = tiktoken.Encoding("large", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i + 70000 for i in range(256)},
                              special_tokens={"<|endoftext|>": 80000})
    monkeypatch.setattr(tokenizers, "load", lambda name: large)
    meta = prepare.prepare(str(folder), "large", tmp_path / "out", progress=False)
    assert meta["dtype"] == "uint32"
    assert ids(tmp_path / "out", "val") == [70000 + byte for byte in b"val"] + [80000]


def test_nothing_is_overwritten(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "empty").mkdir()
    prepare.prepare(str(folder), "bytes", tmp_path / "empty", progress=False)
    for place, message in (("mine", "mine already holds something else"), ("mine/thesis.txt", r"thesis\.txt is a file"),
                           ("mine/thesis.txt/out", r"thesis\.txt is a file"),
                           ("empty", "empty already holds token files of the tokenizer bytes")):
        with pytest.raises(ConfigError, match=message):
            prepare.prepare(str(folder), "bytes", tmp_path / place, progress=False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_too_little_text_for_two_splits(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a\.txt has too little text for the train split"):
        prepare.prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n' + '{"text": "some words"}\n' * 10)
    for _ in range(2):  # nothing is done twice, or lost
        with pytest.raises(ConfigError, match=r"val_documents is 12; .* the 10 documents .*/\.out2\.partial"):
            prepare.prepare(str(rows), "bytes", tmp_path / "out2", Selection(val_documents=12), progress=False)
        assert len(json.loads((tmp_path / ".out2.partial" / "journal.json").read_text())["state"]["checksum"]) == 64
    assert prepare.prepare(str(rows), "bytes", tmp_path / "out3", progress=False)["splits"]["val"]["documents"] == 1


@pytest.mark.parametrize("seconds", [1e9, 0])
def test_the_journal_is_written_after_some_bytes_or_seconds(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(journal, "COMMIT_SECONDS", seconds)
    with journal.UnfinishedFolder(tmp_path / "out", {}) as unfinished:
        unfinished.open_writer(token_files.TokenFilesWriter, VOCABULARY)
        unfinished.state = {"splits": {}}
        unfinished.commit_when_due(1)
        assert (unfinished.path / "journal.json").exists() == (seconds == 0)
        unfinished.commit_when_due(journal.COMMIT_BYTES)
        assert (unfinished.path / "journal.json").exists()


def test_the_time_left_fits_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("a-long-name-" * 5) as update:
        update(0.5, "123,456.8M tokens, 12.35M/s")
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).strip().splitlines()[-1]
    assert re.search(r"123,456\.8M tokens, 12\.35M/s \d:\d\d:\d\d left: [\d-]:[\d-]{2}:[\d-]{2}$", line), line


def test_the_folder_to_make_is_not_in_the_source(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    for source in (".", str(folder)):
        with pytest.raises(ConfigError, match=r"out .*/texts/deep/out is inside the source"):
            prepare.prepare(source, "bytes", folder / "deep" / "out", progress=False)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt", "c.txt"]


def test_the_lock_is_deleted_at_the_end_and_a_link_in_its_place_is_refused(folder, tmp_path):
    with journal.lock(tmp_path / "corpus"):
        assert os.listdir(tmp_path) != ["texts"]
    assert os.listdir(tmp_path) == ["texts"]
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / ".corpus.lock").symlink_to("thesis.tex")
    done = command(str(folder), "--tokenizer", "bytes", "--out", str(tmp_path / "corpus"))
    assert (done.returncode, f"{tmp_path / '.corpus.lock'} is a symbolic link" in done.stderr) == (1, True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(folder, tmp_path):
    script = ("import os, signal, sys; from pathlib import Path; from data import prepare, token_files\n"
              "token_files.TokenFilesWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
              "prepare.prepare(sys.argv[1], 'bytes', Path(sys.argv[2]), progress=False)")
    killed = subprocess.run([sys.executable, "-c", script, str(folder), str(tmp_path / "out")], cwd=ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    prepare.prepare(str(folder), "bytes", tmp_path / "out", progress=False)
    assert ids(tmp_path / "out", "val") == [*b"val", 256]
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "out"}


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"some text " * 20_000)
    script = ("import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
              "runpy.run_module('data.prepare', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"data.prepare: cannot write token files to {tmp_path / 'out'}: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Documents of many sizes in JSON lines, the first and others no text, many of them without the column, and one
    that is longer than a chunk; only to be read."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    values = [None if n % 50 == 0 else n if n % 50 == 8 else f"row {n} " + "words and more words " * (n % 40)
              for n in range(300)]
    values[123] = "a long text with words of its own " * 400
    path.write_text("".join(json.dumps({"text": value} if n % 5 != 1 else {"id": n}) + "\n"
                            for n, value in enumerate(values)))
    return path


VOCABULARY = token_files.Vocabulary("bytes", None, 257, 256)
SMALL = {"texts.CHUNK_BYTES": 3000, "token_files.SHARD_TOKENS": 4000, "journal.COMMIT_BYTES": 1}


def make(source: Path, out: Path, patch: str = "", *, more: str = "") -> subprocess.CompletedProcess:
    """Prepares a source in another process, in small chunks and shards, after some change of the code."""
    script = ("import os, resource, signal, sys; from pathlib import Path\n"
              "from data import journal, prepare, texts, token_files\n"
              f"{'; '.join(f'{name} = {value}' for name, value in SMALL.items())}\n{patch}\n"
              f"sys.argv = ['prepare', {str(source)!r}, '--out', {str(out)!r}, '--tokenizer', 'gpt2', "
              f"*{more.split()}]\nsys.exit(prepare.main())")
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)


def before_write(number: int, code: str) -> str:
    """A change of the code: runs ``code`` before the tokens of a block are written for the given time."""
    return ("original, calls = token_files.TokenFilesWriter.write, []\n"
            "def write(self, split, ids, *more, **counts):\n"
            "    calls.append(0)\n"
            f"    if len(calls) == {number}:\n"
            f"        {code}\n"
            "    return original(self, split, ids, *more, **counts)\n"
            "token_files.TokenFilesWriter.write = write")


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def gpt2():
    if not GPT2_FILES.is_dir():
        pytest.skip(f"the vocabulary of gpt2 is not in {GPT2_FILES}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_FILES))
        yield tiktoken.get_encoding("gpt2")


@pytest.fixture(scope="module")
def whole(rows, gpt2) -> dict[str, bytes]:
    """The files of ``rows``, made at once."""
    done = make(rows, rows.parent / "whole")
    assert done.returncode == 0, done.stderr
    assert "skipped documents: 6 were empty, 6 held no text, 60 lacked the column" in done.stderr
    files = files_of(rows.parent / "whole")
    assert {"train-00003.bin", "val-00000.bin"} <= files.keys()
    return files


@pytest.mark.thorough
def test_the_files_do_not_depend_on_the_number_of_processes(rows, whole, gpt2, tmp_path):
    assert make(rows, tmp_path / "out", more="--workers 1").returncode == 0
    assert files_of(tmp_path / "out") == whole
    values = [row.get("text") for row in map(json.loads, rows.read_text().splitlines())]
    values = [value for value in values if isinstance(value, str)]
    for split, is_in_split in (("val", lambda n: n % 20 == 0), ("train", lambda n: n % 20)):
        assert ids(tmp_path / "out", split) == [token for n, value in enumerate(values) if is_in_split(n)
                                                for token in [*gpt2.encode_ordinary(value), 50256]]


@pytest.mark.parametrize("end", ["kill", *(pytest.param(end, marks=pytest.mark.thorough)
                                           for end in ("interrupt", "full disk", "worker"))])
def test_after_every_end_it_resumes_and_gives_the_same_files(rows, whole, tmp_path, end):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    what, code, message = {
        "kill": (f"original(self, split, ids[:5], *more, **counts); self.sync(); {KILL}", -signal.SIGKILL, ""),
        # A background command of a script inherits that it ignores Ctrl-C.
        "interrupt": ("signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
                      130, "interrupted; repeat the command to resume"),
        "full disk": ("self.sync(); resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))", 1,
                      f"data.prepare: cannot write token files to {out}: File too large; free disk space"),
        "worker": ("[os.kill(int(p.name), 9) for p in Path('/proc').iterdir() if p.name.isdigit() and "
                   "Path('/proc', p.name, 'stat').read_text().rpartition(')')[2].split()[1] == str(os.getpid())]", 1,
                   "data.prepare: a tokenizing process ended (exit code -9)"),
    }[end]
    for number in (15, 31) if end == "kill" else (15,):
        done = make(rows, out, before_write(number, what))
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not out.exists()
        assert (partial / "journal.json").is_file()
    (partial / "train-00077.bin").write_bytes(b"begun after the journal's last state")
    done = make(rows, out)
    assert done.returncode == 0, done.stderr
    assert re.search("resuming after [1-9][0-9]* documents", done.stderr)
    assert files_of(out) == whole
    assert not partial.exists()


@pytest.mark.thorough
def test_a_text_longer_than_a_chunk_resumes_within_it(gpt2, tmp_path):
    (tmp_path / "text.txt").write_bytes("Some wörds and \xff more 中文。".encode("latin-1", "ignore") * 900)
    more = "--val-share 0.3 --encoding utf-8"  # otherwise too much of it is invalid
    assert make(tmp_path / "text.txt", tmp_path / "once", more=more).returncode == 0
    assert make(tmp_path / "text.txt", tmp_path / "twice", before_write(5, KILL), more=more).returncode < 0
    assert json.loads((tmp_path / ".twice.partial" / "journal.json").read_text())["state"]["start"][1] > 0
    done = make(tmp_path / "text.txt", tmp_path / "twice", more=more)
    assert done.returncode == 0
    assert files_of(tmp_path / "twice") == files_of(tmp_path / "once")
    assert json.loads((tmp_path / "once" / "meta.json").read_text())["replaced"] > 0
    assert "invalid UTF-8 sequences were read as U+FFFD" in done.stderr


def test_other_settings_or_texts_do_not_resume(rows, gpt2, tmp_path, monkeypatch):
    out, rows = tmp_path / "out", Path(shutil.copy(rows, tmp_path))
    assert make(rows, out, f"token_files.TokenFilesWriter.finish = lambda *_, **__: {KILL}").returncode < 0
    before = files_of(tmp_path / ".out.partial")
    monkeypatch.setattr(texts, "CHUNK_BYTES", SMALL["texts.CHUNK_BYTES"])
    monkeypatch.setattr(token_files, "SHARD_TOKENS", SMALL["token_files.SHARD_TOKENS"])
    arguments = (str(rows), "--out", str(out), "--tokenizer", "gpt2")
    for more, message in (("--tokenizer bytes", "another tokenizer: gpt2 then, bytes now"),
                          ("--val-share 0.1", "another val share: None then, 0.1 now")):
        done = command(*arguments, *more.split())
        assert done.returncode == 2
        assert f"data.prepare: {out} was started with {message}" in done.stderr
    rows.write_text(rows.read_text() + '{"text": "one more"}\n')
    done = command(*arguments)
    assert done.returncode == 2
    assert "another text of the source" in done.stderr
    assert files_of(tmp_path / ".out.partial") == before


def test_weights_resume_with_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 3)

    def write(writer, at):
        for split in token_files.SPLITS:
            writer.write(split, np.arange(at, at + 5), np.arange(5) % 2, text_bytes=5, documents=1)

    with journal.UnfinishedFolder(tmp_path / "out", {}) as unfinished:
        writer = unfinished.open_writer(token_files.TokenFilesWriter, VOCABULARY)
        write(writer, 0)
        unfinished.state = {"start": None, "revision": None, "checksum": "", "replaced": 0, "skipped": {},
                            "splits": writer.state()}
        unfinished.commit_when_due(journal.COMMIT_BYTES)
    left = unfinished.path / "train-00077.weights.bin"
    left.write_bytes(b"begun after the journal's last state")
    with journal.UnfinishedFolder(tmp_path / "out", {}) as unfinished:
        writer = unfinished.open_writer(token_files.TokenFilesWriter, VOCABULARY)
        assert not left.exists()
        with pytest.raises(DataError, match="weights with all documents or with none"):
            writer.write("train", np.arange(5), text_bytes=5, documents=1)
        write(writer, 5)
        writer.finish({"source": "some"})
        unfinished.finish()
    (tmp_path / "whole").mkdir()
    with token_files.TokenFilesWriter(tmp_path / "whole", VOCABULARY) as writer:
        for at in (0, 5):
            write(writer, at)
        writer.finish({"source": "some"})
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert prepare.verify_files(tmp_path / "out")["weights"]


def test_no_process_outlives_the_one_that_started_it():
    script = ("import os, signal; from data import texts, tokenizers\n"
              "workers = tokenizers.Workers(tokenizers.load('bytes'), 1)\n"
              "chunks = texts.TextChunks([texts.TextChunk(b'text', False, True)])\n"
              "next(workers.encode([(chunks, 0)] * 2))\n"
              "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
              "os.kill(os.getpid(), signal.SIGKILL)")
    # Its child inherits standard error: reading that to its end, which may take a minute, waits for both.
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0


def test_every_damaged_shard_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 7)
    out = tmp_path / "out"
    prepare.prepare(str(folder), "bytes", out, progress=False)
    done = command("--verify", "--out", str(out))
    assert done.returncode == 0
    assert done.stdout == f"{out}: 5 shards, 30 tokens, all checksums match\n"
    assert command("--verify", str(out)).returncode == 0
    damaged = bytearray((out / "train-00001.bin").read_bytes())
    damaged[3] ^= 1
    (out / "train-00001.bin").write_bytes(damaged)
    (out / "train-00002.bin").write_bytes(b"short")
    (out / "val-00000.bin").unlink()
    (out / "val-00005.bin").write_bytes(b"from elsewhere")
    done = command("--verify", "--out", str(out))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    with pytest.raises(DataError, match="prepare it again") as refused:
        TokenFiles.open(out)
    for part in ("train-00002.bin: expected 14 bytes, found 5", "val-00000.bin is missing; expected 8 bytes",
                 "val-00005.bin: not in meta.json"):
        assert part in done.stderr
        assert part in str(refused.value)
    assert "train-00001.bin does not match its checksum" in done.stderr
    assert command("--verify", "--out", str(tmp_path / "nothing")).returncode == 2
    assert "--verify --out DIR" in command("--verify").stderr


def test_another_vocabulary_of_the_same_name_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    meta = prepare.prepare(str(folder), "bytes", out, progress=False)
    (out / "meta.json").write_text(json.dumps(meta | {"tokenizer_fingerprint": "5" * 64}))
    for check in (lambda: prepare.verify_files(out), lambda: prepare.ensure(DataConfig(dir=str(out)))):
        with pytest.raises(DataError, match=r"differs from that of bytes .*\(fingerprint 555555"):
            check()


def test_the_encoding_of_a_text_is_named_by_a_flag_or_in_the_source(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes("straße über alles ".encode("latin-1") * 50)
    failed = command(str(path), "--out", str(tmp_path / "out"))
    assert failed.returncode == 1
    assert f"data.prepare: {path}: 94 sequences in " in failed.stderr
    assert "such as latin-1" in failed.stderr
    assert command(str(path), "--out", str(tmp_path / "out"), "--encoding", "latin-1").returncode == 0
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["encoding"] == "latin-1"
    read = bytes(token for split in ("train", "val") for token in ids(tmp_path / "out", split) if token < 256)
    assert read.decode() == "straße über alles " * 50
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = prepare.ensure(DataConfig(source=f"{path}#encoding=latin-1"))
    assert ids(cached, "val") == ids(tmp_path / "out", "val")


def test_a_split_under_a_hundredth_of_the_tokens_is_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1234"}\n' * 380)
    done = command(str(path), "--out", str(tmp_path / "out"), "--val-share", "0.005")
    assert "note: val has 10 tokens of 2 documents, 0.53% of all; val_share of data.prepare" in done.stderr
    done = command(str(path), "--out", str(tmp_path / "more"))
    assert "note: " not in done.stderr


def test_an_unwritable_place_is_named(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    with pytest.raises(DataError, match=r"cannot write token files to /proc/nothing/lineargpt/data/.*XDG_CACHE_HOME"):
        prepare.ensure(DataConfig(source=str(folder)))


def test_the_command(folder, tmp_path):
    done = subprocess.run([sys.executable, "-m", "data.prepare", str(folder), "--tokenizer", "bytes", "--out",
                           str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "train: 26 tokens, 24 bytes, 2 documents" in done.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["TEXTS"], "expected a source and --out DIR"),
    (["TEXTS", "--out", "OUT", "--tokenizer", "byte"], "data.tokenizer: no tokenizer 'byte'"),
    (["TEXTS", "--out", "OUT", "--workers", "0"], "workers is 0; expected a number above 0 (--workers)"),
    (["TEXTS", "--out", "OUT", "--val-documents", "3"], "val_documents is 3; "),
    (["TEXTS", "--out", "OUT", "--column", "a"], "column is a, "),
    (["TEXTS", "--out", "OUT", "--encoding", "no"], "encoding is no: "),
    (["digits", "--out", "OUT"], "data.source: digits is images; expected data.tokenizer pixels (--tokenizer)"),
    (["digits", "--out", "OUT", "--part", "1/2"], "data.source: digits is images; expected data.tokenizer pixels"),
    (["README.md", "--out", "OUT", "--tokenizer", "pixels", "--part", "1/2"],
     "part is 1/2, but data.tokenizer pixels is for images"),
    *((["TEXTS", "--out", "OUT", f"--part={part}"], f"part is {part}; expected NUMBER/PARTS")
      for part in ("0/3", "4/3", "3", "a/b", "1/0", "-1/3")),
    (["TEXTS", "--part", "1/2"], "--part 1/2 requires --out DIR"),
    (["--join", "OUT", "--part", "1/2"], "--part, --join and --verify"),
    (["TEXTS", "--join", "OUT"], "--join OUT needs no source"),
])
def test_a_command_that_cannot_be_run_names_its_flags(folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = command(*(str(folder) if word == "TEXTS" else word for word in arguments))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"data.prepare: {message}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["texts", "images", "task"])
def test_ensure_prepares_once_and_again_when_the_source_changes(folder, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if kind == "images":
        for number in range(3):
            (folder / f"{number}.png").write_bytes(png(np.full((2, 2), number, np.uint8)))
    data = DataConfig(source="copy:length=16,documents=3,val_documents=2" if kind == "task" else str(folder),
                      tokenizer="pixels" if kind == "images" else "bytes")
    first = prepare.ensure(data)
    assert tmp_path / "cache" / "lineargpt" / "data" == first.parent
    written = (first / "meta.json").stat().st_mtime_ns
    assert prepare.ensure(data) == first
    assert (first / "meta.json").stat().st_mtime_ns == written
    if kind != "task":
        (folder / "c.txt").write_text("another third text")
        assert prepare.ensure(data) != first


def test_of_two_processes_one_prepares_and_both_get_it(folder, tmp_path):
    script = ("from configs.schema import DataConfig; from data import prepare; import sys\n"
              "found = prepare.ensure(DataConfig(source=sys.argv[1]))\n"
              "print(found, (found / 'meta.json').stat().st_ino)")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, env=environment,
                                  stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=60)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    TokenFiles.open(first.split()[0])


def test_data_dir_without_token_files_or_of_another_tokenizer(folder, tmp_path):
    data = DataConfig(source="some/dataset", dir=str(tmp_path / "out"), tokenizer="gpt2")
    with pytest.raises(ConfigError, match=r"python -m data\.prepare some/dataset --tokenizer gpt2 --out .*out"):
        prepare.ensure(data)
    prepare.prepare(str(folder), "bytes", tmp_path / "out", progress=False)
    assert prepare.ensure(DataConfig(dir=str(tmp_path / "out"))) == tmp_path / "out"
    with pytest.raises(ConfigError, match=r"data\.tokenizer is gpt2, but .* has tokens of bytes"):
        prepare.ensure(data)
