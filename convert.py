"""GPT-2's published weights in and out, in the format of ``transformers``: config.json and model.safetensors.

    python convert.py import openai-community/gpt2 --out runs/gpt2
    python convert.py export runs/softmax --out exported/softmax

``import`` makes a run folder, with a checkpoint of step 0, from a model of the Hugging Face Hub or a local folder:
sample.py samples from it and train.py --init-from starts from it. Products are in float32, so that the logits are the
published model's. ``export`` writes a softmax model with learned positions back. Both give every number bit for bit.
Only safetensors files are read: nothing pickled. Dropout is not part of this model, nor of what it exports.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.end_with_a_word()
    packages.require_packages()

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
from support.files import replacing, write_json
from training.checkpoint import Checkpoints
from training.environment import PUBLISHED, environment
from training.loop import Position
from training.run import load_model

END_TOKENS = ("bos_token_id", "eos_token_id")
"""Fields of the published config.json that are kept for the export; those of other runs are the tokenizer's."""

END_OF_TEXT = {"bytes": 256, "gpt2": 50_256}
"""Of the tokenizers whose vocabulary ends with it."""


def import_weights(source: str, out: Path, *, tokenizer: str | None = None) -> None:
    """Make the run folder ``out`` of published weights. Nothing is left of an attempt that fails.

    Args:
        source: a folder with config.json and model.safetensors (or model.safetensors.index.json and its shards), or
            the id of a model of the Hugging Face Hub.
        out: the run folder, not there yet or empty.
        tokenizer: its tokenizer; None: bytes for a vocabulary of 257, else gpt2.

    Raises:
        ConfigError: there is no such source, ``out`` is taken, or this model does not compute what config.json says.
        WeightsError: a tensor is missing, left over or misshapen, a file is damaged, the Hub cannot be reached.
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
    made_with = environment(model, parameters=count, tokenizer=tokenizer, checksum="")
    with _written_beside(out) as beside:
        write_json(beside / "config.json", config.to_dict())
        write_json(beside / "environment.json", made_with | {"corpus_checksum": None, PUBLISHED: {
            "source": source, "folder": str(folder.absolute()), "dtypes": dtypes,
            "tokens": {name: value for name, value in gpt2_format.read_file(folder / CONFIG).items()
                       if name in END_TOKENS}}})
        with Checkpoints(beside / "checkpoints") as checkpoints:
            checkpoints.save(0, {"parameters": parameters, "position": dict(vars(Position()))})
    status(f"{out}: {count:,} parameters of {source}: {model_config.layers} layers, {model_config.heads} heads, width "
           f"{model_config.width}, context {model_config.context:,}, vocabulary {vocabulary_size:,} ({tokenizer})")
    if vocabulary_size <= END_OF_TEXT.get(tokenizer, 0):
        note(f"a vocabulary of {vocabulary_size:,} is too small for the tokenizer {tokenizer}: the model can be "
             "loaded, and sample.py will refuse it")


def export_weights(run: Path, out: Path, *, step: int | None = None) -> None:
    """Write the model of a run for ``transformers``: ``out/config.json`` and ``out/model.safetensors``.

    Parameters are float32; those of an imported run have the number formats they came in.

    Args:
        run: a run with softmax attention in every layer and learned positions.
        out: the folder to make.
        step: of the checkpoint; None: the newest intact one.

    Raises:
        ConfigError: the model is one that GPT-2's format cannot say, ``out`` is taken, or ``run`` is no run.
        WeightsError: ``out`` cannot be written.
        RunError, CheckpointError: as ``training.run.load_model``.
    """
    _check_free(out)
    loaded = load_model(run, step)
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
        raise ConfigError(f"{source} is a file; expected a folder with {CONFIG} and {WEIGHTS}, or the id of a model of "
                          "the Hugging Face Hub")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ConfigError(f"{source}: there is no such folder, and it is no id of a model of the Hugging Face Hub, "
                          "which is NAME or OWNER/NAME")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS, INDEX, "model-*.safetensors"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{source}: there is no such folder here, and the Hugging Face Hub has no such model, or not "
                          "for this user") from error
    except Exception as error:  # the errors of its HTTP library differ from version to version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{source}: there is no such folder here, and it cannot be had from the Hugging Face Hub "
                              f"({reason})") from error


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and nothing is overwritten: give another --out, or delete it first")


@contextmanager
def _written_beside(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` at the end, and goes where that is not reached."""
    from safetensors import SafetensorError

    try:
        with replacing(out) as beside:
            beside.mkdir(parents=True)
            yield beside
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"cannot write {out}: {reason}; nothing is left of the attempt") from error


def _end_of_text(tokenizer: str, vocabulary_size: int) -> int | None:
    """Id of the end-of-text token; None where the vocabulary lacks it."""
    token = END_OF_TEXT.get(tokenizer)
    if token is None:
        token = tokenizers.end_of_text(tokenizers.load(tokenizer))
    return token if token < vocabulary_size else None


def _import(source: str, /, *, out: Path, tokenizer: str | None = None) -> None:
    """Make a run folder of published GPT-2 weights, for sample.py and train.py --init-from.

    Args:
        source: Id of a model on the Hugging Face Hub, or a folder with config.json and model.safetensors.
        out: Run folder to write.
        tokenizer: bytes, or a tiktoken encoding. None: bytes for a vocabulary of 257, else gpt2.
    """
    import_weights(source, out, tokenizer=tokenizer)


def _export(run: Path, /, *, out: Path, step: int | None = None) -> None:
    """Write the model of a softmax run as config.json and model.safetensors, for transformers.

    Args:
        run: Run folder.
        out: Folder to write.
        step: Step of the checkpoint. None: the latest.
    """
    export_weights(run, out, step=step)


def command(arguments: Sequence[str]) -> None:
    """Import or export as a command line says."""
    tyro.extras.subcommand_cli_from_dict({"import": _import, "export": _export}, args=arguments,
                                         prog="python convert.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("convert.py", command, arguments, interrupted=lambda: "; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
