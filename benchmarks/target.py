"""Compiling for a GPU on a machine without one, for ``gpu_check`` and ``estimate``.

XLA needs no driver and no card to compile for one, only its description (``targets/NAME.txtpb``), jax's CUDA plug-in
and NVIDIA's assembler, which ``scripts/gpu_check.sh`` installs into environments of their own, ``.venv-gpu/VERSION``.
"""

import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from benchmarks import report
from benchmarks.train_step import step_and_shapes
from configs.schema import Config
from support.errors import BenchmarkError, ConfigError, DataError

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-gpu"
TARGETS = Path(__file__).parent / "targets"
PLUGIN = "jax_plugins.xla_cuda13"
VOCABULARIES = {"gpt2": 50_257, "bytes": 257, "pixels": 257}
"""Sizes of the tokenizers whose files may be missing; of images, with 256 levels."""
VOCABULARY_FLAG = report.flag("tokens in the vocabulary (those of the token files or of the tokenizer)",
                              type=report.positive)
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

    def compile(self, traced: jax.stages.Traced, dump: Path | None = None, **flags: bool) -> jax.stages.Compiled:
        """Compiles a function from :meth:`trace`.

        Args:
            traced: the function.
            dump: empty folder for the assembly (``*.ptx``) and the lists of launches (``*thunk_*.txt``).
            flags: further options of XLA.

        Raises:
            BenchmarkError: it cannot be compiled, such as a kernel with too much shared memory.
        """
        if jax.sharding.get_abstract_mesh().empty:
            with self.tracing():
                lowered = traced.lower()
        else:
            lowered = traced.lower()
        options: dict[str, Any] = {"xla_gpu_cuda_data_dir": str(cuda_folder()), **flags}
        if dump is not None:
            # An expression that names no pass keeps the many texts of the passes out of the folder.
            options |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": "^(ptx|asm).*"}
        return compile_lowered(lowered, options)

    @cached_property
    def _sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.devices(1)[0])

    def _field(self, pattern: str) -> str:
        found = re.search(pattern, self.description, re.MULTILINE)
        if found is None:
            raise ValueError(f"the description of a GPU lacks {pattern!r}")
        return found[1]


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


def parse_program(options: Namespace, gpu: Target | None) -> tuple[Config, int]:
    """The config of ``options.words``, flags of train.py, and the size of its vocabulary.

    Raises:
        ConfigError: the command line is wrong, asks for several devices without ``options.devices``, or the size of
            the vocabulary is unknown.
    """
    config = parse_words(options.words, gpu)
    if options.devices is None:
        check_one_device(config)
    return config, options.vocabulary or vocabulary_size(config)


def check_one_device(config: Config) -> None:
    """Raises :class:`ConfigError` if a config asks for more than one device."""
    for axis in ("data", "fsdp", "tensor", "context"):
        if getattr(config.mesh, axis) not in ((1, -1) if axis == "data" else (1,)):
            raise ConfigError(f"mesh.{axis} is {getattr(config.mesh, axis)}; expected 1: the program is compiled for "
                              "one device, so give it the share of the batch of one device")


def parse_words(words: Sequence[str], gpu: Target | None) -> Config:
    """The config of train.py's command line, validated for a GPU, or for this machine's devices.

    Raises:
        ConfigError: the command line is wrong, or the recipe is not of a language model.
    """
    import train  # a GPU machine may lack its packages

    with nullcontext() if gpu is None else gpu.tracing():
        config = train.parse(words).config
    if not isinstance(config, Config):
        raise ConfigError(f"{words[0]} is a {config.KIND} recipe; expected a {Config.KIND} recipe")
    return config


def vocabulary_size(config: Config) -> int:
    """The vocabulary size of the token files if they are prepared, else of the tokenizer.

    Raises:
        ConfigError: the tokenizer does not exist or cannot be read.
    """
    from data import tokenizers
    from data.token_files import TokenFiles

    if config.data.dir is not None and Path(config.data.dir, "meta.json").exists():
        return TokenFiles.open(Path(config.data.dir)).vocabulary_size
    name = config.data.tokenizer
    try:
        return VOCABULARIES[name] if name in VOCABULARIES else tokenizers.load(name).n_vocab
    except DataError as error:
        raise ConfigError(f"the tokenizer {name} is not on this machine; give its vocabulary size: "
                          "--vocabulary N") from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
