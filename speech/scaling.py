"""Time of a training step of a recogniser against the number of frames, and its slope.

    python -m speech.scaling --json speech/results/scaling_cpu.json --picture speech/results/scaling_cpu.png

A case is the step of ``speech.train`` on generated tones at one length: forward pass, backward pass, CTC and optimizer.
The cases take turns. The slope is that of a line fitted to the logarithms of the median step time and of the frames: 1
is linear, 2 quadratic.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks import report, timing
from benchmarks.picture import Panel, curves
from configs.schema import EncoderConfig, SpeechConfig, TrainConfig
from models import attention
from models.encoder import resolve_config
from models.mode_text import mode_config
from speech import synthetic
from support.ranges import Count
from training.environment import peak_bytes
from training.objectives.examples import compiled_step
from training.objectives.recognition import Recognition


@dataclass(kw_only=True)
class Row(timing.ModeRow):
    """A mode at one length."""

    frames: int

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"{self.mode} at {self.frames:,}"


@dataclass(kw_only=True)
class Options(report.PictureOptions):
    """The flags."""

    modes: tuple[str, ...] = ("linear", "softmax")
    """Modes for encoders, each with its form or options if need be, such as reformer:rounds=4."""
    frames: tuple[Count, ...] = (512, 1024, 2048, 4096)
    """Lengths."""
    layers: Count = 2
    """Layers of 6 heads, width 192."""
    batch: Count = 1
    """Utterances a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype."""
    steps: Count = 20
    """Steps timed of each case."""


def prepare(row: Row, options: Options) -> Callable[[], Any]:
    """Compiles the step of a row; returns a function that runs it."""
    mode, chosen = mode_config(row.mode, known=attention.encoder_modes())
    config = SpeechConfig(
        model=resolve_config(EncoderConfig(
            layers=options.layers, heads=6, width=192, mlp_width=768, context=row.frames, pooling="none",
            dtype=options.dtype, attention=(mode,), modes={mode: chosen})),
        train=TrainConfig(batch_size=options.batch))
    objective = Recognition(config, synthetic.load(context=row.frames, train_utterances=options.batch, val_utterances=1,
                                                   seed=0))
    compiled, begin = compiled_step(objective)
    row.peak_bytes = peak_bytes(compiled)
    timing.check_memory(row.peak_bytes)
    return begin()


def slope(rows: Sequence[Row]) -> float | None:
    """The slope of log step time over log frames; None for fewer than two lengths."""
    points = [(row.frames, row.milliseconds) for row in rows if row.milliseconds is not None]
    if len(points) < 2:
        return None
    x, y = np.log(np.array(points, float)).T
    return float(np.polyfit(x, y, 1)[0])


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Step time against length."""
    return [Panel(curves(rows, lambda row: row.mode, "frames", "milliseconds"), x="frames",
                  y="milliseconds a training step")]


TABLE = report.columns(("attention", "mode", ""), ("frames", "frames", ",d"), ("ms", "milliseconds", ",.1f"),
                       ("fastest", "fastest", ",.1f"), ("samples", "count", "d"), ("MiB", "mebibytes", ",.0f"))


@functools.partial(report.Benchmark, module="speech.scaling", options=Options, tables=TABLE, panels=panels,
                   title="Speech")
def main(options: Options, results: report.Results) -> None:
    """All cases, in turns."""
    timing.use_whole_device()
    rows = [Row(mode=mode, frames=frames) for frames in options.frames for mode in options.modes]
    timing.time_cases({row.name: (row, functools.partial(prepare, row, options)) for row in rows}, options.steps,
                      sample_seconds=0)
    slopes = {mode: slope([row for row in rows if row.mode == mode]) for mode in options.modes}
    results.model = f"{options.layers} layers, {options.dtype}"
    results.more["slopes"] = slopes
    results.remarks += [f"{mode}: slope {value:.2f}" for mode, value in slopes.items() if value is not None]
    results.add(*rows)


if __name__ == "__main__":
    sys.exit(main())
