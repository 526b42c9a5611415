"""sweep.py: most tests replace train.py by a short script, so that a run is a process of a tenth of a second."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import sample
import sweep
from comparison.figures import check_names
from comparison.runs import Run, load_run
from comparison.study import Variation, grid, load_study
from configs.schema import Config
from lra import tasks
from support.errors import ConfigError
from support.files import read_json
from support.locks import is_locked
from sweeps import estimates, folder, plan, processes
from tests import small_run
from tests.comparison.run_folders import read_lines, write_lines, write_run
from tests.edited import edited
from training.run_folder import in_training

FAKE = '''
import json, os, signal, sys, time
from pathlib import Path

if "--run-dir" not in sys.argv:  # eval.py
    folder = Path(sys.argv[1])
    with (folder.parent.parent / "evaluated.txt").open("a") as file:
        print(folder.name, *sys.argv[2:], file=file)
    if (folder.parent.parent / "unevaluable").exists():
        sys.exit("eval.py: a task that does not fit\\nTraceback")
    sys.exit()
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = Path(flags["--run-dir"])
study = folder.parent.parent
with (study / "begun.txt").open("a") as file:
    print(folder.name, os.environ.get("CUDA_VISIBLE_DEVICES"),
          os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), os.environ.get("LINEARGPT_SHARED_DEVICE"), file=file)
if folder.name in (study / "failing.txt").read_text().split():
    print("train.py: the loss is not finite", *["Traceback of a library"] * 3, sep="\\n", file=sys.stderr)
    sys.exit("RuntimeError: Event loop is closed")
if folder.name in (study / "broken.txt").read_text().split():
    sys.exit("KeyError: a bug")
if folder.name in (study / "endless.txt").read_text().split():
    stopped = []
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    (study / "under_way").touch()
    while not stopped:
        time.sleep(0.01)
    (study / "saved").write_text(folder.name)
    sys.exit(130)
folder.mkdir(exist_ok=True)
line = {"step": 10, "tokens": 10, "train_seconds": 1.0, "wall_seconds": 3.0, "loss": 2.5}
with (folder / "metrics.jsonl").open("w") as file:
    for step in (1, 11):
        print(json.dumps(line | {"split": "train", "step": step, "train_seconds": float(step)}), file=file)
    print(json.dumps(line | {"split": "val", "step": 11, "wall_seconds": 20.0}), file=file)
(folder / "environment.json").write_text(json.dumps({"parameters": 1000, "step_bytes": 5_000_000}))
if (study / "config.json").exists():
    (folder / "config.json").write_bytes((study / "config.json").read_bytes())
if folder.name in (study / "diverging.txt").read_text().split():
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"split": "train", "step": 7, "loss": None}) + "\\n")
    sys.exit("train.py: step 7: the loss is not finite")
'''

STUDY = '''
"""A study of a tiny model."""

from pathlib import Path

from comparison.study import Variation, grid

RECIPE = str(Path(__file__).parent / "recipe" / "tiny.py")


def get_runs(quick):
    return grid(RECIPE, ("softmax",), {"optimizer.learning_rate": (1e-3, 1e-2), "train.seed": (0, 1)})


def figures(runs):
    return []
'''
STUDIES = sorted(file.stem for file in (small_run.ROOT / "studies").glob("[!_]*.py"))
RUNS = [f"softmax-learning_rate-{rate}-seed-{seed}" for rate in ("0.001", "0.01") for seed in (0, 1)]


class SweptStudy:
    """A study file in a folder, and sweep.py on it, with a script in place of train.py."""

    def __init__(self, folder: Path):
        self.folder, self.path, self.out = folder, folder / "study.py", folder / "out"
        self.path.write_text(STUDY)
        for name in ("failing.txt", "broken.txt", "diverging.txt", "endless.txt", "begun.txt"):
            (folder / name).touch()

    def change(self, old: str, new: str) -> None:
        """Edit the study."""
        assert old in self.path.read_text()
        self.path.write_text(self.path.read_text().replace(old, new))

    def sweep(self, *flags: object) -> int:
        """The exit code of sweep.py."""
        return sweep.main([str(self.path), "--out", str(self.out), *map(str, flags)])

    def refused(self, capsys, *flags: object) -> str:
        """The error of sweep.py on a wrong command line."""
        assert self.sweep(*flags) == 2
        return capsys.readouterr().err

    def start(self) -> subprocess.Popen:
        """sweep.py as a process."""
        script = ("import sys; from sweeps import plan; import sweep; plan.program = lambda command: "
                  f"[{str(self.folder / 'fake.py')!r}]; sys.exit(sweep.main(sys.argv[1:]))")
        return subprocess.Popen([sys.executable, "-c", script, str(self.path), "--out", str(self.out)],
                                cwd=small_run.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def begun(self) -> list[str]:
        """The names of the runs that began since the last call, in order."""
        names = [line.split()[0] for line in (self.folder / "begun.txt").read_text().splitlines()]
        (self.folder / "begun.txt").write_text("")
        return names

    def used(self) -> set[tuple[str, ...]]:
        """The variables of CUDA and JAX that runs had since the last call of :meth:`begun`."""
        return {tuple(line.split()[1:]) for line in (self.folder / "begun.txt").read_text().splitlines()}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def made(tmp_path: Path, recipe: Path, monkeypatch) -> SweptStudy:
    (tmp_path / "recipe").symlink_to(recipe.parent)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(plan, "program", lambda command: [str(tmp_path / "fake.py")])
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.01)
    return SweptStudy(tmp_path)


def test_makes_the_runs_in_order_and_skips_them_the_next_time(made: SweptStudy, capsys):
    assert made.sweep() == 0
    assert made.begun() == RUNS
    assert "4 done, 0 running, 0 left, ETA 0:00:00" in capsys.readouterr().out
    record = read_json(made.out / "study.json")
    assert record["format"] == 1
    assert Path(record["study"]) == made.path
    assert [run["name"] for run in record["runs"]] == RUNS
    assert len({run["hash"] for run in record["runs"]}) == 4
    of_run = read_json(made.out / RUNS[0] / "run.json")
    assert (of_run["hash"], of_run["finished"]) == (record["runs"][0]["hash"], True)
    assert of_run["fields"]["optimizer.learning_rate"] == 1e-3
    assert (made.out / "figures" / "figures.md").is_file()
    assert made.sweep() == 0
    assert made.begun() == []


def test_a_run_that_fails_stops_no_other_and_is_tried_again(made: SweptStudy, capsys):
    (made.folder / "failing.txt").write_text(f"{RUNS[0]} {RUNS[2]} {RUNS[3]}")
    assert made.sweep() == 1
    assert made.begun() == RUNS
    printed = capsys.readouterr().err
    assert f"{RUNS[0]}: exit code 1: train.py: the loss is not finite\n" in printed
    assert f"All seeds failed: {RUNS[2]}, {RUNS[3]}" in printed
    assert f"All seeds failed: {RUNS[0]}" not in printed
    (made.folder / "failing.txt").write_text("")
    (made.folder / "broken.txt").write_text(RUNS[0])
    assert made.sweep() == 1
    assert made.begun() == [RUNS[0], RUNS[2], RUNS[3]]
    assert f"{RUNS[0]}: exit code 1: KeyError: a bug\n" in capsys.readouterr().err
    (made.folder / "broken.txt").write_text("")
    assert made.sweep() == 0
    assert made.begun() == [RUNS[0]]


def test_ctrl_c_stops_the_run_under_way_and_the_sweep(made: SweptStudy):
    (made.folder / "endless.txt").write_text(RUNS[1])
    process = made.start()
    wait_for((made.folder / "under_way").exists, process)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (made.folder / "saved").read_text() == RUNS[1]
    assert "1 of 4 runs finished; repeat the command" in printed
    (made.folder / "endless.txt").write_text("")
    made.begun()
    assert made.sweep() == 0
    assert made.begun() == RUNS[1:]


def test_a_run_that_a_killed_sweep_left_under_way_is_waited_for(made: SweptStudy, capsys):
    (made.folder / "endless.txt").write_text(RUNS[0])
    process = made.start()
    wait_for((made.folder / "under_way").exists, process)
    (child,) = children(process.pid)
    process.kill()
    process.communicate()
    (made.folder / "endless.txt").write_text("")
    ended = threading.Event()

    def stop_it_once_it_is_waited_for() -> None:
        wait_for(lambda: ended.is_set() or "waiting for it to end" in capsys.readouterr().err)
        os.kill(child, signal.SIGINT)

    waiting = threading.Thread(target=stop_it_once_it_is_waited_for)
    waiting.start()
    try:
        assert made.sweep() == 0
        assert (made.folder / "saved").exists()
    finally:
        ended.set()
        waiting.join()
    assert made.begun() == [RUNS[0], *RUNS]


def test_a_run_that_another_sweep_finished_meanwhile_is_not_made_again(made: SweptStudy, monkeypatch, capsys):
    one = plan.plan(load_study(made.path), made.out, quick=False)[0]

    def finished_now(run: Path) -> bool:
        if run == one.folder:
            folder.finish(one, keep_all=True)
        return False

    monkeypatch.setattr(processes, "in_training", finished_now)
    assert made.sweep() == 0
    assert made.begun() == RUNS[1:]
    assert f"{RUNS[0]}: finished by another process (1 done" in capsys.readouterr().out


def test_a_line_that_cannot_be_printed_ends_no_sweep(made: SweptStudy, capsys):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert made.sweep() == 1
    assert made.begun() == RUNS
    assert (made.out / "figures" / "figures.md").is_file()
    assert "standard output: No space left" in capsys.readouterr().err


def test_no_run_goes_on_where_the_sweep_itself_fails(made: SweptStudy, monkeypatch):
    (made.folder / "endless.txt").write_text(RUNS[0])
    monkeypatch.setattr(processes, "last_lines", lambda folder: 1 / 0)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(ZeroDivisionError):  # raised for the second run's end, while the first is running
        made.sweep("--parallel", 2)
    assert not is_locked(made.out / RUNS[0] / processes.LOCK)
    assert not in_training(made.out / RUNS[0])


@pytest.mark.parametrize("name", ["study.json", "run.json"])
def test_records_of_another_format_are_refused(made: SweptStudy, capsys, name: str):
    assert made.sweep() == 0
    path = made.out / name if name == "study.json" else made.out / RUNS[0] / name
    with edited(path) as values:
        values["format"] = 2
    assert made.sweep() == 1
    assert f"{name}: format 2; this version of lineargpt reads format 1" in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new", "message"), [
    ("(1e-3, 1e-2)", "(2e-3, 1e-2)", "has a run softmax-learning_rate-0.001-seed-0"),
    ('{"optimizer', '{**{}, "optimizer', None),
    ('"train.seed": (0, 1)}', '"train.seed": (0, 1)}, {"train.steps": 5}', "train.steps 2, not 5"),
    ('"train.seed": (0, 1)}', '"train.seed": (0, 1)}, {"checkpoint.keep": 1, "train.sample_every": 1}', None),
    ('"train.seed": (0, 1)', '"train.seed": (1, 0)', None),
])
def test_the_folder_of_another_version_of_the_study_is_refused(made: SweptStudy, capsys,
                                                               old: str, new: str, message: str | None):
    assert made.sweep() == 0
    before = {path: path.read_bytes() for path in made.out.rglob("*") if path.is_file()}
    made.change(old, new)
    assert made.sweep() == (0 if message is None else 2)
    assert (message or "") in capsys.readouterr().err
    for path, contents in before.items():
        assert path.read_bytes() == contents


def test_a_study_may_get_more_runs(made: SweptStudy, capsys):
    made.change("(1e-3, 1e-2)", "(1e-2,)")
    assert made.sweep() == 0
    assert made.begun() == RUNS[2:]
    made.change("(1e-2,)", "(1e-3, 1e-2)")
    assert made.sweep() == 0
    assert made.begun() == RUNS[:2]
    assert list(json.loads((made.out / "study.json").read_text())["runs"]) == [
        {"name": run.name, "hash": run.hash} for run in plan.plan(load_study(made.path), made.out, quick=False)]
    made.change("(1e-3, 1e-2)", "(1e-2,)")
    assert f"which has a run {RUNS[0]}" in made.refused(capsys)


def test_parts_of_a_study_share_a_folder(made: SweptStudy, capsys):
    made.change("def get_runs(quick):", "def get_runs(quick, rungs=None):")
    made.change("(1e-3, 1e-2)", "tuple(map(float, rungs or (1e-3, 1e-2)))")
    for rung in ("1e-2", "1e-3"):
        assert made.sweep("--rungs", rung) == 0
    assert made.begun() == RUNS[2:] + RUNS[:2]
    assert made.sweep() == 0
    assert made.begun() == []
    assert [run["name"] for run in json.loads((made.out / "study.json").read_text())["runs"]] == RUNS
    assert made.sweep("--rungs", "1e-2", "--commands", made.folder / "lines.txt") == 0
    assert f"--rungs 1e-2 --run {RUNS[3]}" in (made.folder / "lines.txt").read_text()
    before = "rungs"
    for name in ("data_dir", "data_source"):
        flag = "--" + name.replace("_", ".")
        made.change(f"{before}=None", f"{name}=None")
        made.change("rungs or " if before == "rungs" else f"{before} and ({before},) or ", f"{name} and ({name},) or ")
        assert made.sweep(flag, "1e-2", "--commands", made.folder / "lines.txt") == 0
        assert f"{flag} 1e-2 --run {RUNS[3]}" in (made.folder / "lines.txt").read_text()
        before = name
    made.change("data_source=None", "rows=None")
    made.change("data_source and (data_source,) or ", "")
    for name in ("data_dir", "data_source"):
        flag = "--" + name.replace("_", ".")
        assert f"has its own data; expected a study with get_runs(quick, {name}=None) ({flag})" in (
            made.refused(capsys, flag, "1e-2"))
    assert "rungs: " in (message := made.refused(capsys, "--rungs", "1e-2"))
    assert "has no ladder of sizes; expected a study with get_runs(quick, rungs=None)" in message


@pytest.fixture
def following(made: SweptStudy) -> SweptStudy:
    """A study whose second seeds follow from two results of 11 steps."""
    config = write_run(made.folder / "like") / "config.json"
    with edited(config) as values:
        values["train"]["steps"] = 11
    config.rename(made.folder / "config.json")
    made.change("def get_runs(quick):", "def get_runs(quick, finished=()):")
    made.change('"train.seed": (0, 1)', '"train.seed": (0, 1) if len(finished) > 1 else (0,)')
    return made


def test_runs_that_follow_from_results_are_run_after_them(following: SweptStudy, capsys):
    assert following.sweep() == 0
    assert following.begun() == [RUNS[0], RUNS[2], RUNS[1], RUNS[3]]
    assert "2 more runs follow from these results" in capsys.readouterr().err
    assert following.sweep() == 0
    assert following.begun() == []


def test_a_run_that_follows_from_results_has_a_name_and_no_number(following: SweptStudy, capsys):
    assert following.sweep("--run", RUNS[2]) == 0
    assert following.begun() == [RUNS[2]]
    assert not (following.out / "figures").exists()
    assert "--index 0: runs of this study follow from results" in following.refused(capsys, "--index", 0)
    assert f"--run {RUNS[1]}: the study has no such run" in following.refused(capsys, "--run", RUNS[1])  # not yet


def test_a_dry_run_lists_runs_that_will_follow_with_the_totals_of_each_size(following: SweptStudy, capsys):
    following.change("finished=()):", "finished=(), expected=False):")
    following.change("if len(finished) > 1", "if expected or len(finished) > 1")
    following.change("from pathlib", "from dataclasses import replace\nfrom pathlib")
    following.change("return grid(", "runs = grid(")
    following.change("\n\n\ndef figures", '\n    return [replace(run, rung="S" if run.name.endswith("1") else "XS") '
                                         'for run in runs]\n\n\ndef figures')
    assert following.sweep("--run", RUNS[2]) == 0
    assert following.sweep("--dry-run") == 0
    printed = capsys.readouterr().out
    assert [row[:4] for row in cells(printed)] == [
        ["0", RUNS[0], "to do", "0:00:19"], ["1", RUNS[2], "finished", "0:00:19"],
        ["", RUNS[1], "follows", "0:00:19"], ["", RUNS[3], "follows", "0:00:19"],
        ["", "XS: 1 left", "", "0:00:19"], ["", "S: 2 left", "", "0:00:38"], ["", "3 left", "", "0:00:57"]]
    assert "follows: expected after the runs above" in printed
    (later, *_) = plan.plan_later(load_study(following.path), [], following.out, quick=False)[1:]
    assert later.name == RUNS[1]
    later.folder.mkdir()
    (later.folder / "mine").touch()
    assert f"{later.folder} does not belong to this study" in following.refused(capsys, "--dry-run")
    (later.folder / "mine").unlink()
    folder.finish(later, keep_all=True)
    assert following.sweep("--dry-run") == 0
    printed = capsys.readouterr().out
    assert ["", RUNS[1], "finished", "0:00:19"] in [row[:4] for row in cells(printed)]
    assert "S: 1 left" in printed


def test_runs_follow_from_one_that_diverged_too(following: SweptStudy, capsys):
    (following.folder / "diverging.txt").write_text(RUNS[0])
    assert following.sweep() == 1
    assert sorted(following.begun()) == sorted(RUNS)  # each once
    assert f"{RUNS[0]}: exit code 1: train.py: step 7: the loss is not finite" in capsys.readouterr().err


def test_the_folder_of_another_study_or_form_is_refused(made: SweptStudy, capsys):
    assert made.sweep() == 0
    assert "without quick" in made.refused(capsys, "--quick")
    made.path = made.path.rename(made.folder / "other.py")
    assert f"belongs to {made.folder / 'study.py'}, not {made.path}" in made.refused(capsys)


def test_a_folder_that_holds_something_else_is_not_touched(made: SweptStudy, capsys):
    (made.out / RUNS[1]).mkdir(parents=True)
    (made.out / RUNS[1] / "config.json").write_text("mine")
    assert f"{RUNS[1]} does not belong to this study" in made.refused(capsys)
    assert [path.name for path in made.out.iterdir()] == [RUNS[1]]


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"train.seed": (0, 1)', '"train.sed": (0, 1)', "unknown flag --train.sed; perhaps you meant --train.seed"),
    ('"train.seed": (0, 1)', '"train.seed": ("x",)', "train.seed is x; expected a whole number"),
    ('"train.seed": (0, 1)', '"train.steps": (0,)', "train.steps is 0; expected at least 1"),
    ('"train.seed": (0, 1)', '"run-dir": ("x",)', "the field run-dir is set by sweep.py"),
    ('("softmax",)', '("softmx",)', "perhaps you meant softmax"),
    ('("softmax",)', '("softmax", "softmax")', "2 runs are named softmax-learning_rate-0.001-seed-0"),
    ("return grid(", 'return [Variation("a/b", RECIPE)] + grid(', "a run is named 'a/b'"),
    ("return grid(", 'return [Variation("a", RECIPE, command="trane.py")] + grid(', "no command trane.py"),
    ("return grid(", 'return [Variation("a")] + grid(', "train.py requires a recipe"),
    ("return grid(", 'return [Variation("a", RECIPE, evaluation=("--lenght", "8"))] + grid(',
     "run a: eval.py has no flag --lenght; perhaps you meant --length"),
    ("return grid(", 'return [Variation("a", command="benchmarks.train_step", evaluation=("--length", "8"))] + grid(',
     "benchmarks.train_step does not train a run that eval.py could evaluate"),
    ("return grid(", "return [] and grid(", "get_runs returns no runs"),
    ("return grid(", "1 / 0\n    return grid(", "get_runs failed: ZeroDivisionError"),
    ("def get_runs(", "def runs(", "not a study; expected a function get_runs(quick)"),
    ("def figures(", "def pictures(", "not a study; expected a function figures(runs)"),
])
def test_a_study_that_cannot_be_run_is_refused(made: SweptStudy, capsys, old: str, new: str, message: str):
    made.change(old, new)
    assert message in made.refused(capsys)
    assert not made.out.exists()


def test_no_such_study(capsys):
    assert sweep.main(["studies/nothing.py", "--out", "unused"]) == 2
    printed = capsys.readouterr().err
    assert f"expected one of {', '.join(f'studies/{name}.py' for name in STUDIES)}" in printed


def test_a_run_joins_no_others_that_a_launcher_started_beside_it(made: SweptStudy):
    (run, *_) = plan.plan(load_study(made.path), made.out, quick=False)
    assert run.commands[0][-2:] == ["--distributed.processes", "1"]


def test_benchmarks_are_runs_too(made: SweptStudy, capsys):
    made.change("return grid(", 'return [Variation("step", command="benchmarks.train_step", '
                                'fields={"contexts": "128"})] or grid(')
    run, = plan.plan(load_study(made.path), made.out, quick=False)
    assert run.commands[0][1:] == ["--contexts", "128", "--json", str(made.out / "step" / "result.json")]
    made.change('"contexts"', '"contents"')
    assert "benchmarks.train_step has no flag --contents" in made.refused(capsys, "--dry-run")


def test_a_run_is_evaluated_after_its_training(made: SweptStudy, capsys):
    made.change("return grid(", 'return [Variation("a", RECIPE, "softmax", evaluation=("--length", "8,16"))] or grid(')
    (made.folder / "unevaluable").touch()
    assert made.sweep() == 1
    assert "a: exit code 1: eval.py: a task that does not fit\n" in capsys.readouterr().err
    assert not read_json(made.out / "a" / "run.json")["finished"]
    (made.folder / "unevaluable").unlink()
    assert made.sweep() == 0  # train.py does not train again what is finished
    assert made.begun() == ["a", "a"]
    assert (made.folder / "evaluated.txt").read_text() == "a --length 8,16\na --length 8,16\n"
    assert made.sweep() == 0
    assert made.begun() == []
    made.change('"8,16"', '"8"')
    assert "a run with evaluation --length 8,16, not --length 8" in made.refused(capsys)


def test_one_line_a_run_and_one_run_by_its_index(made: SweptStudy, monkeypatch, capsys):
    lines = made.folder / "lines.txt"
    assert made.sweep("--commands", lines) == 0
    assert made.begun() == []
    assert len(lines.read_text().splitlines()) == 4
    python, script, *arguments = shlex.split(lines.read_text().splitlines()[2])
    assert (python, Path(script).name) == ("python", "sweep.py")
    assert sweep.main(arguments) == 0
    assert made.begun() == [RUNS[2]]
    assert made.sweep("--quick", "--keep-all", "--commands", lines) == 2
    made.out = made.folder / "quick"
    assert made.sweep("--quick", "--keep-all", "--commands", lines) == 0
    assert lines.read_text().splitlines()[1].endswith(f"--quick --keep-all --run {RUNS[1]}")
    made.out = made.folder / "out"
    assert made.sweep("--index", 3) == 0
    assert made.sweep("--index", 3) == 0
    assert made.begun() == [RUNS[3]]
    assert not (made.out / "figures").exists()
    assert "index is 4; expected 0 to 3" in made.refused(capsys, "--index", 4)
    assert "--run other: the study has no such run; expected" in made.refused(capsys, "--run", "other")


def test_the_estimates_come_from_finished_runs_of_the_same_shape(made: SweptStudy, capsys):
    made.change("return grid(", 'return grid(RECIPE, ("chunked",)) + grid(')
    made.change("(0, 1)})", '(0, 1)}) + grid(RECIPE, ("softmax",), {}, {"optimizer.name": "radam"})')
    assert made.sweep("--dry-run") == 0
    assert not made.out.exists()
    assert rows(capsys.readouterr().out)["1"][2:5] == ["to do", "?", "?"]
    assert made.sweep("--index", 1) == 0
    capsys.readouterr()
    assert made.sweep("--dry-run") == 0
    found = rows(capsys.readouterr().out)
    # Two steps of 1 s each, and the evaluation, which the val line says took 17 s.
    assert found["1"][2:4] == ["finished", "0:00:19"]
    assert found["2"][2:5] == ["to do", "0:00:19", "5 MB"]
    assert found["0"][2:5] == found["5"][2:5] == ["to do", "?", "?"]
    # A checkpoint has each of 1,000 parameters three times, in 4 bytes; the run makes one, with room for another.
    assert found["2"][5:] == ["24 kB", "4 kB"]


def test_the_estimate_has_the_training_to_annealed_points():
    known = estimates.Timing(step=2.0, evaluation=10.0, other=5.0, memory=None)
    config = Config()
    config = replace(config, train=replace(config.train, steps=1000, minutes=None, eval_every=500))
    assert known.seconds(config) == 5 + 2000 + 2 * 10
    # Each decays over a fifth of its length, and is evaluated.
    annealed = replace(config, train=replace(config.train, anneal_at=(0.25, 0.5, 1.0)))
    assert known.seconds(annealed) == 5 + 2000 * (1 + 0.2 * 0.75) + 4 * 10


def test_what_a_cut_run_has_written_is_not_needed_again(made: SweptStudy, monkeypatch):
    (made.folder / "failing.txt").write_text(" ".join(RUNS[1:]))
    assert made.sweep() == 1
    # 4 kB for each of the three remaining runs, and 20 kB more while one of them trains.
    usage = estimates.shutil.disk_usage(made.folder)
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    assert made.sweep("--dry-run") == 1
    checkpoints = made.out / RUNS[2] / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "half").write_bytes(bytes(20_000))
    assert made.sweep("--dry-run") == 1  # the other two still need theirs
    (made.out / RUNS[1] / "half").write_bytes(bytes(20_000))
    (made.out / RUNS[3] / "half").write_bytes(bytes(20_000))
    assert made.sweep("--dry-run") == 0


def test_what_does_not_fit_the_disk_is_refused(made: SweptStudy, monkeypatch, capsys):
    usage = estimates.shutil.disk_usage(made.folder)
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    for flags in ([], ["--dry-run"]):
        assert made.sweep(*flags) == 1
        assert "4 remaining runs need" in capsys.readouterr().err
    assert made.begun() == []
    assert not made.out.exists()


def test_measure_times_a_step_of_each_program(made: SweptStudy, capsys):
    assert made.sweep("--dry-run", "--measure") == 0
    printed = capsys.readouterr()
    assert printed.err.count("timing 3 steps") == 1
    assert "--measure" not in printed.out
    assert [row[3] for row in rows(printed.out).values()] == ["0:00:19"] * 4
    assert not made.out.exists()
    assert made.sweep("--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "?: add --measure to time 3 steps of each"


def test_measure_times_a_program_with_annealed_points(made: SweptStudy, capsys):
    """Three steps are too few for annealed points, and runs that differ only in these or in their evaluation share a
    program."""
    made.change('"train.seed": (0, 1)}', '"train.anneal_at": ("0.25,0.5,1", "1")}, {"optimizer.schedule": "wsd", '
                                         '"train.steps": 400}')
    made.change("return grid(", "runs = grid(")
    made.change("\n\n\ndef figures", '\n    return [*runs[1:], Variation("evaluated", RECIPE, "softmax", '
                                      'runs[0].fields, evaluation=("--length", "8"))]\n\n\ndef figures')
    assert made.sweep("--dry-run", "--measure") == 0
    assert capsys.readouterr().err.count("timing 3 steps") == 1


def test_several_at_once(made: SweptStudy, monkeypatch, capsys):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda process: {0, 1})
    cores = {}
    monkeypatch.setattr(processes.os, "sched_setaffinity", lambda process, chosen: cores.setdefault(process, chosen))
    assert made.sweep("--parallel", 2) == 0
    assert sorted(made.begun()) == sorted(RUNS)
    assert set(cores.values()) == {(0,), (1,)}
    made.change('"train.seed": (0, 1)}', '"train.seed": (0, 1)}, {"train.minutes": 1.0}')
    made.out = made.folder / "by_minutes"
    assert "share the cores of a CPU" in made.refused(capsys, "--parallel", 2)


def test_on_gpus_each_run_has_its_own(made: SweptStudy, monkeypatch):
    devices = [processes.Place("5"), processes.Place("7")]
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert processes.places_on("gpu", 4, 2, [], {}) == [processes.Place("0"), processes.Place("1")]
    assert processes.places_on("gpu", 2, 2, [], {"CUDA_VISIBLE_DEVICES": "5,7"}) == devices
    with pytest.raises(processes.ConfigError, match="platform tpu"):
        processes.places_on("tpu", 4, 2, [], {})
    monkeypatch.setattr(processes, "places", lambda parallel, runs, environment: devices)
    assert made.sweep("--parallel", 2) == 0
    assert made.used() == {("5", "None", "None"), ("7", "None", "None")}


def test_more_runs_than_gpus_share_them(made: SweptStudy, monkeypatch, capsys):
    shared = processes.places_on("gpu", 2, 3, [], {})
    assert shared == [processes.Place("0", shared=True), processes.Place("1"), processes.Place("0", shared=True)]
    assert "3 runs at once share the memory of 2 GPUs" in capsys.readouterr().err
    monkeypatch.setattr(processes, "places", lambda parallel, runs, environment: processes.places_on(
        "gpu", 1, parallel, runs, environment))
    assert made.sweep("--parallel", 2) == 0
    assert made.used() == {("0", "false", "1")}
    made.out = made.folder / "by_minutes"
    made.change('"train.seed": (0, 1)}', '"train.seed": (0, 1)}, {"train.minutes": 1.0}')
    assert "share a GPU take fewer steps" in made.refused(capsys, "--parallel", 2)


@pytest.mark.parametrize(("flags", "message"), [
    (["--measure"], "--measure requires --dry-run"),
    (["--dry-run", "--index", "0"], "--dry-run and --index are mutually exclusive"),
    (["--index", "0", "--run", "a"], "--index and --run are mutually exclusive"),
    (["--parallel", "0"], "expected at least 1"),
    (["--rows", "linear"], "study.py has its own attentions"),
    (["--rows", "linear,chunkd"], "--rows chunkd: no such row; perhaps you meant chunked"),
])
def test_flags_that_cannot_be_meant(made: SweptStudy, capsys, flags: list[str], message: str):
    assert message in made.refused(capsys, *flags)


def test_rows_replace_the_attentions_of_a_study(made: SweptStudy, tmp_path: Path):
    made.change("def get_runs(quick):", "def get_runs(quick, rows=None):")
    made.change('("softmax",)', 'rows or ("softmax",)')
    lines = tmp_path / "runs.txt"
    assert made.sweep("--rows", "linear,chunked", "--commands", lines) == 0
    assert [run["name"] for run in read_json(made.out / "study.json")["runs"]] == [
        name.replace("softmax", mode) for mode in ("linear", "chunked") for name in RUNS]
    first = shlex.split(lines.read_text().splitlines()[0])
    assert first[first.index("--rows") + 1] == "linear,chunked"


@pytest.mark.fast
def test_a_grid_is_every_combination_in_the_order_of_the_axes():
    runs = grid("configs/quickstart.py", ("softmax", "chunked,softmax"), {
        "pairs": {2: {"data.source": "mqar:pairs=2", "model.context": 16}, 4: {"model.context": 32}},
        "train.seed": (0, 1)}, {"logging.wandb": False, "data.mixture": (("a", 3.0), ("b", 1.0))})
    assert [run.name for run in runs][:5] == [
        "softmax-pairs-2-seed-0", "softmax-pairs-2-seed-1", "softmax-pairs-4-seed-0", "softmax-pairs-4-seed-1",
        "chunked+softmax-pairs-2-seed-0"]
    assert runs[4].flags()[1:] == [
        "--attention", "chunked,softmax", "--logging.no-wandb", "--data.mixture", "a", "3.0",
        "b", "1.0", "--data.source", "mqar:pairs=2", "--model.context", "16", "--train.seed", "0"]
    assert runs[0].arm == runs[1].arm != runs[2].arm


@pytest.mark.parametrize("name", STUDIES)
def test_the_studies_of_the_project_can_be_planned(name: str, tmp_path: Path):
    study = load_study(f"studies/{name}.py")
    variations = {form: study.runs(form) for form in (True, False)}
    recipes = [{run.recipe for run in variations[form]} for form in (True, False)]
    assert len(variations[True]) < len(variations[False]) or recipes[0].isdisjoint(recipes[1])
    planned = plan.plan(study, tmp_path, quick=True)
    for run in planned:
        assert run.config is not None
        steps, minutes = run.config.train.steps, run.config.train.minutes
        assert (steps is None) != (minutes is None)
        assert steps is None or run.config.optimizer.warmup_steps < steps
    assert all(isinstance(line, str) for form in (True, False) for line in study.notes(form))
    for figure in study.figures([]):  # before the first run
        assert figure.name
    runs = [load_run(set_run_fields(write_run(tmp_path / run.name), run)) for run in planned]
    figures = study.figures(runs)
    check_names(figures)
    drawn = {name for figure in figures for line in figure.lines for point in line.points for name in point.runs}
    # Figures of classifiers are of test.json.
    assert drawn == {run.name for run in planned if isinstance(run.config, Config)}


def set_run_fields(path: Path, planned: plan.PlannedRun) -> Path:
    """Gives a run the config of a planned one, as if it had ended."""
    assert planned.config is not None
    steps = planned.config.train.steps or 40
    lines = [line | {"step": steps, "accuracy": 0.5, "bits_per_dimension": 2.0} for line in read_lines(path)[-1:]]
    write_lines(path, lines)
    (path / "config.json").write_text(json.dumps(planned.config.to_dict()))
    return path


def test_long_range_arena_is_planned_without_its_data(tmp_path: Path, monkeypatch):
    study = load_study("studies/lra.py")
    variations = study.runs(quick=False)
    assert len(variations) == len({run.attention for run in variations}) * 6 * 3 == 198
    monkeypatch.setattr(tasks, "load", lambda *args, **settings: pytest.fail("it generates or downloads data"))
    pathx, = (plan.plan_run(study.path, run, tmp_path) for run in variations if run.name == "linear-task-pathx-seed-0")
    assert pathx.config.model.context == 16_384  # pyright: ignore[reportOptionalMemberAccess]
    known = estimates.Estimates([pathx])
    assert known.disk(pathx, keep_all=False) is not None
    assert known.problems == []
    newer = plan.plan(study, tmp_path, quick=False, rows=("chunked", "sparse"))
    assert [run.name for run in newer[::3]] == [
        f"{mode}-task-{task}-seed-0" for task in ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
        for mode in ("chunked", "sparse")]
    with pytest.raises(ConfigError, match=r"gated-task-listops-seed-0: .* gated: it is causal and cannot be"):
        plan.plan(study, tmp_path, quick=True, rows=("gated",))
    assert len(study.runs(quick=True, rows=("chunked",))) == 2
    retrieval = [line for line in study.notes(quick=False) if line.startswith("retrieval: ")]
    assert "new_aan_pairs.train.tsv" in retrieval[0]
    assert "https://storage.googleapis.com/long-range-arena/lra_release.gz" in retrieval[0]


def test_images_that_are_given_are_compared_at_the_best_rate_of_each_attention(tmp_path: Path):
    study = load_study("studies/images.py")
    (tmp_path / "mnist").mkdir()

    def runs_after(*finished: Run) -> Sequence[Variation]:
        return study.runs(True, finished, data_dir=str(tmp_path / "mnist"))

    def finished(variation: Variation, bits: float) -> Run:
        run = plan.plan_run(study.path, variation, tmp_path)
        assert run.config.data.source == str(tmp_path / "mnist")  # pyright: ignore[reportOptionalMemberAccess]
        folder = set_run_fields(write_run(run.folder), run)
        write_lines(folder, [line | {"bits_per_dimension": bits} for line in read_lines(folder)])
        entry = {"context": 784, "corpus": "mnist", "loss": 1.0, "bits_per_dimension": bits + 0.1, "positions": []}
        (folder / "evaluation-test.json").write_text(json.dumps({"step": 40, "evaluations": [entry]}))
        return load_run(folder)

    best = {"softmax": "0.003", "chunked": "0.003", "gated": "0.03", "kda": "0.01", "hybrid-kda": "0.003"}
    first = runs_after()
    assert len(first) == 20
    runs = [finished(run, 0.9 if run.name in {f"mnist-{arm}-{rate}-seed-0" for arm, rate in best.items()} else 1.0)
            for run in first]
    # A higher rate may be better for gated.
    following = runs_after(*runs)[20:]
    (higher,), seeds = [[run for run in following if run.name.endswith(end)] for end in ("0", ("1", "2"))]
    assert higher.name == "mnist-gated-0.1-seed-0"
    assert not any("gated" in run.name for run in seeds)
    assert plan.plan_run(study.path, seeds[0], tmp_path).config is not None
    runs.append(finished(higher, 0.95))
    for bits in (math.nan, 0.95):
        runs[-1].val.points["bits_per_dimension"][-1] = bits
        assert [run.name for run in runs_after(*reversed(runs))[21:]] == [
            f"mnist-{arm}-{rate}-seed-{seed}" for seed in (1, 2) for arm, rate in best.items()]
    test = study.figures(runs)[-1]
    assert {row[0]: row[4] for row in test.rows} == {
        "softmax": "1.0000", "chunked": "1.0000", "gated": "1.0000", "kda": "1.0000", "hybrid-kda": "1.0000"}
    assert {point.x for line in test.lines for point in line.points} == {"MNIST"}
    (tmp_path / "mnist" / "meta.json").write_text("{}")
    assert study.runs(True, data_dir=str(tmp_path / "mnist"))[0].fields["data.dir"] == str(tmp_path / "mnist")


def test_a_rate_at_which_an_ability_diverged_is_tried_but_not_the_best():
    study = load_study("studies/abilities.py")

    def run(rate: float, accuracy: float, loss: float) -> SimpleNamespace:
        return SimpleNamespace(name=f"Z2-kda-{rate:g}-seed-0", seed=0, config={"optimizer": {"learning_rate": rate}},
                               final=lambda quantity="loss": {"accuracy": accuracy, "loss": loss}[quantity])

    tried = [run(0.01, 0.6, 1.0), run(0.003, 0.7, 1.0), run(0.03, math.nan, math.nan)]
    for runs in (tried, tried[::-1]):
        assert study.module.best_rates(runs) == {("kda", "Z2"): 0.003}


def test_a_dry_run_ends_with_the_studys_notes_and_what_cannot_start(made: SweptStudy, capsys):
    made.change("def figures(runs):", 'def notes(quick):\n    return ["9 hours"]\n\n\ndef figures(runs):')
    made.change('"train.seed": (0, 1)}', '"train.seed": (0, 1)}, {"data.dir": "nowhere", "data.source": "a/corpus"}')
    assert made.sweep("--dry-run") == 0
    *_, note, problem = capsys.readouterr().out.splitlines()
    assert note == "9 hours"
    names = ", ".join(RUNS[:3])
    assert problem.startswith(f"cannot start here: {names} and 1 more: data.dir: no token files in nowhere")
    assert "python -m data.prepare a/corpus" in problem


def test_the_hours_of_the_sizes_are_those_of_the_published_step_times():
    notes = load_study("studies/sizes.py").notes(quick=False)
    # 954 updates of 2¹⁹ tokens at 15.543 ms for 1,024 of them.
    assert notes[0].startswith("H100-hours by published step times at batch 1: 57 ")
    assert f"124M: softmax {954 * 2**19 / 1024 * 15.543e-3 / 3600:.1f} at 1,024, " in notes[1]


@pytest.mark.thorough
def test_a_study_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, recipe: Path, capsys):
    (tmp_path / "recipe").symlink_to(recipe.parent)
    made = SweptStudy(tmp_path)
    made.change('"optimizer.learning_rate": (1e-3, 1e-2), "train.seed": (0, 1)}',
                '"train.seed": (0,)}, {"train.steps": 120, "train.eval_every": 40, "checkpoint.every_steps": 10, '
                '"checkpoint.keep": 2, "optimizer.schedule": "wsd", "train.anneal_at": "0.5,1"}')
    name = "softmax-seed-0"
    process = subprocess.Popen([sys.executable, "sweep.py", str(made.path), "--out", str(made.out)], cwd=small_run.ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: small_run.saved_steps(made.out / name), process)
    # The run must end first, or the sweep would record a failure; then no process is left.
    os.kill(process.pid, signal.SIGSTOP)
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait()
    assert read_json(made.out / name / "run.json")["finished"] is False
    assert made.sweep() == 0
    cut = made.out
    made.out = tmp_path / "whole"
    assert made.sweep("--keep-all") == 0
    assert made.sweep() == 0  # it stays as it is

    def losses(out: Path) -> list[tuple]:
        return [(line["split"], line["step"], line["loss"]) for line in small_run.lines(out / name)]

    assert losses(cut) == losses(made.out)
    # The kept parameters can be sampled from, and train.py knows that the run is finished.
    for saved in ("checkpoints/120", "annealed/60/checkpoints/60"):
        whole, parameters = ({path.name for path in (out / name / saved).iterdir()} for out in (made.out, cut))
        assert whole - parameters == {"optimizer"}
    assert set(small_run.saved_steps(cut / name)) <= set(small_run.saved_steps(made.out / name))
    config = ["--train.steps", 120, "--train.eval-every", 40, "--optimizer.schedule", "wsd",
              "--train.anneal-at", "0.5,1"]
    with small_run.settings():
        capsys.readouterr()
        assert small_run.run(recipe, "--attention", "softmax", "--run-dir", cut / name, *config) == 0
        assert "is finished: step 120. It has no optimizer state" in capsys.readouterr().err
        before = {path: path.read_bytes() for path in (cut / name).glob("*.json")}
        assert small_run.run(recipe, "--attention", "softmax", "--run-dir", cut / name, "--train.steps", 121) == 1
        assert "has no optimizer state" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in (cut / name).glob("*.json")} == before
        assert sample.main([str(cut / name), "--prompt", "3", "--max-new-tokens", "2"]) == 0


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of the table of --dry-run, by index."""
    return {row[0]: row for row in cells(printed) if row[0]}


def cells(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
