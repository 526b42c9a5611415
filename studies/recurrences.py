"""What are a decay per channel, wide writes, random taps, Muon and the initial scale worth, one at a time?

    python -m data.prepare ../books/war_and_peace.jsonl.gz --val-share 0.05 --out data/corpus/books
    python sweep.py studies/recurrences.py --out runs/recurrences --quick
    python sweep.py studies/recurrences.py --out runs/recurrences

The quickstart's model of width 128, steps of 4,096 tokens, the schedule ``wsd``.

- ``rates``: each arm at three learning rates, a factor of two apart around its best, for 200 steps on code at 1,024
  tokens, with one seed.
- ``code``: the contenders at their best rates, three seeds, for 75 and 150 steps: annealed points of one run.
- ``prose`` and ``long``: the same on a book, and on code at 4,096 tokens.
- ``speed``: 40 steps in three rounds over the arms, whose median has the tokens a second for the loss at equal time.
  These runs say something only without other load: run them by ``--index``.

Pairs of arms differ in one thing: ``gated``, ``gated-channel`` and ``gated-kda`` in the decay; ``softmax-equal`` has
the parameters of the recurrences by wider heads; the arms with ``-range`` have a write strength up to 2, with
``-heads`` the same initial decay in all channels of a head, with ``-normal`` random initial taps, with ``-muon`` Muon,
whose AdamW has the rate 4e-3, and with ``-scaled`` initial kernels of deviation 1/√width. ``kda-silu`` differs from
``gated_delta`` in the decay alone, but for products of two matrices in decay and output gate.

The quick form has ``rates``, with one rate and 100 steps.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from comparison.figures import Axis, Figure, differences_against, loss_against
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from studies._arms import RATE, arm_of, figures_of_corpus

RECIPE = "configs/quickstart.py"
EVERYTHING = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "rms", "output_norm": "rms", "output_gate": "silu",
              "forget_gate": True}
"""The layer options of ``gated_delta``, and a forget gate."""
MUON = {"optimizer.name": "muon", "optimizer.adam_learning_rate": 4e-3}
SCALED = {"model.initial_scale": 0.0884}

ARMS: dict[str, tuple[float, str, dict[str, Any], dict[str, Any]]] = {
    "softmax": (2e-3, "softmax", {}, {}),
    "softmax-equal": (2e-3, "softmax", {}, {"model.head_width": 42}),
    "softmax-all": (4e-3, "softmax", EVERYTHING, {}),
    "softmax-all-scaled": (4e-3, "softmax", EVERYTHING, SCALED),
    "softmax-muon": (8e-3, "softmax", EVERYTHING, MUON),
    "softmax-muon-scaled": (8e-3, "softmax", EVERYTHING, MUON | SCALED),
    "gated": (2e-3, "gated", {}, {}),
    "gated-scaled": (2e-3, "gated", {}, SCALED),
    "gated-channel": (4e-3, "gated", {"decay": "channel"}, {}),
    "gated-channel-scaled": (4e-3, "gated", {"decay": "channel"}, SCALED),
    "gated-kda": (2e-3, "gated", {"decay": "kda"}, {}),
    "gated-kda-heads": (2e-3, "gated", {"decay": "kda", "decay_init": "head"}, {}),
    "gated_delta": (4e-3, "gated_delta", {}, {}),
    "gated_delta-range": (4e-3, "gated_delta", {"write_range": 2}, {}),
    "gated_delta-normal": (2e-3, "gated_delta", {"conv_init": "normal"}, {}),
    "gated_delta-scaled": (2e-3, "gated_delta", {}, SCALED),
    "kda": (2e-3, "kda", {}, {}),
    "kda-silu": (4e-3, "kda", {"output_gate": "silu", "rank": 128}, {}),
    "kda-muon": (8e-3, "kda", {}, MUON),
    "kda-muon-scaled": (8e-3, "kda", {}, MUON | SCALED),
    "kda-scaled": (4e-3, "kda", {}, SCALED),
    "hybrid-gated_delta-scaled": (4e-3, "gated_delta,gated_delta,gated_delta,softmax", {}, SCALED),
    "hybrid-kda-scaled": (4e-3, "kda,kda,kda,softmax", {}, SCALED),
}
"""Best rate, attention, options of its mode (of a hybrid, the last), and other fields, by the name of the run."""
QUICK_RATE = 4e-3
SEEDS = 3
TOKENS = 4096
"""Tokens in a step."""
CONTENDERS = ("softmax-all-scaled", "gated-scaled", "gated_delta-scaled", "kda-scaled", "hybrid-kda-scaled")
SHORT = {"model.context": 1024, "train.batch_size": 4}
LONG = {"model.context": 4096, "train.batch_size": 1}
CORPORA: dict[str, dict[str, Any]] = {"code": SHORT, "prose": SHORT | {"data.dir": "data/corpus/books"}, "long": LONG}
"""Fields of the runs with several seeds."""
LENGTHS = {"train.steps": 150, "train.anneal_at": "0.5,1"}
TIMED = (*CONTENDERS, "softmax-muon", "kda-muon", "softmax", "softmax-equal", "gated-channel",
         "hybrid-gated_delta-scaled")
BASELINES = ("softmax-all", "gated", "gated_delta", "kda")
BESIDES = ("optimizer", "model.head_width", "model.initial_scale")
"""What arms may differ in besides their attention."""


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        return [_run("rates", arm, QUICK_RATE, 0, SHORT | {"train.steps": 100}) for arm in ARMS]
    return [
        *(_run("rates", arm, factor * rate, 0, SHORT | {"train.steps": 200})
          for arm, (rate, *_) in ARMS.items() for factor in (0.5, 1, 2)),
        *(_run(corpus, arm, ARMS[arm][0], seed, fields | LENGTHS) for seed in range(SEEDS)
          for corpus, fields in CORPORA.items() for arm in CONTENDERS),
        *(_run(speed, arm, ARMS[arm][0], seed, fields | {"train.steps": 40}) for seed in range(SEEDS)
          for speed, fields, arms in (("speed", SHORT, TIMED), ("speed_long", LONG, CONTENDERS)) for arm in arms)]


def _run(corpus: str, arm: str, rate: float, seed: int, fields: dict[str, Any]) -> Variation:
    _, attention, options, others = ARMS[arm]
    return Variation(f"{corpus}-{arm}-{rate:g}-seed-{seed}", RECIPE, attention, fields | {
        "train.minutes": None, "train.sample_every": 0, "train.eval_every": 50, "optimizer.schedule": "wsd",
        RATE: rate, "train.seed": seed, **others, **mode_fields(attention, **options)})


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    def of(corpus: str) -> list[Run]:
        return [run for run in runs if run.name.startswith(f"{corpus}-")]

    found = figures_of_corpus(of("rates"), "code", BASELINES, BESIDES)
    for corpus in CORPORA:
        timed = of("speed_long" if corpus == "long" else "speed")
        found += [figure.named(corpus) for figure in _by_length([at for run in of(corpus) for at in run.at_lengths()],
                                                                corpus, _speeds(timed))]
    costs = [_costs(of(speed), speed) for speed in ("speed", "speed_long")]
    return found + [figure for figure in costs if figure.rows]


def _by_length(runs: Sequence[Run], corpus: str, speeds: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Loss and differences against the number of steps, and loss against the training time without other load."""
    if not runs:
        return []
    steps = "train.steps"
    found = [loss_against(runs, steps, arm=arm_of, title=f"Loss on {corpus} against the length of the run")]
    timed = [run for run in runs if arm_of(run) in speeds]
    if timed:
        found.append(loss_against(
            timed, steps, of=lambda run: run.config["train"]["steps"] * TOKENS / median(speeds[arm_of(run)]),
            called="training seconds", arm=arm_of, title=f"Loss on {corpus} at equal time"))
    return found + [differences_against(runs, steps, baseline, arm=arm_of,
                                        title=f"Loss on {corpus} minus that of {baseline}")
                    for baseline in ("softmax-all-scaled", "gated_delta-scaled")]


def _speeds(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Tokens a second of each run of an arm, ascending."""
    speeds: dict[str, list[float]] = {}
    for run in runs:
        if run.train.median_speed:
            speeds.setdefault(arm_of(run), []).append(run.train.median_speed)
    return {arm: sorted(each) for arm, each in speeds.items()}


def _costs(runs: Sequence[Run], name: str) -> Figure:
    speeds, first = _speeds(runs), {arm_of(run): run for run in reversed(runs)}
    rows = [(arm, f"{first[arm].environment['parameters']:,}", f"{first[arm].state_bytes / 1024:,.0f}",
             f"{median(each):,.0f}", f"{each[0]:,.0f} to {each[-1]:,.0f}") for arm, each in speeds.items()]
    context = "" if not runs else f" at {runs[0].context:,} tokens"
    return Figure(f"costs-{name}", f"Cost of each arm{context}", Axis(""), "", (),
                  ("arm", "parameters", "decode state, KiB", "training, tokens/s", "range"), tuple(rows))
