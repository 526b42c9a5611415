"""The layouts of corpora of audio, and what is held out of those without dev and test."""

import json
from collections import Counter
from pathlib import Path

import pytest

from speech import folders, layouts
from support.errors import DataError
from tests.speech import corpus_folders


def splits(folder: Path):
    return layouts.splits(folder, layouts.audio, "a layout")


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(("text", "expected"), [
    ("Mr. Müller's \"naïve\" co-operation—or not?", "MR MULLER'S NAIVE CO OPERATION OR NOT"),
    ("it’s (almost)  done;", "IT'S ALMOST DONE"), ("IT'S GO", "IT'S GO"), ("7 øre", "7 ØRE"), (" . ", "")])
def test_transcripts_become_capitals_without_punctuation(text, expected):
    assert layouts.letters(text) == expected


def test_ljspeech(tmp_path):
    for number in range(1, 41):
        touch(tmp_path / "wavs" / f"LJ001-{number:04}.wav")
    lines = [f"LJ001-{number:04}|Page {number}.|page number {'i' * number}." for number in range(1, 40)]
    (tmp_path / "metadata.csv").write_text("\n".join([*lines, 'LJ001-0040|"In being|']))
    found, notes = splits(tmp_path)
    assert {name: len(utterances) for name, utterances in found.items()} == {"train": 36, "val": 2, "test": 2}
    assert notes == (f"{tmp_path} has no dev*: 2 of 40 training utterances are held out for it",
                     f"{tmp_path} has no test*: 2 of 38 training utterances are held out for it")
    by_path = {utterance.path: utterance for utterances in found.values() for utterance in utterances}
    assert len(by_path) == 40
    assert by_path[tmp_path / "wavs" / "LJ001-0003.wav"].symbols == "PAGE NUMBER III"
    assert by_path[tmp_path / "wavs" / "LJ001-0040.wav"].symbols == "IN BEING"
    assert by_path[tmp_path / "wavs" / "LJ001-0003.wav"].place == f"{tmp_path}/metadata.csv line 3"
    (tmp_path / "metadata.csv").write_text("file_name,transcription\n")
    with pytest.raises(DataError, match=r"metadata\.csv line 1: expected ID\|transcript\|normalized transcript, found"):
        splits(tmp_path)


@pytest.mark.parametrize("keys", [("audio", "text", "speaker"), ("audio_filepath", "text", "speaker_id"),
                                  ("file_name", "transcription", "speaker")])
def test_json_lines_in_one_file_hold_out_speakers(tmp_path, keys):
    rows = [dict(zip(keys, (f"clips/{number}.flac", "yes no", number % 10), strict=True)) for number in range(100)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found, notes = splits(tmp_path)
    speakers = {name: Counter(utterance.speaker for utterance in utterances) for name, utterances in found.items()}
    assert not speakers["val"].keys() & speakers["test"].keys()
    assert not (speakers["val"].keys() | speakers["test"].keys()) & speakers["train"].keys()
    assert list(map(len, speakers.values())) == [8, 1, 1]
    assert notes == tuple(f"{tmp_path} has no {name}*: 1 of {count} speakers, with 10 of {10 * count} training "
                          "utterances, are held out for it" for name, count in (("dev", 10), ("test", 9)))
    assert found["train"][0].path == tmp_path / "clips" / found["train"][0].path.name
    assert found == splits(tmp_path)[0]  # the same at every start
    for row in rows[::2]:
        del row[keys[2]]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert splits(tmp_path)[1][0].endswith("no dev*: 5 of 100 training utterances are held out for it")


def test_json_lines_of_splits(tmp_path):
    for name in ("train", "validation", "test-other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"audio": f"{name}.wav", "text": name}))
    found, notes = splits(tmp_path)
    assert notes == ()
    assert {name: [utterance.symbols for utterance in utterances] for name, utterances in found.items()} == {
        "train": ["TRAIN"], "val": ["VALIDATION"], "test": ["TEST OTHER"]}
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"expected a layout; found no folder train\*, only test-other\.jsonl, valid"):
        splits(tmp_path)


@pytest.mark.parametrize(("line", "message"), [
    ("{", r"train\.jsonl line 1 is not JSON"), ("[1]", "line 1: expected an object with the path of a recording"),
    ('{"audio": 1, "text": "a"}', r"its text \(text, transcription, transcript\), found '\{\"audio\": 1,"),
    ('{"audio": "a.wav"}', "expected an object with the path"), ("\n", r"train\.jsonl: no utterances; expected a lay")])
def test_lines_that_are_no_utterances(tmp_path, line, message):
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(DataError, match=message):
        splits(tmp_path)


def test_a_corpus_that_is_too_small_to_hold_something_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"audio": "a.wav", "text": "a"}')
    with pytest.raises(DataError, match=r"no dev\* or test\*, and too few training utterances to hold some out"):
        splits(tmp_path)


def test_speakers_of_librispeech_are_held_out_of_a_corpus_without_dev(tmp_path):
    for speaker in range(1, 8):
        place = tmp_path / "train-mini" / str(speaker) / "9"
        place.mkdir(parents=True)
        (place / f"{speaker}-9.trans.txt").write_text("".join(f"{speaker}-9-{n:04} go\n" for n in range(3)))
    (tmp_path / "test-mini").mkdir()
    (tmp_path / "test-mini" / "a.trans.txt").write_text("one YES\n")
    found, notes = splits(tmp_path)
    assert notes == (f"{tmp_path} has no dev*: 1 of 7 speakers, with 3 of 21 training utterances, are held out for it",)
    assert len({utterance.speaker for utterance in found["val"]}) == 1
    assert [utterance.symbols for utterance in found["test"]] == ["YES"]


def test_lower_case_trains_like_upper_case(tmp_path):
    texts = {"train": ["HELLO THERE", "IT'S"], "val": ["YES"], "test": ["NO"]}
    loaded = [folders.load(folders.AUDIO, corpus_folders.audio(tmp_path / name, made), context=100,
                           train_utterances=None, val_utterances=None, seed=0, cache=tmp_path / "cache")
              for name, made in (("upper", texts), ("lower", {split: [*map(str.lower, lines)]
                                                              for split, lines in texts.items()}))]
    assert loaded[0].checksum == loaded[1].checksum
