"""The style of curves: a colour for each mode, the same on every page, and a dash pattern for each set-up."""

import colorsys
import hashlib
from collections.abc import Sequence

COLOURS = {"softmax": "#d55e00", "chunked": "#0072b2", "linear": "#009e73", "local": "#cc79a7", "gated": "#117733",
           "gated_delta": "#882255", "power": "#e69f00", "window": "#56b4e9"}
"""Colours that are easy to distinguish; other modes get a hue from their name."""
DASHES = {  # Plotly's name of a dash pattern: Matplotlib's, and its marker by Plotly's name and by Matplotlib's
    "solid": ("-", "circle", "o"),
    "dash": ("--", "square", "s"),
    "dot": (":", "diamond", "D"),
    "dashdot": ("-.", "triangle-up", "^"),
}


def colour(attention: str) -> str:
    """The colour of an attention mode, the same on every page; other modes get a hue from their name."""
    if attention in COLOURS:
        return COLOURS[attention]
    hue, lightness = hashlib.sha256(attention.encode()).digest()[:2]
    red, green, blue = colorsys.hls_to_rgb(hue / 256, 0.3 + 0.3 * lightness / 256, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def dashes(attentions: Sequence[str]) -> list[str]:
    """A dash pattern for each, different for those of the same attention."""
    return [list(DASHES)[list(attentions[:i]).count(attention) % len(DASHES)] for i, attention in enumerate(attentions)]
