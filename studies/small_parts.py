"""What is each layer option worth, to softmax and to gated linear attention?

    cat wiki.valid.raw wiki.test.raw > wikitext.txt
    python -m data.prepare wikitext.txt --out data/wikitext --val-share 0.5
    python sweep.py studies/small_parts.py --out runs/small-parts --quick
    python sweep.py studies/small_parts.py --out runs/small-parts

The quickstart's model on WikiText, for 200 steps of four rows of 1,024 tokens, at the learning rate that
studies/language.py found best for both, with three seeds: softmax and gated with all of their parts, and without one at
a time. Parts are the layer options, softmax's forget gate, and gated's decay. The decay is removed twice: ``decay of
the input`` leaves one that is the same for all tokens, and ``decay`` leaves none, which is chunked with the other
parts.

The quick form has the quickstart's corpus, 100 steps and one seed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comparison.figures import Figure, differences, loss_against
from comparison.runs import Run, group_by
from comparison.study import Variation, mode_fields

RECIPE = "configs/quickstart.py"
SOFTMAX = {"forget_gate": True, "short_conv": 4, "qk_norm": "rms", "output_norm": "rms", "output_gate": "sigmoid"}
GATED = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "l2", "output_norm": "rms", "output_gate": "sigmoid"}
NONE = {"forget_gate": False, "short_conv": 0, "qk_activation": "none", "qk_norm": "none", "output_norm": "none",
        "output_gate": "none"}
"""The value of an option whose part is removed."""

ARMS: dict[tuple[str, str], dict[str, Any]] = {
    **{("softmax", part): SOFTMAX | ({part: NONE[part]} if part in NONE else {}) for part in ("all parts", *SOFTMAX)},
    **{("gated", part): GATED | ({part: NONE[part]} if part in NONE else {}) for part in ("all parts", *GATED)},
    ("gated", "decay of the input"): GATED | {"decay": "fixed"},
    ("chunked", "decay"): GATED | {"feature_map": "identity"},
}
"""Options of a run by its attention and the removed part."""


def get_runs(quick: bool) -> list[Variation]:
    size = {"model.context": 1024, "train.batch_size": 4} | (
        {"train.steps": 100} if quick else {"train.steps": 200, "data.dir": "data/wikitext"})
    return [_run(mode, part, size, seed) for seed in ((0,) if quick else (0, 1, 2)) for mode, part in ARMS]


def _run(mode: str, part: str, size: dict[str, Any], seed: int) -> Variation:
    name = f"{mode}-{part}" if part == "all parts" else f"{mode}-without-{part}"
    return Variation(f"{name}-seed-{seed}".replace(" ", "-"), RECIPE, mode, size | {
        "optimizer.learning_rate": 4e-3, "train.minutes": None, "train.sample_every": 0, "train.eval_every": 50,
        "train.seed": seed, **mode_fields(mode, **ARMS[mode, part])})


def part_of(run: Run) -> str:
    """The part that a run lacks."""
    mode = run.config["model"]["attention"][0]
    options = run.config["model"]["modes"][mode]
    return next(part for (of, part), given in ARMS.items() if of == mode
                and all(options[option] == value for option, value in given.items())
                and (mode != "gated" or options["decay"] == given.get("decay", "input")))


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    shown = [loss_against(runs, "optimizer.learning_rate", of=part_of, called="without", mark_best=False,
                          title="Loss without each part")]
    for mode, mode_runs in sorted(group_by(runs, _family).items(), reverse=True):
        figure = differences(mode_runs, "all parts", arm=part_of, title=f"What each part of {mode} is worth")
        shown.append(replace(figure, name=f"{mode}-difference"))
    return shown


def _family(run: Run) -> str:
    """``gated`` without a decay is ``chunked``."""
    mode = run.config["model"]["attention"][0]
    return "gated" if mode == "chunked" else mode
