"""GPT-2's published weights in and out, in the format of ``transformers``: config.json and model.safetensors.

    python convert.py import openai-community/gpt2 --out runs/gpt2
    python convert.py export runs/softmax --out exported/softmax

``import`` makes a run folder, with a checkpoint of step 0, from a model of the Hugging Face Hub or a local folder:
sample.py samples from it and train.py --init-from starts from it. Products are in float32, so that the logits are the
published model's. ``export`` writes a softmax model with learned positions back. Both give every number bit for bit.
Only safetensors files are read: nothing pickled. Dropout is not part of this model, nor of what it exports.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.schema import Config, DataConfig, ModelConfig
from models import gpt
from models.block import layer_modes
from models.gpt import GPT
from support.errors import CheckpointError, ConfigError, DataError, RunError, WeightsError
from support.files import read_json, replacing, write_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

PUBLISHED = "published_weights"
"""What ``environment.json`` has of an imported run, and of no other: where its weights are from, the dtypes, and what
else an export gives back."""

COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}
"""Fields of config.json that change what is computed: the values that models/gpt.py computes, the default first."""

END_TOKENS = ("bos_token_id", "eos_token_id")
"""Fields of config.json that are kept for the export; those of other runs are the tokenizer's."""

SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50_257}
"""The sizes in config.json, and what ``transformers`` takes for one that is left out."""

END_OF_TEXT = {"bytes": 256, "gpt2": 50_256}
"""Of the tokenizers whose vocabulary ends with it."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of the number formats that float32 parameters hold exactly."""


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
    from training.checkpoint import Checkpoints
    from training.environment import environment

    _check_free(out)
    folder = _fetch(source)
    model_config, vocabulary_size = read_config(folder)
    if tokenizer is None:
        tokenizer = "bytes" if vocabulary_size == END_OF_TEXT["bytes"] + 1 else "gpt2"
    else:
        from data import tokenizers

        tokenizers.check_name(tokenizer)
    config = Config(model=model_config, data=DataConfig(tokenizer=tokenizer))
    model = nnx.eval_shape(lambda: GPT(model_config, vocabulary_size, rngs=nnx.Rngs(0)))
    parameters, dtypes = _read_parameters(folder, model)
    count = sum(x.size for x in jax.tree.leaves(parameters))
    made_with = environment(model, parameters=count, tokenizer=tokenizer, checksum="")
    with _written_beside(out) as beside:
        write_json(beside / CONFIG, config.to_dict())
        write_json(beside / "environment.json", made_with | {"corpus_checksum": None, PUBLISHED: {
            "source": source, "folder": str(folder.absolute()), "dtypes": dtypes,
            "tokens": {name: value for name, value in _read_json(folder / CONFIG).items() if name in END_TOKENS}}})
        with Checkpoints(beside / "checkpoints") as checkpoints:
            checkpoints.save(0, {"parameters": parameters, "position": {
                "step": 0, "batches": 0, "train_seconds": 0.0, "wall_seconds": 0.0}})
    print(f"{out}: {count:,} parameters of {source}: {model_config.layers} layers, {model_config.heads} heads, width "
          f"{model_config.width}, context {model_config.context:,}, vocabulary {vocabulary_size:,} ({tokenizer})",
          file=sys.stderr)
    if vocabulary_size <= END_OF_TEXT.get(tokenizer, 0):
        print(f"note: a vocabulary of {vocabulary_size:,} is too small for the tokenizer {tokenizer}: the model can be "
              "loaded, and sample.py will refuse it", file=sys.stderr)


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
    from safetensors.numpy import save_file

    from training import run as runs

    _check_free(out)
    loaded = runs.load_model(run, step)
    config = loaded.model.config
    others = sorted(set(layer_modes(config)) - {"softmax"})
    if others:
        raise ConfigError(f"{run}: model.attention has {', '.join(others)}; GPT-2's format can say softmax only")
    if config.positions != "learned":
        raise ConfigError(f"{run}: model.positions is {config.positions}; GPT-2's format can say learned only")
    ours = {_name(path): np.asarray(leaf[...])
            for path, leaf in nnx.to_flat_state(nnx.state(loaded.model, nnx.Param))}
    published = loaded.environment.get(PUBLISHED, {})
    dtypes = published.get("dtypes", {})
    tensors = {}
    for name, parts in published_names(config.layers).items():
        tensor = ours.pop(parts[0]) if len(parts) == 1 else np.concatenate([ours.pop(part) for part in parts], axis=-1)
        tensors[f"transformer.{name}"] = np.ascontiguousarray(tensor.astype(DTYPES[dtypes.get(name, "F32")]))
    assert not ours, f"parameters without a published name: {', '.join(ours)}"
    end_of_text = _end_of_text(loaded.config.data.tokenizer, loaded.model.vocab_size)
    with _written_beside(out) as beside:
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})  # transformers insists on the format
        write_json(beside / CONFIG, {
            "architectures": ["GPT2LMHeadModel"],
            **{name: values[0] for name, values in COMPUTED.items()},
            "n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_inner": None,
            "n_positions": config.context, "n_ctx": config.context, "vocab_size": loaded.model.vocab_size,
            "tie_word_embeddings": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
            **dict.fromkeys(END_TOKENS, end_of_text), **published.get("tokens", {}),
        })
    print(f"{out}: {sum(x.size for x in tensors.values()):,} parameters of {run}, step {loaded.step:,}",
          file=sys.stderr)


def load_model(run: Path | str, step: int | None = None) -> GPT:
    """The model of a run's newest intact checkpoint, or of that of ``step``: ``model(tokens_BT)`` are its logits.

    Raises:
        ConfigError, RunError, CheckpointError, OSError: as ``training.run.load_model``.
    """
    from training import run as runs

    return runs.load_model(Path(run), step).model


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """The model that ``folder/config.json`` describes, and its vocabulary size.

    Raises:
        ConfigError: there is no config.json, or a field asks for what models/gpt.py does not compute.
        WeightsError: config.json is damaged.
    """
    values = _read_json(folder / CONFIG)
    if "model_type" not in values:
        raise ConfigError(f"{folder / CONFIG}: it has no model_type; expected gpt2")
    for name, computed in COMPUTED.items():
        if (value := values.get(name, computed[0])) not in computed:
            raise ConfigError(f"{folder / CONFIG}: {name} is {json.dumps(value)}, which this model does not compute; "
                              f"expected {' or '.join(map(json.dumps, computed))}")
    sizes = {name: values.get(name, default) for name, default in SIZES.items()}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{folder / CONFIG}: {name} is {json.dumps(size)}; expected a whole number of at least 1")
    inner = values.get("n_inner")
    if inner not in (None, 4 * sizes["n_embd"]):
        raise ConfigError(f"{folder / CONFIG}: n_inner is {json.dumps(inner)}, which this model does not compute; "
                          f"expected null or {4 * sizes['n_embd']}")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ConfigError(f"{folder / CONFIG}: n_head is {sizes['n_head']}, which does not divide n_embd, "
                          f"{sizes['n_embd']}")
    model = ModelConfig(layers=sizes["n_layer"], heads=sizes["n_head"], width=sizes["n_embd"],
                        context=sizes["n_positions"], positions="learned", dtype="float32", attention=("softmax",))
    return gpt.check(model), sizes["vocab_size"]


def published_names(layers: int) -> dict[str, tuple[str, ...]]:
    """The published name of each tensor, without ``transformer.``, and the names of the parameters it holds.

    Where there are several they stand side by side along the last axis. A projection is a Conv1D there: its weight is
    (inputs, outputs), like a kernel here.
    """
    names: dict[str, tuple[str, ...]] = {
        "wte.weight": ("token_embedding.embedding",), "wpe.weight": ("position_embedding.embedding",)}

    def projection(published: str, *ours: str) -> None:
        for theirs, leaf in (("weight", "kernel"), ("bias", "bias")):
            names[f"{published}.{theirs}"] = tuple(f"{name}.{leaf}" for name in ours)

    def norm(published: str, ours: str) -> None:
        names[f"{published}.weight"] = (f"{ours}.scale",)
        names[f"{published}.bias"] = (f"{ours}.bias",)

    for i in range(layers):
        h, block = f"h.{i}", f"blocks.{i}"
        norm(f"{h}.ln_1", f"{block}.attention_norm")
        projection(f"{h}.attn.c_attn", *(f"{block}.attention.{name}" for name in ("query", "key", "value")))
        projection(f"{h}.attn.c_proj", f"{block}.attention.output")
        norm(f"{h}.ln_2", f"{block}.mlp_norm")
        projection(f"{h}.mlp.c_fc", f"{block}.mlp.hidden")
        projection(f"{h}.mlp.c_proj", f"{block}.mlp.output")
    norm("ln_f", "final_norm")
    return names


def _read_parameters(folder: Path, model: GPT) -> tuple[Any, dict[str, str]]:
    """The parameters of ``model`` as plain nested dicts of float32, and the number formats that are not float32."""
    shapes = {_name(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    names = published_names(model.config.layers)
    ours, dtypes = {}, {}
    with _tensors(folder) as (file_of, read, shape_and_dtype):
        _check_complete(folder, file_of, names)
        for name, parts in names.items():
            *leading, last = shapes[parts[0]]
            expected = (*leading, last * len(parts))
            shape, dtype = shape_and_dtype(name)
            if shape != expected:
                raise WeightsError(f"{file_of[name]}: {name} has shape {shape}, expected {expected}")
            if dtype not in DTYPES:
                raise WeightsError(f"{file_of[name]}: {name} has dtype {dtype}, expected {', '.join(DTYPES)}")
            if dtype != "F32":
                dtypes[name] = dtype
            tensor = read(name)
            if name == "wte.weight" and "lm_head.weight" in file_of and not _same(read("lm_head.weight"), tensor):
                raise WeightsError(f"{file_of['lm_head.weight']}: lm_head.weight differs from wte.weight; in this "
                                      "model the head is the token embedding")
            for part, values in zip(parts, np.split(tensor.astype(np.float32), len(parts), axis=-1), strict=True):
                ours[part] = jnp.asarray(values)
        for name in filter(_is_mask, file_of):
            if not name.endswith("masked_bias") and not _is_causal(read(name)):
                raise WeightsError(f"{file_of[name]}: {name} is not a causal mask; this model has no other")
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ours[jax.tree_util.keystr(path, simple=True, separator=".")], parameters), dtypes


def _check_complete(folder: Path, file_of: dict[str, Path], names: dict[str, tuple[str, ...]]) -> None:
    """Raises :class:`WeightsError` naming tensors that are missing, or that this model has no place for."""
    tied = _read_json(folder / CONFIG).get("tie_word_embeddings", True)
    missing = [name for name in (*names, *(() if tied else ("lm_head.weight",))) if name not in file_of]
    if missing:
        raise WeightsError(f"{folder}: tensors are missing: {_some(missing)}")
    extra = [name for name in file_of if name not in names and name != "lm_head.weight" and not _is_mask(name)]
    if extra:
        raise WeightsError(f"{folder}: there are tensors that this model has no place for: {_some(extra)}")


@contextmanager
def _tensors(folder: Path) -> Iterator[tuple[dict[str, Path], Any, Any]]:
    """The file of each tensor by its name without ``transformer.``; what reads one; what gives its shape and dtype."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        file_of: dict[str, Path] = {}
        handles: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged ({error}); bring back the file") from error
            for full_name in handle.keys():  # noqa: SIM118 (not a dict)
                name = full_name.removeprefix("transformer.")
                if name in file_of:
                    raise WeightsError(f"{path}: {full_name} is there twice, here and in {file_of[name].name}")
                file_of[name], handles[name] = path, (handle, full_name)

        def read(name: str) -> np.ndarray:
            handle, full_name = handles[name]
            return handle.get_tensor(full_name)

        def shape_and_dtype(name: str) -> tuple[tuple[int, ...], str]:
            handle, full_name = handles[name]
            tensor = handle.get_slice(full_name)
            return tuple(tensor.get_shape()), tensor.get_dtype()

        yield file_of, read, shape_and_dtype


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        beside = f"; {pickled[0]} may be pickled, and is not read" if pickled else ""
        raise ConfigError(f"{folder}: it has no {WEIGHTS} (and no {INDEX}){beside}")
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise WeightsError(f"{folder / INDEX} is damaged: it has no weight_map; bring back the file")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"{folder}: {INDEX} names the file {name}, which is not there")
    return [folder / name for name in names]


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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent}: it has no {path.name}; expected {CONFIG} and {WEIGHTS}")
    try:
        return read_json(path)
    except ValueError as error:
        raise WeightsError(str(error)) from error


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
        from data import tokenizers

        token = tokenizers.end_of_text(tokenizers.load(tokenizer))
    return token if token < vocabulary_size else None


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _is_mask(name: str) -> bool:
    """Whether it is one of the buffers that older versions of ``transformers`` save with each layer's attention."""
    return re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name) is not None


def _is_causal(mask: np.ndarray) -> bool:
    if mask.ndim != 4 or math.prod(mask.shape[:2]) != 1 or mask.shape[2] != mask.shape[3]:
        return False
    return np.array_equal(mask[0, 0] != 0, np.tri(mask.shape[2], dtype=bool))


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _import_command(source: str, /, *, out: Path, tokenizer: str | None = None) -> None:
    """Make a run folder of published GPT-2 weights, for sample.py and train.py --init-from.

    Args:
        source: Id of a model of the Hugging Face Hub, or a folder with config.json and model.safetensors.
        out: Run folder to make.
        tokenizer: bytes, or the name of a tiktoken encoding; None: bytes for a vocabulary of 257, else gpt2.
    """
    import_weights(source, out, tokenizer=tokenizer)


def _export_command(run: Path, /, *, out: Path, step: int | None = None) -> None:
    """Write the model of a softmax run as config.json and model.safetensors, for transformers.

    Args:
        run: Folder of a run, as train.py or import made it.
        out: Folder to make.
        step: Step of the checkpoint; None: the newest.
    """
    export_weights(run, out, step=step)


def main(arguments: list[str] | None = None) -> int:
    """The command: 0, 2 for a command line that cannot be run, 1 for a failure."""
    import tyro


    try:
        tyro.extras.subcommand_cli_from_dict({"import": _import_command, "export": _export_command}, args=arguments,
                                             prog="python convert.py")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (WeightsError, RunError, CheckpointError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
