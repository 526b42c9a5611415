"""Runs of the standings' protocol, made by a formula."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.standings import protocol_config, work_of
from comparison import standings
from comparison.curves import Curve
from comparison.runs import Run
from comparison.standings import RUNGS, Place
from configs.schema import groups_of
from training.window_losses import WindowLosses

BEST = {"softmax": 0.016, "softmax-parts": 0.008, "gated_delta": 0.008, "kda": 0.008,
        "gated": 0.008}
"""The best rate at XS by arm."""
WORSE = {"softmax": 0.3, "softmax-parts": 0.0, "gated_delta": -0.05, "kda": 0.1, "gated": 0.1}
"""What is added to the loss of each arm; for kda less at larger sizes."""


def loss_of(place: Place, flops: float) -> float:
    """Nats per token: a power law of 6 FLOPs for each parameter and token, worse for other rates than the best."""
    worse = WORSE[place.arm] * (RUNGS[place.rung].width / 64) ** (-1 if place.arm == "kda" else 0)
    best = BEST[place.arm] * 64 / RUNGS[place.rung].width
    return 1 + 40 * flops**-0.15 + worse + 0.02 * math.log2(place.rate / best) ** 2 + 0.003 * math.sin(
        7 * place.seed + len(place.arm))


def run_of(place: Place) -> Run:
    config, rung = groups_of(protocol_config(place).to_dict()), RUNGS[place.rung]
    steps, tokens = config["train"]["steps"], rung.batch_size * standings.CONTEXT
    ends = np.array([round(steps * part) for part in config["train"]["anneal_at"]], float)
    work = work_of(place.rung, place.arm)
    loss = np.array([loss_of(place, each * tokens * 6.0 * rung.parameters) for each in ends])
    lines = {"step": ends, "tokens": ends * tokens, "flops": ends * tokens * work.flops_per_token,
             "train_seconds": ends * 0.1, "loss": loss,
             "bits_per_byte": loss / math.log(2) / standings.PYTHON_PACKAGES.bytes_per_token}
    end, before = ({name: values[part] for name, values in lines.items()} for part in (slice(-1, None), slice(0, -1)))
    contexts = (standings.CONTEXT, *standings.LONGER)
    of_context = {context: float(loss[-1]) * context / 1024 for context in contexts}
    return Run(place.name, Path(place.name), config, {
        "corpus_checksum": standings.PYTHON_PACKAGES.checksum, "parameters": work.parameters,
        "commit": "c0ffee", "devices": ["cpu"], "processor": "A CPU", "versions": {"jax": "0"},
        "command": ["train.py", "--run-dir", "/somewhere", "--data.dir", "/here", "--x"]},
        Curve(), Curve(end, end, 1), evaluations=[
            {"corpus": "c", "context": context, "loss": of_context[context], "token_classes": [
                {"partition": "repeats of 4 tokens", "classes": [
                    {"class": "first", "share": 0.75, "loss": of_context[context] + 0.1},
                    {"class": "repeat", "share": 0.25, "loss": of_context[context] - 0.3}]}]}
            for context in contexts],
        window_losses={("c", context, standings.PYTHON_PACKAGES.windows): _windows(context, of_context[context])
                       for context in contexts},
        annealed=Curve(before, before, len(ends) - 1) if len(ends) > 1 else Curve())


def _windows(context: int, mean: float) -> WindowLosses:
    """Of the evaluation with a context: they differ, and have this mean."""
    n = np.arange(standings.WINDOWS * standings.CONTEXT // context)
    tokens_N = np.full(len(n), context)
    return WindowLosses((mean + 0.2 * np.sin(n) - 0.2 * np.sin(n).mean()) * tokens_N, tokens_N)


def all_runs(arms: Mapping[str, Any] | tuple[str, ...], rungs: tuple[str, ...] = ("XS", "S", "M")) -> list[Run]:
    """Every run of some arms, as they follow from each other."""
    runs: list[Run] = []
    while True:
        losses = standings.losses_of(runs)
        found = [place for place in standings.places(arms, rungs, losses) if place not in losses]
        if not found:
            return runs
        runs += [run_of(place) for place in found]
