"""How fast ``data.prepare`` is beside tiktoken alone on the same cores, and whether its memory grows with the corpus.

    python -m benchmarks.prepare --text ../shared/data --megabytes 1000 --json prepare.json
    python -m benchmarks.prepare --text ../shared/data --megabytes 1000 --rows parquet --json prepare-parquet.json

The corpus is a text repeated to the size asked for, which is tokenized by turns: by the command ``python -m
data.prepare``, from its start to its end, and by ``tiktoken``'s batch call in as many threads as the command has
processes, on text that is in memory already and for ids that nobody keeps. Their ratio is the share of tiktoken's speed
that is reached. A second ratio is to tiktoken's call that returns arrays rather than lists, which is the faster one.

With --rows the command reads the same text as JSON lines or Parquet, in rows of some 450 bytes; tiktoken has it as
before, in longer strings, which suit it better.

Then the command runs once more on a corpus of a quarter of the size. Peak memory is that of the command and all its
processes together, of which what they share counts for each. Figures are medians over the rounds.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from support.errors import BenchmarkError, ConfigError

ROOT = Path(__file__).parents[1]
SLICE_BYTES = 16 * 2**20
"""Text given to tiktoken at once: its lists of integers take many times the memory of the text."""
PART_BYTES = 2**20
"""Of a string among them, as in a chunk of text of ``data.prepare``."""
ROW_BYTES = 450
"""Of a row; a row of web text has more."""
GROUP_ROWS = 10_000
"""Of a row group of Parquet."""
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


def write_rows(text: Path, target: Path) -> None:
    """Writes the lines of a text file, joined to rows of at least ``ROW_BYTES``, as JSON lines or Parquet."""
    def rows() -> Iterator[str]:
        with text.open(errors="replace") as file:
            row = ""
            for line in file:
                row += line
                if len(row) >= ROW_BYTES:
                    yield row
                    row = ""
            yield row

    if target.suffix == ".jsonl":
        with target.open("w") as file:
            file.writelines(json.dumps({"text": row, "id": number}) + "\n" for number, row in enumerate(rows()))
        return
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("text", pyarrow.string()), ("id", pyarrow.int64())])
    with pyarrow.parquet.ParquetWriter(target, schema) as file:
        for number, group in enumerate(itertools.batched(rows(), GROUP_ROWS)):
            ids = range(number * GROUP_ROWS, number * GROUP_ROWS + len(group))
            file.write_table(pyarrow.table({"text": group, "id": ids}, schema=schema))


def command_seconds(text: Path, tokenizer: str, workers: int) -> tuple[float, int]:
    """Runs ``data.prepare`` on a text: the seconds it took, and the most memory its processes had together, in bytes.

    Raises:
        BenchmarkError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        command = [sys.executable, "-m", "data.prepare", str(text), "--tokenizer", tokenizer, "--workers",
                   str(workers), "--out", str(Path(folder, "out"))]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        peak, ended = 0, threading.Event()

        def look() -> None:
            nonlocal peak
            while not ended.wait(LOOK_SECONDS):
                peak = max(peak, tree_bytes(process.pid))

        thread = threading.Thread(target=look)
        thread.start()
        _, errors = process.communicate()
        seconds = time.perf_counter() - start
        ended.set()
        thread.join()
    if process.returncode:
        raise BenchmarkError(f"data.prepare failed: {errors.decode(errors='replace').strip()}")
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
           "rows": report.flag("the corpus as rows of such a file (a text)", choices=("jsonl", "parquet")),
           "tokenizer": report.flag("as in data.prepare", "gpt2"),
           "workers": report.flag("processes, and threads", CORES), "rounds": report.flag("comparisons", 1),
           "folder": report.flag("where the corpus is put meanwhile (the system's)", type=Path)})
def main(options: Namespace, results: report.Results) -> None:
    """Rounds of the command and tiktoken, and the command once more on a quarter of the corpus."""
    from data import tokenizers

    encoding = tokenizers.load(options.tokenizer)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        texts = Path(folder, "text.txt"), Path(folder, "small.txt")
        sources = [text.with_suffix(f".{options.rows or 'txt'}") for text in texts]
        for text, source, share in zip(texts, sources, (1, 4), strict=True):
            repeat_text(options.text, text, options.megabytes * 10**6 // share)
            if source != text:
                write_rows(text, source)
        results.more = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "megabytes": options.megabytes,
                        "rows": options.rows, "workers": options.workers}
        rounds = []
        for _ in range(options.rounds):
            seconds, peak = command_seconds(sources[0], options.tokenizer, options.workers)
            alone, arrays = (tiktoken_seconds(texts[0], encoding, options.workers, arrays=arrays)
                             for arrays in (False, True))
            rounds.append({"megabytes": options.megabytes, "seconds": seconds, "tiktoken_seconds": alone,
                           "tiktoken_arrays_seconds": arrays, "ratio": alone / seconds,
                           "arrays_ratio": arrays / seconds, "peak_bytes": peak})
        small = command_seconds(sources[1], options.tokenizer, options.workers)[1]
    results.more |= {name: median(row[name] for row in rounds) for name in ("ratio", "arrays_ratio", "peak_bytes")}
    results.more["peak_bytes_of_a_quarter"] = small
    results.model = (f"{options.megabytes:,} MB of {options.rows or 'text'}, {options.workers} processes, load "
                     f"{results.more['load_before']:.1f} before")
    results.remarks.append(f"data.prepare reaches {results.more['ratio']:.1%} of tiktoken's speed; at a quarter of the "
                           f"corpus its peak memory is {small / 1e6:,.0f} MB")
    results.add(*rounds, table="rounds")


if __name__ == "__main__":
    sys.exit(main())
