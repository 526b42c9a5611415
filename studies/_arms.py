"""What studies share whose runs are named CORPUS-ARM-RATE and, with several seeds, -seed-SEED."""

from collections.abc import Sequence

from comparison.figures import Figure, differences, loss_against
from comparison.runs import Run

RATE = "optimizer.learning_rate"


def arm_of(run: Run) -> str:
    """The arm in the name of a run."""
    return run.name.partition("-")[2].partition("-0.")[0]


def figures_of_corpus(runs: Sequence[Run], corpus: str, baselines: Sequence[str],
                      besides: Sequence[str] = ()) -> list[Figure]:
    """The loss of each arm against the learning rate, and its difference from each baseline; none without runs."""
    if not runs:
        return []
    loss = loss_against(runs, RATE, arm=arm_of, title=f"Loss on {corpus} against learning rate")
    gaps = [differences(runs, baseline, best_over=RATE, arm=arm_of, besides=besides,
                        title=f"Loss on {corpus} minus that of {baseline}") for baseline in baselines]
    return [figure.named(corpus) for figure in (loss, *gaps)]
