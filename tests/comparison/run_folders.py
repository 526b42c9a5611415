"""Runs as written by train.py, made by formulas."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from training.window_losses import WindowLosses, write_window_losses

TOKENS_PER_STEP = 64


def write_run(path: Path, mode: str = "softmax", *, seed: int = 0, steps: int = 100, seconds: float = 1.0,
              loss: float = 2.0, slope: float = 0.01, every: int = 20, tokenizer: str = "bytes",
              form: str | None = None, context: int = 32, learning_rate: float = 1e-3, decay_steps: int | None = None,
              planned: int | None = None, **environment: Any) -> Path:
    """A run whose val loss is ``loss - slope * step``, evaluated at every ``every`` steps, and train loss 0.5 lower;
    the learning rate is constant, or falls to nothing in ``decay_steps``. The config names ``planned`` steps, or those
    there are."""
    path.mkdir(parents=True)
    config = Config(model=ModelConfig(attention=(mode,), context=context), data=DataConfig(tokenizer=tokenizer),
                    optimizer=OptimizerConfig(learning_rate=learning_rate),
                    train=TrainConfig(seed=seed, steps=planned or steps))
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "environment.json").write_text(json.dumps(
        {"implementations": {mode: form or mode}, "parameters": 1234} | environment))
    lines = []
    for step in range(1, steps + 1):
        at = {"step": step, "tokens": step * TOKENS_PER_STEP, "train_seconds": step * seconds, "wall_seconds": 5.0}
        val = loss - slope * step
        lines.append(at | {"split": "train", "loss": val - 0.5, "gradient_norm": 1.0,
                           "tokens_per_second": TOKENS_PER_STEP / seconds,
                           "learning_rate": learning_rate * (1 - step / decay_steps if decay_steps else 1)})
        if every and step % every == 0:
            lines.append(at | {"split": "val", "loss": val, "bits_per_byte": val / math.log(2) / (
                1 if tokenizer == "bytes" else 4)})
    write_lines(path, lines)
    return path


def set_fields(path: Path, fields: Mapping[str, Any]) -> Path:
    """Change fields of a run's config, by dotted name; returns the run."""
    config = json.loads((path / "config.json").read_text())
    for name, value in fields.items():
        *groups, last = name.split(".")
        group = config
        for each in groups:
            group = group.setdefault(each, {})
        group[last] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_windows(path: Path, losses: Sequence[float], *, tokens: Sequence[int] | None = None, step: int = 100,
                  context: int = 32, checksum: str = "c0ffee") -> Path:
    """Writes an evaluation of a run: the mean loss of each val window, in nats, of which each has 32 tokens or as
    many as ``tokens`` says; returns the run."""
    counts = np.array(tokens or [32] * len(losses), np.int32)
    windows = WindowLosses(np.array(losses) * counts, counts)
    loss = float(windows.loss_N.sum() / counts.sum())
    (path / "evaluation.json").write_text(json.dumps({"step": step, "evaluations": [
        {"context": context, "corpus": "a book", "windows": len(losses), "windows_checksum": checksum, "loss": loss,
         "positions": []}]}))
    write_window_losses(path, [windows])
    return path


def write_evaluated(path: Path, mode: str = "softmax", *, source: str = "python-stdlib", context: int = 32) -> Path:
    """A run as imported by convert and evaluated by eval.py, without a training log."""
    path.mkdir(parents=True)
    config = Config(model=ModelConfig(attention=(mode,), context=context), data=DataConfig(source=source))
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "environment.json").write_text(json.dumps(
        {"parameters": 1234, "tokenizer": config.data.tokenizer, "corpus_checksum": None, "devices": ["cuda:0"]}))
    positions = [{"first": 1, "last": 1, "loss": 3.0}, {"first": 2, "last": 3, "loss": 2.5}]
    (path / "evaluation.json").write_text(json.dumps({"evaluations": [
        {"context": context, "corpus": "a book", "positions": positions}]}))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Those of ``metrics.jsonl``."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """In place of those of ``metrics.jsonl``."""
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
