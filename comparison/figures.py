"""The figures of a study: points with their intervals over seeds, and tables.

A study's ``figures(runs)`` calls :func:`loss_against`, :func:`accuracy_against` and :func:`differences`, or creates a
:class:`Figure` itself. sweep.py and compare.py --study write and show them.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

import numpy as np
import orjson

from comparison.curves import mean_curve
from comparison.paired import PairedDifference, missing_text, paired_difference, steps_text
from comparison.picture import MAX_LEGEND, drawing, legend_below, plain, saved
from comparison.remarks import short_seeds
from comparison.runs import (
    AXES,
    MAX_DISTINCTIONS,
    Run,
    differing,
    distinctions,
    group,
    group_by,
    is_of,
    scored,
    value_text,
)
from comparison.statistics import mean_interval
from comparison.style import DASHES, colour, dashes, hue_of, main_mode
from comparison.verdict import verdict
from comparison.wording import few, interval_text, listed, number_text, significance
from support import json_files
from support.errors import ConfigError
from support.files import replacing
from support.json_files import FileName, Finite

if TYPE_CHECKING:
    import matplotlib.axes

GRID_COLOURS = "cividis"
"""A colour map that the colour-blind read like others."""
MAX_TICKS = 8
"""Most values of an axis that all get a tick."""
TICK_WIDTH = 14
"""Letters of a line of a category's tick: some seven of them fit beside each other."""


@dataclass(frozen=True)
class Axis:
    title: str
    kind: Literal["linear", "log", "category"] = "linear"
    """category: values are texts, in the order of their first point."""


@dataclass(frozen=True)
class Point:
    """The mean over the seeds of a set-up."""

    x: float | str
    """Position on the axis; a text on an axis of categories."""
    y: float
    interval: tuple[float, float] | None
    """Its 95 % interval over the seeds; None for a single seed."""
    runs: tuple[str, ...]
    """Names of the averaged runs, one per seed; empty for a published figure."""
    joined: bool = True
    """Whether a line joins it to the point before."""


@dataclass(frozen=True)
class Line:
    """Points of one colour; on a numeric axis lines join them, but for those that are not ``joined``."""

    label: str
    attention: str
    """The attention mode or pattern, which sets the colour."""
    points: tuple[Point, ...]
    best: int | None = None
    """Index of the point marked as the best; None: no mark."""
    published: str = ""
    """The source of published figures, whose points have no runs; empty for ours."""
    fitted: float | None = None
    """Of a fit, whose intervals are its band: the end of the range that it was made from, beyond which it is an
    extrapolation. None: measured."""

    @property
    def is_faint(self) -> bool:
        """Whether it has no runs, and is drawn with open markers."""
        return bool(self.published) or self.fitted is not None


@dataclass(frozen=True)
class Figure:
    """A plot, a table, and remarks on them."""

    name: str
    """Name of its files, unique in a study: ``loss-against-learning_rate``."""
    title: str
    x: Axis
    y: str
    """Title of the vertical axis, with its unit."""
    lines: tuple[Line, ...]
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    zero: bool = False
    """Whether to draw a line at zero, for differences."""
    grid: bool = False
    """Whether to draw a cell for each line and category, coloured by its value between 0 and 1."""

    @property
    def values(self) -> list[float | str]:
        """Values of the horizontal axis: numbers ascending, or categories in the order of their first point, in a grid
        in that of the table."""
        values = list(dict.fromkeys(point.x for line in self.lines for point in line.points))
        if self.grid and set(values) <= set(self.headings):
            return sorted(values, key=lambda value: self.headings.index(str(value)))
        return values if self.x.kind == "category" else sorted(values, key=float)

    @property
    def has_legend(self) -> bool:
        """Whether a legend is needed: there are several lines, and not each at its own position."""
        if self.grid:
            return False
        places = [point.x for line in self.lines for point in line.points]
        return len(self.lines) > 1 and (self.x.kind != "category" or len(set(places)) < len(places))

    @property
    def colours(self) -> list[str]:
        """A colour for each line: that of its attention or, if that has more lines than dash patterns, one by label."""
        modes = [main_mode(line.attention) for line in self.lines]
        return [colour(line.attention) if modes[:i].count(modes[i]) < len(DASHES) else hue_of(line.label)
                for i, line in enumerate(self.lines)]

    def named(self, prefix: object) -> "Figure":
        """The figure with a prefix of its name, so that a study can have several of a kind."""
        return replace(self, name=f"{prefix}-{self.name}")

    def as_dict(self) -> dict[str, Any]:
        """As JSON values, with full precision; null for a point without an interval."""
        return {
            "name": self.name, "title": self.title, "x": self.x.title, "x_axis": self.x.kind, "y": self.y,
            "lines": [{"label": line.label, "attention": line.attention,
                       "points": [{"x": point.x, "mean": point.y, "interval": point.interval,
                                   "seeds": len(point.runs), "runs": point.runs,
                                   **({} if point.joined else {"joined": False})} for point in line.points],
                       "best": None if line.best is None else line.points[line.best].x,
                       "published": line.published or None,
                       **({} if line.fitted is None else {"fitted": line.fitted})} for line in self.lines],
            "remarks": self.remarks, **({"grid": True} if self.grid else {}),
        }

    @property
    def checksum(self) -> str:
        """Of what is drawn; pictures have it in their metadata."""
        return json_files.checksum({"lines": self.as_dict()["lines"], "title": self.title, "x": self.x.title,
                                    "x_axis": self.x.kind, "y": self.y})

    def as_markdown(self) -> str:
        table = [self.headings, ["---"] * len(self.headings), *self.rows] if self.rows else []
        return "\n".join([
            f"## {self.title}", "",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in table),
            *([""] if table else []), *(line for remark in self.remarks for line in (remark, ""))])


def loss_against(runs: Sequence[Run], field: str, *, of: Callable[[Run], Any] | None = None,
                 called: str = "", best_over: str | None = None, mark_best: bool | None = None, log: bool | None = None,
                 title: str = "", arm: Callable[[Run], str] | None = None, quantity: str = "loss") -> Figure:
    """Final val loss against a field of the config: one line for each attention and each combination of the other
    fields in which runs differ; each point is the mean over the seeds with its 95 % interval (Student's t).

    Fields that change together with that of the axis, such as the batch with the context, do not separate lines; a
    remark names them. Unfinished runs, runs whose last val loss is not finite, and second runs of a seed do not count.
    Remarks name these runs, and attentions without valid runs.

    Args:
        runs: runs of a study; those without val loss are left out, with a remark.
        field: dotted name, such as ``optimizer.learning_rate``, ``model.context`` or ``model.modes.local.window``. For
            a mode's option, modes without it are left out, with a remark.
        of: the value of a run on the axis, a number or a text, if not the field itself, such as the number of pairs in
            ``data.source``.
        called: the name of that value, such as ``pairs``. Empty: the field's.
        best_over: a tuned field, such as ``optimizer.learning_rate``: a point uses the value with the lowest mean, and
            the table names it.
        mark_best: mark the best point of each line, warn if it is the first or last value tried, and compare the best
            points of all lines. None: only for fields of the optimizer.
        log: logarithmic axis. None: for learning rates, and for positive numbers whose largest is at least four times
            the smallest.
        title: title of the figure. Empty: a default.
        arm: the name of a run's line. None: lines as described above.
        quantity: a column of the val lines whose best is the lowest, ``loss`` or ``bits_per_dimension``.

    Raises:
        ConfigError: there are runs, but none has the field, and it is not an option of a mode.
    """
    with_field = [run for run in runs if field in run.setup_fields]
    # Runs with an option of a mode may still be missing.
    if runs and not with_field and not field.startswith("model.modes."):
        raise ConfigError(f"no run has a field {field} that affects the loss; expected a field of the config, such as "
                          "optimizer.learning_rate, model.context or model.modes.MODE.OPTION")
    called, remarks = called or short_name(field), []
    if not with_field:
        remarks.append(f"Nothing to draw: no run with {field} yet.")
    elif without := dict.fromkeys(run.attention for run in runs if field not in run.setup_fields):
        remarks.append(f"Left out, without {field}: {listed(list(without))}.")

    def place_of(run: Run) -> Any:
        return _on_axis(run.setup_fields[field] if of is None else of(run))

    arms, notes = _arms(with_field, quantity, place_of, field, best_over, arm)
    remarks += notes
    marks = field.startswith("optimizer.") if mark_best is None else mark_best
    places = [x for each in arms for x in each.places]
    is_numeric = all(map(_is_number, places))
    if not is_numeric:
        for each in arms:
            each.places = {value_text(x): by_value for x, by_value in each.places.items()}
    what, sign = f"val {_spelled(quantity)}", -1 if quantity == "accuracy" else 1
    lines, rows, best_runs = [], [], []
    for each in arms:
        tried = sorted(each.places) if is_numeric else list(each.places)
        chosen = {x: _best(each.places[x], sign) for x in tried}
        counted = [x for x in tried if each.places[x][chosen[x]].values]
        best = None
        if marks and counted:
            best = _best({x: each.places[x][chosen[x]] for x in counted}, sign)
            best_runs += each.places[best][chosen[best]].runs
            if is_numeric:
                remarks += _edge(each.label, called, best, tried)
        points = []
        for x in tried:
            place = each.places[x][chosen[x]]
            interval = mean_interval(place.values)
            if place.values:
                points.append(Point(x, place.mean(), interval, tuple(run.name for run in place.runs)))
            rows.append((each.label, value_text(x), *([value_text(chosen[x])] if best_over else []),
                         str(len(place.values)) + (f" of {len(place.values) + len(place.lost)}" if place.lost else ""),
                         number_text(place.mean()) if place.values else "not finite",
                         _interval_cell(interval, place.values), *(["best" if x == best else ""] if marks else [])))
        lines.append(Line(each.label, each.first.attention, tuple(points),
                          None if best is None else counted.index(best)))
    if any(len(point.runs) == 1 for line in lines for point in line.points):
        remarks.append("Points without an interval have one seed.")
    if best_over and any(len(by_value) > 1 for each in arms for by_value in each.places.values()):
        remarks.append(f"Each point has its best {short_name(best_over)}, chosen on the same runs.")
    if quantity == "loss" and len(group(best_runs)) > 1:
        remarks.append(f"Each at its best {called}: {' '.join(verdict(group(best_runs)))}")
    return Figure(
        f"{quantity}-against-{called.replace(' ', '_').replace('/', '_')}", title or f"Final {what} against {called}",
        Axis(called, _kind(field, places, log)), f"final {what}{_unit(runs, quantity)}", tuple(lines),
        ("attention", called, *([short_name(best_over)] if best_over else []), "seeds", what,
         "95 % interval", *(["best"] if marks else [])), tuple(rows), tuple(remarks))


accuracy_against = partial(loss_against, quantity="accuracy")
"""The same for the val accuracy of tasks that have one; the best is the highest."""


@dataclass
class _SetUp:
    """Runs of one set-up: one position on the axis, and one value of the tuned field."""

    runs: list[Run] = field(default_factory=list)
    """Valid runs, one per seed."""
    lost: list[str] = field(default_factory=list)
    """Names of runs whose last loss is not finite."""
    values: list[float] = field(default_factory=list)
    """Losses or accuracies of the valid runs."""

    def mean(self, seeds: Sequence[Any] = ()) -> float:
        """Mean over some of the seeds; over all if none is named."""
        return float(np.mean([value for run, value in zip(self.runs, self.values, strict=True)
                              if not seeds or run.seed in seeds]))


@dataclass
class _Arm:
    """Runs of one line."""

    first: Run
    fields: dict[str, Any]
    """The fields that all of them share."""
    places: dict[Any, dict[Any, _SetUp]] = field(default_factory=dict)
    """By position on the axis, and by value of the tuned field."""
    label: str = ""


def _arms(runs: Sequence[Run], quantity: str, place_of: Callable[[Run], Any], name: str | None,
          tuned: str | None, arm_of: Callable[[Run], str] | None = None) -> tuple[list[_Arm], list[str]]:
    """The valid runs by line, place and value of the tuned field, and remarks on the others."""
    remarks: list[str] = []
    unfinished = [run.name for run in runs if not run.is_finished]
    unmeasured = [run.name for run in runs if run.is_finished and run.final(quantity) is None]
    axes = tuple(axis for axis in (name, tuned) if axis)
    arms: list[_Arm] = []
    together: dict[str, None] = {}
    twice, not_finite = [], []
    for name_of_these, these in group_by(runs, arm_of or (lambda run: run.attention)).items():
        along = _along(these, lambda run: [place_of(run), run.setup_fields.get(tuned or "")], axes)
        together |= dict.fromkeys(along)
        arms_by_fields: dict[str, _Arm] = {}
        for run in these:
            fields = {each: value for each, value in run.setup_fields.items() if each not in (*axes, *along)}
            arm = arms_by_fields.setdefault(json.dumps(fields, sort_keys=True), _Arm(run, fields))
            if run.name in unfinished or run.name in unmeasured:
                continue
            place = arm.places.setdefault(place_of(run), {}).setdefault(
                _on_axis(run.setup_fields.get(tuned)) if tuned else None, _SetUp())
            value = run.final(quantity)
            if run.seed in [other.seed for other in place.runs]:
                twice.append(run.name)
            elif value is None or not math.isfinite(value):
                place.lost.append(run.name)
                not_finite.append(run.name)
            else:
                place.runs.append(run)
                place.values.append(value)
        _name_arms(list(arms_by_fields.values()), (*axes, *along), name_of_these)
        arms += arms_by_fields.values()
    for names, why in ((unfinished, "not finished"), (unmeasured, f"no val {_spelled(quantity)}"),
                       (twice, "duplicate seed"), (not_finite, f"final val {_spelled(quantity)} not finite")):
        if names:
            remarks.append(f"Left out of the means, {why}: {few(names)}.")
    if empty := [arm.label for arm in arms if not any(place.values for by_value in arm.places.values()
                                                      for place in by_value.values())]:
        remarks.append(f"Not drawn, without valid runs: {listed(empty)}.")
    if together.keys() - {"data.dir"}:
        remarks.append(f"Fields that change together with {short_name(name or tuned or '')}: "
                       f"{listed([short_name(each) for each in together if each != "data.dir"])}.")
    return [arm for arm in arms if arm.places], remarks


def _along(runs: Sequence[Run], at: Callable[[Run], Any], axes: Sequence[str]) -> list[str]:
    """The fields with one value at each place that differs between places."""
    places = group_by(runs, lambda run: json.dumps(at(run))).values()
    return [name for name in differing([run.setup_fields for run in runs]) if name not in axes and all(
        len({json.dumps(run.setup_fields.get(name)) for run in alike}) == 1 for alike in places)]


def _name_arms(arms: Sequence[_Arm], leave_out: Sequence[str], name: str) -> None:
    """Label each arm of a name by its differences from the others, or by its first run if there are many."""
    for arm in arms:
        details = distinctions(arm.first, [other.first for other in arms], leave_out)
        arm.label = ", ".join([name, *(details if len(details) <= MAX_DISTINCTIONS else [f"as {arm.first.name}"])])
    labels = [arm.label for arm in arms]
    for arm, label in zip(arms, labels, strict=True):
        if labels.count(label) > 1:
            arm.label = f"{name}, as {arm.first.name}"


def _best(places: dict[Any, _SetUp], sign: int) -> Any:
    """The key of the place with the lowest (``sign`` 1) or highest (−1) mean.

    Means are over the seeds that all places share, or over all seeds if they share none. A place with a failed run is
    chosen only if every place has one.
    """
    whole = {key: place for key, place in places.items() if place.values and not place.lost}
    candidates = whole or {key: place for key, place in places.items() if place.values}
    if not candidates:
        return next(iter(places))
    shared = set.intersection(*({run.seed for run in place.runs} for place in candidates.values()))
    return min(candidates, key=lambda key: sign * candidates[key].mean(tuple(shared)))


def _edge(label: str, name: str, best: Any, tried: Sequence[Any]) -> list[str]:
    """A warning if the best value is the first or the last tried."""
    if len(tried) == 1:
        return [f"Warning: {label} has only one {name}, {value_text(best)}."]
    ends = {tried[0]: ("smallest", "smaller"), tried[-1]: ("largest", "larger")}
    if best not in ends:
        return []
    end, further = ends[best]
    return [f"Warning: the best {name} of {label}, {value_text(best)}, is the {end} one tried; a {further} one may be "
            "better."]


def _interval_cell(interval: tuple[float, float] | None, values: Sequence[float]) -> str:
    if interval is None:
        return "– (one seed)" if len(values) == 1 else "–"
    return interval_text(interval)


def _spelled(quantity: str) -> str:
    return quantity.replace("_", " ")


def _unit(runs: Sequence[Run], quantity: str = "loss") -> str:
    return f" (nats per {scored(runs) or 'token'})" if quantity == "loss" else ""


def _on_axis(value: Any) -> float | str:
    """Numbers unchanged, anything else as text."""
    return value if _is_number(value) else value_text(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(name: str, places: Sequence[Any], log: bool | None) -> Literal["linear", "log", "category"]:
    if not all(map(_is_number, places)):
        return "category"
    if not places or min(places) <= 0:
        return "linear"
    if log is None:
        log = name.endswith("learning_rate") or max(places) >= 4 * min(places)
    return "log" if log else "linear"


def differences(runs: Sequence[Run], baseline: str, *, best_over: str | None = None, title: str = "",
                arm: Callable[[Run], str] | None = None, besides: Sequence[str] = ()) -> Figure:
    """Val loss of each attention minus that of a baseline, paired by seed and, with eval.py, by window.

    See :func:`comparison.paired.paired_difference`. Paired set-ups differ only in the attention, the options of modes,
    ``best_over`` and ``besides``. A difference whose interval includes zero is not significant. Each interval has a
    confidence of 95 %.

    Args:
        runs: runs of a study. Unfinished runs and those without a finite val loss are listed and left out.
        baseline: an attention, such as ``softmax``, or a name that ``arm`` returns.
        best_over: a tuned field, such as ``optimizer.learning_rate``: each set-up uses the runs with its best value, as
            in :func:`loss_against`.
        title: title of the figure. Empty: a default.
        arm: as in :func:`loss_against`.
        besides: dotted names of other fields, or of groups such as ``optimizer``, that paired set-ups may differ in.
    """
    name = arm or (lambda run: run.attention)
    arms, remarks = _arms(runs, "loss", lambda run: "", None, best_over, arm)
    if not any(name(run) == baseline for run in runs):
        remarks.append(f"Nothing to draw: no run of {baseline} yet.")
    tuned = [(each, by_value[key]) for each in arms for by_value in each.places.values()
             for key in [_best(by_value, 1)] if by_value[key].values]
    lines, rows, alone = [], [], []
    for each, place in tuned:
        if name(each.first) == baseline:
            continue
        base = [(other, other_place) for other, other_place in tuned if name(other.first) == baseline
                and _without(other.fields, besides) == _without(each.fields, besides)]
        pair = paired_difference(base[0][1].runs, place.runs) if len(base) == 1 else None
        if pair is None:
            alone.append(each.label)
            continue
        point, row = _difference(pair, base[0][0].label, each.label, place)
        lines.append(Line(each.label, each.first.attention, (point,)))
        rows.append(row)
        if len(pair.steps) > 1:
            remarks.append(steps_text(pair, base[0][0].label, each.label))
        if any(pair.missing):
            remarks.append(missing_text(pair, base[0][0].label, each.label))
    if alone and any(name(run) == baseline for run in runs):
        remarks.append(f"Left out, without a matching run of {baseline}: {listed(alone)}.")
    return Figure(
        f"difference-from-{baseline.replace(',', '+')}", title or f"Val loss minus that of {baseline}",
        Axis("", "category"), f"difference in val loss{_unit(runs)}", tuple(lines),
        ("attention", "against", "seeds", "windows", "difference", "95 % interval", ""), tuple(rows), tuple(remarks),
        zero=True)


def loss_curves(runs: Sequence[Run], *, quantity: str = "loss", title: str = "",
                arm: Callable[[Run], str] | None = None, axis: str = "step") -> Figure:
    """Val loss against steps or time: a line for each set-up, the mean over its seeds at every evaluation.

    Seeds that ended early are left out, with a remark. The table has the last values that all seeds have.

    Args:
        runs: runs of a study.
        quantity: a column of the val lines, ``loss``, ``bits_per_dimension`` or ``accuracy``.
        title: title of the figure. Empty: a default.
        arm: the name of a run's line. None: the attention, with what distinguishes set-ups.
        axis: as in :data:`comparison.runs.AXES`.
    """
    along, what = AXES[axis][1], f"val {_spelled(quantity)}"
    lines, rows, without = [], [], []
    for setup in group(runs):
        label = setup.label if arm is None else arm(setup.runs[0])
        curves = {run.name: run.curve(axis, "val", quantity) for run in setup.lasting}
        curves = {name: curve for name, curve in curves.items() if len(curve[0])}
        x, mean, _ = mean_curve(list(curves.values())) if curves else (np.empty(0), np.empty(0), None)
        known = np.isfinite(mean)
        if not known.any():
            without.append(label)
            continue
        points = tuple(Point(float(at), float(value), None, tuple(curves))
                       for at, value in zip(x[known], mean[known], strict=True))
        lines.append(Line(label, setup.attention, points))
        rows.append((label, str(len(curves)), value_text(int(points[-1].x)), number_text(points[-1].y)))
    remarks = [f"Not drawn, without {what}: {listed(without)}."] if without else []
    return Figure(
        f"{quantity}-against-{AXES[axis][0].lower().replace(' ', '_')}",
        title or f"{what.capitalize()} against {along}", Axis(along), f"{what}{_unit(runs, quantity)}", tuple(lines),
        ("attention", "seeds", along, what), tuple(rows), (*remarks, *short_seeds(runs)))


def differences_against(runs: Sequence[Run], field: str, baseline: str, *, of: Callable[[Run], Any] | None = None,
                        called: str = "", log: bool | None = None, title: str = "",
                        arm: Callable[[Run], str] | None = None) -> Figure:
    """Val loss of each attention minus that of a baseline, against a field of the config, paired as in
    :func:`differences`. A line for each attention; a point where it and the baseline have runs of the same seeds.

    Args:
        runs: runs of a study. Unfinished runs and those without a finite val loss are listed and left out.
        field: dotted name, such as ``model.context``.
        baseline: an attention, such as ``softmax``, or a name that ``arm`` returns.
        of: as in :func:`loss_against`.
        called: as in :func:`loss_against`.
        log: as in :func:`loss_against`.
        title: title of the figure. Empty: a default.
        arm: as in :func:`loss_against`.
    """
    called = called or short_name(field)
    arms, remarks = _arms(runs, "loss", lambda run: _on_axis(run.setup_fields[field] if of is None else of(run)),
                          field, None, arm)
    bases = [each for each in arms if each.label == baseline]
    if not bases:
        remarks.append(f"Nothing to draw: no run of {baseline} yet.")
    lines, rows = [], []
    for each in arms:
        points = []
        for x in sorted(each.places, key=lambda x: (isinstance(x, str), x)):
            place, base = each.places[x][None], bases[0].places.get(x) if bases else None
            pair = None if each in bases or base is None else paired_difference(base[None].runs, place.runs)
            if pair is not None:
                point, row = _difference(pair, baseline, each.label, place)
                points.append(replace(point, x=x))
                rows.append((row[0], value_text(x), *row[1:]))
        if points:
            lines.append(Line(each.label, each.first.attention, tuple(points)))
    places = [point.x for line in lines for point in line.points]
    return Figure(
        f"difference-from-{baseline.replace(',', '+')}-against-{called.replace(' ', '_')}",
        title or f"Val loss minus that of {baseline} against {called}",
        Axis(called, _kind(field, places, log)), f"difference in val loss{_unit(runs)}", tuple(lines),
        ("attention", called, "against", "seeds", "windows", "difference", "95 % interval", ""), tuple(rows),
        tuple(remarks), zero=True)


def _without(fields: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The fields without the attention and without others, or those of their groups."""
    return {name: value for name, value in fields.items()
            if not is_of(name, ("model.attention", "model.modes", *others))}


def _difference(pair: PairedDifference, baseline: str, label: str, place: _SetUp) -> tuple[Point, tuple[str, ...]]:
    interval = pair.interval()
    names = tuple(run.name for run in place.runs if run.seed in pair.seeds)
    return Point(label, pair.mean, interval, names), (
        label, baseline, str(len(pair.seeds)), "–" if pair.windows is None else f"{pair.windows:,}",
        number_text(pair.mean), _interval_cell(interval, pair.by_seed), significance(pair.mean, interval))


def short_name(field: str) -> str:
    """The last part of a field's dotted name, as words: ``learning rate``."""
    return field.rpartition(".")[2].replace("_", " ")


def write_figures(figures: Sequence[Figure], folder: Path, remarks: Sequence[str] = ()) -> list[Path]:
    """Writes ``NAME.svg`` and ``NAME.png`` of each figure with points, ``figures.md`` with all tables, and
    ``figures.json``. The output is deterministic.

    Args:
        figures: figures of a study.
        folder: created if missing. Existing files of these names are replaced.
        remarks: general remarks, such as the runs that are left out.

    Returns:
        the files.

    Raises:
        ConfigError: two figures have the same name, or a name is not a file name.
        OSError: a file cannot be written.
    """
    check_names(figures)
    folder.mkdir(parents=True, exist_ok=True)
    written = [(f"{figure.name}.{kind}", render(figure, kind))
               for figure in figures for kind in ("svg", "png") if figure.values]
    texts = [*(line for remark in remarks for line in (remark, "")), *(figure.as_markdown() for figure in figures)]
    written.append(("figures.md", "\n".join(texts).encode()))
    written.append(("figures.json", orjson.dumps(
        {"remarks": list(remarks), "figures": [figure.as_dict() for figure in figures]},
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)))
    for name, contents in written:
        with replacing(folder / name) as beside:
            beside.write_bytes(contents)
    return [folder / name for name, _ in written]


class _PointEntry(TypedDict):
    x: Finite | str
    mean: Finite
    interval: tuple[Finite, Finite] | None
    runs: list[str]
    joined: NotRequired[bool]


class _LineEntry(TypedDict):
    label: str
    attention: str
    points: list[_PointEntry]
    best: Finite | str | None
    published: NotRequired[str | None]
    fitted: NotRequired[Finite]


class _FigureEntry(TypedDict):
    name: FileName
    title: str
    x: str
    x_axis: Literal["linear", "log", "category"]
    y: str
    lines: list[_LineEntry]
    remarks: list[str]
    grid: NotRequired[bool]


class _FiguresFile(TypedDict):
    figures: list[_FigureEntry]


def read_figures(folder: Path) -> list[Figure]:
    """The figures that :func:`write_figures` wrote into a folder, each with a table of its points; none without
    ``figures.json``.

    Raises:
        JsonError: the file is damaged.
        OSError: it cannot be read.
    """
    path = folder / "figures.json"
    if not path.is_file():
        return []
    return [_read_figure(entry, path, f"figures[{i}]")
            for i, entry in enumerate(json_files.read(path, _FiguresFile)["figures"])]


def _read_figure(entry: dict[str, Any], path: Path, field: str) -> Figure:
    kind: Any = str if entry["x_axis"] == "category" else float
    lines, rows = [], []
    for i, line in enumerate(entry["lines"]):
        points = tuple(Point(each["x"], each["mean"], None if each["interval"] is None else tuple(each["interval"]),
                             tuple(each["runs"]), each.get("joined", True)) for each in line["points"])
        for j, point in enumerate(points):
            json_files.check(point.x, kind, path, f"{field}.lines[{i}].points[{j}].x")
        best = next((j for j, point in enumerate(points) if point.x == line["best"]), None)
        lines.append(Line(line["label"], line["attention"], points, best, line.get("published") or "",
                          line.get("fitted")))
        rows += [(line["label"], value_text(point.x), number_text(point.y),
                  "–" if point.interval is None else interval_text(point.interval)) for point in points]
    return Figure(entry["name"], entry["title"], Axis(entry["x"], entry["x_axis"]), entry["y"], tuple(lines),
                  ("attention", entry["x"], entry["y"], "95 % interval"), tuple(rows), tuple(entry["remarks"]),
                  grid=entry.get("grid", False))


def check_names(figures: Sequence[Figure]) -> None:
    """Raises :class:`ConfigError` unless the names are unique file names."""
    names = [figure.name for figure in figures]
    for name in names:
        if not name or name.startswith(".") or "/" in name or name == "figures":
            raise ConfigError(f"a figure is named {name!r}; expected a file name without a folder, other than figures")
        if names.count(name) > 1:
            raise ConfigError(f"two figures are named {name}; expected unique names")


def render(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """Renders a figure: a colour per mode, a dash per line, bars for intervals, a ring around the best point of a line,
    open markers for published figures. A fit is a thin line with a band, dashed where it is an extrapolation.

    The output is deterministic, and has the checksum of the figure in its metadata. Categories of one point each are
    listed vertically.
    """
    if figure.grid:
        return _render_grid(figure, kind)
    if figure.x.kind == "category" and not figure.has_legend:
        return _render_list(figure, kind)
    below = figure.has_legend and len(figure.lines) > MAX_LEGEND
    with drawing(figsize=(10 if below else 7, 4.5)) as canvas:
        panel = canvas.subplots()
        places = {value: i for i, value in enumerate(figure.values)} if figure.x.kind == "category" else {}
        looks = [DASHES[dash] for dash in dashes([line.attention for line in figure.lines])]
        # Points of one category are drawn side by side.
        reach = 0.0 if not (places and figure.has_legend) else 0.3 if below else 0.1
        shifts = np.linspace(-reach, reach, len(figure.lines))
        for line, own, (style, _, marker), shift in zip(figure.lines, figure.colours, looks, shifts, strict=True):
            x = [places[point.x] + shift if places else point.x for point in line.points]
            y = [point.y for point in line.points]
            look: dict[str, Any] = {"color": own}
            if line.fitted is not None:
                _plot_fit(panel, line, own)
                continue
            faint = {"fillstyle": "none", "alpha": 0.6} if line.is_faint else {}
            gaps = [i for i, point in enumerate(line.points) if not point.joined]
            panel.plot(*(np.insert(np.array(values, float), gaps, np.nan) for values in (x, y)),
                       label=plain(line.label), linestyle="none" if places else style, marker=marker, markersize=6,
                       **look, **faint)
            for at, point in zip(x, line.points, strict=True):
                if point.interval is not None:
                    low, high = point.interval
                    panel.errorbar([at], [point.y], yerr=[[point.y - low], [high - point.y]], capsize=3, **look)
            if line.best is not None:
                panel.plot([x[line.best]], [y[line.best]], marker="o", markersize=14, fillstyle="none",
                           linestyle="none", **look)
        if figure.zero:
            panel.axhline(0, color="#8c959f", linewidth=1)
        if places:
            panel.set_xticks(range(len(places)), [fill(plain(str(value)), TICK_WIDTH) for value in places])
            panel.margins(x=0.1)
        else:
            panel.set_xscale(figure.x.kind)
            if len(figure.values) <= MAX_TICKS:
                panel.set_xticks(figure.values, [f"{value:g}" for value in figure.values])
                panel.minorticks_off()
        panel.set(title=plain(figure.title), xlabel=plain(figure.x.title), ylabel=plain(figure.y))
        panel.grid(color="#eceef1")
        if below:  # where it hides nothing
            legend_below(canvas, panel)
        elif figure.has_legend:
            panel.legend(frameon=False)
        return saved(canvas, kind, figure.checksum)


def _plot_fit(panel: "matplotlib.axes.Axes", line: Line, own: str) -> None:
    x, y = np.array([(point.x, point.y) for point in line.points], float).T
    low, high = np.array([point.interval or (point.y, point.y) for point in line.points], float).T
    beyond = x >= line.fitted
    panel.fill_between(x, low, high, color=own, alpha=0.15, linewidth=0)
    panel.plot(x[x <= line.fitted], y[x <= line.fitted], label=plain(line.label), color=own, linewidth=0.8)
    panel.plot(x[beyond], y[beyond], color=own, linewidth=0.8, linestyle=DASHES["dash"][0])


def _render_grid(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """A row of cells for each line, with their values."""
    values = np.full((len(figure.lines), len(figure.values)), np.nan)
    for row, line in zip(values, figure.lines, strict=True):
        for point in line.points:
            row[figure.values.index(point.x)] = point.y
    with drawing(figsize=(2.5 + 0.62 * len(figure.values), 2.2 + 0.3 * len(figure.lines))) as canvas:
        panel = canvas.subplots()
        image = panel.imshow(values, cmap=GRID_COLOURS, vmin=0, vmax=1, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8,
                           color="white" if value < 0.5 else "black")
        panel.set_xticks(range(len(figure.values)), [plain(str(value), 40) for value in figure.values], rotation=45,
                         ha="right", rotation_mode="anchor")
        panel.set_yticks(range(len(figure.lines)), [plain(line.label, 60) for line in figure.lines])
        panel.set(title=plain(figure.title))
        canvas.colorbar(image, ax=panel, label=plain(figure.y))
        return saved(canvas, kind, figure.checksum)


def _render_list(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """A line of the picture for each category, from top to bottom."""
    with drawing(figsize=(7, 1.2 + 0.35 * len(figure.values))) as canvas:
        panel = canvas.subplots()
        places = {value: i for i, value in enumerate(figure.values)}
        for line, dash in zip(figure.lines, dashes([line.attention for line in figure.lines]), strict=True):
            for point in line.points:
                reach = None if point.interval is None else np.abs(np.subtract(point.interval, point.y))[:, None]
                panel.errorbar([point.y], [places[point.x]], xerr=reach, capsize=3, markersize=6,
                               marker=DASHES[dash][2], color=colour(line.attention))
        if figure.zero:
            panel.axvline(0, color="#8c959f", linewidth=1)
        panel.set_yticks(range(len(places)), [plain(str(value), 60) for value in places])
        panel.invert_yaxis()
        panel.margins(y=0.1)
        panel.set(title=plain(figure.title), xlabel=plain(figure.y), ylabel=plain(figure.x.title))
        panel.grid(color="#eceef1")
        return saved(canvas, kind, figure.checksum)
