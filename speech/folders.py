"""The features of corpora in a folder, whose layouts are those of :mod:`speech.layouts`.

Of ``audio``, the symbols are letters, and the features log energies of 40 mel bins, every 10 ms. Of ``features``, the
symbols are those of symbols.txt in the folder, one a line, or else those of the training transcripts.

In both, every feature has mean 0 and deviation 1 over an utterance. Features are computed once, and kept in a folder.
"""

import hashlib
import os
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float, Int

from data.utterances import (
    BINS,
    ComputedFeatures,
    Dataset,
    Split,
    checksum,
    frames_needed,
    normalized,
    padded,
)
from speech import layouts
from speech.layouts import NAMES, Utterance
from support import interrupts
from support.broken import Broken
from support.command import status
from support.errors import ConfigError, DataError, JsonError
from support.files import replacing
from support.json_files import Count, Digits, Hexadecimal, Natural, read, write
from support.machine import cores
from support.progress import progress_bar

LETTERS = (*string.ascii_uppercase, "'", " ")
"""The symbols of LibriSpeech's transcripts."""
RATE = 16_000
"""Samples per second."""
MOST_SECONDS, MOST_SAMPLES = 3_600, 3_600 * 48_000
"""Maximum length of a recording, and number of its samples in all channels: three hours of silence fit in a FLAC file
of a few kilobytes."""
MOST_RATE = 192_000
"""Maximum samples per second: the filter that resamples can be as long as 20 seconds."""
MOST_NUMBERS = 2**28
"""Maximum number of features of an utterance in all frames."""
_VERSION = 2
SAMPLES_AT_ONCE = 10 * RATE


class _Index(TypedDict):
    """``index.json``, of computed features."""

    lengths: list[Natural]
    damaged: dict[Digits, str]
    """Why rows cannot be used."""
    resampled: dict[Digits, Natural]
    features: Count
    digest: Hexadecimal


class Read(NamedTuple):
    """The frames of a file."""

    frames_TK: Float[np.ndarray, "T K"]
    """Empty if the file is damaged."""
    damage: str = ""
    """Why it cannot be used, if it is damaged."""
    rate: int = RATE
    """Samples per second of the audio."""


class Mapped(NamedTuple):
    """Frames in a mapped file; see :class:`data.utterances.Frames`."""

    frames_FK: Float[np.ndarray, "F K"]
    """Those of all utterances, one after the other."""
    starts_N: Int[np.ndarray, " N"]
    lengths_N: Int[np.ndarray, " N"]

    def __getitem__(self, row: Any) -> Any:
        return self.frames_FK[self.starts_N[row] : self.starts_N[row] + self.lengths_N[row]]


class Corpus(NamedTuple):
    """How the folder of a corpus is read."""

    kind: str
    layout: str
    """What is expected in the folder, for messages."""
    utterances: Callable[[Path], Iterator[Utterance]]
    """The utterances of a folder or a file."""
    read: Callable[[Path], Read]
    symbols: Callable[[Path, Sequence[Utterance]], Sequence[str]]
    """From the folder and the training utterances."""


def load(corpus: Corpus, folder: Path, *, context: int, train_utterances: int | None, val_utterances: int | None,
         seed: int, cache: Path) -> Dataset:
    """The corpus in a folder.

    Args:
        corpus: ``AUDIO`` or ``FEATURES``.
        folder: ``--data-dir``.
        context: longer training utterances are left out.
        train_utterances: size of ``train``, a random subset if there are more; None: all.
        val_utterances: size of ``val`` and of ``test``, likewise.
        seed: of random subsets.
        cache: folder for features.

    Raises:
        ConfigError: more utterances are wanted than there are, or those of val or test are longer than ``context``.
        DataError: the folder is not such a corpus, or more than one utterance in a thousand is broken.
        OSError: the features cannot be written.
    """
    listed, held_out = layouts.splits(folder, corpus.utterances, corpus.layout)
    symbols = tuple(corpus.symbols(folder, listed["train"]))
    ids = {symbol: number for number, symbol in enumerate(symbols, 1)}
    splits, notes, files = {}, [*held_out], []
    left_out, longest = "", (0, "", Path())
    for name, utterances in listed.items():
        index, frames_FK, file = _features(corpus, folder, name, utterances, cache)
        files.append(file)
        if index["resampled"]:
            notes.append(f"{folder}: {_resampled(index['resampled'])} in {NAMES[name]} resampled to {RATE:,} Hz")
        kept, too_long = [], 0
        broken = Broken(f"{folder}, {NAMES[name]}", "utterances", "correct them or leave them out")
        for row, (utterance, length) in enumerate(zip(utterances, index["lengths"], strict=True)):
            if problem := index["damaged"].get(str(row)):
                broken.add(f"{utterance.path} ({problem})")
            elif problem := _problem(utterance, length, ids):
                broken.add(f"{utterance.place} ({problem})")
            elif name == "train" and length > context:
                too_long += 1
            else:
                kept.append(row)
        notes += broken.notes(len(utterances))
        if too_long:
            left_out = (f"{too_long:,} of {len(utterances):,} training utterances have more than {context:,} frames; "
                        "they are left out")
            notes.append(f"{folder}: {left_out}")
        wanted = train_utterances if name == "train" else val_utterances
        if not kept:
            shortest, path = min((length, utterance.path) for utterance, length in
                                 zip(utterances, index["lengths"], strict=True) if length)
            raise ConfigError(f"model.context is {context}; expected at least {shortest}, the frames of the shortest "
                              f"utterance of {NAMES[name]}, {path}")
        if wanted is not None and wanted > len(kept):
            flag = "train_utterances" if name == "train" else "val_utterances"
            raise ConfigError(f"data.{flag} is {wanted}; {NAMES[name]} of {folder} has {len(kept):,} that can be "
                              f"used{f' with model.context {context:,}' if name == 'train' else ''}")
        rows_N = np.array(kept)[np.random.default_rng([seed, *name.encode()]).permutation(len(kept))[:wanted]]
        lengths_N = np.array(index["lengths"], np.int32)
        starts_N = np.cumsum(lengths_N, dtype=np.int64) - lengths_N
        splits[name] = Split(Mapped(frames_FK, starts_N[rows_N], lengths_N[rows_N]), lengths_N[rows_N],
                             padded([[ids[symbol] for symbol in utterances[row].symbols] for row in rows_N]))
        row = rows_N[lengths_N[rows_N].argmax()]
        longest = max(longest, (int(lengths_N[row]), NAMES[name], utterances[row].path))
    if longest[0] > context:
        frames, split, path = longest
        raise ConfigError(f"model.context is {context}; expected at least {frames}, the frames of the longest "
                          f"utterance of {split}, {path}{f'; {left_out}' if left_out else ''}")
    features = {split.frames.frames_FK.shape[1] for split in splits.values()}
    if len(features) > 1:
        raise DataError(f"{folder}: the splits have {' and '.join(map(str, sorted(features)))} features; expected as "
                        "many in each")
    return Dataset(splits, features.pop(), symbols, checksum(splits, *(file.sha256 for file in files), *symbols),
                   tuple(notes), tuple(files))


def sizes(corpus: Corpus, folder: Path) -> tuple[int, int]:
    """The features of a frame and the number of symbols of the corpus in a folder, from its training transcripts and
    the first undamaged utterance.

    Raises:
        DataError: the folder is not such a corpus.
    """
    utterances = layouts.splits(folder, corpus.utterances, corpus.layout)[0]["train"]
    read = (corpus.read(utterance.path) for utterance in utterances)
    features = next((found.frames_TK.shape[1] for found in read if not found.damage), BINS)
    return features, len(corpus.symbols(folder, utterances))


def _problem(utterance: Utterance, length: int, ids: dict[str, int]) -> str:
    """Why an utterance cannot be trained on; empty if it can."""
    if not utterance.symbols:
        return "an empty transcript"
    if unknown := sorted(set(utterance.symbols) - ids.keys()):
        return f"unknown symbols {', '.join(map(repr, unknown))}; expected {' '.join(map(repr, ids))}"
    needed = frames_needed(np.array([ids[symbol] for symbol in utterance.symbols]))
    return "" if length >= needed else f"{length} frames, and its transcript needs {needed}"


def _resampled(counts: dict[str, int]) -> str:
    return " and ".join(f"{count:,} files of {int(rate):,} Hz" for rate, count in sorted(counts.items()))


def _features(corpus: Corpus, folder: Path, name: str, utterances: Sequence[Utterance], cache: Path,
              ) -> tuple[dict[str, Any], Float[np.ndarray, "F K"], ComputedFeatures]:
    """The index, the frames of all utterances, mapped, and their file.

    The index has ``lengths``, ``damaged`` with the reason by row, ``resampled`` with counts by rate, ``features`` and
    ``digest``. Of a file of an earlier run, only the size is checked.
    """
    files = [(str(utterance.path.absolute()), stat.st_size, stat.st_mtime_ns) if (stat := _stat(utterance.path)) else
             str(utterance.path.absolute()) for utterance in utterances]
    key = hashlib.sha256(repr((_VERSION, corpus.kind, files)).encode()).hexdigest()[:16]
    place = cache / f"{folder.resolve().name}-{name}-{key}"
    data, listed = place / "frames.bin", place / "index.json"
    try:
        index = read(listed, _Index)
        whole = (data.stat().st_size == 4 * sum(index["lengths"]) * index["features"]
                 and len(index["lengths"]) == len(utterances) > max(map(int, index["damaged"]), default=-1))
    except (OSError, JsonError):
        index, whole = {}, False
    if not whole:
        status(f"reading {len(utterances):,} utterances of {folder}, {NAMES[name]}; their features are kept in "
               f"{place} …")
        place.mkdir(parents=True, exist_ok=True)
        with interrupts.exit_on_sigterm(), replacing(data) as beside:
            index = _compute(corpus, utterances, beside, f"{folder.resolve().name}, {NAMES[name]}")
        write(listed, index)
    if not sum(index["lengths"]):
        (row, reason), *_ = [*index["damaged"].items(), ("0", "no frames")]
        raise DataError(f"{folder}, {NAMES[name]}: no utterance can be used; the first at "
                        f"{utterances[int(row)].path} ({reason})")
    frames_FK = np.memmap(data, np.float32, "r").reshape(-1, index["features"])
    return index, frames_FK, ComputedFeatures(data, listed, index["digest"])


def _compute(corpus: Corpus, utterances: Sequence[Utterance], path: Path, title: str) -> dict[str, Any]:
    """Reads all files and writes their frames, with a progress bar; returns the index."""
    lengths, damaged, resampled, digest, features = [], {}, Counter[int](), hashlib.sha256(), 0
    total = len(utterances)
    with path.open("wb") as file, ThreadPoolExecutor(len(cores())) as pool, progress_bar(title) as update:
        for row, found in enumerate(pool.map(lambda utterance: corpus.read(utterance.path), utterances)):
            frames_TK, damage = found.frames_TK, found.damage
            if not damage and len(frames_TK):
                features = features or frames_TK.shape[1]
                if frames_TK.shape[1] != features:
                    damage = f"{frames_TK.shape[1]} features, where the first file has {features}"
                elif not np.isfinite(frames_TK).all():
                    damage = "values that are not finite"
            if damage:
                damaged[str(row)], frames_TK = damage, frames_TK[:0]
            elif found.rate != RATE:
                resampled[found.rate] += 1
            written = np.ascontiguousarray(normalized(frames_TK), "<f4") if len(frames_TK) else b""
            lengths.append(len(frames_TK))
            file.write(written)
            digest.update(written)
            update((row + 1) / total, f"{row + 1:,} of {total:,} utterances")
    return {"lengths": lengths, "damaged": damaged, "features": features or BINS, "digest": digest.hexdigest(),
            "resampled": {str(rate): count for rate, count in resampled.items()}}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def read_audio(path: Path) -> Read:
    import soundfile

    none = np.zeros((0, BINS), np.float32)
    try:
        with path.open("rb") as file:
            if missing := _missing_bytes(file.read(12), path.stat().st_size):
                return Read(none, f"truncated: {missing:,} bytes are missing")
            file.seek(0)
            with soundfile.SoundFile(file) as audio:
                rate = audio.samplerate
                if damage := _excess(audio.frames, audio.channels, rate):
                    return Read(none, damage)
                samples_SC = audio.read(dtype="float32", always_2d=True)
    except FileNotFoundError:
        return Read(none, "missing")
    except soundfile.SoundFileError as error:
        return Read(none, " ".join(getattr(error, "error_string", str(error)).split()))
    if not np.isfinite(samples_SC).all():
        return Read(none, "samples that are not finite")
    samples_S = samples_SC.mean(axis=1)
    if rate != RATE and len(samples_S):
        from scipy.signal import resample_poly

        ratio = Fraction(RATE, rate)
        samples_S = resample_poly(samples_S, ratio.numerator, ratio.denominator)
    return Read(log_mel(samples_S), rate=rate)


def _excess(frames: int, channels: int, rate: int) -> str:
    """Why audio is too large, by its header; empty if it is not."""
    if frames == 2**63 - 1:  # of libsndfile
        return "its header does not give its length; encode it into a file, not into a pipe"
    if frames > MOST_SECONDS * rate:
        return f"{frames / rate:,.0f} s of audio; expected at most {MOST_SECONDS:,}"
    if frames * channels > MOST_SAMPLES:
        return f"{frames * channels:,} samples; expected at most {MOST_SAMPLES:,}"
    if rate > MOST_RATE:
        return f"{rate:,} samples a second; expected at most {MOST_RATE:,}"
    return ""


def _missing_bytes(head: bytes, size: int) -> int:
    """The bytes that a WAV file of ``size`` bytes lacks, by its first 12; 0 for other files.

    libsndfile reads a truncated WAV as a shorter one.
    """
    if head[:4] != b"RIFF" or len(head) < 12:
        return 0
    return max(0, 8 + int.from_bytes(head[4:8], "little") - size)


def log_mel(samples_S: Float[np.ndarray, " S"]) -> Float[np.ndarray, "T 40"]:
    """Log energies of mel bins in windows of 25 ms, one every 10 ms; from samples between −1 and 1, ``RATE`` a second.
    """
    import kaldi_native_fbank

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq, options.frame_opts.dither, options.mel_opts.num_bins = RATE, 0.0, BINS
    bank = kaldi_native_fbank.OnlineFbank(options)
    for start in range(0, len(samples_S), SAMPLES_AT_ONCE):  # a list of all would take eight times the memory
        bank.accept_waveform(RATE, (samples_S[start : start + SAMPLES_AT_ONCE] * 32768).tolist())  # of 16-bit samples
    bank.input_finished()
    frames = [bank.get_frame(number) for number in range(bank.num_frames_ready)]
    return np.stack(frames) if frames else np.zeros((0, BINS), np.float32)


def _read_features(path: Path) -> Read:
    none = np.zeros((0, 1), np.float32)
    try:
        frames_TK = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        return Read(none, "missing")
    except (ValueError, OverflowError) as error:
        return Read(none, " ".join(str(error).split()))
    if frames_TK.ndim != 2 or frames_TK.dtype.kind != "f" or not frames_TK.shape[1]:
        return Read(none, f"an array {frames_TK.shape} of {frames_TK.dtype}; expected floats, frames × features")
    if frames_TK.size > MOST_NUMBERS:
        return Read(none, f"{frames_TK.size:,} numbers; expected at most {MOST_NUMBERS:,}")
    return Read(np.array(frames_TK))


def _of_training(folder: Path, utterances: Sequence[Utterance]) -> Sequence[str]:
    path = folder / "symbols.txt"
    if path.is_file():
        try:
            symbols = list(dict.fromkeys(path.read_text(encoding="utf-8").split()))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if not symbols:
            raise DataError(f"{path} is empty; expected the symbols, one a line")
        return symbols
    return sorted({symbol for utterance in utterances for symbol in utterance.symbols})


AUDIO = Corpus("audio", "train*, dev* and test*, or all of the corpus, as *.trans.txt, metadata.csv or *.jsonl with "
               "*.flac or *.wav", layouts.audio, read_audio, lambda folder, utterances: LETTERS)
FEATURES = Corpus("features", "train*, dev* and test*, or all of the corpus, as transcripts.txt with *.npy",
                  layouts.features, _read_features, _of_training)
CORPORA = {corpus.kind: corpus for corpus in (AUDIO, FEATURES)}
