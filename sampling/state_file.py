"""State files: the decode state of a text, to continue later or on another machine.

A safetensors file with the logits of the last token, the filled part of the cache, the number of positions and the
tokens seen, for the repetition penalty. Its metadata identify the model by sizes, positions, attention modes with their
options, vocabulary and a SHA-256 of the parameters, which takes a second per GB. The compute dtype may differ: a state
computed in bfloat16 on a GPU can be continued in float32 on a CPU. The file also has a checksum, since safetensors does
not detect corruption.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.gpt import GPT
from models.sizes import head_width, layer_modes
from sampling.sampler import DecodeState
from support.errors import StateError
from support.files import replacing
from support.json_files import Hexadecimal, Natural, check

METADATA = "lineargpt-state"
FORMAT = 1
"""Format version. Increase it when older files would be misread."""
PARAMETERS = "parameters"


class _About(TypedDict):
    """The metadata."""

    format: Natural
    origin: str
    model: dict[str, str]
    sha256: Hexadecimal


class _ConvolvedLayer(NamedTuple):
    """The entries of a layer with a short convolution."""

    mode: Any
    inputs_BPF: tuple[Any, ...]


def save(path: Path, state: DecodeState, model: GPT, *, origin: str) -> None:
    """Write a state file atomically.

    Args:
        path: output path.
        state: decode state of one text.
        model: the model that read the text.
        origin: description of the model, for error messages.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.numpy import save as to_bytes

    position = state.position
    filled = jax.eval_shape(lambda: model.init_cache(1, position))
    state = state._replace(cache=jax.tree.map(
        lambda x, like: np.asarray(x)[tuple(map(slice, like.shape))], state.cache, filled))
    tensors = {_name(path): np.ascontiguousarray(x) for path, x in jax.tree.leaves_with_path(_as_written(state))}
    about: dict[str, Any] = {"format": FORMAT, "origin": origin, "model": fingerprint(model)}
    about["sha256"] = _checksum(tensors, about)
    with replacing(path) as beside:
        beside.write_bytes(to_bytes(tensors, {METADATA: json.dumps(about)}))


def load(path: Path, model: GPT) -> DecodeState:
    """Read the decode state in a state file, on the host, for a ``Sampler`` of the same model.

    Raises:
        StateError, JsonError: the file is damaged, or of another model.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: not a state file, or a damaged one ({error}); save it again") from error
    check(about, dict[str, Any], path, METADATA, remedy="save it again")
    if (found := about.get("format")) != FORMAT:
        what = "no format version" if found is None else f"format {json.dumps(found)}"
        raise StateError(f"{path}: {what}; this version of lineargpt reads state files of format {FORMAT}; save it "
                         "again")
    check(about, _About, path, METADATA, remedy="save it again")
    if about.pop("sha256") != _checksum(tensors, about):
        raise StateError(f"{path}: damaged: it does not match its checksum; save it again")
    theirs, ours = about["model"], fingerprint(model)
    # Fields that only one of them has follow from another difference, or are new in one version, with a default.
    differing = [f"{name} is {value} in the file and {ours[name]} here" for name, value in theirs.items()
                 if name != PARAMETERS and ours.get(name, value) != value]
    if differing or theirs.get(PARAMETERS) != ours[PARAMETERS]:
        raise StateError(f"{path}: the state of another model, {about['origin']}: "
                         + ("; ".join(differing) or f"the same sizes, but other {PARAMETERS}"))
    empty = jax.eval_shape(lambda: DecodeState(jnp.zeros(0), model.init_cache(1, 1), jnp.zeros(0)))
    names = [_name(path) for path, _ in jax.tree.leaves_with_path(_as_written(empty))]
    if missing := [name for name in names if name not in tensors]:
        raise StateError(f"{path}: it has no {missing[0]}, which a state of this model has; save it again")
    return jax.tree.unflatten(jax.tree.structure(empty), [tensors[name] for name in names])


def _as_written(state: DecodeState) -> DecodeState:
    """The state with the names of a file's entries, and its arrays in the same order.

    A layer without a short convolution is its mode's state alone.
    """
    layers = tuple(_ConvolvedLayer(layer.mode_state, layer.history) if layer.history else layer.mode_state
                   for layer in state.cache.layers)
    return state._replace(cache=state.cache._replace(layers=layers))


def fingerprint(model: GPT) -> dict[str, str]:
    """The properties of a model that its state depends on, by name."""
    config = model.config
    found = {f"model.{name}": str(getattr(config, name)) for name in ("layers", "heads", "width", "positions")}
    if head_width(config) * config.heads == config.width:
        found["model.head_width"] = "width / heads"
    else:
        found["model.head_width"] = str(config.head_width)
    found["the vocabulary"] = f"{model.vocab_size} tokens"
    if config.positions == "learned":
        found["model.context"] = str(config.context)
    found["model.attention"] = ",".join(layer_modes(config))
    for mode in sorted(set(layer_modes(config))):
        for name, value in dataclasses.asdict(config.modes[mode]).items():
            found[f"model.modes.{mode}.{name}"] = str(value)
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    # hashlib releases the GIL, so that threads use all cores.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda leaf: hashlib.sha256(_bytes(leaf[1])).hexdigest(), leaves)
        lines = [f"{_name(path)} {x.dtype} {x.shape} {digest}\n"
                 for (path, x), digest in zip(leaves, digests, strict=True)]
    return found | {PARAMETERS: hashlib.sha256("".join(lines).encode()).hexdigest()}


def _checksum(tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"\n{name} {x.dtype} {x.shape}\n".encode())
        digest.update(_bytes(x))
    return digest.hexdigest()


def _bytes(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
