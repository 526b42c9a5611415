"""Corpora in folders: layouts, features, what is left out, and bad input."""

import io
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speech import folders
from support.errors import ConfigError, DataError
from tests.edited import edited
from tests.speech import corpus_folders

TEXTS = {"train": ["HELLO", "A B", "IT'S", "GO", "STOP"], "val": ["YES"], "test": ["NO"]}
PHONES = {"train": ["sil aa", "aa aa b"], "val": ["b"], "test": ["sil sil"]}


def load(folder: Path, corpus: Any = folders.AUDIO, **changed: Any) -> Any:
    settings = {"context": 100, "train_utterances": None, "val_utterances": None, "seed": 0,
                "cache": folder.parent / "cache"}
    return folders.load(corpus, folder, **settings | changed)


def texts_of(dataset: Any, split: str) -> dict[str, np.ndarray]:
    """The frames of each transcript."""
    found = dataset.splits[split]
    return {"".join(dataset.symbols[symbol - 1] for symbol in row[row > 0]): found.frames[number]
            for number, row in enumerate(found.symbols_NL)}


@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_librispeech_is_read_with_its_transcripts(tmp_path, suffix):
    dataset = load(corpus_folders.audio(tmp_path / "corpus", TEXTS, suffix=suffix))
    assert {split: set(texts_of(dataset, split)) for split in TEXTS} == {
        split: set(texts) for split, texts in TEXTS.items()}
    assert (dataset.features, len(dataset.symbols), dataset.notes) == (40, 28, ())
    frames_TK = texts_of(dataset, "train")["HELLO"]
    assert frames_TK.shape == (58, 40)  # 600 ms: the last window of 25 ms starts at 570
    np.testing.assert_allclose(frames_TK.mean(axis=0), 0, atol=1e-3)


def test_files_may_be_in_the_folder_of_the_split_itself(tmp_path):
    in_chapters = load(corpus_folders.audio(tmp_path / "corpus", TEXTS, suffix="wav"))
    for place in corpus_folders.PLACES.values():
        for path in (tmp_path / "corpus" / place).iterdir():
            path.rename(tmp_path / "corpus" / place.split("/")[0] / path.name)
    flat = load(tmp_path / "corpus")
    assert not list((tmp_path / "corpus").glob("*/*/*/*"))
    assert flat.checksum == in_chapters.checksum


def test_the_features_of_a_tone_are_loudest_at_its_pitch():
    """The bins are even on the mel scale from 20 Hz to 8 kHz."""
    def mel(hertz: float) -> float:
        return 1127 * np.log(1 + hertz / 700)

    for hertz in (500, 1500, 4000):
        tone = corpus_folders.tone(0.2, folders.RATE, hertz).astype(np.float32)
        loudest = folders.log_mel(tone).mean(axis=0).argmax()
        place = (mel(hertz) - mel(20)) / (mel(8000) - mel(20)) * 41 - 1
        assert abs(loudest - place) < 1


def test_audio_of_another_rate_is_resampled_with_a_note(tmp_path):
    slow = load(corpus_folders.audio(tmp_path / "slow", TEXTS, rate=8000))
    assert f"{tmp_path / 'slow'}: 5 files of 8,000 Hz in train resampled to 16,000 Hz" in slow.notes
    loudest = {folders.read_audio(make_tone(tmp_path / f"{rate}.wav", rate)).frames_TK[5:50].mean(axis=0).argmax()
               for rate in (8000, 16_000)}
    assert len(loudest) == 1


def make_tone(path: Path, rate: int) -> Path:
    soundfile.write(path, corpus_folders.tone(0.6, rate, 1000), rate)
    return path


def test_features_are_computed_once(tmp_path, monkeypatch):
    folder = corpus_folders.audio(tmp_path / "corpus", TEXTS)
    first = load(folder)

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(folders, "log_mel", refuse)
    again = load(folder)
    assert again.checksum == first.checksum
    np.testing.assert_array_equal(texts_of(again, "train")["GO"], texts_of(first, "train")["GO"])
    path = next((tmp_path / "corpus").rglob("*-0003.flac"))
    soundfile.write(path, corpus_folders.tone(0.5, 16_000, 200), 16_000)
    with pytest.raises(AssertionError, match="read again"):
        load(folder)


def test_computing_features_shows_progress_and_ends_on_sigterm_without_a_rest(tmp_path, capsys):
    folder, before = corpus_folders.features(tmp_path / "corpus", PHONES), signal.getsignal(signal.SIGTERM)

    def terminated(path: Path) -> Any:
        if path.name == "u1.npy":
            signal.raise_signal(signal.SIGTERM)
        return folders.FEATURES.read(path)

    with pytest.raises(SystemExit) as ended:
        load(folder, folders.FEATURES._replace(read=terminated))
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    load(folder, folders.FEATURES)
    assert "2 of 2 utterances" in capsys.readouterr().err


def test_a_changed_file_changes_the_checksum(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    first = load(folder, folders.FEATURES)
    np.save(folder / "train_si284" / "u0.npy", np.ones((11, 3), np.float32))
    assert load(folder, folders.FEATURES).checksum != first.checksum


def test_features_and_phones_are_read_with_the_symbols_of_training(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    dataset = load(folder, folders.FEATURES)
    assert (dataset.symbols, dataset.features) == (("aa", "b", "sil"), 3)
    assert sorted(row[row > 0].tolist() for row in dataset.splits["train"].symbols_NL) == [[1, 1, 2], [3, 1]]
    assert dataset.splits["test"].symbols_NL.tolist() == [[3, 3]]
    (folder / "symbols.txt").write_text("sil\nb\naa\n")
    assert load(folder, folders.FEATURES).symbols == ("sil", "b", "aa")


def test_subsets_are_random_but_the_same(tmp_path):
    folder = corpus_folders.audio(tmp_path / "corpus", TEXTS)
    few = load(folder, train_utterances=2)
    assert set(texts_of(few, "train")) == set(texts_of(load(folder, train_utterances=2), "train"))
    assert len(few.splits["train"].lengths_N) == 2
    with pytest.raises(ConfigError, match=r"data\.train_utterances is 6; train of .* has 5 that can be used"):
        load(folder, train_utterances=6)


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda folder: next(folder.rglob("19-198-0001.flac")).write_bytes(b"fLaC and nothing else"),
     r"1 of 5 utterances are broken, the first at \S+19-198-0001\.flac \(.*\); expected at most one in a thousand"),
    (lambda folder: next(folder.rglob("19-198-0002.flac")).unlink(), r"19-198-0002\.flac \(missing\)"),
    (lambda folder: rewrite(folder, "GO", "GØ 1"),
     r"19-198\.trans\.txt line 4 \(unknown symbols '1', 'Ø'; expected 'A' 'B' 'C'"),
    (lambda folder: rewrite(folder, "GO", ""), r"line 4 \(an empty transcript\)"),
    (lambda folder: rewrite(folder, "GO", "O" * 30), r"line 4 \(58 frames, and its transcript needs 59\)"),
])
def test_what_cannot_be_used_is_named_and_counted_and_refused_if_frequent(tmp_path, break_it, message):
    folder = corpus_folders.audio(tmp_path / "corpus", TEXTS)
    break_it(folder)
    with pytest.raises(DataError, match=message):
        load(folder)


def rewrite(folder: Path, old: str, new: str) -> None:
    path = next(folder.rglob("19-198.trans.txt"))
    path.write_text(path.read_text().replace(f" {old}\n", f" {new}\n"))


@pytest.mark.parametrize(("array", "reason"), [
    (np.ones((5, 4), np.float32), "4 features, where the first file has 3"),
    (np.full((5, 3), np.nan, np.float32), "values that are not finite"),
    (np.ones(5, np.float32), r"an array \(5,\) of float32; expected floats, frames × features"),
    (np.ones((5, 0), np.float32), r"an array \(5, 0\) of float32; expected floats, frames × features"),
])
def test_arrays_of_other_shapes_and_values_are_broken(tmp_path, array, reason):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    np.save(folder / "train_si284" / "u1.npy", array)
    with pytest.raises(DataError, match=reason):
        load(folder, folders.FEATURES)


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated: 1,000 bytes are missing"),
    (lambda path: soundfile.write(path, np.full(9600, np.nan), folders.RATE, subtype="FLOAT"),
     "samples that are not finite"),
])
def test_damaged_wav_files_are_broken(tmp_path, damage, reason):
    folder = corpus_folders.audio(tmp_path / "corpus", TEXTS, suffix="wav")
    damage(next(folder.rglob("19-198-0000.wav")))
    with pytest.raises(DataError, match=reason):
        load(folder)


def test_damaged_features_in_the_cache_are_computed_again(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    before = np.array(load(folder, folders.FEATURES).splits["train"].frames[0])
    (kept,) = [path for path in tmp_path.rglob("frames.bin") if "-train-" in path.parent.name]
    kept.write_bytes(kept.read_bytes()[:-4])
    np.testing.assert_array_equal(load(folder, folders.FEATURES).splits["train"].frames[0], before)
    kept.write_bytes(bytes(kept.stat().st_size))
    damaged = load(folder, folders.FEATURES)  # a start does not read them
    with pytest.raises(DataError, match=r"frames\.bin does not match its checksum; the next start computes "):
        damaged.verify()
    again = load(folder, folders.FEATURES)
    again.verify()
    np.testing.assert_array_equal(again.splits["train"].frames[0], before)


def flac_of_length(samples: int) -> bytes:
    """A FLAC file of little, whose header gives this number of samples, or none for 0."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1600), folders.RATE, format="FLAC")
    content = bytearray(file.getvalue())
    content[21] = content[21] & 0xF0 | samples >> 32
    content[22:26] = (samples & 0xFFFF_FFFF).to_bytes(4, "big")
    return bytes(content)


@pytest.mark.parametrize(("samples", "reason"), [
    (3 * 3600 * folders.RATE, "10,800 s of audio; expected at most 3,600"),
    (2**36 - 1, "4,294,967 s of audio; expected at most 3,600"),
    (0, "its header does not give its length; encode it into a file"),
])
def test_audio_of_hours_is_named_and_not_decoded(tmp_path, monkeypatch, samples, reason):
    folder = corpus_folders.audio(tmp_path / "corpus", TEXTS)
    next(folder.rglob("19-198-0000.flac")).write_bytes(flac_of_length(samples))
    read = soundfile.SoundFile.read

    def refuse(file: Any, *given: Any, **named: Any) -> Any:
        assert len(file) < 10**6
        return read(file, *given, **named)

    monkeypatch.setattr(soundfile.SoundFile, "read", refuse)
    with pytest.raises(DataError, match=rf"the first at \S+19-198-0000\.flac \({reason}"):
        load(folder)


def test_the_samples_of_all_channels_and_the_numbers_of_an_array_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MOST_SAMPLES", 20_000)
    soundfile.write(tmp_path / "three.wav", np.zeros((9600, 3)), folders.RATE)
    assert folders.read_audio(tmp_path / "three.wav").damage == "28,800 samples; expected at most 20,000"
    soundfile.write(tmp_path / "two.wav", np.zeros((9600, 2)), folders.RATE)
    assert folders.read_audio(tmp_path / "two.wav").frames_TK.shape == (58, 40)
    soundfile.write(tmp_path / "fast.wav", np.zeros(9600), 2**31 - 1)
    assert folders.read_audio(tmp_path / "fast.wav").damage == ("2,147,483,647 samples a second; expected at most "
                                                                 "192,000")
    with (tmp_path / "many.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**27, 3)})
        file.truncate(file.tell() + 4 * 3 * 2**27)  # without blocks on the disk
    assert folders._read_features(tmp_path / "many.npy").damage == "402,653,184 numbers; expected at most 268,435,456"
    with (tmp_path / "none.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 40)})
    assert folders._read_features(tmp_path / "none.npy").damage == "mmap length is greater than file size"


def test_the_features_of_long_audio_are_those_of_one_piece(monkeypatch):
    samples_S = np.random.default_rng(0).normal(0, 0.1, 5_000).astype(np.float32)
    whole = folders.log_mel(samples_S)
    monkeypatch.setattr(folders, "SAMPLES_AT_ONCE", 777)
    np.testing.assert_array_equal(folders.log_mel(samples_S), whole)


@pytest.mark.parametrize(("entry", "value"), [
    ("lengths", [3, "3"]), ("lengths", [6]), ("features", 0), ("features", "2"), ("digest", None), ("damaged", ["0"]),
    ("damaged", {"9": "missing"}), ("resampled", {"fast": 1})])
def test_an_index_that_cannot_be_is_made_again(tmp_path, entry, value):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    before = np.array(load(folder, folders.FEATURES).splits["train"].frames[0])
    (index,) = [path for path in tmp_path.rglob("index.json") if "-train-" in path.parent.name]
    whole = index.read_bytes()
    with edited(index) as values:
        values[entry] = value
    np.testing.assert_array_equal(load(folder, folders.FEATURES).splits["train"].frames[0], before)
    assert index.read_bytes() == whole


def test_one_in_a_thousand_is_left_out_with_a_note(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES | {"train": ["sil b"] * 1000}, frames=3)
    (folder / "train_si284" / "u7.npy").write_bytes(b"damaged")
    dataset = load(folder, folders.FEATURES)
    assert len(dataset.splits["train"].lengths_N) == 999
    (note,) = dataset.notes
    assert "1 of 1,000 utterances are broken, the first at" in note
    assert "u7.npy" in note
    assert note.endswith("they are skipped")


def test_long_training_utterances_are_left_out_with_a_note(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    np.save(folder / "train_si284" / "u1.npy", np.ones((101, 3), np.float32))
    dataset = load(folder, folders.FEATURES)
    assert len(dataset.splits["train"].lengths_N) == 1
    assert dataset.notes == (f"{folder}: 1 of 2 training utterances have more than 100 frames; they are left out",)


def test_an_utterance_beyond_the_context_is_named_with_its_split(tmp_path):
    folder = corpus_folders.features(tmp_path / "corpus", PHONES)
    for place, frames in (("train_si284", 300), ("dev93", 101), ("test92", 203)):
        np.save(folder / place / "u0.npy", np.ones((frames, 3), np.float32))
    with pytest.raises(ConfigError) as refused:
        load(folder, folders.FEATURES)
    assert str(refused.value) == (
        f"model.context is 100; expected at least 203, the frames of the longest utterance of test, "
        f"{folder / 'test92' / 'u0.npy'}; 1 of 2 training utterances have more than 100 frames; they are left out")
    with pytest.raises(ConfigError, match=r"is 9; expected at least 12, .* shortest utterance of train, \S+u1\.npy"):
        load(folder, folders.FEATURES, context=9)


@pytest.mark.parametrize(("make", "message"), [
    (lambda folder: None, "no such folder; expected train"),
    (lambda folder: folder.mkdir(), r"found an empty folder"),
    (lambda folder: (folder / "data").mkdir(parents=True), r"found no folder train\*, only data"),
    (lambda folder: [(folder / name).mkdir(parents=True) for name in ("train", "dev", "test")],
     r"train: no utterances; expected train"),
])
def test_an_empty_folder_is_refused(tmp_path, make, message):
    make(tmp_path / "corpus")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "corpus")
