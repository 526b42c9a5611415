"""The roll call before the processes of a run join: it names those that never come.

JAX's coordination service only aborts after its time-out, and names nobody. Process 0 listens at the coordinator's
address, the others connect, and each learns who is missing. The address is free again afterwards.
"""

import contextlib
import json
import socket
import time
from typing import Any

from support.errors import ConfigError, TrainingError

RETRY_SECONDS = 0.2
ANSWER_SECONDS = 30.0
"""How much longer than process 0 the others wait."""


def call_roll(address: str, count: int, index: int, seconds: float) -> None:
    """Waits until all processes have called it.

    Args:
        address: ``HOST:PORT`` of process 0, as the others reach it.
        count: number of processes.
        index: number of this process.
        seconds: how long to wait.

    Raises:
        TrainingError: a process did not come; the message names it.
        ConfigError: the processes disagree about their number, or process 0 cannot listen at the port.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    answer = (_listen(int(port), count, deadline) if index == 0 else
              _report(host.strip("[]"), int(port), count, index, deadline))
    if answer is None:
        raise TrainingError(f"process 0 did not come within {seconds:g} s (--distributed.wait-seconds): nothing "
                            f"answers at {address}")
    if expected := answer.get("expected"):
        raise ConfigError(f"process {index} expects {count} processes and process 0 {expected}; give all the same "
                          "--distributed.processes")
    if missing := answer.get("missing"):
        raise TrainingError(f"{name(missing)} did not come within {seconds:g} s (--distributed.wait-seconds), of "
                            f"{count} processes")


def name(processes: list[int]) -> str:
    """``process 1``, or ``processes 1, 3``."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _listen(port: int, count: int, deadline: float) -> dict[str, Any]:
    connected: dict[int, socket.socket] = {}
    try:
        both = socket.has_dualstack_ipv6()
        listener = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=count,
                                        dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"process 0 cannot listen at port {port} ({error.strerror}); give another "
                          "--distributed.coordinator") from error
    with contextlib.ExitStack() as stack:
        with listener:
            while len(connected) < count - 1 and (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                stack.enter_context(connection)
                said = _receive(connection, RETRY_SECONDS * 10)
                if said is None:  # another program
                    continue
                if said["count"] != count:
                    _send(connection, {"expected": count})
                    continue
                connected[said["index"]] = connection  # the last of that number, which may have been restarted
        answer: dict[str, Any] = {"missing": sorted(set(range(1, count)) - connected.keys())}
        for connection in connected.values():
            with contextlib.suppress(OSError):
                _send(connection, answer)
    return answer


def _report(host: str, port: int, count: int, index: int, deadline: float) -> dict[str, Any] | None:
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left) as connection:
            _send(connection, {"index": index, "count": count})
            answer = _receive(connection, left + ANSWER_SECONDS)
            if answer is not None:
                return answer
        time.sleep(RETRY_SECONDS)
    return None


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"lineargpt": value}).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """The next message; None if the connection ends or carries something else."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection.makefile("rb") as lines:
        return json.loads(lines.readline(10_000))["lineargpt"]
    return None
