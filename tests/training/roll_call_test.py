"""Processes that come, and those that do not."""

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
        assert "processes 1, 3 did not come within 1 s (--distributed.wait-seconds), of 4 processes" in str(error)


def test_a_process_0_that_does_not_come_is_named(address):
    errors = call(address, {1: 2}, 0.5)
    assert isinstance(errors[1], TrainingError)
    assert f"process 0 did not come within 0.5 s (--distributed.wait-seconds): nothing answers at {address}" in str(
        errors[1])


def test_processes_that_expect_another_number_are_refused(address):
    errors = call(address, {0: 2, 1: 3}, 1)
    assert isinstance(errors[1], ConfigError)
    assert "process 1 expects 3 processes and process 0 2" in str(errors[1])
    assert "process 1 did not come" in str(errors[0])


def test_a_port_in_use_is_refused():
    with socket.create_server(("", 0)) as server, pytest.raises(ConfigError, match="cannot listen at port"):
        call_roll(f"127.0.0.1:{server.getsockname()[1]}", 2, 0, 1)


def test_other_programs_at_the_port_are_ignored(address):
    def visit() -> None:
        port = int(address.rpartition(":")[2])
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.0\n\n")
                    return
            except OSError:
                threading.Event().wait(0.01)

    visitor = threading.Thread(target=visit)
    visitor.start()
    found = call(address, {0: 2, 1: 2}, 20)
    visitor.join()
    assert found == {0: None, 1: None}
