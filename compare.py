"""Draw runs against steps, tokens and training time on one page, with a table of their final figures.

    python compare.py runs/softmax runs/chunked --out report.html

The page is one file and opens without network. ``--png FILE`` also draws val loss against steps and against training
time. Runs whose configs differ in nothing but ``train.seed`` are seeds of one set-up: the table adds their mean and
standard deviation.
"""
# ruff: noqa: E402

from configs import bootstrap

# Before any other import: under a Python without the packages this ends in one sentence.
bootstrap.require_packages()

import colorsys
import contextlib
import hashlib
import html
import json
import os
import string
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tyro

from configs.schema import ConfigError
from training.metrics import read_metrics

AXES = {  # what x can be: its name in metrics.jsonl, the button and the axis title
    "step": ("Steps", "steps"),
    "tokens": ("Tokens", "tokens"),
    "train_seconds": ("Training time", "training time (seconds)"),
}
FIGURES = {  # what the table shows: heading and number format
    "context": ("context", ",.0f"),
    "parameters": ("parameters", ",.0f"),
    "steps": ("steps", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "train_seconds": ("training seconds", ",.1f"),
    "tokens_per_second": ("tokens/s (median)", ",.0f"),
    "train_loss": ("train loss (last 5 %)", ".4f"),
    "val_loss": ("val loss", ".4f"),
    "best_val_loss": ("best val loss", ".4f"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "accuracy": ("val accuracy", ".4f"),
    "loss_at_shortest": ("loss at shortest run's end", ".4f"),
}
COLOURS = {"softmax": "#d55e00", "chunked": "#0072b2", "linear": "#009e73", "local": "#cc79a7"}
DASHES = {  # Plotly's name of a line: Matplotlib's, and the marker that goes with it
    "solid": ("-", "circle"),
    "dash": ("--", "square"),
    "dot": (":", "diamond"),
    "dashdot": ("-.", "triangle-up"),
}
MAX_POINTS = 1500
"""Points drawn of a curve, so that the page of a long run stays small."""


class RunError(RuntimeError):
    """A run with nothing in it to draw. The message names the run; the other runs are drawn without it."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it."""

    name: str
    """Folder name, or the path where names are not unique."""
    config: dict[str, Any]
    """``config.json``."""
    environment: dict[str, Any]
    """``environment.json``; empty where there is none."""
    train: dict[str, np.ndarray]
    """Columns of the train lines of ``metrics.jsonl``, float64, NaN where missing."""
    val: dict[str, np.ndarray]
    """The same of the val lines; no columns where there are no such lines."""
    evaluations: Sequence[dict[str, Any]] = ()
    """Those of ``evaluation.json``, which evaluate.py writes; empty where there is none."""

    @property
    def attention(self) -> str:
        """The attention mode, or the pattern of modes over the layers."""
        return ",".join(self.config["model"]["attention"])

    @property
    def label(self) -> str:
        """The attention mode with the implementation that computed it, where that has another name."""
        modes = list(dict.fromkeys(self.config["model"]["attention"]))
        used = {mode: form for mode, form in (self.environment.get("implementations") or {}).items()
                if mode in modes and form != mode}
        if not used:
            return self.attention
        forms = used.values() if len(modes) == 1 else (f"{mode}: {form}" for mode, form in used.items())
        return f"{self.attention} ({', '.join(forms)})"

    @property
    def setup(self) -> str:
        """Equal for runs that differ in nothing but the seed."""
        train = {name: value for name, value in self.config["train"].items() if name != "seed"}
        return json.dumps([self.label, self.config | {"train": train}], sort_keys=True)

    @property
    def split(self) -> str:
        """The loss by which the run is judged: val, or train where it was never evaluated."""
        return "val" if self.val else "train"

    @cached_property
    def smooth_train_loss(self) -> np.ndarray:
        """Train loss averaged over 2 % of the run."""
        return smooth(self.train["loss"], len(self.train["loss"]) // 100)

    def curve(self, axis: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        """The axis ("step", "tokens" or "train_seconds") and the loss of a split, empty where there are no such lines;
        train loss is smoothed."""
        columns = self.val if split == "val" else self.train
        if not columns:
            return np.empty(0), np.empty(0)
        return columns[axis], columns["loss"] if split == "val" else self.smooth_train_loss

    def end(self, axis: str) -> float:
        """Where on an axis the loss by which the run is judged was last known."""
        return float(self.curve(axis, self.split)[0][-1])

    def loss_at(self, axis: str, where: float, split: str) -> float | None:
        """The loss at one place of an axis, interpolated linearly; None outside the curve."""
        x, loss = self.curve(axis, split)
        return float(np.interp(where, x, loss)) if len(x) and x[0] <= where <= x[-1] else None


@dataclass(frozen=True)
class Row:
    """A row of the table: a run, or the mean over the seeds of a set-up."""

    name: str
    attention: str
    figures: dict[str, float | None]
    """Values of ``FIGURES``; None where unknown."""
    spread: dict[str, float] = field(default_factory=dict)
    """Standard deviation over the seeds; empty for a single run."""
    split: str = "val"
    """Whose loss ``loss_at_shortest`` is."""

    def cells(self) -> dict[str, str]:
        """The text of each cell, by heading."""
        texts = {"run": self.name, "attention": self.attention}
        for key, (heading, style) in FIGURES.items():
            value = self.figures[key]
            text = "–" if value is None else format(value, style)
            if value is not None and self.spread.get(key):
                text += f" ±\N{NO-BREAK SPACE}{self.spread[key]:{style}}"
            if key == "loss_at_shortest" and value is not None and self.split == "train":
                text += " (train)"
            texts[heading] = text
        return texts


def load_run(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: the folder does not exist or is no run.
        RunError: nothing was measured yet, or a file of the run is damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; name run folders, such as runs/quickstart-chunked")
    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise ConfigError(f"{path}: not a run, it has no {name}; name the --run-dir of a train.py run")
    config = read_json(path / "config.json")
    if not (isinstance(config.get("model"), dict) and config["model"].get("attention")
            and isinstance(config.get("train"), dict)):
        raise RunError(f"{path}/config.json: not a config that train.py writes")
    environment = read_json(path / "environment.json") if (path / "environment.json").is_file() else {}
    metrics = read_metrics(path / "metrics.jsonl")
    train, val = metrics.get("train", {}), metrics.get("val", {})
    if not (train or val):
        raise RunError(f"{path}/metrics.jsonl: no step was logged yet; train the run first")
    for split, columns in (("train", train), ("val", val)):
        missing = [name for name in (*AXES, "loss") if columns and name not in columns]
        if missing:
            raise RunError(f"{path}/metrics.jsonl: the {split} lines have no {missing[0]}; train.py writes it")
    return Run(path.resolve().name, config, environment, train, val, load_evaluations(path / "evaluation.json"))


def load_evaluations(path: Path) -> list[dict[str, Any]]:
    """What evaluate.py found of a run, if it was called; :class:`RunError` where the file is damaged."""
    if not path.is_file():
        return []
    evaluations = read_json(path).get("evaluations")
    try:
        for entry in evaluations:  # pyright: ignore[reportOptionalIterable]
            _ = entry["context"], entry["corpus"], [(part["first"], part["last"], part["loss"])
                                                    for part in entry["positions"]]
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: not what evaluate.py writes ({error}); start evaluate.py again") from error
    return evaluations  # pyright: ignore[reportReturnType]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; :class:`RunError` where it holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: damaged, not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise RunError(f"{path}: damaged, not a JSON object")
    return values


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean over ``reach`` neighbours on each side; over fewer of the first values, where loss is steep and a wide mean
    would lag, and of what there is at the end. NaN stays NaN and enters no mean."""
    index = np.arange(len(values))
    before = np.minimum(index // 5, reach)
    first, last = index - before, np.minimum(index + before, len(values) - 1)
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    mean = (total[last + 1] - total[first]) / np.maximum(count[last + 1] - count[first], 1)
    return np.where(known, mean, np.nan)


def group(runs: Sequence[Run]) -> list[list[Run]]:
    """The seeds of each set-up, in the order given."""
    setups: dict[str, list[Run]] = {}
    for run in runs:
        setups.setdefault(run.setup, []).append(run)
    return list(setups.values())


def setup_labels(setups: list[list[Run]]) -> list[str]:
    """A name for each set-up: its attention, with its first run where several set-ups share the attention."""
    labels = [seeds[0].label for seeds in setups]
    return [label if labels.count(label) == 1 else f"{label}, {seeds[0].name}"
            for label, seeds in zip(labels, setups, strict=True)]


def shortest(runs: Sequence[Run], axis: str) -> float:
    """Where on an axis the first of the runs ends: as far as all can be compared."""
    return min(run.end(axis) for run in runs)


def figures(run: Run, end_of_shortest: float) -> dict[str, float | None]:
    """The values of ``FIGURES`` for a run; ``end_of_shortest`` is in seconds of training."""

    def column(name: str, split: str = "train") -> np.ndarray:
        values = getattr(run, split).get(name, np.empty(0))
        return values[np.isfinite(values)]

    def last(name: str) -> float | None:
        both = [column(name, split)[-1] for split in ("train", "val") if len(column(name, split))]
        return float(max(both)) if both else None

    val_loss, finite_val_loss = run.val.get("loss", np.empty(0)), column("loss", "val")
    train_loss, bits = run.train.get("loss", np.empty(0)), column("bits_per_byte", "val")
    accuracy = column("accuracy", "val")
    speed = column("tokens_per_second")
    return {
        "context": run.config["model"].get("context"),
        "parameters": run.environment.get("parameters"),
        "steps": last("step"),
        "tokens": last("tokens"),
        "train_seconds": last("train_seconds"),
        "tokens_per_second": float(np.median(speed)) if len(speed) else None,
        "train_loss": float(np.mean(train_loss[-max(1, len(train_loss) // 20):])) if len(train_loss) else None,
        "val_loss": float(val_loss[-1]) if len(val_loss) else None,
        "best_val_loss": float(finite_val_loss.min()) if len(finite_val_loss) else None,
        "bits_per_byte": float(bits[-1]) if len(bits) else None,
        "accuracy": float(accuracy[-1]) if len(accuracy) else None,
        "loss_at_shortest": run.loss_at("train_seconds", end_of_shortest, run.split),
    }


def summary(runs: Sequence[Run]) -> list[Row]:
    """The table: one row a run, and for each set-up of several seeds a row of means."""
    end, rows = shortest(runs, "train_seconds"), []
    for seeds in group(runs):
        of_runs = [Row(run.name, run.label, figures(run, end), split=run.split) for run in seeds]
        rows += of_runs
        if len(seeds) > 1:
            means, spread = {}, {}
            for key in FIGURES:
                values = [row.figures[key] for row in of_runs]
                known = [value for value in values if value is not None]
                means[key], spread[key] = mean_and_spread(known) if len(known) == len(values) else (None, 0.0)
            split = "val" if all(run.split == "val" for run in seeds) else "train"
            rows.append(Row(f"mean of {len(seeds)} seeds", seeds[0].label, means, spread, split))
    return rows


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the sample; 0 for one value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def remarks(runs: Sequence[Run]) -> list[str]:
    """What to know before comparing these runs."""
    notes = []
    for run in runs:
        if not run.val:
            notes.append(f"{run.name} has no val points: its train loss is used, averaged over 2 % of the run.")
        for split, columns in (("train", run.train), ("val", run.val)):
            bad = ~np.isfinite(columns.get("loss", np.empty(0)))
            if bad.any():
                notes.append(f"{run.name}: the {split} loss is not finite from step {columns['step'][bad][0]:,.0f} on "
                             f"({bad.sum():,} of {len(bad):,} points).")
    if data_differs(runs):
        notes.append("These runs read different data or another tokenizer: their losses cannot be compared.")
    if devices_differ(runs):
        notes.append("These runs were trained on different devices: their times cannot be compared.")
    return notes


def data_differs(runs: Sequence[Run]) -> bool:
    """Whether the runs' losses are over different tokens."""
    data = [run.config.get("data", {}) for run in runs]
    corpora = {run.environment.get("corpus_checksum") for run in runs}
    if None in corpora:
        corpora = {d.get("source") for d in data}
    return len(corpora) > 1 or len({d.get("tokenizer") for d in data}) > 1


def devices_differ(runs: Sequence[Run]) -> bool:
    """Whether the runs' times are of different machines."""
    return len({json.dumps(run.environment.get("devices")) for run in runs}) > 1


def headline(runs: Sequence[Run]) -> str:
    """Which set-up has the lower loss after equal steps and after equal training time; empty where not known."""
    setups = group(runs)
    if len(setups) < 2 or data_differs(runs):
        return ""
    split = "val" if all(run.val for run in runs) else "train"
    words = "lower" if len(setups) == 2 else "lowest"
    sentences = []
    for axis, place in (("step", "After {:,.0f} steps"), ("train_seconds", "After {:,.1f} s of training")):
        if axis == "train_seconds" and devices_differ(runs):
            continue
        where = shortest(runs, axis)
        losses = [[run.loss_at(axis, where, split) for run in seeds] for seeds in setups]
        if not all(loss is not None and np.isfinite(loss) for seeds in losses for loss in seeds):
            continue
        ranked = sorted((*mean_and_spread([loss for loss in seeds if loss is not None]), label)
                        for seeds, label in zip(losses, setup_labels(setups), strict=True))
        (best, best_spread, best_label), (next_, next_spread, next_label) = ranked[:2]
        numbers = [f"{mean:.4f}" + (f" ± {spread:.4f}" if spread else "")
                   for mean, spread in ((best, best_spread), (next_, next_spread))]
        if next_ - best <= best_spread + next_spread:
            claim = (f"the {split} losses of {best_label} ({numbers[0]}) and {next_label} ({numbers[1]}) are within "
                     "the spread of seeds")
        else:
            claim = f"{best_label} has the {words} {split} loss: {numbers[0]}, against {numbers[1]} of {next_label}"
        sentences.append(f"{place.format(where)}, {claim}.")
    if sentences and all(len(seeds) == 1 for seeds in setups):
        sentences.append("One seed each: how much the loss varies from seed to seed is not known.")
    return " ".join(sentences)


def colour(attention: str) -> str:
    """The colour of an attention mode, the same on every page; other modes get a hue from their name."""
    if attention in COLOURS:
        return COLOURS[attention]
    hue, lightness = hashlib.sha256(attention.encode()).digest()[:2]
    red, green, blue = colorsys.hls_to_rgb(hue / 256, 0.3 + 0.3 * lightness / 256, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def dashes(attentions: Sequence[str]) -> list[str]:
    """A dash pattern for each, different for those of the same attention."""
    return [list(DASHES)[list(attentions[:i]).count(attention) % len(DASHES)] for i, attention in enumerate(attentions)]


def decimate(count: int) -> np.ndarray:
    """Indices of the points drawn of ``count``: ``MAX_POINTS`` at most, even on a linear and on a logarithmic axis."""
    if count <= MAX_POINTS:
        return np.arange(count)
    even = np.linspace(0, count - 1, MAX_POINTS * 2 // 3)
    early = np.geomspace(1, count, MAX_POINTS // 3) - 1
    return np.unique(np.concatenate([even, early]).astype(int))


def numbers(values: np.ndarray, decimals: int) -> list[float | int | None]:
    """Rounded for JSON, which knows no NaN: a gap in the curve is null."""
    return [None if not np.isfinite(value) else round(value, decimals) if decimals else round(value)
            for value in values.tolist()]


def figure(runs: Sequence[Run]) -> dict[str, Any]:
    """The Plotly figure as plain JSON values: for each run a faint curve of every step's train loss, its mean, and val
    points; buttons for the x axis and for logarithmic axes."""
    traces: list[dict[str, Any]] = []
    xs: dict[str, list[list[float | int | None]]] = {axis: [] for axis in AXES}
    for run, dash in zip(runs, dashes([run.attention for run in runs]), strict=True):
        line = {"color": colour(run.attention), "dash": dash}
        shared = {"type": "scatter", "legendgroup": run.name, "name": html.escape(f"{run.label} · {run.name}")}
        drawn = []
        if run.train:
            faint = {"opacity": 0.18, "line": line | {"width": 1, "dash": "solid"}, "hoverinfo": "skip"}
            drawn.append((run.train, run.train["loss"], faint | {"mode": "lines", "showlegend": False}))
            drawn.append((run.train, run.smooth_train_loss, {"mode": "lines", "line": line | {"width": 2}}))
        if run.val:
            marker = {"color": line["color"], "symbol": DASHES[dash][1], "size": 7,
                      "line": {"color": "white", "width": 1}}
            drawn.append((run.val, run.val["loss"], {"mode": "markers", "marker": marker, "showlegend": not run.train}))
        for columns, loss, look in drawn:
            kept = decimate(len(loss))
            missing = np.full(len(loss), np.nan)
            for axis in AXES:
                xs[axis].append(numbers(columns[axis][kept], 3 if axis == "train_seconds" else 0))
            trace = shared | look | {"x": xs["step"][-1], "y": numbers(loss[kept], 5)}
            if look.get("hoverinfo") != "skip":
                rate = columns.get("learning_rate", missing)[kept]
                trace["customdata"] = list(zip(xs["step"][-1], xs["train_seconds"][-1], numbers(rate, 9), strict=True))
                rate_text = "<br>learning rate %{customdata[2]:.3~g}" if np.isfinite(rate).any() else ""
                trace["hovertemplate"] = (
                    f"<b>{shared['name']}</b><br>{'val' if columns is run.val else 'train'} loss %{{y:.4f}}"
                    f"<br>step %{{customdata[0]:,}}<br>%{{customdata[1]:,.1f}} s of training{rate_text}<extra></extra>")
            traces.append(trace)
    return {"data": traces, "layout": layout(xs, loss_range(runs, ("train", "val")))}


def positions_figure(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The Plotly figure of the loss by tokens of context seen, a curve for each context that evaluate.py was given;
    None where it was called for none of the runs."""
    traces = []
    for run, dash in zip(runs, dashes([run.attention for run in runs]), strict=True):
        for entry in run.evaluations:
            parts = entry["positions"]
            name = html.escape(f"{run.label} · {run.name}, context {entry['context']:,}"
                               + (f", {entry['corpus']}" if len({e["corpus"] for e in run.evaluations}) > 1 else ""))
            traces.append({
                "type": "scatter", "mode": "lines+markers", "name": name,
                "line": {"color": colour(run.attention), "dash": dash, "width": 2},
                "marker": {"symbol": DASHES[dash][1], "size": 6},
                # A bin of a logarithmic axis is drawn at its middle.
                "x": numbers(np.sqrt([part["first"] * part["last"] for part in parts]), 2),
                "y": numbers(np.array([part["loss"] for part in parts], float), 5),
                "text": [f"{part['first']:,} to {part['last']:,} tokens" for part in parts],
                "hovertemplate": f"<b>{name}</b><br>%{{text}}<br>loss %{{y:.4f}}<extra></extra>"})
    if not traces:
        return None
    look = layout({axis: [] for axis in AXES}, (0.0, 1.0))
    del look["updatemenus"], look["yaxis"]["range"]
    look["xaxis"] |= {"type": "log", "title": {"text": "tokens of context seen"}}
    return {"data": traces, "layout": look | {"margin": look["margin"] | {"t": 12}}}


def loss_range(runs: Sequence[Run], splits: Sequence[str]) -> tuple[float, float]:
    """Losses to show at first: from the lowest to where the first 3 % of a run have brought it, so that the fall of the
    first steps, and a run that diverges, do not press all others together."""
    losses = [run.curve("step", split)[1] for run in runs for split in splits]
    curves = [loss[np.isfinite(loss)] for loss in losses if np.isfinite(loss).any()]
    if not curves:
        return 0.0, 1.0
    low = min(loss.min() for loss in curves)
    high = max(loss[min(len(loss) // 33 + 1, len(loss) - 1)] for loss in curves)
    margin = 0.05 * (high - low) or 0.05
    return float(low - margin), float(high + margin)


def layout(xs: dict[str, list[list[float | int | None]]], losses: tuple[float, float]) -> dict[str, Any]:
    """The figure's layout.

    Args:
        xs: for each of ``AXES`` the x values of every trace.
        losses: range of the loss axis while it is linear; logarithmic, it shows all.
    """
    menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
            "showactive": True, "bgcolor": "white", "bordercolor": "#c8ccd2", "font": {"size": 12}}
    scales = {name: [{"label": f"{name} {scale}", "method": "relayout",
                      "args": [{f"{name}axis.type": scale, f"{name}axis.autorange": True}]}
                     for scale in ("linear", "log")] for name in "xy"}
    scales["y"][0]["args"] = [{"yaxis.type": "linear", "yaxis.range": list(losses)}]
    quantities = [{"label": button, "method": "update",
                   "args": [{"x": xs[axis]}, {"xaxis.title.text": title, "xaxis.autorange": True}]}
                  for axis, (button, title) in AXES.items()]
    axis = {"gridcolor": "#eceef1", "zeroline": False, "linecolor": "#8a9099", "showline": True, "ticks": "outside",
            "automargin": True}
    return {
        "updatemenus": [menu | {"buttons": quantities, "pad": {"b": 48}},
                        menu | {"buttons": scales["x"], "pad": {"b": 10}},
                        menu | {"buttons": scales["y"], "pad": {"b": 10, "l": 130}}],
        "xaxis": axis | {"type": "linear", "title": {"text": AXES["step"][1]}},
        "yaxis": axis | {"type": "linear", "title": {"text": "loss (nats per token)"}, "range": list(losses)},
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "margin": {"l": 56, "r": 12, "t": 92, "b": 60},
        "hovermode": "closest", "plot_bgcolor": "white", "paper_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#23272e"},
    }


PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #23272e; background: white; max-width: 1200px; margin: 0 auto;
       padding: 20px 16px 40px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; max-width: 900px; overflow-wrap: anywhere; }
.note { color: #5b626c; font-size: 13px; }
#figure { height: 620px; margin: 16px 0 4px; }
#positions { height: 420px; margin: 16px 0 4px; }
.table { overflow-x: auto; margin: 20px 0 12px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 7px; border-bottom: 1px solid #e3e6ea; text-align: right; }
th { vertical-align: bottom; min-width: 64px; font-weight: 600; border-bottom-color: #8a9099; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td:first-child { white-space: nowrap; }
tr.mean td { background: #f5f6f8; font-weight: 600; }
</style>
<script>$plotly</script>
</head>
<body>
<h1>$title</h1>
$headline
<div id="figure"></div>
<p class="note">Lines: train loss, averaged over 2 % of the run; faint: of every step. Points: val loss. The loss
of the first steps lies above the picture: a double click in it, or the logarithmic scale, shows all. A click on a run
in the legend hides it, a double click leaves it alone.</p>
$positions
<div class="table"><table>
$table
</table></div>
$notes
<script id="figure-data" type="application/json">$figure</script>
<script>
const figure = JSON.parse(document.getElementById("figure-data").textContent);
const config = {
  responsive: true, displaylogo: false, displayModeBar: window.innerWidth > 700,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};
Plotly.newPlot("figure", figure.data, figure.layout, config);
const positions = document.getElementById("positions-data");
if (positions) {
  const drawn = JSON.parse(positions.textContent);
  Plotly.newPlot("positions", drawn.data, drawn.layout, config);
}
</script>
</body>
</html>
""")


POSITIONS = string.Template("""<div id="positions"></div>
<p class="note">Loss of val tokens by how many tokens of context each was predicted from (evaluate.py). A model whose
curve goes on falling uses its context.</p>
<script id="positions-data" type="application/json">$figure</script>""")


def as_script(value: Any) -> str:
    """JSON for the inside of a script element: a run's name could hold "</script>"."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def page(runs: Sequence[Run], title: str = "", note: str = "") -> str:
    """The whole page as HTML, plotly.js included: the same runs give the same text. ``note`` stands below the table."""
    from plotly.offline import get_plotlyjs

    rows = summary(runs)
    shown = shown_headings(rows)
    table = [f"<tr>{''.join(f'<th>{heading}</th>' for heading in shown)}</tr>"]
    for row in rows:
        cells = row.cells()
        table.append(f'<tr{" class=mean" if row.spread else ""}>'
                     f"{''.join(f'<td>{html.escape(cells[heading])}</td>' for heading in shown)}</tr>")
    lead, positions = headline(runs), positions_figure(runs)
    return PAGE.substitute(
        title=html.escape(title or default_title(runs)),
        headline=f"<p>{html.escape(lead)}</p>" if lead else "",
        table="\n".join(table),
        notes="\n".join(f'<p class="note">{html.escape(text)}</p>'
                        for text in [table_note(runs), *remarks(runs), note] if text),
        positions=POSITIONS.substitute(figure=as_script(positions)) if positions else "",
        figure=as_script(figure(runs)),
        plotly=get_plotlyjs(),
    )


def default_title(runs: Sequence[Run]) -> str:
    """The modes compared."""
    return "Runs compared: " + "; ".join(dict.fromkeys(run.attention for run in runs))


def table_note(runs: Sequence[Run]) -> str:
    """What the table's last column and its spreads mean."""
    note = f"The shortest run ended after {shortest(runs, 'train_seconds'):,.1f} s of training."
    if any(len(seeds) > 1 for seeds in group(runs)):
        note += " Runs that differ only in their seed are averaged; ± is the standard deviation over them."
    return note


def shown_headings(rows: list[Row]) -> list[str]:
    """The headings of the columns in which any row has a value."""
    return ["run", "attention", *(heading for key, (heading, _) in FIGURES.items()
                                  if any(row.figures[key] is not None for row in rows))]


def print_table(rows: list[Row]) -> None:
    """The table on standard output; runs side by side where a line each would not fit the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Not a terminal: nothing to fit, and a wrapped line is hard to read by a program.
    console = Console(width=None if sys.stdout.isatty() else 300)
    shown, cells = shown_headings(rows), [row.cells() for row in rows]
    tables = {}
    for across in (False, True):
        lines = [shown, *([row[heading] for heading in shown] for row in cells)]
        lines = [list(line) for line in zip(*lines, strict=True)] if across else lines
        tables[across] = Table(*(escape(heading) for heading in lines[0]))
        for column in tables[across].columns[1 if across else 2:]:
            column.justify = "right"
        for line in lines[1:]:
            tables[across].add_row(*(escape(cell) for cell in line))
    fits = console.measure(tables[False], options=console.options.update(max_width=10_000)).maximum <= console.width
    console.print(tables[not fits])


def picture(runs: Sequence[Run], path: Path, title: str = "") -> None:
    """Draw val loss (train where a run has none) against steps and against training time into a PNG or SVG file: a
    colour a mode, seeds as thin lines and their mean as a thick one."""
    import matplotlib
    from matplotlib.figure import Figure

    setups = group(runs)
    split = "val" if all(run.val for run in runs) else "train"
    with matplotlib.rc_context({"svg.hashsalt": "lineargpt", "axes.spines.top": False, "axes.spines.right": False}):
        drawing = Figure(figsize=(10, 4.2), layout="constrained")
        panels = drawing.subplots(1, 2, sharey=True)
        for panel, (axis, name) in zip(panels, (("step", "steps"), ("train_seconds", "training time (seconds)")),
                                       strict=True):
            for seeds, label, dash in zip(setups, setup_labels(setups), dashes([s[0].attention for s in setups]),
                                          strict=True):
                look = {"color": colour(seeds[0].attention), "linestyle": DASHES[dash][0]}
                curves = [run.curve(axis, split) for run in seeds]
                for x, loss in curves if len(seeds) > 1 else ():
                    panel.plot(x, loss, linewidth=0.8, alpha=0.45, **look)
                panel.plot(*mean_curve(curves), linewidth=2.2, **look,
                           label=label if len(seeds) == 1 else f"{label}, mean of {len(seeds)} seeds")
            panel.set_xlabel(name)
            panel.grid(color="#eceef1")
        panels[0].set_ylim(loss_range(runs, (split,)))
        panels[0].set_ylabel(f"{split} loss (nats per token)")
        panels[1].legend(frameon=False)
        if title:
            drawing.suptitle(title)
        kind = path.suffix[1:].lower()
        metadata = {"Date": None} if kind == "svg" else None
        write(path, lambda file: drawing.savefig(file, format=kind, dpi=150, metadata=metadata))


def mean_curve(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves (x, loss) where all are defined, each interpolated linearly at the points of all."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= first) & (points <= last)]
    return points, np.mean([np.interp(points, x, loss) for x, loss in curves], axis=0)


def write(path: Path, save: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place and rename it, so that a page that was there before is whole at every moment."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            save(file)
        beside.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror}); name another file") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


@dataclass(frozen=True)
class Options:
    """The command line."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, as train.py made them."""
    out: Path = Path("report.html")
    """The page."""
    png: Path | None = None
    """Also draw val loss against steps and training time into this PNG or SVG file."""
    title: str = ""
    """Title of the page and the picture."""
    note: str = ""
    """A sentence of your own below the page's table."""


def compare(options: Options) -> int:
    """Read the runs, print the table, write the page. Returns 1 if a run had to be left out, else 0.

    Raises:
        ConfigError: a folder that is no run, or none named; nothing was written.
        RunError: none of the runs can be drawn.
        OSError: an output cannot be written.
    """
    if not options.runs:
        raise ConfigError("name one or more run folders: python compare.py runs/softmax runs/chunked")
    if options.png and options.png.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--png {options.png}: expected a name that ends in .png or .svg")
    paths = [path.resolve() for path in options.runs]
    runs: list[Run] = []
    notes: list[str] = []
    damaged: list[RunError] = []
    for given, path in zip(options.runs, paths, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"{given}: named twice; name each run once")
        try:
            with warnings.catch_warnings(record=True, category=UserWarning) as caught:
                warnings.simplefilter("always")
                run = load_run(given)
        except RunError as error:
            damaged.append(error)
            continue
        notes += [str(warning.message) for warning in caught]
        namesakes = sum(other.name == path.name for other in paths)
        runs.append(run if namesakes == 1 else replace(run, name=str(given)))
    if not runs:
        raise RunError("; ".join(map(str, damaged)))
    for note in [*(f"left out: {error}" for error in damaged), *notes, *remarks(runs)]:
        print(note, file=sys.stderr)

    print_table(summary(runs))
    print("\n".join(filter(None, [headline(runs), table_note(runs)])))
    html_page = page(runs, options.title, options.note).encode()
    write(options.out, lambda file: file.write(html_page))
    print(f"page: {options.out}")
    if options.png:
        picture(runs, options.png, options.title)
        print(f"picture: {options.png}")
    return 1 if damaged else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 for failures, among them a run that had to be left out."""
    options = tyro.cli(Options, args=argv, prog="compare.py", description=__doc__)
    try:
        return compare(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, RunError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
