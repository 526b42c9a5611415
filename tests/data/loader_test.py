"""Batches: their windows, order and devices; and errors for damaged files."""

import collections
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiktoken

from configs.schema import EARLIER_DOCUMENTS, DataConfig
from data import prepare, token_files, tokenizers
from data.documents import Document, write_corpus
from data.loader import Batch, Corpora, batches, fixed_batches, open_corpora, units_per_token, windows
from data.sources.source import Selection
from data.token_files import TokenFiles, Vocabulary
from support.errors import ConfigError, DataError
from tests.data.tokenizers_test import GPT2_FILES
from tests.edited import contents, edited

ROOT = Path(__file__).parents[2]
CONTEXT = 4
WINDOWS = 30
GOLDEN = [[18, 8, 16, 7, 20], [6, 27, 4, 13, 0], [16, 6, 20, 3, 19]]


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """Token files whose train split is 0, 1, 2, …, so that a window's first token identifies it."""
    texts = ("held out text", bytes(range(CONTEXT * WINDOWS)).decode())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 50)  # windows straddle shards
    prepare.prepare(str(tmp_path / "rows.jsonl"), "bytes", tmp_path / "tokens", Selection(val_documents=1),
                    progress=False)
    return tmp_path / "tokens"


@pytest.fixture
def files(directory) -> TokenFiles:
    return TokenFiles.open(directory)


def take(files: TokenFiles, count: int, *, start: int = 0, seed: int = 0, batch_size: int = 5, **options) -> list:
    with batches(files, "train", context=CONTEXT, batch_size=batch_size, seed=seed, start=start, **options) as source:
        return [next(source) for _ in range(count)]


def order(found: list) -> list[int]:
    return [int(first) // CONTEXT for batch in found for first in batch.inputs_BT[:, 0]]


def test_a_split_of_few_windows_is_told(files, capsys):
    Corpora.of(files).check_context(CONTEXT, "stream")
    assert capsys.readouterr().err == (f"note: the val split in {files.directory} has only 3 windows of 4 tokens: "
                                       "shorten the context or prepare more text\n")
    Corpora.of(files).check_context(8, "stream")
    assert "the train split in" in capsys.readouterr().err  # 15


@pytest.mark.fast
def test_a_batch_is_windows_and_their_tokens_shifted_by_one(files):
    for batch in take(files, 6):
        assert batch.inputs_BT.shape == batch.targets_BT.shape == (5, CONTEXT)
        assert batch.inputs_BT.dtype == batch.targets_BT.dtype == np.int32
        first = np.asarray(batch.inputs_BT)[:, :1]
        np.testing.assert_array_equal(first % CONTEXT, 0)
        np.testing.assert_array_equal(batch.inputs_BT, first + np.arange(CONTEXT))
        end_of_text = np.where(first + CONTEXT == CONTEXT * WINDOWS, 256, first + CONTEXT)
        np.testing.assert_array_equal(batch.targets_BT, np.concatenate([first + np.arange(1, CONTEXT), end_of_text], 1))


def test_an_epoch_holds_each_window_once_and_the_next_is_another_order(files):
    found = order(take(files, 12))
    first, second = found[:WINDOWS], found[WINDOWS:]
    assert sorted(first) == sorted(second) == list(range(WINDOWS))
    assert first != second
    assert first != sorted(first)


def test_the_order_is_what_it_was(files):
    # A run of an earlier version resumes with the same batches.
    assert [order(take(files, 1, seed=seed, start=start)) for seed, start in ((0, 0), (0, 6), (1, 0))] == GOLDEN


def test_a_batch_that_straddles_epochs_skips_no_window(files):
    found = order(take(files, 15, batch_size=4))
    assert set(collections.Counter(found).values()) == {2}


def test_seeds_are_unrelated(files):
    epochs = {tuple(order(take(files, 6, seed=seed, start=start))) for seed in range(4) for start in (0, 6)}
    assert len(epochs) == 8


@pytest.mark.fast
@pytest.mark.parametrize("start", [1, 7, 103])
def test_start_continues_exactly(files, start):
    assert order(take(files, 3, start=start)) == order(take(files, start + 3))[-15:]


def test_sharded_batches_hold_the_same_rows(files):
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    with jax.transfer_guard("disallow"):
        sharded = take(files, 3, sharding=sharding)
    assert sharded[0].inputs_BT.sharding == sharding
    for left, right in zip(sharded, take(files, 3), strict=True):
        np.testing.assert_array_equal(left.inputs_BT, right.inputs_BT)
        np.testing.assert_array_equal(left.targets_BT, right.targets_BT)


@pytest.mark.thorough
def test_two_processes_hold_the_rows_that_one_holds(files, directory):
    """Two processes of two devices each, the batch cut along rows, along both axes, along columns."""
    script = """
import json, sys
import jax
from data.loader import batches
from data.token_files import TokenFiles
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
out = []
for shape, spec in (((4, 1), jax.P("data")), ((2, 2), jax.P("data", "context")), ((1, 4), jax.P("data", "context"))):
    sharding = jax.NamedSharding(jax.make_mesh(shape, ("data", "context")), spec)
    files = TokenFiles.open(sys.argv[1])
    with batches(files, "train", context=4, batch_size=8, seed=3, start=2, sharding=sharding) as source:
        array = next(source).targets_BT
    out.append([[[index.indices(size)[:2] for index, size in zip(shard.index, array.shape)], shard.data.tolist()]
                for shard in array.addressable_shards])
print(json.dumps(out))
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [subprocess.Popen([sys.executable, "-c", script, str(directory), address, str(index)], cwd=ROOT,
                                  env={**os.environ, "XLA_FLAGS": ""}, stdout=subprocess.PIPE, text=True)
                 for index in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = np.asarray(take(files, 1, batch_size=8, seed=3, start=2)[0].targets_BT)
    for both in zip(*(json.loads(output) for output in outputs), strict=True):
        found = np.full_like(expected, -1)
        for (rows, columns), values in [shard for shards in both for shard in shards]:
            found[slice(*rows), slice(*columns)] = values
        np.testing.assert_array_equal(found, expected)


def test_closing_ends_the_batches_and_forgetting_to_ends_cleanly(directory):
    script = f"""
from data.loader import batches
from data.token_files import TokenFiles
def start():
    return batches(TokenFiles.open({str(directory)!r}), "train", context=4, batch_size=5, seed=0)
closed, forgotten = start(), start()
next(closed), next(forgotten)
closed.close()
closed.close()
assert list(closed) == []
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_fixed_batches_are_evenly_spaced_and_always_the_same(files):
    found = fixed_batches(files, "train", context=CONTEXT, batch_size=5, count=3)
    assert order(found) == list(range(0, WINDOWS, 2))
    np.testing.assert_array_equal(found[0].targets_BT[:, 0], found[0].inputs_BT[:, 1])
    again = fixed_batches(files, "train", context=CONTEXT, batch_size=5, count=3)
    jax.tree.map(np.testing.assert_array_equal, found, again)


def test_fixed_batches_shrink_with_the_split_and_repeat_nothing(files):
    assert len(fixed_batches(files, "train", context=CONTEXT, batch_size=7, count=100)) == 4
    (small,) = fixed_batches(files, "val", context=CONTEXT, batch_size=8, count=10)
    assert small.inputs_BT.tolist() == [list(b"held"), list(b" out"), list(b" tex")]


@pytest.mark.parametrize("make", [fixed_batches, batches])
def test_a_context_beyond_the_data_names_both(files, directory, make):
    options = {"count": 1} if make is fixed_batches else {"seed": 0}
    make(files, "val", context=13, batch_size=1, **options)
    with pytest.raises(ConfigError, match=f"context is 14; the val split in {directory} has only 14 tokens"):
        make(files, "val", context=14, batch_size=1, **options)


@pytest.fixture(params=["small", "gpt2"])
def encoding(request, monkeypatch) -> tiktoken.Encoding:
    """A tokenizer whose tokens have several bytes, and end-of-text none."""
    if request.param == "gpt2":
        if not GPT2_FILES.is_dir():
            pytest.skip(f"the vocabulary of gpt2 is not in {GPT2_FILES}")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_FILES))
        return tokenizers.load("gpt2")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    found = tiktoken.Encoding("o200k_base", pat_str=r" ?[a-z]+|.", mergeable_ranks=ranks,
                              special_tokens={"<|endoftext|>": 259})
    monkeypatch.setattr(tokenizers, "load", lambda name: found)
    return found


@pytest.fixture
def short_documents(encoding, tmp_path) -> TokenFiles:
    """Documents of few tokens, of which some have many bytes."""
    texts = ["the cat", "a", "the", "Rhythm there, the other theme", "xyz"] * 8
    (tmp_path / "tokens").mkdir()
    with token_files.TokenFilesWriter(tmp_path / "tokens", tokenizers.vocabulary(encoding)) as writer:
        for split in ("train", "val"):
            for text in texts:
                writer.write(split, np.append(encoding.encode(text), encoding.eot_token), text_bytes=len(text),
                             documents=1)
        writer.finish({})
    return TokenFiles.open(tmp_path / "tokens")


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_bits_per_byte_are_those_of_the_bytes_of_scored_tokens(encoding, short_documents, packing):
    for count in (1, 2, 1000):  # a part of the windows, and all
        found = fixed_batches(short_documents, "val", context=6, batch_size=2, count=count, packing=packing)
        scored = [token for batch in found for token in batch.targets_BT.ravel().tolist() if token >= 0]
        text = encoding.decode_bytes([token for token in scored if token != encoding.eot_token])
        expected = len(text) / len(scored)
        assert units_per_token(short_documents, "val", found) == pytest.approx(expected)
        nats = 2.5 * len(scored)
        bits = Corpora.of(short_documents).bits(2.5, [units_per_token(short_documents, "val", found)])
        assert bits == {"bits_per_byte": pytest.approx(nats / np.log(2) / len(text))}


def test_bits_per_byte_without_the_vocabulary_are_those_of_the_split(short_documents, monkeypatch, capsys):
    def load(name):
        raise DataError(f"tokenizer {name}: its vocabulary cannot be downloaded")

    monkeypatch.setattr(tokenizers, "load", load)
    found = fixed_batches(short_documents, "val", context=6, batch_size=2, count=1)
    entry = short_documents.meta["splits"]["val"]
    assert units_per_token(short_documents, "val", found) == entry["bytes"] / entry["tokens"]
    assert "note: bits_per_byte is computed with the average bytes per token of the whole split: tokenizer " in (
        capsys.readouterr().err)


def test_tokens_of_another_vocabulary_have_no_bits_per_byte(short_documents):
    short_documents.meta["tokenizer_fingerprint"] = "a" * 64
    with pytest.raises(DataError, match="its vocabulary differs from that of"):
        units_per_token(short_documents, "val", [])


def test_a_truncated_file_is_named_with_what_was_expected(directory):
    path = directory / "train-00001.bin"
    os.truncate(path, 60)
    with pytest.raises(DataError, match=r"train-00001\.bin: expected 100 bytes, found 60.*prepare it again"):
        TokenFiles.open(directory)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin is missing; expected 100 bytes"):
        TokenFiles.open(directory)


def test_an_id_beyond_the_vocabulary_is_named(directory):
    path = directory / "train-00001.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 999
    tokens.tofile(path)
    files = TokenFiles.open(directory)
    with pytest.raises(DataError, match=r"train-00001\.bin: the token 999 is beyond the vocabulary of 257"):
        take(files, 6)


def test_a_shard_of_another_preparation_is_named(directory):
    (directory / "train-00009.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match=r"train-00009\.bin: not in meta\.json"):
        TokenFiles.open(directory)


def test_no_token_is_made_up(directory, files):
    with pytest.raises(DataError, match="train has 121 tokens, but 119 to 124 were requested"):
        files.read("train", 119, 124)
    with edited(directory / "meta.json") as meta:
        meta["splits"]["train"]["tokens"] += 50_000
    with pytest.raises(DataError, match=r"meta\.json is damaged: it gives train 50,121 tokens, and its shards 121"):
        TokenFiles.open(directory)


def test_damaged_meta(directory):
    path = directory / "meta.json"
    meta = contents(path)
    path.write_text(json.dumps(meta | {"vocabulary_size": 200}))
    with pytest.raises(DataError, match="the token 256 of train is beyond the vocabulary of 200"):
        TokenFiles.open(directory)
    for text in ("{}", path.read_text()[:100], "[]", json.dumps(meta | {"splits": {"train": {"largest_id": 3}}})):
        path.write_text(text)
        with pytest.raises(DataError, match=r"meta\.json is damaged"):
            TokenFiles.open(directory)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no meta\.json"):
        TokenFiles.open(directory)


def corpus(directory: Path, lengths: list[int], *, weights: bool = False, shift: int = 0) -> TokenFiles:
    """Documents of 1, 2, 3 … + shift, so that a token gives its position in its document. Weights count the even."""
    def documents(lengths):
        for length in lengths:
            ids = np.arange(1, length + 1) + shift
            yield Document(ids, (ids % 2 == 0).astype(int) if weights else None)

    write_corpus(directory, {"train": documents(lengths), "val": documents([*lengths, 30])}, source="counting",
                 vocabulary=Vocabulary("bytes", None, 1000, 0))
    return TokenFiles.open(directory)


def packed(files: TokenFiles, context: int, split: str = "train") -> list[Batch]:
    rows = windows(files, split, context, "documents")
    return [rows[i] for i in range(len(rows))]


@pytest.mark.fast
def test_documents_lie_whole_in_their_windows_between_separators(tmp_path):
    files = corpus(tmp_path / "tokens", [3, 8, 4, 5, 2])
    found = packed(files, 8)
    assert [row.inputs_BT.tolist() for row in found] == [
        [0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert [row.targets_BT.tolist() for row in found] == [
        [1, 2, 3, 0, -1, -1, -1, -1], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 0, 1, 2, 0], [1, 2, 3, 4, 5, 0, -1, -1]]
    assert [row.segment_ids_BT.tolist() for row in found] == [  # pyright: ignore[reportOptionalMemberAccess]
        [0, 0, 0, 0, -1, -1, -1, -1], [0] * 8, [0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1, -1]]
    assert windows(files, "train", 8, "documents").padding == pytest.approx(6 / 32)
    assert all(array.dtype == np.int32 for row in found for array in jax.tree.leaves(row))


@pytest.mark.fast
def test_the_first_token_of_each_document_is_a_target_after_the_separator(tmp_path):
    # Documents that all begin with 1, as texts that begin with "Q": a model must learn it from end-of-text.
    files = corpus(tmp_path / "tokens", [3, 5, 9, 16, 2] * 20)
    after_separator = collections.Counter()
    for row in packed(files, 8):
        begins = (row.inputs_BT == files.separator) & (row.targets_BT >= 0)
        after_separator.update(row.targets_BT[begins].tolist())
    assert after_separator == {1: 100}


def test_a_document_longer_than_a_window_is_cut_and_loses_no_target(tmp_path):
    files = corpus(tmp_path / "tokens", [20, 2])
    found = packed(files, 8)
    assert [row.inputs_BT.tolist() for row in found] == [
        [0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 0, 1, 2]]
    assert [row.targets_BT.tolist() for row in found] == [
        [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18, 19, 20, 0, 1, 2, 0]]


def test_a_document_that_fills_its_windows_leaves_out_the_separator_after_it(tmp_path):
    files = corpus(tmp_path / "tokens", [16, 8, 7])
    assert [row.targets_BT.tolist() for row in packed(files, 8)] == [
        [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 0]]


def test_a_last_document_without_separator_ends_in_a_target(tmp_path):
    files = corpus(tmp_path / "tokens", [2, 4])
    with edited(tmp_path / "tokens" / "meta.json") as meta:
        shard = meta["splits"]["train"]["shards"][0]
        meta["splits"]["train"]["tokens"] = shard["tokens"] = files.tokens("train") - 1
    os.truncate(tmp_path / "tokens" / shard["file"], 2 * shard["tokens"])
    _, window = packed(TokenFiles.open(tmp_path / "tokens"), 6)
    assert window.inputs_BT.tolist() == [0, 1, 2, 3, 0, 0]
    assert window.targets_BT.tolist() == [1, 2, 3, 4, -1, -1]


@pytest.mark.fast
@pytest.mark.parametrize("context", [16, 100])
def test_packing_is_best_fit_and_loses_nothing(tmp_path, context):
    lengths = np.random.default_rng(0).integers(1, 60, 400).tolist()
    files = corpus(tmp_path / "tokens", lengths)
    rows = windows(files, "train", context, "documents")
    assert windows(files, "train", context, "documents") is rows
    rooms: list[int] = []  # best fit, a document at a time
    whole = [length + (length % context > 0) for length in lengths]  # with the separator, unless it would not fit
    parts = [min(context, length - start) for length in whole for start in range(0, length, context)]
    for part in sorted(parts, reverse=True):
        fitting = [room for room in rooms if room >= part]
        if fitting:
            rooms[rooms.index(min(fitting))] -= part
        else:
            rooms.append(context - part)
    assert len(rows) == len(rooms)
    assert rows.padding == pytest.approx(sum(rooms) / (len(rooms) * context))
    inputs, targets = collections.Counter(), collections.Counter()
    for row in packed(files, context):
        tokens = row.segment_ids_BT >= 0  # pyright: ignore[reportOptionalOperand]
        inputs.update(row.inputs_BT[tokens].tolist())
        targets.update(row.targets_BT[tokens].tolist())
        assert (row.targets_BT[~tokens] == -1).all()
    expected = collections.Counter(token for length in lengths for token in range(1, length + 1))
    full = collections.Counter(length for length in lengths if length % context == 0)
    assert targets == expected + collections.Counter({0: 400 - full.total()})
    assert inputs == expected - full + collections.Counter({0: 400})


def test_packed_text_keeps_its_documents(directory):
    files = TokenFiles.open(directory)
    (first, *_, last) = packed(files, 32)
    assert first.inputs_BT.tolist() == [256, *range(31)]
    assert last.targets_BT[last.targets_BT >= 0].tolist() == [*range(96, 120), 256]


def test_weights_take_targets_out_in_both_packings(tmp_path):
    files = corpus(tmp_path / "tokens", [3, 5, 4], weights=True)
    rows = windows(files, "train", 7, "stream")
    assert [rows[i].inputs_BT.tolist() for i in range(2)] == [[1, 2, 3, 0, 1, 2, 3], [4, 5, 0, 1, 2, 3, 4]]
    assert [rows[i].targets_BT.tolist() for i in range(2)] == [[2, -1, -1, -1, 2, -1, 4], [-1, -1, -1, 2, -1, 4, -1]]
    # Separators with weight 0 take no position of a window.
    assert [row.inputs_BT.tolist() for row in packed(files, 7)] == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]]
    assert [row.targets_BT.tolist() for row in packed(files, 7)] == [
        [-1, 2, -1, -1, 2, -1, 4], [-1, 2, -1, 4, -1, -1, -1]]
    assert files.weighted


def test_a_separator_with_weight_1_is_a_target(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 6)  # weights of separators in several files
    with token_files.TokenFilesWriter(tmp_path, Vocabulary("bytes", None, 9, 0)) as writer:
        for split in ("train", "val"):
            for weight in (0, 1, 1):
                writer.write(split, np.array([1, 2, 3, 0]), np.array([1, 0, 1, weight]), text_bytes=3, documents=1)
        writer.finish({})
    assert [row.targets_BT.tolist() for row in packed(TokenFiles.open(tmp_path), 7)] == [
        [1, -1, 3, 1, -1, 3, 0], [1, -1, 3, 0, -1, -1, -1]]


def test_weights_that_are_missing_damaged_or_all_zero(tmp_path):
    path = tmp_path / "tokens" / "train-00000.weights.bin"
    files = corpus(tmp_path / "tokens", [3, 5, 4], weights=True)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"train-00000\.weights\.bin: weight 7, expected 0 or 1"):
        packed(TokenFiles.open(files.directory), 7)
    path.write_bytes(bytes(files.tokens("train")))
    with pytest.raises(DataError, match="all weights are 0 in the 2 evaluated windows of train"):
        fixed_batches(TokenFiles.open(files.directory), "train", context=7, batch_size=2, count=1)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00000\.weights\.bin is missing; expected 15 bytes"):
        TokenFiles.open(files.directory)


def test_packed_batches_continue_exactly_and_are_sharded_like_tokens(tmp_path):
    files = corpus(tmp_path / "tokens", [3, 8, 4, 5, 2] * 9)
    sharding = jax.NamedSharding(jax.make_mesh((1, 1), ("data", "context")), jax.P("data", "context"))

    def packed_batches(count, **options):
        with batches(files, "train", context=8, batch_size=4, seed=1, packing="documents", **options) as source:
            return [next(source) for _ in range(count)]

    found = packed_batches(9)
    jax.tree.map(np.testing.assert_array_equal, packed_batches(2, start=7, sharding=sharding), found[7:])
    segment_ids = packed_batches(1, sharding=sharding)[0].segment_ids_BT
    assert isinstance(segment_ids, jax.Array)
    assert segment_ids.sharding == sharding
    assert any((batch.segment_ids_BT == -1).any() for batch in found)
    epoch = np.concatenate([batch.inputs_BT for batch in found])[: len(windows(files, "train", 8, "documents"))]
    rows = packed(files, 8)
    assert sorted(map(tuple, epoch.tolist())) == sorted(tuple(row.inputs_BT.tolist()) for row in rows)


def counted(directory: Path, lengths: list[int], *, weights: bool = False, **about) -> TokenFiles:
    """Documents that count on from one to the next, 100, 101, …; the separator is 7. Weights count the even."""
    def documents():
        for length, end in zip(lengths, np.cumsum(lengths), strict=True):
            ids = np.arange(end - length, end) + 100
            yield Document(ids, (ids % 2 == 0).astype(int) if weights else None)

    write_corpus(directory, {"train": documents(), "val": documents()}, source="counting",
                 vocabulary=Vocabulary("pixels", None, 1000, 7), **about)
    return TokenFiles.open(directory)


@pytest.mark.fast
def test_a_row_is_a_document_after_its_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 6)  # rows straddle shards
    rows = windows(counted(tmp_path / "tokens", [4] * 3), "train", 4, "rows")
    assert len(rows) == 3
    assert [rows[i].inputs_BT.tolist() for i in range(3)] == [
        [7, 100, 101, 102], [7, 104, 105, 106], [7, 108, 109, 110]]
    assert [rows[i].targets_BT.tolist() for i in range(3)] == [
        [100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]
    assert rows[0].segment_ids_BT is None
    weighted = windows(counted(tmp_path / "weighted", [4] * 3, weights=True), "train", 4, "rows")
    assert weighted[1].targets_BT.tolist() == [104, -1, 106, -1]


def test_batches_of_rows_continue_exactly_and_have_every_document_once(tmp_path):
    files = counted(tmp_path / "tokens", [4] * 10)

    def first_pixels(count, **options):
        with batches(files, "train", context=4, batch_size=5, seed=1, packing="rows", **options) as source:
            return [np.asarray(next(source).targets_BT)[:, 0].tolist() for _ in range(count)]

    found = first_pixels(4)
    assert sorted(found[0] + found[1]) == sorted(found[2] + found[3]) == list(range(100, 140, 4))
    assert first_pixels(2, start=2) == found[2:]
    (batch,) = fixed_batches(files, "val", context=4, batch_size=5, count=1, packing="rows")
    assert batch.targets_BT[:, 0].tolist() == [100, 108, 116, 124, 132]


def test_documents_that_are_no_rows_are_refused(tmp_path):
    files = counted(tmp_path / "tokens", [4] * 3)
    with pytest.raises(ConfigError, match=r"context is 5; with data\.packing rows, expected the length of the "
                                          "documents, which have 4 tokens in the train split"):
        windows(files, "train", 5, "rows")
    mixed_lengths = counted(tmp_path / "mixed", [4, 4, 2])
    with pytest.raises(ConfigError, match="documents, which have 2 to 4 tokens in the val split"):
        windows(mixed_lengths, "val", 4, "rows")
    images = counted(tmp_path / "images", [4] * 3, unit="dimension")
    for packing in ("stream", "documents"):
        with pytest.raises(ConfigError, match=rf"data\.packing is {packing}; expected rows for the images in"):
            windows(images, "train", 4, packing)
    for one, unit in ((images, "dimension"), (files, "byte")):  # no separator is scored
        found = fixed_batches(one, "val", context=4, batch_size=3, count=1, packing="rows")
        assert Corpora.of(one).bits(np.log(2), [units_per_token(one, "val", found)]) == {f"bits_per_{unit}": 1.0}


@pytest.fixture
def mixture(tmp_path) -> DataConfig:
    """Three corpora, identified by their first token, with weights of 5/8, 2/8 and 1/8."""
    for number, name in enumerate("abc"):
        corpus(tmp_path / name, [8] * (20 + number), shift=100 * number)
    return DataConfig(mixture=((str(tmp_path / "a"), 2.5), (str(tmp_path / "b"), 1), (str(tmp_path / "c"), 0.5)))


def mixed(data: DataConfig, count: int, *, start: int = 0, seed: int = 0, batch_size: int = 4) -> np.ndarray:
    with batches(open_corpora(data), "train", context=8, batch_size=batch_size, seed=seed, start=start,
                 packing="documents") as source:
        return np.concatenate([next(source).inputs_BT for _ in range(count)])


def test_a_mixture_has_its_shares_at_every_moment(mixture):
    which = mixed(mixture, 100)[:, 1] // 100
    given = np.cumsum(which[:, None] == np.arange(3)[None, :], axis=0)
    assert np.abs(given - np.arange(1, 401)[:, None] * np.array([[5, 2, 1]]) / 8).max() < 3
    assert given[-1].tolist() == [250, 100, 50]


def test_a_mixture_goes_through_each_corpus_once_before_the_next_order(tmp_path):
    files = [corpus(tmp_path / name, list(range(5, 9)), shift=10 * number) for number, name in enumerate("ab")]
    data = DataConfig(mixture=tuple((str(one.directory), 1.0) for one in files))
    with batches(open_corpora(data), "train", context=9, batch_size=8, seed=0, packing="documents") as source:
        for _ in range(3):
            ends = [int(row.max()) for row in np.asarray(next(source).inputs_BT)]
            assert sorted(ends) == [5, 6, 7, 8, 15, 16, 17, 18]


@pytest.mark.parametrize("start", [1, 23])
def test_a_mixture_continues_exactly(mixture, start):
    np.testing.assert_array_equal(mixed(mixture, 2, start=start), mixed(mixture, start + 2)[-8:])
    np.testing.assert_array_equal(mixed(mixture, 4, batch_size=2), mixed(mixture, 2))


def test_a_mixture_has_the_checksum_of_all_its_parts(mixture):
    corpora = open_corpora(mixture)
    assert corpora.names == ("a", "b", "c")
    assert corpora.tokens("val") == sum(files.tokens("val") for files in corpora.files)
    double = DataConfig(mixture=tuple((source, 2 * weight) for source, weight in mixture.mixture))
    other = DataConfig(mixture=((mixture.mixture[0][0], 2), *mixture.mixture[1:]))
    part = DataConfig(mixture=mixture.mixture[:1])
    assert open_corpora(double).checksum == corpora.checksum
    assert open_corpora(part).checksum == corpora.files[0].checksum
    assert len({open_corpora(data).checksum for data in (mixture, other, part)}) == 3


def test_a_mixture_prepares_sources_and_names_them(mixture, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "xyz":
        (texts / name).write_bytes(name.encode() * 100)
    (tmp_path / "more" / "a").mkdir(parents=True)
    corpus(tmp_path / "more" / "a", [8, 9])
    data = DataConfig(mixture=((str(tmp_path / "more" / "a"), 1), (str(tmp_path / "a"), 1)))
    assert open_corpora(data).names == tuple(source for source, _ in data.mixture)
    with pytest.raises(ConfigError, match=r"data\.mixture: the vocabulary_size of .*texts is 257, .* is 1000"):
        open_corpora(DataConfig(mixture=(mixture.mixture[0], (str(texts), 1))))


def test_a_mixture_of_two_vocabularies_of_one_name_is_refused(mixture):
    for (source, _), fingerprint in zip(mixture.mixture, (None, "a" * 64, "b" * 64), strict=True):
        with edited(Path(source, "meta.json")) as meta:
            meta |= {"tokenizer": "o200k_base", "tokenizer_fingerprint": fingerprint}
    with pytest.raises(ConfigError, match=r"data\.mixture: .*/c and .*/b were made with different vocabularies"):
        open_corpora(replace(mixture, tokenizer="o200k_base"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda entries: [(entries[0][0], 0)], "the weight of .*/a is 0; expected a number above 0"),
    (lambda entries: [(entries[0][0], float("nan"))], "the weight of .*/a is nan"),
    (lambda entries: [entries[0], entries[1], entries[0]], "/a is given twice; add up its weights"),
    (lambda entries: [entries[0], ("no-such-corpus.txt", 1)], "no-such-corpus.txt: "),
])
def test_a_mixture_that_does_not_go_together(mixture, change, message):
    with pytest.raises(ConfigError, match=f"data.mixture: .*{message}"):
        open_corpora(DataConfig(mixture=tuple(change(mixture.mixture))))


def test_documents_of_an_earlier_version_have_no_windows(files):
    with pytest.raises(ConfigError, match=r"of an earlier version of lineargpt; evaluate the run with that version"):
        windows(files, "train", 4, EARLIER_DOCUMENTS)


def test_a_corpus_shorter_than_a_window_is_refused_in_both_packings(tmp_path):
    files = corpus(tmp_path / "tokens", [3, 4])
    assert len(packed(files, 8)) == 2
    for packing in ("stream", "documents"):
        with pytest.raises(ConfigError, match=r"context is 9; the train split in .* has only 9 tokens"):
            windows(files, "train", 9, packing)
