"""The roll call before the processes of a run join: it names those that never come.

JAX's coordination service only aborts after its time-out, and names nobody. Process 0 listens at the coordinator's
address, and at no other, the others connect, and each learns who is missing. The address is free again afterwards.
Connections that do not send the line of a process are ignored. There is no authentication.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
import time
from typing import Any

from support.command import note
from support.errors import ConfigError, TrainingError

LINE_BYTES = 10_000
"""Maximum length of a message."""
SILENT_SECONDS = 10.0
"""How long process 0 waits for the message of a connection, or to send its answer; it hears others meanwhile."""
RETRY_SECONDS = 0.2
ANSWER_SECONDS = 30.0
"""How much longer than process 0 the others wait."""


def call_roll(address: str, count: int, index: int, seconds: float) -> str | None:
    """Waits until all processes have called it.

    Args:
        address: ``HOST:PORT`` of process 0, as the others reach it.
        count: number of processes.
        index: number of this process.
        seconds: how long to wait.

    Returns:
        On process 0, ``IP:PORT`` where it listened; else None.

    Raises:
        TrainingError: a process did not come; the message names it.
        ConfigError: the processes disagree about their number, or process 0 cannot listen at the address.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + seconds
    bound = None
    if index == 0:
        listener = _listener(host, int(port))
        ip = listener.getsockname()[0]
        bound = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        answer = asyncio.run(_listen(listener, count, deadline))
    else:
        answer = _report(host, int(port), count, index, deadline)
    if answer is None:
        raise TrainingError(f"process 0 did not come within {seconds:g} s (distributed.wait_seconds): nothing "
                            f"answers at {address}")
    if expected := answer.get("expected"):
        raise ConfigError(f"process {index} expects {count} processes and process 0 {expected}; give all the same "
                          "distributed.processes")
    if missing := answer.get("missing"):
        raise TrainingError(f"{name(missing)} did not come within {seconds:g} s (distributed.wait_seconds), of "
                            f"{count} processes")
    return bound


def name(processes: list[int]) -> str:
    """``process 1``, or ``processes 1, 3``."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _listener(host: str, port: int) -> socket.socket:
    """A socket at the first address of ``host`` that belongs to this machine."""
    failure: Exception | None = None
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # an unknown or an impossible name
        places, failure = [], error
    for family, *_, place in places:
        try:
            listener = socket.create_server((str(place[0]), port), family=family)
        except OSError as error:
            failure = failure or error
            continue
        ip = str(place[0])
        if ipaddress.ip_address(ip).is_loopback and host not in ("localhost", ip):
            note(f"{host} is {ip} on this machine, which other machines do not reach; if there are any, give "
                 "distributed.coordinator an address in their network")
        return listener
    raise ConfigError(f"process 0 cannot listen at port {port} of {host} ({getattr(failure, 'strerror', failure)}); "
                      "choose another distributed.coordinator: an address of its machine, and a free port")


async def _listen(listener: socket.socket, count: int, deadline: float) -> dict[str, Any]:
    opened: set[asyncio.StreamWriter] = set()
    connected: dict[int, asyncio.StreamWriter] = {}
    noted = False
    complete = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal noted
        opened.add(writer)
        line = b""
        with contextlib.suppress(OSError, ValueError):  # it breaks off, is silent, or sends too much
            async with asyncio.timeout(SILENT_SECONDS):
                line = await reader.readline()
        match _message(line):
            case {"index": int(index), "count": int(theirs)} if 0 < index < theirs:
                if theirs != count:
                    await _send(writer, {"expected": count})
                    opened.remove(writer)
                    return
                connected[index] = writer  # the last of that number, which may have been restarted
                if len(connected) == count - 1:
                    complete.set()
            case _:
                if not noted:
                    noted = True
                    note("process 0 ignores connections of other programs, such as from "
                         f"{writer.get_extra_info('peername')[0]}")
                writer.close()
                opened.remove(writer)

    server = await asyncio.start_server(hear, sock=listener, limit=LINE_BYTES)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline - time.monotonic()):
            await complete.wait()
    server.close()
    answer: dict[str, Any] = {"missing": sorted(set(range(1, count)) - connected.keys())}
    await asyncio.gather(*(_send(writer, answer) for writer in connected.values()))
    for writer in opened:
        writer.transport.abort()
    await asyncio.sleep(0)  # for the loop to close them
    return answer


async def _send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    """Sends the last message of a connection."""
    with contextlib.suppress(OSError):  # it has gone
        async with asyncio.timeout(SILENT_SECONDS):
            writer.write(_line(value))
            writer.close()
            await writer.wait_closed()


def _report(host: str, port: int, count: int, index: int, deadline: float) -> dict[str, Any] | None:
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left) as connection:
            connection.sendall(_line({"index": index, "count": count}))
            connection.settimeout(left + ANSWER_SECONDS)
            with connection.makefile("rb") as lines:
                answer = _message(lines.readline(LINE_BYTES))
            match answer:
                case {"expected": int()}:
                    return answer
                case {"missing": list(missing)} if all(isinstance(process, int) for process in missing):
                    return answer
        time.sleep(RETRY_SECONDS)
    return None


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps({"lineargpt": value}).encode() + b"\n"


def _message(line: bytes) -> Any:
    """The value of a line; None if it is not one of :func:`_line`."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return json.loads(line)["lineargpt"]
    return None
