"""Standings S1: which attention has the lower loss for the compute?

    python sweep.py studies/standings.py --out runs/s1 --quick
    python sweep.py studies/standings.py --out runs/s1 --rows kda --rungs XS,S
    python sweep.py studies/standings.py --out runs/s1 --rungs XS,S
    python sweep.py studies/standings.py --out runs/s1-books --data.dir data/corpus/books --rungs XS,S

docs/standings.md has the protocol: models of three sizes on Python code, each at its best learning rate, with seeds.
``--rows`` takes arms of comparison/standings.py, or modes; ``--rungs`` the sizes. Without it M runs too, which takes
hours of a core for each row. Rates are searched first, and the other runs follow from them; those of a size that is not
named come from the committed rows too. ``--data.dir``, a folder of token files, or ``--data.source`` gives standings of
another text, S1-NAME. The quick form has 60 steps of XS for three arms, which says nothing but that they run.
"""

from collections.abc import Sequence
from dataclasses import replace

from comparison import standings, standings_figures, standings_rows
from comparison.figures import Figure
from comparison.runs import Run
from comparison.standings import RUNGS, VARIANTS, Place
from comparison.study import Variation

ARMS = standings.ARMS | VARIANTS
"""What --rows may name."""
QUICK = ("softmax-parts", "gated_delta", "kda")
QUICK_FIELDS = {"train.steps": 60, "train.eval_every": 30, "train.eval_batches": 8, "optimizer.warmup_steps": 6}


def get_runs(quick: bool, rows: Sequence[str] | None = None, rungs: Sequence[str] | None = None,
             data_dir: str | None = None, data_source: str | None = None,
             finished: Sequence[Run] = (), expected: bool = False) -> list[Variation]:
    data = {name: value for name, value in {"data.dir": data_dir, "data.source": data_source}.items()
            if value is not None}
    if quick:
        runs = [Place("XS", arm, standings.FIRST_RATES[1], 0).variation(data) for arm in rows or QUICK]
        return [replace(run, fields={**run.fields, **QUICK_FIELDS}, evaluation=(), rung=None) for run in runs]
    arms, rungs = rows or [*standings.ARMS], rungs or [*RUNGS]
    before = {} if data else standings_rows.rows_of(standings_rows.RESULTS / standings.VERSION)
    known = standings.losses_of([run for arm in arms if arm in before for run in standings_rows.runs_of(before[arm])])
    losses = {place: loss for place, loss in known.items() if place.rung not in rungs} | standings.losses_of(finished)
    places = standings.expected if expected else standings.places
    return [place.variation(data) for place in places(arms, rungs, losses)]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return standings_figures.figures(runs)
