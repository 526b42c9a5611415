"""The file of a row of the standings: everything that its figures are made from, and what keeps it from being drawn."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from comparison.curves import Curve
from comparison.runs import Run
from comparison.standings import (
    ARMS,
    CONTEXT,
    LONGER,
    PYTHON_PACKAGES,
    RUNGS,
    VERSION,
    WINDOWS,
    Corpus,
    Place,
    losses_of,
    places,
    unfinished,
)
from configs.schema import flatten
from support import json_files
from support.errors import LineargptError
from support.json_files import Count, Digits, Duration, FileName, Natural
from training import accounting
from training.window_losses import WindowLosses

FORMAT = 1
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "standings"
"""Has a folder for each standings."""
SPEEDS = "speeds-*.json"
"""Files of benchmarks.standings_speeds beside the rows, one for each size."""
TEXT = "[A-Za-z0-9-]+"
"""Pattern of the name of another text."""
MOST_FIELDS = 3
"""Fields of a config that are named where more are wrong."""


class Lines(TypedDict):
    """Val lines; null for a loss that is not finite, and for the time of lines that a run that diverged has not
    reached."""

    step: list[Duration]
    tokens: list[Duration]
    flops: list[Duration]
    train_seconds: list[Duration | None]
    loss: list[Duration | None]
    bits_per_byte: list[Duration | None]


TokenClass = TypedDict("TokenClass", {"class": str, "share": Duration, "loss": Duration | None})
"""A class of tokens."""


class Partition(TypedDict):
    """Classes that every token is in one of."""

    partition: str
    classes: list[TokenClass]


class Evaluation(TypedDict):
    """An evaluation of eval.py."""

    context: Count
    loss: Duration | None
    token_classes: NotRequired[list[Partition]]
    """With ``CONTEXT``."""


class Windows(TypedDict):
    """The mean loss of each window of an evaluation."""

    checksum: str
    """Checksum of their tokens."""
    loss: list[Duration | None]


class Entry(TypedDict):
    """A run in the file of a row."""

    name: str
    config: dict[str, Any]
    """Its groups, as :func:`configs.schema.groups_of` returns them."""
    commit: str | None
    command: list[str]
    devices: list[str] | None
    processor: str | None
    versions: dict[str, str] | None
    corpus_checksum: str | None
    parameters: Natural
    state_bytes: Natural | None
    val: Lines
    annealed: Lines
    evaluations: list[Evaluation]
    windows: dict[Digits, Windows]
    """By context."""


class Row(TypedDict):
    """The file of a row."""

    format: Natural
    standings: FileName
    """The version of the protocol; with another text VERSION-NAME."""
    row: FileName
    rungs: list[str]
    runs: list[Entry]


def row_of(arm: str, runs: Sequence[Run], standings: str = VERSION, before: Row | None = None) -> Row:
    """The file of a row: everything that its figures are made from, of the rungs that are finished.

    Args:
        arm: its name.
        runs: the runs of the arm, from their folders.
        standings: the version of the protocol; with another text VERSION-NAME.
        before: the row so far, for the rungs that the runs do not finish.
    """
    mine = {run.name: _entry(run) for run in runs if (place := Place.of(run.name)) is not None and place.arm == arm}
    sources = [(losses_of(runs), mine)]
    if before is not None:
        sources.append((losses_of(runs_of(before)), {entry["name"]: entry for entry in before["runs"]}))
    losses: dict[Place, float] = {}
    rungs: dict[str, list[Entry]] = {}
    for rung in RUNGS:
        for found, entries in sources:
            known = losses | {place: loss for place, loss in found.items() if place.rung == rung}
            if not unfinished(rung, arm, known):
                losses, rungs[rung] = known, [entries[place.name] for place in places([arm], [rung], known)]
                break
        else:
            break
    return {"format": FORMAT, "standings": standings, "row": arm, "rungs": [*rungs],
            "runs": [*itertools.chain(*rungs.values())]}


def _entry(run: Run) -> Entry:
    environment = run.environment
    evaluations: list[Any] = [{"context": one["context"], "loss": one["loss"]} | (
        {"token_classes": one["token_classes"]} if one["context"] == CONTEXT and "token_classes" in one else {})
        for one in run.evaluations]
    windows: dict[str, Any] = {str(context): {"checksum": checksum, "loss": _rounded(each.loss_N / each.tokens_N, 7)}
               for (_, context, checksum), each in run.window_losses.items()}
    command = [_without_folder(str(word)) for word in environment.get("command") or ()]
    for flag in ("--run-dir", "--data.dir"):
        if flag in command:
            del command[command.index(flag):command.index(flag) + 2]
    data = run.config["data"]
    config = run.config | {"data": data | {"dir": None, "source": _without_folder(data["source"])}}
    return {
        "name": run.name, "config": config, "commit": environment.get("commit"), "command": command,
        "devices": environment.get("devices"), "processor": environment.get("processor"),
        "versions": environment.get("versions"),
        "corpus_checksum": environment.get("corpus_checksum"), "parameters": environment["parameters"],
        "state_bytes": state_bytes(run.config), "val": _lines(run.val.points), "annealed": _lines(run.annealed.points),
        "evaluations": evaluations, "windows": windows}


def _without_folder(text: str) -> str:
    """The name alone of an absolute path, which is one machine's; another text as it is."""
    return Path(text).name if text.startswith(("/", "~")) else text


def state_bytes(config: dict[str, Any]) -> int | None:
    """Bytes that decoding keeps after ``CONTEXT`` tokens; None for an attention without a cached decode."""
    try:
        return accounting.state_bytes(config)
    except NotImplementedError:
        return None


def _lines(points: Mapping[str, np.ndarray]) -> Lines:
    lines: Any = {name: _rounded(points.get(name, np.full(len(points.get("step", ())), np.nan)))
                  for name in Lines.__annotations__}
    return lines


def _rounded(values: np.ndarray, digits: int = 15) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]


def corpus_of(row: Row) -> Corpus | None:
    """The text of a row by its first evaluated run; None without one."""
    for entry in row["runs"]:
        checksum, windows = entry["corpus_checksum"], next(iter(entry["windows"].values()), None)
        for loss, bits in zip(entry["val"]["loss"], entry["val"]["bits_per_byte"], strict=False):
            if loss and bits and checksum and windows:
                return Corpus(checksum, loss / math.log(2) / bits, windows["checksum"])
    return None


def problems(row: Row, expected: Mapping[str, Mapping[str, Any]], corpus: Corpus | None) -> list[str]:
    """What makes a row break the protocol, in sentences; empty if nothing does.

    Args:
        row: as :func:`row_of` returns it.
        expected: the fields of the config of each run that this version of the protocol starts, by name.
        corpus: the text of the standings.
    """
    if not re.fullmatch(rf"{VERSION}(-{TEXT})?", row["standings"]):
        return [f"the row is of standings {row['standings']}; expected {VERSION}, or {VERSION}-TEXT for another text"]
    if corpus is None:
        return ["it has no finished rung with a finite loss"]
    entries = {entry["name"]: entry for entry in row["runs"]}
    losses = {place: math.inf if entry["val"]["loss"][-1] is None else entry["val"]["loss"][-1]
              for name, entry in entries.items() if (place := Place.of(name)) is not None and entry["val"]["loss"]}
    found = []
    if row["standings"] != VERSION and corpus.checksum == PYTHON_PACKAGES.checksum:
        found.append(f"the row is of standings {row['standings']}, but its text is that of {VERSION}")
    if len(entries) < len(row["runs"]):
        found.append("a run is there twice")
    if others := [place.name for place in losses if place.arm != row["row"]]:
        return [*found, *(f"{name}: it is not of the row {row['row']}" for name in others)]
    classes: dict[str, _ClassShares] = {}
    for name, entry in entries.items():
        found += [f"{name}: {text}" for text in _entry_problems(name, entry, expected.get(name), corpus)]
        if shares := _class_shares(entry):
            classes[name] = shares
    first = next(iter(classes), "")
    found += [f"{name}: its classes of tokens are not those of {first}" for name in classes
              if classes[name] != classes[first]]
    found += [f"{a.name} and {b.name} have the same val loss" for a, b in itertools.combinations(losses, 2)
              if a.seed != b.seed and losses[a] == losses[b] < math.inf]
    if found:  # the rest may follow from these
        return found
    if not row["rungs"]:
        return [unfinished("XS", row["row"], losses) or "it has no rungs, but XS is finished"]
    if row["rungs"] != [*RUNGS][:len(row["rungs"])]:
        return [f"it has the rungs {', '.join(row['rungs'])}; expected {', '.join(RUNGS)}, or the first of them"]
    if missing := [why for rung in row["rungs"] if (why := unfinished(rung, row["row"], losses))]:
        return missing
    wanted = {place.name for rung in row["rungs"] for place in places([row["row"]], [rung], losses)}
    return [f"{name}: the protocol has no such run at {', '.join(row['rungs'])}" for name in entries
            if name not in wanted]


_ClassShares = list[tuple[str, str, float]]


def _class_shares(entry: Entry) -> _ClassShares:
    """Partition, name and share of each class of tokens."""
    return [(partition["partition"], each["class"], each["share"]) for one in entry["evaluations"]
            for partition in one.get("token_classes", ()) for each in partition["classes"]]


def _entry_problems(name: str, entry: Entry, expected: Mapping[str, Any] | None, corpus: Corpus) -> list[str]:
    if expected is None:
        return [f"standings {VERSION} has no such run"]
    found = [f"it does not state its {each}" for each in ("devices", "versions", "commit", "command")
             if not entry[each]]
    if entry["corpus_checksum"] != corpus.checksum:
        found.append(f"the corpus has the checksum {entry['corpus_checksum']}; expected {corpus.checksum}, that of "
                     f"{'python-packages' if corpus is PYTHON_PACKAGES else 'the other runs'}")
    fields = flatten(entry["config"])
    wrong = [f"{each} is {fields.get(each)}; expected {value}" for each, value in expected.items()
             if fields.get(each) != value]
    found += wrong[:MOST_FIELDS]
    if len(wrong) > MOST_FIELDS:
        found.append(f"{len(wrong) - MOST_FIELDS} other fields are not those of the protocol")
    found += _line_problems(entry, expected, corpus)
    place, losses = Place.of(name), entry["val"]["loss"]
    if place is not None and not place.check and losses and losses[-1] is not None:
        found += _evaluation_problems(entry, corpus)
    return found


def _line_problems(entry: Entry, expected: Mapping[str, Any], corpus: Corpus) -> list[str]:
    """Problems of the val and annealed lines of a run."""
    found = []
    val, annealed = entry["val"], entry["annealed"]
    for lines in (val, annealed):
        if len({len(lines[column]) for column in Lines.__annotations__}) > 1:
            return ["its lines are not whole"]
    steps = expected["train.steps"]
    end = val["step"][-1] if val["step"] else 0
    if end != steps:
        found.append(f"it ends at step {end:.0f}; expected {steps}")
    if any(after <= before for before, after in itertools.pairwise(val["step"])):
        found.append("its val lines are not in the order of their steps")
    wanted = [round(steps * part) for part in expected["train.anneal_at"][:-1]]
    if [*map(int, annealed["step"])] != wanted:
        found.append(f"its annealed points are at steps {annealed['step']}; expected {wanted}")
    tokens = expected["train.batch_size"] * expected["model.context"]
    ends_finite = bool(val["loss"]) and val["loss"][-1] is not None
    for lines in (val, annealed):
        for step, count, seconds, loss, bits in zip(
                *(lines[column] for column in ("step", "tokens", "train_seconds", "loss", "bits_per_byte")),
                strict=True):
            if count != step * tokens:
                found.append(f"{count:.0f} tokens at step {step:.0f}; expected {step * tokens:.0f}")
            if seconds is None and ends_finite:  # only a run that diverged may not have reached a line
                found.append(f"it has no training time at step {step:.0f}")
            if loss is None:  # it diverged
                continue
            if not bits:
                found.append(f"it has no bits per byte at step {step:.0f}")
                continue
            counted = loss / math.log(2) / bits
            if not math.isclose(counted, corpus.bytes_per_token, rel_tol=1e-9):
                found.append(f"bits per byte at step {step:.0f} count {counted:.10f} bytes of val for a token; "
                             f"expected {corpus.bytes_per_token:.10f}")
        clock = [seconds for seconds in lines["train_seconds"] if seconds is not None]
        if any(after <= before for before, after in itertools.pairwise([0, *clock])):
            found.append(f"its training times do not increase: {', '.join(f'{seconds:g}' for seconds in clock)}")
    return found


def _evaluation_problems(entry: Entry, corpus: Corpus) -> list[str]:
    """Problems of the evaluations of a run."""
    found = []
    for context in (CONTEXT, *LONGER):
        mine = [one for one in entry["evaluations"] if one["context"] == context]
        if len(mine) != 1:
            found.append(f"its evaluation at {context:,} tokens is {'there twice' if mine else 'missing'}")
            continue
        windows = entry["windows"].get(str(context), Windows(checksum="", loss=[]))
        losses, loss, number = windows["loss"], mine[0]["loss"], WINDOWS * CONTEXT // context
        if len(losses) != number:
            found.append(f"it has the losses of {len(losses)} val windows of {context:,} tokens; expected {number}")
        elif windows["checksum"] != corpus.windows:
            found.append(f"its val windows of {context:,} tokens have the checksum {windows['checksum']}; expected "
                         f"{corpus.windows}")
        # A longer context than that of training can have a loss that is not finite.
        elif loss is None or None in losses:
            if context == CONTEXT:
                found.append("the losses of val windows are not finite, but the val loss is")
        elif not math.isclose(float(np.mean(np.array(losses, float))), loss, rel_tol=1e-6):
            found.append(f"its loss at {context:,} tokens is {loss}, but the mean of its windows "
                         f"{np.mean(np.array(losses, float)):.7f}")
        if context == CONTEXT:
            found += _class_problems(mine[0])
    return found


def _class_problems(evaluation: Evaluation) -> list[str]:
    """Problems of the losses by class of the tokens."""
    partitions = evaluation.get("token_classes")
    if not partitions:
        return [f"its losses by class of the tokens at {CONTEXT:,} tokens are missing"]
    found = []
    for partition in partitions:
        share_C, loss_C = (np.array([each[column] for each in partition["classes"]], float)
                           for column in ("share", "loss"))
        if not np.allclose([share_C.sum(), share_C @ loss_C], np.array([1, evaluation["loss"]], float), rtol=1e-6):
            found.append(f"its losses by {partition['partition']} do not add up to that of all tokens")
    return found


def read_row(path: Path) -> Row:
    """The file of a row.

    Raises:
        LineargptError: it is damaged, or of another format.
    """
    row: Any = json_files.read(path, Row, remedy="restore the file, or ask for it again")
    if row["format"] != FORMAT:
        raise LineargptError(f"{path}: format {row['format']}; this version of lineargpt reads {FORMAT}")
    return row


def rows_of(folder: Path) -> dict[str, Row]:
    """The rows of a standings by the name of their file, that of the arm, in the order of the protocol.

    Raises:
        LineargptError: a file is damaged, or of another format.
    """
    rows = {path.stem: read_row(path) for path in folder.glob("*.json") if not path.match(SPEEDS)}
    order = {arm: number for number, arm in enumerate(ARMS)}
    return dict(sorted(rows.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def runs_of(row: Row) -> list[Run]:
    """The runs of a row's file, as those of their folders but for the train lines and the text of the tokens."""
    return [_run_of(entry) for entry in row["runs"]]


def _run_of(entry: Entry) -> Run:
    environment: dict[str, Any] = {name: entry[name] for name in (
        "commit", "command", "devices", "processor", "versions", "corpus_checksum", "parameters")}
    windows = {("val", int(context), one["checksum"]): WindowLosses(
        np.array(one["loss"], float) * int(context), np.full(len(one["loss"]), int(context)))
        for context, one in entry["windows"].items()}
    evaluations = [{"corpus": "val"} | one for one in entry["evaluations"]]
    return Run(entry["name"], Path(entry["name"]), entry["config"], environment, Curve(), _curve(entry["val"]),
               evaluations=evaluations, window_losses=windows, annealed=_curve(entry["annealed"]))


def _curve(lines: Lines) -> Curve:
    points = {name: np.array(values, float) for name, values in lines.items()}
    return Curve(points, points, len(lines["loss"])) if lines["loss"] else Curve()
