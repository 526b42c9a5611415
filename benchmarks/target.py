"""Compiling for a GPU that is not there: what ``make gpu-check`` and ``benchmarks.memory`` are made of.

XLA needs no driver and no card to compile for one, only its description (``targets/NAME.txtpb``), jax's CUDA plug-in
and NVIDIA's assembler, which ``scripts/gpu_check.sh`` installs into environments of their own, ``.venv-gpu/VERSION``.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from configs.schema import Config
from data.loader import Batch
from support.errors import ConfigError
from training.optimizer import decay_mask, make_optimizer
from training.step import abstract_model, initial_state, jit_step, make_train_step

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-gpu"
TARGETS = Path(__file__).parent / "targets"
PLUGIN = "jax_plugins.xla_cuda13"
REMEDY = "`make gpu-check` builds an environment that can"


class Target:
    """A GPU that programs are compiled for.

    Args:
        name: of a file in ``targets``.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(self, name: str = "h200"):
        path = TARGETS / f"{name}.txtpb"
        if not path.exists():
            names = ", ".join(sorted(path.stem for path in TARGETS.glob("*.txtpb")))
            raise ConfigError(f"there is no description of a GPU {name!r}; there are: {names}")
        self.description = path.read_text()
        # Otherwise the plug-in looks for a card and its driver as soon as jax is used.
        jax.config.update("jax_platforms", "cpu")

    @property
    def kind(self) -> str:
        """Name of the device, as jax gives it."""
        return self._field(r'^\s*name: "(.*)"')

    @property
    def architecture(self) -> str:
        """What the assembler calls it: of Hopper's instructions also those that no later GPU has."""
        major, minor = self._field(r"major: (\d+)"), re.search(r"capability \{.*minor: (\d+)", self.description)
        return f"sm_{major}{minor[1] if minor else 0}a"

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block of threads may have at most."""
        return int(self._field(r"shared_memory_per_block_optin: (\d+)"))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, ``kernels.device`` answers with this GPU, and Pallas kernels are lowered for it."""
        device = AbstractDevice(device_kind=self.kind, platform="gpu",
                                num_cores=int(self._field(r"\bcore_count: (\d+)")))
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    def trace(self, function: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Traced:
        """A function for this GPU, traced and yet to be compiled.

        Args:
            function: under ``jax.jit``; is traced under :meth:`tracing`.
            arguments: trees of what has a shape and a dtype.
        """
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), arguments)
        with self.tracing():
            return function.trace(*arguments)

    def trace_step(self, config: Config, vocabulary_size: int) -> jax.stages.Traced:
        """The training step of a config on one device, as ``train.py`` makes it, yet to be compiled."""
        with self.tracing():
            model = abstract_model(config, vocabulary_size)
            transform = make_optimizer(config.optimizer, decay_mask(model))
            state = jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform))
            step = jit_step(make_train_step(model, config, transform), model, deterministic=config.train.deterministic)
        tokens_BT = jax.ShapeDtypeStruct((config.train.batch_size, config.model.context), jnp.int32)
        return self.trace(step, state, Batch(tokens_BT, tokens_BT),  # pyright: ignore[reportArgumentType]
                          jax.ShapeDtypeStruct((), jnp.float32))

    def compile(self, traced: jax.stages.Traced, dump: Path | None = None, **flags: bool) -> jax.stages.Compiled:
        """What :meth:`trace` gave, compiled.

        Args:
            traced: the function.
            dump: empty folder for the assembly (``*.ptx``) and the lists of launches (``*thunk_*.txt``).
            flags: further ones of XLA.

        Raises:
            jax.errors.JaxRuntimeError: it cannot be compiled, as where a kernel wants too much shared memory.
        """
        with self.tracing():
            lowered = traced.lower()
            options: dict[str, Any] = {"xla_gpu_cuda_data_dir": str(cuda_folder()), **flags}
        if dump is not None:
            # An expression that names no pass keeps the many texts of the passes out of the folder.
            options |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": "^(ptx|asm).*"}
        return lowered.compile(compiler_options=options)

    @cached_property
    def _sharding(self) -> SingleDeviceSharding:
        topology = topologies.get_topology_desc(platform="cuda", target_config=self.description, topology="1x1x1")
        return SingleDeviceSharding(topology.devices[0])

    def _field(self, pattern: str) -> str:
        found = re.search(pattern, self.description, re.MULTILINE)
        if found is None:
            raise ValueError(f"the description of a GPU lacks {pattern!r}")
        return found[1]


def can_compile() -> bool:
    """Whether this Python has what compiling for a GPU takes."""
    # Where no plug-in is installed the package that holds them is missing too, and find_spec raises.
    has_plugins = importlib.util.find_spec(PLUGIN.partition(".")[0]) is not None
    return has_plugins and importlib.util.find_spec(PLUGIN) is not None and cuda_folder() is not None


def cuda_folder() -> Path | None:
    """Where the package of NVIDIA's assembler lies, with ``bin/ptxas``; None where it is not installed."""
    if importlib.util.find_spec("nvidia") is None:
        return None
    spec = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)


def find_python() -> str:
    """The Python to compile with: this one, else that of an environment of ``make gpu-check``.

    One with this Python's version of jax comes first, then the newest.

    Raises:
        ConfigError: there is none.
    """
    if can_compile():
        return sys.executable
    # The stamp is written last.
    built = [stamp.parent for stamp in ENVIRONMENTS.glob("*/.complete")]
    if not built:
        raise ConfigError(f"this Python ({sys.executable}) cannot compile for a GPU: it lacks jax's CUDA plug-in; "
                          f"{REMEDY}, after it the same command works")
    best = max(built, key=lambda folder: (folder.name == jax.__version__, _numbers(folder.name)))
    return str(best / "bin" / "python")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
