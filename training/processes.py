"""The processes of a run: how they join, agree and end.

    srun python train.py configs/gpt2_124m.py --run-dir runs/124m
    python train.py configs/gpt2_124m.py --distributed.coordinator HOST:PORT --distributed.processes 2
        --distributed.process 0

Every process runs the same command. Process 0 decides and writes, the others follow. They exchange a few values through
JAX's coordination service, which also watches that all are alive. With one process, nothing is exchanged.
"""

import json
import os
import select
import signal
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from support.command import error_stream, message, output_stream, print_only_errors, report_error, run_command
from support.errors import FAILURE, ConfigError
from support.ranges import Count, Natural, Seconds, check_options
from training.roll_call import call_roll, name

HEARTBEAT_SECONDS = 15
"""A process that has not been heard of for so long is lost."""
SHUTDOWN_SECONDS = 10
POLL_SECONDS = 1.0
ANSWER_SECONDS = 3 * POLL_SECONDS
"""How long process 0, when it fails, waits for the others to end first."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT)
"""Signals that process 0 receives from the others."""
LATEST_VALUES = 1000
"""Latest values of process 0 that stay there for processes that lag behind; collectives keep these within a few."""


@dataclass(frozen=True)
class Distributed:
    """Flags of the processes of a run. They are no fields of the config: a run resumes on any number of processes."""

    coordinator: str | None = None
    """Address HOST:PORT of process 0. None: found by SLURM, Open MPI, Kubernetes or the TPU, if there are several."""
    processes: Count | None = None
    """Number of processes. 1: do not join others."""
    process: Natural | None = None
    """Number of this process, from 0."""
    wait_seconds: Seconds = 300.0
    """How long to wait at the start for processes that have not come."""
    stall_seconds: Seconds | None = None
    """Print all stacks and exit if no step ends for so long. None: 20 median steps, at least 300 s, and no limit with
    one process."""


@dataclass(frozen=True)
class Member:
    """This process, one of those that train together."""

    coordinator: str
    count: int
    index: int
    local_device_ids: list[int] | None = None
    """None: all devices of the machine."""


@dataclass
class Team:
    """The joined processes."""

    member: Member
    client: Any
    woken: socket.socket
    """Receives a byte for each signal, while the main thread may be waiting."""
    wakes: socket.socket
    """Sends it, from the C-level handler."""
    watch: threading.Thread | None = None
    leaves: bool = False
    """Whether this process is ending, so that the end of another must not end it first."""
    signals: deque[int] = field(default_factory=deque)
    """On process 0: signals that other processes have received, and the run has not yet heard of."""
    _values: int = 0

    def key(self, *parts: object) -> str:
        return "/".join(["lineargpt", *map(str, parts)])

    def set(self, key: str, value: Any) -> None:
        self.client.key_value_set_bytes(key, json.dumps(value).encode(), allow_overwrite=True)

    def get(self, key: str) -> Any:
        """The value of a key, once there is one."""
        while True:
            try:
                return json.loads(self.client.blocking_key_value_get_bytes(key, int(1000 * POLL_SECONDS)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise  # Python handles signals in between

    def all(self, *parts: object) -> dict[str, Any]:
        """The values below a key, by the rest of their keys."""
        prefix = self.key(*parts) + "/"
        return {key.removeprefix(prefix): json.loads(value)
                for key, value in self.client.key_value_dir_get_bytes(prefix)}

    def next_key(self) -> tuple[str, int]:
        self._values += 1
        return self.key("values", self._values), self._values


current_team: Team | None = None
"""The processes that this one has joined, if any."""


def join(flags: Distributed) -> None:
    """Joins the processes of the run, before any device is used. Does nothing if there is only one.

    Raises:
        ConfigError: flags are missing or do not fit together, or the launcher does not say who the others are.
        TrainingError: a process did not come within ``wait_seconds``.
    """
    global current_team
    member = member_of(flags)
    if member is None:
        return
    bound = call_roll(member.coordinator, member.count, member.index, flags.wait_seconds)
    # JAX's service for preemptions handles SIGTERM, and the loop does.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        member.coordinator, member.count, member.index, member.local_device_ids, cluster_detection_method="deactivate",
        coordinator_bind_address=bound,  # by default it listens at all addresses of the machine
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS)
    from jax._src import distributed  # its store of keys and values has no public name

    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    current_team = Team(member, distributed.global_state.client, woken, wakes)
    if member.index > 0:
        print_only_errors(f"process {member.index}")
    current_team.watch = threading.Thread(target=_watch, args=(current_team,), name="processes", daemon=True)
    current_team.watch.start()
    jax.devices()  # exchanges the devices of all processes


def member_of(flags: Distributed) -> Member | None:
    given = {f"distributed.{name}": getattr(flags, name) for name in ("coordinator", "processes", "process")}
    check_options(flags, "distributed")
    if flags.processes == 1:
        return None
    if all(value is None for value in given.values()):
        return _member_by_launcher()
    if missing := [name for name, value in given.items() if value is None]:
        raise ConfigError(f"expected {' and '.join(missing)} beside "
                          f"{' and '.join(name for name in given if name not in missing)}")
    coordinator, count, index = given.values()
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"distributed.coordinator is {coordinator}; expected HOST:PORT, such as node1:12345")
    if not 0 <= index < count:
        raise ConfigError(f"distributed.process is {index}; expected 0 to {count - 1}: there are {count} "
                          "processes")
    return Member(coordinator, count, index)


def _member_by_launcher() -> Member | None:
    """What the launcher says, as jax reads it; None if it started one process, or there is none."""
    from jax._src import clusters

    for kind in clusters.ClusterEnv._cluster_types:
        # Only indexed jobs have processes that belong together; and jax warns without its extra k8s.
        if kind.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in os.environ:
            continue
        try:
            if kind.opt_in_only_method or not kind.is_env_present():
                continue
            count = _slurm_tasks() if kind.name == "slurm" else kind.get_process_count()
            if count < 2:
                return None
            address = kind.get_coordinator_address(
                timeout_secs=300, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"))
            # jax gives each of several processes of a machine one device.
            shared = _shares_machine(kind.name) and "JAX_LOCAL_DEVICE_IDS" not in os.environ
            local = kind.get_local_process_id() if shared else None
            return Member(address, count, kind.get_process_id(), None if local is None else [local])
        except (RuntimeError, KeyError, ValueError) as error:
            raise ConfigError(f"{kind.__name__.removesuffix('Cluster')} does not say which processes belong to the "
                              f"run ({error}); give distributed.coordinator, distributed.processes and "
                              "distributed.process, or 1 as distributed.processes to train alone") from error
    return None


def _slurm_tasks() -> int:
    """Tasks of the job step: an interactive step in a job of several tasks has one."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"]))


def _shares_machine(launcher: str) -> bool:
    """Whether the launcher started several processes on a machine."""
    variable = "SLURM_STEP_TASKS_PER_NODE" if launcher == "slurm" else "OMPI_COMM_WORLD_LOCAL_SIZE"
    tasks = os.environ.get(variable, "1")
    return any(int(part.partition("(")[0]) > 1 for part in tasks.split(","))  # such as 2(x3),1


def several() -> bool:
    """Whether the run has several processes."""
    return current_team is not None


def is_first() -> bool:
    """Whether this process decides and writes."""
    return current_team is None or current_team.member.index == 0


def from_first[T](value: Callable[[], T]) -> T:
    """Process 0's ``value()``, on all processes, which must call this in the same order. Tuples become lists."""
    if current_team is None:
        return value()
    key, number = current_team.next_key()
    if not is_first():
        return current_team.get(key)
    found = value()
    current_team.set(key, found)
    if number > LATEST_VALUES:
        current_team.client.key_value_delete(current_team.key("values", number - LATEST_VALUES))
    return found


def _from_all(value: Any) -> list[Any]:
    """The value of each process, on all."""
    if current_team is None:
        return [value]
    key, _ = current_team.next_key()
    current_team.set(f"{key}/{current_team.member.index}", value)
    return [current_team.get(f"{key}/{index}") for index in range(current_team.member.count)]


@contextmanager
def first_then_rest() -> Iterator[None]:
    """Process 0 runs the block before the others do."""
    if not is_first():
        from_first(lambda: None)
    yield
    if is_first():
        from_first(lambda: None)


def check_equal(fields: Mapping[str, Any]) -> None:
    """Checks that the processes agree.

    Args:
        fields: values for JSON, by their name in the message.

    Raises:
        ConfigError: on all processes, if they do not.
    """
    if differing := differences(_from_all(dict(fields))):
        raise ConfigError(f"the processes of the run differ: {'; '.join(differing)}. Start all with the same command, "
                          "code and data")


def differences(everywhere: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that differ, each with its values and where they are; from the fields of each process."""
    found = []
    for key in {key: None for fields in everywhere for key in fields}:
        held: dict[str, list[int]] = {}
        for index, fields in enumerate(everywhere):
            held.setdefault(json.dumps(fields[key]) if key in fields else "not set", []).append(index)
        if len(held) > 1:
            found.append(f"{key} is " + " and ".join(f"{value} on {name(where)}" for value, where in held.items()))
    return found


def check_shared(folder: Path) -> None:
    """Checks that all processes see the same folder, which must exist on process 0.

    Raises:
        ConfigError: on all processes, if one does not.
    """
    if current_team is None:
        return
    marker = Path(folder) / from_first(lambda: f".shared-{uuid.uuid4().hex}")
    if is_first():
        for left in Path(folder).glob(".shared-*"):  # by a killed process
            left.unlink()
        marker.touch()
    from_first(lambda: None)
    blind = [index for index, sees in enumerate(_from_all(_appears(marker))) if not sees]
    if is_first():
        marker.unlink()
    if blind:
        raise ConfigError(f"{folder} on {name(blind)} is not the folder of process 0; expected a run_dir that all "
                          "processes share")


def _appears(path: Path, seconds: float = 10.0) -> bool:
    """Whether a file appears; a network's file system may take seconds to show it."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        if path.parent.is_dir():
            os.listdir(path.parent)
    return True


def signals_of_others() -> Iterator[int]:
    """The signals that other processes have received since the last call, within a second or two; process 0 only."""
    while current_team is not None and current_team.signals:
        yield current_team.signals.popleft()


def run_together(prog: str, command: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None, *,
                 flags: Mapping[str, str] | None = None) -> int:
    """:func:`support.command.run_command` for a command that calls :func:`join`.

    All processes end together: with the exit code that the command returns, or with that of the first failure.
    """
    reported: list[str] = []
    together: list[int] = []

    def describe(error: BaseException) -> str:
        reported.append(message(error))
        return reported[-1]

    def agreed(arguments: Sequence[str]) -> int:
        together.append(command(arguments) or 0)
        return together[-1]

    try:
        code = run_command(prog, agreed, arguments, flags=flags, describe=describe)
    except SystemExit as error:  # of a signal
        if current_team is None:
            raise
        code = error.code if isinstance(error.code, int) else FAILURE
        reported.append("a signal ended it")
    except BaseException as error:
        if current_team is None:
            raise
        reported.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        if isinstance(error, jax.errors.JaxRuntimeError):
            report_error(
                f"{reported[-1]}. If another process is lost, the coordination service names it and ends this one")
            time.sleep(2 * HEARTBEAT_SECONDS)
        traceback.print_exc(file=error_stream())
        code = FAILURE
    if current_team is not None:
        if not together:
            _fail(current_team, code, reported[-1] if reported else "see its output")
        _leave(current_team)
    return code


def _leave(team: Team) -> None:
    """Ends together with the others."""
    key, _ = team.next_key()
    team.set(f"{key}/{team.member.index}", True)
    for index in range(team.member.count):  # a long wait: process 0 may still be writing a checkpoint
        team.get(f"{key}/{index}")
    team.leaves = True
    signal.set_wakeup_fd(-1)
    team.wakes.send(b"\0")
    if team.watch is not None:
        team.watch.join()  # it uses the client
    jax.distributed.shutdown()


def _fail(team: Team, code: int, text: str) -> None:
    """Ends this process with an exit code, and the others through :func:`_watch`."""
    team.leaves = True
    with suppress(jax.errors.JaxRuntimeError):  # process 0 is lost
        team.set(team.key("failed", team.member.index), [code, text])
        deadline = time.monotonic() + ANSWER_SECONDS
        # Process 0 ends last: without its service the others abort.
        while is_first() and time.monotonic() < deadline:
            if len({*team.all("failed"), *team.all("ended")}) == team.member.count:
                time.sleep(POLL_SECONDS)
                break
            time.sleep(0.1)
    exit_now(code)


def fail(text: str) -> None:
    """Ends all processes of the run at once, from any thread."""
    if current_team is not None:
        _fail(current_team, FAILURE, text)
    exit_now(FAILURE)


def _watch(team: Team) -> None:
    """On a thread: tells process 0 of signals, or collects those of the others, and ends this process when another
    fails."""
    index, sent = team.member.index, 0
    while not team.leaves:
        failed: dict[int, Any] = {}
        ready, *_ = select.select([team.woken], [], [], POLL_SECONDS)
        try:
            for number in team.woken.recv(4096) if ready else b"":
                if index > 0 and number in FORWARDED:
                    sent += 1
                    team.set(team.key("signals", f"{index}-{sent}"), number)
            for rest, number in team.all("signals").items() if index == 0 else ():
                team.client.key_value_delete(team.key("signals", rest))
                team.signals.append(number)
            failed = {int(other): how for other, how in team.all("failed").items() if int(other) != index}
            if failed:
                team.set(team.key("ended", index), True)
        except jax.errors.JaxRuntimeError:
            if team.leaves:
                return
            report_error("process 0 is lost: its coordination service does not answer")
            exit_now(FAILURE)
        if failed and not team.leaves:
            other, (code, text) = next(iter(failed.items()))
            report_error(f"process {other} ended with exit code {code}: {text}")
            exit_now(code)


def exit_now(code: int) -> None:
    """Ends the process at once: JAX's end waits for all others."""
    output_stream().flush()
    error_stream().flush()
    os._exit(code)
