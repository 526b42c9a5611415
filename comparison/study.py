"""A study: a file with the runs that answer a question, and the figures of their results.

    studies/NAME.py          a docstring (the question, the command, the time, the result) and two functions:
                             get_runs(quick: bool) -> list[Variation]
                             figures(runs: Sequence[comparison.runs.Run]) -> Sequence[comparison.figures.Figure]
                             and a third, for lines that sweep.py prints: notes(quick: bool) -> Sequence[str]
                             get_runs may take rows, other attentions than its own: get_runs(quick, rows=None);
                             rungs, those of a ladder of sizes; data_dir, a folder of data; data_source, a corpus; and
                             finished, the finished runs of OUT, for runs that follow from the results of others, such
                             as more seeds at the best learning rate; such a study may also take expected, whether to
                             include the runs that it expects to follow
    OUT/study.json           the study, and the name and the hash of each of its runs
    OUT/NAME/                a run, as written by its command
    OUT/NAME/run.json        its fields, their hash, and whether it is finished

``sweep.py`` runs it, ``compare.py --study OUT`` reads the results.
"""

import importlib.util
import inspect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from comparison.figures import Figure, write_figures
from comparison.reading import Found, Reader
from comparison.runs import Run
from comparison.wording import few
from support import json_files
from support.errors import ConfigError, LineargptError, RunError
from support.json_files import Check, FileName

ROOT = Path(__file__).absolute().parent.parent
"""Base of relative paths of studies and recipes that the working folder lacks."""
FORMAT = 1
"""Format number of ``study.json`` and ``run.json``: increment it for incompatible changes."""
PARTS = {"rows": "its own attentions", "rungs": "no ladder of sizes"} | dict.fromkeys(
    ("data_dir", "data_source"), "its own data")
"""What a study has that does not take a part."""
RECORD = "study.json"
FIGURES = "figures"
"""The folder of the figures in OUT."""


@dataclass(frozen=True)
class Variation:
    """One run of a study."""

    name: str
    """Its folder; unique in the study."""
    recipe: str | None = None
    """The first argument of the command, such as ``configs/quickstart.py``; None for a benchmark without one."""
    attention: str | None = None
    """``--attention``: a mode, or a comma-separated pattern over layers; None: the recipe's."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Flags by name without dashes: ``{"optimizer.learning_rate": 1e-3, "train.seed": 0}``. A tuple gives a flag
    several values, True or False one without a value."""
    command: str = "train.py"
    """``train.py``, or a module: ``lra.train``, ``benchmarks.train_step``."""
    evaluation: Sequence[str] = ()
    """Arguments of eval.py, which evaluates the trained run: ``("--length", "64,512")``. Empty: it is not."""
    rung: str | None = None
    """The size of its model, in a study of several sizes that ``--rungs`` chooses from."""

    def flags(self) -> list[str]:
        """Recipe, attention and fields as arguments of the command."""
        arguments = [] if self.recipe is None else [str(located(self.recipe))]
        if self.attention is not None:
            arguments += ["--attention", self.attention]
        for name, value in self.fields.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                group, _, last = flag.rpartition(".")
                arguments.append("--" + (f"{group}." if group else "") + ("" if value else "no-") + last)
            else:
                arguments += [f"--{flag}", *map(str, _values(value))]
        return arguments

    @property
    def arm(self) -> tuple[Any, ...]:
        """Equal for runs that differ only in their seed."""
        return (self.command, self.recipe, self.attention, *self.evaluation,
                *sorted((name, repr(value)) for name, value in self.fields.items() if name != "train.seed"))


def _values(value: Any) -> list[Any]:
    """The values of a flag; nested tuples, such as those of ``data.mixture``, are flattened."""
    return [one for part in value for one in _values(part)] if isinstance(value, list | tuple) else [value]


def grid(recipe: str | None, attentions: Sequence[str | None] = (None,),
         axes: Mapping[str, Sequence[Any] | Mapping[Any, Mapping[str, Any]]] | None = None,
         fields: Mapping[str, Any] | None = None, command: str = "train.py") -> list[Variation]:
    """Every combination of attentions and of the values of the axes; the last axis varies fastest.

    A run is named by its attention and its value on each axis: ``softmax-learning_rate-0.001-seed-0``.

    Args:
        recipe: of all runs.
        attentions: the modes, or patterns of modes.
        axes: the values of a field by its name, such as ``{"train.seed": (0, 1, 2)}``. If several fields change
            together, the fields of each value: ``{"pairs": {2: {"data.source": …, "model.context": 16}, 4: …}}``.
        fields: of all runs.
        command: of all runs.
    """
    choices = [[(axis.rpartition(".")[2], value, values[value] if isinstance(values, Mapping) else {axis: value})
                for value in values] for axis, values in (axes or {}).items()]
    runs = []
    for attention, places in itertools.product(attentions, itertools.product(*choices)):
        named = [] if attention is None else [attention.replace(",", "+")]
        run_fields = dict(fields or {})
        for axis, value, given in places:
            named += [axis, f"{value:g}" if isinstance(value, float) else str(value)]
            run_fields |= given
        runs.append(Variation("-".join(named), recipe, attention, run_fields, command))
    return runs


def mode_fields(attention: str, **options: Any) -> dict[str, Any]:
    """The fields of options of an attention's mode: of a pattern, of its last mode."""
    return {f"model.modes.{attention.rpartition(',')[2]}.{option}": value for option, value in options.items()}


@dataclass(frozen=True)
class Study:
    path: Path
    """As in ``study.json``: relative to the root of lineargpt if the file is below it."""
    module: Any

    @property
    def arms(self) -> Mapping[str, Any]:
        """Its ``ARMS`` by name, if it has them."""
        return getattr(self.module, "ARMS", {})

    @property
    def follows_results(self) -> bool:
        """Whether runs of the study follow from the results of others."""
        return "finished" in self._parameters

    @property
    def _parameters(self) -> Mapping[str, Any]:
        return inspect.signature(self.module.get_runs).parameters

    @property
    def expects(self) -> bool:
        """Whether ``get_runs`` takes ``expected``."""
        return "expected" in self._parameters

    def runs(self, quick: bool, finished: Sequence[Run] = (), *, expected: bool = False,
             **part: Sequence[str] | str) -> list[Variation]:
        """The runs of the study, or of its quick form, in order.

        Args:
            quick: whether of the quick form.
            finished: the finished runs of the output folder, for a study that follows results.
            expected: whether to include the runs that are expected to follow from those that are not finished, of a
                study that :attr:`expects` any.
            **part: ``rows``, attentions in place of the study's own, ``rungs`` of its ladder of sizes, ``data_dir`` or
                ``data_source``.

        Raises:
            ConfigError: ``get_runs`` fails, does not take the part, or returns no runs, duplicate names, or a name that
                is not a folder name.
        """
        for name in part:
            if name not in self._parameters:
                raise ConfigError(f"{name.replace('_', '.')}: {self.path} has {PARTS[name]}; expected a "
                                  f"study with get_runs(quick, {name}=None)")
        results = {"finished": finished} if self.follows_results else {}
        results |= {"expected": True} if expected else {}
        runs = self._call("get_runs", quick, **part, **results)
        if not isinstance(runs, Sequence) or not runs or not all(isinstance(run, Variation) for run in runs):
            raise ConfigError(f"{self.path}: get_runs returns no runs; expected a list of Variation")
        for name, count in Counter(run.name for run in runs).items():
            if count > 1:
                raise ConfigError(f"{self.path}: {count} runs are named {name}; expected unique names")
            if not name or name.startswith(".") or "/" in name or name in (RECORD, FIGURES):
                raise ConfigError(f"{self.path}: a run is named {name!r}; expected a folder name without a slash or "
                                  f"leading dot, other than {RECORD} and {FIGURES}")
        return list(runs)

    def figures(self, runs: Sequence[Run]) -> Sequence[Figure]:
        """The figures of the study.

        Raises:
            ConfigError: ``figures`` fails.
        """
        return self._call("figures", runs)

    def notes(self, quick: bool) -> Sequence[str]:
        """The lines of the study's ``notes``, if it has one, such as data that it needs.

        Raises:
            ConfigError: ``notes`` fails.
        """
        return self._call("notes", quick) if hasattr(self.module, "notes") else ()

    def _call(self, function: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self.module, function)(*arguments, **named)
        except (ConfigError, LineargptError):
            raise
        except Exception as error:  # a study is the user's own code
            raise ConfigError(f"{self.path}: {function} failed: {type(error).__name__}: {error}") from error


class _RunOfRecord(TypedDict):
    name: FileName
    hash: str


class _Record(TypedDict):
    study: Annotated[str, Check("a path", lambda value: "\0" not in value)]
    quick: bool
    runs: list[_RunOfRecord]


@dataclass(frozen=True)
class StudyRecord:
    """Contents of ``study.json``."""

    study: Path
    """The study's file, for :func:`load_study`."""
    quick: bool
    runs: Mapping[str, str]
    """The hash of each run by name, in the order of the study."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "study": self.study.as_posix(), "quick": self.quick,
                "runs": [{"name": name, "hash": digest} for name, digest in self.runs.items()]}


def located(path: str | Path) -> Path:
    """A file in the working folder, or else in lineargpt's root folder."""
    return Path(path) if Path(path).exists() or not (ROOT / path).exists() else ROOT / path


def own_study(path: Path) -> Path | None:
    """The file in lineargpt's ``studies/`` that a ``study.json`` names; None if it names another, which
    :func:`load_study` would run."""
    found = (ROOT / path).resolve()
    return found if found.is_relative_to((ROOT / "studies").resolve()) and found.is_file() else None


def load_study(path: str | Path) -> Study:
    """The study in a file.

    Raises:
        ConfigError: the file does not exist, fails, or lacks ``get_runs`` or ``figures``.
    """
    found = located(path)
    if not found.is_file():
        there = ", ".join(f"studies/{file.name}" for file in sorted((ROOT / "studies").glob("*.py"))
                          if not file.name.startswith("_"))
        raise ConfigError(f"{path}: no such study; expected one of {there}")
    spec = importlib.util.spec_from_file_location(f"study_{found.stem}", found)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a study; a study is a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ConfigError:  # such as that of a published figure
        raise
    except Exception as error:  # a study is the user's own code
        raise ConfigError(f"{path}: the study failed: {type(error).__name__}: {error}") from error
    for function, signature in (("get_runs", "get_runs(quick) -> list[Variation]"),
                                ("figures", "figures(runs) -> list[Figure]")):
        if not callable(getattr(module, function, None)):
            raise ConfigError(f"{path}: not a study; expected a function {signature}")
    resolved = found.resolve()
    return Study(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved, module)


def read_study(out_dir: Path) -> StudyRecord:
    """The study of an output folder.

    Raises:
        ConfigError: ``out_dir`` does not exist, or is not the folder of a study.
        RunError: its ``study.json`` is damaged, or of another format.
        OSError: it cannot be read.
    """
    path = Path(out_dir) / RECORD
    if not path.parent.exists():
        raise ConfigError(f"{out_dir}: no such folder; expected the folder of a sweep")
    if not path.is_file():
        raise ConfigError(f"{out_dir}: not the folder of a study, no {RECORD}; expected the folder of a sweep")
    values = read_record(path, _Record)
    return StudyRecord(Path(values["study"]), values["quick"], {run["name"]: run["hash"] for run in values["runs"]})


def read_record(path: Path, kind: Any) -> dict[str, Any]:
    """Reads a ``study.json`` or a ``run.json``, whose entries have these types.

    Raises:
        RunError: it is damaged, or of another format version.
        OSError: it cannot be read.
    """
    values = json_files.read(path, dict[str, Any])
    if values.get("format") != FORMAT:
        raise RunError(f"{path}: format {values.get('format')!r}; this version of lineargpt reads format {FORMAT}: use "
                       "the version that wrote the file")
    json_files.check(values, kind, path)
    return values


def reader(out_dir: Path, record: StudyRecord) -> Reader:
    """Reads the runs of a study in order; those that have not started are skipped."""
    return Reader([Path(out_dir) / name for name in record.runs], awaited=True, may_be_empty=True)


def finished_runs(out_dir: Path) -> list[Run]:
    """The finished runs of the output folder of a study, and those that diverged, whose last loss is NaN; none if there
    is no such folder."""
    if not (Path(out_dir) / RECORD).is_file():
        return []
    runs = [run.to_the_end() for run in reader(out_dir, read_study(out_dir)).read().runs]
    return [run for run in runs if run.is_finished and not run.is_empty]


def left_out(found: Found, folders: Sequence[Path]) -> list[str]:
    """The runs of a study that cannot be drawn, and why; benchmarks are not included.

    Args:
        found: the runs that were read.
        folders: the folders of all runs of the study.
    """
    left = [*map(str, found.damaged), *(f"{run.name} has no metrics" for run in found.runs if run.is_empty)]
    if missing := [folder.name for folder in folders
                   if not any((folder / name).is_file() for name in ("config.json", "result.json"))]:
        left.append(f"not started: {few(missing)}")
    return left


def render_figures(study: Study, out_dir: Path) -> list[Path]:
    """Render the figures of a study into ``OUT/figures``; returns the files.

    Raises:
        ConfigError: the study's ``figures`` fails.
        OSError: a file cannot be written.
    """
    runs = reader(out_dir, read_study(out_dir))
    found = runs.read()
    return write_figures(study.figures(found.runs), out_dir / FIGURES, [
        f"Left out: {why}." for why in left_out(found, runs.paths)])
