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
again from their files, those of the speeds beside them, and the figures of studies/abilities.py. A row that no longer
follows the protocol is named and left out; a damaged file stops the command. For S1 it also writes the tables of
docs/standings.md.
"""

import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import report
from comparison import standings, standings_figures, standings_page, standings_rows
from comparison.figures import read_figures, write_figures
from comparison.runs import Run, is_of
from comparison.standings import Corpus, Place
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
from support.json_files import Count, Duration
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
MOST_LINES = 5
"""Problems that are named of a row with more."""
PARAMETER_NOISE = 0.05
"""Deviation of the noise that is added to parameters to find out whether an attention is causal."""
PREFIX_TOLERANCE = 1e-4
"""Largest difference of logits, whose deviation is about 1, that rounding explains."""
KINDS: tuple[Literal["context"], Literal["position"]] = ("context", "position")
"""What a speed is of: a context of training, or a position of a sampled token."""


class SpeedRow(TypedDict):
    """A row of benchmarks.standings_speeds."""

    mode: str
    """Name of the arm."""
    rung: str
    context: Count | None
    position: Count | None
    tokens_per_second: Duration | None


class SpeedFile(TypedDict):
    """A file of benchmarks.standings_speeds."""

    device: str
    rows: list[SpeedRow]


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
    # Runs that differ in these two share the command line, which takes a tenth of a second to read.
    alike = dataclasses.replace(place, rate=standings.FIRST_RATES[0], seed=0)
    fields = flatten(groups_of(protocol_config(alike).to_dict())) | {
        "optimizer.learning_rate": place.rate, "train.seed": place.seed}
    return {name: value for name, value in fields.items() if not is_of(name, FREE_FIELDS)}


class Work(NamedTuple):
    """What the protocol alone sets of a run."""

    parameters: int
    flops_per_token: float
    """FLOPs of training for a token."""
    state_bytes: int | None
    """Bytes that decoding keeps after ``CONTEXT`` tokens; None for an attention without a cached decode."""


@cache
def work_of(rung: str, arm: str) -> Work:
    """The parameters, FLOPs and state of an arm at a rung."""
    config = protocol_config(Place(rung, arm, standings.FIRST_RATES[0], 0))
    parameters = count_parameters(abstract_model(config, BYTES.size))
    flops = flops_per_token(config.to_dict(), {"parameters": parameters, "vocabulary_size": BYTES.size})
    assert flops is not None
    return Work(parameters, flops, standings_rows.state_bytes(config.to_dict()))


def work_problems(row: Row) -> list[str]:
    """What is wrong with the parameters, FLOPs and states of a row's runs."""
    found = []
    for entry in row["runs"]:
        place = Place.of(entry["name"])
        assert place is not None
        work = work_of(place.rung, place.arm)
        if entry["parameters"] != work.parameters:
            found.append(f"{place.name}: it has {entry['parameters']:,} parameters; expected {work.parameters:,}")
        if entry["state_bytes"] != work.state_bytes:
            found.append(f"{place.name}: state_bytes is {entry['state_bytes']}; expected {work.state_bytes}")
        for lines in (entry["val"], entry["annealed"]):
            for tokens, counted in zip(lines["tokens"], lines["flops"], strict=True):
                if not math.isclose(counted, tokens * work.flops_per_token):
                    found.append(f"{place.name}: {counted:.10g} FLOPs after {tokens:,.0f} tokens; expected "
                                 f"{tokens * work.flops_per_token:.10g}")
    return found


@cache
def prefix_difference(config: str) -> float:
    """The largest difference in the logits before a token that later tokens make, of a new model of a config.

    A causal attention gives 0 but for rounding. The tokens differ behind places inside of chunks and at their ends.
    Noise is added to the parameters, because those that start at 0, such as the kernels of a gate, would hide a part.

    Args:
        config: its groups as JSON text.
    """
    whole = Config.from_dict({"format": schema.FORMAT} | json.loads(config))
    in_float32 = gpt.resolve_config(dataclasses.replace(whole.model, dtype="float32"))
    model = make_model(dataclasses.replace(whole, model=in_float32), BYTES.size)
    rng, ends = np.random.default_rng(0), (1, 63, 64, 129, 200, 319, 512, standings.CONTEXT - 1)
    nnx.update(model, jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(0, PARAMETER_NOISE, x.shape), x.dtype), nnx.state(model, nnx.Param)))
    tokens_BT = np.tile(rng.integers(0, BYTES.size, standings.CONTEXT), (1 + len(ends), 1))
    for row_T, end in zip(tokens_BT[1:], ends, strict=True):
        row_T[end:] = rng.integers(0, BYTES.size, len(row_T) - end)
    logits_BTV = np.asarray(nnx.jit(lambda model, tokens_BT: model(tokens_BT))(model, jnp.array(tokens_BT)))
    return max(float(np.abs(logits_TV[:end] - logits_BTV[0, :end]).max())
               for logits_TV, end in zip(logits_BTV[1:], ends, strict=True))


def text_of(name: str, rows: Iterable[Row]) -> Corpus | None:
    """The text of a standings: that of the protocol or, with another text, of the first of its rows that has one."""
    if name == standings.VERSION:
        return standings.PYTHON_PACKAGES
    return next(filter(None, map(standings_rows.corpus_of, rows)), None)


def problems(row: Row, corpus: Corpus | None) -> list[str]:
    """What keeps a row from being drawn; see :func:`comparison.standings_rows.problems`.

    Args:
        row: the row.
        corpus: the text of its standings.
    """
    if not standings.is_known(row["row"]):
        return ["this version of lineargpt has no such attention"]
    expected = {entry["name"]: expected_fields(place) for entry in row["runs"]
                if (place := Place.of(entry["name"])) is not None and place.arm == row["row"]
                and place.name == entry["name"]}
    return standings_rows.problems(row, expected, corpus) or work_problems(row)


def causality_problems(row: Row) -> list[str]:
    """Whether the attention of a row without other problems sees later tokens."""
    worst = prefix_difference(json.dumps(row["runs"][0]["config"]))
    return [f"its attention sees later tokens: they change logits by {worst:.2g}"] if worst > PREFIX_TOLERANCE else []


def read_speeds(folder: Path) -> dict[tuple[str, str, str, int], float]:
    """Tokens a second by arm, rung, ``context`` or ``position``, and its value, from the files ``SPEEDS``.

    Raises:
        LineargptError: a file is damaged, two have the same speed, or the files are of several devices: times of one
            size are compared with those of another.
    """
    files = {path: json_files.read(path, SpeedFile) for path in sorted(folder.glob(SPEEDS))}
    if len({file["device"] for file in files.values()}) > 1:
        raise LineargptError("speeds of several devices: " + ", ".join(
            f"{path} is of {file['device']}" for path, file in files.items()) + "; measure all sizes on one")
    speeds: dict[tuple[str, str, str, int], float] = {}
    for path, file in files.items():
        mine = {(row["mode"], row["rung"], kind, row[kind]): row["tokens_per_second"]
                for row in file["rows"] for kind in KINDS
                if row[kind] is not None and row["tokens_per_second"] is not None}
        if twice := sorted({rung for _, rung, *_ in mine.keys() & speeds.keys()}):
            raise LineargptError(f"{path} has speeds of {', '.join(twice)} that another file has too; delete one")
        speeds |= mine
    return speeds


def draw(folder: Path) -> bool:
    """Draws the figures and tables of the rows of a folder; for S1 also those of its page.

    Returns:
        Whether all rows are in them: those with problems are named and left out.
    """
    rows, whole = rows_of(folder), True
    corpus = text_of(folder.name, [row for row in rows.values() if row["standings"] == folder.name])
    runs: list[Run] = []
    for arm, row in rows.items():
        if (row["standings"], row["row"]) != (folder.name, arm):
            found = [f"it is the row {row['row']} of standings {row['standings']}; expected {arm} of {folder.name}"]
        else:
            found = problems(row, corpus)
        if found:
            _refuse(f"{folder / arm}.json", found, "not drawn")
            whole = False
        else:
            runs += runs_of(row)
    if not runs:
        return whole
    speeds = read_speeds(folder)
    abilities = next((figure for figure in read_figures(ABILITIES) if figure.name == "abilities"), None)
    written = write_figures(standings_figures.figures(runs, speeds, abilities), folder / "figures")
    if folder.name == standings.VERSION:
        write_text(PAGE, standings_page.with_tables(PAGE.read_text(encoding="utf-8"), runs, speeds))
        written.append(PAGE)
    for path in written:
        print(path)
    return whole


def _refuse(name: str, found: Sequence[str], consequence: str) -> None:
    for line in found[:MOST_LINES]:
        status(f"{name}: {line}")
    more = f" for these and {len(found) - MOST_LINES} more" if len(found) > MOST_LINES else ""
    status(f"{name}: {consequence}{more}")


def add(rows: Mapping[str, Row]) -> bool:
    """Writes the rows without problems; names those of the others.

    Args:
        rows: by their name in messages.

    Returns:
        Whether all have been written.
    """
    whole = True
    for name, row in rows.items():
        folder = standings_rows.RESULTS / row["standings"]
        others = rows_of(folder)
        before = others.pop(row["row"], None)
        found = problems(row, text_of(row["standings"], [*others.values(), row]))
        if before is not None and (lost := [rung for rung in before["rungs"] if rung not in row["rungs"]]):
            found.append(f"it lacks rung {', '.join(lost)} of {folder / row['row']}.json; delete that file first")
        if found := found or causality_problems(row):
            _refuse(name, found, "not added")
            whole = False
        else:
            folder.mkdir(parents=True, exist_ok=True)
            json_files.write(folder / f"{row['row']}.json", row)
    return whole


def rows_of_runs(folder: Path, text: str) -> dict[str, Row]:
    """The row of each arm in a folder of studies/standings.py, with the rungs of the committed one that the folder does
    not finish. Names the rungs that neither finishes.

    Args:
        folder: of the runs.
        text: name of the text, if it is not that of S1.

    Raises:
        ConfigError: the folder has no finished run.
    """
    if not (runs := finished_runs(folder)):
        raise ConfigError(f"--add {folder}: no finished runs of studies/standings.py")
    name = f"{standings.VERSION}-{text}" if text else standings.VERSION
    before = rows_of(standings_rows.RESULTS / name)
    losses = standings.losses_of([*itertools.chain(*map(runs_of, before.values())), *runs])
    arms = dict.fromkeys(place.arm for run in runs if (place := Place.of(run.name)) is not None)
    rows = {arm: row_of(arm, runs, name, before.get(arm)) for arm in arms}
    known = {*losses, *filter(None, (Place.of(path.name) for path in folder.glob("*")))}
    for arm, row in rows.items():
        begun = {place.rung for place in known if place.arm == arm}
        for rung in [*standings.RUNGS][len(row["rungs"]):]:
            if rung in begun and (why := standings.unfinished(rung, arm, losses)):
                note(f"{arm}: {why}; left out")
    return rows


def measure(options: Options, results: report.Results) -> int:
    if options.add is not None and options.check:
        raise ConfigError("--add and --check are mutually exclusive")
    if options.text and options.add is None:
        raise ConfigError(f"--text {options.text}: expected --add too")
    if options.text and not re.fullmatch(standings_rows.TEXT, options.text):
        raise ConfigError(f"--text {options.text}: expected letters without accents, digits and hyphens")
    whole = add({str(path): read_row(path) for path in options.check} if options.add is None else
                rows_of_runs(options.add, options.text))
    drawn = [draw(folder) for folder in sorted(standings_rows.RESULTS.glob("*"))
             if folder.is_dir() and folder.name.partition("-")[0] == standings.VERSION]
    return int(not (whole and all(drawn)))


main = report.Benchmark(measure, "benchmarks.standings", Options)

if __name__ == "__main__":
    sys.exit(main())
