"""Accounting: floating-point operations of training, peaks of devices, and wall time by part."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

from support.command import note
from support.errors import JsonError
from support.json_files import Duration, Natural, read, write


class Peak(NamedTuple):
    """Peak performance of a device, from its data sheet."""

    flops: Mapping[str, float]
    """Dense floating-point operations per second by dtype."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""


def _nvidia(flops: float, bandwidth: float) -> Peak:
    """Peaks of the tensor cores. By default jax multiplies float32 there as TF32, at half the speed."""
    return Peak({"bfloat16": flops, "float16": flops, "float32": flops / 2}, bandwidth)


PEAKS = {
    # NVIDIA's data sheets of H200, H100 and A100, "without sparsity".
    "NVIDIA H200": _nvidia(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": _nvidia(989e12, 3.35e12),
    "NVIDIA H100 PCIe": _nvidia(756e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": _nvidia(312e12, 2.039e12),
    "NVIDIA A100-SXM4-40GB": _nvidia(312e12, 1.555e12),
    # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm: v4, v5e, v5p, v6e and TPU7x. A device of the last is
    # half of a chip.
    "TPU v4": Peak({"bfloat16": 275e12}, 1.2e12),
    "TPU v5 lite": Peak({"bfloat16": 197e12}, 0.819e12),
    "TPU v5": Peak({"bfloat16": 459e12}, 2.765e12),
    "TPU v6 lite": Peak({"bfloat16": 918e12}, 1.64e12),
    "TPU7x": Peak({"bfloat16": 2307e12 / 2}, 7.38e12 / 2),
}
"""Peaks by jax's name of the device kind."""


def peak() -> Peak | None:
    """The peaks of the first device; None if unknown."""
    import jax  # imported here, so that compare.py starts without it

    return PEAKS.get(jax.devices()[0].device_kind)


def peak_flops(dtype: str, devices: int) -> float | None:
    """Peak operations per second of a number of devices for a dtype; None if unknown."""
    of_one = peak()
    flops = None if of_one is None else of_one.flops.get(dtype)
    return None if flops is None else flops * devices


def flops_per_token(config: dict[str, Any], environment: dict[str, Any]) -> float | None:
    """Floating-point operations per token of forward and backward pass.

    These are 6 per parameter, excluding positions and parameters of an attention mode other than projections, and three
    times those of the attention's forward pass. Rematerialisation does not count. For an encoder, tokens are examples
    times the context, and attention has no mask. For a classifier, embeddings and head are excluded, and both towers
    count. A token embedding counts as the head that is tied to it.

    Args:
        config: contents of ``config.json``.
        environment: its ``parameters``, their total number, and ``vocabulary_size``.

    Returns:
        None if the number of parameters or the attention mode is unknown.
    """
    model, parameters = config["model"], environment.get("parameters")
    if parameters is None:
        return None
    try:
        width, context, towers = model["width"], model["context"], model.get("towers", 1)
        if model["positions"] == "learned":
            parameters -= context * width
        if model.get("head") == "logistics":  # the embedding is only looked up
            parameters -= environment["vocabulary_size"] * width
        if model.get("pooling", "none") != "none":
            parameters -= environment["vocabulary_size"] * width + model["mlp_width"] * (
                (4 if towers == 2 else 1) * width + model["classes"])
        layers = _layers(model)
        mixing = sum(count * layer.layer_flops(context, context, causal="classes" not in model)
                     for layer, count in layers) / context
        own = sum(count * layer.own_parameters for layer, count in layers)
    except Exception:  # a config of another version, an unknown mode, or one without flops
        return None
    return towers * (6.0 * (parameters - own) + 3.0 * mixing)


def state_bytes(config: dict[str, Any]) -> int:
    """Bytes that decoding keeps for a sequence as long as the context, in all layers, at four bytes a number.

    Args:
        config: contents of ``config.json``.

    Raises:
        NotImplementedError: a mode has no cached decode.
    """
    return sum(count * layer.layer_state_bytes(config["model"]["context"]) for layer, count in _layers(config["model"]))


def _layers(model: dict[str, Any]) -> list[tuple[Any, int]]:
    """The attention at each place of the pattern, abstract, and its number of layers."""
    heads, width, pattern = model["heads"], model["width"], model["attention"]
    head_width = model.get("head_width") or width // heads
    return [(_layer(mode, json.dumps(model["modes"].get(mode, {})), heads, head_width, width, model["context"]),
             len(range(place, model["layers"], len(pattern)))) for place, mode in enumerate(pattern)]


@cache
def _layer(mode: str, options: str, heads: int, head_width: int, width: int, context: int) -> Any:
    from flax import nnx

    from models import attention

    module = attention.load(mode)
    return nnx.eval_shape(lambda: module.Attention(
        module.Config(**json.loads(options)), heads=heads, head_width=head_width, width=width, max_length=context,
        rngs=nnx.Rngs(0)))


PARTS = {
    "compile": "compiling the training step and initialising the parameters",
    "input": "waiting for batches",
    "step": "training steps",
    "evaluation": "evaluations, including their compilation",
    "checkpoint": "writing checkpoints, and reading one to resume",
    "other": "the rest: imports, opening the data, samples, logging",
}
"""Parts of the wall time of a run."""


class _TimingFile(TypedDict):
    """``timing.json``."""

    seconds: dict[str, Duration]
    starts: Natural


@dataclass
class Timing:
    """Wall time of a run by part; time counts for the part last given to :meth:`enter`.

    ``RUN/timing.json`` has the seconds of each part, over all starts of the run.
    """

    path: Path | None
    """None: write no file."""
    began: float
    """``time.perf_counter()`` at the start of the command."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    starts: int = 1
    part: str = "other"

    @classmethod
    def of_run(cls, run_dir: Path, began: float) -> "Timing":
        """Continues the ``timing.json`` of earlier starts, if any; a damaged one is replaced, with a note."""
        timing = cls(path := run_dir / "timing.json", began)
        if path.exists():
            try:
                before = read(path, _TimingFile)
                timing.starts += before["starts"]
                timing.seconds = {part: float(before["seconds"].get(part, 0.0)) for part in PARTS}
            except JsonError:
                note(f"{path} is damaged: earlier times are lost, and counting starts again")
        return timing

    def enter(self, part: str) -> None:
        """Count time for this part from now on."""
        now = time.perf_counter()
        self.seconds[self.part] += now - self.began
        self.began, self.part = now, part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes the file, without hiding an earlier exception."""
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self.write()

    def write(self) -> None:
        """Write ``timing.json``."""
        self.enter(self.part)
        if self.path is None:
            return
        write(self.path, {"seconds": self.seconds, "wall_seconds": self.wall_seconds, "starts": self.starts})

    @property
    def wall_seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        whole = self.wall_seconds or 1.0
        return ", ".join(f"{'start-up and other' if part == 'other' else part} {seconds:,.1f} s ({seconds / whole:.0%})"
                         for part, seconds in self.seconds.items())
