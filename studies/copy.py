"""Do linear attention and hashing learn to copy as well as softmax?

    python sweep.py studies/copy.py --out runs/copy --quick
    python sweep.py studies/copy.py --out runs/copy

The copy task of "Transformers are RNNs" (Katharopoulos et al., 2020, section 4.1): 10 symbols, a length of 128, 4
layers of width 256, 8 heads, batches of 64, RAdam at 1e-3 for 3,000 of 10,000 updates and at 1e-4 after them; softmax,
linear attention (elu + 1) and the Reformer with 1, 4 and 8 rounds of hashing into 64 buckets, in chunks of 32; three
seeds. The blocks are ours: LayerNorm before attention and MLP, GELU, learned positions and no dropout. The paper's
figure 2 has no table of values. Its result: linear attention reaches the loss of softmax, and hashing stays above, the
more so the fewer its rounds.

The quick form has the recipe's 2 layers of width 128 and its optimizer, for 1,500 updates of 16 sequences, with
softmax, linear and 1 round of hashing: 13 minutes on two CPU cores under load, after which none has converged
(benchmarks/results/studies/copy/figures.md). lra/README.md has runs of the recipe with batches of 32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.figures import Figure, loss_curves
from comparison.runs import Run
from comparison.study import Variation, mode_fields

RECIPE = "configs/copy_task.py"
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "softmax": ("softmax", {}), "linear": ("linear", {}),
    **{f"lsh-{rounds}": ("reformer", {"rounds": rounds, "chunk_size": 32, "buckets": 64}) for rounds in (1, 4, 8)}}
"""Attention and options of its mode, by the paper's names."""
PUBLISHED = {
    "model.layers": 4, "model.heads": 8, "model.width": 256, "model.initial_scale": 0.0625, "optimizer.name": "radam",
    "optimizer.learning_rate": 1e-3, "optimizer.schedule": "drop", "optimizer.drop_step": 3000,
    "optimizer.final_fraction": 0.1, "optimizer.warmup_steps": 0, "optimizer.beta1": 0.9, "optimizer.beta2": 0.999,
    "optimizer.clip_norm": None, "train.batch_size": 64, "train.steps": 10_000}


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        return [_run(arm, 0, {"train.steps": 1500, "train.batch_size": 16}) for arm in ("softmax", "linear", "lsh-1")]
    return [_run(arm, seed, PUBLISHED) for arm in ARMS for seed in (0, 1, 2)]


def _run(arm: str, seed: int, fields: Mapping[str, Any]) -> Variation:
    attention, options = ARMS[arm]
    return Variation(f"{arm}-seed-{seed}", RECIPE, attention, {
        **fields, "train.seed": seed, **mode_fields(attention, **options)})


def arm_of(run: Run) -> str:
    """Its name in ``ARMS``."""
    return run.name.partition("-seed-")[0]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_curves(runs, arm=arm_of, title="Loss of the copy task"),
            loss_curves(runs, quantity="accuracy", arm=arm_of, title="Accuracy of the copy task")]
