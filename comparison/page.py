"""The page of a comparison: one HTML file without network access. This module makes its payload; page.js draws it."""

import base64
import html
import json
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparison import Comparison
from comparison.curves import Columns
from comparison.figures import MAX_TICKS, Figure
from comparison.runs import AXES, Run, scored, shown_labels
from comparison.style import DASHES, colour, dashes
from comparison.table import TimesToLoss, table_note

COLUMNS = ("step", "tokens", "train_seconds", "wall_seconds", "loss", "learning_rate", "gradient_norm", "accuracy",
           "error_rate", "lines")
"""Columns of a curve. FLOPs are proportional to tokens, and bits to losses: the page multiplies."""
MAX_SAMPLE = 4000


def page(comparison: Comparison, *, figures: Sequence[Figure] = (), title: str = "", note: str = "",
         reload_seconds: float | None = None) -> str:
    """The whole page as HTML, including plotly.js. The output is deterministic.

    Args:
        comparison: the runs.
        figures: figures of the runs' study, shown above the curves.
        title: title of the page. Empty: the modes compared.
        note: text at the end.
        reload_seconds: for a page that is updated: seconds without interaction until it reloads itself, keeping its
            settings. None: no reload.
    """
    from plotly.offline import get_plotlyjs

    part = {kind: Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")
            for kind in ("html", "css", "js")}
    # A run's name could contain "</script>".
    as_json = json.dumps(payload(comparison) | {"study": [figure_payload(figure) for figure in figures], "note": note,
                                                "reload_seconds": reload_seconds},
                         separators=(",", ":"), allow_nan=False)
    return string.Template(part["html"]).substitute(
        title=html.escape(title or comparison.default_title), style=part["css"], plotly=get_plotlyjs(),
        payload=as_json.replace("<", "\\u003c"), script=part["js"])


def payload(comparison: Comparison) -> dict[str, Any]:
    """The data of page.js as JSON values: texts unchanged, numeric columns as :func:`packed`. Runs are referred to by
    index."""
    runs, setups = comparison.runs, comparison.setups
    index = {run.name: i for i, run in enumerate(runs)}
    lines, symbols = dashes([setup.attention for setup in setups]), [symbol for _, symbol, _ in DASHES.values()]
    return {
        "axes": [{"key": key, "button": button, "title": text} for key, (button, text) in AXES.items()],
        # Markers of neighbours differ, and so do those of set-ups of one mode beyond the number of dashes.
        "setups": [{"label": setup.label, "runs": [index[run.name] for run in setup.runs],
                    "averaged": [index[run.name] for run in setup.lasting],
                    "colour": colour(setup.attention), "dash": lines[i], "symbol": symbols[(i + i // 4) % 4]}
                   for i, setup in enumerate(setups)],
        "runs": [run_payload(run) for run in runs],
        "scored": scored(runs),
        "bits": " or ".join(sorted({run.bits.replace("_", " ") for run in runs})) or "bits per byte",
        "abilities": [figure_payload(figure) for figure in comparison.abilities],
        "verdict": comparison.verdict,
        "warnings": comparison.remarks,
        "figures": figures_table(comparison, index),
        "times": times_table(comparison.times, runs),
        "configs": [{"field": field, "values": [as_text(value) for value in values]}
                    for field, values in comparison.differences.items()],
    }


def figure_payload(figure: Figure) -> dict[str, Any]:
    """A figure of a study, with the style of its lines."""
    patterns = ["dash" if line.fitted is not None else dash for line, dash in zip(
        figure.lines, dashes([line.attention for line in figure.lines]), strict=True)]
    found = figure.as_dict()
    return found | {
        "lines": [line | {"colour": own, "dash": dash, "symbol": DASHES[dash][1]}
                  for line, own, dash in zip(found["lines"], figure.colours, patterns, strict=True)],
        "values": figure.values, "ticks": len(figure.values) <= MAX_TICKS, "zero": figure.zero,
        "grid": figure.grid, "legend": figure.has_legend, "headings": figure.headings, "rows": figure.rows,
    }


def run_payload(run: Run) -> dict[str, Any]:
    """Curves, figures and texts of a run; None for missing ones."""
    columns = run.train.points or run.val.points
    return {
        "name": run.name,
        "context": run.context,
        "size": run.size,
        "points": packed(run.train.points),
        "means": packed(run.train.means),
        "val": packed(run.val.points if run.val.is_whole else run.val.means),
        "annealed": packed(run.lengths),
        "flops_per_token": finite(columns["flops"][-1] / columns["tokens"][-1]) if "flops" in columns else None,
        "bits_per_nat": None if run.units_per_token is None else 1 / (math.log(2) * run.units_per_token),
        "tokens_per_second": finite(run.train.median_speed),
        "memory": finite(run.peak_bytes),
        "evaluations": [{"context": entry["context"], "corpus": entry["corpus"]}
                        | {key: [finite(part[key]) for part in entry["positions"]] for key in ("first", "last", "loss")}
                        for entry in run.evaluations],
        "sample": None if run.sample is None else shortened(run.sample),
        "sample_image": None if run.sample_image is None else (
            f"data:image/png;base64,{base64.b64encode(run.sample_image).decode()}"),
        "sample_step": run.sample_step,
    }


def packed(columns: Columns) -> dict[str, dict[str, str]] | None:
    """Columns as base64 of little-endian numbers, in the smallest type that keeps integers exact and other values to 7
    digits. NaN is a gap. None without columns."""
    found = {}
    for name in COLUMNS:
        if name not in columns:
            continue
        values = columns[name]
        whole = np.isfinite(values).all() and (values == np.round(values)).all()
        kind = "f4" if not whole else "i4" if np.abs(values).max(initial=0) < 2**31 else "f8"
        with np.errstate(over="ignore"):  # overflow is infinite, and a gap
            data = values.astype(f"<{kind}").tobytes()
        found[name] = {"type": kind, "base64": base64.b64encode(data).decode()}
    return found or None


def finite(value: float | None) -> float | None:
    """None instead of values that JSON lacks."""
    return float(value) if value is not None and math.isfinite(value) else None


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE else text[:MAX_SAMPLE] + "…"


def as_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def figures_table(comparison: Comparison, index: dict[str, int]) -> dict[str, Any]:
    """The table of final figures, without the times to reach given losses."""
    columns = [column for column in comparison.columns if not column.key.startswith("seconds_to_")]
    members = [[index[run.name] for run in setup.runs] for setup in comparison.setups]
    runs_of_rows = [row_runs for setup, seeds in zip(comparison.setups, members, strict=True)
                    for row_runs in [*([i] for i in seeds), *([seeds] if len(setup.lasting) > 1 else [])]]
    return {"headings": ["run", "attention", *(column.heading for column in columns)],
            "rows": [{"cells": list(row.cells(columns).values()), "runs": row_runs, "mean": row.seeds > 1}
                     for row, row_runs in zip(comparison.rows, runs_of_rows, strict=True)],
            "note": table_note(comparison.rows, comparison.setups)}


def times_table(times: TimesToLoss | None, runs: Sequence[Run]) -> dict[str, Any]:
    """Training time to reach each loss, with the shortest marked; no rows if unknown."""
    if times is None:
        return {"headings": [], "rows": [], "note": ""}
    seconds, shown = [times.seconds[run.name] for run in runs], shown_labels(runs)
    shortest = [min((value for value in column if value is not None), default=None)
                for column in zip(*seconds, strict=True)]
    return {"headings": ["run", "attention", *(f"val loss {level:g}" for level in times.levels)],
            "rows": [{"cells": [run.name, shown[run.label],
                                *("–" if value is None else f"{value:,.1f} s" for value in row)],
                      "runs": [i],
                      "best": [2 + j for j, value in enumerate(row) if value is not None and value == shortest[j]]}
                     for i, (run, row) in enumerate(zip(runs, seconds, strict=True))],
            "note": "Training time until the val loss first reached each level, interpolated linearly between "
                    "evaluations. Bold: the shortest. –: not reached."}
