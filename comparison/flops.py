"""Floating-point operations of training, as a run's config and environment tell them."""

import json
from functools import cache
from typing import Any


def flops_per_token(config: dict[str, Any], environment: dict[str, Any]) -> float | None:
    """Operations a token of forward and backward pass: 6 a parameter (positions, and what an attention mode has beside
    projections, left out) and three times those of the attention's forward pass, as ``benchmarks.train_step`` counts
    them; recomputed ones do not count.

    Of a classifier, which counts examples times the context as tokens, embeddings and head are left out, and both
    towers count. Attention counts as if it were causal.

    None where the number of parameters is not known, or this version does not have the attention mode.
    """
    model, parameters = config["model"], environment.get("parameters")
    if not isinstance(parameters, int):
        return None
    try:
        heads, width, context = model["heads"], model["width"], model["context"]
        head_width, towers = model.get("head_width") or width // heads, model.get("towers", 1)
        if model["positions"] == "learned":
            parameters -= context * width
        if "classes" in model:
            parameters -= environment["vocabulary_size"] * width + model["mlp_width"] * (
                (4 if towers == 2 else 1) * width + model["classes"])
        pattern = model["attention"]
        layers = [pattern[layer % len(pattern)] for layer in range(model["layers"])]
        of_layers = [_attention(mode, json.dumps(model["modes"].get(mode, {})), heads, head_width, width, context)
                     for mode in layers]
        mixing, own = (sum(figures) for figures in zip(*of_layers, strict=True))
    except Exception:  # another version's config, a mode that is not here, or one that counts nothing
        return None
    return towers * (6.0 * (parameters - own) + 3.0 * mixing)


@cache
def _attention(mode: str, options: str, heads: int, head_width: int, width: int, context: int) -> tuple[float, int]:
    """Operations a token of one layer's attention, forward, and the parameters that these count; none are made."""
    from flax import nnx

    from models import attention

    module = attention.load(mode)
    layer = nnx.eval_shape(lambda: module.Attention(
        module.Config(**json.loads(options)), heads=heads, head_width=head_width, width=width, max_length=context,
        rngs=nnx.Rngs(0)))
    return layer.flops(context, context) / context, layer.own_parameters
