"""``python -m speech.transcribe``: the transcripts of training, from files of any kind, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech import transcribe
from speech.transcribe import Symbol, text_of, words_of
from tests import small_run
from tests.speech import corpus_folders
from tests.speech.corpus_folders import tone

RECIPE = '''
from configs.schema import CheckpointConfig, EncoderConfig, OptimizerConfig, SpeechConfig, SpeechDataConfig, TrainConfig


def get_config(attention: str = "linear") -> SpeechConfig:
    return SpeechConfig(
        model=EncoderConfig(layers=1, heads=2, width=16, mlp_width=16, context=70, dtype="float32", pooling="none",
                            attention=tuple(attention.split(","))),
        data=SpeechDataConfig(corpus="audio"),
        optimizer=OptimizerConfig(learning_rate=0.02, schedule="constant", warmup_steps=0),
        train=TrainConfig(steps=200, batch_size=4, eval_every=100),
        checkpoint=CheckpointConfig(every_steps=100, keep=1))
'''
TEXTS = {"train": ("AB A", "AB", "BA B", "BA"), "val": ("AB A", "BA"), "test": ("AB A", "BA", "AB")}
PITCHES = {"A": (400, 1200), "B": (2400, 4800), " ": (200, 200)}


def spoken(text: str) -> np.ndarray:
    """Samples of two tones a letter, 16,000 a second."""
    return np.concatenate([tone(0.08, 16_000, hertz) for letter in text for hertz in PITCHES[letter]])


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A corpus, "corpus", and a run on it, "run"; only to be read."""
    folder = tmp_path_factory.mktemp("transcribe")
    (folder / "tones.py").write_text(RECIPE)
    corpus_folders.audio(folder / "corpus", TEXTS)
    for split, texts in TEXTS.items():
        for path, text in zip(sorted((folder / "corpus" / corpus_folders.PLACES[split]).glob("*.flac")), texts,
                              strict=True):
            soundfile.write(path, spoken(text), 16_000)
    assert corpus_folders.run(folder / "tones.py", "--data-dir", folder / "corpus", "--run-dir", folder / "run") == 0
    return folder


def run(*arguments: object) -> int:
    return transcribe.main([str(argument) for argument in arguments])


def test_transcripts_are_those_of_the_test_of_training(folder, tmp_path, capsys):
    capsys.readouterr()
    assert run(folder / "run", "--split", "test") == 0
    scored = json.loads((folder / "run" / "test.json").read_text())
    assert f"test, 3 utterances: letter error rate {scored['error_rate']:.4f}, word error rate " in (
        capsys.readouterr().out)
    lines = map(json.loads, (folder / "run" / "transcripts-test.jsonl").read_text().splitlines())
    hypotheses = {line["reference"]: line["hypothesis"] for line in lines}
    assert hypotheses == {text: text for text in TEXTS["test"]}
    place = folder / "corpus" / corpus_folders.PLACES["test"]
    paths = [place / f"61-702-{number:04}.flac" for number in range(3)]
    # The same sound as a stereo WAV.
    sound, rate = soundfile.read(paths[1])
    soundfile.write(tmp_path / "stereo.wav", np.repeat(sound[:, None], 2, axis=1), rate, subtype="FLOAT")
    assert run(folder / "run", *paths, tmp_path / "stereo.wav") == 0
    expected = [" ".join(hypotheses[text].split()) for text in (*TEXTS["test"], TEXTS["test"][1])]
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: {text}" for path, text in zip([*paths, tmp_path / "stereo.wav"], expected, strict=True)]
    assert run(folder / "run", paths[0], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transcript"] == expected[0]
    assert [word["word"] for word in found["words"]] == expected[0].split()
    assert all(0 <= word["start"] < word["end"] <= 0.64 for word in found["words"])


def test_words_have_the_times_of_their_letters():
    symbols = [Symbol(" ", 1), Symbol("A", 3), Symbol("B", 5), Symbol(" ", 8), Symbol(" ", 9), Symbol("C", 12)]
    assert words_of(symbols) == [{"word": "AB", "start": 0.03, "end": 0.06}, {"word": "C", "start": 0.12, "end": 0.13}]
    assert text_of(symbols) == "AB C"
    assert (words_of([]), text_of([])) == ([], "")


def test_a_recording_that_cannot_be_read_is_named_and_the_others_are_transcribed(folder, tmp_path, capsys):
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "long.wav", tone(1.5, 16_000, 300), 16_000)
    soundfile.write(tmp_path / "short.wav", tone(0.01, 16_000, 300), 16_000)
    soundfile.write(tmp_path / "good.wav", tone(0.5, 8000, 300), 8000)
    capsys.readouterr()
    names = ["missing.wav", "text.wav", "long.wav", "short.wav", ".", "good.wav"]
    assert run(folder / "run", *(tmp_path / name for name in names)) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert out.startswith(f"{tmp_path / 'good.wav'}: ")
    for text in (f"{tmp_path / 'missing.wav'} cannot be transcribed: missing",
                 f"{tmp_path / 'text.wav'} cannot be transcribed: ",
                 f"{tmp_path / 'long.wav'} has 1.5 s; the model reads at most 0.7 s: cut the recording, at pauses",
                 f"{tmp_path / 'short.wav'} cannot be transcribed: it is shorter than a frame, 25 ms",
                 f"{tmp_path} is a folder; expected a recording"):
        assert text in err


def test_a_command_that_cannot_be_run_is_refused(folder, tmp_path, capsys):
    cases: list[tuple[tuple[object, ...], str]] = [
        ((folder / "run",), "expected recordings, or --split"),
        ((folder / "run", "a.wav", "--split", "test"), "expected recordings, or --split, not both"),
        ((folder / "run", "--split", "test", "--json"), "--json and --split are mutually exclusive"),
        ((tmp_path, "a.wav"), "not a run, it has no config.json; expected the folder of a speech.train run"),
        ((folder / "run", "a.wav", "--step", 7), "7")]
    for arguments, message in cases:
        capsys.readouterr()
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err
