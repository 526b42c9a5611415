"""A model as a folder to publish: ``config.json`` and ``environment.json`` of its run, its weights, a model card.

The format holds every attention mode. ``sample.py``, ``eval.py``, ``--init-from`` and ``lineargpt.open_run`` read such
a folder like a run. It has neither the optimizer's state nor logs, so that no run resumes from it.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from configs.schema import Config
from models import attention as attentions
from models.gpt import GPT
from models.sizes import head_width, layer_modes
from support.errors import CheckpointError
from support.files import write_text
from training.metrics import read_columns
from training.run_files import write_run_files

WEIGHTS, CARD = "model.safetensors", "README.md"
FORMAT = "lineargpt"
PUBLIC = ("versions", "commit", "corpus_checksum", "tokenizer", "vocabulary_size", "parameters", "dtype", "image",
          "command")
"""What is kept of ``environment.json``; the rest describes the machine."""
USE = """```python
from lineargpt import open_run

run = open_run("{name}")
{use}
```"""


def write_portable(folder: Path, run: Path, model: GPT, config: Config, environment: Mapping[str, Any],
                   step: int) -> int:
    """Write the model of a run.

    Args:
        folder: existing folder to write to.
        run: the run folder, whose val losses are in the model card.
        model: the model.
        config: that of the run.
        environment: contents of ``environment.json``.
        step: number of updates of the model.

    Returns:
        the number of parameters.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    from safetensors.numpy import save_file

    tensors = {name: np.asarray(x) for name, x in _by_name(nnx.to_pure_dict(nnx.state(model))).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": FORMAT, "step": str(step)})
    (folder / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read it
    public = {name: environment[name] for name in PUBLIC if name in environment}
    if "command" in public:
        public["command"] = _without_run_dir(public["command"])
    write_run_files(folder, config, public)
    write_text(folder / CARD, _card(run, model, config, public, step))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def read_portable(path: Path, shapes: Any) -> tuple[int, Any]:
    """The number of updates of the weights in a file, and their arrays.

    Args:
        path: ``model.safetensors`` of :func:`write_portable`.
        shapes: tree of what is read: shapes and dtypes, perhaps with shardings.

    Raises:
        CheckpointError: the file is damaged, or of another model.
    """
    from safetensors import SafetensorError, safe_open

    wanted = {name: x for tree in shapes.values() for name, x in _by_name(tree).items()}
    try:
        with safe_open(path, framework="np") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            found = {name: file.get_tensor(name) for name in names & wanted.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore a copy") from error
    if metadata.get("format") != FORMAT or not metadata.get("step", "").isdecimal():
        raise CheckpointError(f"{path}: its metadata has no step; expected a file of convert.py export")
    faults = [f"no {name}" for name in sorted(wanted.keys() - names)]
    faults += [f"{name}, which the model does not have" for name in sorted(names - wanted.keys())]
    faults += [f"{name} of shape {x.shape} and dtype {x.dtype}, where the model has {wanted[name].shape} and "
               f"{wanted[name].dtype}" for name, x in sorted(found.items())
               if (x.shape, x.dtype) != (wanted[name].shape, wanted[name].dtype)]
    if faults:
        raise CheckpointError(f"{path} has {faults[0]}" + f", and {len(faults) - 1} other differences" * (
            len(faults) > 1) + "; it is of another model than config.json")

    def array(path: Any, x: Any) -> jax.Array:
        return jax.device_put(found[_name(path)], getattr(x, "sharding", None))

    return int(metadata["step"]), {name: jax.tree_util.tree_map_with_path(array, tree) for name, tree in shapes.items()}


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _without_run_dir(command: list[str]) -> list[str]:
    """A command line without the folder of its run."""
    if "--run-dir" not in command:
        return command
    at = command.index("--run-dir")
    return command[:at] + command[at + 2:]


def _card(run: Path, model: GPT, config: Config, environment: Mapping[str, Any], step: int) -> str:
    """The model card, in Markdown with the metadata of the Hugging Face Hub."""
    sizes, modes = config.model, list(dict.fromkeys(layer_modes(config.model)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    data = "token files" if config.data.dir else "a mixture" if config.data.mixture else config.data.source
    rows = {"attention": ", ".join(sizes.attention), "parameters": f"{count:,}", "layers": str(sizes.layers),
            "heads": f"{sizes.heads} of width {head_width(sizes)}", "width": f"{sizes.width:,}",
            "context": f"{sizes.context:,} tokens", "positions": sizes.positions, "vocabulary": f"{model.vocab_size:,}",
            "tokenizer": config.data.tokenizer, "data": data, "steps": f"{step:,}",
            **_losses(run / "metrics.jsonl", step)}
    use = "images = run.sample_images(4)" if "image" in environment else 'print(run.sample("def ", max_new_tokens=200))'
    lines = ["---", "library_name: lineargpt", f"tags: [jax, {', '.join(modes)}]", "---", "", f"# {run.name}", "",
             "A GPT-2 model, trained by lineargpt.", "", "| | |", "|---|---|",
             *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    if "command" in environment:
        lines += ["Trained by", "", f"    python {shlex.join(environment['command'])}", ""]
    lines += ["## Use", "", "In a clone of lineargpt:", "", USE.format(name=run.name, use=use), ""]
    for mode in modes:
        lines += [f"## Attention `{mode}`", "", "```text", (attentions.load(mode).__doc__ or "").strip(), "```", ""]
    return "\n".join(lines)


def _losses(metrics: Path, step: int) -> dict[str, str]:
    """The val loss at a step, and the number of tokens before it, where the log has them."""
    columns = read_columns(metrics) if metrics.exists() else {}
    if not columns:
        return {}
    at = np.flatnonzero((columns["split"] == "val") & (columns["step"] == step))
    if not len(at):
        return {}
    return {"tokens": f"{int(columns['tokens'][at[-1]]):,}", "val loss": f"{columns['loss'][at[-1]]:.4f} nats a token"}
