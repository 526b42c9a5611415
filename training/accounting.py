"""Floating-point operations of training, what devices could do at most, and where the time of a run went."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from support.command import note
from support.errors import RunError
from support.files import read_json, write_json


class Peak(NamedTuple):
    """What a device could do at most, by its data sheet."""

    flops: Mapping[str, float]
    """Dense operations a second by number format; one that is not named is not known."""
    bandwidth: float
    """Bytes of memory read or written a second."""


def _nvidia(flops: float, bandwidth: float) -> Peak:
    """Of the tensor cores. Jax multiplies float32 there as TF32, at half the speed, where no precision is asked for."""
    return Peak({"bfloat16": flops, "float16": flops, "float32": flops / 2}, bandwidth)


PEAKS = {
    # NVIDIA's data sheets of H200, H100 and A100, "without sparsity".
    "NVIDIA H200": _nvidia(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": _nvidia(989e12, 3.35e12),
    "NVIDIA H100 PCIe": _nvidia(756e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": _nvidia(312e12, 2.039e12),
    "NVIDIA A100-SXM4-40GB": _nvidia(312e12, 1.555e12),
    # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm: v4, v5e, v5p and v6e.
    "TPU v4": Peak({"bfloat16": 275e12}, 1.2e12),
    "TPU v5 lite": Peak({"bfloat16": 197e12}, 0.819e12),
    "TPU v5": Peak({"bfloat16": 459e12}, 2.765e12),
    "TPU v6 lite": Peak({"bfloat16": 918e12}, 1.64e12),
}
"""By the name that jax gives a kind of device."""


def peak() -> Peak | None:
    """The peaks of the first device; None where they are not known."""
    import jax  # compare.py, which counts operations of older runs, starts without it

    return PEAKS.get(jax.devices()[0].device_kind)


def peak_flops(dtype: str, devices: int) -> float | None:
    """Operations a second that so many devices could do at most in a number format; None where not known."""
    of_one = peak()
    flops = None if of_one is None else of_one.flops.get(dtype)
    return None if flops is None else flops * devices


def flops_per_token(config: dict[str, Any], environment: dict[str, Any]) -> float | None:
    """Operations a token of forward and backward pass: 6 a parameter (positions, and what an attention mode has beside
    projections, left out) and three times those of the attention's forward pass; recomputed ones do not count.

    Of a classifier, which counts examples times the context as tokens, embeddings and head are left out, both towers
    count, and attention is without a mask.

    Args:
        config: as ``config.json`` has it.
        environment: its ``parameters``, the number of all of them, and ``vocabulary_size``.

    Returns:
        None where the number of parameters is not known, or this version does not have the attention mode.
    """
    model, parameters = config["model"], environment.get("parameters")
    if not isinstance(parameters, int):
        return None
    try:
        heads, width, context = model["heads"], model["width"], model["context"]
        head_width, towers = model.get("head_width") or width // heads, model.get("towers", 1)
        if model["positions"] == "learned":
            parameters -= context * width
        if "classes" in model:
            parameters -= environment["vocabulary_size"] * width + model["mlp_width"] * (
                (4 if towers == 2 else 1) * width + model["classes"])
        pattern = model["attention"]
        layers = [pattern[layer % len(pattern)] for layer in range(model["layers"])]
        of_layers = [_attention(mode, json.dumps(model["modes"].get(mode, {})), heads, head_width, width, context,
                                "classes" not in model)
                     for mode in layers]
        mixing, own = (sum(figures) for figures in zip(*of_layers, strict=True))
    except Exception:  # another version's config, a mode that is not here, or one that counts nothing
        return None
    return towers * (6.0 * (parameters - own) + 3.0 * mixing)


@cache
def _attention(mode: str, options: str, heads: int, head_width: int, width: int, context: int,
               causal: bool) -> tuple[float, int]:
    """Operations a token of one layer's attention, forward, and the parameters that these count; none are made."""
    from flax import nnx

    from models import attention

    module = attention.load(mode)
    layer = nnx.eval_shape(lambda: module.Attention(
        module.Config(**json.loads(options)), heads=heads, head_width=head_width, width=width, max_length=context,
        rngs=nnx.Rngs(0)))
    return layer.layer_flops(context, context, causal=causal) / context, layer.own_parameters


PARTS = {
    "compile": "compiling the training step and drawing the first parameters",
    "input": "waiting for batches",
    "step": "training steps",
    "evaluation": "evaluations, the compilation of theirs included",
    "checkpoint": "writing checkpoints, and reading the one to go on from",
    "other": "the rest: imports, opening the data, samples, lines that are logged",
}
"""What the wall time of a run is split into."""


@dataclass
class Timing:
    """Where the wall time of a run's processes went: each moment counts for the part that :meth:`enter` named last.

    ``RUN/timing.json`` has the seconds of each part, over all starts of the run.
    """

    path: Path
    began: float
    """``time.perf_counter()`` when the command began."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    starts: int = 1
    _part: str = "other"

    @classmethod
    def of_run(cls, run_dir: Path, began: float) -> "Timing":
        """Goes on from the ``timing.json`` of earlier starts, where there is one; a damaged one is noted, and begun
        anew."""
        timing = cls(run_dir / "timing.json", began)
        if timing.path.exists():
            try:
                before = read_json(timing.path, RunError)
                seconds = {part: float(before["seconds"][part]) for part in PARTS}
                timing.starts += int(before["starts"])
                timing.seconds = seconds
            except (RunError, KeyError, TypeError, ValueError):
                note(f"{timing.path} is damaged: the times that it had are lost, and count from here")
        return timing

    def enter(self, part: str) -> None:
        """From now on time counts for this part."""
        now = time.perf_counter()
        self.seconds[self._part] += now - self.began
        self.began, self._part = now, part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes; an exception that is on its way is the one that is told."""
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self.write()

    def write(self) -> None:
        """``timing.json`` as of now."""
        self.enter(self._part)
        write_json(self.path, {"seconds": self.seconds, "wall_seconds": self.wall_seconds, "starts": self.starts})

    @property
    def wall_seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        whole = self.wall_seconds or 1.0
        return ", ".join(f"{part} {seconds:,.1f} s ({seconds / whole:.0%})" for part, seconds in self.seconds.items())
