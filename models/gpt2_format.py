"""GPT-2's published format: ``config.json`` and ``model.safetensors`` of ``transformers``.

Converts names, shapes and sizes to those of :class:`models.gpt.GPT` and back, with exact weights. Only safetensors
files are read, no pickles.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.schema import ModelConfig
from models import gpt
from models.gpt import GPT
from models.sizes import head_width, layer_modes
from support.errors import ConfigError, WeightsError
from support.files import read_json, write_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}
"""Fields of config.json that affect the computation, with their supported values, the default first."""

SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50_257}
"""The sizes in config.json, with the defaults of ``transformers``."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors names of the dtypes that float32 represents exactly."""


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """The model that ``folder/config.json`` describes, and its vocabulary size.

    Raises:
        ConfigError: there are no config.json and safetensors files, or a field has an unsupported value.
        WeightsError: config.json is damaged, or gives larger sizes than the tensors have.
    """
    values = read_file(folder / CONFIG)
    if "model_type" not in values:
        raise ConfigError(f"{folder / CONFIG}: no model_type; expected gpt2")
    for name, computed in COMPUTED.items():
        if (value := values.get(name, computed[0])) not in computed:
            raise ConfigError(f"{folder / CONFIG}: {name} is {_shown(value)}, which is not supported; expected "
                              f"{' or '.join(map(json.dumps, computed))}")
    sizes = {name: values.get(name, default) for name, default in SIZES.items()}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{folder / CONFIG}: {name} is {_shown(size)}; expected a whole number of at least 1")
    inner = values.get("n_inner")
    if inner not in (None, 4 * sizes["n_embd"]):
        raise ConfigError(f"{folder / CONFIG}: n_inner is {_shown(inner)}, which is not supported; expected null "
                          f"or {4 * sizes['n_embd']}")
    if sizes["n_embd"] % sizes["n_head"]:
        raise ConfigError(f"{folder / CONFIG}: n_head is {_shown(sizes['n_head'])}, which does not divide n_embd, "
                          f"{_shown(sizes['n_embd'])}")
    # Before anything is built: a model of a billion layers takes days.
    for name, most in _sizes_of_tensors(folder).items():
        if sizes[name] > most:
            raise WeightsError(f"{folder / CONFIG}: {name} is {_shown(sizes[name])}, and that of the tensors beside it "
                               f"is {most}; restore the files")
    model = ModelConfig(layers=sizes["n_layer"], heads=sizes["n_head"], width=sizes["n_embd"],
                        context=sizes["n_positions"], positions="learned", dtype="float32", attention=("softmax",))
    return gpt.resolve_config(model), sizes["vocab_size"]


def published_names(layers: int) -> dict[str, tuple[str, ...]]:
    """The published name of each tensor, without ``transformer.``, and the names of its parameters.

    Several parameters are concatenated along the last axis. A published projection is a Conv1D with a weight of
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


def read_parameters(folder: Path, model: GPT) -> tuple[Any, dict[str, str]]:
    """The parameters in a folder, and the dtypes other than float32, by published name.

    Args:
        folder: folder with ``config.json`` and the safetensors files.
        model: model of :func:`read_config`; may be abstract.

    Returns:
        nested dicts of float32 arrays, as in ``model``, and the dtypes.

    Raises:
        ConfigError: there are no safetensors files.
        WeightsError: a tensor is missing, unexpected or misshapen, or a file is damaged.
    """
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
                raise WeightsError(f"{file_of['lm_head.weight']}: lm_head.weight differs from wte.weight; expected "
                                   "tied embeddings")
            for part, values in zip(parts, np.split(tensor.astype(np.float32), len(parts), axis=-1), strict=True):
                ours[part] = jnp.asarray(values)
        for name in filter(_is_mask, file_of):
            if not name.endswith("masked_bias") and not _is_causal(read(name)):
                raise WeightsError(f"{file_of[name]}: {name} is not a causal mask; other masks are not supported")
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ours[jax.tree_util.keystr(path, simple=True, separator=".")], parameters), dtypes


def write(folder: Path, model: GPT, *, source: str, dtypes: dict[str, str], fields: dict[str, Any]) -> int:
    """Write a model to ``folder/config.json`` and ``folder/model.safetensors``.

    Args:
        folder: existing folder.
        model: a model with softmax attention in every layer and learned positions.
        source: name of the model in messages.
        dtypes: dtypes by published name, from :func:`read_parameters`; the default is F32.
        fields: other fields of config.json.

    Returns:
        the number of parameters.

    Raises:
        ConfigError: the format does not support the model.
        OSError, SafetensorError: a file cannot be written.
    """
    from safetensors.numpy import save_file

    check(model, source)
    tensors = _tensors_of(model, dtypes)
    config = model.config
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers requires the format
    write_json(folder / CONFIG, {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in COMPUTED.items()},
        "n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_inner": None,
        "n_positions": config.context, "n_ctx": config.context, "vocab_size": model.vocab_size,
        "tie_word_embeddings": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        **fields,
    })
    return sum(x.size for x in tensors.values())


def read_file(path: Path) -> dict[str, Any]:
    """Reads a JSON file of the format.

    Raises:
        ConfigError: the file does not exist.
        WeightsError: it is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path.parent}: no {path.name}; expected {CONFIG} and {WEIGHTS}")
    return read_json(path, WeightsError)


def check(model: GPT, source: str) -> None:
    """Raises :class:`ConfigError` if the format does not support a model; ``source`` is its name in the message."""
    config = model.config
    others = sorted(set(layer_modes(config)) - {"softmax"})
    if others:
        raise ConfigError(f"{source}: model.attention has {', '.join(others)}; GPT-2's format supports only softmax")
    if head_width(config) * config.heads != config.width:
        raise ConfigError(f"{source}: model.head_width is {config.head_width}; GPT-2's format supports only width / "
                          f"heads, {config.width} / {config.heads}")
    options = config.modes["softmax"]
    for option in dataclasses.fields(options):
        if (value := getattr(options, option.name)) != option.default \
                and option.name not in model.blocks[0].attention.implementation_fields:
            raise ConfigError(f"{source}: {options.path(option.name)} is {value}; GPT-2's format supports only "
                              f"{option.default}")
    if config.head != "tied":
        raise ConfigError(f"{source}: model.head is {config.head}; GPT-2's format supports only tied")
    if config.positions != "learned":
        raise ConfigError(f"{source}: model.positions is {config.positions}; GPT-2's format supports only learned")


def _tensors_of(model: GPT, dtypes: dict[str, str]) -> dict[str, np.ndarray]:
    """All tensors by published name, as saved by :func:`write`."""
    ours = {_name(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors = {}
    for name, parts in published_names(model.config.layers).items():
        tensor = ours.pop(parts[0]) if len(parts) == 1 else np.concatenate([ours.pop(part) for part in parts], axis=-1)
        tensors[f"transformer.{name}"] = np.ascontiguousarray(tensor.astype(DTYPES[dtypes.get(name, "F32")]))
    assert not ours, f"parameters without a published name: {', '.join(ours)}"
    return tensors


def _sizes_of_tensors(folder: Path) -> dict[str, int]:
    """The sizes of the model whose tensors are in a folder, but for the number of heads."""
    with _tensors(folder) as (file_of, _, shape_and_dtype):
        tables: dict[str, tuple[int, ...]] = {"wte.weight": (), "wpe.weight": ()}
        if missing := [name for name in tables if name not in file_of]:
            raise WeightsError(f"{folder}: missing tensors: {_some(missing)}")
        for name in tables:
            tables[name], _ = shape_and_dtype(name)
            if len(tables[name]) != 2:
                raise WeightsError(f"{file_of[name]}: {name} has shape {tables[name]}, expected two dimensions")
        layers = {found[1] for name in file_of if (found := re.match(r"h\.(\d+)\.", name))}
    (vocabulary, width), (context, _) = tables.values()
    return {"vocab_size": vocabulary, "n_embd": width, "n_positions": context, "n_layer": len(layers)}


def _check_complete(folder: Path, file_of: dict[str, Path], names: dict[str, tuple[str, ...]]) -> None:
    """Raises :class:`WeightsError` with the names of missing or unexpected tensors."""
    tied = read_file(folder / CONFIG).get("tie_word_embeddings", True)
    missing = [name for name in (*names, *(() if tied else ("lm_head.weight",))) if name not in file_of]
    if missing:
        raise WeightsError(f"{folder}: missing tensors: {_some(missing)}")
    extra = [name for name in file_of if name not in names and name != "lm_head.weight" and not _is_mask(name)]
    if extra:
        raise WeightsError(f"{folder}: unexpected tensors: {_some(extra)}")


@contextmanager
def _tensors(folder: Path) -> Iterator[tuple[dict[str, Path], Any, Any]]:
    """The file of each tensor by its name without ``transformer.``; functions for its data, and its shape and dtype."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        file_of: dict[str, Path] = {}
        handles: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged ({error}); restore the file") from error
            for full_name in handle.keys():  # noqa: SIM118 (not a dict)
                name = full_name.removeprefix("transformer.")
                if name in file_of:
                    raise WeightsError(f"{path}: {full_name} is also in {file_of[name].name}")
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
        beside = f"; {pickled[0]} may be pickled and is not read" if pickled else ""
        raise ConfigError(f"{folder}: no {WEIGHTS} or {INDEX}{beside}")
    shards = read_file(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise WeightsError(f"{folder / INDEX} is damaged: no weight_map; restore the file")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"{folder}: {INDEX} names the file {name}, which does not exist")
    return [folder / name for name in names]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _some(names: list[str]) -> str:
    """The first few names, and the number of the others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _shown(value: Any) -> str:
    """A value of config.json in a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _is_mask(name: str) -> bool:
    """Whether a tensor is a mask that older versions of ``transformers`` save with each attention layer."""
    return re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name) is not None


def _is_causal(mask: np.ndarray) -> bool:
    if mask.ndim != 4 or math.prod(mask.shape[:2]) != 1 or mask.shape[2] != mask.shape[3]:
        return False
    return np.array_equal(mask[0, 0] != 0, np.tri(mask.shape[2], dtype=bool))


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
