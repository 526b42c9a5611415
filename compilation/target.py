"""Compiling for a GPU on a machine without one.

XLA needs no driver and no card to compile for one, only its description (``targets/NAME.txtpb``), jax's CUDA plug-in
and NVIDIA's assembler, which ``scripts/gpu_check.sh`` installs into environments of their own, ``.venv-gpu/VERSION``.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from configs.schema import Config, ModelConfig
from models import gpt
from sampling.token_step import token_step
from sampling.weights import from_product_weights, to_product_weights
from support.errors import BenchmarkError, ConfigError
from training.abstract_step import step_and_shapes

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-gpu"
TARGETS = Path(__file__).parent / "targets"
PLUGIN = "jax_plugins.xla_cuda13"
REMEDY = "`make gpu-check` builds an environment that can"


class Target:
    """A GPU that programs are compiled for; ``name`` is that of a file in ``targets``."""

    def __init__(self, name: str = "h200"):
        self.description = (TARGETS / f"{name}.txtpb").read_text()
        # Otherwise the plug-in looks for a card and its driver.
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

    def devices(self, number: int) -> Sequence[Any]:
        """Such GPUs in one host."""
        return topologies.get_topology_desc(platform="cuda", target_config=self.description,
                                            topology=f"1x1x{number}").devices

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which ``kernels.device`` is this GPU, and Pallas kernels are lowered for it."""
        device = AbstractDevice(device_kind=self.kind, platform="gpu",
                                num_cores=int(self._field(r"\bcore_count: (\d+)")))
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield

    def trace(self, function: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Traced:
        """A function traced for this GPU.

        Args:
            function: under ``jax.jit``.
            arguments: trees of arrays or of shapes with dtypes.
        """
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), arguments)
        with self.tracing():
            return function.trace(*arguments)

    def trace_step(self, config: Config, vocabulary_size: int) -> jax.stages.Traced:
        """The training step of a config on one device, traced."""
        with self.tracing():
            step, arguments = step_and_shapes(config, vocabulary_size)
        return self.trace(step, *arguments)

    def trace_token(self, config: ModelConfig, vocabulary_size: int, B: int = 1) -> jax.stages.Traced:
        """The step of a sampler for a token of B samples, without the sampling, traced."""
        with self.tracing():
            model = nnx.eval_shape(lambda: gpt.GPT(config, vocabulary_size, rngs=nnx.Rngs(0)))
            graph, state = nnx.split(model)
            arrays = jax.eval_shape(lambda state: to_product_weights(nnx.merge(graph, state))[1], state)
            cache = jax.eval_shape(lambda: model.init_cache(B, config.context))

        @functools.partial(jax.jit, donate_argnums=2)
        def step(arrays: Any, tokens_B1: Any, cache: gpt.Cache) -> Any:
            return token_step(*from_product_weights(graph, arrays))(tokens_B1, cache)

        return self.trace(step, arrays, jax.ShapeDtypeStruct((B, 1), jnp.int32), cache)

    def compile(self, traced: jax.stages.Traced, dump: Path | None = None, **flags: bool | int) -> jax.stages.Compiled:
        """Compiles a function from :meth:`trace`.

        Args:
            traced: the function.
            dump: empty folder for the assembly (``*.ptx``) and the lists of launches (``*thunk_*.txt``).
            flags: further options of XLA, such as ``xla_gpu_autotune_level=0``, which compiles no candidates.

        Raises:
            BenchmarkError: it cannot be compiled, such as a kernel with too much shared memory.
        """
        options: dict[str, Any] = {"xla_gpu_cuda_data_dir": str(cuda_folder()), **flags}
        with ExitStack() as context:
            if jax.sharding.get_abstract_mesh().empty:
                context.enter_context(self.tracing())
            if dump is not None:
                context.enter_context(_dumping_mosaic(dump))
                options |= dump_options(dump)
            return compile_lowered(traced.lower(), options)

    @cached_property
    def _sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.devices(1)[0])

    def _field(self, pattern: str) -> str:
        found = re.search(pattern, self.description, re.MULTILINE)
        if found is None:
            raise ValueError(f"the description of a GPU lacks {pattern!r}")
        return found[1]


def dump_options(folder: Path) -> dict[str, Any]:
    """XLA's options for the assembly and the lists of launches of a program, in an empty folder."""
    # An expression that names no pass keeps the many texts of the passes out of the folder.
    return {"xla_dump_to": str(folder), "xla_dump_emitter_re": "^(ptx|asm).*"}


@contextmanager
def _dumping_mosaic(folder: Path) -> Iterator[None]:
    """Context in which Mosaic, to which XLA's options do not apply, writes the assembly of its kernels to a folder.

    It also tries to write their machine code, and says so where ``nvdisasm`` is missing.
    """
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        else:
            os.environ["MOSAIC_GPU_DUMP_TO"] = before


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a lowered program with options of XLA.

    Raises:
        BenchmarkError: it cannot be compiled.
    """
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise BenchmarkError(f"XLA: {str(error).strip().splitlines()[0]}") from error


def can_compile() -> bool:
    """Whether this Python can compile for a GPU."""
    # Without any plug-in their package is missing too, and find_spec raises.
    has_plugins = importlib.util.find_spec(PLUGIN.partition(".")[0]) is not None
    return has_plugins and importlib.util.find_spec(PLUGIN) is not None and cuda_folder() is not None


def cuda_folder() -> Path | None:
    """The folder of NVIDIA's assembler, with ``bin/ptxas``; None if it is not installed."""
    if importlib.util.find_spec("nvidia") is None:
        return None
    spec = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)


def find_python() -> str:
    """The Python to compile with: this one, or that of an environment of ``make gpu-check``.

    An environment with the same version of jax comes first, then the newest.

    Raises:
        ConfigError: there is none.
    """
    if can_compile():
        return sys.executable
    # The stamp is written last.
    built = [stamp.parent for stamp in ENVIRONMENTS.glob("*/.complete")]
    if not built:
        raise ConfigError(f"this Python ({sys.executable}) cannot compile for a GPU: it lacks jax's CUDA plug-in; "
                          f"{REMEDY}; then repeat the command")
    best = max(built, key=lambda folder: (folder.name == jax.__version__, _numbers(folder.name)))
    return str(best / "bin" / "python")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
