"""Transcripts of recordings by a run of speech.train.

    python -m speech.transcribe RUN talk.wav interview.flac
    python -m speech.transcribe RUN talk.wav --json
    python -m speech.transcribe RUN --split test

Prints a line for each file: its transcript, after its name if there are several. WAV, FLAC and whatever else libsndfile
reads, of any rate, mono or stereo. A recording may be as long as the model's context. With --json a line is an object
with the words and their times. The symbols are the best of each frame, without a language model.

--split writes RUN/transcripts-SPLIT.jsonl, with hypotheses beside references, and prints the error rates of letters and
words.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Float, Int

from configs.schema import SpeechConfig
from data.utterances import BINS, Dataset, normalized
from models.encoder import resolve_config
from models.recogniser import Recogniser
from speech.folders import LETTERS, read_audio
from speech.train import load_data
from support.command import run_command, status
from support.errors import ConfigError, DataError, RunError
from support.files import write_text
from support.flags import checked_flags, flags_by_field
from support.terminal import printable
from training import run_files
from training.environment import configure_jax
from training.loading import restore

FRAME_SECONDS = 0.01
"""Time from one frame to the next."""
ROWS = 8
"""Utterances at once."""


class Symbol(NamedTuple):
    """A symbol of a transcript."""

    text: str
    frame: int
    """The first of the consecutive frames whose best symbol it is."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Recordings."""
    split: Literal["val", "test"] | None = None
    """Split of the run's corpus, in place of files."""
    json: bool = False
    """Print objects with words and times."""
    step: int | None = None
    """Step of the checkpoint. None: the one with the lowest val loss."""


class Transcriber:
    """Transcribes frames with the recogniser of a run.

    Args:
        run: run folder.
        config: of the run, from :func:`read_run`.
        symbols: of the corpus, without the blank.
        features: K.
        step: of the checkpoint; None: the one with the lowest val loss, or else the newest.

    Raises:
        ConfigError: there is no checkpoint at this step.
        RunError, CheckpointError: there is no checkpoint, or none is intact.
    """

    def __init__(self, run: Path, config: SpeechConfig, symbols: Sequence[str], *, features: int = BINS,
                 step: int | None = None):
        self._symbols, self._features, self.context = symbols, features, config.model.context
        model = nnx.eval_shape(lambda: Recogniser(config.model, features=features, symbols=len(symbols) + 1,
                                                  rngs=nnx.Rngs(0)))
        self.step, model = restore(run, model, step, prefer_best=True)
        graph, state = nnx.split(model)

        @jax.jit
        def best(state: Any, frames_BTK: jax.Array, valid_BT: jax.Array) -> jax.Array:
            logits_BTV = nnx.merge(graph, state).forward(frames_BTK, valid_BT=valid_BT)
            return logits_BTV.argmax(axis=2)

        self._best: Callable[..., jax.Array] = lambda *batch: best(state, *batch)

    def __call__(self, utterances: Iterable[Float[np.ndarray, "_ K"]]) -> Iterator[list[Symbol]]:
        """The symbols of each utterance, of at most ``context`` normalised frames."""
        for some in itertools.batched(utterances, ROWS):
            frames_BTK = np.zeros((ROWS, self.context, self._features), np.float32)
            lengths_B = np.zeros(ROWS, int)
            for row, frames_TK in enumerate(some):
                frames_BTK[row, :len(frames_TK)], lengths_B[row] = frames_TK, len(frames_TK)
            best_BT = np.asarray(self._best(frames_BTK, np.arange(self.context) < lengths_B[:, None]))
            yield from (self._collapsed(best_T[:length]) for best_T, length in zip(best_BT, lengths_B[:len(some)],
                                                                                   strict=False))

    def _collapsed(self, best_T: Int[np.ndarray, " T"]) -> list[Symbol]:
        """Without repetitions and then without blanks."""
        before_T = np.concatenate([[0], best_T[:-1]])
        return [Symbol(self._symbols[int(best_T[t]) - 1], int(t))
                for t in np.flatnonzero((best_T != 0) & (best_T != before_T))]


def read_run(run: Path) -> SpeechConfig:
    """The config of a run of speech.train, with compute dtype and modes resolved.

    Raises:
        ConfigError: it is no such run.
        RunError: its config is damaged.
    """
    if not (run / run_files.CONFIG).is_file():
        raise ConfigError(f"{run}: not a run, it has no {run_files.CONFIG}; expected the folder of a speech.train run")
    config = run_files.load_config(run)
    if not isinstance(config, SpeechConfig):
        raise ConfigError(f"{run} is a {config.KIND} run of {config.COMMAND}; expected a {SpeechConfig.KIND} run of "
                          f"{SpeechConfig.COMMAND}")
    return dataclasses.replace(config, model=resolve_config(config.model))


def frames_of(path: Path, context: int) -> Float[np.ndarray, "T K"]:
    """The normalised frames of a recording.

    Raises:
        DataError: it is damaged, silent or no audio, or longer than ``context`` frames.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a recording")
    found = read_audio(path)
    if found.damage:
        raise DataError(f"{path} cannot be transcribed: {found.damage}")
    if not len(found.frames_TK):
        raise DataError(f"{path} cannot be transcribed: it is shorter than a frame, 25 ms")
    if len(found.frames_TK) > context:
        raise DataError(f"{path} has {len(found.frames_TK) * FRAME_SECONDS:,.1f} s; the model reads at most "
                        f"{context * FRAME_SECONDS:,.1f} s: cut the recording, at pauses")
    return normalized(found.frames_TK)


def text_of(symbols: Sequence[Symbol]) -> str:
    return " ".join("".join(symbol.text for symbol in symbols).split())


def words_of(symbols: Sequence[Symbol]) -> list[dict[str, Any]]:
    """The words of a transcript of letters, from the frame of the first letter to the one after that of the last."""
    words: list[dict[str, Any]] = []
    for is_space, letters in itertools.groupby(symbols, key=lambda symbol: symbol.text == " "):
        if not is_space:
            spelled = list(letters)
            words.append({"word": "".join(symbol.text for symbol in spelled),
                          "start": round(spelled[0].frame * FRAME_SECONDS, 2),
                          "end": round((spelled[-1].frame + 1) * FRAME_SECONDS, 2)})
    return words


def transcribe_files(options: Options) -> int:
    """Print the transcripts; returns 1 if a file cannot be read.

    Raises:
        ConfigError: the run was not trained on audio.
    """
    config = read_run(options.run)
    if config.data.corpus != "audio":
        raise ConfigError(f"{options.run} was trained on data.corpus {config.data.corpus}; expected a run of audio")
    transcriber, failed = Transcriber(options.run, config, LETTERS, step=options.step), False
    for path in options.files:
        try:
            symbols, = transcriber([frames_of(path, transcriber.context)])
        except DataError as error:
            status(f"speech.transcribe: {error}")
            failed = True
            continue
        name = f"{path}: " if len(options.files) > 1 else ""
        print(json.dumps({"file": str(path), "transcript": text_of(symbols), "words": words_of(symbols)},
                         ensure_ascii=False) if options.json else printable(name + text_of(symbols)), flush=True)
    return int(failed)


def transcribe_split(options: Options, split: str) -> None:
    """Write the hypotheses of a split of the run's corpus, and print the error rates.

    Raises:
        ConfigError, DataError: as :func:`speech.train.load_data`; or it is another corpus than in training.
        RunError: the file cannot be written.
    """
    from rapidfuzz.distance import Levenshtein

    config = read_run(options.run)
    dataset: Dataset = load_data(config)
    if dataset.checksum != run_files.read_environment(options.run).get("corpus_checksum"):
        raise DataError(f"the corpus is not that of the training of {options.run}: its checksum differs")
    utterances = dataset.splits[split]
    transcriber = Transcriber(options.run, config, dataset.symbols, features=dataset.features, step=options.step)
    between = "" if " " in dataset.symbols else " "  # letters with spaces, or phones
    lines, totals = [], {"letter": [0, 0], "word": [0, 0]}
    found = transcriber(utterances.frames[row] for row in range(len(utterances.lengths_N)))
    for symbols, symbols_L in zip(found, utterances.symbols_NL, strict=True):
        hypothesis = [symbol.text for symbol in symbols]
        reference = [dataset.symbols[number - 1] for number in symbols_L[symbols_L != 0]]
        texts = between.join(hypothesis), between.join(reference)
        for unit, (ours, theirs) in {"letter": (hypothesis, reference), "word": map(str.split, texts)}.items():
            totals[unit][0] += Levenshtein.distance(ours, theirs)
            totals[unit][1] += len(theirs)
        lines.append(json.dumps({"reference": texts[1], "hypothesis": texts[0]}, ensure_ascii=False))
    path = options.run / f"transcripts-{split}.jsonl"
    rates = {unit: errors / max(1, count) for unit, (errors, count) in totals.items()}
    print(f"{options.run}: step {transcriber.step:,}, {split}, {len(lines):,} utterances: "
          + (f"letter error rate {rates['letter']:.4f}, word error rate {rates['word']:.4f}" if not between else
             f"error rate {rates['letter']:.4f}"))
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror or error})") from error


def command(arguments: Sequence[str]) -> int:
    """Transcribe from a command line."""
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="python -m speech.transcribe",
                       description=__doc__)
    if bool(options.files) == (options.split is not None):
        raise ConfigError("expected recordings, or --split" + (", not both" if options.files else ""))
    if options.json and options.split is not None:
        raise ConfigError("--json and --split are mutually exclusive")
    configure_jax()
    if options.split is not None:
        transcribe_split(options, options.split)
        return 0
    return transcribe_files(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("speech.transcribe", command, arguments, flags=flags_by_field(Options))


if __name__ == "__main__":
    sys.exit(main())
