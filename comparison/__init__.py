"""The comparison of runs: the data behind the table, the page, the plots and the files of compare.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from comparison import abilities, token_classes
from comparison.figures import Figure
from comparison.remarks import remarks
from comparison.runs import Run, Setup, differences, group
from comparison.table import Column, Row, TimesToLoss, columns, rows, times_to_loss
from comparison.verdict import verdict


@dataclass(frozen=True)
class Comparison:
    runs: tuple[Run, ...]
    """In the given order; their names are unique."""
    setups: tuple[Setup, ...]
    """The runs, grouped by everything but the seed."""
    verdict: tuple[str, ...]
    """Summary: the lowest set-up at equal steps and at equal training time, and where curves cross; or why there is no
    comparison. Empty for a single set-up."""
    remarks: tuple[str, ...]
    columns: tuple[Column, ...]
    """Columns of the table in which any row has a value."""
    rows: tuple[Row, ...]
    """Rows of the table: one per run, and one of means after the runs of each set-up with several seeds."""
    times: TimesToLoss | None
    """Training time to reach given val losses; None if no val loss decreases."""
    abilities: tuple[Figure, ...]
    """Figures of accuracy by synthetic task, and of differences in loss by class of token; empty without these."""
    differences: dict[str, list[Any]]
    """Fields of the config in which the runs differ, by dotted name: the value of each run, None if it has none."""

    def as_json(self, figures: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """The verdict, the remarks, the table and the figures of a study, with full precision; null for unknown or
        non-finite values."""
        keys = [column.key for column in self.columns]
        return orjson.dumps({
            "verdict": self.verdict, "remarks": self.remarks,
            "setups": [{"name": setup.label, "size": setup.size, "context": setup.context,
                        "runs": [run.name for run in setup.runs]} for setup in self.setups],
            "rows": [{"run": row.name, "attention": row.attention, "seeds": row.seeds}
                     | {key: row.figures[key] for key in keys}
                     | ({"deviation": {key: row.spread.get(key) for key in keys}} if row.seeds > 1 else {})
                     for row in self.rows],
            "config_differences": {name: dict(zip([run.name for run in self.runs], values, strict=True))
                                   for name, values in self.differences.items()},
        } | ({"figures": figures} if figures else {}), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @property
    def default_title(self) -> str:
        return "Runs compared: " + "; ".join(dict.fromkeys(run.attention for run in self.runs))


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs with unique names (see :func:`comparison.runs.name_runs`)."""
    setups = group(runs)
    times = times_to_loss(setups)
    table = rows(runs, setups, times)
    return Comparison(tuple(runs), tuple(setups), tuple(verdict(setups)), tuple(remarks(runs)),
                      tuple(columns(table, times)), tuple(table), times,
                      (*abilities.figures(runs), *token_classes.figures(setups)), differences(runs))
