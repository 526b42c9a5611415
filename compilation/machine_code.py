"""The machine code of a program compiled for a GPU: the registers and memory of its kernels, and their launches."""

import functools
import re
import subprocess
from collections.abc import Sequence
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


def count_launches(text: str) -> int:
    """Kernels, copies and library calls in XLA's list of launches; those in a loop count once."""
    return sum(kind not in CONTROL for kind in re.findall(r"^\s*\d+: (k\w+)", text, re.MULTILINE))


def inspect(dump: Path, architecture: str) -> MachineCode:
    """A compiled program, from its dump.

    Raises:
        BenchmarkError: there is no kernel, or the assembler refuses one.
    """
    text = "\n".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    launches = read_launches(text)
    # Constants have a file of their own.
    sources = {path: source for path in sorted(dump.glob("*.ptx")) if ".entry" in (source := path.read_text())}
    if not sources:
        raise BenchmarkError("the compiler has written no kernel")
    kernels = []
    for kernel in read_assembler(assemble([path for path, source in sources.items() if any(
            name.startswith(our_kernels()) for name in ENTRY.findall(source))], architecture)):
        threads, shared = launches.get(kernel.name, (None, 0))
        kernels.append(replace(kernel, threads=threads, shared_bytes=kernel.shared_bytes + shared))
    return MachineCode(kernels, count_launches(text), find_atomics("\n".join(sources.values())))


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


def find_atomics(text: str) -> tuple[str, ...]:
    """The kernels of an assembler's source that add floating-point numbers atomically."""
    parts = ENTRY.split(text)
    return tuple(name for name, source in zip(parts[1::2], parts[2::2], strict=True) if ATOMIC_ADDITION.search(source))


@functools.cache
def our_kernels() -> tuple[str, ...]:
    """Prefixes of the kernels of all ops."""
    return tuple(dict.fromkeys(name for case in find_cases("gpu-check") for name in case.gpu_kernels))
