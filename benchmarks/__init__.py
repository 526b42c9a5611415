"""Speed and memory: every benchmark is a command, ``python -m benchmarks.NAME``."""

import sys

from support import interrupts

if sys.argv[0] == "-m":  # Python imports this before the command, whose other imports take seconds
    interrupts.exit_quietly_on_interrupt()
