"""Batches: which windows they hold, in which order, on which devices; and what damaged files are told."""

import collections
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.schema import ConfigError
from data import DataError, prepare
from data.loader import TokenFiles, batches, fixed_batches

ROOT = Path(__file__).parents[2]
CONTEXT = 4
WINDOWS = 30


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """Token files of which train is 0, 1, 2, … so that a window's first token tells which one it is."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a").write_bytes(bytes(range(CONTEXT * WINDOWS)))
    (texts / "b").write_bytes(b"held out text")
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 50)  # windows straddle shards
    prepare.prepare(str(texts), "bytes", tmp_path / "tokens", progress=False)
    return tmp_path / "tokens"


@pytest.fixture
def files(directory) -> TokenFiles:
    return TokenFiles.open(directory)


def take(files: TokenFiles, count: int, *, start: int = 0, seed: int = 0, batch_size: int = 5, **options) -> list:
    with batches(files, "train", context=CONTEXT, batch_size=batch_size, seed=seed, start=start, **options) as source:
        return [next(source) for _ in range(count)]


def order(found: list) -> list[int]:
    return [int(first) // CONTEXT for batch in found for first in batch.inputs_BT[:, 0]]


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


def test_a_batch_that_straddles_epochs_skips_no_window(files):
    found = order(take(files, 15, batch_size=4))
    assert set(collections.Counter(found).values()) == {2}


def test_seeds_are_unrelated(files):
    epochs = {tuple(order(take(files, 6, seed=seed, start=start))) for seed in range(4) for start in (0, 6)}
    assert len(epochs) == 8


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


def test_two_processes_hold_the_rows_that_one_holds(files, directory):
    """Two processes of two devices each, the batch cut along rows, along both axes, along columns."""
    script = """
import json, sys
import jax
from data.loader import TokenFiles, batches
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
from data.loader import TokenFiles, batches
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
    assert all(np.array_equal(left, right) for left, right in zip(found, again, strict=True))


def test_fixed_batches_shrink_with_the_split_and_repeat_nothing(files):
    assert len(fixed_batches(files, "train", context=CONTEXT, batch_size=7, count=100)) == 4
    (small,) = fixed_batches(files, "val", context=CONTEXT, batch_size=8, count=10)
    assert small.inputs_BT.tolist() == [list(b"held"), list(b" out"), list(b" tex")]


@pytest.mark.parametrize("make", [fixed_batches, batches])
def test_a_context_beyond_the_data_names_both(files, directory, make):
    options = {"count": 1} if make is fixed_batches else {"seed": 0}
    make(files, "val", context=13, batch_size=1, **options)
    with pytest.raises(ConfigError, match=f"context of 14 needs more than the 14 tokens of val in {directory}"):
        make(files, "val", context=14, batch_size=1, **options)


def test_bytes_per_token(files):
    assert files.tokens("val") == 14
    assert files.bytes_per_token("val") == 13 / 14


def test_a_truncated_file_is_named_with_what_was_expected(directory):
    path = directory / "train-00001.bin"
    os.truncate(path, 60)
    with pytest.raises(DataError, match=r"train-00001\.bin: expected 100 bytes, found 60.*prepare it again"):
        TokenFiles.open(directory)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: expected 100 bytes, found 0"):
        TokenFiles.open(directory)


def test_an_id_beyond_the_vocabulary_is_named(directory):
    path = directory / "train-00001.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 999
    tokens.tofile(path)
    files = TokenFiles.open(directory)
    with pytest.raises(DataError, match=r"train-00001\.bin: the token 999 is beyond the vocabulary of 257"):
        take(files, 6)


def test_damaged_meta(directory):
    path = directory / "meta.json"
    meta = json.loads(path.read_text())
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
