"""Trains softmax and chunked for the same time on this device, and compares their losses.

    python -m benchmarks.headline --minutes 4 --context 16384 --out runs/headline

The models are those of the quickstart, on the Python standard library as bytes. On a GPU they have the size of GPT-2
small. ``train.py`` trains them and ``compare.py`` shows them. Minutes are the training time of each run, without
compilation, evaluation and checkpoints. Further flags are those of ``train.py``, such as ``--model.width 64``. The
folder has the runs, the page (``headline.html``), and its picture and figures (``.png``, ``.json``).
"""

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report, timing
from benchmarks.recipes import train_flags
from kernels import device
from support.errors import ConfigError
from support.ranges import Count, Positive
from training.environment import configure_jax

NEEDED = ("datasets", "grain", "orbax", "orjson", "plotly", "rich", "tiktoken", "tyro")
"""Packages of ``train.py`` and ``compare.py`` that a GPU machine may lack."""
RECIPE = Path(__file__).parents[1] / "configs" / "quickstart.py"
GPU_FLAGS = ("--model.layers", "12", "--model.heads", "12", "--model.width", "768", "--optimizer.learning-rate", "6e-4",
             "--train.eval-every", "200")


@dataclass(kw_only=True)
class Options:
    minutes: Positive = 4.0
    """Of training, each run's own."""
    context: Count = 16_384
    """Tokens in a sequence."""
    batch: Count = 1
    """Sequences in a step."""
    modes: tuple[str, ...] = ("softmax", "chunked")
    """Attention modes, each with its options if need be, such as reformer:rounds=4."""
    out: Path = Path("runs/headline")
    """Folder of the runs."""


@functools.partial(report.Benchmark, module="benchmarks.headline", options=Options, passes_on=True)
def main(options: Options, results: report.Results) -> int:
    """Trains and compares; returns the exit code of the first failure."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"requires packages that are not installed: {', '.join(missing)}")
    timing.use_whole_device()
    configure_jax()
    import compare
    import train

    runs = {mode: options.out / re.sub("[:=]", "-", mode) for mode in options.modes}
    flags = [*(GPU_FLAGS if device.platform() != "cpu" else ()), "--model.context", str(options.context),
             "--train.batch-size", str(options.batch), "--train.minutes", str(options.minutes),
             "--checkpoint.every-steps", str(10**9), *results.train_flags]  # one, at the end
    # All command lines are checked before the first run is trained.
    lines = [train.parse([str(RECIPE), *train_flags(mode), "--run-dir", str(run), *flags])
             for mode, run in runs.items()]
    report.make_folder(options.out)
    report.record_saved(options.out, "the runs so far")
    for line in lines:
        if code := train.train(line.config, line.run_dir):
            return code
    page = options.out / "headline"
    return compare.main([*map(str, runs.values()), "--title", f"{results.origin['device']}: context "
                         f"{options.context:,}, {options.minutes:g} minutes of training each",
                         *(word for suffix in ("html", "png", "json") for word in (
                             "--out" if suffix == "html" else f"--{suffix}", str(page.with_suffix(f".{suffix}"))))])


if __name__ == "__main__":
    sys.exit(main())
