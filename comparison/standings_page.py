"""The tables of docs/standings.md, from the rows of the standings alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comparison.runs import Run
from comparison.standings import CONTEXT, RUNGS
from comparison.standings_figures import (
    ArmAtRung,
    RunsByArm,
    Speeds,
    arms_at,
    count_compared,
    equal_compute_heading,
    gain_in_flops,
    runs_at_best_rate,
    training_speed,
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
    by_arm = runs_at_best_rate(runs)
    tables = [_table(arms, by_arm, speeds) for rung in RUNGS if (arms := arms_at(rung, by_arm))]
    return "\n".join([before + begin, *tables, end + after])


def _table(arms: Sequence[ArmAtRung], by_arm: RunsByArm, speeds: Speeds) -> str:
    rung = RUNGS[arms[0].rung]
    tokens = f"{rung.steps * rung.batch_size * CONTEXT:.2e}".replace("e+0", "e")
    headings = ("attention", equal_compute_heading(arms), MINUS, f"loss after {tokens} tokens", MINUS,
                f"median stretch, {MINUS}", "gain in FLOPs", "training, tokens/s", f"a token after {SAMPLED_AT:,}, ms",
                f"state at {CONTEXT:,}, KiB")
    rows = [headings, ("---",) * 7 + ("---:",) * 3,
            *(_cells(each, count_compared(arms), by_arm, speeds) for each in arms)]
    size = f"{rung.name}, {rung.parameters / 1e6:.1f} million parameters outside of the embedding"
    return "\n".join([f"{size}{', one seed' if rung.seeds == 1 else ''}:", "",
                      *(f"| {' | '.join(cells)} |" for cells in rows), ""])


def _cells(each: ArmAtRung, compared: int, by_arm: RunsByArm, speeds: Speeds) -> list[str]:
    training = training_speed(speeds, each.arm, each.rung)
    sampling = speeds.get((each.arm, each.rung, "position", SAMPLED_AT))
    state = state_bytes(each.runs[0].config)
    return [f"`{each.arm}`", _plus_minus(each.equal), _bold_if_significant(each.equal_differences, compared),
            _plus_minus(each.final), _bold_if_significant(each.final_differences, compared),
            _bold_if_significant(each.median_differences, compared),
            gain_in_flops(each.arm, each.rung, by_arm),
            "–" if math.isnan(training) else f"{training:,.0f}", "–" if sampling is None else f"{1e3 / sampling:.3f}",
            "–" if state is None else f"{state / 1024:,.0f}"]


def _plus_minus(by_seed: Mapping[Any, float]) -> str:
    """The mean over seeds ± half the width of its interval."""
    values = [*by_seed.values()]
    if not values:
        return "–"
    if not np.isfinite(values).all():
        return "not finite"
    mean, interval = float(np.mean(values)), mean_interval(values)
    return number_text(mean, 3) + ("" if interval is None else f" ± {number_text(interval[1] - mean, 3)}")


def _bold_if_significant(by_seed: Mapping[Any, float], compared: int) -> str:
    """The mean, bold where it is significant with a total confidence of 95 % in all rows of the column."""
    differences = [*by_seed.values()]
    if not differences or not np.isfinite(differences).all():
        return "–"
    shown = significance(float(np.mean(differences)), mean_interval(differences, bonferroni(compared)))
    text = _plus_minus(by_seed)
    return f"**{text}**" if shown in ("lower", "higher") else text
