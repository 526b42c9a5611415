"""Runs, as read from their folders, and set-ups: runs that differ only in their seed."""

import dataclasses
import json
import math
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from comparison.curves import Columns, Curve, read_curves, smooth
from configs.schema import (
    Config,
    LraConfig,
    MaskedConfig,
    SpeechConfig,
    config_class,
    flatten,
    groups_of,
)
from support.errors import ConfigError, RunError
from support.terminal import printable
from training.accounting import flops_per_token, state_bytes
from training.run_files import (
    ENVIRONMENT,
    EVALUATION,
    TASK_EVALUATION,
    TEST_EVALUATION,
    read_config,
    read_environment,
    read_evaluations,
    read_task_evaluation,
)
from training.window_losses import WindowLosses, read_window_losses

AXES = {  # horizontal axes: column, button and axis title
    "step": ("Steps", "steps"),
    "tokens": ("Tokens", "tokens"),
    "train_seconds": ("Training time", "training time (seconds)"),
    "wall_seconds": ("Wall time", "wall time (seconds)"),
    "flops": ("FLOPs", "floating-point operations"),
}
REQUIRED = ("step", "tokens", "train_seconds", "loss")
NOT_OF_SETUP = ("checkpoint", "logging", "data.verify", "train.seed", "train.sample_every", "train.deterministic")
"""Groups and fields of a config in which runs of one set-up may differ: the seed, and those that change a loss at most
in its last bits."""
MODE_OPTIONS = ("model.modes",)
"""The group of the options of modes."""
MAX_DISTINCTIONS = 3
"""Most fields in a label."""
LASTING_SEED = 0.9
"""Minimum length of a run relative to the longest seed of its set-up, to count for means over seeds."""
GENERIC_NAME = re.compile(r"(runs?|tests?|te?mp|out(put)?s?|exp(eriment)?s?|trials?|results?|new|old)?[-_.\s\d]*",
                          re.IGNORECASE)
"""Names of folders that do not identify a run."""


class NotARunError(ConfigError):
    """A path that is not a run's folder. Among runs it is skipped."""


@dataclass(frozen=True)
class Run:
    name: str
    """Unique among the runs compared: the folder's name if it identifies the run."""
    path: Path
    """The folder, as given."""
    config: dict[str, Any]
    """``config.json``, without its format number."""
    environment: dict[str, Any]
    """``environment.json``; empty if missing."""
    train: Curve
    """The train lines of ``metrics.jsonl``. Both curves also have the column ``flops``, of forward and backward pass,
    if the mode counts them."""
    val: Curve
    """The val lines; false if there are none."""
    evaluations: Sequence[dict[str, Any]] = ()
    """The evaluations in ``evaluation.json``, from eval.py."""
    window_losses: Mapping[tuple[str, int, str], WindowLosses] = field(default_factory=dict)
    """The loss of each window, by corpus, context and checksum of the windows, from eval.py."""
    evaluated_step: int | None = None
    """The step of the evaluated checkpoint."""
    sample: str | None = None
    """The newest text in ``samples/``."""
    sample_image: bytes | None = None
    """The newest PNG file in ``samples/``, of a model of images."""
    sample_step: int | None = None
    """The step of either."""
    annealed: Curve = field(default_factory=Curve)
    """The annealed points before the end of the run; :attr:`lengths` has also the end."""
    task_evaluation: Mapping[str, Any] | None = None
    """The contents of ``evaluation-task.json``, from eval.py --length."""
    test_evaluations: Sequence[dict[str, Any]] = ()
    """The evaluations in ``evaluation-test.json``, from eval.py --split test."""

    @property
    def attention(self) -> str:
        """The attention mode, or the pattern of modes over the layers."""
        return ",".join(self.config["model"]["attention"])

    @property
    def label(self) -> str:
        """The attention mode with its implementation, if that has another name. :func:`shown_labels` leaves out what
        does not distinguish runs."""
        modes = list(dict.fromkeys(self.config["model"]["attention"]))
        used = {mode: form for mode, form in (self.environment.get("implementations") or {}).items()
                if mode in modes and form != mode}
        if not used:
            return self.attention
        forms = used.values() if len(modes) == 1 else (f"{mode}: {form}" for mode, form in used.items())
        return f"{self.attention} ({', '.join(forms)})"

    @property
    def seed(self) -> Any:
        """The seed of initial parameters and of the order of the data; None if the config has none."""
        return self.config["train"].get("seed")

    @property
    def context(self) -> int | None:
        """Training context, in tokens."""
        return self.config["model"].get("context")

    @property
    def size(self) -> str:
        """Layers and width, such as ``12 × 768``: equal for modes with slightly different parameter counts."""
        model = self.config["model"]
        return f"{model.get('layers', '?')} × {model.get('width', '?')}"

    @property
    def fields(self) -> dict[str, Any]:
        """Every field of the config by its dotted name."""
        return flatten(self.config)

    @property
    def options(self) -> dict[str, Any]:
        """The options of its modes by their own name, such as ``short_conv``; of modes with different values, each with
        its mode: ``window 0, softmax 4``."""
        by_option: dict[str, dict[str, Any]] = {}
        for name, value in (_options_by_default(self.config) | self.fields).items():
            if is_of(name, MODE_OPTIONS):
                mode, _, option = name.removeprefix("model.modes.").partition(".")
                by_option.setdefault(option, {})[mode] = value
        return {option: next(iter(values.values())) if len(set(map(json.dumps, values.values()))) == 1
                else ", ".join(f"{mode} {value_text(value)}" for mode, value in values.items())
                for option, values in by_option.items()}

    @cached_property
    def setup_fields(self) -> dict[str, Any]:
        """The fields that can change a loss, without the seed, by dotted name. ``data.dir`` is the checksum of the
        tokens if known, because the same tokens may be in several folders."""
        fields = {name: value for name, value in (_defaults(self.config) | self.fields).items()
                  if not is_of(name, NOT_OF_SETUP)}
        checksum = self.environment.get("corpus_checksum")
        return fields if checksum is None else fields | {"data.dir": checksum}

    @property
    def setup(self) -> str:
        """Equal for runs that differ only in the seed and in fields that do not change a loss."""
        return json.dumps([self.label, self.setup_fields], sort_keys=True)

    @property
    def state_bytes(self) -> int:
        """Bytes that decoding keeps for a sequence as long as the context; NotImplementedError for a mode without a
        cached decode."""
        return state_bytes(self.config)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached the steps or minutes of its config with a known loss; true without such a
        limit."""
        train = self.config["train"]
        ends = {axis: end for axis, end in (("step", train.get("steps")),
                                            ("train_seconds", 60 * (train.get("minutes") or 0))) if end}
        points = (self.val if self.split == "val" else self.train).points
        return not ends or (self.has_curve and any(points[axis].max() >= end for axis, end in ends.items()))

    def final(self, quantity: str = "loss") -> float | None:
        """The value of the last val line, NaN if not finite; None if no val line has it."""
        values = self.val.points.get(quantity, np.empty(0))
        return float(values[-1]) if len(values) else None

    @property
    def diverged(self) -> bool:
        """Whether training ended at a loss or gradient that is not finite."""
        ends = [curve.points[name][-1] for curve, name in (
            (self.train, "loss"), (self.train, "gradient_norm"), (self.val, "loss")) if name in curve.points]
        return not self.is_finished and not np.isfinite(ends).all()

    def to_the_end(self) -> "Run":
        """A run that diverged, with the lines that it lacks at its end and at its lengths: their losses are NaN. Other
        runs, and those without a number of steps, as they are."""
        train, last = self.config["train"], self.train.points
        if not self.diverged or not train.get("steps") or "step" not in last:
            return self
        steps = [round(part * train["steps"]) for part in train.get("anneal_at", ())[:-1]]

        def continued(curve: Curve, ends: Sequence[int]) -> Curve:
            missing = np.array([end for end in ends if end not in curve.points.get("step", ())], float)
            known = {name: missing * last[name][-1] / last["step"][-1] for name in ("step", "tokens", "flops")
                     if name in last}
            nothing = np.full(len(missing), np.nan)
            points = {name: np.append(curve.points.get(name, ()), known.get(name, nothing))
                      for name in {**curve.points, **known, "loss": nothing}}
            return replace(curve, points=points, means=points, lines=curve.lines + len(missing))

        return replace(self, val=continued(self.val, [train["steps"]]), annealed=continued(self.annealed, steps))

    @property
    def has_curve(self) -> bool:
        """Whether anything was logged; otherwise the run has only an evaluation, such as one of published weights."""
        return bool(self.train or self.val)

    @property
    def is_empty(self) -> bool:
        return not (self.has_curve or self.evaluations)

    @property
    def split(self) -> str:
        """The split whose loss is compared: val, or train for runs without val lines."""
        return "val" if self.val else "train"

    @property
    def peak_bytes(self) -> float | None:
        """The device's peak memory, or else the planned memory of the compiled training step."""
        used = self.train.points.get("peak_bytes", np.empty(0))
        if np.isfinite(used).any():
            return float(np.nanmax(used))
        return next((float(self.environment[name]) for name in ("peak_bytes", "step_bytes")
                     if isinstance(self.environment.get(name), int | float)), None)

    @property
    def bits(self) -> str:
        """The quantity in bits of its val lines: ``bits_per_dimension`` for images, else ``bits_per_byte``."""
        return "bits_per_dimension" if "bits_per_dimension" in self.val.points else "bits_per_byte"

    @cached_property
    def units_per_token(self) -> float | None:
        """Bytes of text, or dimensions of images, per token of the val split: :attr:`bits` are loss / ln 2 / this. None
        if unknown."""
        points = self.val.points
        if self.bits not in points:
            return None
        ratio = points["loss"] / math.log(2) / points[self.bits]
        known = ratio[np.isfinite(ratio)]
        return float(np.median(known)) if len(known) else None

    @cached_property
    def smooth_train(self) -> Columns:
        """The means of the train curve, their loss averaged over 2 % of the run."""
        means = self.train.means
        return means | {"loss": smooth(means["loss"], means["lines"], len(means["loss"]) // 100)} if means else {}

    @cached_property
    def lengths(self) -> Columns:
        """The last val line at each length of ``train.anneal_at``: the annealed points and, of a finished run, its end.
        Empty without annealed points."""
        points, end = self.annealed.points, self.val.points
        if not (points and end and self.is_finished):
            return points
        return {name: np.append(values, end[name][-1]) for name, values in points.items() if name in end}

    def at_lengths(self) -> "list[Run]":
        """A run for each of :attr:`lengths`, with its steps or minutes and one val line: an annealed point equals the
        end of such a run."""
        runs, train = [], self.config["train"]
        for i, step in enumerate(self.lengths.get("step", ())):
            line = {name: values[i:i + 1] for name, values in self.lengths.items()}
            length = {"steps": int(step)}
            if train["steps"] is None:  # the last fraction that has passed: a point may be left out
                minutes = [fraction * train["minutes"] for fraction in train["anneal_at"]]
                length = {"minutes": max(each for each in minutes if 60 * each <= line["train_seconds"][0])}
            config = self.config | {"train": train | length | {"anneal_at": []}}
            runs.append(replace(self, name=f"{self.name} at {step:.0f}", config=config, train=Curve(),
                                val=Curve(line, line, 1), annealed=Curve()))
        return runs

    def curve(self, axis: str, split: str, quantity: str = "loss") -> tuple[np.ndarray, np.ndarray]:
        """An axis (see ``AXES``), ascending, and the loss (or bits per byte) of a split; empty if unknown. The split
        ``annealed`` has :attr:`lengths`.

        Val losses are all kept up to ``MAX_POINTS`` lines, else means; train losses are averaged over 2 % of the run.
        """
        columns = (self.smooth_train if split == "train" else self.lengths if split == "annealed" else
                   self.val.points if self.val.is_whole else self.val.means)
        if axis not in columns or quantity not in columns:
            return np.empty(0), np.empty(0)
        known = np.isfinite(columns[axis])
        return np.maximum.accumulate(columns[axis][known]), columns[quantity][known]

    def end(self, axis: str) -> float:
        """The end of the compared curve on an axis; the run must have a curve."""
        return float(self.curve(axis, self.split)[0][-1])

    def loss_at(self, axis: str, where: float, split: str, quantity: str = "loss") -> float | None:
        """The loss at one position of an axis, interpolated linearly; None outside the curve, or if not finite."""
        x, loss = self.curve(axis, split, quantity)
        if not (len(x) and x[0] <= where <= x[-1]):
            return None
        value = float(np.interp(where, x, loss))
        return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Setup:
    """Runs that differ only in their seed."""

    label: str
    """Unique among the set-ups compared."""
    runs: tuple[Run, ...]
    """One per seed."""

    @property
    def attention(self) -> str:
        return self.runs[0].attention

    @cached_property
    def lasting(self) -> tuple[Run, ...]:
        """The runs that count for means over seeds: those that are not more than a tenth shorter than another seed.

        A run is shorter if it is so both in steps and in training time, since runs of equal length in one may differ in
        the other. A mean with a run that ended early would end with it, or jump there.
        """
        ends = {run.name: np.array([run.end("step"), run.end("train_seconds")]) for run in self.runs if run.has_curve}
        if not ends:
            return self.runs
        least = LASTING_SEED * np.max(list(ends.values()), axis=0)
        return tuple(run for run in self.runs if run.name not in ends or (ends[run.name] >= least).any())

    @property
    def context(self) -> int | None:
        return self.runs[0].context

    @property
    def size(self) -> str:
        return self.runs[0].size


def group_by[Item, Key](items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by what ``key`` returns, in their order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def load_run(path: Path, *, may_be_empty: bool = False) -> Run:
    """Reads a run's folder.

    Args:
        path: the folder.
        may_be_empty: accept a run without logged steps, without curves, so that a study can report its failure.

    Raises:
        NotARunError: the folder does not exist or is not a run.
        RunError: the run has no metrics and no evaluation, or a file of the run is damaged. Of a damaged evaluation
            there is a warning.
    """
    if not path.exists():
        raise NotARunError(no_folder(path))
    if not (path / "config.json").is_file():
        raise NotARunError(f"{path}: not a run, it has no config.json; expected the folder of a train.py run")
    config = _shown(groups_of(read_config(path)))
    if not (config.get("model", {}).get("attention") and "train" in config):
        raise RunError(f"{path}/config.json: not a config written by train.py")
    environment = _shown(read_environment(path)) if (path / ENVIRONMENT).is_file() else {}
    metrics = path / "metrics.jsonl"
    train, val, annealed = read_curves(metrics) if metrics.is_file() else (Curve(), Curve(), Curve())
    for split, curve in (("train", train), ("val", val)):
        missing = [name for name in REQUIRED if curve and not np.isfinite(curve.points.get(name, np.empty(0))).any()
                   and name != "loss"]
        if not curve and curve.without_step:
            missing = ["step"]
        if missing:
            raise RunError(f"{metrics}: the {split} lines have no {missing[0]}, which train.py writes")
    evaluated_step, evaluations, windows = load_evaluations(path)
    if not (train or val or evaluations or may_be_empty):
        raise RunError(f"{metrics}: no steps yet; train the run first, or evaluate it with eval.py")
    per_token = flops_per_token(config, environment)
    sample_step, sample, sample_image = newest_sample(path / "samples")
    return Run(_name(path.resolve().name), path, config, environment, with_flops(train, per_token),
               with_flops(val, per_token), evaluations, windows, evaluated_step, sample, sample_image, sample_step,
               with_flops(annealed, per_token), load_task_evaluation(path), load_test_evaluations(path))


def _name(text: str) -> str:
    """The name of a folder on one line, without what a terminal would obey."""
    return re.sub("[\t\n]", " ", printable(text)) or "?"


def _shown(value: Any) -> Any:
    """JSON values that every output can hold: texts as :func:`printable`, and whole numbers of more than 64 bits, which
    only fields of other versions may have, as texts."""
    if isinstance(value, dict):
        return {printable(name): _shown(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, str):
        return printable(value)
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def no_folder(path: Path) -> str:
    """The message about a run's folder that does not exist, with the command that creates it."""
    from models import attention

    mode = next((mode for mode in attention.modes() if path.name.endswith(mode)), "softmax")
    return (f"{path}: no such folder; create one with: python train.py configs/quickstart.py --attention {mode} "
            f"--run-dir {shlex.quote(str(path))}")


def with_flops(curve: Curve, per_token: float | None) -> Curve:
    """The curve with a column ``flops``, if known: as logged or, for older runs, counted now."""
    logged = curve.points.get("flops")
    if per_token is None or not curve or (logged is not None and np.isfinite(logged).all()):
        return curve
    return replace(curve, points=curve.points | {"flops": curve.points["tokens"] * per_token},
                   means=curve.means | {"flops": curve.means["tokens"] * per_token})


def load_evaluations(path: Path) -> tuple[int | None, list[dict[str, Any]],
                                          dict[tuple[str, int, str], WindowLosses]]:
    """What eval.py wrote in a run's folder: :attr:`Run.evaluated_step`, :attr:`Run.evaluations` and
    :attr:`Run.window_losses`.

    They are None and empty without an evaluation, and for one whose files are damaged or do not belong together, which
    a warning names: eval.py replaces one file after the other, and may end in between.
    """
    try:
        found: dict[str, Any] = _shown(read_evaluations(path)) if (path / EVALUATION).is_file() else {"evaluations": []}
        evaluations = found["evaluations"]
        windows = {(entry["corpus"], entry["context"], entry["windows_checksum"]): losses for entry, losses
                   in zip(evaluations, read_window_losses(path, evaluations), strict=False)}
    except RunError as error:
        warnings.warn(f"the evaluation of {path} is left out: {error}", stacklevel=2)
        return None, [], {}
    return found.get("step"), evaluations, windows


def load_task_evaluation(path: Path) -> dict[str, Any] | None:
    """What eval.py --length wrote in a run's folder; None without it, or if it is damaged, which a warning says."""
    try:
        return _shown(read_task_evaluation(path)) if (path / TASK_EVALUATION).is_file() else None
    except RunError as error:
        warnings.warn(f"the evaluation of {path} by length is left out: {error}", stacklevel=2)
        return None


def load_test_evaluations(path: Path) -> list[dict[str, Any]]:
    """What eval.py --split test wrote in a run's folder; empty without it, or if damaged, which a warning says."""
    try:
        found = read_evaluations(path, TEST_EVALUATION) if (path / TEST_EVALUATION).is_file() else {"evaluations": []}
        return _shown(found)["evaluations"]
    except RunError as error:
        warnings.warn(f"the evaluation of {path} on test is left out: {error}", stacklevel=2)
        return []


def newest_sample(folder: Path) -> tuple[int | None, str | None, bytes | None]:
    """The step of the newest sample of training, and the text of ``STEP.txt`` or the contents of ``STEP.png``."""
    files = sorted((int(path.stem), path) for path in folder.glob("*") if path.stem.isdecimal()
                   and path.suffix in (".txt", ".png"))
    if not files:
        return None, None, None
    step, path = files[-1]
    if path.suffix == ".png":
        return step, None, path.read_bytes()
    return step, path.read_text(encoding="utf-8", errors="replace"), None


def scored(runs: Sequence[Run]) -> str:
    """What a loss is normalised by: a token, a masked token, an example of a task, or a symbol of a transcript."""
    names = {Config: "token", MaskedConfig: "masked token", LraConfig: "example", SpeechConfig: "symbol"}
    return " or ".join(sorted({names[config_class(run.config)] for run in runs}))


def is_of(name: str, parts: Sequence[str]) -> bool:
    """Whether a dotted name is one of these fields, or in one of these groups."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The fields of the config in which runs differ, by dotted name, and the options of modes, by their own name: the
    value of each run, None if it lacks the field or its modes have no such option."""
    options = [run.options for run in runs]
    names = dict.fromkeys(name for one in options for name in one)
    return (differing([{name: value for name, value in run.fields.items() if not is_of(name, MODE_OPTIONS)}
                       for run in runs])
            | differing([{name: one.get(name) for name in names} for one in options]))


def differing(fields: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields with more than one value: the values, None for a missing field."""
    found = {}
    for name in dict.fromkeys(name for one in fields for name in one):
        if len({json.dumps(one[name]) for one in fields if name in one}) > 1:
            found[name] = [one.get(name) for one in fields]
    return found


def group(runs: Sequence[Run]) -> list[Setup]:
    """The set-ups, in the order of the runs."""
    setups: dict[tuple[str, int], list[Run]] = {}
    seed_counts: Counter[tuple[str, Any]] = Counter()
    for run in runs:
        seed = (run.setup, run.seed)
        # A second run of a seed does not contribute to the variance over seeds: it is not averaged.
        setups.setdefault((run.setup, seed_counts[seed]), []).append(run)
        seed_counts[seed] += 1
    found, shown = list(setups.values()), shown_labels(runs)
    labels = [shown[seeds[0].label] for seeds in found]
    names = [_setup_label(label, seeds, [other[0] for other in found if other[0].label == seeds[0].label])
             for label, seeds in zip(labels, found, strict=True)]
    return [Setup(name if names.count(name) == 1 else f"{label}, {seeds[0].name}", tuple(seeds))
            for seeds, label, name in zip(found, labels, names, strict=True)]


def shown_labels(runs: Sequence[Run]) -> dict[str, str]:
    """The label to show for each :attr:`Run.label`: with the implementation only where runs of one attention differ in
    it."""
    labels = {attention: {run.label for run in same}
              for attention, same in group_by(runs, lambda run: run.attention).items()}
    return {label: label if len(alike) > 1 else attention
            for attention, alike in labels.items() for label in alike}


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Default values of all fields: a config of an older version may lack some."""
    return flatten(groups_of(config_class(config)().to_dict())) | _options_by_default(config)


def _options_by_default(config: dict[str, Any]) -> dict[str, Any]:
    """The default options of the modes of a config, by their dotted names."""
    from models import attention

    known = set(attention.modes())
    return flatten({"model": {"modes": {mode: dataclasses.asdict(attention.load(mode).Config())
                                        for mode in config.get("model", {}).get("modes") or {} if mode in known}}})


def _setup_label(label: str, seeds: Sequence[Run], same_label: Sequence[Run]) -> str:
    """The label, and its differences from other set-ups of that attention, or its first run if there are many."""
    details = distinctions(seeds[0], same_label)
    return ", ".join([label, *(details if len(details) <= MAX_DISTINCTIONS else [seeds[0].name])])


def distinctions(run: Run, others: Sequence[Run], leave_out: Sequence[str] = ()) -> list[str]:
    """Fields of a run's config that not all ``others`` share: ``context 512``, ``learning_rate 0.001``. Fields in
    ``leave_out`` and default options of a mode are skipped."""
    leave_out = ("data.dir", "model.attention", *NOT_OF_SETUP, *leave_out)
    defaults = _options_by_default(run.config)
    return [f"{name.rpartition('.')[2]} {value_text(run.fields[name])}"
            for name in differing([other.fields for other in others])
            if name in run.fields and not is_of(name, leave_out)
            and not (name in defaults and run.fields[name] == defaults[name])]


def value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def name_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs with unique, descriptive names: the folder's; a description from the config if that is ``run-3`` or the
    like; or the path if several folders have one name."""
    named = [replace(run, name=describe(run, runs)) if GENERIC_NAME.fullmatch(run.name) else run for run in runs]
    names = [run.name for run in named]
    return [run if names.count(run.name) == 1 else replace(run, name=_with_path(run, before))
            for run, before in zip(named, runs, strict=True)]


def _with_path(run: Run, before: Run) -> str:
    path = _name(str(run.path))
    return path if run.name == before.name else f"{run.name} ({path})"


def describe(run: Run, others: Sequence[Run]) -> str:
    """A description of a run: mode, size, context, differences from the others, seed."""
    context = [] if run.context is None else [f"context {run.context:,}"]
    details = [text for text in distinctions(run, others) if text.split()[0] not in ("layers", "width", "context")]
    seed = [f"seed {run.seed}"] if run.seed is not None else []
    return ", ".join([run.attention, run.size, *context, *details[:MAX_DISTINCTIONS], *seed])
