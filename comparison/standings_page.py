"""The tables of docs/standings.md, from the rows of the standings alone."""

from collections.abc import Sequence

import numpy as np

from comparison.runs import Run
from comparison.standings import CONTEXT, RUNGS
from comparison.standings_figures import (
    ArmAtRung,
    Speeds,
    Standing,
    arms_at,
    count_compared,
    equal_compute_heading,
    gain_in_flops,
    standing,
)
from comparison.standings_rows import state_bytes
from comparison.statistics import bonferroni, mean_interval
from comparison.wording import number_text, significance
from support.errors import ConfigError

BEGIN, END = "<!-- tables of python -m benchmarks.standings -->\n", "<!-- end of the tables -->\n"
"""Lines around the tables."""
SAMPLED_AT = 8192
"""The position of the sampled token whose time is shown."""
MINUS = "minus softmax"


def with_tables(text: str, runs: Sequence[Run], speeds: Speeds) -> str:
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
    tables = [_table(rung, found, speeds) for rung in RUNGS if arms_at(rung, found)]
    return "\n".join([before + begin, *tables, end + after])


def _table(rung: str, found: Standing, speeds: Speeds) -> str:
    arms = arms_at(rung, found)
    tokens = f"{RUNGS[rung].steps * RUNGS[rung].batch_size * CONTEXT:.2e}".replace("e+0", "e")
    headings = ("attention", equal_compute_heading(arms), MINUS, f"loss after {tokens} tokens", MINUS,
                f"median stretch, {MINUS}", "gain in FLOPs", "training, tokens/s", f"a token after {SAMPLED_AT:,}, ms",
                f"state at {CONTEXT:,}, KiB")
    rows = [headings, ("---",) * 7 + ("---:",) * 3,
            *(_cells(rung, each, count_compared(arms), found, speeds) for each in arms)]
    size = f"{rung}, {RUNGS[rung].parameters / 1e6:.1f} million parameters outside of the embedding"
    return "\n".join([f"{size}{', one seed' if RUNGS[rung].seeds == 1 else ''}:", "",
                      *(f"| {' | '.join(cells)} |" for cells in rows), ""])


def _cells(rung: str, each: ArmAtRung, compared: int, found: Standing, speeds: Speeds) -> list[str]:
    losses = [cell for mine, minus in zip(each.losses, each.differences, strict=True)
              for cell in (_plus_minus(mine), _bold_if_significant(minus, compared))]
    training = speeds.get((each.arm, rung, "context", CONTEXT))
    sampling = speeds.get((each.arm, rung, "position", SAMPLED_AT))
    state = state_bytes(each.runs[0].config)
    return [f"`{each.arm}`", *losses, _bold_if_significant(each.median_differences, compared),
            gain_in_flops(each.arm, rung, found),
            "–" if training is None else f"{training:,.0f}", "–" if sampling is None else f"{1e3 / sampling:.3f}",
            "–" if state is None else f"{state / 1024:,.0f}"]


def _plus_minus(values: Sequence[float]) -> str:
    """The mean over seeds ± half the width of its interval."""
    if not values:
        return "–"
    if not np.isfinite(values).all():
        return "not finite"
    mean, interval = float(np.mean(values)), mean_interval(values)
    return number_text(mean, 3) + ("" if interval is None else f" ± {number_text(interval[1] - mean, 3)}")


def _bold_if_significant(differences: Sequence[float], compared: int) -> str:
    """The mean, bold where it is significant with a total confidence of 95 % in all rows of the column."""
    if not differences or not np.isfinite(differences).all():
        return "–"
    shown = significance(float(np.mean(differences)), mean_interval(differences, bonferroni(compared)))
    text = _plus_minus(differences)
    return f"**{text}**" if shown in ("lower", "higher") else text
