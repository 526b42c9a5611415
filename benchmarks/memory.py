"""How much memory a training step takes on a GPU, without one: it is compiled for the card, not run.

    python -m benchmarks.memory configs/gpt2_124m.py --attention chunked --model.context 65536 --card h100-80gb
    python -m benchmarks.memory configs/gpt2_124m.py --model.context 65536 --find-batch

Recipe and further flags are those of ``train.py``. On a real card the compiler tries which products are the faster
ones, its own or cuBLAS's, which here it cannot: the step is compiled with either, and the truth lies near the two. It
is compiled for an H200 whatever the card, for one device, and needs what ``make gpu-check`` builds.

jax takes three quarters of a card's memory for itself at the start; what fits only into more says so. The step alone
is meant: the driver, evaluations and other programs on the card come on top.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report, target
from configs.schema import Config
from models import gpt
from support.command import status
from support.errors import BenchmarkError, ConfigError, DataError
from support.files import write_json

CARDS = {
    "h200": 143_771,
    "h100-80gb": 81_559,
    "a100-80gb": 81_920,
    "a100-40gb": 40_960,
    "rtx4090": 24_564,
    "l4": 23_034,
}
"""Memory in MiB, as ``nvidia-smi`` shows it."""
JAX_SHARE = 0.75
"""What jax takes of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
MOST_SHARE = 0.95
"""What it can be told to take: the driver and the libraries need the rest."""
PRODUCTS = {"the compiler's": True, "cuBLAS's": False}
"""Whose matrix products, and whether that is XLA's Triton."""
VOCABULARIES = {"gpt2": 50_257, "bytes": 257}
"""Of tokenizers whose size is known without their files."""
HEADINGS = ("products", "arguments GiB", "outputs GiB", "temporaries GiB", "peak GiB")


@dataclass(frozen=True)
class Memory:
    """What a step takes, in bytes, as the compiler plans it."""

    arguments: int
    """Parameters, optimizer state and batch."""
    outputs: int
    """Those that do not take the place of arguments."""
    temporaries: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.arguments + self.outputs + self.temporaries


def verdict(peak: int, card_bytes: int) -> str:
    """Whether a peak fits a card, in words."""
    if peak <= JAX_SHARE * card_bytes:
        return "fits"
    if peak <= MOST_SHARE * card_bytes:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE} in the environment"
    return "does not fit"


def parse(arguments: Sequence[str], gpu: target.Target) -> Config:
    """The config of train.py's command line, validated for that GPU.

    Raises:
        ConfigError: it cannot be run, or on more than one device only.
    """
    # Here, not above: the part that compiles does without the packages that train.py needs.
    import train

    with gpu.tracing():
        config = train.parse(arguments).config
    for axis in ("data", "fsdp", "tensor", "context"):
        if getattr(config.mesh, axis) not in ((1, -1) if axis == "data" else (1,)):
            raise ConfigError(f"mesh.{axis} is {getattr(config.mesh, axis)}; expected 1: the step is compiled for one "
                              "device, so give it the share of the batch that one device has")
    return config


def vocabulary_size(config: Config) -> int:
    """V of the token files where they are prepared, else of the tokenizer.

    Raises:
        ConfigError: there is no such tokenizer, or its vocabulary cannot be read.
    """
    from data import tokenizers
    from data.token_files import TokenFiles

    if config.data.dir is not None and Path(config.data.dir, "meta.json").exists():
        return TokenFiles.open(Path(config.data.dir)).vocabulary_size
    name = config.data.tokenizer
    try:
        return VOCABULARIES[name] if name in VOCABULARIES else tokenizers.load(name).n_vocab
    except DataError as error:
        raise ConfigError(f"the vocabulary of the tokenizer {name} is not on this machine; give its size: "
                          "--vocabulary N") from error


def compile_elsewhere(config: Config, vocabulary: int, *, triton: bool, python: str) -> Memory:
    """The memory of a step, compiled in a process of its own by a Python that can.

    Raises:
        BenchmarkError: it cannot be compiled; the message says why.
    """
    case = {"config": config.to_dict(), "vocabulary": vocabulary, "triton": triton}
    result = report.in_process("benchmarks.memory", case, python=python)
    if "error" in result:
        raise BenchmarkError(f"the step cannot be compiled: {result['error']}")
    return Memory(**result)


def compile_here(case: dict[str, Any]) -> Memory:
    """The same in this process."""
    config = Config.from_dict(case["config"])
    gpu = target.Target()
    with gpu.tracing():
        config = replace(config, model=gpt.resolve_config(config.model))
    traced = gpu.trace_step(config, case["vocabulary"])
    # With Triton means where the step allows it: that of cuDNN's attention leaves products to cuBLAS.
    flags = {} if case["triton"] else {"xla_gpu_enable_triton_gemm": False}
    memory = gpu.compile(traced, None, **flags).memory_analysis()
    if memory is None:
        raise BenchmarkError("the compiler does not say how much memory the step takes")
    return Memory(memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes,
                  memory.temp_size_in_bytes)


def with_batch(config: Config, rows: int) -> Config:
    """A config that takes so many sequences at once, in parts where it took parts before."""
    parts = min(config.train.accumulate, 2)  # the sum of gradients takes the same memory for any number above one
    return replace(config, train=replace(config.train, batch_size=rows * parts, accumulate=parts))


def find_batch(config: Config, vocabulary: int, card_bytes: int, python: str) -> int:
    """The largest power of two of sequences at once that fits, 0 where not even one does."""
    rows = 1
    while True:
        status(f"{rows} at once …")
        peak = max(compile_elsewhere(with_batch(config, rows), vocabulary, triton=triton, python=python).peak
                   for triton in PRODUCTS.values())
        print(f"{rows} at once: {peak / 2**30:,.2f} GiB, {verdict(peak, card_bytes)}")
        if peak > MOST_SHARE * card_bytes:
            return rows // 2
        rows *= 2


def command(arguments: Sequence[str]) -> int:
    """Compiles the step that the flags say, and prints whether it fits."""
    options, more = _options(arguments)
    if options.case is not None:
        # One line of JSON is the last of what this prints.
        print(json.dumps(asdict(compile_here(json.loads(options.case)))))
        return 0
    card_bytes = int((CARDS[options.card] / 2**10 if options.card_gib is None else options.card_gib) * 2**30)
    card = f"{options.card if options.card_gib is None else 'a card'} of {card_bytes / 2**30:,.1f} GiB"
    report.check_output(options.json)
    config = parse(more, target.Target())
    python = target.find_python()
    vocabulary = options.vocabulary or vocabulary_size(config)
    rows = config.train.batch_size // config.train.accumulate
    memories: dict[str, Memory] = {}
    if options.find_batch:
        most = find_batch(config, vocabulary, card_bytes, python)
        print(f"{card}: " + (f"{most} sequences at once fit: --train.accumulate is --train.batch-size / {most}, or "
                             "more" if most else "not even one sequence at once fits"))
        return 0
    for products, triton in PRODUCTS.items():
        status(f"compiling with {products} products …")
        memories[products] = compile_elsewhere(config, vocabulary, triton=triton, python=python)
    print(f"{','.join(config.model.attention)} attention, context {config.model.context:,}, {rows} sequences at once "
          f"({config.train.batch_size} an update in {config.train.accumulate} parts), {config.model.dtype}, "
          f"remat {config.train.remat}")
    print(report.table(HEADINGS, [[name, *(f"{size / 2**30:,.2f}" for size in (
        memory.arguments, memory.outputs, memory.temporaries, memory.peak))] for name, memory in memories.items()]))
    least, most = (verdict(choose(memory.peak for memory in memories.values()), card_bytes) for choose in (min, max))
    print(f"{card}: " + (most if least == most else f"{least}, or {most}, depending on whose products are faster"))
    if options.json is not None:
        write_json(options.json, report.origin("benchmarks.memory", options, more) | {
            "target": target.Target().kind, "model": config.to_dict()["model"], "train": config.to_dict()["train"],
            "card_bytes": card_bytes, "verdicts": [least, most],
            "memory": {name: asdict(memory) | {"peak": memory.peak} for name, memory in memories.items()}})
    return 0


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python -m benchmarks.memory RECIPE [flags below] [flags of train.py]")
    parser.add_argument("--card", choices=tuple(CARDS), default="h200", help="card to fit (%(default)s)")
    parser.add_argument("--card-gib", type=_positive, metavar="GIB", help="memory of another card, in GiB")
    parser.add_argument("--find-batch", action="store_true",
                        help="look for the most sequences at once that fit, among powers of two")
    parser.add_argument("--vocabulary", type=report.positive,
                        help="tokens in the vocabulary (the token files', else the tokenizer's)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args(arguments)
    if options.case is None and (not more or more[0].startswith("-")):
        parser.error("which recipe? It comes before the flags of train.py")
    return options, more


def _positive(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise ValueError(text)
    return float(text)


_positive.__name__ = "number above 0"  # what argparse calls it in its message


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.memory", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
