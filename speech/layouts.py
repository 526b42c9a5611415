"""The utterances of a corpus in a folder, and their splits.

Audio is in one of these layouts, in which a path is relative to the file that names it:

- LibriSpeech's (Panayotov et al., 2015): ID.flac or ID.wav, and beside them a file *.trans.txt with lines of an ID and
  its transcript, in any folders, such as SPLIT/SPEAKER/CHAPTER;
- LJSpeech's (Ito & Johnson, 2017): metadata.csv with lines ID|transcript|normalized transcript, and wavs/ID.wav;
- *.jsonl, with an object a line: the path of a recording and its text, and the speaker if it is known.

Arrays of features are ID.npy, beside transcripts.txt with lines of an ID and the symbols of its transcript, such as
phones, with spaces between.

The splits are folders, or files *.jsonl, whose names begin with train, dev or val, and test. Of a corpus without dev or
test, speakers are held out of the training utterances; of one with fewer than six known speakers, utterances.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.utterances import SPLITS
from support.errors import DataError

NAMES = {"train": "train", "val": "dev", "test": "test"}
"""Of the splits, in messages."""
_PREFIXES = {"train": ("train",), "val": ("dev", "val"), "test": ("test",)}
_SHARE = 20
"""Of a split that a corpus lacks, one training utterance in so many is held out."""
_FEWEST_SPEAKERS = 6
"""With fewer, speakers are not held out."""
AUDIO_KEYS, TEXT_KEYS, SPEAKER_KEYS = (
    ("audio", "audio_filepath", "file_name"), ("text", "transcription", "transcript"), ("speaker", "speaker_id"))


class Utterance(NamedTuple):
    path: Path
    """Of the audio or the features."""
    place: str
    """Of its transcript, for messages."""
    symbols: Sequence[str]
    speaker: str | None = None


def splits(folder: Path, utterances: Callable[[Path], Iterator[Utterance]], layout: str,
           ) -> tuple[dict[str, list[Utterance]], tuple[str, ...]]:
    """The utterances of train, val and test, and notes about what is held out of train.

    Args:
        folder: of the corpus.
        utterances: those of a folder or file, such as :func:`audio`.
        layout: what is expected in the folder, for messages.

    Raises:
        DataError: the folder is not such a corpus.
    """
    if not folder.is_dir():
        raise DataError(f"data.dir {folder}: no such folder; expected {layout} in it")
    places = {name: sorted(path for path in folder.iterdir() if path.name.lower().startswith(_PREFIXES[name])
                           and (path.is_dir() or path.suffix == ".jsonl")) for name in SPLITS}
    found = {name: [utterance for place in places[name] for utterance in utterances(place)] for name in SPLITS}
    if empty := next((places[name][0] for name in SPLITS if places[name] and not found[name]), None):
        raise DataError(f"{empty}: no utterances; expected {layout}")
    if not any(places.values()):
        found["train"] = list(utterances(folder))
    if not found["train"]:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5])
        raise DataError(f"data.dir {folder}: expected {layout}; found "
                        + (f"no folder train*, only {names}" if names else "an empty folder"))
    notes = []
    for name in ("val", "test"):
        if not places[name]:
            found["train"], found[name], what = _held_out(found["train"])
            if not found["train"]:
                raise DataError(f"data.dir {folder}: no dev* or test*, and too few training utterances to hold some "
                                "out")
            notes.append(f"{folder} has no {NAMES[name]}*: {what} are held out for it")
    return found, tuple(notes)


def _held_out(utterances: Sequence[Utterance]) -> tuple[list[Utterance], list[Utterance], str]:
    """The utterances that remain, those that are held out, and what they are; picked by a hash of their names."""
    by_speaker = Counter(utterance.speaker for utterance in utterances)
    wanted, speakers = -(-len(utterances) // _SHARE), set()
    if None in by_speaker or len(by_speaker) < _FEWEST_SPEAKERS:
        order = sorted(range(len(utterances)), key=lambda row: _hash(utterances[row].path.name))
        held_out = {*order[:wanted]}
        what = f"{wanted:,} of {len(utterances):,} training utterances"
    else:
        for speaker in sorted(by_speaker, key=lambda speaker: _hash(str(speaker))):
            if sum(by_speaker[one] for one in speakers) < wanted:
                speakers.add(speaker)
        held_out = {row for row, utterance in enumerate(utterances) if utterance.speaker in speakers}
        what = (f"{len(speakers):,} of {len(by_speaker):,} speakers, with {len(held_out):,} of {len(utterances):,} "
                "training utterances,")
    return ([utterance for row, utterance in enumerate(utterances) if row not in held_out],
            [utterances[row] for row in sorted(held_out)], what)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def audio(place: Path) -> Iterator[Utterance]:
    """The utterances of a folder, or of a file *.jsonl."""
    if place.is_file():
        yield from _of_json_lines(place)
        return
    for transcripts in sorted(place.rglob("*.trans.txt")):
        for name, text, where in _lines(transcripts):
            speaker = re.match(r"(\d+)-\d+-\d+$", name)
            yield Utterance(_recording(transcripts.with_name(name)), where, letters(text),
                            speaker[1] if speaker else None)
    if (metadata := place / "metadata.csv").is_file():
        for number, line in enumerate(_text(metadata).splitlines(), 1):
            name, *texts = line.split("|")
            if not any(texts):
                raise DataError(f"{metadata} line {number:,}: expected ID|transcript|normalized transcript, found "
                                f"{line[:60]!r}")
            path = place / "wavs" / name
            yield Utterance(_recording(path if path.parent.is_dir() else place / name), f"{metadata} line {number:,}",
                            letters(next(text for text in reversed(texts) if text)))
    for path in sorted(place.glob("*.jsonl")):
        yield from _of_json_lines(path)


def features(place: Path) -> Iterator[Utterance]:
    """The utterances of a folder of arrays."""
    if (transcripts := place / "transcripts.txt").is_file():
        for name, text, where in _lines(transcripts):
            yield Utterance(place / f"{name}.npy", where, text.split())


def _of_json_lines(path: Path) -> Iterator[Utterance]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path} line {number:,}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        recording, text = (_value(row, keys) for keys in (AUDIO_KEYS, TEXT_KEYS))
        if not isinstance(recording, str) or not isinstance(text, str):
            raise DataError(f"{where}: expected an object with the path of a recording ({', '.join(AUDIO_KEYS)}) and "
                            f"its text ({', '.join(TEXT_KEYS)}), found {line[:60]!r}")
        speaker = _value(row, SPEAKER_KEYS)
        yield Utterance(path.parent / recording, where, letters(text), None if speaker is None else str(speaker))


def _value(row: Any, keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if key in row), None) if isinstance(row, dict) else None


def letters(text: str) -> str:
    """A transcript in capitals, without accents and punctuation other than the apostrophe, as LibriSpeech has them."""
    text = "".join(letter for letter in unicodedata.normalize("NFKD", text.upper())
                   if not unicodedata.combining(letter))
    text = re.sub("[-‐-―/]", " ", text.replace("’", "'"))
    return " ".join(re.sub(r"[.,;:!?\"“”„«»()\[\]]", "", text).split())


def _recording(path: Path) -> Path:
    """The recording of an ID: FLAC or WAV."""
    flac, wav = (path.with_name(f"{path.name}.{suffix}") for suffix in ("flac", "wav"))
    return wav if wav.exists() and not flac.exists() else flac


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """The ID, the rest and the place of each line of a file of transcripts."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        if words := line.split(maxsplit=1):
            yield words[0], " ".join(words[1:]).strip(), f"{path} line {number:,}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
