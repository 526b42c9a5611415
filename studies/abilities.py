"""What can each attention do: track a state, recall, copy, reason?

    python sweep.py studies/abilities.py --out runs/abilities --quick
    python sweep.py studies/abilities.py --out runs/abilities
    python sweep.py studies/abilities.py --out runs/abilities --rows power

Every causal attention on the synthetic tasks of data/synthetic_tasks, in models of 2 layers of width 64 (hybrids of 3 :
1 have 4 layers), at three learning rates a factor of three apart with one seed, and at the best of them with two more
seeds. Every attention has a short convolution of 4, which decides recall: the recurrences by default, the others by
their option, but for reformer and synthesizer, which take none. State tracking is trained at 64 tokens and tested up to
512, recall up to 256.

The quick form has ``gated_delta`` with writes up to 2 against softmax, tasks of every family, one rate and one seed.
``--rows`` takes arms or other modes; with ``--quick`` against softmax.
"""

import math
from collections.abc import Sequence
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
    "delta-range": ("gated_delta", WIDE | {"decay": False}),
    "kda": ("kda", {}),
    "kda-range": ("kda", WIDE),
    # To here: MAIN.
    "hybrid-gated_delta": ("gated_delta,gated_delta,gated_delta,softmax", CONV),
    "hybrid-kda": ("kda,kda,kda,softmax", CONV),
    "power": ("power", CONV),
    "window": ("window", CONV | {"window": 16}),
    "longformer": ("longformer", CONV | {"global_tokens": 0}),
    **{mode: (mode, CONV) for mode in ("performer", "local", "bigbird", "sparse")},
    **{mode: (mode, {}) for mode in ("reformer", "synthesizer")},
}
"""Attention and options of its mode (of a hybrid, the last), by the name of the run."""

FIXED_LENGTH = ("synthesizer",)
"""Arms that read no more tokens than they were trained on; they are not evaluated at other lengths."""
LONGER = ("--length", "64,128,256,512")
RECALLED = ("--length", "64,128,256", "--by", "distance")
STEPS = "train.steps"
TASKS: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "Z2": ("words:group=Z2,length=64", {STEPS: 300}, LONGER),
    "S3": ("words:group=S3,letters=generators,length=64", {STEPS: 400}, LONGER),
    "mqar": ("mqar:length=64,pairs=8,vocabulary=64", {STEPS: 500}, RECALLED),
    "rebind": ("rebind:length=96,pairs=6,rebindings=6,queries=12,vocabulary=64", {STEPS: 400}, ()),
    "dyck": ("dyck:length=64", {STEPS: 400}, LONGER),
    "selective_copy": ("selective_copy:length=64", {STEPS: 400}, ()),
    "compositional": ("compositional:length=64,pairs=4,vocabulary=96", {STEPS: 500}, ()),
    "depo": ("depo:hops=2,nodes=6,queries=8,length=48", {STEPS: 500}, ()),
    "mano": ("mano:operations=2", {STEPS: 500}, ()),
    "Z3": ("words:group=Z3,length=64", {STEPS: 1000, "train.batch_size": 64}, LONGER),
}
"""Source, fields and arguments of eval.py, by the name of the task. The letters of S3 are exchanges of two things,
without the rotations. Z3 is not learned with batches of 32."""
MAIN = 8
"""Number of arms that come first, so that an unfinished study has all tasks of them."""
QUICK = ("softmax", "gated_delta-range")
QUICK_TASKS = ("Z2", "S3", "dyck", "mqar", "rebind", "selective_copy", "depo", "mano")
GRID = (1e-2, 3e-3, 3e-2)
"""Learning rates; the quick form has the first."""
SEEDS = 3


def get_runs(quick: bool, rows: Sequence[str] | None = None, finished: Sequence[Run] = ()) -> list[Variation]:
    arms = ARMS if rows is None else {mode: ARMS.get(mode, (mode, {})) for mode in rows}
    if quick:
        compared = QUICK if rows is None else tuple(dict.fromkeys(("softmax", *rows)))
        return [_run(task, arm, (ARMS | arms)[arm], GRID[0], 0) for task in QUICK_TASKS for arm in compared]
    names, best, runs = list(arms), best_rates(finished), []
    for part in (names[:MAIN], names[MAIN:]) if rows is None else (names,):
        runs += [_run(task, arm, arms[arm], rate, 0) for rate in GRID for task in TASKS for arm in part]
        runs += [_run(task, arm, arms[arm], best[arm, task], seed) for seed in range(1, SEEDS) for task in TASKS
                 for arm in part if (arm, task) in best]
    return runs


def _run(task: str, arm: str, made_of: tuple[str, dict[str, Any]], rate: float, seed: int) -> Variation:
    (attention, options), (source, fields, evaluation) = made_of, TASKS[task]
    documents = synthetic_tasks.parse(source)
    assert documents is not None
    layers = {"model.layers": attention.count(",") + 1} if "," in attention else {}
    return Variation(f"{task}-{arm}-{rate:g}-seed-{seed}", RECIPE, attention, {
        "data.source": source, "model.context": documents.length, RATE: rate, "train.seed": seed, **fields, **layers,
        **mode_fields(attention, **options)}, evaluation=() if arm in FIXED_LENGTH else evaluation)


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return abilities.figures(runs, arm=arm_of)


def best_rates(runs: Sequence[Run]) -> dict[tuple[str, str], float]:
    """The learning rate with the highest accuracy, or of equal ones with the lowest loss, by arm and task, where all
    have been tried."""
    tried: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run in runs:
        accuracy, loss = run.final("accuracy"), run.final()
        if run.seed == 0 and accuracy is not None and loss is not None:
            task = next(task for task in TASKS if run.name.startswith(f"{task}-{arm_of(run)}-"))
            of_rate = (accuracy, -loss) if math.isfinite(loss) else (-math.inf, -math.inf)
            tried.setdefault((arm_of(run), task), []).append((*of_rate, run.config["optimizer"]["learning_rate"]))
    return {key: max(found)[2] for key, found in tried.items() if len(found) == len(GRID)}
