"""The comparison of runs: what the table, the page, the picture and the files of compare.py are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from comparison.remarks import remarks
from comparison.runs import Run, Setup, differences, group
from comparison.table import Column, Row, TimesToLoss, columns, rows, times_to_loss
from comparison.verdict import verdict


@dataclass(frozen=True)
class Comparison:
    """Runs, and what they show."""

    runs: tuple[Run, ...]
    """In the order in which they were named; their names are unique."""
    setups: tuple[Setup, ...]
    """The runs, grouped where they differ in nothing but the seed."""
    verdict: tuple[str, ...]
    """Sentences on top: which set-up is lower at the same number of steps, which at the same training time, where the
    curves cross; or why nothing is claimed. Empty for a single set-up."""
    remarks: tuple[str, ...]
    """Warnings: what to know before comparing these runs."""
    columns: tuple[Column, ...]
    """Of the table: those in which any row has a value."""
    rows: tuple[Row, ...]
    """Of the table: one a run, and one of means for each set-up of several seeds, after its runs."""
    times: TimesToLoss | None
    """Training time to reach given val losses; None where no run has val points that fall."""
    differences: dict[str, list[Any]]
    """Fields of the config in which the runs differ, by dotted name: the value of each run, None where it has none."""

    def as_json(self, figures: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """The verdict, the remarks and the table, and the figures of a study where there are some; numbers in full,
        null where unknown or not finite."""
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
        """The modes compared."""
        return "Runs compared: " + "; ".join(dict.fromkeys(run.attention for run in self.runs))


def compare(runs: Sequence[Run]) -> Comparison:
    """Everything there is to say of runs whose names are unique (see :func:`comparison.runs.name_runs`)."""
    setups, times = group(runs), times_to_loss(runs)
    table = rows(runs, setups, times)
    return Comparison(tuple(runs), tuple(setups), tuple(verdict(setups)), tuple(remarks(runs)),
                      tuple(columns(table, times)), tuple(table), times, differences(runs))
