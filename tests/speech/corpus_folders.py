"""Corpora in folders, small enough for a test, and the command in this process."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speech import train as speech_train

PLACES = {"train": "train-clean-100/19/198", "val": "dev-clean/84/121", "test": "test-clean/61/702"}


def tone(seconds: float, rate: int, hertz: float) -> np.ndarray:
    """Samples of a quiet tone."""
    return 0.1 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def audio(folder: Path, texts: Mapping[str, Sequence[str]], *, rate: int = 16_000, suffix: str = "flac",
          seconds: float = 0.6) -> Path:
    """A corpus in LibriSpeech's layout with these transcripts; every utterance is a tone of another pitch."""
    for split, lines in texts.items():
        place = folder / PLACES[split]
        place.mkdir(parents=True)
        ids = [f"{place.parent.name}-{place.name}-{number:04}" for number in range(len(lines))]
        for number, name in enumerate(ids):
            soundfile.write(place / f"{name}.{suffix}", tone(seconds, rate, 300 + 100 * number), rate)
        (place / f"{place.parent.name}-{place.name}.trans.txt").write_text(
            "".join(f"{name} {text}\n" for name, text in zip(ids, lines, strict=True)))
    return folder


def features(folder: Path, texts: Mapping[str, Sequence[str]], *, frames: int = 12, width: int = 3) -> Path:
    """A corpus of arrays of features with these transcripts."""
    for seed, (split, lines) in enumerate(texts.items()):
        place = folder / {"train": "train_si284", "val": "dev93", "test": "test92"}[split]
        place.mkdir(parents=True)
        for number in range(len(lines)):
            np.save(place / f"u{number}.npy", np.random.default_rng([seed, number]).normal(
                3, 2, (frames, width)).astype(np.float32))
        (place / "transcripts.txt").write_text("".join(f"u{n} {text}\n" for n, text in enumerate(lines)))
    return folder


def run(*arguments: object) -> int:
    """The exit code of ``speech.train``, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech_train, "STARTED", time.perf_counter())
        given: Any = list(map(str, arguments))
        try:
            return speech_train.main(given)
        except SystemExit as exit:
            return int(exit.code or 0)
