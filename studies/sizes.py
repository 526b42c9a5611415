"""Does the order of the attentions, and its dependence on the context, change with the size of the model?

    python -m data.prepare allenai/c4:en --tokenizer gpt2 --out data/c4
    python sweep.py studies/sizes.py --out runs/sizes --dry-run
    python sweep.py studies/sizes.py --out runs/sizes --quick
    python sweep.py studies/sizes.py --out runs/sizes

studies/context.py for GPT-2 of 124M, 355M and 774M, at equal tokens alone: 0.5 billion, 954 updates of 2¹⁹, with one
seed. ``--dry-run`` has the H100-hours of these tokens by the step times of "Linear Transformers Are Faster" (Buckman,
Gelada, 2024): 57 for softmax and chunked. The article's curves, of 24 hours on 8 H100s, are drawn beside ours: there
the gap between linear attention and softmax is 0.09 at 1,024 tokens for 124M and 0.08 for 774M, and at 32,768 tokens
0.25 and 0.15. The whole study has not been run.

The quick form has 2 layers of width 64 and 4 of width 128, at contexts of 512 and 4,096, for 80 updates of 4,096
tokens: 12 runs, 5 minutes on two CPU cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.picture import published as published_times
from comparison.figures import Figure, differences_against, loss_against
from comparison.published import published
from comparison.runs import Run, group_by
from comparison.study import Variation, grid

CONTEXT = "model.context"
MODES = ("softmax", "chunked", "gated_delta")
LAYERS = {12: "124M", 24: "355M", 36: "774M"}
"""The published sizes by their number of layers."""
PUBLISHED = {size: published(f"loss-against-context-{size}") for size in LAYERS.values()}
UPDATE_TOKENS = 2**19
STEPS = 954
"""Updates of half a billion tokens."""
CONTEXTS = {1024: 4, 8192: 1, 32768: 1}
"""Contexts of the whole study, and the sequences of each on a device."""
TIMED = {"softmax": "softmax:cudnn", "chunked": "chunked"}
"""Names of the published step times."""


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        contexts: dict[int, dict[str, Any]] = {context: {CONTEXT: context, "train.batch_size": 4096 // context}
                                               for context in (512, 4096)}
        sizes: Mapping[str, dict[str, Any]] = {
            "2x64": {"model.layers": 2, "model.width": 64, "model.heads": 2}, "4x128": {"model.layers": 4}}
        return grid("configs/quickstart.py", MODES, {"size": sizes, "context": contexts}, {
            "train.steps": 80, "train.minutes": None, "train.eval_every": 40, "train.eval_batches": 8,
            "train.sample_every": 0})
    fields = {"data.source": "allenai/c4:en", "data.dir": "data/c4", "train.steps": STEPS}
    return [replace(run, name=f"{size}-{run.name}") for size in PUBLISHED for run in grid(
        f"configs/gpt2_{size.lower()}.py", MODES,
        {"context": {context: {CONTEXT: context, "train.rows_per_device": rows, "train.remat": _remat(size, context)}
                     for context, rows in CONTEXTS.items()}}, fields)]


def _remat(size: str, context: int) -> str:
    """Long sequences of large models do not fit into 80 GB otherwise."""
    return "none" if size == "124M" or context < 8192 else "block"


def notes(quick: bool) -> list[str]:
    """The GPU-hours of the whole study."""
    if quick:
        return []
    lines, total = [], 0.0
    for size in PUBLISHED:
        hours = {(mode, context): STEPS * UPDATE_TOKENS / context * published_times(
            "training_step", "models", size, TIMED[mode])[context] / 3.6e6 for mode in TIMED for context in CONTEXTS}
        total += sum(hours.values())
        lines.append(f"{size}: " + "; ".join(f"{mode} " + ", ".join(
            f"{hours[mode, context]:.1f} at {context:,}" for context in CONTEXTS) for mode in TIMED))
    return [f"H100-hours by published step times at batch 1: {total:.0f} for softmax and chunked; gated_delta has none",
            *lines]


def size_of(run: Run) -> str:
    """``124M``, or layers and width."""
    return LAYERS.get(run.config["model"]["layers"], run.size)


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    shown = []
    for size, size_runs in group_by(runs, size_of).items():
        loss = loss_against(size_runs, CONTEXT, title=f"Loss of {size} against context")
        gap = differences_against(size_runs, CONTEXT, "softmax", title=f"Loss of {size} minus that of softmax")
        if size in PUBLISHED:
            loss, gap = PUBLISHED[size].beside(loss), PUBLISHED[size].minus("softmax").beside(gap)
        shown += [figure.named(size.replace(" × ", "x")) for figure in (loss, gap)]
    for context, context_runs in sorted(group_by(runs, lambda run: run.context or 0).items()):
        shown.append(loss_against(context_runs, "model.layers", of=lambda run: run.environment.get("parameters"),
                                  called="parameters", title=f"Loss at a context of {context:,} against parameters"
                                  ).named(context))
    return shown
