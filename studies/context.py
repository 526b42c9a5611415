"""How does the loss of each attention depend on the context, at equal tokens and at equal time?

    python -m data.prepare allenai/c4:en --tokenizer gpt2 --out data/c4
    python sweep.py studies/context.py --out runs/context --quick
    python sweep.py studies/context.py --out runs/context

GPT-2 of 124M on C4, 2¹⁹ tokens per update at every context, with softmax, linear attention computed chunked, and the
fixed-state mode that had the lowest loss in benchmarks/results/quality.md, ``gated_delta``; one seed. At equal tokens a
run has 10,000 updates. At equal time it has 24 hours, as in "Linear Transformers Are Faster" (Buckman, Gelada, 2024),
on 8 H100s: 1,728 GPU-hours for the nine runs, which have not been made. The article's losses at equal time are drawn
beside ours. There the lowest loss of softmax is at 4,096 tokens, that of linear attention at 2,048, and the gap between
them grows from 0.03 at 512 tokens to 0.25 at 32,768.

The quick form has the quickstart's model of width 128 and contexts of 512 to 8,192, with 8,192 tokens per update: 30
updates at equal tokens, 12 seconds at equal time; 8 minutes on two CPU cores. There ``gated_delta`` has the lowest loss
at equal tokens, and chunked at equal time (benchmarks/results/studies/context/figures.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comparison.figures import Figure, differences_against, loss_against
from comparison.published import published
from comparison.runs import Run
from comparison.study import Variation, grid

CONTEXT = "model.context"
MODES = ("softmax", "chunked", "gated_delta")
PUBLISHED = published("loss-against-context-124M")
C4 = {"data.source": "allenai/c4:en", "data.dir": "data/c4"}
BOUNDS = ("tokens", "time")


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        contexts: dict[int, dict[str, Any]] = {context: {CONTEXT: context, "train.batch_size": 8192 // context}
                                               for context in (512, 2048, 8192)}
        fields = {"train.eval_every": 15, "train.eval_batches": 4, "train.sample_every": 0}
        return _runs("configs/quickstart.py", contexts, fields, steps=30, minutes=0.2)
    contexts = {context: {CONTEXT: context, "train.rows_per_device": rows}
                for context, rows in ((1024, 8), (8192, 1), (32768, 1))}
    return _runs("configs/gpt2_124m.py", contexts, C4, steps=10_000, minutes=24 * 60.0)


def _runs(recipe: str, contexts: dict[int, dict[str, Any]], fields: dict[str, Any], *, steps: int,
          minutes: float) -> list[Variation]:
    bounds = {"tokens": {"train.steps": steps, "train.minutes": None},
              "time": {"train.steps": None, "train.minutes": minutes}}
    return [replace(run, name=f"{bound}-{run.name}") for bound, fields_of_bound in bounds.items()
            for run in grid(recipe, MODES, {"context": contexts}, fields | fields_of_bound)]


def bound_of(run: Run) -> str:
    """``tokens`` or ``time``: in what the run equals the others."""
    return "time" if run.config["train"]["steps"] is None else "tokens"


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    shown = []
    for bound in BOUNDS:
        bound_runs = [run for run in runs if bound_of(run) == bound]
        if not bound_runs:
            continue
        loss = loss_against(bound_runs, CONTEXT, title=f"Loss against context at equal {bound}")
        gap = differences_against(bound_runs, CONTEXT, "softmax",
                                  title=f"Loss minus that of softmax at equal {bound}")
        if bound == "time":
            loss, gap = PUBLISHED.beside(loss), PUBLISHED.minus("softmax").beside(gap)
            if any(run.config["data"]["tokenizer"] != "gpt2" for run in bound_runs):
                loss, gap = (replace(figure, remarks=(*figure.remarks, "The published losses are per GPT-2 token, of "
                                                      "about four bytes; ours are per byte."))
                             for figure in (loss, gap))
        shown += [loss.named(bound), gap.named(bound)]
    return shown
