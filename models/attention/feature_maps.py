"""Feature maps φ of linear attention, whose weights are φ(q)·φ(k).

``elu``, ``relu``, ``softplus``, ``exp`` and ``performer_relu`` work on each number alone, and are at least 0.
``identity`` leaves queries and keys as they are. The rest approximate the weight of softmax attention, exp(q·k / √D),
which is exp(q̂·k̂) of q̂ = q D^(−1/4) and k̂ = k D^(−1/4):

- ``favor``: positive random features, exp(w·x̂ − |x̂|²/2) / √R for R random directions w. Choromanski et al., "Rethinking
  Attention with Performers", 2021 (FAVOR+).
- ``favor_trigonometric``: exp(|x̂|²/2) (cos w·x̂, sin w·x̂) / √R, of the first FAVOR. The weights have the same mean, and
  the more variance the smaller they are: sums of them come out near 0 or below it, and what is divided by such a sum
  is noise. To compare with, not to use.
- ``taylor``: 1 + q̂·k̂, and + (q̂·k̂)²/2 at order 2, which is never below 1/2. Order 1 can be negative.

Each token's features depend on that token alone, so that prefixes, segments and decoding are exact: there is no maximum
over keys. Exponents are bounded otherwise:

- A factor on all features of a query cancels in the ratio. With ``normalize``, a query's largest exponent is made 50,
  so that ε, which does not cancel, counts e^(−50) as much: it draws the output to 0 only where every key that is seen
  has features below some e^(−60).
- Exponents of keys, and of queries without ``normalize``, are cut at 20. w·x̂ − |x̂|²/2 is at most (w·x)²/2|x|², half the
  square of a normal variable, so that a positive feature gets there only if x is as good as parallel to a w.

The estimate of a weight has no bias; the output, a ratio of two estimates, has one that falls with 1 / R.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kernels.mixed_precision import rounded, wide
from models.attention.layer_options import LayerOptions, WeightSumOptions
from support.errors import ConfigError

FeatureMap = Literal["elu", "relu", "softplus", "exp", "identity", "performer_relu", "favor", "favor_trigonometric",
                     "taylor"]

_LEAST = 1e-3


class _Elementwise(NamedTuple):
    """Elementwise map; derivative from its output."""

    of: Callable[[Array], Array]
    slope: Callable[[Array], Array]


ELEMENTWISE: dict[FeatureMap, _Elementwise] = {
    # elu(x) + 1; Katharopoulos et al., "Transformers are RNNs", 2020
    "elu": _Elementwise(lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))), lambda y: jnp.minimum(y, 1)),
    "relu": _Elementwise(jax.nn.relu, lambda y: y > 0),
    # Buckman and Gelada, "Linear Transformers Are Faster", 2024
    "softplus": _Elementwise(jax.nn.softplus, lambda y: -jnp.expm1(-wide(y))),
    "exp": _Elementwise(jnp.exp, lambda y: y),
    # weights of either sign, for a norm of the output instead of the division by their sum
    "identity": _Elementwise(lambda x: x, jnp.ones_like),
    # what Long Range Arena's released Performer computes
    "performer_relu": _Elementwise(lambda x: jax.nn.relu(x) + _LEAST, lambda y: y > jnp.asarray(_LEAST, y.dtype)),
}
RANDOM: tuple[FeatureMap, ...] = ("favor", "favor_trigonometric")
SIGNED: tuple[FeatureMap, ...] = ("favor_trigonometric", "taylor")
"""Their terms cancel in a weight, so their rounding does not; they stay float32."""

QUERY_EXPONENT, KEY_EXPONENT = 50.0, 20.0
"""The largest, of random features: weights up to e^70, and the sum over a million tokens is within float32's e^88."""


@dataclass(frozen=True)
class RandomFeatures(LayerOptions):
    """Options of the random feature maps."""

    features: int = 256
    """Number of random directions: one feature each for favor, two each for favor_trigonometric."""
    orthogonal: bool = True
    """Draw orthogonal random directions, which lower the variance; otherwise independent ones."""
    resample_every: int = 1000
    """Training steps between redraws of the random directions. 0: never redrawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least("features", 1)
        self.check_least("resample_every", 0)


@dataclass(frozen=True)
class FeatureOptions(RandomFeatures, WeightSumOptions):
    """Which feature map, and what is done with its weights."""

    feature_map: FeatureMap = "elu"
    """φ, applied to queries and keys."""
    order: Literal[1, 2] = 2
    """Order of the Taylor expansion, for taylor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map == "taylor" and self.order == 1 and self.normalizes:
            raise ConfigError(f"{self.flag('normalize')}: the weights of taylor of order 1 can be negative; expected "
                              f"False, or {self.flag('order')} 2")
        if self.feature_map == "identity" and self.normalizes:
            raise ConfigError(f"{self.flag('normalize')}: the weights of identity can be negative; expected False")


def feature_width(options: FeatureOptions, head_width: int) -> int:
    """M."""
    D = head_width
    if options.feature_map == "taylor":
        return 1 + D + (D * (D + 1) // 2 if options.order == 2 else 0)
    widths = {"favor": options.features, "favor_trigonometric": 2 * options.features}
    return widths.get(options.feature_map, D)


def draw_directions(key: Array, features: int, head_width: int, *, orthogonal: bool) -> Float[Array, "R D"]:
    """Random directions w, each standard normal; float32.

    Orthogonal ones are at right angles in groups of D, of which the last may be cut short; their lengths are those of
    independent normal vectors.
    """
    normal_RD = jax.random.normal(key, (features, head_width), jnp.float32)
    if not orthogonal:
        return normal_RD
    groups = -(-features // head_width)
    q_GDD, r_GDD = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, 1), (groups, head_width, head_width),
                                                   jnp.float32))
    # The factorisation fixes signs as it likes. With those of R's diagonal, Q has no preferred direction.
    q_GDD *= jnp.sign(jnp.diagonal(r_GDD, axis1=1, axis2=2))[:, None, :]
    unit_RD = q_GDD.swapaxes(1, 2).reshape(-1, head_width)[:features]
    return unit_RD * jnp.linalg.norm(normal_RD, axis=1, keepdims=True)


def features(options: FeatureOptions, x_BTHD: Float[Array, "B T H D"], directions_RD: Float[Array, "R D"] | None = None,
             *, query: bool = False) -> Float[Array, "B T H M"]:
    """φ(x), computed in float32 or better, and returned in x's number format if φ is never negative.

    Args:
        options: which φ.
        x_BTHD: queries or keys.
        directions_RD: w, of the random maps.
        query: of queries to be normalised, each one's features have a factor that the normalisation takes away.
    """
    if options.feature_map in ELEMENTWISE:
        return _elementwise(options.feature_map, x_BTHD)
    x = wide(x_BTHD)
    if options.feature_map == "taylor":
        y_BTHM = _taylor(x, options.order)
    else:
        assert directions_RD is not None
        y_BTHM = _favor(x, directions_RD.astype(x.dtype), positive=options.feature_map == "favor",
                        scaled=query and options.normalizes)
    return y_BTHM if options.feature_map in SIGNED else y_BTHM.astype(x_BTHD.dtype)


def elementwise(options: FeatureOptions) -> Callable[[Array], Array] | None:
    """φ as an elementwise map of float32; None if it is not elementwise."""
    return ELEMENTWISE[options.feature_map].of if options.feature_map in ELEMENTWISE else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _elementwise(feature_map: FeatureMap, x_BTHD: Array) -> Array:
    # A CPU would compute φ anew for each of its uses; a GPU would keep it for the backward pass in float32 too, by an
    # estimate 1.8 of 123 ms and 5 GiB of a step of 65,536 tokens at 124M.
    return lax.optimization_barrier(rounded(ELEMENTWISE[feature_map].of(wide(x_BTHD)), x_BTHD.dtype))


def _elementwise_forward(feature_map: FeatureMap, x_BTHD: Array) -> tuple[Array, Array]:
    y_BTHM = _elementwise(feature_map, x_BTHD)
    return y_BTHM, y_BTHM


def _elementwise_backward(feature_map: FeatureMap, y_BTHM: Array, dy_BTHM: Array) -> tuple[Array]:
    return rounded(ELEMENTWISE[feature_map].slope(y_BTHM) * wide(dy_BTHM), dy_BTHM.dtype),


_elementwise.defvjp(_elementwise_forward, _elementwise_backward)


def _favor(x_BTHD: Array, directions_RD: Array, *, positive: bool, scaled: bool) -> Array:
    R, D = directions_RD.shape
    x_BTHD *= D**-0.25
    # An error in an exponent is a relative one of the weight: no reduced precision here.
    along_BTHR = jnp.einsum("bthd,rd->bthr", x_BTHD, directions_RD, precision=lax.Precision.HIGHEST)
    half_BTH1 = 0.5 * jnp.sum(x_BTHD**2, axis=-1, keepdims=True)
    exponent = along_BTHR - half_BTH1 if positive else half_BTH1
    if scaled:
        exponent += QUERY_EXPONENT - lax.stop_gradient(exponent.max(axis=-1, keepdims=True))
    else:
        exponent = jnp.minimum(exponent, KEY_EXPONENT)
    size = jnp.exp(exponent - 0.5 * math.log(R))
    return size if positive else size * jnp.concatenate([jnp.cos(along_BTHR), jnp.sin(along_BTHR)], axis=-1)


def _taylor(x_BTHD: Array, order: int) -> Array:
    D = x_BTHD.shape[-1]
    x_BTHD *= D**-0.25
    terms = [jnp.ones_like(x_BTHD[..., :1]), x_BTHD]
    if order == 2:
        # (q̂·k̂)²/2 is a sum over pairs of dimensions, each but the squares twice.
        i, j = np.triu_indices(D)
        scale = np.where(i == j, math.sqrt(0.5), 1.0).astype(x_BTHD.dtype)
        terms.append(x_BTHD[..., i] * x_BTHD[..., j] * scale[None, None, None, :])
    return jnp.concatenate(terms, axis=-1)
