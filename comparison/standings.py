"""The protocol of the standings, S1: its ladder of sizes, its arms, its runs, and the file of a row.

docs/standings.md explains it. A change of any number here, or in configs/standings.py, makes another version.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from comparison.curves import Curve
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from configs.schema import flatten, groups_of
from support.errors import ConfigError
from support.json_files import FileName, Natural
from training.window_losses import WindowLosses

VERSION = "S1"
FORMAT = 1
RECIPE = "configs/standings.py"
CONTEXT = 1024
LENGTHS = (0.25, 0.5, 1.0)
"""Parts of a run at which it is annealed: 5, 10 and 20 tokens a parameter."""
TOKENS_PER_PARAMETER = 20
WINDOWS = 128
"""Val windows of ``CONTEXT`` tokens in an evaluation."""
LONGER = (4096, 16384)
"""Longer contexts at which runs are evaluated."""
FACTORS = (0.5, 1.0, 2.0)
"""Rates tried at S, as multiples of the one carried over from XS."""
START = (4e-3, 8e-3, 1.6e-2)
"""Rates tried at XS first; the grid grows by factors of two until the best is inside."""
CARRIED = 0.5
"""The rate of a size over that of the size before: inverse to the width."""


class Corpus(NamedTuple):
    """The text of standings: all rows of a table have the same."""

    checksum: str
    """Of its token files."""
    bytes_per_token: float
    """Of the val windows of an evaluation, whose tokens are the bytes of the text and the separators of documents."""


PYTHON_PACKAGES = Corpus("ddc6b5ab8de30c1b586be3a0eef59e709d2438669c9b2b770a4428fb2d93a320", 131_064 / 131_072)
"""The text of S1; standings of another, S1-NAME, have that of their first row."""


@dataclass(frozen=True)
class Rung:
    """A size of the ladder: heads of 64 channels, a layer for each but at least four."""

    name: str
    width: int
    rows: int
    """Sequences in a step."""
    seeds: int

    @property
    def layers(self) -> int:
        return max(4, self.width // 64)

    @property
    def parameters(self) -> int:
        """Of a GPT-2 of this size, outside of the embedding."""
        return 12 * self.layers * self.width**2

    @property
    def steps(self) -> int:
        return TOKENS_PER_PARAMETER * self.parameters // (self.rows * CONTEXT)

    def fields(self, part: float = 1.0) -> dict[str, Any]:
        """Fields of the config of a run, or of one of a part of the length."""
        steps = round(self.steps * part)
        return {"model.width": self.width, "model.layers": self.layers, "model.heads": self.width // 64,
                "model.initial_scale": float(f"{self.width**-0.5:.3g}"), "train.batch_size": self.rows,
                "train.steps": steps, "train.eval_every": steps // 2, "train.eval_batches": WINDOWS // self.rows,
                "optimizer.warmup_steps": self.steps // 40, "checkpoint.every_steps": max(1, steps // 4),
                **({} if part == 1 else {"train.anneal_at": "1"})}


RUNGS = {rung.name: rung for rung in (Rung("XS", 64, 4, 3), Rung("S", 128, 8, 3), Rung("M", 256, 16, 1))}
NOT_RUN = Rung("L", 768, 512, 1)
"""GPT-2 of 124 million parameters by the same rule."""

PARTS: dict[str, Any] = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "rms", "output_norm": "rms",
                         "output_gate": "silu"}
"""The small parts of the recurrences, for softmax."""


@dataclass(frozen=True)
class Arm:
    """What has a row: an attention with its options, and the arm of softmax with the same parts."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its mode; of a hybrid, of the last."""
    baseline: str = "softmax-parts"
    rungs: tuple[str, ...] = ("XS", "S")
    of_width: Mapping[str, int] = field(default_factory=dict)
    """Options that are the width of the rung, divided by a number."""
    abilities: str = ""
    """Its name in studies/abilities.py, if that is another: every attention has a convolution there."""


ARMS: dict[str, Arm] = {
    "softmax": Arm("softmax", baseline="softmax", abilities="none"),
    "softmax-parts": Arm("softmax", PARTS, rungs=("XS", "S", "M"), abilities="softmax"),
    "softmax-forget": Arm("softmax", PARTS | {"forget_gate": True}),
    "chunked": Arm("chunked", baseline="softmax"),
    "gated": Arm("gated"),
    "gated_delta": Arm("gated_delta", rungs=("XS", "S", "M")),
    "kda": Arm("kda", rungs=("XS", "S", "M")),
    "power": Arm("power", baseline="softmax"),
    "hybrid-kda": Arm("kda,kda,kda,softmax", PARTS, rungs=("XS", "S", "M")),
}
VARIANTS: dict[str, Arm] = {
    "kda-equal": Arm("kda", of_width={"rank": 4}),
    "window-equal": Arm("window", PARTS | {"window": 32}),
}
"""kda with the parameters of gated_delta, to a thousandth, and softmax over a window with the state of the
recurrences."""
_NAME = re.compile(r"(?P<rung>[A-Z]+)(?P<check>_check)?-(?P<arm>.+?)-(?P<rate>\d[\d.]*(e-\d+)?)-seed-(?P<seed>\d+)")


@dataclass(frozen=True)
class Place:
    """What a run is in the protocol."""

    rung: str
    arm: str
    rate: float
    seed: int
    check: bool = False
    """Whether it tries a rate at S, at a quarter of the length."""

    @classmethod
    def of(cls, name: str) -> "Place | None":
        """The place of a run by its name; None for other runs."""
        found = _NAME.fullmatch(name)
        return None if found is None or found["rung"] not in RUNGS else cls(
            found["rung"], found["arm"], float(found["rate"]), int(found["seed"]), found["check"] is not None)

    @property
    def name(self) -> str:
        return f"{self.rung}{'_check' * self.check}-{self.arm}-{self.rate:g}-seed-{self.seed}"

    def variation(self, data: Mapping[str, str] | None = None) -> Variation:
        """The run, as sweep.py starts it, on another text if ``data`` has fields that name one."""
        arm, rung = arm_of(self.arm), RUNGS[self.rung]
        options = {**arm.options, **{name: rung.width // part for name, part in arm.of_width.items()}}
        fields = rung.fields(LENGTHS[0] if self.check else 1.0)
        evaluation = () if self.check else (
            "--context", ",".join(map(str, (CONTEXT, *LONGER))), "--windows", "", "--by-token-class")
        return Variation(self.name, RECIPE, arm.attention, {
            **fields, **(data or {}), "optimizer.learning_rate": self.rate, "train.seed": self.seed,
            **mode_fields(arm.attention, **options)}, evaluation=evaluation)


def arm_of(name: str) -> Arm:
    """An arm by its name, or a mode with its own options."""
    return (ARMS | VARIANTS).get(name) or Arm(name)


def places(arms: Iterable[str], rungs: Sequence[str], losses: Mapping[Place, float]) -> list[Place]:
    """The runs of arms at rungs, as far as they follow from the losses of those that are finished.

    At XS the rates are tried with seed 0, then the best is run with the other seeds. At S the rate that is carried over
    and those around it are tried at a quarter of the length, then the best is run with all seeds. M has one run.

    Raises:
        ConfigError: there is no such rung, or the rates of one have not been found at the one before.
    """
    arms = list(arms)
    for rung in rungs:
        if rung not in RUNGS:
            raise ConfigError(f"rungs: no rung {rung!r} that is run; expected {', '.join(RUNGS)}")
    found = []
    for name, rung in RUNGS.items():
        if name not in rungs:
            continue
        here = [arm for arm in arms if name in arm_of(arm).rungs]
        tried = {arm: _tried(name, arm, losses) for arm in here}
        found += [place for arm in here for place in tried[arm]]
        found += [Place(name, arm, rate, seed) for seed in range(rung.seeds) for arm in here
                  if (rate := best_rate(name, arm, losses)) is not None]
        if not found:
            raise ConfigError(f"rungs: {name} follows from the rungs before; run these first, or name them too")
    return list(dict.fromkeys(found))


def best_rate(rung: str, arm: str, losses: Mapping[Place, float]) -> float | None:
    """The rate of an arm at a rung; None until it has been found."""
    tried = {place.rate: losses[place] for place in _tried(rung, arm, losses) if place in losses}
    if rung == "M":
        before = best_rate("S", arm, losses)
        return None if before is None else _scaled(before, CARRIED)
    if len(tried) < len(_tried(rung, arm, losses)) or not tried:
        return None
    return min(tried, key=tried.__getitem__)


def _tried(rung: str, arm: str, losses: Mapping[Place, float]) -> list[Place]:
    """The runs that find the rate of an arm at a rung."""
    if rung == "M":
        return []
    if rung == "S":
        carried = best_rate("XS", arm, losses)
        return [] if carried is None else [
            Place(rung, arm, _scaled(carried, CARRIED * factor), 0, check=True) for factor in FACTORS]
    rates = list(START)
    while all(Place(rung, arm, rate, 0) in losses for rate in rates):
        best = min(rates, key=lambda rate: losses[Place(rung, arm, rate, 0)])
        if best not in (rates[0], rates[-1]):
            break
        rates = [_scaled(best, 0.5), *rates] if best == rates[0] else [*rates, _scaled(best, 2.0)]
    return [Place(rung, arm, rate, 0) for rate in rates]


def _scaled(rate: float, factor: float) -> float:
    return float(f"{rate * factor:g}")


def losses_of(runs: Iterable[Run]) -> dict[Place, float]:
    """The final losses of the finished runs of the protocol; infinite if not finite, as of a run that diverged."""
    found = {}
    for run in runs:
        place, loss = Place.of(run.name), run.final()
        if place is not None and loss is not None and run.is_finished:
            found[place] = loss if math.isfinite(loss) else math.inf
    return found


class Lines(TypedDict):
    """Val lines; null for a loss that is not finite."""

    step: list[float]
    tokens: list[float]
    flops: list[float]
    train_seconds: list[float]
    loss: list[float | None]
    bits_per_byte: list[float | None]


class Entry(TypedDict):
    """A run in the file of a row."""

    name: str
    config: dict[str, Any]
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
    evaluations: list[dict[str, Any]]
    windows: dict[str, dict[str, Any]]


class Row(TypedDict):
    """The file of a row."""

    format: Natural
    standings: FileName
    """The version of the protocol; with another text VERSION-NAME."""
    row: FileName
    attention: str
    options: dict[str, Any]
    baseline: str
    rungs: list[str]
    runs: list[Entry]


def unfinished(rung: str, arm: str, losses: Mapping[Place, float]) -> str:
    """Why a rung of an arm is not finished; empty if it is."""
    if best_rate(rung, arm, losses) is None:
        return f"rung {rung} is not finished: its rate has not been found"
    missing = [place.name for place in places([arm], [rung], losses) if place not in losses]
    return f"rung {rung} is not finished: {', '.join(missing)} missing" if missing else ""


def row_of(arm: str, runs: Sequence[Run], text: str = "") -> Row:
    """The file of a row: everything that its figures are made from, of the rungs that are finished.

    Args:
        arm: its name.
        runs: the runs of the arm, from their folders.
        text: the name of the text; empty: that of S1.
    """
    losses = losses_of(runs)
    rungs = list(itertools.takewhile(lambda rung: not unfinished(rung, arm, losses), arm_of(arm).rungs))
    mine = [run for run in runs if (place := Place.of(run.name)) is not None and place.arm == arm and place in losses
            and place.rung in rungs]
    return {"format": FORMAT, "standings": f"{VERSION}-{text}" if text else VERSION, "row": arm,
            "attention": arm_of(arm).attention, "options": dict(arm_of(arm).options), "baseline": arm_of(arm).baseline,
            "rungs": rungs, "runs": [_entry(run) for run in mine]}


def _entry(run: Run) -> Entry:
    environment = run.environment
    evaluations = [{"context": one["context"], "loss": one["loss"]} | (
        {"token_classes": one["token_classes"]} if one["context"] == CONTEXT and "token_classes" in one else {})
        for one in run.evaluations]
    windows = {str(context): {"checksum": checksum, "loss": _rounded(each.loss_N / each.tokens_N, 7)}
               for (_, context, checksum), each in run.window_losses.items()}
    command = [str(word) for word in environment.get("command") or ()]
    if "--run-dir" in command:  # a path of one machine
        del command[command.index("--run-dir"):command.index("--run-dir") + 2]
    return {
        "name": run.name, "config": run.config, "commit": environment.get("commit"), "command": command,
        "devices": environment.get("devices"), "processor": environment.get("processor"),
        "versions": environment.get("versions"),
        "corpus_checksum": environment.get("corpus_checksum"), "parameters": environment["parameters"],
        "state_bytes": state_bytes(run), "val": _lines(run.val.points), "annealed": _lines(run.annealed.points),
        "evaluations": evaluations, "windows": windows}


def state_bytes(run: Run) -> int | None:
    """Bytes that decoding keeps after ``CONTEXT`` tokens; None for an attention without a cached decode."""
    try:
        return run.state_bytes
    except NotImplementedError:
        return None


def _lines(points: Mapping[str, np.ndarray]) -> Lines:
    lines: Any = {name: _rounded(points.get(name, np.full(len(points.get("step", ())), np.nan)))
                  for name in Lines.__annotations__}
    return lines


def _rounded(values: np.ndarray, digits: int = 15) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]


def corpus_of(row: Row) -> Corpus | None:
    """The text of a row by its first finite loss; None without one."""
    for entry in row["runs"]:
        for loss, bits in zip(entry["val"]["loss"], entry["val"]["bits_per_byte"], strict=False):
            if loss and bits and entry["corpus_checksum"]:
                return Corpus(entry["corpus_checksum"], loss / math.log(2) / bits)
    return None


def problems(row: Row, expected: Mapping[str, Mapping[str, Any]], corpus: Corpus | None) -> list[str]:
    """What keeps a row from being drawn as whole, in sentences; empty if nothing does.

    Args:
        row: as :func:`row_of` returns it.
        expected: the fields of the config of each run that this version of the protocol starts, by name.
        corpus: the text of the standings.
    """
    if row["standings"].partition("-")[0] != VERSION:
        return [f"the row is of standings {row['standings']}; expected {VERSION}"]
    if corpus is None:
        return ["it has no run with a finite loss and a corpus"]
    entries = {entry["name"]: entry for entry in row["runs"]}
    losses = {place: math.inf if entry["val"]["loss"][-1] is None else entry["val"]["loss"][-1]
              for name, entry in entries.items() if (place := Place.of(name)) is not None and entry["val"]["loss"]}
    found = []
    if len(entries) < len(row["runs"]):
        found.append("a run is there twice")
    found += [f"{place.name}: it is not of the row {row['row']}" for place in losses if place.arm != row["row"]]
    for name, entry in entries.items():
        found += [f"{name}: {text}" for text in _entry_problems(name, entry, expected.get(name), corpus)]
    if not row["rungs"]:
        found.append(unfinished("XS", row["row"], losses))
    found += [why for rung in row["rungs"] if (why := unfinished(rung, row["row"], losses))]
    return found


def _entry_problems(name: str, entry: Entry, expected: Mapping[str, Any] | None, corpus: Corpus) -> list[str]:
    if expected is None:
        return [f"standings {VERSION} has no such run"]
    found = []
    if entry["corpus_checksum"] != corpus.checksum:
        found.append(f"the corpus has the checksum {entry['corpus_checksum']}; expected {corpus.checksum}, that of "
                     f"{'python-packages' if corpus is PYTHON_PACKAGES else 'the other runs'}")
    fields = flatten(groups_of(entry["config"]))
    found += [f"{each} is {fields.get(each)}; expected {value}" for each, value in expected.items()
              if fields.get(each) != value]
    place = Place.of(name)
    if place is not None and not place.check:
        contexts = {one["context"] for one in entry["evaluations"]}
        found += [f"its evaluation at {context:,} tokens is missing" for context in (CONTEXT, *LONGER)
                  if context not in contexts]
        windows = len(entry["windows"].get(str(CONTEXT), {}).get("loss", ()))
        if windows != WINDOWS:
            found.append(f"it has the losses of {windows} val windows; expected {WINDOWS}")
    val, annealed = entry["val"], entry["annealed"]
    steps = expected["train.steps"]
    if max(val["step"], default=0) != steps:
        found.append(f"it ends at step {max(val['step'], default=0):.0f}; expected {steps}")
    wanted = [round(steps * part) for part in expected["train.anneal_at"][:-1]]
    if [*map(int, annealed["step"])] != wanted:
        found.append(f"its annealed points are at steps {annealed['step']}; expected {wanted}")
    tokens = expected["train.batch_size"] * expected["model.context"]
    for lines in (val, annealed):
        if len({len(lines[column]) for column in Lines.__annotations__}) > 1:
            found.append("its lines are not whole")
            continue
        for step, count, loss, bits in zip(lines["step"], lines["tokens"], lines["loss"], lines["bits_per_byte"],
                                           strict=True):
            if count != step * tokens:
                found.append(f"{count:.0f} tokens at step {step:.0f}; expected {step * tokens:.0f}")
            if loss is None or not bits:  # it diverged
                continue
            counted = loss / math.log(2) / bits
            if not math.isclose(counted, corpus.bytes_per_token, rel_tol=1e-9):
                found.append(f"bits per byte at step {step:.0f} count {counted:.10f} bytes of val for a token; "
                             f"expected {corpus.bytes_per_token:.10f}")
        clock = lines["train_seconds"]
        if any(after <= before for before, after in itertools.pairwise(clock)) or min(clock, default=1) <= 0:
            found.append("its clock runs backwards")
    return found


def runs_of(row: Row) -> list[Run]:
    """The runs of a row's file, as those of their folders but for the train lines and the text of the tokens."""
    return [_run_of(entry) for entry in row["runs"]]


def _run_of(entry: Entry) -> Run:
    environment: dict[str, Any] = {name: entry[name] for name in (
        "commit", "command", "devices", "processor", "versions", "corpus_checksum", "parameters")}
    windows = {("val", int(context), one["checksum"]): WindowLosses(
        np.array(one["loss"]) * int(context), np.full(len(one["loss"]), int(context)))
        for context, one in entry["windows"].items()}
    evaluations = [{"corpus": "val"} | one for one in entry["evaluations"]]
    return Run(entry["name"], Path(entry["name"]), entry["config"], environment, Curve(), _curve(entry["val"]),
               evaluations=evaluations, window_losses=windows, annealed=_curve(entry["annealed"]))


def _curve(lines: Lines) -> Curve:
    points = {name: np.array(values, float) for name, values in lines.items()}
    return Curve(points, points, len(lines["loss"])) if lines["loss"] else Curve()
