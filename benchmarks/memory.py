"""Memory of cards, and whether a program fits. By default jax reserves three quarters of the memory of a card."""

CARDS = {
    "h200": 143_771,
    "h100-80gb": 81_559,
    "a100-80gb": 81_920,
    "a100-40gb": 40_960,
    "rtx4090": 24_564,
    "l4": 23_034,
}
"""Memory in MiB, as ``nvidia-smi`` shows it."""
JAX_SHARE = 0.75
"""Share of the memory that jax reserves by default."""
MOST_SHARE = 0.95
"""Share that jax can reserve: the driver and the libraries need the rest."""


def verdict(peak: int, card_bytes: int) -> str:
    """Whether a peak fits a card."""
    if peak <= JAX_SHARE * card_bytes:
        return "fits"
    if peak <= MOST_SHARE * card_bytes:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_SHARE} in the environment"
    return "does not fit"


def verdicts(peak: int) -> str:
    """The cards by verdict, in a line."""
    cards: dict[str, list[str]] = {}
    for card, mebibytes in CARDS.items():
        cards.setdefault(verdict(peak, mebibytes * 2**20), []).append(card)
    return "; ".join(f"{said}: {', '.join(names)}" for said, names in cards.items())
