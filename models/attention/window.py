"""``window``: softmax attention to the last W tokens.

Beltagy, Peters, Cohan: "Longformer: The Long-Document Transformer", 2020; the mode ``longformer`` adds global tokens.
"""

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array

from kernels.grouped_attention import one_group
from kernels.softmax_attention import pick_implementation, softmax_attention
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention
from models.attention.window_cache import WindowCache
from support.ranges import Count


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of window attention."""

    window: Count = 1024
    """Window length W, the token itself included."""
    form: Literal["cudnn", "blockwise", "materialised"] | None = None
    """Implementation. None: the fastest on this device."""


class Attention(SelfAttention):
    """Window attention; decoding keeps the window."""

    length_fields = ("window",)
    implementation_fields = ("form",)
    decode_state = "window"
    splits_context = True

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return softmax_attention(q_BTHD, k_BTHD, v_BTHD, window=self.config.window, segment_ids_BT=segment_ids_BT,
                                 implementation=self.config.form)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> WindowCache:
        return WindowCache.empty(batch, self.heads, self.config.window, self.head_width, dtype)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: WindowCache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, WindowCache]:
        W = self.config.window
        keys, cache = cache.append(k_BTHD, v_BTHD, lengths_B)

        def sees(t_B1T: Array, s_B1S: Array) -> Array:
            t_B1T1, s_B11S = t_B1T[..., :, None], s_B1S[..., None, :]
            return (s_B11S >= 0) & (s_B11S <= t_B1T1) & (s_B11S > t_B1T1 - W)

        y_BTHD = one_group(q_BTHD, keys.k_BHSD, keys.v_BHSD, keys.query_positions_BT, keys.positions_BS, sees)
        # Tokens before the window are invisible, so that the count can saturate.
        cache = cache._replace(seen_B=cache.seen_B.clip(max=W))
        return y_BTHD.astype(v_BTHD.dtype), cache

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        W = min(self.config.window, context)
        pairs = W * context - W * (W - 1) // 2
        return 4 * tokens * pairs * self.heads * self.head_width // context

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        return self.config.form or pick_implementation(dtype, self.head_width, segments=segments,
                                                       window=self.config.window)
