"""The tables of Long Range Arena, measured on this machine, next to the published rows.

    python -m lra.table efficiency --out lra/results/efficiency_cpu --layers 2 --batch 1
    python -m lra.table efficiency --out efficiency --rows softmax,linear --lengths 1000,4000 --shape released
    python -m lra.table efficiency --out memory --lengths 1000,4000,16000 --memory-only
    python -m lra.table efficiency --out hashing --rows softmax,linear,reformer:rounds=1,reformer:rounds=4
    python -m lra.table accuracy runs/listops-* --out lra/results/accuracy

``efficiency``: steps per second and memory of a training step on byte text, one process per case, written as NAME.json,
NAME.md and, with matplotlib, NAME.png. Cases are compared with materialised softmax, which the published table has, at
the same length; ``softmax`` is fused. The table marks cases that are out of memory or time.

``accuracy``: test accuracy of runs of ``lra.train`` (lra.accuracy), written as NAME.json and NAME.md.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import sys
from collections.abc import Sequence

from lra import accuracy, efficiency

PARTS = {"efficiency": efficiency.main, "accuracy": accuracy.make_table}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of a table; see :class:`benchmarks.report.Benchmark`."""
    part, *more = (sys.argv[1:] if arguments is None else arguments) or [""]
    if part in PARTS:
        return PARTS[part](more)
    help_asked = part in ("-h", "--help")
    print(__doc__ if help_asked else f"lra.table: expected {' or '.join(PARTS)}; --help has examples",
          file=sys.stdout if help_asked else sys.stderr)
    return 0 if help_asked else 2


if __name__ == "__main__":
    sys.exit(main())
