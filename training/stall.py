"""A watch over a run whose steps no longer end, such as one that waits for a stuck process."""

import faulthandler
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from support.command import report_error
from training.accounting import Timing

LEAST_SECONDS = 300.0
MEDIAN_STEPS = 20
WATCHED = ("step", "input", "evaluation")
"""Parts of the wall time in which something must end; the first evaluation also compiles."""


class StallWatch:
    """Prints all stacks and ends the process if nothing ends for too long, from a thread. A context manager.

    Compiling, saving and sampling do not count.

    Args:
        timing: what the run does, and since when.
        seconds: the limit. None: 20 median steps, at least 300 s.
        end: ends the process; gets the message.
        poll_seconds: between two looks.
    """

    def __init__(self, timing: Timing, seconds: float | None, end: Callable[[str], object], *,
                 poll_seconds: float = 1.0):
        self._timing, self._seconds, self._end, self._poll_seconds = timing, seconds, end, poll_seconds
        self._steps: deque[float] = deque(maxlen=101)
        self._evaluated = False
        self._progressed = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall", daemon=True)

    def step(self, seconds: float) -> None:
        """A step has ended."""
        self._steps.append(seconds)

    def evaluated(self) -> None:
        """A batch of an evaluation has ended."""
        self._evaluated = True
        self._progressed = time.perf_counter()

    @property
    def limit(self) -> float:
        """Longest time without an end, in seconds."""
        if self._seconds is not None:
            return self._seconds
        median = statistics.median(self._steps) if self._steps else 0.0
        return max(LEAST_SECONDS, MEDIAN_STEPS * median)

    def _watch(self) -> None:
        looked = time.perf_counter()
        while not self._done.wait(self._poll_seconds):
            now = time.perf_counter()
            if now - looked > self.limit / 2:  # this process was stopped, and starts again
                self._progressed = now
            looked = now
            part, began = self._timing.part, max(self._timing.began, self._progressed)
            if part in WATCHED and (part != "evaluation" or self._evaluated) and now - began > self.limit:
                text = f"no step has ended for {self.limit:,.0f} s (distributed.stall_seconds)"
                report_error(f"{text}. The stacks of all threads:")
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self._end(text)
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
