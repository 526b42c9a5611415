"""Processes that come, and those that do not."""

import contextlib
import socket
import threading

import pytest

from support.errors import ConfigError, LineargptError, TrainingError
from training.roll_call import call_roll

pytestmark = pytest.mark.fast


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def call(address: str, calls: dict[int, int], seconds: float) -> dict[int, Exception | None]:
    """The error of each process that comes, by its number; ``calls`` has the number of processes that it expects."""
    errors: dict[int, Exception | None] = {}

    def come(index: int, count: int) -> None:
        try:
            call_roll(address, count, index, seconds)
            errors[index] = None
        except (LineargptError, ConfigError) as error:
            errors[index] = error

    threads = [threading.Thread(target=come, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_all_come_and_the_address_is_free_afterwards(address):
    for _ in range(2):
        assert call(address, {2: 3, 1: 3, 0: 3}, 20) == {0: None, 1: None, 2: None}


def test_those_that_do_not_come_are_named_to_all(address):
    errors = call(address, {0: 4, 2: 4}, 1)
    assert sorted(errors) == [0, 2]
    for error in errors.values():
        assert isinstance(error, TrainingError)
        assert "processes 1, 3 did not come within 1 s (distributed.wait_seconds), of 4 processes" in str(error)


def test_a_process_0_that_does_not_come_is_named(address):
    errors = call(address, {1: 2}, 0.5)
    assert isinstance(errors[1], TrainingError)
    assert f"process 0 did not come within 0.5 s (distributed.wait_seconds): nothing answers at {address}" in str(
        errors[1])


def test_processes_that_expect_another_number_are_refused(address):
    errors = call(address, {0: 2, 1: 3}, 1)
    assert isinstance(errors[1], ConfigError)
    assert "process 1 expects 3 processes and process 0 2" in str(errors[1])
    assert "process 1 did not come" in str(errors[0])


def test_addresses_where_process_0_cannot_listen_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        for place, reason in ((taken, "Address already in use"), ("192.0.2.1:9", "Cannot assign requested address"),
                              ("node..1:9", "label empty or too long")):
            host, port = place.split(":")
            with pytest.raises(ConfigError, match=rf"process 0 cannot listen at port {port} of {host} \(.*{reason}"):
                call_roll(place, 2, 0, 1)


def test_process_0_listens_at_the_address_of_the_coordinator_alone(address):
    port = int(address.rpartition(":")[2])
    found: list[str | None] = []
    first = threading.Thread(target=lambda: found.append(call_roll(address, 2, 0, 20)))
    first.start()
    try:
        connect(port).close()
        # Every address in 127.0.0.0/8 is this machine's.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
    finally:
        assert call_roll(address, 2, 1, 20) is None
        first.join()
    assert found == [address]


def test_a_name_of_the_loopback_address_is_told(address, monkeypatch, capsys):
    port = int(address.rpartition(":")[2])
    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    assert call(f"node1:{port}", {0: 2, 1: 2}, 20) == {0: None, 1: None}
    assert "node1 is 127.0.0.1 on this machine, which other machines do not reach" in capsys.readouterr().err


def connect(port: int) -> socket.socket:
    """A connection, once somebody listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)


STRANGERS = (b"GET / HTTP/1.0\n\n", b'{"lineargpt": 5}\n', b'{"lineargpt": {"index": "1", "count": 2}}\n',
             b'{"lineargpt": {"index": 1}}\n', b'{"lineargpt": {"index": 1.0, "count": null}}\n',
             b'{"lineargpt": {"index": 0, "count": 2}}\n', b'{"lineargpt": {"index": 7, "count": 2}}\n',
             b'{"lineargpt": {"index": -1, "count": 2}}\n', b"[]\n", b"\xff\n", b"[" * 9_000 + b"\n",
             b"x" * 1_000_000, b"no line", b"")


def test_other_programs_at_the_port_are_ignored(address, capsys):
    found: dict[int, Exception | None] = {}
    first = threading.Thread(target=lambda: found.update(call(address, {0: 2}, 20)))
    first.start()
    port = int(address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for line in STRANGERS:
            visitor = stack.enter_context(connect(port))
            with contextlib.suppress(ConnectionError):  # it may be closed while it still sends
                visitor.sendall(line)
                if line and line != b"no line":
                    assert visitor.recv(1) == b""  # closed without an answer
        # The last two are still connected and silent, and hold up nobody.
        assert call(address, {1: 2}, 5) == {1: None}
        first.join()
    assert found == {0: None}
    assert capsys.readouterr().err == ("note: process 0 ignores connections of other programs, such as from 127.0.0.1"
                                       "\n")


@pytest.mark.parametrize("answer", [b'{"lineargpt": 5}\n', b'{"lineargpt": {"missing": "all"}}\n',
                                    b'{"lineargpt": {"missing": [null]}}\n', b"[" * 9_000 + b"\n"])
def test_answers_of_other_programs_are_no_answers(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(TrainingError, match=r"process 0 did not come within 0\.1 s"):
            call_roll(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, 0.1)
        server.shutdown(socket.SHUT_RDWR)
