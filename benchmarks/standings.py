"""Rows of the standings: written from runs, checked, and drawn.

    python -m benchmarks.standings --add runs/s1
    python -m benchmarks.standings --add runs/s1-books --text books
    python -m benchmarks.standings --check kda.json
    python -m benchmarks.standings

``--add`` writes the row of every arm in the folder of studies/standings.py to benchmarks/results/standings/S1/ARM.json.
Rungs that are there already and that the folder does not finish are kept; those that neither finishes are left out, and
named. With ``--text NAME``, for runs on another text than that of S1, it is S1-NAME/ARM.json. ``--check`` checks the
files of rows, such as another's, and adds them: the configs, the corpus, steps, tokens, clocks, bytes, parameters and
FLOPs of every run, that no rate or seed is missing, and that the attention gives the same output whatever tokens
follow. A row that fails is refused: it is not written. Each command then draws the figures and tables of all rows
again, from their files alone. For S1 it also writes the tables of docs/standings.md.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import report
from comparison import standings, standings_figures, standings_page, standings_rows
from comparison.figures import read_figures, write_figures
from comparison.runs import Run
from comparison.standings import Place
from comparison.standings_rows import SPEEDS, Row, read_row, row_of, rows_of, runs_of
from comparison.study import finished_runs
from configs import schema
from configs.schema import Config, flatten, groups_of
from data.documents import BYTES
from models import gpt
from models.parameters import count_parameters
from support import json_files
from support.command import note, status
from support.errors import ConfigError, LineargptError
from support.files import write_text
from training.accounting import flops_per_token
from training.cli import DataFlags, load_config, parse_command_line
from training.step import abstract_model, make_model

PAGE = Path(__file__).parents[1] / "docs" / "standings.md"
"""The page of S1."""
ABILITIES = Path(__file__).parent / "results" / "studies" / "abilities"
"""Folder of the figures of studies/abilities.py."""
FREE_FIELDS = ("mesh", "checkpoint", "logging", "data.source", "data.dir", "data.verify", "train.accumulate",
               "train.rows_per_device", "train.remat", "train.sample_every", "train.deterministic", "train.eval_every")
"""Fields of the config that a row's runs may choose: they depend on the machine, and change no more than the last bits
of a loss. A checksum tells whether the text is the same."""
PREFIX_TOLERANCE = 1e-4
"""Largest difference of logits, whose deviation is about 1, that rounding explains."""


@dataclass(kw_only=True)
class Options:
    add: Path | None = None
    """Folder of runs of studies/standings.py whose rows are written."""
    text: str = ""
    """With --add: name of the text, if it is not that of S1."""
    check: tuple[Path, ...] = ()
    """Files of rows to check; those that are not in the folder of the standings are copied into it."""


@cache
def protocol_config(place: Place) -> Config:
    """The config of a run of the protocol."""
    return parse_command_line(place.variation().flags(), DataFlags, partial(load_config, Config), prog="train.py",
                              usage="", own_flags="").config


def expected_fields(place: Place) -> dict[str, Any]:
    """The fields of the config of a run of the protocol that a row must have."""
    fields = flatten(groups_of(protocol_config(place).to_dict()))
    return {name: value for name, value in fields.items()
            if not any(name == free or name.startswith(f"{free}.") for free in FREE_FIELDS)}


@cache
def work_of(rung: str, arm: str) -> tuple[int, float]:
    """The parameters of an arm at a rung, and the FLOPs of training on a token."""
    config = protocol_config(Place(rung, arm, standings.FIRST_RATES[0], 0))
    parameters = count_parameters(abstract_model(config, BYTES.size))
    flops = flops_per_token(config.to_dict(), {"parameters": parameters, "vocabulary_size": BYTES.size})
    assert flops is not None
    return parameters, flops


def work_problems(row: Row) -> list[str]:
    """What is wrong with the parameters and FLOPs of a row's runs."""
    found = []
    for entry in row["runs"]:
        place = Place.of(entry["name"])
        assert place is not None
        parameters, flops = work_of(place.rung, place.arm)
        if entry["parameters"] != parameters:
            found.append(f"{place.name}: it has {entry['parameters']:,} parameters; expected {parameters:,}")
        for lines in (entry["val"], entry["annealed"]):
            for tokens, counted in zip(lines["tokens"], lines["flops"], strict=True):
                if not math.isclose(counted, tokens * flops):
                    found.append(f"{place.name}: {counted / tokens:,.0f} FLOPs a token after {tokens:,.0f} tokens; "
                                 f"expected {flops:,.0f}")
    return found


@cache
def prefix_difference(config: str) -> float:
    """The largest difference in the logits before a token that later tokens make, of a new model of a config.

    A causal attention gives 0 but for rounding. The tokens differ behind places inside of chunks and at their ends.

    Args:
        config: its groups as JSON text.
    """
    whole = Config.from_dict({"format": schema.FORMAT} | json.loads(config))
    in_float32 = gpt.resolve_config(dataclasses.replace(whole.model, dtype="float32"))
    model = make_model(dataclasses.replace(whole, model=in_float32), BYTES.size)
    rng, ends = np.random.default_rng(0), (1, 63, 64, 129, 200, 319)
    tokens_BT = np.tile(rng.integers(0, BYTES.size, 320), (1 + len(ends), 1))
    for row_T, end in zip(tokens_BT[1:], ends, strict=True):
        row_T[end:] = rng.integers(0, BYTES.size, len(row_T) - end)
    logits_BTV = np.asarray(nnx.jit(lambda model, tokens_BT: model(tokens_BT))(model, jnp.array(tokens_BT)))
    return max(float(np.abs(logits_TV[:end] - logits_BTV[0, :end]).max())
               for logits_TV, end in zip(logits_BTV[1:], ends, strict=True))


def problems(row: Row, others: Sequence[Row] = ()) -> list[str]:
    """What keeps a row from being accepted; see :func:`comparison.standings_rows.problems`.

    Args:
        row: the row.
        others: rows of the same standings.
    """
    if not standings.is_known(row["row"]):
        return ["this version of lineargpt has no such attention"]
    corpus = standings.PYTHON_PACKAGES if row["standings"] == standings.VERSION else standings_rows.corpus_of(
        others[0] if others else row)
    expected = {entry["name"]: expected_fields(place) for entry in row["runs"]
                if (place := Place.of(entry["name"])) is not None and place.arm == row["row"]
                and place.name == entry["name"]}
    found = standings_rows.problems(row, expected, corpus)
    if not found:
        found += work_problems(row)
    if row["runs"] and not found:
        worst = prefix_difference(json.dumps(row["runs"][0]["config"]))
        if worst > PREFIX_TOLERANCE:
            found.append(f"its attention sees later tokens: they change logits by {worst:.2g}")
    return found


def read_speeds(folder: Path) -> dict[tuple[str, str, str, int], float]:
    """Tokens a second by arm, rung, ``context`` or ``position``, and its value, from the files ``SPEEDS``.

    Raises:
        LineargptError: the files are of several devices: times of one size are compared with those of another.
    """
    files = {path: json_files.read(path, dict[str, Any]) for path in sorted(folder.glob(SPEEDS))}
    if len({file["device"] for file in files.values()}) > 1:
        raise LineargptError("speeds of several devices: " + ", ".join(
            f"{path} is of {file['device']}" for path, file in files.items()) + "; measure all sizes on one")
    return {(row["mode"], row["rung"], kind, row[kind]): row["tokens_per_second"]
            for file in files.values() for row in file["rows"] for kind in ("context", "position")
            if row[kind] is not None and row["tokens_per_second"] is not None}


def draw(folder: Path) -> list[Path]:
    """Draws the figures and tables of all rows of a folder, from their files alone; for S1 also those of its page."""
    runs: list[Run] = [run for row in rows_of(folder).values() for run in runs_of(row)]
    if not runs:
        return []
    speeds = read_speeds(folder)
    abilities = next((figure for figure in read_figures(ABILITIES) if figure.name == "abilities"), None)
    written = write_figures(standings_figures.figures(runs, speeds, abilities), folder / "figures")
    if folder.name == standings.VERSION:
        write_text(PAGE, standings_page.with_tables(PAGE.read_text(encoding="utf-8"), runs, speeds))
        written.append(PAGE)
    return written


def add(rows: Sequence[Row]) -> list[str]:
    """Writes the rows without problems; returns the problems of the others."""
    refused = []
    for row in rows:
        folder = standings_rows.RESULTS / row["standings"]
        others = rows_of(folder)
        before = others.pop(row["row"], None)
        found = problems(row, [*others.values()])
        if before is not None and (lost := [rung for rung in before["rungs"] if rung not in row["rungs"]]):
            found.append(f"it lacks rung {', '.join(lost)} of {folder / row['row']}.json; delete that file first")
        if found:
            refused += [f"{row['row']}: {text}" for text in found]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            json_files.write(folder / f"{row['row']}.json", row)
    return refused


def measure(options: Options, results: report.Results) -> int:
    if options.text and options.add is None:
        raise ConfigError(f"--text {options.text}: expected --add too")
    if options.text and not options.text.replace("-", "").isalnum():
        raise ConfigError(f"--text {options.text}: expected letters, digits and hyphens")
    if options.add is not None:
        if not (runs := finished_runs(options.add)):
            raise ConfigError(f"--add {options.add}: no finished runs of studies/standings.py")
        name = f"{standings.VERSION}-{options.text}" if options.text else standings.VERSION
        before = rows_of(standings_rows.RESULTS / name)
        losses = standings.losses_of([*itertools.chain(*map(runs_of, before.values())), *runs])
        arms = dict.fromkeys(place.arm for run in runs if (place := Place.of(run.name)) is not None)
        rows = [row_of(arm, runs, name, before.get(arm)) for arm in arms]
        known = {*losses, *filter(None, (Place.of(path.name) for path in options.add.glob("*")))}
        for row in rows:
            begun = {place.rung for place in known if place.arm == row["row"]}
            for rung in [*standings.RUNGS][len(row["rungs"]):]:
                if rung in begun and (why := standings.unfinished(rung, row["row"], losses)):
                    note(f"{row['row']}: {why}; left out")
        refused = add(rows)
    else:
        refused = add([read_row(path) for path in options.check])
    for line in refused:
        status(line)
    for folder in sorted(path for path in standings_rows.RESULTS.glob("*")
                         if path.is_dir() and path.name.partition("-")[0] == standings.VERSION):
        for path in draw(folder):
            print(path)
    return int(bool(refused))


main = report.Benchmark(measure, "benchmarks.standings", Options)

if __name__ == "__main__":
    sys.exit(main())
