"""State files: what decoding keeps of a text, to go on from later or on another machine.

A safetensors file with the last token's logits, the cache (of one that grows only as far as it is filled), the count of
positions and the tokens seen, which the repetition penalty needs. Its metadata say which model it is of: the sizes,
positions and attention modes with their options, the vocabulary and a SHA-256 of every parameter. Reading these takes a
second per GB of parameters. The number format of the products is not part of it: a state made in bfloat16 on a GPU can
be gone on from in float32 on a CPU. A checksum over all of it is kept too, since safetensors does not notice flipped
bytes.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.block import head_width, layer_modes
from models.gpt import GPT
from sampling.sampler import Memory
from support.errors import StateError
from support.files import replacing

METADATA = "lineargpt-state"
FORMAT = 1
"""Number of the format: count it up where an older file would be misread."""
PARAMETERS = "parameters"


def save(path: Path, memory: Memory, model: GPT, *, origin: str) -> None:
    """Write a state file, beside and renamed into place.

    Args:
        path: where to.
        memory: of one text.
        model: what read the text.
        origin: where the model is from, for the message to one who gives the file to another.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.numpy import save as to_bytes

    position = memory.position
    filled = jax.eval_shape(lambda: model.init_cache(1, position))
    memory = memory._replace(cache=jax.tree.map(
        lambda x, like: np.asarray(x)[tuple(map(slice, like.shape))], memory.cache, filled))
    tensors = {_name(path): np.ascontiguousarray(x) for path, x in jax.tree.leaves_with_path(memory)}
    about: dict[str, Any] = {"format": FORMAT, "origin": origin, "model": fingerprint(model)}
    about["sha256"] = _checksum(tensors, about)
    with replacing(path) as beside:
        beside.write_bytes(to_bytes(tensors, {METADATA: json.dumps(about)}))


def load(path: Path, model: GPT) -> Memory:
    """The memory in a state file, on the host: a ``Sampler`` of the same model goes on from it.

    Raises:
        StateError: the file is damaged, or of another model.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise StateError(f"{path}: damaged, cut short or no state file ({error}); make it again") from error
    if (found := about.get("format")) != FORMAT:
        what = "no format number" if found is None else f"format {json.dumps(found)}"
        raise StateError(f"{path}: no state file that this version of lineargpt knows: it has {what}, and format "
                         f"{FORMAT} is read; make it again")
    if about.pop("sha256", None) != _checksum(tensors, about):
        raise StateError(f"{path}: damaged, it does not have the checksum it was written with; make it again")
    theirs, ours = about["model"], fingerprint(model)
    # What only one of them has follows from another difference, or came with another version, where the other's is the
    # default.
    differing = [f"{name} is {ours[name]} here and {value} there" for name, value in theirs.items()
                 if name != PARAMETERS and ours.get(name, value) != value]
    if differing or theirs.get(PARAMETERS) != ours[PARAMETERS]:
        raise StateError(f"{path}: the state of another model, {about['origin']}: "
                         + ("; ".join(differing) or f"the same sizes, but other {PARAMETERS}"))
    empty = jax.eval_shape(lambda: Memory(jnp.zeros(0), model.init_cache(1, 1), jnp.zeros(0)))
    return jax.tree.map_with_path(lambda path, _: tensors[_name(path)], empty)


def fingerprint(model: GPT) -> dict[str, str]:
    """What has to agree for a state of one model to be one of another, by name."""
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
    # hashlib lets go of the interpreter: as fast as there are cores.
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
