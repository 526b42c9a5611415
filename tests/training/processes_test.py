"""Runs of several processes: that they train as one, and how they end."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from flax import nnx

from data.prepare import prepare
from data.sources.source import Selection
from support import interrupts
from support.errors import ConfigError, DataError
from tests import several_devices, small_run
from training import processes
from training.loading import load_model
from training.processes import Distributed

STEPS = 5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("tiny"))


def ended(*started: subprocess.Popen) -> list[str]:
    """The errors of processes that end with 0."""
    said = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    return said


@pytest.mark.thorough
def test_two_processes_train_save_and_resume_as_one(recipe, tmp_path):
    # A constant rate, as the number of steps changes when a run resumes.
    flags = ("--optimizer.final-fraction", 1, "--train.eval-every", 2, "--train.sample-every", STEPS, "--mesh.fsdp", 2)
    one, two = tmp_path / "one", tmp_path / "two"
    straight = small_run.start(recipe, "--run-dir", one, "--train.steps", STEPS, *flags,
                               **several_devices.environment(4))
    first, second = ended(*small_run.start_together(recipe, "--run-dir", two, "--train.steps", 2, *flags))
    assert "mesh axes: data 2 × fsdp 2; 4 of 4 devices" in first
    # Process 0 alone reports; XLA may print warnings in each.
    assert f"{two}: 2 steps in " in first
    assert not re.search(rf"^({two}|step \d|mesh axes|note)", second, re.MULTILINE)
    ended(small_run.start(recipe, "--run-dir", two, "--train.steps", 4, *flags, **several_devices.environment(4)))
    ended(straight, *small_run.start_together(recipe, "--run-dir", two, "--train.steps", STEPS, *flags))

    expected, found = small_run.lines(one), small_run.lines(two)
    # Each start of the second run ended with an evaluation.
    assert [line["step"] for line in found if line["split"] == "train"] == [1, 2, 3, 4, 5]
    losses = {(line["step"], line["split"]): line["loss"] for line in expected}
    for line in found:
        assert line["loss"] == pytest.approx(losses[line["step"], line["split"]], rel=2e-6)
    expected, found = (nnx.to_flat_state(nnx.state(load_model(run).model, nnx.Param)) for run in (one, two))
    for (name, wanted), (_, value) in zip(expected, found, strict=True):
        np.testing.assert_allclose(value[...], wanted[...], atol=1e-4, err_msg=str(name))
    sample = f"samples/{STEPS:08}.txt"
    assert (two / sample).read_bytes() == (one / sample).read_bytes()
    assert json.loads((two / "environment.json").read_text())["mesh"]["fsdp"] == 2
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())


class End(NamedTuple):
    """How the processes of a run ended."""

    codes: tuple[int, ...]
    errors: tuple[str, ...]
    seconds: tuple[float, ...]
    """From the fault to the end of each."""


def make_long(folder: Path) -> Path:
    """The recipe, with a val split of a million tokens."""
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"{number} is {number * 7}\n" for number in range(150_000)))
    prepare(str(folder / "text.txt"), "bytes", folder / "tokens", Selection(val_share=0.5), progress=False)
    (folder / "tiny.py").write_text(small_run.RECIPE)
    return folder / "tiny.py"


def ends_of(recipe: Path, folder: Path) -> dict[str, End]:
    """Runs with a fault each, at once."""
    long_recipe = make_long(folder / "long")

    endless = ("--train.steps", "None", "--train.minutes", 60)
    # An evaluation of minutes, which only a signal ends.
    evaluates = (*endless, "--train.eval-every", 3, "--train.eval-batches", 10**6)

    def start(name: str, *flags: object, **options) -> list[subprocess.Popen]:
        return small_run.start_together(recipe, "--run-dir", folder / name, *flags, **options)

    pairs = {
        "killed worker": start("killed worker", *endless),
        "killed first": start("killed first", *endless),
        "frozen worker": start("frozen worker", *endless),
        # Sooner than its heartbeat is missed.
        "stuck worker": start("stuck worker", *endless, "--distributed.stall-seconds", 5),
        "stopped worker": small_run.start_together(long_recipe, "--run-dir", folder / "stopped worker", *evaluates),
        "full disk": start("full disk", *endless, "--checkpoint.every-steps", 40, "--mesh.fsdp", 4, "--mesh.data", 1,
                           "--model.width", 64),
        "timed": start("timed", "--train.steps", "None", "--train.minutes", 0.02),
        "other rates": start("other rates", *endless, of_each=((), ("--optimizer.learning-rate", 0.5))),
        "other folder": small_run.start_together(recipe, *endless, of_each=tuple(
            ("--run-dir", folder / f"folder of {index}") for index in range(2))),
    }
    faults: dict[str, Callable[[], None]] = {
        "killed worker": pairs["killed worker"][1].kill,
        "killed first": pairs["killed first"][0].kill,
        "frozen worker": lambda: pairs["frozen worker"][1].send_signal(signal.SIGSTOP),
        "stuck worker": lambda: pairs["stuck worker"][1].send_signal(signal.SIGSTOP),
        "stopped worker": lambda: pairs["stopped worker"][1].send_signal(signal.SIGTERM),
        # Arrays are larger than a file may be, lines of metrics are not.
        "full disk": lambda: resource.prlimit(pairs["full disk"][0].pid, resource.RLIMIT_FSIZE,
                                              (30_000, resource.RLIM_INFINITY)),
    }
    began, last = dict.fromkeys(pairs, time.monotonic()), dict[tuple[str, int], float]()
    try:
        while len(last) < 2 * len(pairs):
            for name, pair in pairs.items():
                for index, process in enumerate(pair):
                    if process.poll() is not None:
                        last.setdefault((name, index), time.monotonic() - began[name])
                if name in faults and len(small_run.lines(folder / name, "train")) >= 3:
                    faults.pop(name)()
                    began[name] = time.monotonic()
                if (name, 0) in last:  # a frozen process cannot end by itself
                    pair[1].send_signal(signal.SIGCONT)
            assert time.monotonic() - max(began.values()) < 200, [name for name in pairs if (name, 0) not in last]
            time.sleep(0.05)
    finally:
        for process in (process for pair in pairs.values() for process in pair):
            process.kill()
    return {name: End(tuple(process.returncode for process in pair),
                      tuple(process.communicate()[1] for process in pair),
                      tuple(last[name, index] for index in range(2)))
            for name, pair in pairs.items()}


@pytest.mark.thorough
def test_a_fault_of_one_process_ends_all_and_is_named(recipe, tmp_path):
    """All faults in one test, because their processes wait most of the time."""
    ends = ends_of(recipe, tmp_path)

    def last_step(name: str) -> int:
        return small_run.lines(tmp_path / name, "train")[-1]["step"]

    for name, survivor, said in (
            ("killed worker", 0, r"stopped sending heartbeats\):\n1\n"),
            ("killed first", 1, "leader task was preempted/died|process 0 is lost"),
            ("frozen worker", 0, r"stopped sending heartbeats\):\n1\n")):
        assert ends[name].codes[survivor] in (1, -signal.SIGABRT), name
        assert ends[name].seconds[survivor] < 60, name
        assert re.search(said, ends[name].errors[survivor]), name

    end = ends["stuck worker"]
    assert end.codes[0] == 1
    assert end.seconds[0] < 60
    assert "no step has ended for 5 s (distributed.stall_seconds). The stacks of all threads:" in end.errors[0]
    assert "in record" in end.errors[0]  # where process 0 waits for the step

    end = ends["stopped worker"]
    assert end.codes == (143, 143), end.errors
    assert max(end.seconds) < 30
    assert small_run.saved_steps(tmp_path / "stopped worker")[-1] == last_step("stopped worker") == 3
    assert small_run.lines(tmp_path / "stopped worker", "val") == []
    assert f"saved at step {last_step('stopped worker')}; repeat the command to resume" in end.errors[0]

    end = ends["full disk"]
    assert end.codes == (1, 1), end.errors
    assert "the checkpoint of step 40 could not be written" in end.errors[0]
    assert "process 0 ended with exit code 1: the checkpoint of step 40 could not" in end.errors[1]

    # The clock of process 0 ends all at the same step.
    end = ends["timed"]
    assert end.codes == (0, 0), end.errors
    assert small_run.lines(tmp_path / "timed", "train")[-1]["train_seconds"] >= 1.2
    assert small_run.saved_steps(tmp_path / "timed")[-1] == last_step("timed")

    end = ends["other rates"]
    assert end.codes == (2, 2)
    for said in end.errors:
        assert "optimizer.learning_rate is 0.01 on process 0 and 0.5 on process 1" in said
    assert not (tmp_path / "other rates").exists()

    end = ends["other folder"]
    assert end.codes == (2, 2), end.errors
    assert "on process 1 is not the folder of process 0; expected a run_dir that all processes share" in end.errors[0]


@pytest.mark.fast
def test_only_fields_that_differ_are_named_with_their_values_and_processes():
    same = {"a": 1, "b": [1, 2]}
    assert processes.differences([same, dict(same)]) == []
    assert processes.differences([same, {"a": 2, "b": [1, 2]}, same]) == ["a is 1 on processes 0, 2 and 2 on process 1"]
    assert processes.differences([same, {"a": 1}]) == ["b is [1, 2] on process 0 and not set on process 1"]


@pytest.mark.fast
@pytest.mark.parametrize(("flags", "said"), [
    (Distributed(coordinator="a:1"), r"expected distributed.processes and distributed.process beside "
                                     r"distributed.coordinator$"),
    (Distributed(process=0), "expected distributed.coordinator and distributed.processes beside"),
    (Distributed("a", 2, 0), "distributed.coordinator is a; expected HOST:PORT"),
    (Distributed("a:70000", 2, 0), "distributed.coordinator is a:70000; expected HOST:PORT"),
    (Distributed("a:1", 2, 2), "distributed.process is 2; expected 0 to 1: there are 2 processes")])
def test_flags_of_processes_that_do_not_fit_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        processes.join(flags)


SLURM = {"SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
         "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_VERSION": "4.1.0"}


@pytest.mark.fast
@pytest.mark.parametrize(("environment", "expected"), [
    ({}, None),
    (SLURM, ("node07:61440", 2, 1, None)),  # a task a host has all of its devices
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}, ("node07:61440", 2, 1, [1])),
    (SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive step of a job of two tasks
    ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),  # outside srun
    (OPEN_MPI, ("10.96.0.1:62624", 4, 3, [1])),
    # mpirun in a Slurm job: Slurm has started one task a machine, which is mpirun's.
    (OPEN_MPI | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ("10.96.0.1:62624", 4, 3, [1])),
    (OPEN_MPI | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, ("10.96.0.1:62624", 4, 3, None)),  # jax reads it
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None)])
def test_the_launcher_says_which_processes_there_are(monkeypatch, environment, expected):
    for variable in list(os.environ):
        if variable.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION")):
            monkeypatch.delenv(variable)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    member = processes.member_of(Distributed())
    assert member == (None if expected is None else processes.Member(*expected))
    assert processes.member_of(Distributed(processes=1)) is None
    if environment:
        assert processes.member_of(Distributed("host:1", 3, 2)) == processes.Member("host:1", 3, 2)


@pytest.mark.fast
def test_one_process_exchanges_nothing():
    assert processes.is_first()
    assert not processes.several()
    assert processes.from_first(lambda: (1, "a")) == (1, "a")
    assert list(processes.signals_of_others()) == []
    with processes.first_then_rest():
        processes.check_equal({"a": 1})
    assert processes.run_together("prog", lambda _: 3, []) == 3


class Store:
    """The part of jax's client that processes use, in memory."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool) -> None:
        self.values[key] = value

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(prefix)]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]


@pytest.fixture
def join_fake(monkeypatch) -> Iterator[Callable[[int], processes.Team]]:
    """Makes this process one of two, whose end is an exception."""
    teams: list[processes.Team] = []

    def exits(code: int) -> None:
        raise SystemExit(code)

    def join(index: int) -> processes.Team:
        team = processes.Team(processes.Member("host:1", 2, index), Store(), *socket.socketpair())
        monkeypatch.setattr(processes, "current_team", team)
        monkeypatch.setattr(processes, "exit_now", exits)
        teams.append(team)
        return team

    yield join
    for team in teams:
        team.woken.close()
        team.wakes.close()


@pytest.mark.fast
@pytest.mark.parametrize(("error", "code"), [(ConfigError("no such field"), 2), (DataError("a shard is damaged"), 1),
                                             (ZeroDivisionError("a bug"), 1)])
def test_a_failure_ends_this_process_and_is_told_to_the_others(join_fake, capsys, error, code):
    team = join_fake(1)

    def command(_):
        raise error

    with pytest.raises(SystemExit) as ending:
        processes.run_together("prog", command, [])
    assert ending.value.code == code
    (told,) = team.all("failed").values()
    assert told[0] == code
    assert str(error) in told[1]
    assert str(error) in capsys.readouterr().err


@pytest.mark.fast
def test_a_signal_that_ends_this_process_has_its_code_and_is_told_to_the_others(join_fake, capsys):
    team = join_fake(0)

    def command(_):
        with interrupts.exit_on_sigterm():
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ending:
        processes.run_together("prog", command, [])
    assert ending.value.code == 143
    assert list(team.all("failed").values()) == [[143, "a signal ended it"]]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.fast
def test_the_failure_of_another_process_ends_this_one_with_its_code(join_fake, capsys):
    team = join_fake(0)
    team.set(team.key("failed", 1), [2, "no such field"])
    team.wakes.send(b"\0")  # look at once
    with pytest.raises(SystemExit) as ending:
        processes._watch(team)
    assert ending.value.code == 2
    assert "process 1 ended with exit code 2: no such field" in capsys.readouterr().err
    assert team.all("ended") == {"0": True}


@pytest.mark.fast
def test_process_0_hears_of_each_signal_once(join_fake):
    team = join_fake(1)
    team.wakes.send(bytes([signal.SIGCONT, signal.SIGWINCH, signal.SIGTERM]))
    team.set(team.key("failed", 0), [1, "so that the watch ends"])
    with pytest.raises(SystemExit):
        processes._watch(team)
    assert list(processes.signals_of_others()) == []
    store, first = team.client, join_fake(0)
    first.client = store
    first.set(first.key("failed", 1), [1, "so that the watch ends"])
    first.wakes.send(b"\0")
    with pytest.raises(SystemExit):
        processes._watch(first)
    assert list(processes.signals_of_others()) == [signal.SIGCONT, signal.SIGTERM]
    assert list(processes.signals_of_others()) == []
    assert first.all("signals") == {}
