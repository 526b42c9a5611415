"""Compiling for a TPU on a machine without one.

``libtpu``, which jax's extra ``tpu`` pins, compiles for every generation on a CPU. It is 650 MB and has an environment
of its own, ``.venv-tpu/VERSION``, which ``scripts/tpu_check.sh`` builds.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from compilation.launches import launches
from compilation.program import read_program
from compilation.target import ROOT, Target, compile_lowered
from support.errors import BenchmarkError, ConfigError

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "TPU7x:2x2x1"}
"""Four chips of each generation, as libtpu calls them."""
ENVIRONMENTS = ROOT / ".venv-tpu"
REMEDY = "`make tpu-check` builds an environment that can"
# Without these, libtpu asks the network for its machine, and a second process waits for a lock.
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class Kernel(NamedTuple):
    """What the compiler made of a Pallas kernel."""

    name: str
    bundles: int
    """Instructions of an iteration of its grid, and those around it; each takes a cycle, without waits."""
    spills: int
    """Vectors that it stores for lack of registers."""


class Tpu(Target):
    """A TPU that programs are compiled for.

    Args:
        name: a key of :data:`TOPOLOGIES`.
        dump: empty folder for the schedules of kernels; None: none are written. libtpu reads it once in a process.

    Raises:
        ConfigError: there is no such TPU, or no libtpu.
        BenchmarkError: libtpu does not match jax, or does not know the TPU.
    """

    def __init__(self, name: str = "v5e", dump: Path | None = None):
        if name not in TOPOLOGIES:
            raise ConfigError(f"card is {name}; expected one of {', '.join(TOPOLOGIES)}")
        if not can_compile():
            raise ConfigError(f"this Python cannot compile for a TPU: it lacks libtpu; {REMEDY}")
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        if dump is not None:
            os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        jax.config.update("jax_platforms", "cpu")
        self.name = name
        try:
            self._found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name]).devices
        except Exception as error:  # of libtpu, in several types
            raise BenchmarkError(f"libtpu cannot describe a {name}: {str(error).strip().splitlines()[0]}; expected the "
                                 f"libtpu that jax {jax.__version__} names in its extra tpu") from error

    @property
    def kind(self) -> str:
        return self._found[0].device_kind

    def devices(self, number: int) -> Sequence[Any]:
        if number > len(self._found):
            raise ConfigError(f"devices is {number}; expected at most {len(self._found)}: programs are compiled for a "
                              f"host of a {self.name}")
        return self._found[:number]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        device = AbstractDevice(device_kind=self.kind, platform="tpu", num_cores=1)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    def compile(self, traced: jax.stages.Traced, dump: Path | None = None, **flags: bool | int) -> jax.stages.Compiled:
        if jax.sharding.get_abstract_mesh().empty:
            with self.tracing():
                lowered = traced.lower(lowering_platforms=("tpu",))
        else:
            lowered = traced.lower(lowering_platforms=("tpu",))
        return compile_lowered(lowered, dict(flags))


def take_kernels(dump: Path, prefix: str) -> list[Kernel]:
    """The kernels whose names have a part that begins with ``prefix``, of what was compiled since the last call; the
    files are deleted."""
    found = []
    for path in sorted(dump.iterdir()):
        if (match := re.search(rf"({prefix}\w*?)_*\.\d+-\d+-final_bundles\.txt$", path.name)) is not None:
            text = path.read_text()
            found.append(Kernel(match[1], len(re.findall(r"^\s*0x[0-9a-f]+\s", text, re.MULTILINE)),
                                len(re.findall(r"\bvst[^;\n]*_spill", text))))
    for path in dump.iterdir():
        path.unlink()
    return found


def cycles_of(program: str) -> int:
    """The compiler's cycles of an optimised program; without those of Pallas kernels, which it does not estimate."""
    return sum(launch.count * (launch.work.cycles or 0) for launch in launches(read_program(program), {}, set()))


def can_compile() -> bool:
    """Whether this Python can compile for a TPU."""
    return importlib.util.find_spec("libtpu") is not None


def find_python() -> str:
    """The Python to compile with: this one, or that of the environment of ``make tpu-check``.

    Raises:
        ConfigError: there is none.
    """
    if can_compile():
        return sys.executable
    python = ENVIRONMENTS / jax.__version__ / "bin" / "python"
    if not (python.parents[1] / ".complete").exists():  # the stamp is written last
        raise ConfigError(f"this Python ({sys.executable}) cannot compile for a TPU: it lacks libtpu; {REMEDY}")
    return str(python)
