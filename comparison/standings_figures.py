"""The figures and tables of the standings, from runs of the protocol alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from comparison.abilities import cell
from comparison.figures import Axis, Figure, Line, Point, loss_against
from comparison.runs import Run, group_by
from comparison.scaling import (
    LEAST_SIZES,
    REACH,
    Fit,
    Trained,
    compute_equivalent_gain,
    fit,
    trend,
)
from comparison.standings import CONTEXT, LENGTHS, LONGER, REFERENCE, RUNGS, Place, arm_of, best_rate, losses_of
from comparison.standings_rows import state_bytes
from comparison.statistics import bonferroni, mean_interval
from comparison.wording import interval_text, listed, number_text, significance

Speeds = Mapping[tuple[str, str, str, int], float]
"""Tokens a second by arm, rung, ``context`` (of training) or ``position`` (of sampling), and its value."""
RunsByArm = Mapping[tuple[str, str], Sequence[Run]]
"""Runs at the best rate, one for each seed, by arm and rung."""
DIFFERENCE_HEADINGS = ("minus softmax", "95 % interval", "significance")
"""Headings of the cells of :func:`_difference`."""


def place_of(run: Run) -> Place:
    place = Place.of(run.name.partition(" at ")[0])
    assert place is not None, run.name
    return place


def runs_at_best_rate(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """The finished runs at the best rate of their arm and rung, where that has been found."""
    losses = losses_of(runs)
    chosen = [run for run in runs if (place := Place.of(run.name)) is not None and place in losses and not place.check
              and place.rate == best_rate(place.rung, place.arm, losses)]
    return group_by(chosen, lambda run: (place_of(run).arm, place_of(run).rung))


def figures(runs: Sequence[Run], speeds: Speeds | None = None, abilities: Figure | None = None) -> list[Figure]:
    """Loss against compute, how the differences change with size, fits, a table for each rung, costs and abilities.

    Args:
        runs: of the protocol.
        speeds: tokens a second, for the gains in time.
        abilities: the grid of studies/abilities.py, for the attentions that it has too.
    """
    runs = [run.to_the_end() for run in runs]
    by_arm, speeds = runs_at_best_rate(runs), speeds or {}
    shown = [run for group in by_arm.values() for run in group]
    if not shown:  # the quick form, or an unfinished search of rates
        shown = [run for run in runs if Place.of(run.name) is not None and run.val]
    tables = [*(_rung(rung, by_arm, speeds) for rung in RUNGS), _stretches(by_arm), _costs(speeds), *_classes(by_arm),
              *_abilities(abilities, [arm for arm, _ in by_arm]), _machines(by_arm)]
    return [_against_compute(shown), *_trends(by_arm), *_fits(by_arm), *_fits(by_arm, speeds),
            *(table for table in tables if table.rows)]


def _against_compute(runs: Sequence[Run]) -> Figure:
    """Lines join the lengths of a size, not one size to the next."""
    at = [each for run in runs for each in run.at_lengths() or [run]]
    figure = loss_against(at, "train.steps", of=lambda run: float(run.val.points["flops"][-1]), called="FLOPs",
                          arm=lambda run: place_of(run).arm, log=True,
                          title="Loss against compute: 5, 10 and 20 tokens a parameter at each size")
    rungs = {run.name: place_of(run).rung for run in at}
    return replace(figure, lines=tuple(
        replace(line, points=_joined_within([rungs[point.runs[0]] for point in line.points], line.points))
        for line in figure.lines))


def _joined_within(sizes: Sequence[str], points: Sequence[Point]) -> tuple[Point, ...]:
    """Points, each joined to the one before if both are of the same size."""
    return tuple(replace(point, joined=i == 0 or sizes[i] == sizes[i - 1]) for i, point in enumerate(points))


def minus(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, Any]:
    """a − b for each seed of both."""
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def _difference(by_seed: Mapping[Any, float], compared: int) -> tuple[str, str, str]:
    """The mean of differences by seed, its interval, and its significance with a total confidence of 95 % in all
    comparisons of a column (Bonferroni)."""
    differences = [*by_seed.values()]
    if not differences or not np.isfinite(differences).all():
        return "–", "–", ""
    mean, interval = float(np.mean(differences)), mean_interval(differences)
    shown = significance(mean, mean_interval(differences, bonferroni(compared)))
    return number_text(mean), "–" if interval is None else interval_text(interval), shown


def _finals(runs: Sequence[Run], column: str = "loss") -> dict[Any, float]:
    """The last value of a column of the val lines by seed; NaN where it is not finite or missing."""
    return {run.seed: math.nan if (value := run.final(column)) is None else value for run in runs}


def training_speed(speeds: Speeds, arm: str, rung: str) -> float:
    """Tokens a second at ``CONTEXT``; NaN if unknown."""
    return speeds.get((arm, rung, "context", CONTEXT), math.nan)


def _seconds(arm: str, rung: str, by_arm: RunsByArm, speeds: Speeds) -> float:
    """Seconds of training without other load; NaN if the speed is unknown."""
    return _end(by_arm[arm, rung], "tokens") / training_speed(speeds, arm, rung)


def gain_in_flops(arm: str, rung: str, by_arm: RunsByArm) -> str:
    """How many times the FLOPs softmax with the same parts needs for the same loss, as text; see :func:`_gain`."""
    return _gain(arm, rung, by_arm, lambda *at: _end(by_arm[at], "flops"))


def _gain(arm: str, rung: str, by_arm: RunsByArm, cost: Callable[[str, str], float]) -> str:
    """How many times its compute softmax with the same parts needs for the loss of an arm, read between those sizes of
    softmax that have at least as many seeds. *Beyond the range* if the loss is above or below all of them, with a bound
    that says which of the two is better; a bound that does not is left out.

    With its interval, the number is the geometric mean of the gains of the seeds, each against softmax with the same
    seed. If one of these is outside of the sizes, or there is one seed, it is the gain of the mean losses.

    Args:
        arm: of ``by_arm``.
        rung: its size.
        by_arm: the runs.
        cost: the FLOPs or the seconds of a run by arm and rung; NaN if unknown.
    """
    baseline, mine, runs = arm_of(arm).baseline, cost(arm, rung), by_arm[arm, rung]
    base = {cost(name, size): base_runs for (name, size), base_runs in by_arm.items()
            if name == baseline and RUNGS[size].seeds >= RUNGS[rung].seeds}
    if baseline == arm or not base or not np.isfinite([mine, *base]).all():
        return "–"
    loss = _loss(runs)
    if not np.isfinite(loss):
        return "not finite"
    losses = {at: base_loss for at, base_runs in base.items() if np.isfinite(base_loss := _loss(base_runs))}
    gain = compute_equivalent_gain(mine, loss, losses)
    if gain is None:
        bound = ""
        if losses and loss < min(losses.values()) and max(losses) > mine:
            bound = f" (> {max(losses) / mine:.2f})"
        elif losses and loss > max(losses.values()) and min(losses) < mine:
            bound = f" (< {min(losses) / mine:.2f})"
        return f"beyond the range{bound}"
    seed_gains = [compute_equivalent_gain(mine, _loss([run]), {
        at: _loss(same) for at, base_runs in base.items()
        if (same := [each for each in base_runs if each.seed == run.seed])}) for run in runs]
    logs = [math.log(each) for each in seed_gains if each is not None]
    interval = mean_interval(logs) if len(logs) == len(runs) else None
    if interval is None:
        return f"{gain:.2f}"
    return f"{math.exp(np.mean(logs)):.2f} ({interval_text(np.exp(interval), 2)})"


def _at_equal_time(arm: str, rung: str, by_arm: RunsByArm, speeds: Speeds) -> dict[Any, float]:
    """The loss of each seed of an arm when softmax with the same parts ends; see :func:`_interpolated`."""
    baseline = arm_of(arm).baseline
    if baseline == arm or (baseline, rung) not in by_arm:
        return {}
    part = _seconds(baseline, rung, by_arm, speeds) / _seconds(arm, rung, by_arm, speeds)
    return _interpolated(by_arm[arm, rung], "tokens", part * _end(by_arm[arm, rung], "tokens"))


def _interpolated(runs: Sequence[Run], column: str, where: float) -> dict[Any, float]:
    """The loss by seed where a column, such as ``flops``, has a value: between the lengths linear in the logarithm.
    Empty outside of the lengths."""
    lengths = {run.seed: run.lengths for run in runs}
    if not all(len(at[column]) and at[column][0] <= where <= at[column][-1] for at in lengths.values()):
        return {}
    return {seed: float(np.interp(np.log(where), np.log(at[column]), at["loss"])) for seed, at in lengths.items()}


def _end(runs: Sequence[Run], column: str) -> float:
    """What a column such as ``tokens``, which is the same for all seeds, has at the end."""
    return float(runs[0].val.points[column][-1])


def _loss(runs: Sequence[Run]) -> float:
    return float(np.mean([*_finals(runs).values()]))


@dataclass(frozen=True)
class ArmAtRung:
    """The runs of an arm at a rung, and what they are compared with."""

    arm: str
    rung: str
    runs: Sequence[Run]
    baseline_runs: Sequence[Run]
    """Those of softmax with the same parts; empty for that arm itself, and where it has not been run."""
    compute: float
    """The equal compute of the rung, in FLOPs; NaN without ``REFERENCE``."""

    @property
    def equal(self) -> dict[Any, float]:
        """The losses at the equal compute, by seed; empty if it lies outside of the lengths."""
        return _interpolated(self.runs, "flops", self.compute)

    @property
    def equal_differences(self) -> dict[Any, float]:
        """The same, minus those of softmax with the same parts."""
        return minus(self.equal, _interpolated(self.baseline_runs, "flops", self.compute))

    @property
    def final(self) -> dict[Any, float]:
        """The val losses at the end, by seed."""
        return _finals(self.runs)

    @property
    def final_differences(self) -> dict[Any, float]:
        """The same, minus those of softmax with the same parts."""
        return minus(self.final, _finals(self.baseline_runs))

    @property
    def stretch_differences(self) -> dict[Any, np.ndarray]:
        """The difference in each stretch of val at the end of training, by seed; see :func:`stretches`."""
        mine, base = ({run.seed: losses for run in runs if len(losses := stretches(run))}
                      for runs in (self.runs, self.baseline_runs))
        return minus({seed: each for seed, each in mine.items() if len(each) == len(base.get(seed, ()))}, base)

    @property
    def median_differences(self) -> dict[Any, float]:
        """The median over the stretches of val, which a single unusual document does not decide, by seed."""
        return {seed: float(np.median(each)) for seed, each in self.stretch_differences.items()}


def arms_at(rung: str, by_arm: RunsByArm) -> list[ArmAtRung]:
    """The arms of a rung, sorted by the loss at equal compute."""
    here = {arm: runs for (arm, of_rung), runs in by_arm.items() if of_rung == rung}
    compute = float(here[REFERENCE][0].lengths["flops"][1]) if REFERENCE in here else math.nan

    def order(each: ArmAtRung) -> tuple[float, float, str]:
        equal = [*each.equal.values()]
        means = np.nan_to_num([np.mean(equal) if equal else math.nan, _loss(each.runs)], nan=math.inf)
        return float(means[0]), float(means[1]), each.arm

    others = {arm: baseline for arm in here if (baseline := arm_of(arm).baseline) != arm}
    return sorted((ArmAtRung(arm, rung, runs, here.get(others.get(arm, ""), ()), compute)
                   for arm, runs in here.items()), key=order)


def count_compared(arms: Sequence[ArmAtRung]) -> int:
    """How many arms of a rung are compared with softmax."""
    return sum(bool(each.baseline_runs) for each in arms)


def equal_compute_heading(arms: Sequence[ArmAtRung]) -> str:
    """The heading of the losses at equal compute: ``loss at 5.88e12 FLOPs``."""
    if not arms or math.isnan(arms[0].compute):
        return "loss at equal FLOPs"
    return f"loss at {arms[0].compute:.2e} FLOPs".replace("e+", "e")


def _rung(rung: str, by_arm: RunsByArm, speeds: Speeds) -> Figure:
    """The table of a rung."""
    here = arms_at(rung, by_arm)
    compared = count_compared(here)
    rows = [_rung_row(each, by_arm, speeds, compared, equal_compute_heading(here)) for each in here]
    return Figure(
        f"rung-{rung}", f"Standings at {rung}, sorted by loss at equal compute", Axis(""), "", (),
        tuple(heading for heading, _ in rows[0]) if rows else (),
        tuple(tuple(cell for _, cell in row) for row in rows),
        (f"Higher and lower: with a confidence of 95 % in all {compared} comparisons of a column together.",)
        if compared and RUNGS[rung].seeds > 1 else ())


def _rung_row(each: ArmAtRung, by_arm: RunsByArm, speeds: Speeds, compared: int,
              equal_compute: str) -> list[tuple[str, str]]:
    """The headings and cells of an arm."""
    arm, rung, runs = each.arm, each.rung, each.runs
    baseline, state = arm_of(arm).baseline, state_bytes(runs[0].config)
    return [
        ("attention", arm),
        ("softmax with the same parts", baseline if baseline != arm else "–"),
        ("parameters", f"{runs[0].environment.get('parameters', 0):,}"),
        (equal_compute, _mean(each.equal)),
        *zip(DIFFERENCE_HEADINGS, _difference(each.equal_differences, compared), strict=True),
        ("val loss", _mean(each.final)),
        *zip(DIFFERENCE_HEADINGS, _difference(each.final_differences, compared), strict=True),
        *zip(("median stretch, minus softmax", *DIFFERENCE_HEADINGS[1:]),
             _difference(each.median_differences, compared), strict=True),
        ("bits per byte", _number(float(np.mean([*_finals(runs, "bits_per_byte").values()])))),
        ("gain in FLOPs", gain_in_flops(arm, rung, by_arm)),
        ("gain in seconds", _gain(arm, rung, by_arm, partial(_seconds, by_arm=by_arm, speeds=speeds))),
        ("loss at softmax's time", _mean(_at_equal_time(arm, rung, by_arm, speeds))),
        *((f"at {context:,} tokens", "–" if (loss := _at_context(runs, context)) is None else number_text(loss))
          for context in (CONTEXT, *LONGER)),
        (f"state at {CONTEXT:,}, KiB", "–" if state is None else f"{state / 1024:,.0f}"),
        ("learning rate", f"{place_of(runs[0]).rate:g}"),
        ("seeds", str(len(runs)))]


def _stretches(by_arm: RunsByArm) -> Figure:
    """The difference to softmax with the same parts in each stretch of val."""
    rows = [(rung, each.arm, *(number_text(value) for value in np.mean([*differences.values()], axis=0)))
            for rung in RUNGS for each in arms_at(rung, by_arm) if (differences := each.stretch_differences)]
    number = len(rows[0]) - 2 if rows else 0
    return Figure("stretches", "Loss minus that of softmax with the same parts, by stretch of val", Axis(""), "", (),
                  ("rung", "attention", *(f"stretch {n + 1}" for n in range(number))), tuple(rows),
                  (f"Means over the seeds at {CONTEXT:,} tokens of context. A stretch has {max(LONGER):,} tokens in a "
                   "row. Their mean is the difference of the losses at this context in the tables of the rungs.",))


def _mean(by_seed: Mapping[Any, float]) -> str:
    """The mean of seeds with its interval."""
    losses = [*by_seed.values()]
    if not losses:
        return "–"
    interval = mean_interval(losses) if np.isfinite(losses).all() else None
    return _number(float(np.mean(losses))) + ("" if interval is None else f" ({interval_text(interval)})")


def _number(value: float) -> str:
    return number_text(value) if np.isfinite(value) else "not finite"


def _costs(speeds: Speeds) -> Figure:
    """Tokens a second of training and milliseconds a sampled token, by arm and rung."""
    columns = sorted({(kind, value) for _, _, kind, value in speeds})
    rows = []
    for arm, rung in dict.fromkeys((arm, rung) for arm, rung, *_ in speeds):
        cells = [speeds.get((arm, rung, kind, value)) for kind, value in columns]
        rows.append((rung, arm, *("–" if cell is None else f"{cell:,.0f}" if kind == "context" else f"{1e3 / cell:.3f}"
                                  for (kind, _), cell in zip(columns, cells, strict=True))))
    headings = [f"training at {value:,}, tokens/s" if kind == "context" else f"a token after {value:,}, ms"
                for kind, value in columns]
    return Figure("costs", "Speed without other load", Axis(""), "", (), ("rung", "attention", *headings), tuple(rows))


@dataclass(frozen=True)
class ClassAtRung:
    """The losses of an arm at a rung in a class of the tokens."""

    arm: str
    rung: str
    name: str
    """Name of the class."""
    share: float
    """Fraction of all tokens that are in the class."""
    losses: Mapping[Any, float]
    """By seed."""
    differences: Mapping[Any, float]
    """The same, minus those of softmax with the same parts, for each seed of both."""

    def row(self, compared: int) -> tuple[str, ...]:
        """Its row; ``compared``: the number of comparisons that the confidence of 95 % covers together."""
        return (self.arm, self.rung, self.name, f"{self.share:.2%}", _mean(self.losses),
                ", ".join(_number(loss) for _, loss in sorted(self.losses.items())),
                *_difference(self.differences, compared))


def class_losses(by_arm: RunsByArm) -> dict[str, list[ClassAtRung]]:
    """The losses by class of the tokens of all arms at all rungs, by the partition that has the class."""
    by_run = {key: {run.seed: classes for run in runs if (classes := _loss_by_class(run))}
              for key, runs in by_arm.items()}
    losses: dict[str, list[ClassAtRung]] = {}
    for rung in RUNGS:
        for (arm, of_rung), mine in by_run.items():
            if of_rung != rung or not mine:
                continue
            baseline = arm_of(arm).baseline
            base = by_run.get((baseline, rung), {}) if baseline != arm else {}
            for partition, classes in next(iter(mine.values())).items():
                for name, (share, _) in classes.items():
                    own, of_base = ({seed: at[partition][name][1] for seed, at in runs.items()
                                     if name in at.get(partition, {})} for runs in (mine, base))
                    losses.setdefault(partition, []).append(ClassAtRung(
                        arm, rung, name, share, own, minus(own, of_base)))
    return losses


def _classes(by_arm: RunsByArm) -> list[Figure]:
    """For each partition of the tokens the losses by class. The picture has the differences to softmax with the same
    parts at the largest rung with several seeds of both, or else the largest."""
    return [_classes_of(partition, losses) for partition, losses in class_losses(by_arm).items()]


def _classes_of(partition: str, losses: Sequence[ClassAtRung]) -> Figure:
    classes, rungs = [*dict.fromkeys(each.name for each in losses)], [*RUNGS]
    rows = sorted(losses, key=lambda each: (rungs.index(each.rung), classes.index(each.name)))
    drawn: dict[str, list[ClassAtRung]] = {}
    for of_rung in group_by([each for each in losses if each.differences], lambda each: (each.arm, each.rung)).values():
        arm, several = of_rung[0].arm, len(of_rung[0].differences) > 1
        if several or arm not in drawn or len(drawn[arm][0].differences) < 2:  # rungs come in ascending order
            drawn[arm] = of_rung
    lines = tuple(Line(f"{arm}, {of_rung[0].rung}", arm_of(arm).attention, tuple(
        _point(each.name, arm, each.differences) for each in of_rung))
        for arm, of_rung in drawn.items())
    compared = {rung: sum(len(each.differences) > 1 for each in of_rung)
                for rung, of_rung in group_by(losses, lambda each: each.rung).items()}
    return Figure(
        f"classes-{partition.replace(' ', '-')}", f"Loss by {partition}, minus that of softmax with the same parts",
        Axis("class", "category"), "difference in loss (nats per token)", lines,
        ("attention", "rung", "class", "share", "loss", "of each seed", *DIFFERENCE_HEADINGS),
        tuple(each.row(max(1, compared[each.rung])) for each in rows),
        (f"Losses of the same tokens as those at {CONTEXT:,} tokens in the tables of the rungs, not as the val loss.",
         "Higher and lower: with a confidence of 95 % in all comparisons of a rung in this table together."), zero=True)


def _loss_by_class(run: Run) -> dict[str, dict[str, tuple[float, float]]]:
    """Share and loss of each class at ``CONTEXT``, by partition; empty without eval.py --by-token-class."""
    return {one["partition"]: {each["class"]: (each["share"], each["loss"]) for each in one["classes"]}
            for entry in run.evaluations if entry["context"] == CONTEXT for one in entry.get("token_classes", ())}


def _abilities(grid: Figure | None, arms: Sequence[str]) -> list[Figure]:
    """The lines of the grid that are of the attentions of these arms, under their names there."""
    if grid is None:
        return []
    names = {arm_of(arm).abilities or arm for arm in arms}
    lines = tuple(line for line in grid.lines if line.label in names)
    rows = [(line.label, *(cell(at.get(column)) for column in grid.values))
            for line in lines for at in [{point.x: point for point in line.points}]]
    return [replace(grid, title="Abilities of other models, of two to four layers, trained on each task", lines=lines,
                    headings=("attention", *map(str, grid.values)), rows=tuple(rows),
                    remarks=("Each attention has a convolution here.", *grid.remarks))]


def _at_context(runs: Sequence[Run], context: int) -> float | None:
    """The mean loss at another context, of eval.py; None where a seed lacks it, or its loss is not finite."""
    loss_R = np.array([next((entry["loss"] for entry in run.evaluations if entry["context"] == context), None)
                       for run in runs], float)
    return float(loss_R.mean()) if np.isfinite(loss_R).all() else None


def gaps(arm: str, by_arm: RunsByArm) -> dict[float, dict[Any, float]]:
    """The loss of an arm minus that of softmax with the same parts, by parameters of the rung and by seed."""
    by_size = {float(rung.parameters): minus(_finals(by_arm[arm, name]), _finals(by_arm[arm_of(arm).baseline, name]))
               for name, rung in RUNGS.items() if {(arm, name), (arm_of(arm).baseline, name)} <= by_arm.keys()}
    return {size: gap for size, gap in by_size.items() if gap and np.isfinite([*gap.values()]).all()}


def _point(x: float | str, arm: str, by_seed: Mapping[Any, float]) -> Point:
    """The mean over the seeds with its interval."""
    values = [*by_seed.values()]
    return Point(x, float(np.mean(values)), mean_interval(values), tuple(f"{arm} seed {seed}" for seed in by_seed))


def _trends(by_arm: RunsByArm) -> list[Figure]:
    lines, changes = [], {}
    for arm in dict.fromkeys(arm for arm, _ in by_arm):
        if arm_of(arm).baseline == arm or not (by_size := gaps(arm, by_arm)):
            continue
        lines.append(Line(arm, arm_of(arm).attention, tuple(_point(size, arm, gap) for size, gap in by_size.items())))
        change = trend(by_size)
        if change is not None:
            changes[arm] = change
    if not changes:
        return []
    compared = sum(change.interval is not None for change in changes.values())
    rungs = {float(rung.parameters): name for name, rung in RUNGS.items()}
    rows = [(arm, arm_of(arm).baseline, ", ".join(rungs[size] for size in change.sizes), number_text(change.slope),
             "–" if change.interval is None else interval_text(change.interval), change.verdict(max(1, compared)))
            for arm, change in changes.items()]
    return [Figure("gap-against-size", "Loss minus that of softmax with the same parts, by size",
                   Axis("parameters outside of the embedding", "log"), "difference in val loss (nats per token)",
                   tuple(lines), ("attention", "softmax with the same parts", "over",
                                  "change for ten times the parameters", "95 % interval", "trend"), tuple(rows),
                   ("A trend is over the sizes that all its seeds have.", *(
                       [f"Rises and falls: with a confidence of 95 % in all {compared} trends together."]
                       if compared else [])), zero=True)]


def trained(runs: Sequence[Run], speeds: Speeds | None = None) -> list[Trained]:
    """Runs as points of a fit: every length against its FLOPs, or with ``speeds`` against the seconds of training."""
    points = []
    for run in runs:
        lengths, place = run.lengths, place_of(run)
        compute = lengths["flops"] if speeds is None else lengths["tokens"] / training_speed(
            speeds, place.arm, place.rung)
        points.append(Trained(place.rung, compute, lengths["loss"], stretches(run)))
    return points


def stretches(run: Run) -> np.ndarray:
    """The mean loss at ``CONTEXT`` in each stretch of val that eval.py reads, as long as the longest context: their
    windows are not independent. Empty without these losses."""
    windows_W = next((each.loss_N / each.tokens_N for (_, context, _), each in run.window_losses.items()
                      if context == CONTEXT), np.empty(0))
    return windows_W.reshape(-1, max(LONGER) // CONTEXT).mean(axis=1)


def fits(by_arm: RunsByArm, speeds: Speeds | None = None) -> dict[str, Fit]:
    """A fit for each arm with three sizes, whose runs have a finite loss at every length and are all evaluated; with
    ``speeds``, of the sizes whose speed is known."""
    usable = [run for (arm, rung), runs in by_arm.items() for run in runs
              if speeds is None or not math.isnan(training_speed(speeds, arm, rung))]
    return {arm: fit(trained(runs, speeds)) for arm, runs in group_by(usable, lambda run: place_of(run).arm).items()
            if len({place_of(run).rung for run in runs}) >= LEAST_SIZES
            and all(len(run.lengths["loss"]) == len(LENGTHS) and np.isfinite(run.lengths["loss"]).all() for run in runs)
            and len(number := {len(stretches(run)) for run in runs}) == 1 and 0 not in number}


def _residuals(law: Fit) -> str:
    """The mean residual at each length, by size: ``XS 0.01, -0.02, 0.01; S …``."""
    sizes_P = np.array(law.sizes_P)
    return "; ".join(f"{size} " + ", ".join(map(number_text, law.residuals_P[sizes_P == size].reshape(
        -1, len(LENGTHS)).mean(axis=0))) for size in dict.fromkeys(law.sizes_P))


def _fits(by_arm: RunsByArm, speeds: Speeds | None = None) -> list[Figure]:
    """The measured losses of each fit, joined within a size, and its law with its band, within and beyond them."""
    name, compute = ("fits", "FLOPs") if speeds is None else ("fits-time", "seconds of training without other load")
    lines, rows, bounded, laws = [], [], [], fits(by_arm, speeds)
    for arm, each in laws.items():
        attention, low, high = arm_of(arm).attention, *each.measured
        places = group_by(zip(each.compute_P, each.sizes_P, each.loss_P, strict=True),
                          lambda point: (float(point[0]), point[1]))
        means = sorted((at, size, [float(loss) for *_, loss in of]) for (at, size), of in places.items())
        points = _joined_within([size for _, size, _ in means], [
            Point(at, float(np.mean(losses)), mean_interval(losses),
                  tuple(f"{arm} {number}" for number in range(len(losses)))) for at, _, losses in means])
        law = [Point(float(at), float(each.law(at)), each.band(at), ())
               for at in [*np.geomspace(low, high, 9), *np.geomspace(high, high * REACH, 5)[1:]]]
        lines += [Line(arm, attention, points), Line(f"{arm}, fit", attention, tuple(law), fitted=high)]
        rows.append((arm, number_text(each.law.floor), f"{each.law.exponent:.3f}",
                     _residuals(each), f"{low:.2g} to {high:.2g}",
                     f"{number_text(law[-1].y)} ({interval_text(law[-1].interval or (0, 0))})"))
        bounded += [f"the {what} of {arm}" for what in each.law.bounded]
    remarks = [f"At a limit of the search, not determined by the losses: {listed(bounded)}."] if bounded else []
    alone = [rung for rung in RUNGS if all(len(runs) == 1 for (arm, of_rung), runs in by_arm.items()
                                           if arm in laws and of_rung == rung)]
    if alone:
        remarks.append(f"{listed(alone)} {'has' if len(alone) == 1 else 'have'} one seed, whose noise is not in the "
                       "bands.")
    if without := [arm for arm in dict.fromkeys(arm for arm, _ in by_arm) if arm not in laws]:
        wanted = ["ended with a finite loss", "were evaluated", *([] if speeds is None else ["have a known speed"])]
        remarks.append(f"No fit without {LEAST_SIZES} sizes that {listed(wanted)}: {listed(without)}.")
    return [Figure(name, f"Power laws of loss against {compute}", Axis(compute, "log"), "val loss (nats per token)",
                   tuple(lines), ("attention", "floor", "exponent", "mean residuals by size and length",
                                  f"{compute} measured",
                                  f"extrapolated to {REACH} times"), tuple(rows), tuple(remarks))] if rows else []


def _machines(by_arm: RunsByArm) -> Figure:
    """Where each row was trained."""
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in by_arm):
        runs = [run for (name, _), group in by_arm.items() if name == arm for run in group]
        machines = {" ".join(filter(None, ("/".join(run.environment.get("devices") or ()), run.environment.get(
            "processor")))) for run in runs}
        rows.append((arm, *(", ".join(sorted(filter(None, each))) or "–" for each in (
            machines, {(run.environment.get("versions") or {}).get("jax") for run in runs},
            {(run.environment.get("commit") or "")[:8] for run in runs}))))
    return Figure("machines", "Where the rows were trained", Axis(""), "", (), ("attention", "device", "jax", "commit"),
                  tuple(rows), ("The commands are in the files of the rows.",))
