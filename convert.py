"""GPT-2's published weights in, and the models of runs out: config.json and model.safetensors.

    python convert.py import openai-community/gpt2 --out runs/gpt2
    python convert.py export runs/softmax --out exported/softmax
    python convert.py export runs/gated --out exported/gated

``import`` creates a run folder with a checkpoint at step 0 from a model of the Hugging Face Hub or a local folder. Use
it with sample.py and train.py --init-from. Its compute dtype is float32, so that the logits equal the published
model's. ``export`` writes a softmax model with learned positions in the format of ``transformers``, and every other
model in our own, with a model card, which sample.py, eval.py, train.py --init-from and lineargpt.open_run read like a
run. All of them preserve every weight bit for bit. Only safetensors files are read, no pickles. The model has no
dropout.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax
import tyro
from flax import nnx

from configs.schema import Config, DataConfig
from data import tokenizers
from models import gpt2_format
from models.gpt import GPT
from models.gpt2_format import CONFIG, INDEX, WEIGHTS
from support.command import note, run_command, status
from support.errors import ConfigError, WeightsError
from support.files import replacing
from training.checkpoint import Checkpoints
from training.environment import PUBLISHED, environment
from training.loading import load_model
from training.portable import write_portable
from training.position import Position
from training.run_files import write_run_files

END_TOKENS = ("bos_token_id", "eos_token_id")
"""Fields of the published config.json that are kept for the export. Other runs take them from the tokenizer."""

type Format = Literal["auto", "gpt2", "lineargpt"]

END_OF_TEXT = {"bytes": 256, "gpt2": 50_256}
"""The end-of-text token of tokenizers whose vocabulary ends with it."""


def import_weights(source: str, out: Path, *, tokenizer: str | None = None) -> None:
    """Create the run folder ``out`` from published weights. A failed attempt leaves no files.

    Args:
        source: a folder with config.json and model.safetensors (or model.safetensors.index.json and its shards), or
            the id of a model of the Hugging Face Hub.
        out: the run folder; must not exist or be empty.
        tokenizer: its tokenizer; None: bytes for a vocabulary of 257, else gpt2.

    Raises:
        ConfigError: the source does not exist, ``out`` exists, or config.json describes another architecture.
        WeightsError: a tensor is missing, unknown or misshapen, a file is damaged, or the Hub cannot be reached.
        CheckpointError: the checkpoint could not be written.
    """
    _check_free(out)
    folder = _fetch(source)
    model_config, vocabulary_size = gpt2_format.read_config(folder)
    if tokenizer is None:
        tokenizer = "bytes" if vocabulary_size == END_OF_TEXT["bytes"] + 1 else "gpt2"
    else:
        tokenizers.check_name(tokenizer)
    config = Config(model=model_config, data=DataConfig(tokenizer=tokenizer))
    model = nnx.eval_shape(lambda: GPT(model_config, vocabulary_size, rngs=nnx.Rngs(0)))
    parameters, dtypes = gpt2_format.read_parameters(folder, model)
    count = sum(x.size for x in jax.tree.leaves(parameters))
    made_with = environment(model, parameters=count, checksum="")
    with _written_beside(out) as beside:
        write_run_files(beside, config, made_with | {"tokenizer": tokenizer, "corpus_checksum": None, PUBLISHED: {
            "source": source, "folder": str(folder.absolute()), "dtypes": dtypes,
            "tokens": {name: value for name, value in gpt2_format.read_file(folder / CONFIG).items()
                       if name in END_TOKENS}}})
        with Checkpoints(beside / "checkpoints") as checkpoints:
            checkpoints.save(0, {"parameters": parameters, "position": dict(vars(Position()))})
    status(f"{out}: {count:,} parameters of {source}: {model_config.layers} layers, {model_config.heads} heads, width "
           f"{model_config.width}, context {model_config.context:,}, vocabulary {vocabulary_size:,} ({tokenizer})")
    if vocabulary_size <= END_OF_TEXT.get(tokenizer, 0):
        note(f"a vocabulary of {vocabulary_size:,} is too small for the tokenizer {tokenizer}: train.py can load the "
             "model, sample.py cannot")


def export_weights(run: Path, out: Path, *, step: int | None = None, format: Format = "auto") -> None:
    """Write the model of a run to the folder ``out``.

    Parameters are float32; those of an imported run keep their original dtypes.

    Args:
        run: a run.
        out: the folder to create.
        step: step of the checkpoint; None: the newest intact one.
        format: ``gpt2``, that of ``transformers``, for softmax attention in every layer and learned positions;
            ``lineargpt``, for every mode; ``auto``: the first that supports the model.

    Raises:
        ConfigError: the format does not support the model, ``out`` exists, or ``run`` is not a run.
        WeightsError: ``out`` cannot be written.
        RunError, CheckpointError: as ``training.loading.load_model``.
    """
    _check_free(out)
    loaded = load_model(run, step)
    if format == "auto":
        try:
            gpt2_format.check(loaded.model, str(run))
            format = "gpt2"
        except ConfigError:
            format = "lineargpt"
    if format == "lineargpt":
        with _written_beside(out) as beside:
            count = write_portable(beside, run, loaded.model, loaded.config, loaded.environment, loaded.step)
        status(f"{out}: {count:,} parameters of {run}, step {loaded.step:,}, with a model card")
        return
    published = loaded.environment.get(PUBLISHED, {})
    end_of_text = _end_of_text(loaded.config.data.tokenizer, loaded.model.vocab_size)
    with _written_beside(out) as beside:
        count = gpt2_format.write(beside, loaded.model, source=str(run), dtypes=published.get("dtypes", {}),
                                  fields=dict.fromkeys(END_TOKENS, end_of_text) | published.get("tokens", {}))
    status(f"{out}: {count:,} parameters of {run}, step {loaded.step:,}")


def _fetch(source: str) -> Path:
    """The folder of a source; a model of the Hub is downloaded into the cache of ``huggingface_hub``."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise ConfigError(f"{source} is a file; expected a folder with {CONFIG} and {WEIGHTS}, or the id of a model on "
                          "the Hugging Face Hub")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ConfigError(f"{source}: no such folder; expected a folder, or NAME or OWNER/NAME of a model on the "
                          "Hugging Face Hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS, INDEX, "model-*.safetensors"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{source}: no such folder, and no such model on the Hugging Face Hub that this user can "
                          "access") from error
    except Exception as error:  # the errors of its HTTP library differ from version to version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{source}: no such folder, and the download from the Hugging Face Hub failed "
                           f"({reason})") from error


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already; choose another folder or delete it")


@contextmanager
def _written_beside(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``out`` at the end, or deleted on an error."""
    from safetensors import SafetensorError

    try:
        if not out.absolute().parent.exists():
            out.absolute().parent.mkdir(parents=True)
        with replacing(out) as beside:
            beside.mkdir()
            yield beside
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"cannot write {out}: {reason}") from error


def _end_of_text(tokenizer: str, vocabulary_size: int) -> int | None:
    """Id of the end-of-text token; None if the vocabulary lacks it."""
    token = END_OF_TEXT.get(tokenizer)
    if token is None:
        token = tokenizers.end_of_text(tokenizers.load(tokenizer))
    return token if token < vocabulary_size else None


def _import(source: str, /, *, out: Path, tokenizer: str | None = None) -> None:
    """Create a run folder from published GPT-2 weights, for sample.py and train.py --init-from.

    Args:
        source: Id of a model on the Hugging Face Hub, or a folder with config.json and model.safetensors.
        out: Run folder to write.
        tokenizer: bytes, or a tiktoken encoding. None: bytes for a vocabulary of 257, else gpt2.
    """
    import_weights(source, out, tokenizer=tokenizer)


def _export(run: Path, /, *, out: Path, step: int | None = None, format: Format = "auto") -> None:
    """Write the model of a run as config.json and model.safetensors.

    Args:
        run: Run folder.
        out: Folder to write.
        step: Step of the checkpoint. None: the latest.
        format: gpt2: for transformers, of softmax attention with learned positions alone; lineargpt: every mode, with a
            model card; auto: gpt2 where it supports the model.
    """
    export_weights(run, out, step=step, format=format)


def command(arguments: Sequence[str]) -> None:
    """Import or export from a command line."""
    tyro.extras.subcommand_cli_from_dict({"import": _import, "export": _export}, args=arguments,
                                         prog="python convert.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("convert.py", command, arguments, interrupted=lambda: "; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
