"""Evaluate a run on validation tokens: loss, loss by position, and the gain over a short window of context.

    python eval.py runs/softmax --context 1024,4096 --windows 64,256
    python eval.py runs/digits-linear --split test
    python eval.py runs/softmax --by-token-class
    python eval.py runs/parity-kda --length 64,128,256,512
    python eval.py runs/mqar-gated --by distance
    python eval.py runs/gpt2 --tasks lambada_openai,hellaswag

Prints tables, then writes RUN/evaluation.json, which compare.py draws. At the training context alone, the loss equals
that of the run's val lines. Other contexts must fit the model's positions: any length with rotary positions or none, at
most the number of learned positions otherwise. All contexts are evaluated on the same tokens; documents are packed
separately for each.

The gain over a window of W tokens is computed on tokens with more than W tokens of context. It is their loss when the
model sees at most the last W tokens (more than three quarters of W: training.evaluation.short_windows), minus their
loss with all of the context.

Each loss has its standard error over windows. At contexts other than that of training, at least 8 windows are
evaluated.

RUN/evaluation-windows.npz has the sum of the loss of each window, in nats, and its number of tokens. compare.py uses
them to pair two set-ups by seed and window, which needs fewer seeds to show a difference.

--by-token-class also splits the loss by what the tokens are (data/token_classes.py): repeats of n-grams and first
occurrences, spaces, letters and brackets, and parts of Python or words of prose. In each of these partitions every
token has one class, so that shares and losses add up to the total. compare.py shows the differences.

--length, for runs of a synthetic task, generates the task at each length and gives accuracy and loss at all scored
tokens and at the last of each document. --by depth and --by distance give them by where the answer stood in the
document, or by how many tokens before. The results are written to RUN/evaluation-task.json, which compare.py draws;
nothing else is evaluated.

--tasks evaluates tasks of lm-evaluation-harness (the extra eval) instead, and of task files in --task-dir. Its results
are printed and written to RUN/evaluation-harness.json, which compare.py does not read. Contexts and continuations have
at most as many tokens as the training context; longer contexts lose their beginning.

--split test, for images, evaluates the whole split test unless --batches is given. Its results are printed and written
to RUN/evaluation-test.json instead, which only studies read.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from comparison.evaluation_tables import harness_rows, tables, task_tables
from comparison.table import print_texts
from configs.schema import DataConfig
from data import synthetic_tasks, tokenizers
from data.documents import BYTES
from data.loader import Corpora, open_corpora
from data.sources.images import ImageFormat
from data.token_classes import check_text
from support.command import run_command, status, warnings_as_notes
from support.errors import ConfigError, RunError
from support.flags import checked_flags, flags_by_field
from support.json_files import write
from support.terminal import printable
from training import evaluation
from training.environment import PUBLISHED, configure_jax, environment
from training.loading import LoadedRun, load_model, load_tokenizer
from training.run_files import EVALUATION, TASK_EVALUATION, TEST_EVALUATION
from training.sharding import inference_mesh
from training.task_evaluation import By, evaluate_task
from training.window_losses import FILE as WINDOW_LOSSES
from training.window_losses import write_window_losses

LEAST_WINDOWS = 8
"""Minimum number of windows of the longest context, unless only the training context is evaluated."""


@dataclass(frozen=True)
class Data:
    """Corpus, if not that of training."""

    dir: str | None = None
    """Folder of token files, whose split is evaluated. Its tokenizer must be the run's."""
    source: str | None = None
    """Corpus to prepare, in place of a folder; as --data.source of train.py."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    context: str | None = None
    """Context length, or several, comma-separated. None: that of training."""
    windows: str = "64,256"
    """Lengths of the short windows, comma-separated; those not shorter than the context are skipped."""
    batches: int | None = None
    """Number of batches, at most all of the split. None: the run's train.eval_batches, or all of test."""
    split: Literal["val", "test"] = "val"
    """Split to evaluate: parts of val, or all of test, unless --batches is given. Only images have the split test."""
    length: str | None = None
    """Lengths at which a synthetic task is generated, comma-separated. None: with --by, that of training."""
    by_token_class: bool = False
    """Split the loss by classes of tokens: repeats and first occurrences, letters and brackets, parts of Python or
    words of prose."""
    by: By | None = None
    """For a synthetic task, accuracy by the part of the document in which the answer stood (depth), or by the number of
    tokens from there (distance)."""
    tasks: str | None = None
    """Tasks of lm-evaluation-harness, comma-separated."""
    task_dir: Path | None = None
    """Folder of further task files for --tasks."""
    fewshot: int | None = None
    """With --tasks, number of examples before each request. None: that of the task."""
    limit: int | None = None
    """With --tasks, maximum number of documents of a task. None: all."""
    step: int | None = None
    """Step of the checkpoint. None: the latest."""
    devices: int = 1
    """Number of devices that share the parameters and the rows of a batch."""
    data: Data = field(default_factory=Data)


def evaluate(options: Options) -> None:
    """Load the model, open the corpus, evaluate, print the results and write them.

    Raises:
        ConfigError, NotImplementedError: usage; nothing was evaluated.
        RunError, CheckpointError, DataError, OSError: a file cannot be used.
    """
    if options.batches is not None and options.batches < 1:
        raise ConfigError(f"--batches is {options.batches}; expected at least 1")
    if options.tasks is not None:
        evaluate_tasks(options)
        return
    for name in ("task_dir", "fewshot", "limit"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} requires --tasks")
    if options.length is not None or options.by is not None:
        evaluate_lengths(options)
        return
    contexts = lengths("--context", options.context) if options.context is not None else []
    windows = lengths("--windows", options.windows)
    with warnings_as_notes():
        mesh = inference_mesh(options.devices)
        run = load_model(options.run, options.step, mesh)
    contexts = contexts or [run.config.model.context]
    corpora = open_corpora(data_config(run, options.run, options.data))
    if corpora.image != run.environment.get("image"):
        raise ConfigError(f"{corpora} has {_images(corpora.image)}; expected the images of {options.run}: "
                          f"{_images(run.environment.get('image'))}")
    if corpora.vocabulary_size > run.model.vocab_size:
        raise ConfigError(f"{corpora} has a vocabulary of {corpora.vocabulary_size} tokens; expected that of the "
                          f"model of {options.run}, {run.model.vocab_size}")
    if corpora.checksum != run.environment.get("corpus_checksum"):
        status(f"{corpora} is not the training corpus of {options.run}")
    evaluation.check_contexts(run.model, corpora, contexts, options.split)
    for files in corpora.files if options.by_token_class else ():
        check_text(files)
    train = run.config.train
    batches = train.eval_batches if options.batches is None else options.batches
    tokens = batches * train.batch_size * run.config.model.context
    if options.split == "test" and options.batches is None:
        tokens = max(files.tokens("test") for files in corpora.files)
    if contexts != [run.config.model.context]:  # otherwise the loss equals that of the val lines
        tokens = max(tokens, LEAST_WINDOWS * max(contexts))
    if run.config.data.verify:
        corpora.verify([options.split])
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = evaluation.evaluate(
            run.model, corpora, contexts=contexts, windows=windows, tokens=tokens,
            tokens_at_once=train.batch_size // train.accumulate * run.config.model.context,
            packing=run.config.data.packing, split=options.split, by_token_class=options.by_token_class,
            progress=status)
    path = options.run / (EVALUATION if options.split == "val" else TEST_EVALUATION)
    try:
        print_results(run, corpora, found, options)
    except BrokenPipeError:  # nobody reads them
        raise
    except OSError as error:
        raise RunError(f"standard output cannot be written ({error.strerror or error}); the results are in {path}"
                       ) from error
    finally:
        write_results(run, corpora, found, options, path)


def evaluate_tasks(options: Options) -> None:
    """Evaluate tasks of lm-evaluation-harness, print the results and write them.

    Raises: as :func:`evaluate`; ModuleNotFoundError: lm-evaluation-harness is not installed.
    """
    from sampling import harness

    check_unused(options, "--tasks", "context", "windows", "batches", "split", "length", "by_token_class", "by",
                 "devices")
    if options.data != Data():
        raise ConfigError("--data and --tasks are mutually exclusive: a task has its own data")
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks names no task; expected one or more, comma-separated, such as lambada_openai")
    for flag, value, least in (("--fewshot", options.fewshot, 0), ("--limit", options.limit, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{flag} is {value}; expected at least {least}")
    if options.task_dir is not None and not options.task_dir.is_dir():
        raise ConfigError(f"--task-dir {options.task_dir}: there is no such folder")
    tasks = harness.load_tasks(names, options.task_dir)
    with warnings_as_notes():
        run = load_model(options.run, options.step)
    model = harness.HarnessModel(
        run.model, load_tokenizer(options.run, run.config, run.model.vocab_size), run.config.model.context,
        by_document=run.config.data.packing == "documents")
    found = harness.run_tasks(model, tasks, names, fewshot=options.fewshot, limit=options.limit)
    path = options.run / "evaluation-harness.json"
    try:
        print(printable(f"{options.run}: step {run.step:,}, {','.join(run.config.model.attention)}, "
                        f"lm-evaluation-harness {found['lm_eval_version']}"))
        rows = harness_rows(found["results"])
        print_texts("", list(rows[0]), [list(row.values()) for row in rows], texts=2)
        print(end="", flush=True)
    finally:
        with writing(path):
            write(path, {"step": run.step, "limit": options.limit, **provenance(run), "harness": found})


def check_unused(options: Options, flag: str, *names: str) -> None:
    """Raises :class:`ConfigError` if an option is given that ``flag`` does not use."""
    for name in names:
        if getattr(options, name) != getattr(Options, name):
            raise ConfigError(f"--{name.replace('_', '-')} and {flag} are mutually exclusive")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context that writes printed results to a file; raises :class:`RunError` if the folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the printed results are not in {path}: the folder cannot be written "
                       f"({error.strerror or error}); free disk space, or evaluate a copy of the run in a folder that "
                       "can be written") from error


def evaluate_lengths(options: Options) -> None:
    """Evaluate a run of a synthetic task at the lengths of the command line, print the results and write them.

    Raises: as :func:`evaluate`.
    """
    check_unused(options, "--length" if options.length is not None else "--by",
                 "context", "windows", "split", "by_token_class")
    at = None if options.length is None else lengths("--length", options.length)
    if options.data.dir is not None:
        raise ConfigError("--data.dir holds token files; name a task with --data.source, such as mqar:length=64")
    with warnings_as_notes():
        mesh = inference_mesh(options.devices)
        run = load_model(options.run, options.step, mesh)
    task = task_of(run, options)
    if BYTES.size > run.model.vocab_size:
        raise ConfigError(f"{options.run} has a vocabulary of {run.model.vocab_size} tokens; expected the {BYTES.size} "
                          "of synthetic tasks")
    if options.by is not None and next(task.split("val")).answers_L is None:
        raise ConfigError(f"--by {options.by}: the answers of {task.name()} stand at no single place in its documents")
    train, trained = run.config.train, run.config.model.context
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = evaluate_task(
            run.model, task, lengths=at or [task.length], progress=status,
            documents=(train.eval_batches if options.batches is None else options.batches) * train.batch_size,
            tokens_at_once=train.batch_size // train.accumulate * trained,
            segments=run.config.data.packing == "documents")
    path = options.run / TASK_EVALUATION
    try:
        print(printable(f"{options.run}: step {run.step:,}, {','.join(run.config.model.attention)}, trained at a "
                        f"context of {trained:,}, on {task.name()}"))
        for title, rows in task_tables(found, options.by):
            print_texts(title, list(rows[0]), [list(row.values()) for row in rows])
        print(end="", flush=True)
    finally:
        with writing(path):
            write(path, {"step": run.step, "task": task.name(), "settings": task.settings, "lengths": found,
                         **provenance(run)})


def task_of(run: LoadedRun, options: Options) -> synthetic_tasks.Task:
    """The task of the command line, or of the run.

    Raises:
        ConfigError: there is none.
    """
    data = run.config.data
    trained_on = f"token files in {data.dir}" if data.dir else "a mixture" if data.mixture else data.source
    source = options.data.source or (None if data.dir or data.mixture else data.source)
    task = None if source is None else synthetic_tasks.parse(source)
    if task is None and options.data.source is not None:
        raise ConfigError(f"--data.source is {source}; expected a synthetic task, such as mqar:length=64")
    if task is None:
        raise ConfigError(f"{options.run} was trained on {trained_on}, not on a synthetic task; name one with "
                          "--data.source, such as mqar:length=64")
    return task


def print_results(run: LoadedRun, corpora: Corpora, found: Sequence[evaluation.Evaluation], options: Options) -> None:
    """Print the tables, and flush them."""
    print(printable(f"{options.run}: step {run.step:,}, {','.join(run.config.model.attention)}, trained at a context "
                    f"of {run.config.model.context:,}" + (", on test" if options.split == "test" else "")))
    for title, rows in tables([one.figures for one in found]):
        print_texts(title, list(rows[0]), [list(row.values()) for row in rows])
    for name, files in zip(corpora.names, corpora.files, strict=True):
        if (bits := files.meta.get("pixel_histogram", {}).get(options.split)) is not None:
            print(f"{printable(name)}: the histogram of each pixel has {bits:.4f} bits per dimension on all of "
                  f"{options.split}")
    print(end="", flush=True)


def write_results(run: LoadedRun, corpora: Corpora, found: Sequence[evaluation.Evaluation], options: Options,
                  path: Path) -> None:
    """Write an evaluation to ``path``, and the losses of the windows of val beside it.

    Raises:
        RunError: they cannot be written.
    """
    with writing(path):
        if options.split == "val":
            write_window_losses(options.run, [one.windows for one in found])
        write(path, {
            "step": run.step, "split": options.split, "attention": list(run.config.model.attention),
            "context": run.config.model.context, "packing": run.config.data.packing,
            "tokenizer": corpora.tokenizer, "corpus_checksum": corpora.checksum,
            **provenance(run),
            **({"window_losses": WINDOW_LOSSES} if options.split == "val" else {}),
            "evaluations": [one.figures for one in found]})


def provenance(run: LoadedRun) -> dict[str, Any]:
    """What an evaluation was made with, for its file."""
    made_with = environment(run.model, parameters=sum(x.size for x in jax.tree.leaves(run.model)), checksum="",
                            segments=run.config.data.packing == "documents")
    return {name: made_with[name] for name in ("versions", "commit", "devices", "command", "dtype")}


def _images(image: dict[str, Any] | None) -> str:
    """The format of images in a message."""
    return "text" if image is None else f"{ImageFormat.of(image)}, {image['levels']} levels"


def lengths(flag: str, value: str) -> list[int]:
    """Comma-separated numbers of tokens, sorted; :class:`ConfigError` for anything else."""
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or (flag != "--windows" and not parts):
        raise ConfigError(f"{flag} is {value}; expected comma-separated numbers of tokens above 0")
    return sorted(set(map(int, parts)))


def data_config(run: LoadedRun, directory: Path, data: Data) -> DataConfig:
    """The corpora of the command line, or of the run.

    Raises:
        ConfigError: the command line names two, or none for a run without a corpus, or a vocabulary that is too large.
    """
    if data.dir is not None and data.source is not None:
        raise ConfigError("--data.dir and --data.source are mutually exclusive")
    if data.dir is not None:
        return replace(run.config.data, dir=data.dir, mixture=())
    if data.source is not None:
        # Before anything is prepared.
        name = run.config.data.tokenizer
        size = 0 if name == tokenizers.PIXELS else tokenizers.load(name).n_vocab
        if size > run.model.vocab_size:
            raise ConfigError(f"--data.source: the tokenizer {run.config.data.tokenizer} has a vocabulary of {size} "
                              f"tokens, the model of {directory} only {run.model.vocab_size}")
        return replace(run.config.data, source=data.source, dir=None, mixture=())
    if PUBLISHED in run.environment:
        raise ConfigError(f"{directory} holds published weights, without a corpus: give --data.dir, a folder of token "
                          "files, or --data.source")
    return run.config.data


def command(arguments: Sequence[str]) -> None:
    """Evaluate from a command line."""
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="eval.py", description=__doc__)
    configure_jax()
    evaluate(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("eval.py", command, arguments, flags=flags_by_field(Options), memory_hint="lower --context")


if __name__ == "__main__":
    sys.exit(main())
