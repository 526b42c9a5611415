"""Run a study: each run in its own process, then the figures.

    python sweep.py studies/learning_rate.py --out runs/lr --quick
    python sweep.py studies/learning_rate.py --out runs/lr --dry-run --measure
    python sweep.py studies/learning_rate.py --out runs/lr --commands runs.txt
    python sweep.py studies/learning_rate.py --out runs/lr --run chunked-learning_rate-0.001-seed-0
    python sweep.py studies/lra.py --out runs/lra --rows chunked --dry-run
    python sweep.py studies/images.py --out runs/mnist --quick --data.dir mnist

The same command skips finished runs and resumes interrupted ones. A failed run does not stop the others. Ctrl-C saves
the current run and stops. docs/sweeps.md explains how to spread a study over machines.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from comparison.study import Study, load_study, render_figures
from comparison.wording import few
from models import attention
from support.command import output_stream, run_command, status
from support.errors import FAILURE, ConfigError, suggestion
from support.files import write_text
from support.flags import checked_flags, flags_by_field
from support.ranges import Count
from sweeps import estimates, folder, processes
from sweeps.plan import PlannedRun, plan, plan_later, program


@dataclass(frozen=True)
class DataOptions:
    """Data of the study, where it takes some."""

    dir: str | None = None
    """Folder of the data, such as the images of studies/images.py. None: the study's own."""
    source: str | None = None
    """Corpus, as train.py takes it, such as an id of a dataset. None: the study's own."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    study: tyro.conf.Positional[Path]
    """Study file, such as studies/learning_rate.py."""
    out: Path
    """Output folder: one folder per run, and the figures."""
    quick: bool = False
    """Run the quick form of the study: fewer and shorter runs."""
    rows: str | None = None
    """Attention modes in place of the study's own, or some of its arms, with commas between, if the study supports
    it."""
    rungs: str | None = None
    """Rungs of the study's ladder of sizes, with commas between, such as XS,S, if the study has one. None: all."""
    data: DataOptions = DataOptions()
    parallel: Count = 1
    """Number of runs at once, each with its share of a CPU's cores or its own GPU; with more runs than GPUs a shared
    one."""
    dry_run: bool = False
    """List the runs, and those expected to follow, with their time, memory and disk space, without running them."""
    measure: bool = False
    """With --dry-run: time three steps of each distinct program for which there is no finished run."""
    keep_all: bool = False
    """Keep all checkpoints of finished runs with their optimizer state; otherwise only the parameters of the best, the
    last and those of annealed points."""
    commands: Path | None = None
    """Write one shell command per run to this file, without running them."""
    index: int | None = None
    """Run only the run with this index, as listed by --dry-run."""
    run: str | None = None
    """Run only the run with this name, as listed by --dry-run."""


def check(options: Options) -> None:
    """Raises :class:`ConfigError` for conflicting options."""
    ways = [flag for flag, given in (("--dry-run", options.dry_run), ("--commands", options.commands is not None),
                                     ("--index", options.index is not None), ("--run", options.run is not None))
            if given]
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(ways)} are mutually exclusive")
    if options.measure and not options.dry_run:
        raise ConfigError("--measure requires --dry-run")


def part_of(options: Options, study: Study) -> dict[str, Any]:
    """What ``--rows``, ``--rungs``, ``--data.dir`` and ``--data.source`` name, as arguments of :meth:`Study.runs`.

    Raises:
        ConfigError: a row is neither an arm of the study nor a mode.
    """
    part = {name: tuple(value.split(",")) for name in ("rows", "rungs") if (value := getattr(options, name))}
    names = dict.fromkeys([*study.arms, *attention.modes()])
    for row in part.get("rows", ()):
        if row not in names:
            raise ConfigError(f"--rows {row}: no such row{suggestion(row, names)}")
    return part | {f"data_{name}": value for name in ("dir", "source")
                   if (value := getattr(options.data, name)) is not None}


def chosen(options: Options, study: Study, runs: Sequence[PlannedRun]) -> Sequence[PlannedRun]:
    """All runs, or the one of ``--index`` or ``--run``.

    Raises:
        ConfigError: there is no such run, or the numbers of the runs change with their results.
    """
    if options.run is not None:
        if not (found := [run for run in runs if run.name == options.run]):
            raise ConfigError(f"--run {options.run}: the study has no such run"
                              + (" yet" if study.follows_results else "")
                              + f"; expected {few([run.name for run in runs])}")
        return found
    if options.index is None:
        return runs
    if study.follows_results:
        raise ConfigError(f"--index {options.index}: runs of this study follow from results, which changes their "
                          "numbers; name the run with --run")
    if not 0 <= options.index < len(runs):
        raise ConfigError(f"--index is {options.index}; expected 0 to {len(runs) - 1}: the study has {len(runs)} runs")
    return [runs[options.index]]


def list_runs(options: Options, study: Study, runs: Sequence[PlannedRun], later: Sequence[PlannedRun]) -> int:
    """``--dry-run``, with the runs that are expected to follow; returns the exit code."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    known = estimates.Estimates([*runs, *later])
    if options.measure:
        known.measure(options.out, processes.child_environment(), status)
    headings, rows = estimates.table(runs, later, known, keep_all=options.keep_all)
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(escape, row))
    # Lines for other programs are not wrapped.
    Console(width=None if sys.stdout.isatty() else 400).print(table)
    if not options.measure and any("?" in row for row in rows):
        print(f"?: add --measure to time {estimates.TIMED_STEPS} steps of each")
    if later:
        print("follows: expected after the runs above; its name and settings depend on their results, and there may be "
              "more")
    for line in (*study.notes(options.quick), *known.problems):
        print(line)
    estimates.check_disk(known, runs, options.out, keep_all=options.keep_all, parallel=options.parallel)
    return 0


def shell_lines(options: Options, runs: Sequence[PlannedRun]) -> list[str]:
    """The shell command of each run, for the working folder."""
    flags = [flag for flag, given in (("--quick", options.quick), ("--keep-all", options.keep_all)) if given]
    parts = {"--rows": options.rows, "--rungs": options.rungs, "--data.dir": options.data.dir,
             "--data.source": options.data.source}
    part = [text for flag, value in parts.items() if value for text in (flag, value)]
    line = ["python", *program("sweep.py"), str(options.study), "--out", str(options.out), *part, *flags, "--run"]
    return [shlex.join([*line, run.name]) for run in runs]


def run(options: Options, study: Study, runs: Sequence[PlannedRun], failed: dict[str, str]) -> int:
    """Run the runs, draw the figures and report failures; returns the exit code.

    ``failed``: runs that failed earlier in this sweep, with the reason. They are not started again. New failures are
    added.
    """
    environment = processes.child_environment()
    mine = chosen(options, study, runs)
    places = processes.places(options.parallel, mine, environment)
    known = estimates.Estimates(runs)
    estimates.check_disk(known, mine, options.out, keep_all=options.keep_all, parallel=options.parallel)
    for line in (*study.notes(options.quick), *known.problems):
        status(line)
    folder.begin(study, runs, options.out, quick=options.quick)
    progress = processes.run_all(mine, known, places, environment, keep_all=options.keep_all, failed=failed)
    if progress.stopped_by is not None:
        status(f"{options.out}: stopped with {len(progress.finished)} of {len(mine)} runs finished; repeat the "
               "command to resume")
        return 128 + progress.stopped_by
    for line in processes.failures(progress):
        status(line)
    if mine is runs and progress.finished:
        for path in render_figures(study, options.out):
            print(path, file=output_stream())
    return FAILURE if progress.failed else 0


def command(arguments: Sequence[str]) -> int:
    """Run a study from a command line; returns the exit code."""
    # The devices are for the runs: this process would reserve GPU memory that it never uses.
    jax.config.update("jax_platforms", "cpu")
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="sweep.py", description=__doc__)
    check(options)
    study = load_study(options.study)
    part = part_of(options, study)
    runs = plan(study, options.out, quick=options.quick, **part)
    one = chosen(options, study, runs) is not runs
    folder.check_out(study, runs, options.out, quick=options.quick, part=bool(part))
    if options.dry_run:
        later = plan_later(study, runs, options.out, quick=options.quick, **part)
        for each in later:
            folder.check_run(each, options.out)
        return list_runs(options, study, runs, later)
    if options.commands is not None:
        folder.begin(study, runs, options.out, quick=options.quick)
        write_text(options.commands, "".join(f"{line}\n" for line in shell_lines(options, runs)))
        return 0
    failed: dict[str, str] = {}
    code = run(options, study, runs, failed)
    # Runs may follow from a run that diverged; a stopped sweep has a code of 128 and more.
    while code in (0, FAILURE) and not one and study.follows_results:
        known, runs = len(runs), plan(study, options.out, quick=options.quick, **part)
        if len(runs) == known:
            break
        status(f"{options.out}: {len(runs) - known} more runs follow from these results")
        folder.check_out(study, runs, options.out, quick=options.quick, part=bool(part))
        code = run(options, study, runs, failed)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("sweep.py", command, arguments, flags=flags_by_field(Options))


if __name__ == "__main__":
    sys.exit(main())
