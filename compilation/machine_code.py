"""The machine code of a program compiled for a GPU: the registers and memory of its kernels, and their launches."""

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from compilation.target import cuda_folder
from kernels.cases import find_cases
from support.errors import BenchmarkError

CONTROL = ("kSequential", "kWhile", "kConditional")
"""What XLA lists beside launches: these contain launches."""
ENTRY = re.compile(r"\.entry (\w+)")
ATOMIC_ADDITION = re.compile(r"\b(atom|red)\.(?=[\w.:]*\badd\b)(?=[\w.:]*\bb?f(16|32|64))")
LOOP = re.compile(r"^(\$L\w+):(.*?)^[^\n]*\bbra(?:\.uni)?\s+\1;", re.MULTILINE | re.DOTALL)
OVERWRITES = "copies the next tokens over operands that wgmma may still read"
"""The fault of :func:`overwrites_operands`."""
COPIES = ("cp.async.ca", "cp.async.cg")
ASYNCHRONOUS = re.compile(r"(cp\.async\.c[ag]|(?:cp\.async|wgmma)\.commit_group|wgmma\.wait_group)\S*\s*(\d*)")
NEXT_BUFFER = re.compile(r"setp\.gt\.s32\s+(%p\d+), (%r\d+), (\d+);\s+selp\.b32\s+%r\d+, 0, \2, \1;")
"""The index of a ring of buffers, after the last of which comes 0."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in machine code, from the output of the assembler."""

    name: str
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread, stores and loads."""
    shared_bytes: int
    """Per block."""
    threads: int | None = None
    """Per block."""
    serialised: str | None = None
    """Why its wgmma instructions are serialised."""
    overwrites: bool = False
    """Whether a copy may overwrite what wgmma still reads; see :func:`overwrites_operands`."""

    @property
    def ours(self) -> bool:
        """Whether it is of this project and not of the compiler."""
        return self.name.startswith(our_kernels())

    def faults(self, shared_limit: int) -> list[str]:
        """Why it is slow or cannot be launched."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills registers, {self.spilled_bytes:,} bytes")
        if self.serialised is not None:
            found.append(f"serialises wgmma, due to {self.serialised}")
        if self.overwrites:
            found.append(OVERWRITES)
        if self.shared_bytes > shared_limit:
            found.append(f"needs {self.shared_bytes:,} bytes of shared memory, but a block has {shared_limit:,}")
        return found


class MachineCode(NamedTuple):
    """A program in machine code."""

    kernels: list[Kernel]
    """Ours, and what the compiler has put into a file with them."""
    launches: int
    """Kernels, copies and library calls; those in a loop count once."""
    atomics: tuple[str, ...] = ()
    """Kernels with atomic additions of floating-point numbers, whose order changes from run to run."""


def read_assembler(text: str) -> list[Kernel]:
    """The kernels in the output of ``ptxas -v``.

    Raises:
        ValueError: the registers of a kernel are missing.
    """
    serialised = {name: reason for reason, name in re.findall(
        r"wgmma\.mma_async instructions are serialized due to (.*?) (?:in|for) (?:the )?function '([^']+)'", text)}
    parts = re.split(r"Compiling entry function '([^']+)'", text)
    kernels = []
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        registers = re.search(r"Used (\d+) registers", part)
        if registers is None:
            raise ValueError(f"ptxas does not report the registers of {name}")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", part)))
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append(Kernel(name, int(registers[1]), spilled, int(shared[1]) if shared else 0,
                              serialised=serialised.get(name)))
    return kernels


def read_launches(text: str) -> dict[str, tuple[int, int]]:
    """Threads of a block and its dynamic shared memory, by kernel, from XLA's list of launches."""
    launches: dict[str, tuple[int, int]] = {}
    for name, threads, shared in re.findall(
            r"(\S+) grid: \[[^]]*\] threads: \[([^]]*)\]\s+shared_memory: (\d+) bytes", text):
        x, y, z = map(int, threads.split(","))
        launches[name] = x * y * z, max(int(shared), launches.get(name, (0, 0))[1])
    return launches


def mosaic_launches(sources: Mapping[Path, str]) -> dict[str, tuple[int, int]]:
    """The same of Mosaic's kernels, each of which has a file of its own, beside a file of the resources it needs."""
    launches = {}
    for path, source in sources.items():
        resources = path.with_suffix(".resources.txt")
        if resources.exists():
            (threads,), (shared,) = (re.findall(pattern, text) for pattern, text in (
                (r"\.maxntid (\d+)", source), (r"smem_scratch_bytes=(\d+)", resources.read_text())))
            launches |= dict.fromkeys(ENTRY.findall(source), (int(threads), int(shared)))
    return launches


def count_launches(text: str) -> int:
    """Kernels, copies and library calls in XLA's list of launches; those in a loop count once."""
    return sum(kind not in CONTROL for kind in re.findall(r"^\s*\d+: (k\w+)", text, re.MULTILINE))


def inspect(dump: Path, architecture: str) -> MachineCode:
    """A compiled program, from its dump.

    Raises:
        BenchmarkError: there is no kernel, or the assembler refuses one.
    """
    listed = "\n".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    sources = read_sources(dump)
    launches = read_launches(listed) | mosaic_launches(sources)
    source = "\n".join(sources.values())
    overwriting, kernels = find_overwriting(source), []
    for kernel in read_assembler(assemble([path for path, text in sources.items() if any(
            name.startswith(our_kernels()) for name in ENTRY.findall(text))], architecture)):
        threads, shared = launches.get(kernel.name, (None, 0))
        kernels.append(replace(kernel, threads=threads, shared_bytes=kernel.shared_bytes + shared,
                               overwrites=kernel.name in overwriting))
    return MachineCode(kernels, count_launches(listed), find_atomics(source))


def read_sources(dump: Path) -> dict[Path, str]:
    """The files with kernels of a compiled program, from its dump.

    Raises:
        BenchmarkError: there is none.
    """
    # Constants have a file of their own.
    sources = {path: text for path in sorted(dump.glob("*.ptx")) if ".entry" in (text := path.read_text())}
    if not sources:
        raise BenchmarkError("the compiler has written no kernel")
    return sources


def assemble(paths: Sequence[Path], architecture: str) -> str:
    """The output of ``ptxas -v`` for all files in one go: a kernel takes less time than the assembler's start.

    Raises:
        BenchmarkError: the assembler refuses a kernel.
    """
    if not paths:
        return ""
    command = [f"{cuda_folder()}/bin/ptxas", "-v", f"-arch={architecture}", *map(str, paths), "-o", "/dev/null"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    if ended.returncode:
        raise BenchmarkError(f"ptxas: {(output.strip().splitlines() or [f'exit code {ended.returncode}'])[-1]}")
    return output


def split_kernels(text: str) -> list[tuple[str, str]]:
    """Name and code of each kernel in an assembler's source."""
    parts = ENTRY.split(text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def find_atomics(text: str) -> tuple[str, ...]:
    """The kernels of an assembler's source that add floating-point numbers atomically."""
    return tuple(name for name, code in split_kernels(text) if ATOMIC_ADDITION.search(code))


def find_overwriting(text: str) -> tuple[str, ...]:
    """The kernels of an assembler's source whose copies may overwrite operands that are still read."""
    return tuple(name for name, code in split_kernels(text) if overwrites_operands(code))


def overwrites_operands(code: str) -> bool:
    """Whether a loop of a kernel copies the tokens of a later step into a buffer that wgmma may still read.

    Triton copies the operands of later steps into a ring of buffers, and leaves the last wgmma of a step unfinished
    until the next one. If the ring has no more buffers than there are steps in flight, the copy of a later step goes
    into the buffer that this wgmma reads. On an H200 the results of such a kernel differed from run to run.
    """
    start = 0
    for loop in LOOP.finditer(code):
        steps = [(kind, int(number or 0)) for kind, number in ASYNCHRONOUS.findall(loop[2])]
        before, start = ASYNCHRONOUS.findall(code[start:loop.start()]), loop.end()
        groups = sum(kind == "cp.async.commit_group" for kind, _ in steps)
        ring = max((int(last) + 1 for *_, last in NEXT_BUFFER.findall(loop[2])), default=1)
        in_flight = sum(kind == "cp.async.commit_group" for kind, _ in before) / groups if groups else 0
        unfinished = 0
        for kind, number in 2 * steps:
            if kind == "wgmma.commit_group":
                unfinished += 1
            elif kind == "wgmma.wait_group":
                unfinished = min(unfinished, number)
            elif kind in COPIES and unfinished and ring <= in_flight:
                return True
    return False


@functools.cache
def our_kernels() -> tuple[str, ...]:
    """Prefixes of the kernels of all ops."""
    return tuple(dict.fromkeys(name for case in find_cases("gpu-check") for name in case.gpu_kernels))
