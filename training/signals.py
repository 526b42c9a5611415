"""The signals that stop a run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from support import interrupts
from training import processes


@dataclass
class Signals:
    """The signals that a run has received: this process's, and on process 0 those of all."""

    stops: list[int] = field(default_factory=list)
    """Those of :func:`support.interrupts.stop_signals`."""
    continued: bool = False
    """Whether SIGCONT has arrived."""

    def receive(self, number: int) -> None:
        """Takes note of a signal."""
        if number == signal.SIGCONT:
            self.continued = True
        else:
            self.stops.append(number)

    def was_continued(self) -> bool:
        """Whether a process was continued since the last call."""
        self._receive_from_others()
        continued, self.continued = self.continued, False
        return continued

    def _receive_from_others(self) -> None:
        for number in processes.signals_of_others():
            self.receive(number)

    @property
    def first(self) -> int | None:
        """The first signal that stops the run, if any."""
        self._receive_from_others()
        return self.stops[0] if self.stops else None


@contextmanager
def collect_signals() -> Iterator[Signals]:
    """Collects signals. The first one that stops the loop lets it save; a second SIGTERM or Ctrl-C acts immediately."""
    received = Signals()
    before: dict[int, Any] = {}

    def on_stop(number: int, _frame: FrameType | None) -> None:
        received.receive(number)
        if number != signal.SIGHUP:  # the system and the shell may both send that at the end of a terminal
            signal.signal(number, before[number])
        interrupts.write_word(b"\nStopping after this step; saving.\n")

    for number in interrupts.stop_signals():
        before[number] = signal.signal(number, on_stop)
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, lambda number, _: received.receive(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
