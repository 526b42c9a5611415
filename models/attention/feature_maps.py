"""Feature maps φ of linear attention, with weights φ(q)·φ(k).

``elu``, ``relu``, ``softplus``, ``exp`` and ``performer_relu`` are elementwise and non-negative. ``identity`` is the
identity. ``generalized_cos``, ``_exp``, ``_gelu`` and ``_sigmoid`` are the generalised attention of the Performer,
(f(w·x̂) + 0.001) / √R for R random directions w and x̂ = x D^(−1/4): its weights are those of another kernel than
softmax, and with cos and gelu can be negative. The rest approximate the weight of softmax attention, exp(q·k / √D),
which is exp(q̂·k̂):

- ``favor``: positive random features, exp(w·x̂ − |x̂|²/2) / √R for R random directions w. Choromanski et al., "Rethinking
  Attention with Performers", 2021 (FAVOR+).
- ``favor_trigonometric``: exp(|x̂|²/2) (cos w·x̂, sin w·x̂) / √R, from the first version of FAVOR. The weights have the
  same mean, but their variance increases as they decrease: sums of weights can be near 0 or negative, so that the
  normalised output is noise. For comparison only.
- ``favor_cosine``: exp(|x̂|²/2) √2 cos(w·x̂ + b) / √R, with b uniform in [0, 2π): one feature per direction, with a
  larger variance. Rahimi, Recht: "Random Features for Large-Scale Kernel Machines", 2007.
- ``taylor``: 1 + q̂·k̂, and + (q̂·k̂)²/2 at order 2, which is never below 1/2. Order 1 can be negative.

The features of a token depend only on that token, without a maximum over keys, so that prefixes, segments and decoding
are exact. Exponents are bounded as follows:

- A factor on all features of a query cancels in the ratio. With ``normalize``, a query's largest exponent is set to 50,
  which scales ε, which does not cancel, by e^(−50): it affects the output only if all visible keys have features below
  about e^(−60).
- Exponents of keys, and of queries without ``normalize``, are clipped at 20. w·x̂ − |x̂|²/2 is at most (w·x)²/2|x|², half
  the square of a normal variable, so that positive features reach the limit only if x is nearly parallel to a w.

The estimate of a weight is unbiased. The output, a ratio of two estimates, has a bias that decreases as 1 / R.
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

from kernels.mixed_precision import rounded, to_float32
from models.attention.layer_options import LayerOptions, WeightSumOptions
from support.errors import ConfigError
from support.ranges import Count, Natural

FeatureMap = Literal["elu", "relu", "softplus", "exp", "identity", "performer_relu", "favor", "favor_trigonometric",
                     "favor_cosine", "generalized_cos", "generalized_exp", "generalized_gelu", "generalized_sigmoid",
                     "taylor"]

_LEAST = 1e-3


class _Elementwise(NamedTuple):
    """Elementwise map; derivative from its output."""

    function: Callable[[Array], Array]
    slope: Callable[[Array], Array]


ELEMENTWISE: dict[FeatureMap, _Elementwise] = {
    # elu(x) + 1; Katharopoulos et al., "Transformers are RNNs", 2020
    "elu": _Elementwise(lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))), lambda y: jnp.minimum(y, 1)),
    "relu": _Elementwise(jax.nn.relu, lambda y: y > 0),
    # Buckman and Gelada, "Linear Transformers Are Faster", 2024
    "softplus": _Elementwise(jax.nn.softplus, lambda y: -jnp.expm1(-to_float32(y))),
    "exp": _Elementwise(jnp.exp, lambda y: y),
    # signed weights, for a norm of the output instead of the division by their sum
    "identity": _Elementwise(lambda x: x, jnp.ones_like),
    # as in the released Performer of the Long Range Arena
    "performer_relu": _Elementwise(lambda x: jax.nn.relu(x) + _LEAST, lambda y: y > jnp.asarray(_LEAST, y.dtype)),
}
GENERALIZED: dict[FeatureMap, Callable[[Array], Array]] = {
    "generalized_cos": jnp.cos,
    "generalized_exp": lambda x: jnp.exp(jnp.minimum(x, KEY_EXPONENT)),
    "generalized_gelu": jax.nn.gelu,
    "generalized_sigmoid": jax.nn.sigmoid,
}
"""f of generalised attention."""
RANDOM: tuple[FeatureMap, ...] = ("favor", "favor_trigonometric", "favor_cosine", *GENERALIZED)
NEGATIVE: tuple[FeatureMap, ...] = ("favor_trigonometric", "favor_cosine", "generalized_cos", "generalized_gelu")
"""Random maps whose weights can be negative."""
SIGNED: tuple[FeatureMap, ...] = (*NEGATIVE, "taylor")
"""Maps whose terms cancel in a weight, so that rounding errors are large; their features stay float32."""

QUERY_EXPONENT, KEY_EXPONENT = 50.0, 20.0
"""Maximum exponents of random features: weights up to e^70, whose sum over a million tokens is within float32's
e^88."""


@dataclass(frozen=True)
class RandomFeatures(LayerOptions):
    """Options of the random feature maps."""

    features: Count = 256
    """Number of random directions: one feature each, two each for favor_trigonometric."""
    orthogonal: bool = True
    """Draw orthogonal random directions, which lower the variance; otherwise independent ones."""
    resample_every: Natural = 1000
    """Training steps between redraws of the random directions. 0: never redrawn."""


@dataclass(frozen=True)
class FeatureOptions(RandomFeatures, WeightSumOptions):
    """Options of feature maps and normalisation."""

    feature_map: FeatureMap = "elu"
    """φ, applied to queries and keys."""
    order: Literal[1, 2] = 2
    """Order of the Taylor expansion, for taylor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map == "taylor" and self.order == 1 and self.normalizes:
            raise ConfigError(f"{self.path('normalize')}: the weights of taylor of order 1 can be negative; expected "
                              f"{self.path('normalize')} False, or {self.path('order')} 2")
        if self.feature_map == "identity" and self.normalizes:
            raise ConfigError(f"{self.path('normalize')}: the weights of identity can be negative; expected "
                              f"{self.path('normalize')} False")


def feature_width(options: FeatureOptions, head_width: int) -> int:
    """M."""
    D = head_width
    if options.feature_map == "taylor":
        return 1 + D + (D * (D + 1) // 2 if options.order == 2 else 0)
    if options.feature_map not in RANDOM:
        return D
    return options.features * (2 if options.feature_map == "favor_trigonometric" else 1)


def normal_directions(key: Array, features: int, head_width: int, *, orthogonal: bool) -> Float[Array, "R D"]:
    """Random directions w, each standard normal; float32.

    Orthogonal directions are orthogonal in groups of D, the last of which may be smaller, with the lengths of
    independent normal vectors.
    """
    normal_RD = jax.random.normal(key, (features, head_width), jnp.float32)
    if not orthogonal:
        return normal_RD
    groups = -(-features // head_width)
    q_GDD, r_GDD = jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, 1), (groups, head_width, head_width),
                                                   jnp.float32))
    # The signs of a QR decomposition are arbitrary. With those of R's diagonal, Q is uniformly distributed.
    q_GDD *= jnp.sign(jnp.diagonal(r_GDD, axis1=1, axis2=2))[:, None, :]
    unit_RD = q_GDD.swapaxes(1, 2).reshape(-1, head_width)[:features]
    return unit_RD * jnp.linalg.norm(normal_RD, axis=1, keepdims=True)


def random_directions(options: FeatureOptions, key: Array, head_width: int) -> Float[Array, "R _"]:
    """The random numbers of a map: its directions, and as a last column the phases b of favor_cosine."""
    directions_RD = normal_directions(key, options.features, head_width, orthogonal=options.orthogonal)
    if options.feature_map != "favor_cosine":
        return directions_RD
    phases_R1 = jax.random.uniform(jax.random.fold_in(key, 2), (options.features, 1), maxval=2 * math.pi)
    return jnp.concatenate([directions_RD, phases_R1], axis=1)


def features(options: FeatureOptions, x_BTHD: Float[Array, "B T H D"], directions_RD: Float[Array, "R _"] | None = None,
             *, query: bool = False) -> Float[Array, "B T H M"]:
    """φ(x), computed in float32 or better, and returned in x's dtype if φ is non-negative.

    Args:
        options: the options of φ.
        x_BTHD: queries or keys.
        directions_RD: the result of :func:`random_directions`, for random maps.
        query: whether x are queries; with ``normalize`` their features have a factor that cancels.
    """
    if options.feature_map in ELEMENTWISE:
        return _elementwise(options.feature_map, x_BTHD)
    x = to_float32(x_BTHD)
    if options.feature_map == "taylor":
        y_BTHM = _taylor(x, options.order)
    else:
        assert directions_RD is not None
        directions_RD = directions_RD.astype(x.dtype)
        if options.feature_map in GENERALIZED:
            y_BTHM = (GENERALIZED[options.feature_map](_along(x, directions_RD)) + _LEAST) * options.features**-0.5
        else:
            y_BTHM = _favor(x, directions_RD, options.feature_map, scaled=query and options.normalizes)
    return y_BTHM if options.feature_map in SIGNED else y_BTHM.astype(x_BTHD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _elementwise(feature_map: FeatureMap, x_BTHD: Array) -> Array:
    # Without the barrier, a CPU recomputes φ for each use, and a GPU also keeps it in float32 for the backward pass: by
    # an estimate 1.8 of 123 ms and 5 GiB of a step of 65,536 tokens at 124M.
    return lax.optimization_barrier(rounded(ELEMENTWISE[feature_map].function(to_float32(x_BTHD)), x_BTHD.dtype))


def _elementwise_forward(feature_map: FeatureMap, x_BTHD: Array) -> tuple[Array, Array]:
    y_BTHM = _elementwise(feature_map, x_BTHD)
    return y_BTHM, y_BTHM


def _elementwise_backward(feature_map: FeatureMap, y_BTHM: Array, dy_BTHM: Array) -> tuple[Array]:
    return rounded(ELEMENTWISE[feature_map].slope(y_BTHM) * to_float32(dy_BTHM), dy_BTHM.dtype),


_elementwise.defvjp(_elementwise_forward, _elementwise_backward)


def _along(x_BTHD: Array, directions_RD: Array) -> Array:
    """w·x̂ of every direction."""
    D = x_BTHD.shape[-1]
    # An error in an exponent is a relative error of the weight: no reduced precision here.
    return jnp.einsum("bthd,rd->bthr", x_BTHD * D**-0.25, directions_RD[:, :D], precision=lax.Precision.HIGHEST)


def _favor(x_BTHD: Array, directions_RD: Array, feature_map: FeatureMap, *, scaled: bool) -> Array:
    R, D = len(directions_RD), x_BTHD.shape[-1]
    along_BTHR = _along(x_BTHD, directions_RD)
    half_BTH1 = 0.5 * D**-0.5 * jnp.sum(x_BTHD**2, axis=-1, keepdims=True)
    exponent = along_BTHR - half_BTH1 if feature_map == "favor" else half_BTH1
    if scaled:
        exponent += QUERY_EXPONENT - lax.stop_gradient(exponent.max(axis=-1, keepdims=True))
    else:
        exponent = jnp.minimum(exponent, KEY_EXPONENT)
    size = jnp.exp(exponent - 0.5 * math.log(R))
    if feature_map == "favor":
        return size
    if feature_map == "favor_cosine":
        return size * math.sqrt(2) * jnp.cos(along_BTHR + directions_RD[None, None, None, :, D])
    return size * jnp.concatenate([jnp.cos(along_BTHR), jnp.sin(along_BTHR)], axis=-1)


def _taylor(x_BTHD: Array, order: int) -> Array:
    D = x_BTHD.shape[-1]
    x_BTHD *= D**-0.25
    terms = [jnp.ones_like(x_BTHD[..., :1]), x_BTHD]
    if order == 2:
        # (q̂·k̂)²/2 is a sum over pairs of dimensions, twice each except the squares.
        i, j = np.triu_indices(D)
        scale = np.where(i == j, math.sqrt(0.5), 1.0).astype(x_BTHD.dtype)
        terms.append(x_BTHD[..., i] * x_BTHD[..., j] * scale[None, None, None, :])
    return jnp.concatenate(terms, axis=-1)
