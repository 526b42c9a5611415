"""The curve of a run, thinned while its metrics are read, in constant memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from training.metrics import read_blocks

Columns = dict[str, np.ndarray]
"""Float64 columns of equal length, by name, with NaN for missing values and without empty columns."""

COLUMNS = ("step", "tokens", "train_seconds", "wall_seconds", "loss", "learning_rate", "gradient_norm",
           "tokens_per_second", "bits_per_byte", "bits_per_dimension", "accuracy", "error_rate", "peak_bytes",
           "flops")
STEP, LOSS, SPEED = (COLUMNS.index(name) for name in ("step", "loss", "tokens_per_second"))
SPLITS = "train", "val", "annealed"
"""The lines of ``metrics.jsonl`` by their split; the annealed are of ``train.anneal_at``."""
MAX_POINTS = 500
MAX_MEANS = 250
MAX_STEP = 10**9
"""A line with a larger step is damaged."""
SPEED_BINS = 1000
"""Other speeds are counted in bins of a thousandth, in natural logarithm."""


@dataclass(frozen=True)
class Curve:
    """The lines of one of ``SPLITS``; the last line of each step counts. False if there are none."""

    points: Columns = field(default_factory=dict)
    """At most ``MAX_POINTS`` lines, sorted by step: all if there are no more, else the lines with the smallest and the
    largest loss of each bucket of steps, and the last line."""
    means: Columns = field(default_factory=dict)
    """Means of finite values over at most ``MAX_MEANS`` buckets of steps; NaN if there are none. ``lines`` has their
    number. The first buckets are narrower, so that a logarithmic axis has even points."""
    lines: int = 0
    """Lines that count, one per step."""
    not_finite: int = 0
    """Number of lines without a finite loss."""
    first_not_finite: float | None = None
    """The first step of these."""
    repeated: int = 0
    """Lines that do not count, because a later line has the same step."""
    turned_back: int = 0
    """Number of lines with a smaller step than the previous one."""
    without_step: int = 0
    """Lines that do not count, because they have no valid step."""
    last_loss: float | None = None
    """Mean loss over the last 5 % of the steps, exact; NaN if any is not finite."""
    median_speed: float | None = None
    """Median of the tokens per second: exact if all lines are kept, else to 0.05 %."""

    def __bool__(self) -> bool:
        return self.lines > 0

    @property
    def is_whole(self) -> bool:
        return self.lines <= MAX_POINTS


def read_curves(path: Path) -> list[Curve]:
    """The curves of a metrics file, of each of ``SPLITS``.

    Takes one pass, from the end, or three if the largest step is not near the end.

    Raises:
        OSError: the file cannot be read.
    """
    last_step = None
    while (thinners := _thin(path, last_step)) is None:
        last_step = max(_last_step(splits) for splits in _blocks(path))
    return [thinners[split].curve() for split in SPLITS]


def _thin(path: Path, last_step: float | None) -> "dict[str, _Thinner] | None":
    """Each split, thinned; None if a step exceeds ``last_step`` (None: the largest of the last block)."""
    thinners: dict[str, _Thinner] = {}
    for splits in _blocks(path):
        last_here = _last_step(splits)
        if not thinners:
            last_step = last_here if last_step is None else last_step
            thinners = {split: _Thinner(last_step) for split in splits}
        assert last_step is not None
        if last_here > last_step:
            return None
        for split, rows in splits.items():
            thinners[split].add(rows)
    return thinners or {split: _Thinner(0) for split in SPLITS}


def _blocks(path: Path) -> Iterator[dict[str, np.ndarray]]:
    """The rows of each split, block by block from the end of the file."""
    for records in read_blocks(path):
        yield {split: _rows([record for record in records if record["split"] == split]) for split in SPLITS}


def _rows(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """A row of ``COLUMNS`` for each record; NaN for missing and non-finite values, and for invalid steps."""
    rows = np.full((len(records), len(COLUMNS)), np.nan)
    if not records:
        return rows
    present = [i for i, name in enumerate(COLUMNS) if name in records[0]]
    # The lines of a training run have the same fields. The loop below would take most of the reading time.
    alike = set(map(len, records)) == {len(records[0])}
    try:
        values = chain.from_iterable(map(itemgetter(*(COLUMNS[i] for i in present)), records if alike else [{}]))
        rows[:, present] = np.fromiter(values, float, len(records) * len(present)).reshape(len(records), -1)
    except (KeyError, TypeError, ValueError, OverflowError):  # fields differ, or a value is not a number
        rows[:] = [[_number(record.get(name)) for name in COLUMNS] for record in records]
    rows[~np.isfinite(rows)] = np.nan
    steps = rows[:, STEP]
    steps[(steps < 0) | (steps > MAX_STEP) | (steps % 1 != 0)] = np.nan
    return rows


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan


def _last_step(splits: Mapping[str, np.ndarray]) -> float:
    return max(np.nanmax(rows[:, STEP], initial=0) for rows in splits.values())


class _Thinner:
    """Collects the rows of one split, block by block from the end of the file, for a :class:`Curve`.

    Args:
        last_step: upper bound of the steps.
    """

    def __init__(self, last_step: float):
        # A bucket goes up to its edge. The first buckets widen up to the width of the others, so that a logarithmic
        # axis has points everywhere. Two points of each, and the last line, make at most MAX_POINTS.
        steps, early, even = max(1, last_step), MAX_MEANS // 4, MAX_MEANS - MAX_MEANS // 4 - 1
        evenly_from = max(1.0, steps * early / even / max(1.0, np.log(steps)))
        self.edges = np.unique(np.round(np.concatenate([np.geomspace(1, evenly_from, early),
                                                        np.linspace(evenly_from, steps, even + 1)])))
        shape = (len(self.edges), len(COLUMNS))
        self.sums, self.counts, self.lines = np.zeros(shape), np.zeros(shape, int), np.zeros(len(self.edges), int)
        self.low, self.high = np.full(shape, np.nan), np.full(shape, np.nan)
        self.last, self.rows = np.full(len(COLUMNS), np.nan), [np.empty((0, len(COLUMNS)))]
        self.seen = np.zeros(int(last_step) + 1, bool)
        self.next_step = np.inf
        self.tail_from, self.tail = last_step - max(1, last_step // 20), np.zeros(2)
        self.speeds: Counter[int] = Counter()
        self.first_not_finite = np.inf
        self.not_finite = self.repeated = self.turned_back = self.without_step = 0

    def add(self, rows: np.ndarray) -> None:
        """Adds the previous block of the file."""
        known = np.isfinite(rows[:, STEP])
        self.without_step += int((~known).sum())
        rows = rows[known]
        if not len(rows):
            return
        self.turned_back += int((np.diff(rows[:, STEP], append=self.next_step) < 0).sum())
        self.next_step = rows[0, STEP]
        rows = self._unseen(rows)
        if not len(rows):
            return
        if not self.last[STEP] >= rows[-1, STEP]:
            self.last = rows[-1]
        loss = rows[:, LOSS]
        finite = np.isfinite(loss)
        if not finite.all():
            self.not_finite += int((~finite).sum())
            self.first_not_finite = min(self.first_not_finite, rows[~finite, STEP].min())
        in_tail = rows[:, STEP] > self.tail_from
        self.tail += loss[in_tail].sum(), in_tail.sum()
        speed = rows[:, SPEED]
        bins = np.round(np.log(speed[speed > 0]) * SPEED_BINS).astype(int)
        self.speeds.update(dict(zip(*(x.tolist() for x in np.unique(bins, return_counts=True)), strict=True)))
        if self.lines.sum() <= MAX_POINTS:
            self.rows.append(rows)
        self._add_to_buckets(rows)

    def _unseen(self, rows: np.ndarray) -> np.ndarray:
        """The rows whose step no later row has, sorted by it."""
        steps, last_of_step = np.unique(rows[::-1, STEP].astype(int), return_index=True)
        last_of_step = last_of_step[~self.seen[steps]]
        self.seen[steps] = True
        self.repeated += len(rows) - len(last_of_step)
        return rows[::-1][last_of_step]

    def _add_to_buckets(self, rows: np.ndarray) -> None:
        """Adds rows sorted by step, with losses that may be NaN."""
        bucket_of_row = np.searchsorted(self.edges, rows[:, STEP])
        starts = np.flatnonzero(np.diff(bucket_of_row, prepend=-1))
        buckets, finite = bucket_of_row[starts], np.isfinite(rows)
        self.lines[buckets] += np.diff(starts, append=len(rows))
        self.sums[buckets] += np.add.reduceat(np.where(finite, rows, 0.0), starts)
        counts = np.add.reduceat(finite, starts, dtype=int)
        self.counts[buckets] += counts
        # Sorted by loss within each bucket, NaN last.
        rows = rows[np.lexsort((rows[:, LOSS], bucket_of_row))]
        low, high = rows[starts], rows[starts + np.maximum(counts[:, LOSS] - 1, 0)]
        # Comparisons with NaN are false: a finite loss replaces one that is not.
        for extreme, new, sign in ((self.low, low, 1), (self.high, high, -1)):
            old = extreme[buckets]
            stays = (sign * old[:, LOSS] <= sign * new[:, LOSS]) | (np.isnan(new[:, LOSS]) & np.isfinite(old[:, STEP]))
            extreme[buckets] = np.where(stays[:, None], old, new)

    def curve(self) -> Curve:
        lines = int(self.lines.sum())
        if not lines:
            return Curve(without_step=self.without_step)
        filled = self.lines > 0
        rows = np.concatenate(self.rows if lines <= MAX_POINTS else [self.low[filled], self.high[filled], [self.last]])
        points = _columns(rows[np.unique(rows[:, STEP], return_index=True)[1]])
        with np.errstate(invalid="ignore"):
            means = _columns(self.sums[filled] / self.counts[filled])
        tail_sum, tail_count = self.tail
        return Curve(
            points, means | {"lines": self.lines[filled].astype(float)}, lines, self.not_finite,
            self.first_not_finite if self.not_finite else None, self.repeated, self.turned_back, self.without_step,
            float(tail_sum / tail_count) if tail_count else None, self._median_speed(points, lines))

    def _median_speed(self, points: Columns, lines: int) -> float | None:
        if not self.speeds:
            return None
        if lines <= MAX_POINTS:
            return float(np.nanmedian(points["tokens_per_second"]))
        bins = sorted(self.speeds)
        up_to = np.cumsum([self.speeds[b] for b in bins])
        return float(np.exp(bins[int(np.searchsorted(up_to, up_to[-1] / 2))] / SPEED_BINS))


def _columns(rows: np.ndarray) -> Columns:
    """Columns by name, without empty ones."""
    return {name: rows[:, i] for i, name in enumerate(COLUMNS) if np.isfinite(rows[:, i]).any() or name == "loss"}


def smooth(values: np.ndarray, weights: np.ndarray, reach: int) -> np.ndarray:
    """Weighted mean over ``reach`` neighbours on each side; over fewer at the start, where loss is steep and a wide
    mean would lag, and at the end. NaN stays NaN and is ignored in other means."""
    index = np.arange(len(values))
    before = np.minimum(index // 5, reach)
    first, last = index - before, np.minimum(index + before, len(values) - 1)
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values * weights, 0.0))])
    weight = np.concatenate([[0.0], np.cumsum(np.where(known, weights, 0.0))])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, (total[last + 1] - total[first]) / (weight[last + 1] - weight[first]), np.nan)


def mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and standard deviation (of the sample; 0 of one) of curves (x, loss) where all are defined, interpolated
    linearly at the points of all."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= first) & (points <= last)]
    losses = np.stack([np.interp(points, x, loss) for x, loss in curves])
    spread = losses.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(points))
    return points, losses.mean(axis=0), spread
