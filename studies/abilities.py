"""What can each attention do: track a state, recall, copy, memorise, reason?

    python sweep.py studies/abilities.py --out runs/abilities --quick
    python sweep.py studies/abilities.py --out runs/abilities
    python sweep.py studies/abilities.py --out runs/abilities-power --rows power

Every causal attention on the synthetic tasks of data/synthetic_tasks, in models of 2 layers of width 64 (hybrids of 3 :
1 have 4 layers), at three learning rates a factor of three apart with one seed, and at the best of them with two more
seeds. Every attention has a short convolution of 4, which decides recall: the recurrences by default, the others by
their option, but for reformer and synthesizer, which take none. State tracking is trained at 64 tokens and tested up to
512, recall up to 256.

``RATES`` has the best rate of each arm and task, from the runs with one seed; runs with the other seeds are planned for
arms that are in it. The quick form has ``gated_delta`` with writes up to 2 against softmax, a task of each family, one
rate and one seed. ``--rows`` takes modes in place of the study's arms, with three rates and one seed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import abilities
from comparison.figures import Figure
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from data import synthetic_tasks
from studies._arms import RATE, arm_of

RECIPE = "configs/abilities.py"
CONV = {"short_conv": 4}
WIDE = {"write_range": 2}

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", CONV),
    "chunked": ("chunked", CONV),
    "gated": ("gated", {}),
    "gated_delta": ("gated_delta", {}),
    "gated_delta-range": ("gated_delta", WIDE),
    "kda": ("kda", {}),
    "kda-range": ("kda", WIDE),
    "hybrid-gated_delta": ("gated_delta,gated_delta,gated_delta,softmax", CONV),
    "hybrid-kda": ("kda,kda,kda,softmax", CONV),
    "power": ("power", CONV),
    "window": ("window", CONV | {"window": 16}),
    "longformer": ("longformer", CONV | {"global_tokens": 0}),
    **{mode: (mode, CONV) for mode in ("performer", "local", "bigbird", "sparse")},
    **{mode: (mode, {}) for mode in ("reformer", "synthesizer")},
}
"""Attention and options of its mode (of a hybrid, the last), by the name of the run."""

LONGER = ("--length", "64,128,256,512")
TASKS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "Z2": ("words:group=Z2,length=64", 600, LONGER),
    "Z3": ("words:group=Z3,length=64", 600, LONGER),
    "S3": ("words:group=S3,length=64", 1000, LONGER),
    "dyck": ("dyck:length=64", 500, LONGER),
    "mqar": ("mqar:length=64,pairs=8,vocabulary=64", 600, ("--length", "64,128,256", "--by", "depth")),
    "rebind": ("rebind:length=96,pairs=6,rebindings=6,queries=12,vocabulary=64", 500, ()),
    "compositional": ("compositional:length=64,pairs=4,vocabulary=96", 600, ()),
    "selective_copy": ("selective_copy:length=64", 500, ()),
    "recall": ("in-context-recall:length=64", 500, ()),
    "memorization": ("memorization", 300, ()),
    "depo": ("depo:hops=2,nodes=6,queries=8,length=48", 800, ()),
    "mano": ("mano:operations=2", 800, ()),
}
"""Source, steps and arguments of evaluate.py, by the name of the task."""
QUICK = ("softmax", "gated_delta-range")
QUICK_TASKS = ("Z2", "dyck", "mqar", "rebind", "selective_copy", "recall", "depo", "mano")
QUICK_RATE = 3e-3
GRID = (1e-3, 3e-3, 9e-3)
SEEDS = 3
RATES: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("abilities_rates.json").read_text())
"""The best learning rate of each arm and task."""


def get_runs(quick: bool, rows: Sequence[str] | None = None) -> list[Variation]:
    arms = ARMS if rows is None else {mode: next((arm for arm in ARMS.values() if arm[0] == mode), (mode, {}))
                                      for mode in rows}
    if quick:
        return [_run(task, arm, arms[arm], QUICK_RATE, 0) for task in QUICK_TASKS
                for arm in (QUICK if rows is None else ("softmax", *rows)) if arm in arms]
    tried = [_run(task, arm, arms[arm], rate, 0) for arm in arms for task in TASKS for rate in GRID]
    again = [] if rows is not None else [
        _run(task, arm, arms[arm], RATES[arm][task], seed) for seed in range(1, SEEDS) for arm in RATES
        for task in RATES[arm]]
    return tried + again


def _run(task: str, arm: str, made_of: tuple[str, dict[str, Any]], rate: float, seed: int) -> Variation:
    (attention, options), (source, steps, evaluation) = made_of, TASKS[task]
    documents = synthetic_tasks.parse(source)
    assert documents is not None
    layers = {"model.layers": attention.count(",") + 1} if "," in attention else {}
    return Variation(f"{task}-{arm}-{rate:g}-seed-{seed}", RECIPE, attention, {
        "data.source": source, "model.context": documents.length, "train.steps": steps, RATE: rate, "train.seed": seed,
        **layers, **mode_fields(attention, **options)}, evaluation=evaluation)


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return abilities.figures(runs, arm=arm_of)
