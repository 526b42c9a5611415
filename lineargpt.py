"""Train, open and compare runs from Python.

    from lineargpt import compare_runs, harness_model, load_recipe, open_run, train_run

    run = train_run(load_recipe("configs/quickstart.py", "gated"), "runs/gated")
    run = open_run("runs/gated")
    run.metrics                                # a pandas.DataFrame: loss, tokens, seconds, … of every step
    run.sample("def ", max_new_tokens=100)
    compare_runs(["runs/softmax", run])        # in a notebook: verdict, picture and table
    lm_eval.simple_evaluate(harness_model(run), tasks=["lambada_openai"])

Runs are those of train.py, compare.py and sample.py: the same code, the same files. Errors are the project's
(``support/errors.py``): :class:`ConfigError` for a value that cannot be used, a :class:`LineargptError` for a failure.
Messages and progress go to standard error.
"""

import base64
import functools
import html
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import compare
import comparison
import train
from comparison.page import page
from comparison.picture import picture
from comparison.reading import Reader
from comparison.table import as_csv, headings, table_note
from configs.schema import Config, load_recipe
from data import tokenizers
from data.sources.images import ImageFormat
from models.gpt import GPT
from sampling.images import IMAGES, TEMPERATURE, image_sampler, sample_images
from sampling.sampler import Sampler, Sampling
from sampling.samples import sample_text
from support.errors import ConfigError, LineargptError, RunError
from training.config_validation import validate_config
from training.environment import configure_jax
from training.loading import LoadedRun, image_format, load_model, load_tokenizer, read_run
from training.metrics import read_columns

if TYPE_CHECKING:
    import tiktoken
    from lm_eval.api.model import LM

__all__ = ["Config", "ConfigError", "LineargptError", "Run", "RunComparison", "Table", "compare_runs", "harness_model",
           "load_recipe", "open_run", "train_run"]

type Table = Any
"""A ``pandas.DataFrame``; where pandas is not installed, a dict of NumPy arrays of equal length, by column."""


@dataclass(frozen=True, eq=False)
class Run:
    """A run, from :func:`open_run` or :func:`train_run`.

    The model, the tokenizer and the metrics are read on first use, once. To see what a run in training has
    written since, open it again.
    """

    path: Path
    """The run folder."""
    config: Config = field(repr=False)
    """``config.json``, with compute dtype and modes resolved."""
    environment: dict[str, Any] = field(repr=False)
    """``environment.json``: versions, devices, number of parameters, …."""
    checkpoint: int | Literal["newest", "best"] = "newest"
    """The checkpoint of :attr:`model`: its step, the newest intact one, or that with the lowest val loss."""

    @functools.cached_property
    def _loaded(self) -> LoadedRun:
        return load_model(self.path, None if self.checkpoint == "newest" else self.checkpoint)

    @property
    def model(self) -> GPT:
        """The model, on the first device.

        Raises:
            ConfigError: there is no checkpoint at this step.
            RunError: there is no checkpoint yet, or ``"best"`` and no checkpoint has a val loss.
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        return self._loaded.model

    @property
    def step(self) -> int:
        """Number of updates of :attr:`model`; raises the same errors."""
        return self._loaded.step

    @functools.cached_property
    def tokenizer(self) -> "tiktoken.Encoding":
        """The tokenizer.

        Raises:
            ConfigError: there is no such tokenizer, as of a model of images.
            DataError: its vocabulary cannot be downloaded.
            RunError: the model's vocabulary is too small for it.
        """
        return load_tokenizer(self.path, self.config, self.environment["vocabulary_size"])

    @functools.cached_property
    def metrics(self) -> Table:
        """``metrics.jsonl`` as a table, with a row for each line: ``split`` ("train" or "val"), ``step``, ``tokens``,
        ``train_seconds``, ``wall_seconds``, ``loss`` (nats per token), ``learning_rate``, ….

        Values that a line lacks, and losses that are not finite, are NaN. With and without pandas,
        ``metrics["loss"][metrics["split"] == "val"]`` are the val losses.

        Raises:
            RunError: the run has no steps yet, or imported weights.
        """
        path = self.path / "metrics.jsonl"
        columns = read_columns(path) if path.exists() else {}
        if not columns:
            raise RunError(f"{path}: no steps yet; train the run first")
        return _as_table(columns)

    @functools.cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.model, end_of_text=tokenizers.end_of_text(self.tokenizer))

    @functools.cached_property
    def _image_sampler(self) -> Sampler:
        assert self.image is not None
        return image_sampler(self.model, self.image)

    @property
    def image(self) -> ImageFormat | None:
        """The format of the images of a model of images; None for text."""
        return image_format(self.environment)

    def sample_images(self, images: int = IMAGES, *, upper: np.ndarray | None = None, temperature: float = TEMPERATURE,
                      top_k: int = Sampling.top_k, top_p: float = Sampling.top_p, min_p: float = Sampling.min_p,
                      seed: int = Sampling.seed) -> np.ndarray:
        """Sample images, with :attr:`model` as it is now.

        Args:
            images: number of images N.
            upper: levels of the first rows of all of them, (Y, W, C); None: sample all rows.
            temperature, top_k, top_p, min_p, seed: as in :meth:`sample`.

        Returns:
            levels, uint8 (N, H, W, C), from 0 to ``image.levels`` - 1.

        Raises:
            ConfigError: an option is out of range, ``upper`` does not fit, or it is a model of text.
            NotImplementedError: an attention mode of the model has no cached decode.
            LineargptError: the model cannot be loaded.
        """
        if self.image is None:
            raise ConfigError(f"{self.path} is a model of text; use Run.sample")
        sampler = self._image_sampler
        sampler.update(self.model)
        sampling = Sampling(float(temperature), top_k, float(top_p), float(min_p), seed=seed)
        return sample_images(sampler, self.image, sampling, samples=images,
                             upper_YWC=None if upper is None else np.asarray(upper))

    def sample(self, prompt: str | bytes = "", *, max_new_tokens: int = 200, stop: Sequence[str] = (),
               temperature: float = Sampling.temperature, top_k: int = Sampling.top_k, top_p: float = Sampling.top_p,
               min_p: float = Sampling.min_p, repetition_penalty: float = Sampling.repetition_penalty,
               seed: int = Sampling.seed) -> str:
        """Sample text as sample.py does, with :attr:`model` as it is now.

        Args:
            prompt: the text to continue. Empty: the start of a document.
            max_new_tokens: maximum number of new tokens; end-of-text ends the sample earlier.
            stop: the sample ends before the first of these strings.
            temperature: divisor of the logits; 0 is greedy.
            top_k: sample from this number of most likely tokens; 0: from all.
            top_p: sample from the smallest set of most likely tokens with this total probability; 1: from all.
            min_p: sample from tokens with this fraction of the largest probability; 0: from all.
            repetition_penalty: divisor of the logits of tokens that the text has; 1: none.
            seed: the same seed gives the same text.

        Returns:
            the text after the prompt; undecodable bytes are U+FFFD.

        Raises:
            ConfigError: an option is out of range, or the prompt has more tokens than the model positions.
            NotImplementedError: an attention mode of the model has no cached decode.
            LineargptError: model or tokenizer cannot be loaded.
        """
        if isinstance(stop, str):
            raise ConfigError(f"stop is {stop!r}; expected a sequence of strings, such as [{stop!r}]")
        sampling = Sampling(float(temperature), top_k, float(top_p), float(min_p), float(repetition_penalty), seed)
        sampler = self._sampler
        sampler.update(self.model)
        return sample_text(sampler, self.tokenizer, os.fsencode(prompt), sampling, max_new_tokens=max_new_tokens,
                           stop=stop, by_document=self.config.data.packing == "documents")


def open_run(path: str | Path, checkpoint: int | Literal["newest", "best"] = "newest") -> Run:
    """Open a run of train.py, finished or in training.

    Args:
        path: the run folder.
        checkpoint: the checkpoint of its model: a step, the newest intact one, or that with the lowest val loss.

    Raises:
        ConfigError: the folder is not a language-model run, or ``checkpoint`` is not one of these.
        RunError: ``config.json`` or ``environment.json`` is damaged, or of another format.
    """
    if checkpoint not in ("newest", "best") and (isinstance(checkpoint, bool) or not isinstance(checkpoint, int)):
        raise ConfigError(f"checkpoint is {checkpoint!r}; expected a step, \"newest\" or \"best\"")
    configure_jax()
    return Run(Path(path), *read_run(Path(path)), checkpoint)


def harness_model(run: Run | str | Path, *, max_length: int | None = None, rows: int = 8) -> "LM":
    """A model for the Python API of lm-evaluation-harness, which the extra ``eval`` installs.

        lm_eval.simple_evaluate(harness_model("runs/gpt2"), tasks=["lambada_openai"])

    Args:
        run: the run, or its folder.
        max_length: maximum number of tokens of context and continuation; longer contexts lose their beginning. None:
            the training context.
        rows: requests that are read at once.

    Raises:
        ConfigError: it is a model of images, or ``max_length`` or ``rows`` is out of range.
        NotImplementedError: an attention mode of the model has no cached decode.
        LineargptError: model or tokenizer cannot be loaded.
        ModuleNotFoundError: lm-evaluation-harness is not installed.
    """
    from sampling.harness import HarnessModel

    run = run if isinstance(run, Run) else open_run(run)
    most = run.model.max_length
    length = run.config.model.context if max_length is None else max_length
    if length < 1 or (most is not None and length > most):
        raise ConfigError(f"max_length is {length}; expected a number of tokens from 1"
                          + (f" to {most}, the model's number of positions" if most is not None else ""))
    if rows < 1:
        raise ConfigError(f"rows is {rows}; expected at least 1")
    return HarnessModel(run.model, run.tokenizer, length, rows=rows,
                        by_document=run.config.data.packing == "documents")


def train_run(config: Config, run_dir: str | Path, *, init_from: str | Path | None = None,
              reset: Literal["attention"] | None = None) -> Run:
    """Train a run as train.py does, in this process, on all its devices.

    A run that has begun in ``run_dir`` resumes; a finished one is left as it is. Ctrl-C saves a checkpoint and then
    raises ``KeyboardInterrupt``. Call it in the main thread, which receives signals.

    Args:
        config: the config, from a recipe (:func:`load_recipe`) or of your own; it is validated here.
        run_dir: run folder.
        init_from: run whose parameters initialise a new run.
        reset: parameters to initialise randomly instead.

    Returns:
        the run, opened.

    Raises:
        ConfigError: the config cannot be run, or ``run_dir`` is another run.
        NotImplementedError: an attention mode does not support the config.
        TrainingError: a loss, gradient or parameter is not finite, or another process trains in ``run_dir``.
        LineargptError: the data or a checkpoint is damaged, or cannot be written.
        OSError: the disk is full.
    """
    started = time.perf_counter()
    if not isinstance(config, Config):
        raise ConfigError(f"config is a {type(config).__name__}; expected a configs.schema.Config")
    if reset not in (None, "attention"):
        raise ConfigError(f"reset is {reset!r}; expected None or \"attention\"")
    if reset is not None and init_from is None:
        raise ConfigError("reset requires init_from")
    configure_jax()
    code = train.train(validate_config(config), Path(run_dir), None if init_from is None else Path(init_from), reset,
                       started=started)
    if code:  # 128 + the signal that stopped the run, which the caller's own handler gets now
        signal.raise_signal(code - 128)
    return open_run(run_dir)


@dataclass(frozen=True, eq=False, repr=False)
class RunComparison:
    """Runs compared, from :func:`compare_runs`. A notebook shows verdict, picture and table, ``print`` the verdict."""

    comparison: comparison.Comparison
    """The runs, the set-ups, the rows of the table, and when each run reached given losses."""
    remarks: tuple[str, ...] = ()
    """Warnings about the comparison, and damaged lines of the runs."""
    title: str = ""
    """Title of picture and page."""

    @property
    def verdict(self) -> tuple[str, ...]:
        """The summary, in sentences."""
        return self.comparison.verdict

    @property
    def table(self) -> Table:
        """The final figures with full precision, and NaN for unknown ones: a row for each run, and one of means after
        the runs of each set-up with several seeds. Losses are in nats per token, times in seconds."""
        rows = self.comparison.rows
        return _as_table({
            "run": np.array([row.name for row in rows]), "attention": np.array([row.attention for row in rows]),
            "seeds": np.array([row.seeds for row in rows]),
        } | {column.key: np.array([row.figures[column.key] for row in rows], float)
             for column in self.comparison.columns})

    def picture(self, kind: Literal["png", "svg"] = "svg") -> bytes:
        """The picture: val loss against steps and against training time, a line for each set-up; below it, accuracy and
        error rate where runs have them.

        Raises:
            RunError: no run has a curve.
        """
        return picture(self.comparison, kind, self.title)

    def write(self, path: str | Path, *, note: str = "") -> Path:
        """Write a file of compare.py: the page (``.html``), the picture (``.png``, ``.svg``) or the table (``.csv``,
        ``.json``, which has the verdict too).

        Args:
            path: the file; its folder is created if missing.
            note: text at the end of the page.

        Returns:
            the path.

        Raises:
            ConfigError: the name has another ending.
            RunError: no run has a curve, and the file is a picture.
            OSError: the file cannot be written.
        """
        path, compared = Path(path), self.comparison
        contents: dict[str, Callable[[], bytes]] = {
            ".html": lambda: page(compared, title=self.title, note=note).encode(),
            ".png": lambda: self.picture("png"), ".svg": lambda: self.picture("svg"),
            ".csv": lambda: as_csv(compared.rows, compared.columns).encode(), ".json": compared.as_json}
        kind = path.suffix.lower()
        if kind not in contents:
            raise ConfigError(f"{path}: expected a name ending in {', '.join(contents)}")
        compare.write(path, contents[kind]())
        return path

    def __repr__(self) -> str:
        return "\n".join(filter(None, [*self.verdict, table_note(self.comparison.rows, self.comparison.setups)]))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        columns = self.comparison.columns
        sentences = "".join(f"<p>{html.escape(text)}</p>" for text in (*self.verdict, *self.remarks))
        rendered = ""
        if any(run.has_curve for run in self.comparison.runs):
            encoded = base64.b64encode(self.picture("svg")).decode()
            alt = html.escape(self.title or self.comparison.default_title)
            rendered = f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'
        rows = [headings(columns), *(row.cells(columns).values() for row in self.comparison.rows)]
        table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
        return f"<div>{sentences}{rendered}<table>{table}</table></div>"


def compare_runs(runs: Sequence[Run | str | Path], *, title: str = "") -> RunComparison:
    """Compare runs as compare.py does. Runs that differ only in their seed form one set-up.

    Args:
        runs: opened runs or run folders, also of ``lra.train``; their files are read now.
        title: title of picture and page.

    Raises:
        ConfigError: there are no runs, one is given twice, or a folder is not a run.
        RunError: a run has no metrics and no evaluation, or a file is damaged.
        OSError: a file cannot be read.
    """
    if isinstance(runs, str | Path | Run):
        raise ConfigError(f"runs is one run, {runs}; expected a list of them")
    if not runs:
        raise ConfigError("runs is empty; expected opened runs or run folders")
    found = Reader([run.path if isinstance(run, Run) else Path(run) for run in runs]).read()
    if found.damaged:
        raise found.damaged[0]
    if found.passed_over:
        raise ConfigError(found.passed_over[0])
    compared = comparison.compare(found.runs)
    return RunComparison(compared, (*found.notes, *compared.remarks), title)


def _as_table(columns: dict[str, np.ndarray]) -> Table:
    try:
        import pandas
    except ModuleNotFoundError:
        return columns
    return pandas.DataFrame(columns)
