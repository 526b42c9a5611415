"""Heads of a language model: the logits of the next token, and losses that never materialise all logits."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels import cross_entropy
from kernels.layer_norm import Norm, layer_norm
from kernels.mixed_precision import product, to_float32
from kernels.partition import by_tokens
from kernels.projection import unembed

LOGISTICS = 10
"""K: logistics of a mixture."""
LEAST_LOG_SCALE = -7.0
NEVER = -1e30
"""Log-probability of the separator under a mixture: finite, and zero in a softmax."""
BLOCK_TOKENS = 1024
"""Tokens whose levels :meth:`LogisticsHead.score` computes at once."""


class Head(ABC):
    """The final LayerNorm, if any, and the projection to logits. Targets below 0 are not scored."""

    @abstractmethod
    def logits(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Logits, float32."""

    @abstractmethod
    def loss_sum(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Float[Array, ""]:
        """Sum of −log softmax(logits)[target], in nats."""

    @abstractmethod
    def count_right(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Int[Array, ""]:
        """Number of targets with the highest logit; ties go to the lowest id. Not differentiable."""

    @abstractmethod
    def score(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"],
              ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """Of each target its loss, and whether :meth:`count_right` counts it; 0 and False below 0. Not
        differentiable."""


@dataclass(frozen=True)
class TiedHead(Head):
    """GPT-2's head, tied to the token embedding: logits are norm(x) · embeddingᵀ, or x · embeddingᵀ without a norm."""

    norm: Norm | None
    weight_VE: Float[Array, "V E"]

    def logits(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        if self.norm is None:
            return product("bte,ve->btv", x_BTE, self.weight_VE.astype(x_BTE.dtype))
        return unembed(x_BTE, self.weight_VE, self.norm)

    def loss_sum(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Float[Array, ""]:
        return cross_entropy.cross_entropy(*self._operands(x_BTE), targets_BT)

    def count_right(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Int[Array, ""]:
        return cross_entropy.count_right(*self._operands(x_BTE), targets_BT)

    def score(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"],
              ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        return cross_entropy.score(*self._operands(x_BTE), targets_BT)

    def _operands(self, x_BTE: Array) -> tuple[Array, Array]:
        return x_BTE if self.norm is None else layer_norm(x_BTE, *self.norm), self.weight_VE


@dataclass(frozen=True)
class LogisticsHead(Head):
    """A mixture of discretised logistics over ordered levels, by :func:`log_probability`, computed in float32.

    The vocabulary is the L levels and the separator, which has no probability. Logits of levels are log-probabilities.
    """

    norm: Norm
    weight_EP: Float[Array, "E P"]
    bias_P: Float[Array, " P"]
    levels: int
    """L."""

    def logits(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        return self._logits(self._mixtures(x_BTE))

    def loss_sum(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Float[Array, ""]:
        return jnp.sum(self._losses(self._mixtures(x_BTE), targets_BT))

    def count_right(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"]) -> Int[Array, ""]:
        return jnp.sum(self.score(x_BTE, targets_BT)[1], dtype=jnp.int32)

    def score(self, x_BTE: Float[Array, "B T E"], targets_BT: Int[Array, "B T"],
              ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        def score_local(mixture_BTP: Array, targets_BT: Array) -> tuple[Array, Array]:
            best = lax.map(lambda mixture_P: jnp.argmax(self._logits(mixture_P)),
                           mixture_BTP.reshape(-1, mixture_BTP.shape[2]), batch_size=BLOCK_TOKENS)
            return self._losses(mixture_BTP, targets_BT), best.reshape(targets_BT.shape) == targets_BT

        loss_BT, right_BT = by_tokens(score_local, summed=(False, False))(self._mixtures(x_BTE), targets_BT)
        return loss_BT, right_BT

    def _mixtures(self, x_BTE: Array) -> Array:
        """The parameters of each mixture, (B, T, P)."""
        norm = self.norm._replace(dtype=jnp.promote_types(jnp.float32, self.norm.dtype))
        x_BTE = to_float32(layer_norm(x_BTE, *norm))
        # A narrow logistic magnifies the rounding of its mean.
        return product("bte,ep->btp", x_BTE, self.weight_EP, exact=True) + self.bias_P[None, None]

    def _losses(self, mixture_BTP: Array, targets_BT: Array) -> Array:
        log_p_BT = log_probability(mixture_BTP, jnp.maximum(targets_BT, 0), self.levels)
        return jnp.where(targets_BT >= 0, -log_p_BT, 0)

    def _logits(self, mixtures: Array) -> Array:
        """Logits (…, V) of mixtures (…, P)."""
        log_p = log_probability(mixtures[..., None, :], jnp.arange(self.levels), self.levels)
        return jnp.pad(log_p, [(0, 0)] * (log_p.ndim - 1) + [(0, 1)], constant_values=NEVER)


def log_probability(mixtures: Float[Array, "... P"], level: Int[Array, "..."], levels: int) -> Float[Array, "..."]:
    """Log-probability of a level under a mixture of discretised logistics.

    Salimans et al., "PixelCNN++", 2017. The L levels lie in [−1, 1], 2 / (L − 1) apart, and each has the probability
    between the midpoints to its neighbours; the first and the last level have the tails. With σ the logistic function,
    a bin from a to b, in units of the scale from the mean, has

        σ(b) − σ(a) = σ(b) σ(−a) (1 − exp(a − b)),

    whose logarithm is accurate everywhere, in the tails and for narrow bins too.

    Args:
        mixtures: P = 3 K: logits of the mixture, means, and log-scales, of which those below −7 count as −7.
        level: 0 to L − 1; broadcast against the other dimensions of ``mixtures``.
        levels: L, at least 2.
    """
    logits, means, log_scales = jnp.split(mixtures, 3, axis=-1)
    log_scales = jnp.maximum(log_scales, LEAST_LOG_SCALE)
    level = jnp.expand_dims(level, (*range(mixtures.ndim - 1 - level.ndim), -1))
    width, rates = 2 / (levels - 1), jnp.exp(-log_scales)
    upper = ((level + 0.5) * width - 1 - means) * rates
    lower = ((level - 0.5) * width - 1 - means) * rates
    first, last = level == 0, level == levels - 1
    log_p = (jnp.where(last, 0, jax.nn.log_sigmoid(upper)) + jnp.where(first, 0, jax.nn.log_sigmoid(-lower))
             + jnp.where(first | last, 0, _log_one_minus_exp(math.log(width) - log_scales)))
    return jax.nn.logsumexp(logits + log_p, axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def _log_one_minus_exp(log_w: Array) -> Array:
    """log(1 − exp(−w)) of log w."""
    least = 1e-3  # of w; below it the next term of the series, w² / 24, is rounded away
    w = jnp.exp(jnp.maximum(log_w, math.log(least)))
    return jnp.where(log_w < math.log(least), log_w - jnp.exp(log_w) / 2, jnp.log(-jnp.expm1(-w)))
