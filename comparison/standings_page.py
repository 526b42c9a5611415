"""The tables of docs/standings.md, from the rows of the standings alone."""

from collections.abc import Sequence

import numpy as np

from comparison.runs import Run
from comparison.standings import CONTEXT, RUNGS
from comparison.standings_figures import Entry, Speeds, entries, standing
from comparison.standings_rows import state_bytes
from comparison.statistics import bonferroni, mean_interval
from comparison.wording import number_text, significance
from support.errors import ConfigError

BEGIN, END = "<!-- tables of python -m benchmarks.standings -->\n", "<!-- end of the tables -->\n"
"""Lines around the tables."""
LATE = 8192
"""The position of the sampled token whose time is shown."""
MINUS = "minus softmax with the same parts"


def page(text: str, runs: Sequence[Run], speeds: Speeds) -> str:
    """The text of the page with a table for each rung in place of those that it has.

    Args:
        text: of the page.
        runs: of the protocol.
        speeds: tokens a second.

    Raises:
        ConfigError: it lacks the lines around the tables.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page of the standings has no lines {BEGIN.strip()} and {END.strip()}")
    found = standing(runs)
    tables = [_table(rung, *here, speeds) for rung in RUNGS if (here := entries(rung, found))[0]]
    return "\n".join([before + begin, *tables, end + after])


def _table(rung: str, here: Sequence[Entry], compared: int, speeds: Speeds) -> str:
    headings = ("attention", f"loss at {here[0].compute:.2e} FLOPs".replace("e+", "e"), MINUS, "val loss", MINUS,
                "training, tokens/s", f"a token after {LATE:,}, ms", f"state at {CONTEXT:,}, KiB")
    rows = [headings, ("---",) * 5 + ("---:",) * 3, *(_cells(rung, entry, compared, speeds) for entry in here)]
    return "\n".join([f"{rung}, {RUNGS[rung].parameters / 1e6:.1f} million parameters outside of the embedding:", "",
                      *(f"| {' | '.join(cells)} |" for cells in rows), ""])


def _cells(rung: str, entry: Entry, compared: int, speeds: Speeds) -> list[str]:
    losses = [cell for mine, minus in zip(entry.losses, entry.differences, strict=True)
              for cell in (_mean(mine), _difference(minus, compared))]
    training, sampling = (speeds.get((entry.arm, rung, *what)) for what in (("context", CONTEXT), ("position", LATE)))
    state = state_bytes(entry.runs[0])
    return [f"`{entry.arm}`", *losses, "–" if training is None else f"{training:,.0f}",
            "–" if sampling is None else f"{1e3 / sampling:.3f}", "–" if state is None else f"{state / 1024:,.0f}"]


def _mean(values: Sequence[float]) -> str:
    """The mean over seeds, and half of its interval."""
    if not values:
        return ""
    if not np.isfinite(values).all():
        return "not finite"
    mean, interval = float(np.mean(values)), mean_interval(values)
    return number_text(mean, 3) + ("" if interval is None else f" ± {number_text(interval[1] - mean, 3)}")


def _difference(values: Sequence[float], compared: int) -> str:
    """The same, bold where it is significant with a total confidence of 95 % in all rows of the column."""
    shown = values and np.isfinite(values).all() and significance(
        float(np.mean(values)), mean_interval(values, bonferroni(compared))) in ("lower", "higher")
    return f"**{_mean(values)}**" if shown else _mean(values)
