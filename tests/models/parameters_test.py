"""Declarations of parameters equal the shardings and weight decay of earlier versions, which went by name."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.schema import EncoderConfig, ModelConfig
from models import attention, encoder, gpt
from models.attention.self_attention import SelfAttention
from models.encoder import Classifier
from models.gpt import GPT
from models.parameters import declarations, declare

SHARED = {"query.kernel", "query.bias", "key.kernel", "key.bias", "value.kernel", "value.bias", "output.kernel",
          "output.bias"}
OWN: dict[str, dict[str, bool]] = {
    "bigbird": {}, "chunked": {}, "linear": {}, "local": {}, "performer": {}, "reformer": {}, "softmax": {},
    "sparse": {},
    "linformer": {"projection_KS": True},
    "longformer": {f"global_{name}.{part}": part == "kernel" for name in ("query", "key", "value")
                   for part in ("kernel", "bias")},
    "sinkhorn": {"sort.kernel": True, "sort.bias": False},
    "synthesizer": {"scores_HLL": True},
    "synthesizer:factorised": {"rows_HLK": True, "columns_HLK": True},
    "synthesizer:dense": {"scores_HLD": True, "bias_HL": False},
}
"""Own parameters of the modes of that time, and whether they decay."""
WITHOUT = {"reformer": "key.", "synthesizer": ("key.", "query."), "synthesizer:factorised": ("key.", "query."),
           "synthesizer:dense": "key."}
"""The shared projections that a mode lacks."""


def named(model: nnx.Module) -> dict:
    return {jax.tree_util.keystr(path, simple=True, separator="."): declared
            for path, declared in jax.tree.leaves_with_path(declarations(model))}


def layer(name: str) -> SelfAttention:
    mode, _, kind = name.partition(":")
    config = attention.load(mode).Config(**({"kind": kind} if kind else {}))
    return attention.abstract(mode, config, head_width=4, width=8, max_length=16)


@pytest.mark.parametrize("name", OWN)
def test_modes_decay_what_they_did_and_share_the_projections(name):
    found = named(layer(name))
    left_out = {parameter for parameter in SHARED if parameter.startswith(WITHOUT.get(name, "-"))}
    assert {parameter for parameter, declared in found.items() if declared.shared} == SHARED - left_out
    assert {parameter: declared.decays for parameter, declared in found.items() if not declared.shared} == OWN[name]
    for parameter, declared in found.items():
        if declared.shared:
            assert declared.decays == parameter.endswith("kernel")


def test_embeddings_decay_and_vectors_do_not():
    """In both models, with all options."""
    config = encoder.resolve_config(EncoderConfig(layers=1, heads=2, width=8, mlp_width=8, context=8, classes=3,
                                                  positions="learned", pooling="cls"))
    language = gpt.resolve_config(ModelConfig(layers=1, heads=2, width=8, context=8))
    for model in (nnx.eval_shape(lambda: Classifier(config, 5, rngs=nnx.Rngs(0))),
                  nnx.eval_shape(lambda: GPT(language, 5, rngs=nnx.Rngs(0)))):
        found = named(model)
        assert {name for name, declared in found.items() if declared.decays} == {
            name for name in found if name.endswith(("kernel", "embedding"))}
        assert {name for name, declared in found.items() if "vocabulary" in declared.axes} == {
            name for name in found if name.endswith("token_embedding.embedding")}


def test_axes_have_to_be_one_for_each_dimension():
    class Wrong(nnx.Module):
        def __init__(self):
            self.x_AB = nnx.Param(jnp.zeros((2, 3)), **declare("width", decays=True))

    with pytest.raises(ValueError, match=r"the parameter x_AB of shape \(2, 3\) declares axes .*; expected"):
        declarations(Wrong())
