"""Floating-point operations of training, as a run's config and environment tell them."""

import json
from functools import cache
from typing import Any


def flops_per_token(config: dict[str, Any], environment: dict[str, Any]) -> float | None:
    """Operations a token of forward and backward pass: 6 a parameter (positions, and what an attention mode has beside
    projections, left out) and three times those of the attention's forward pass, as ``benchmarks.train_step`` counts
    them; recomputed ones do not count.

    None where the number of parameters is not known, or this version does not have the attention mode.
    """
    model, parameters = config["model"], environment.get("parameters")
    if not isinstance(parameters, int):
        return None
    try:
        heads, width, context = model["heads"], model["width"], model["context"]
        if model["positions"] == "learned":
            parameters -= context * width
        pattern = model["attention"]
        layers = [pattern[layer % len(pattern)] for layer in range(model["layers"])]
        of_layers = [_attention(mode, json.dumps(model["modes"].get(mode, {})), heads, width, context)
                     for mode in layers]
        mixing, own = (sum(figures) for figures in zip(*of_layers, strict=True))
    except Exception:  # another version's config, a mode that is not here, or one that counts nothing
        return None
    return 6.0 * (parameters - own) + 3.0 * mixing


@cache
def _attention(mode: str, options: str, heads: int, width: int, context: int) -> tuple[float, int]:
    """Operations a token of one layer's attention, forward, and the parameters that these count; none are made."""
    from flax import nnx

    from models import attention

    module = attention.load(mode)
    layer = nnx.eval_shape(lambda: module.Attention(
        module.Config(**json.loads(options)), heads=heads, head_width=width // heads, width=width, max_length=context,
        rngs=nnx.Rngs(0)))
    return layer.flops(context, context) / context, layer.own_parameters
