"""Whether a training step fits the memory of a GPU, without one: the step is compiled for the card and not run.

    python -m benchmarks.memory configs/gpt2_124m.py --attention chunked --model.context 65536 --card h100-80gb

Recipe and further flags are those of ``train.py``. On a card the compiler measures which matrix products are faster,
its own or those of cuBLAS. It cannot do that here, so the step is compiled with each, and the truth lies near the two.
The step is compiled for one H200, whatever the card, in an environment that ``make gpu-check`` builds.

By default jax reserves three quarters of a card's memory; the verdict says where a step needs more. The driver,
evaluations and other programs on the card come on top.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import functools
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from benchmarks import report, target
from configs.schema import Config
from support.command import status
from support.errors import BenchmarkError

MODULE = "benchmarks.memory"
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
"""What jax reserves of it by default."""
MOST_SHARE = 0.95
"""What jax can reserve: the driver and the libraries need the rest."""
PRODUCTS = {"the compiler's": {}, "cuBLAS's": {"xla_gpu_enable_triton_gemm": False}}
"""Options of the compiler by whose matrix products they give."""


def verdict(peak: int, card_bytes: int) -> str:
    """Whether a peak fits a card."""
    if peak <= JAX_SHARE * card_bytes:
        return "fits"
    if peak <= MOST_SHARE * card_bytes:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE} in the environment"
    return "does not fit"


def answer(case: Mapping[str, Any]) -> dict[str, int]:
    """What a process for :func:`plan` answers: the memory of a step in bytes, as the compiler plans it."""
    gpu = target.Target()
    compiled = gpu.compile(gpu.trace_step(gpu.load_config(case["config"]), case["vocabulary"]), **case["flags"])
    planned = compiled.memory_analysis()
    if planned is None:
        raise BenchmarkError("the compiler does not report the memory of the step")
    return {"arguments": planned.argument_size_in_bytes, "temporaries": planned.temp_size_in_bytes,
            "outputs": planned.output_size_in_bytes - planned.alias_size_in_bytes,
            "peak": report.peak_bytes(compiled) or 0}


def plan(config: Config, vocabulary: int) -> list[dict[str, Any]]:
    """The memory of a step with each kind of products."""
    return [{"products": name} | target.compile_elsewhere(
        MODULE, {"config": config.to_dict(), "vocabulary": vocabulary, "flags": flags})
        for name, flags in PRODUCTS.items()]


@functools.partial(
    report.Benchmark, module=MODULE, passes_on=True, answer=answer, tables=report.columns(
        ("products", "products", ""), *((f"{name} GiB", lambda row, name=name: row[name] / 2**30, ",.2f")
                                        for name in ("arguments", "outputs", "temporaries", "peak"))),
    flags={"card": report.flag("card to fit", "h200", choices=tuple(CARDS)),
           "vocabulary": target.VOCABULARY_FLAG})
def main(options: Namespace, results: report.Results) -> None:
    """Compiles the step and says whether it fits."""
    config = target.parse_recipe(options.words, target.Target())
    target.find_python()
    vocabulary = options.vocabulary or target.vocabulary_size(config)
    card_bytes = CARDS[options.card] * 2**20
    card = f"{options.card} of {card_bytes / 2**30:,.1f} GiB"
    status("compiling …")
    rows = plan(config, vocabulary)
    least, most = (verdict(choose(row["peak"] for row in rows), card_bytes) for choose in (min, max))
    results.heading = (
        f"{','.join(config.model.attention)} attention, context {config.model.context:,}, "
        f"{config.train.batch_size // config.train.accumulate} sequences at once ({config.train.batch_size} an update "
        f"in {config.train.accumulate} parts), {config.model.dtype}, remat {config.train.remat}")
    results.remarks.append(f"{card}: " + (
        most if least == most else f"{least}, or {most}, depending on whose products are faster"))
    results.more = {"target": target.Target().kind, "model": config.to_dict()["model"],
                    "train": config.to_dict()["train"], "card_bytes": card_bytes, "verdicts": [least, most]}
    results.add(*rows)


if __name__ == "__main__":
    sys.exit(main())
