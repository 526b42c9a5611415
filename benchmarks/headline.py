"""Trains softmax and chunked for the same time on this device, and compares their losses.

    python -m benchmarks.headline --minutes 4 --context 16384 --out runs/headline

The models are those of the quickstart, on the Python standard library as bytes. On a GPU they have the size of GPT-2
small. ``train.py`` trains them and ``compare.py`` draws them. Minutes are the training time of each run, without
compilation, evaluation and checkpoints. Further flags are those of ``train.py``, such as ``--model.width 64``. The
folder has the runs, the page (``headline.html``), and its picture and figures (``.png``, ``.json``).
"""

import functools
import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path

from benchmarks import report
from benchmarks.recipes import train_flags
from kernels import device
from models.mode_text import HELP
from support.errors import ConfigError
from training.environment import configure_jax

NEEDED = ("datasets", "grain", "orbax", "orjson", "plotly", "rich", "tiktoken", "tyro")
"""Packages of ``train.py`` and ``compare.py`` that a GPU machine may lack."""
RECIPE = Path(__file__).parents[1] / "configs" / "quickstart.py"
GPU_FLAGS = ("--model.layers", "12", "--model.heads", "12", "--model.width", "768", "--optimizer.learning-rate", "6e-4",
             "--train.eval-every", "200")


@functools.partial(report.Benchmark, module="benchmarks.headline", json=False, passes_on=True, flags={
    "minutes": report.flag("of training, each run's own", 4.0),
    "context": report.flag("tokens in a sequence", 16_384), "batch": report.flag("sequences in a step", 1),
    "modes": report.flag(HELP, ("softmax", "chunked")),
    "out": report.flag("folder of the runs", Path("runs/headline"), Path)})
def main(options: Namespace, results: report.Results) -> int:
    """Trains and compares; returns the exit code of the first failure."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"requires packages that are not installed: {', '.join(missing)}")
    report.use_whole_device()
    configure_jax()
    import compare
    import train

    runs = {mode: options.out / re.sub("[:=]", "-", mode) for mode in options.modes}
    flags = [*(GPU_FLAGS if device.platform() != "cpu" else ()), "--model.context", str(options.context),
             "--train.batch-size", str(options.batch), "--train.minutes", str(options.minutes),
             "--checkpoint.every-steps", str(10**9), *options.words]  # one, at the end
    # All command lines are checked before the first run is trained.
    lines = [train.parse([str(RECIPE), *train_flags(mode), "--run-dir", str(run), *flags])
             for mode, run in runs.items()]
    report.make_folder(options.out)
    report.kept(options.out, "the runs so far")
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
