"""The style of curves: a colour for each mode, the same on every page, and a dash pattern for each set-up."""

import colorsys
import hashlib
from collections import Counter
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
    """The colour of an attention mode, or of the main mode of a pattern, the same on every page."""
    mode = main_mode(attention)
    return COLOURS.get(mode) or hue_of(mode)


def hue_of(name: str) -> str:
    """A colour that depends on a name alone."""
    hue, lightness = hashlib.sha256(name.encode()).digest()[:2]
    red, green, blue = colorsys.hls_to_rgb(hue / 256, 0.3 + 0.3 * lightness / 256, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def main_mode(attention: str) -> str:
    """The mode of most layers of a pattern, the first of those that have as many."""
    return Counter(attention.split(",")).most_common(1)[0][0]


def dashes(attentions: Sequence[str]) -> list[str]:
    """A dash pattern for each, different for those of the same colour."""
    modes = [main_mode(attention) for attention in attentions]
    return [list(DASHES)[modes[:i].count(mode) % len(DASHES)] for i, mode in enumerate(modes)]
