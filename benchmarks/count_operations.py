"""Compares the floating-point operations that are counted from shapes with those of the compiled training step.

    python -m benchmarks.count_operations
    python -m benchmarks.count_operations --modes softmax:materialised,linear:cumsum --context 512

"counted" is the number of ``metrics.jsonl`` and of utilisation (training/accounting.py): 6 per parameter and token, and
three times the attention's forward pass. "found" is the number in XLA's program of the loss and its gradient for this
device: two for each multiplication of a product. The body of a loop counts as often as it runs, where XLA's own cost
analysis counts it once. Products made of elementwise multiplications are found if they are outer products or are summed
in the same fusion.

The program also computes pairs above the diagonal, and recomputes blocks in the backward pass. It has no products for
biases and norms. Other elementwise sums and the inside of custom calls are not found. "calls" is the number of custom
calls, "loops" that of loops with an unknown trip count, whose body counts once.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import functools
import itertools
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import report
from benchmarks.program import read_program
from benchmarks.train_step import Size, mode_config
from configs.schema import EncoderConfig, ModelConfig
from kernels.cross_entropy import cross_entropy
from models import attention, encoder, gpt
from models.encoder import Classifier
from models.gpt import GPT
from support.command import status
from support.errors import ConfigError
from training import accounting

SIZE = Size(layers=2, heads=4, width=256, vocabulary=512)
CHECKED = (("softmax:materialised", False), ("linear:cumsum", True))
"""Forms whose program has exactly the counted operations, and whether they have a causal mask."""


@dataclass
class Row:
    """One mode, as in the JSON file; operations are of the forward and backward pass of a step."""

    mode: str
    """As on the command line."""
    causal: bool
    """Whether it has a causal mask; else it is an encoder."""
    counted: float
    """From shapes."""
    found: int
    """In the compiled program."""
    ratio: float
    """Found over counted."""
    calls: int
    """Custom calls."""
    loops: int
    """Loops with an unknown trip count."""


def count(mode: str, size: Size, *, context: int, batch: int, causal: bool = True) -> Row:
    """Counts the operations of a mode both ways.

    Args:
        mode: ``NAME`` or ``NAME:FORM``.
        size: of the model.
        context: T.
        batch: B.
        causal: False: a classifier on an encoder, without a mask.

    Raises:
        NotImplementedError: the device or the mask is not supported.
        ConfigError: an unknown mode, or the sizes do not match.
    """
    name, options = mode_config(mode)
    sizes: dict[str, Any] = {"layers": size.layers, "heads": size.heads, "width": size.width, "context": context,
                             "dtype": "float32", "attention": (name,), "modes": {name: options}}
    config: Any = (gpt.resolve_config(ModelConfig(**sizes)) if causal else
                   encoder.resolve_config(EncoderConfig(**sizes, mlp_width=4 * size.width, pooling="mean")))
    kind: Any = GPT if causal else Classifier
    model = nnx.eval_shape(lambda: kind(config, size.vocabulary, rngs=nnx.Rngs(0)))
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)

    def loss(parameters: Any, variables: Any, tokens_BT: jax.Array) -> jax.Array:
        found: Any = nnx.merge(graph, parameters, variables)
        if not causal:
            return found.forward(tokens_BT).sum()
        x_BTE, _ = found.forward(tokens_BT)
        x_BTE, head_VE = found.head_operands(x_BTE)
        return cross_entropy(x_BTE, head_VE, tokens_BT)

    tokens_BT = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    program = jax.jit(jax.value_and_grad(loss)).lower(parameters, variables, tokens_BT).compile().as_text()
    assert program is not None
    found = read_program(program).products
    number = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    per_token = accounting.flops_per_token(
        {"model": asdict(config)}, {"parameters": number, "vocabulary_size": size.vocabulary})
    assert per_token is not None
    counted = per_token * batch * context
    return Row(mode, causal, counted, found.operations, found.operations / counted, found.calls,
               found.unbounded_loops)


@functools.partial(
    report.Benchmark, module="benchmarks.count_operations", tables=report.columns(
        ("mode", "mode", ""), ("mask", lambda row: "causal" if row.causal else "none", ""),
        ("counted", "counted", ".4g"), ("found", "found", ".4g"), ("found / counted", "ratio", ".3f"),
        ("calls", "calls", ""), ("loops", "loops", "")),
    flags={"modes": report.flag("modes, or MODE:FORM, with commas between (all, and the two forms that are checked)",
                                type=report.names),
           "context": report.flag("length of a sequence", 256)})
def main(options: Namespace, results: report.Results) -> None:
    """Every mode with each mask that it supports."""
    report.use_whole_device()
    modes = options.modes or tuple(dict.fromkeys((*(mode for mode, _ in CHECKED), *attention.modes())))
    for mode in modes:
        mode_config(mode)  # unknown ones stop before any work
    for mode, causal in itertools.product(modes, (True, False)):
        try:
            results.add(count(mode, SIZE, context=options.context, batch=2, causal=causal))
        except (ConfigError, NotImplementedError) as error:
            status(f"{mode}, {'causal' if causal else 'no mask'}: {error}")


if __name__ == "__main__":
    sys.exit(main())
