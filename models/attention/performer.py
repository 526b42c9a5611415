"""``performer``: softmax attention approximated with random features, computed as ``chunked`` linear attention.

Choromanski et al., "Rethinking Attention with Performers", 2021; ``models/attention/feature_maps.py`` has the formulas.
Unlike the released code it has no maximum over keys, so that recurrent decoding is exact, and its random directions
depend on seed and step, not on the data.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from models.attention import chunked
from models.attention.feature_maps import FeatureOptions, RandomFeatures
from support.ranges import Count


@dataclass(frozen=True)
class Config(RandomFeatures):
    """Options of the Performer."""

    phi: Literal["favor", "favor_trigonometric", "favor_cosine", "performer_relu", "generalized_cos", "generalized_exp",
                 "generalized_gelu", "generalized_sigmoid"] = "favor"
    """Feature map. favor: FAVOR+, positive random features of the softmax; favor_trigonometric: random cosines and
    sines; favor_cosine: random cosines with random phases; performer_relu: relu(x) + 0.001, as in the released code of
    the Long Range Arena; generalized_cos and so on: generalised attention by f(Wx)."""
    chunk_size: Count | None = None
    """Chunk length. None: the fastest on this device."""


class Attention(chunked.Attention):
    """Chunked linear attention with the Performer's features."""

    implementation_fields = ("chunk_size",)

    @property
    def phi(self) -> FeatureOptions:
        shared = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(RandomFeatures)}
        return FeatureOptions(feature_map=self.config.phi, **shared)

    @property
    def form(self) -> None:
        return None
