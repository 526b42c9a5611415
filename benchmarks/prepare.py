"""How fast ``data.prepare`` is beside tiktoken alone on the same cores, and whether its memory grows with the corpus.

    python -m benchmarks.prepare --text ../shared/data --megabytes 1000 --json prepare.json

The corpus is a text, repeated to the requested size. The command ``python -m data.prepare`` tokenizes it from file to
file. ``tiktoken`` tokenizes it in memory, in as many threads as the command has processes, and the ids are dropped. The
first ratio is to its batch call, the second to its call that returns arrays, which is faster.

The command then runs once more on a corpus of a quarter of the size. Peak memory is the resident memory of the command
and its processes, where shared memory counts once per process.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report
from support.errors import BenchmarkError, ConfigError

ROOT = Path(__file__).parents[1]
SLICE_BYTES = 16 * 2**20
"""Text given to tiktoken at once: its lists of integers take many times the memory of the text."""
PART_BYTES = 2**20
"""Of a string among them, as in a chunk of text of ``data.prepare``."""
LOOK_SECONDS = 0.05
"""Between two looks at the memory."""


def repeat_text(source: Path, target: Path, size: int) -> None:
    """Writes the texts of a file or folder to a file, over and over until it has so many bytes.

    Raises:
        ConfigError: there is no text.
    """
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    if not files or not all(file.is_file() and file.stat().st_size for file in files):
        raise ConfigError(f"--text {source}: expected a text file, or a folder with .txt files")
    text = b"\n".join(file.read_bytes() for file in files)
    with target.open("wb") as file:
        for start in range(0, size, len(text)):
            file.write(text[: size - start])


def command_seconds(text: Path, tokenizer: str, workers: int) -> tuple[float, int]:
    """Runs ``data.prepare`` on a text; its seconds, and the peak memory of its processes together in bytes.

    Raises:
        BenchmarkError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        command = [sys.executable, "-m", "data.prepare", str(text), "--tokenizer", tokenizer, "--workers",
                   str(workers), "--out", str(Path(folder, "out"))]
        with Path(folder, "errors").open("w+") as errors:
            start, peak = time.perf_counter(), 0
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
            while process.returncode is None:
                peak = max(peak, tree_bytes(process.pid))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
            seconds = time.perf_counter() - start
            errors.seek(0)
            if process.returncode:
                raise BenchmarkError(f"data.prepare failed: {errors.read().strip()}")
    return seconds, peak


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and all those it started, from ``/proc``; 0 where there is none."""
    parents, resident = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            resident[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it ended meanwhile
            continue
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(resident.get(member, 0) for member in tree)


def tiktoken_seconds(text: Path, encoding: Any, threads: int, *, arrays: bool) -> float:
    """Seconds that tiktoken takes for a text, without reading it; ``arrays``: by the call that returns arrays."""
    seconds = 0.0
    with text.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        while part := file.read(SLICE_BYTES):
            strings = [part[start : start + PART_BYTES].decode(errors="replace")
                       for start in range(0, len(part), PART_BYTES)]
            start = time.perf_counter()
            if arrays:
                list(pool.map(lambda string: encoding.encode_to_numpy(string, disallowed_special=()), strings))
            else:
                encoding.encode_ordinary_batch(strings, num_threads=threads)
            seconds += time.perf_counter() - start
    return seconds


def _rate(heading: str, name: str) -> tuple[str, Callable[[dict[str, float]], float], str]:
    return f"{heading} MB/s", lambda row: row["megabytes"] / row[name], ".2f"


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.partial(
    report.Benchmark, module="benchmarks.prepare", tables={"rounds": report.columns(
        _rate("data.prepare", "seconds"), _rate("tiktoken", "tiktoken_seconds"),
        _rate("its arrays", "tiktoken_arrays_seconds"), ("ratio", "ratio", ".3f"), ("to arrays", "arrays_ratio", ".3f"),
        ("peak MB", lambda row: row["peak_bytes"] / 1e6, ",.0f"))},
    flags={"text": report.flag("text file, or folder of .txt files, to repeat", type=Path, required=True),
           "megabytes": report.flag("size of the corpus", 1000),
           "tokenizer": report.flag("as in data.prepare", "gpt2"),
           "workers": report.flag("processes, and threads", CORES),
           "folder": report.flag("where the corpus is put meanwhile (the system's)", type=Path)})
def main(options: Namespace, results: report.Results) -> None:
    """Times the command and tiktoken, and the memory of the command on a quarter of the corpus."""
    from data import tokenizers

    encoding = tokenizers.load(options.tokenizer)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        whole, quarter = Path(folder, "text.txt"), Path(folder, "quarter.txt")
        repeat_text(options.text, whole, options.megabytes * 10**6)
        repeat_text(options.text, quarter, options.megabytes * 10**6 // 4)
        results.more = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "megabytes": options.megabytes,
                        "workers": options.workers}
        seconds, peak = command_seconds(whole, options.tokenizer, options.workers)
        alone, arrays = (tiktoken_seconds(whole, encoding, options.workers, arrays=arrays) for arrays in (False, True))
        small = command_seconds(quarter, options.tokenizer, options.workers)[1]
    row = {"megabytes": options.megabytes, "seconds": seconds, "tiktoken_seconds": alone,
           "tiktoken_arrays_seconds": arrays, "ratio": alone / seconds, "arrays_ratio": arrays / seconds,
           "peak_bytes": peak}
    results.more |= {name: row[name] for name in ("ratio", "arrays_ratio", "peak_bytes")}
    results.more["peak_bytes_of_a_quarter"] = small
    results.model = (f"{options.megabytes:,} MB of text, {options.workers} processes, load "
                     f"{results.more['load_before']:.1f} before")
    results.remarks.append(f"data.prepare reaches {results.more['ratio']:.1%} of tiktoken's speed; at a quarter of the "
                           f"corpus its peak memory is {small / 1e6:,.0f} MB")
    results.add(row, table="rounds")


if __name__ == "__main__":
    sys.exit(main())
