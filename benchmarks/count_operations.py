"""Floating-point operations of a training step, counted from shapes, against the products in the compiled program.

    python -m benchmarks.count_operations
    python -m benchmarks.count_operations --modes softmax:materialised,linear:cumsum --context 512

"counted" is what ``metrics.jsonl`` and utilisation go by (training/accounting.py): 6 a parameter and token, and three
times the attention's forward pass. "found" is of the program that XLA made of loss and gradient, without optimizer, for
this device: two operations for each multiplication of a product (``dot``, ``convolution``), of a fusion or a call as
often as it is called, of a loop's body as often as it runs (XLA's own cost analysis takes a body once). A product
made of elementwise multiplications is found too: an outer product, and one whose terms are summed in the same fusion.

The program computes what the count leaves out: pairs above the diagonal, logits and blocks computed again in the
backward pass. It does not compute all that is counted: biases and norms are no products. Not found are the sums of
elementwise operations, and what a kernel of its own does; "calls" says how many of such the program has, and "loops"
how many loops of which the compiler does not know how often they run, whose body then counts once.
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

CHECKED = (("softmax:materialised", False), ("linear:cumsum", True))
"""Forms that compute what is counted and no more, and whether with a causal mask."""


@dataclass
class Row:
    """One mode, as the JSON file has it; operations are of a step's forward and backward pass."""

    mode: str
    """As it was named on the command line."""
    causal: bool
    """Whether with a causal mask; else an encoder's."""
    counted: float
    """From shapes."""
    found: int
    """In the compiled program."""
    ratio: float
    """The latter over the former."""
    calls: int
    """Custom calls, whose operations were not found."""
    loops: int
    """Loops whose body counts once, for how often it runs is not known."""


def count(mode: str, size: Size, *, context: int, batch: int, dtype: Any = "float32", causal: bool = True) -> Row:
    """A mode's operations, both ways.

    Args:
        mode: ``NAME`` or ``NAME:FORM``.
        size: of the model.
        context: T.
        batch: B.
        dtype: number format.
        causal: False: a classifier on an encoder, which has no mask.

    Raises:
        NotImplementedError: a form that this device does not have, or that has not this mask.
        ConfigError: sizes that do not go together, or an unknown mode.
    """
    name, options = mode_config(mode)
    sizes: dict[str, Any] = {"layers": size.layers, "heads": size.heads, "width": size.width, "context": context,
                             "dtype": dtype, "attention": (name,), "modes": {name: options}}
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
           "dtype": report.flag("number format of the products", "float32", choices=("float32", "bfloat16")),
           "width": report.flag("width of the model", 256), "layers": report.flag("transformer blocks", 2),
           "heads": report.flag("attention heads", 4), "vocabulary": report.flag("tokens in the vocabulary", 512),
           "context": report.flag("length of a sequence", 256), "batch": report.flag("sequences in a step", 2)})
def main(options: Namespace, results: report.Results) -> None:
    """Every mode with both masks, where it has them."""
    report.use_whole_device()
    size = Size(options.layers, options.heads, options.width, options.vocabulary)
    modes = options.modes or tuple(dict.fromkeys((*(mode for mode, _ in CHECKED), *attention.modes())))
    for mode in modes:
        mode_config(mode)  # one that there is not stops before any work
    for mode, causal in itertools.product(modes, (True, False)):
        try:
            results.add(count(mode, size, context=options.context, batch=options.batch, dtype=options.dtype,
                              causal=causal))
        except (ConfigError, NotImplementedError) as error:
            status(f"{mode}, {'causal' if causal else 'no mask'}: {error}")


if __name__ == "__main__":
    sys.exit(main())
