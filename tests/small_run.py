"""A run small enough to train in a test, in this process or in its own."""

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson
import pytest

import train
from data.prepare import prepare
from tests import several_devices
from training.checkpoint import Checkpoints
from training.metrics import MetricsWriter

ROOT = Path(train.__file__).parent

RECIPE = '''
from pathlib import Path

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=2, width=16, context=32, dtype="float32",
                          attention=tuple(attention.split(","))),
        data=DataConfig(dir=str(Path(__file__).parent / "tokens")),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        train=TrainConfig(steps=2, batch_size=4, eval_every=10, eval_batches=2),
        checkpoint=CheckpointConfig(every_steps=10),
    )
'''


def make(folder: Path) -> Path:
    """The recipe, in its own folder with its token files."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        lines = [f"{i} times {number} is {i * number}\n" for i in range(50 + number)]
        (texts / f"{number:02}.txt").write_text("".join(lines))
    prepare(str(texts), "bytes", folder / "tokens", progress=False)
    (folder / "tiny.py").write_text(RECIPE)
    return folder / "tiny.py"


@contextmanager
def settings() -> Iterator[None]:
    """For calls of ``train.main``: layers broadcast their biases."""
    with jax.numpy_rank_promotion("allow"):
        yield


def run(*arguments: object) -> int:
    """The exit code of train.py, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        patch.setattr(train, "STARTED", time.perf_counter())
        try:
            return train.main()
        except SystemExit as exit:
            return int(exit.code or 0)


def start(*arguments: object, root: Path = ROOT, under: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """train.py as a process, ``under`` another command if given."""
    command = [*under, sys.executable, str(root / "train.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | environment)


def start_together(*arguments: object, of_each: tuple[tuple[object, ...], ...] = ((), ()), devices: int = 2,
                   ) -> list[subprocess.Popen]:
    """A run of several processes of several devices each; ``of_each``: the flags that only one has."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return [start(*arguments, *own, "--distributed.coordinator", address, "--distributed.processes", len(of_each),
                  "--distributed.process", index, **several_devices.environment(devices))
            for index, own in enumerate(of_each)]


@contextmanager
def before_line(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Within, ``act`` is called before a run writes the train line of a step."""
    write = MetricsWriter.write

    def write_line(self: MetricsWriter, record: dict[str, Any]) -> None:
        if (record["split"], record["step"]) == ("train", step):
            act()
        write(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_line)
        yield


def lines(run_dir: Path, split: str | None = None) -> list[dict]:
    """The complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    found = [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    return [line for line in found if split in (None, line["split"])]


def saved_steps(run_dir: Path) -> list[int]:
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        return checkpoints.steps()


def arrays(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name."""
    from orbax.checkpoint import v1 as ocp

    found = {}
    folder: Any = run_dir / "checkpoints" / str(step)
    for item in ("parameters", "optimizer"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sharding info not provided")
            tree = ocp.load_checkpointables(folder, {item: None})[item]
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found
